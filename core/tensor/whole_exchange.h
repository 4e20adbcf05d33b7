// Tensors of which ranks hold parts, each of them whole on one rank for as long as something is
// calculated that needs all of it: an optimizer that works on matrices (optim/muon.h). Whoever
// knows the ranks implements it (distributed/mesh/matrix_exchange.h); PartHolders makes one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include <tessera/core/tensor/tensor.h>

namespace tessera {

class WholeExchange {
 public:
  virtual ~WholeExchange() = default;

  // Whether tensor i, in the order of the list that this was made for, is whole here.
  virtual bool owns(size_t i) const = 0;
  // parts[i]: this rank's part of tensor i, plain and contiguous; all of one dtype and device. The
  // tensors that this rank owns, of the whole shape, the others undefined. Collective, in one
  // round.
  virtual TensorList gather(std::span<const Tensor> parts) = 0;
  // The way back: wholes[i], contiguous, of the tensors that this rank owns, into parts[i].
  // Collective, in one round.
  virtual void scatter(std::span<const Tensor> wholes, std::span<const Tensor> parts) = 0;

  // Collectives of a gather(), and as many of a scatter(): none where no tensor is cut.
  virtual int rounds() const = 0;
  // Elements that this rank sends to others in a gather() and in a scatter().
  virtual int64_t gathers() const = 0;
  virtual int64_t scatters() const = 0;
};

}  // namespace tessera
