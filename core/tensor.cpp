#include <tessera/core/tensor.h>

#include <sstream>

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
  impl_->storage = source.storage;
  impl_->shape = source.shape;
  impl_->strides = source.strides;
  impl_->offset = source.offset;
  impl_->numel = source.numel;
  impl_->dtype = source.dtype;
}

std::string Tensor::describe() const {
  if (impl_ == nullptr) return "undefined";
  std::ostringstream out;
  out << dtype() << shape() << ' ' << device();
  return out.str();
}

}  // namespace tessera
