// Records how the elements of a meta tensor would have been filled.
//
// A fill of a meta tensor has nothing to write; it is recorded with its storage, and replayed when
// the tensor gets memory, for all elements or for a rank's shard (nn/materialise.h). fill_,
// uniform_, normal_, bernoulli_, creation functions and nn::init are recorded, also on views, such
// as a row that is set to zero. The write of any other op is not known and invalidates the record,
// which the tensor's version shows.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include <tessera/core/tensor/tensor.h>

namespace tessera {

// Writes elements [first, first + piece.numel()) of a tensor in row-major order into `piece`, which
// is 1-D, contiguous, of the tensor's dtype and on any device but meta. The elements have the same
// bits for any division into pieces.
using FillRange = std::function<void(const Tensor& piece, int64_t first)>;

namespace detail {
void remember_fill(const Tensor& x, FillRange fill);
}
// Called after a fill of `x`, at its new version; `fill` becomes a FillRange. No effect on a tensor
// with memory. A view that is not contiguous counts as written by an unknown op.
template <class Fill>
void remember_fill(const Tensor& x, Fill&& fill) {
  if (x.is_meta()) detail::remember_fill(x, FillRange(std::forward<Fill>(fill)));
}

// `to`, a meta tensor without fills, will have the values of `from`: it has the same elements in
// another dtype, or is a shard of it (or of the whole that both are shards of) by its placement. A storage
// records the fills of one tensor:
// `to` must be its only one. No effect if `to` has memory, is a view, or the values of `from` are
// not known.
void pass_initial_values(const Tensor& from, const Tensor& to);

// Why the values of a meta tensor are not known: "nothing has filled it"; empty if they are.
std::string unknown_initial_values(const Tensor& x);

// Writes the elements of the storage of `x`, a meta tensor of known values, into `elements`: 1-D,
// contiguous, of x's dtype. For a shard only its own elements. A conversion needs 1 MiB more if the
// dtype has changed since the fill.
void write_initial_values(const Tensor& x, const Tensor& elements);

}  // namespace tessera
