#include <tessera/core/tensor/tensor.h>

namespace tessera {

TensorImpl::TensorImpl(StoragePtr storage_in, Shape shape_in, Shape strides_in, int64_t offset_in,
                       DType dtype_in)
    : storage(std::move(storage_in)),
      shape(shape_in),
      strides(strides_in),
      offset(offset_in),
      numel(numel_of(shape_in)),
      dtype(dtype_in),
      version(std::make_shared<VersionCounter>()) {}

void Tensor::set_data(const Tensor& other) const {
  get();
  const TensorImpl& source = other.get();
  TS_CHECK_AS(UnsupportedError, impl_->guard != nullptr || source.guard == nullptr, "set_data",
              "makes a whole tensor of ", other,
              "; take full_tensor(), or to_local() for this rank's part");
  impl_->storage = source.storage;
  impl_->shape = source.shape;
  impl_->strides = source.strides;
  impl_->offset = source.offset;
  impl_->numel = source.numel;
  impl_->dtype = source.dtype;
}

}  // namespace tessera
