#include <tessera/core/tensor/empty.h>

#include <tessera/core/tensor/meta_storage.h>

namespace tessera::raw {
namespace {

StoragePtr new_storage(int64_t bytes, const Device& device) {
  return device.is_meta() ? meta_storage(bytes) : std::make_shared<Storage>(bytes, device);
}

}  // namespace

Tensor empty(const Shape& shape, DType dtype, const Device& device) {
  const int64_t numel = checked_numel(shape, "empty");
  int64_t bytes = 0;
  TS_CHECK_SHAPE(!__builtin_mul_overflow(numel, size_of(dtype), &bytes), "empty", "the bytes of ",
                 dtype, shape, " exceed 2^63");
  return Tensor(
      new TensorImpl(new_storage(bytes, device), shape, contiguous_strides(shape), 0, dtype));
}

Tensor empty_strided(const Shape& shape, const Shape& strides, DType dtype, const Device& device) {
  checked_numel(shape, "empty_strided");
  const int64_t bytes = storage_extent(shape, strides) * size_of(dtype);
  return Tensor(new TensorImpl(new_storage(bytes, device), shape, strides, 0, dtype));
}

Tensor empty_like(const Tensor& x, DType dtype) {
  if (x.is_contiguous() || !is_dense(x.shape(), x.strides())) {
    return empty(x.shape(), dtype, x.device());
  }
  return empty_strided(x.shape(), x.strides(), dtype, x.device());
}
Tensor empty_like(const Tensor& x) { return empty_like(x, x.dtype()); }

}  // namespace tessera::raw
