// What all elementwise ops share: checks with the op's name, and gradients that are one kernel in
// an ordinary backward and a composition of ops where backward itself is recorded.
#pragma once

#include <string_view>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/differentiable.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/kernels/elementwise/elementwise.h>

namespace tessera {

inline void check_arithmetic(const Op& op, const Tensor& x, const char* name = "the input") {
  check_defined(op, name, x);
  TS_CHECK_DTYPE(!is_fp8(x.dtype()), op, "fp8 is storage only; got ", x,
                 "; convert with to(dtype)");
}
inline void check_arithmetic(const Op& op, const Tensor& a, const Tensor& b) {
  check_arithmetic(op, a, "the first operand");
  check_arithmetic(op, b, "the second operand");
  if (!(a.shape() == b.shape())) broadcast_shapes(a.shape(), b.shape(), op.name);
}
inline void check_arithmetic(const Op& op, const Tensor& a, const Tensor& b, const Tensor& c) {
  check_arithmetic(op, a, b);
  check_arithmetic(op, c, "the third operand");
  check_arithmetic(op, a, c);
  check_arithmetic(op, b, c);
}
inline void check_not_bool(const Op& op, const Tensor& x, std::string_view instead) {
  TS_CHECK_DTYPE(x.dtype() != kBool, op, "is not defined for bool; got ", x, "; use ", instead);
}

inline void check_integers(const Op& op, const Tensor& x, const char* name = "the input") {
  check_defined(op, name, x);
  TS_CHECK_DTYPE(!is_floating(x.dtype()) && !is_fp8(x.dtype()), op,
                 "is defined for integers and bool; got ", x, "; convert with to(dtype)");
}

// Where an in-place op of torch's kind may store a result of `common` dtype.
inline void check_storable(const Op& op, const Tensor& target, DType common) {
  const DType dtype = target.dtype();
  TS_CHECK_DTYPE(is_floating(dtype) || !is_floating(common), op, "in place, the result is ", common,
                 " and cannot be stored in ", target, "; use the form that returns a new tensor");
  TS_CHECK_DTYPE(dtype != kBool || common == kBool, op, "in place, the result is ", common,
                 " and cannot be stored in ", target, "; use the form that returns a new tensor");
}
inline void check_fits(const Op& op, const Tensor& target, const Tensor& other) {
  TS_CHECK_SHAPE(broadcastable_to(other.shape(), target.shape()), op, "in place, the operand ",
                 other, " does not broadcast to ", target,
                 "; use the form that returns a new tensor");
}

// The dtype of ops whose results are not integers: that of x, f32 for integers and bool.
constexpr DType floating_dtype(DType dtype) { return is_floating(dtype) ? dtype : kF32; }

// Forward of a one-input op.
template <class F>
Tensor apply(Inputs in) {
  return kernels::unary<F>(in[0]);
}
template <class F>
Tensor apply_floating(Inputs in) {
  return kernels::unary<F>(in[0], {}, floating_dtype(in[0].dtype()));
}

// dx from dy and x or y. `composed` says the same in ops, for derivatives of backward.
template <class F, class Composed>
Tensor gradient(const Tensor& dy, const Tensor& saved, const F& f, Composed&& composed) {
  if (grad_enabled()) return composed(dy, saved);
  return kernels::binary<F>(dy, saved, f);
}

}  // namespace tessera
