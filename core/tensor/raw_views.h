// Views without gradients: other geometry over the same storage. The result shares the source's
// version counter. Public, differentiable views are in autograd/ops.h; these serve kernels,
// backward formulas and upper floors that manage memory.
#pragma once

#include <optional>

#include <tessera/core/tensor/tensor.h>

namespace tessera::raw {

// Any geometry inside the storage. Throws ShapeError where it would reach outside.
Tensor as_strided(const Tensor& x, const Shape& shape, const Shape& strides, int64_t offset);
// Shares elements; history, grad and placement are left behind. The version counter is shared.
Tensor alias(const Tensor& x);
// As alias with a version counter of its own: parameters in one flat buffer (see VersionCounter).
Tensor as_parameter(const Tensor& x);
// Same elements read as another dtype of the same size.
Tensor reinterpret(const Tensor& x, DType dtype);

Tensor view(const Tensor& x, const Shape& shape);  // one size may be -1; throws ShapeError
bool can_view(const Tensor& x, const Shape& shape);
Tensor transpose(const Tensor& x, int64_t dim0, int64_t dim1);
Tensor permute(const Tensor& x, const Shape& dims);
Tensor expand(const Tensor& x, const Shape& shape);  // -1 keeps a size
Tensor squeeze(const Tensor& x, int64_t dim);
Tensor squeeze_all(const Tensor& x);
Tensor unsqueeze(const Tensor& x, int64_t dim);
Tensor narrow(const Tensor& x, int64_t dim, int64_t start, int64_t length);
Tensor select(const Tensor& x, int64_t dim, int64_t index);
// Python's x[start:end:step] in one dimension, step >= 1; bounds are clamped as in Python.
Tensor slice(const Tensor& x, int64_t dim, std::optional<int64_t> start, std::optional<int64_t> end,
             int64_t step);

}  // namespace tessera::raw
