#include <tessera/core/tensor/raw_views.h>

#include <algorithm>

namespace tessera::raw {
namespace {

Tensor with_geometry(const Tensor& x, const Shape& shape, const Shape& strides, int64_t offset) {
  auto* impl = new TensorImpl(x.storage(), shape, strides, offset, x.dtype());
  impl->version = x.impl()->version;
  return Tensor(impl);
}

}  // namespace

Tensor as_strided(const Tensor& x, const Shape& shape, const Shape& strides, int64_t offset) {
  TS_CHECK_SHAPE(shape.size() == strides.size(), "as_strided", "shape ", shape, " and strides ",
                 strides, " must have the same length");
  checked_numel(shape, "as_strided");
  for (int64_t stride : strides) {
    TS_CHECK_SHAPE(stride >= 0, "as_strided", "strides must not be negative; got ", strides);
  }
  const int64_t extent = storage_extent(shape, strides);
  const int64_t available = x.storage()->bytes() / size_of(x.dtype());
  TS_CHECK_SHAPE(offset >= 0 && (extent == 0 || offset + extent <= available), "as_strided",
                 "shape ", shape, ", strides ", strides, " at offset ", offset,
                 " reach outside a storage of ", available, " elements");
  return with_geometry(x, shape, strides, offset);
}

Tensor alias(const Tensor& x) {
  Tensor result = with_geometry(x, x.shape(), x.strides(), x.offset());
  result.impl()->marks = x.impl()->marks;
  return result;
}

Tensor as_parameter(const Tensor& x) {
  Tensor result = alias(x);
  result.impl()->version = std::make_shared<VersionCounter>();
  return result;
}

Tensor reinterpret(const Tensor& x, DType dtype) {
  TS_CHECK_DTYPE(size_of(dtype) == size_of(x.dtype()), "reinterpret", "needs a dtype of ",
                 size_of(x.dtype()), " bytes for ", x, "; got ", dtype);
  Tensor result = alias(x);
  result.impl()->dtype = dtype;
  return result;
}

bool can_view(const Tensor& x, const Shape& shape) {
  Shape strides;
  return view_strides(x.shape(), x.strides(), infer_shape(shape, x.numel(), "view"), strides);
}

Tensor view(const Tensor& x, const Shape& shape) {
  const Shape target = infer_shape(shape, x.numel(), "view");
  Shape strides;
  TS_CHECK_SHAPE(view_strides(x.shape(), x.strides(), target, strides), "view", x, " with strides ",
                 x.strides(), " cannot be seen as ", target, " without a copy; use reshape");
  return with_geometry(x, target, strides, x.offset());
}

Tensor transpose(const Tensor& x, int64_t dim0, int64_t dim1) {
  const int a = wrap_dim(dim0, x.dim(), "transpose");
  const int b = wrap_dim(dim1, x.dim(), "transpose");
  Shape shape = x.shape(), strides = x.strides();
  if (x.dim() > 0) {
    std::swap(shape[a], shape[b]);
    std::swap(strides[a], strides[b]);
  }
  return with_geometry(x, shape, strides, x.offset());
}

Tensor permute(const Tensor& x, const Shape& dims) {
  TS_CHECK_SHAPE(dims.size() == x.dim(), "permute", "needs all ", x.dim(), " dimensions of ", x,
                 "; got ", dims);
  const Shape sorted = wrap_dims(dims, x.dim(), "permute");  // refuses repeated ones
  (void)sorted;
  Shape shape = x.shape(), strides = x.strides();
  for (int i = 0; i < dims.size(); ++i) {
    const int d = wrap_dim(dims[i], x.dim(), "permute");
    shape[i] = x.shape()[d];
    strides[i] = x.strides()[d];
  }
  return with_geometry(x, shape, strides, x.offset());
}

Tensor expand(const Tensor& x, const Shape& shape) {
  Shape target = shape;
  const int lead = shape.size() - x.dim();
  TS_CHECK_SHAPE(lead >= 0, "expand", "cannot expand ", x, " to fewer dimensions: ", shape);
  for (int i = 0; i < target.size(); ++i) {
    if (target[i] != -1) continue;
    TS_CHECK_SHAPE(i >= lead, "expand", "-1 is not allowed for the new dimension ", i, " of ",
                   shape);
    target[i] = x.shape()[i - lead];
  }
  checked_numel(target, "expand");
  TS_CHECK_SHAPE(broadcastable_to(x.shape(), target), "expand", x, " cannot be expanded to ",
                 target, ": only dimensions of size 1 can grow");
  return with_geometry(x, target, broadcast_strides(x.shape(), x.strides(), target), x.offset());
}

Tensor squeeze(const Tensor& x, int64_t dim) {
  const int d = wrap_dim(dim, x.dim(), "squeeze");
  Shape shape = x.shape(), strides = x.strides();
  if (x.dim() > 0 && shape[d] == 1) {
    shape.erase(d);
    strides.erase(d);
  }
  return with_geometry(x, shape, strides, x.offset());
}

Tensor squeeze_all(const Tensor& x) {
  Shape shape, strides;
  for (int i = 0; i < x.dim(); ++i) {
    if (x.shape()[i] == 1) continue;
    shape.push_back(x.shape()[i]);
    strides.push_back(x.strides()[i]);
  }
  return with_geometry(x, shape, strides, x.offset());
}

Tensor unsqueeze(const Tensor& x, int64_t dim) {
  const int d = wrap_dim(dim, x.dim() + 1, "unsqueeze");
  Shape shape = x.shape(), strides = x.strides();
  strides.insert(d, d < x.dim() ? shape[d] * strides[d] : 1);
  shape.insert(d, 1);
  return with_geometry(x, shape, strides, x.offset());
}

Tensor narrow(const Tensor& x, int64_t dim, int64_t start, int64_t length) {
  TS_CHECK_SHAPE(x.dim() > 0, "narrow", "needs at least one dimension; got ", x);
  const int d = wrap_dim(dim, x.dim(), "narrow");
  const int64_t size = x.shape()[d];
  if (start < 0) start += size;
  TS_CHECK_INDEX(start >= 0 && length >= 0 && start <= size - length, "narrow", "[", start, ", ",
                 start + length, ") is outside dimension ", d, " of ", x);
  Shape shape = x.shape();
  shape[d] = length;
  return with_geometry(x, shape, x.strides(), x.offset() + start * x.strides()[d]);
}

Tensor select(const Tensor& x, int64_t dim, int64_t index) {
  TS_CHECK_SHAPE(x.dim() > 0, "select", "needs at least one dimension; got ", x);
  const int d = wrap_dim(dim, x.dim(), "select");
  const int64_t size = x.shape()[d];
  TS_CHECK_INDEX(index >= -size && index < size, "select", "index ", index,
                 " is outside dimension ", d, " of ", x);
  if (index < 0) index += size;
  Shape shape = x.shape(), strides = x.strides();
  const int64_t offset = x.offset() + index * strides[d];
  shape.erase(d);
  strides.erase(d);
  return with_geometry(x, shape, strides, offset);
}

Tensor slice(const Tensor& x, int64_t dim, std::optional<int64_t> start, std::optional<int64_t> end,
             int64_t step) {
  TS_CHECK_SHAPE(x.dim() > 0, "slice", "needs at least one dimension; got ", x);
  TS_CHECK(step >= 1, "slice", "step must be at least 1; got ", step, "; use flip to go backwards");
  const int d = wrap_dim(dim, x.dim(), "slice");
  const int64_t size = x.shape()[d];
  const auto clamp_bound = [size](int64_t bound) {
    return std::clamp<int64_t>(bound < 0 ? bound + size : bound, 0, size);
  };
  const int64_t first = clamp_bound(start.value_or(0));
  const int64_t last = std::max(first, clamp_bound(end.value_or(size)));
  Shape shape = x.shape(), strides = x.strides();
  const int64_t offset = x.offset() + first * strides[d];
  shape[d] = (last - first + step - 1) / step;
  strides[d] *= step;
  return with_geometry(x, shape, strides, offset);
}

}  // namespace tessera::raw
