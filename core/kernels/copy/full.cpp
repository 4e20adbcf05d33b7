#include <tessera/core/kernels/copy/full.h>

#include <cstring>

#include <tessera/core/error.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/tensor/empty.h>

namespace tessera::raw {

Tensor full(const Shape& shape, const Scalar& value, DType dtype, const Device& device) {
  TS_CHECK(kernels::can_hold(dtype, value), "full", "no element of ", dtype, " can be ", value,
           "; choose a dtype that holds it");
  Tensor result = empty(shape, dtype, device);
  if (device.is_cpu() && value.to_double() == 0) {
    if (result.nbytes() > 0) std::memset(result.data(), 0, static_cast<size_t>(result.nbytes()));
  } else {
    kernels::fill(result, value);
  }
  return result;
}

Tensor zeros(const Shape& shape, DType dtype, const Device& device) {
  return full(shape, 0, dtype, device);
}

Tensor zeros_like(const Tensor& x) {
  Tensor result = empty_like(x);
  if (x.device().is_cuda()) {
    kernels::fill(result, 0);
  } else if (!x.is_meta() && result.nbytes() > 0) {
    std::memset(result.data(), 0, static_cast<size_t>(result.nbytes()));
  }
  return result;
}

}  // namespace tessera::raw
