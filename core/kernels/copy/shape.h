// Kernels that join, mirror and pad. Any dtype; results are contiguous.
#pragma once

#include <span>
#include <vector>

#include <tessera/core/tensor/tensor.h>

namespace tessera::kernels {

// Joins tensors of one dtype along `dim`; their other sizes agree. Rows move with memcpy.
Tensor cat(std::span<const Tensor> tensors, int dim);

// result[.., i, ..] = x[.., maps[d][i], ..]: each dimension d is read through a list of indices in
// [0, size), or as it is if its list is empty. Serves flip and padding.
Tensor take(const Tensor& x, std::span<const std::vector<int64_t>> maps);
// The transpose of take: adds x's elements, in row-major order, to the elements of `shape` from
// which take would read them; f32 sums for f16 and bf16. Floating or integer dtypes.
Tensor take_transposed(const Tensor& x, std::span<const std::vector<int64_t>> maps,
                       const Shape& shape);

// Zeros of `shape` with x in the slice that starts at `start` in dimension `dim` and takes every
// `step`-th place: the transpose of slice.
Tensor embed_slice(const Tensor& x, const Shape& shape, int dim, int64_t start, int64_t step);

// A tensor's geometry in its storage: shape, strides and offset.
struct Geometry {
  Shape shape, strides;
  int64_t offset = 0;
};
// The linear map of as_strided and its transpose, between tensors with geometries in one storage:
// result element j is the sum of x's elements with the same storage index (x may overlap itself).
Tensor restride(const Tensor& x, const Geometry& from, const Geometry& to);

}  // namespace tessera::kernels
