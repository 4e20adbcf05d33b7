// How the elements of a meta tensor would have been filled.
//
// A fill of a meta tensor has nothing to write; it is remembered instead, with its storage, so that
// whoever gives the tensor memory can do it then, for all elements or for the part that a rank
// holds (nn/materialise.h). fill_, uniform_, normal_, bernoulli_, creation functions and nn::init
// remember what they did; views count, as a row that is set to zero. What any other op writes is
// not known, and takes the place of what was: it is seen by the tensor's version.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include <tessera/core/tensor/tensor.h>

namespace tessera {

// Writes elements [first, first + piece.numel()) of a tensor, counted row by row, into `piece`: of
// one dimension, contiguous, of the tensor's dtype and any device but meta. Another cut of the
// tensor into pieces gives the same elements the same bits.
using FillRange = std::function<void(const Tensor& piece, int64_t first)>;

namespace detail {
void remember_fill(const Tensor& x, FillRange fill);
}
// `x` has just been filled and has its new version; `fill` becomes a FillRange. Nothing for a
// tensor with elements. A view that is not contiguous counts as written by an op that is not known.
template <class Fill>
void remember_fill(const Tensor& x, Fill&& fill) {
  if (x.is_meta()) detail::remember_fill(x, FillRange(std::forward<Fill>(fill)));
}

// `to`, a meta tensor that nobody has filled, will have the values that `from` would have: it has
// the same elements in another dtype, or is a part of it by its placement. A storage remembers the
// fills of one tensor: `to` is all that its own holds. Nothing where `to` has elements, is a view,
// or what `from` would have is not known.
void pass_initial_values(const Tensor& from, const Tensor& to);

// Why the values of a meta tensor are not known: "nothing has filled it"; empty where they are.
std::string unknown_initial_values(const Tensor& x);

// The elements of the storage of `x`, a meta tensor of known values, into `elements`: of one
// dimension, contiguous, of x's dtype. Of a part: its own elements alone. Beside them a conversion
// takes 1 MiB where the dtype has changed since the fill.
void write_initial_values(const Tensor& x, const Tensor& elements);

}  // namespace tessera
