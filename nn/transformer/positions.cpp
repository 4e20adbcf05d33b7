#include <tessera/nn/transformer/positions.h>

#include <tessera/autograd/ops.h>

namespace tessera::nn {

Tensor positions(int64_t length, const Device& device, int64_t past, DType dtype) {
  return arange(past, past + length, 1, dtype, device);
}

}  // namespace tessera::nn
