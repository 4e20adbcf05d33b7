// Linear layers with a weight in 8 or 4 bits, which does not learn.
#pragma once

#include <tessera/core/kernels/quantize/packed_weight.h>

namespace tessera {

// x W^T + bias, in the dtype that autocast gives x: f32, bf16 or f16. x: [..., in]; bias: [out] of
// that dtype or undefined; result [..., out]. The gradient reaches x and the bias; the weight's
// bytes have none. Backward keeps the packed weight alone and reads it again; no second
// derivatives. Throws what kernels::packed_product() throws.
Tensor packed_linear(const Tensor& x, const kernels::PackedWeight& weight, const Tensor& bias);

}  // namespace tessera
