// Elementwise kernels: a functor of core/functors.h applied to whole tensors.
//
//     Tensor y = kernels::unary<fn::Gelu>(x);
//     Tensor z = kernels::binary<fn::Add>(a, b);        // broadcasts; a or b may be a number
//     kernels::binary_into<fn::Mul>(a, a, 0.5);          // in place
//
// Operands have any shape that broadcasts, any strides and any dtype. They are calculated in the
// lane of the `common` dtype (float for f32 and narrower, double, int64_t), by default that of
// torch's promotion: dimensions outweigh zero-dim tensors, which outweigh numbers. The result has
// the common dtype, bool for predicates. A number keeps its precision next to a bf16 tensor.
//
// The result has the order of dimensions of the first operand of its shape that is dense, else it
// is contiguous. `_into` writes to `out`, which has the broadcast shape and may be one of the
// operands; an operand that overlaps it in another way, or is transposed to it, is copied first.
// Meta operands give a meta result. Parallel over elements from 32K on. Activations cost 1 to 1.5
// ns per element and core, simple formulas the memory's bandwidth. Throws ShapeError, DTypeError (a
// functor without integer form, fp8 arithmetic), DeviceError.
#pragma once

#include <initializer_list>
#include <optional>
#include <span>

#include <tessera/core/functors.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera::kernels {

// A tensor or a number as an argument; does not own the tensor.
class Operand {
 public:
  Operand(const Tensor& tensor) : tensor_(&tensor) {}
  Operand(const Scalar& scalar) : scalar_(scalar) {}
  Operand(int value) : scalar_(value) {}
  Operand(int64_t value) : scalar_(value) {}
  Operand(double value) : scalar_(value) {}
  bool is_tensor() const { return tensor_ != nullptr; }
  const Tensor& tensor() const { return *tensor_; }
  const Scalar& scalar() const { return scalar_; }

 private:
  const Tensor* tensor_ = nullptr;
  Scalar scalar_ = 0;
};

// torch.result_type of several operands. Throws DTypeError if fp8 meets another dtype.
DType promote(std::span<const Operand> operands);
DType promote(std::initializer_list<Operand> operands);

namespace detail {

struct Loops;  // elementwise_loops.h
template <class F>
const Loops& loops_of();
Tensor elementwise(const Loops& loops, const void* functor, std::initializer_list<Operand> operands,
                   std::optional<DType> common);
void elementwise_into(const Loops& loops, const void* functor, const Tensor& out,
                      std::initializer_list<Operand> operands, std::optional<DType> common);

}  // namespace detail

template <class F>
Tensor unary(const Tensor& x, const F& f = {}, std::optional<DType> common = {}) {
  return detail::elementwise(detail::loops_of<F>(), &f, {x}, common);
}
template <class F>
Tensor binary(const Operand& a, const Operand& b, const F& f = {},
              std::optional<DType> common = {}) {
  return detail::elementwise(detail::loops_of<F>(), &f, {a, b}, common);
}
// Where's condition comes first and takes no part in promotion.
template <class F>
Tensor ternary(const Operand& a, const Operand& b, const Operand& c, const F& f = {},
               std::optional<DType> common = {}) {
  return detail::elementwise(detail::loops_of<F>(), &f, {a, b, c}, common);
}

// The result is converted to the dtype of `out`; the op decides whether that is allowed.
template <class F>
void unary_into(const Tensor& out, const Tensor& x, const F& f = {},
                std::optional<DType> common = {}) {
  detail::elementwise_into(detail::loops_of<F>(), &f, out, {x}, common);
}
template <class F>
void binary_into(const Tensor& out, const Operand& a, const Operand& b, const F& f = {},
                 std::optional<DType> common = {}) {
  detail::elementwise_into(detail::loops_of<F>(), &f, out, {a, b}, common);
}
template <class F>
void ternary_into(const Tensor& out, const Operand& a, const Operand& b, const Operand& c,
                  const F& f = {}, std::optional<DType> common = {}) {
  detail::elementwise_into(detail::loops_of<F>(), &f, out, {a, b, c}, common);
}

}  // namespace tessera::kernels
