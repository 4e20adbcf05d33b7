// Tensors from nothing, from values, and from memory that someone else owns. No gradients here;
// the public creation functions of autograd/ops.h stand on these.
#pragma once

#include <functional>
#include <initializer_list>
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
// tensor(values, {2, 3}) copies a row-major list. Throws ShapeError where the numbers differ.
Tensor tensor(std::initializer_list<double> values, DType dtype = kF32);
Tensor tensor(std::span<const double> values, const Shape& shape, DType dtype = kF32);
Tensor tensor(std::span<const float> values, const Shape& shape, DType dtype = kF32);
Tensor tensor(std::span<const int64_t> values, const Shape& shape, DType dtype = kI64);
Tensor tensor(std::span<const int32_t> values, const Shape& shape, DType dtype = kI32);
Tensor scalar_tensor(const Scalar& value, DType dtype, const Device& device = kCpu);

}  // namespace tessera
