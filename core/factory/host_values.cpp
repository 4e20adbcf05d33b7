// A tensor's elements as numbers of the host: item() and to_vector().
#include <tessera/core/dispatch.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/tensor/element_guard.h>
#include <tessera/core/tensor/empty.h>
#include <tessera/core/tensor/tensor.h>
#include <tessera/core/tensor/unreadable_storage.h>

namespace tessera {
namespace {

// Calls f(element index in the storage's dtype units) in row-major order.
template <class F>
void for_each_offset(const Tensor& tensor, F&& f) {
  const Shape& shape = tensor.shape();
  const Shape& strides = tensor.strides();
  if (tensor.numel() == 0) return;
  Shape index = Shape::filled(shape.size(), 0);
  int64_t offset = 0;
  for (int64_t i = 0; i < tensor.numel(); ++i) {
    f(offset);
    for (int d = shape.size() - 1; d >= 0; --d) {
      offset += strides[d];
      if (++index[d] < shape[d]) break;
      offset -= index[d] * strides[d];
      index[d] = 0;
    }
  }
}

// A tensor whose elements the host reads: itself, or a copy of one on a GPU after the work queued
// there.
Tensor readable(const Tensor& tensor, const char* where) {
  TS_CHECK_DEVICE(!tensor.is_meta(), where, "reads elements, and ", tensor, " has none");
  if (tensor.device().is_cpu()) return tensor;
  const Tensor copy = raw::empty(tensor.shape(), tensor.dtype());
  kernels::copy_into(copy, tensor);
  return copy;
}

}  // namespace

template <class T>
T Tensor::item() const {
  check_whole(*this, "item");
  check_bytes(*this, "item");
  TS_CHECK_SHAPE(numel() == 1, "item", "needs a tensor with one element; got ", *this);
  const Tensor source = readable(*this, "item");
  T value{};
  dispatch_all(dtype(), "item", [&]<class Element>() {
    value = static_cast<T>(load<Compute<Element>>(*source.data_as<Element>()));
  });
  return value;
}

template <class T>
std::vector<T> Tensor::to_vector() const {
  check_whole(*this, "to_vector");
  check_bytes(*this, "to_vector");
  const Tensor source = readable(*this, "to_vector");
  std::vector<T> values;
  values.reserve(static_cast<size_t>(numel()));
  dispatch_all(dtype(), "to_vector", [&]<class Element>() {
    const Element* elements = source.data_as<Element>();
    for_each_offset(source, [&](int64_t offset) {
      values.push_back(static_cast<T>(load<Compute<Element>>(elements[offset])));
    });
  });
  return values;
}

#define TS_INSTANTIATE(T)             \
  template T Tensor::item<T>() const; \
  template std::vector<T> Tensor::to_vector<T>() const;
TS_INSTANTIATE(double)
TS_INSTANTIATE(float)
TS_INSTANTIATE(int64_t)
TS_INSTANTIATE(int32_t)
TS_INSTANTIATE(bool)
#undef TS_INSTANTIATE

}  // namespace tessera
