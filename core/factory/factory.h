// Tensors from nothing, from values, and from memory that someone else owns. No gradients here;
// the public creation functions of autograd/ops.h stand on these.
#pragma once

#include <concepts>
#include <functional>
#include <initializer_list>
#include <ranges>
#include <span>

#include <tessera/core/kernels/copy/full.h>
#include <tessera/core/tensor/empty.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera {

struct TensorOptions {
  DType dtype = kF32;
  Device device = kCpu;
};

namespace raw {

// start, start + step... of `size` elements: floating values are calculated in f64 and rounded once
// (torch rounds the first number of each vector register too).
Tensor arange(const Scalar& start, const Scalar& step, int64_t size, DType dtype,
              const Device& device = kCpu);
// `size` numbers from start to end, both included; each half counts from its own end.
Tensor linspace(double start, double end, int64_t size, DType dtype, const Device& device = kCpu);
// Ones on the main diagonal.
Tensor eye(int64_t rows, int64_t columns, DType dtype, const Device& device = kCpu);

// Shares memory of the caller, who says bump_version() after own writes; `release` runs when the
// last holder goes. Strides of elements, row-major by default. Throws ShapeError, ValueError.
Tensor from_blob(void* data, const Shape& shape, DType dtype, std::function<void()> release = {});
Tensor from_blob(void* data, const Shape& shape, const Shape& strides, DType dtype,
                 std::function<void()> release = {});

}  // namespace raw

// The values, converted to the dtype: tensor({1, 2, 3}) has one dimension and is f32,
// tensor({1, 2, 3, 4}, {2, 2}) and tensor(values, {2, 3}) are row-major lists, tensor(values) has
// one dimension. Throws ShapeError where the numbers differ.
Tensor tensor(std::initializer_list<Scalar> values, const Shape& shape, DType dtype = kF32);
Tensor tensor(std::span<const double> values, const Shape& shape, DType dtype = kF32);
Tensor tensor(std::span<const float> values, const Shape& shape, DType dtype = kF32);
Tensor tensor(std::span<const int64_t> values, const Shape& shape, DType dtype = kI64);
Tensor tensor(std::span<const int32_t> values, const Shape& shape, DType dtype = kI32);
// Without a shape, and optionally with a dtype, from a list, vector, array or span of the types
// above. It is a template so that {} is a shape.
template <std::same_as<DType>... MaybeDType>
requires(sizeof...(MaybeDType) <= 1) Tensor
    tensor(std::initializer_list<Scalar> values, MaybeDType... dtype) {
  return tensor(values, Shape{static_cast<int64_t>(values.size())}, dtype...);
}
template <std::ranges::contiguous_range Values, std::same_as<DType>... MaybeDType>
requires(sizeof...(MaybeDType) <= 1) Tensor tensor(const Values& values, MaybeDType... dtype) {
  const std::span<const std::ranges::range_value_t<Values>> list(values);
  return tensor(list, Shape{static_cast<int64_t>(list.size())}, dtype...);
}
Tensor scalar_tensor(const Scalar& value, DType dtype, const Device& device = kCpu);
// One number has no dimensions: tensor(3.0) is f32, tensor(3) i64, tensor(true) bool.
Tensor tensor(const Scalar& value);
template <std::same_as<DType> OneDType>
Tensor tensor(const Scalar& value, OneDType dtype) {
  return scalar_tensor(value, dtype);
}

}  // namespace tessera
