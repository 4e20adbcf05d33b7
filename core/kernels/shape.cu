#include <tessera/core/kernels/shape.h>

#include <tessera/core/factory.h>
#include <tessera/core/kernels/copy.h>
#include <tessera/core/kernels/on_device.h>
#include <tessera/core/raw_views.h>

namespace tessera::kernels {
namespace {

// Made of copies into views: the copy kernels move 16 bytes a thread where layouts allow it.
Tensor cat_cuda(std::span<const Tensor> tensors, int dim) {
  Shape shape = tensors[0].shape();
  shape[dim] = 0;
  for (const Tensor& x : tensors) shape[dim] += x.shape()[dim];
  const Tensor result = raw::empty(shape, tensors[0].dtype(), tensors[0].device());
  int64_t at = 0;
  for (const Tensor& x : tensors) {
    const int64_t size = x.shape()[dim];
    if (x.numel() > 0) copy_into(raw::narrow(result, dim, at, size), x);
    at += size;
  }
  return result;
}

Tensor embed_slice_cuda(const Tensor& x, const Shape& shape, int dim, int64_t start, int64_t step) {
  const Tensor result = raw::zeros(shape, x.dtype(), x.device());
  if (x.numel() == 0) return result;
  const int64_t end = start + (x.shape()[dim] - 1) * step + 1;
  copy_into(raw::slice(result, dim, start, end, step), x);
  return result;
}

}  // namespace

void register_shape() {
  cuda_form<cat> = cat_cuda;
  cuda_form<embed_slice> = embed_slice_cuda;
}

}  // namespace tessera::kernels
