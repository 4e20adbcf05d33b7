// Dropout (Srivastava et al. 2014).
#pragma once

#include <memory>

#include <tessera/autograd/ops.h>
#include <tessera/nn/describe.h>
#include <tessera/nn/module.h>

namespace tessera::nn {

// While training, zeroes elements with probability p and scales the others by 1 / (1 - p); passes x
// on in evaluation. The mask is not stored: backward draws it again.
class Dropout : public Module<Dropout> {
 public:
  explicit Dropout(double p = 0.5) : p(p) {
    TS_CHECK(p >= 0 && p <= 1, "Dropout", "p must be in [0, 1]; got ", p);
  }
  Tensor forward(const Tensor& x) { return dropout(x, p, is_training()); }
  std::string extra_repr() const override { return detail::describe("p", p); }
  std::unique_ptr<Dropout> remake() const { return std::make_unique<Dropout>(p); }

  const double p;
};

}  // namespace tessera::nn
