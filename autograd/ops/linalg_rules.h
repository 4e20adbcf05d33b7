// What the ops of linear algebra share.
#pragma once

#include <tessera/autograd/op.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera::linalg {

// Each matrix transposed.
inline Tensor mt(const Tensor& x) { return transpose(x, -2, -1); }
inline Shape leading(const Tensor& x) { return x.shape().slice(0, x.dim() - 2); }

inline void check_matrices(const Op& op, const char* name, const Tensor& x) {
  TS_CHECK_SHAPE(x.dim() >= 2, op, "expects ", name,
                 " as a matrix or a batch of them, [..., m, n]; got ", x);
}
inline void check_square(const Op& op, const char* name, const Tensor& x) {
  check_matrices(op, name, x);
  TS_CHECK_SHAPE(x.size(-1) == x.size(-2), op, "expects square matrices; got ", name, ", ",
                 x.size(-2), " by ", x.size(-1), " in ", x);
}

}  // namespace tessera::linalg
