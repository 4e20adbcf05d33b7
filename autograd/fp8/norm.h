// Norms in front of layers in fp8. Where one layer reads what a norm gives, and its scale is
// known before (recipe `delayed`), the norm of a GPU writes that layer's operand in fp8, by rows
// and by columns, and no result: see kernels::row_norm_quantized(). Bytes, scales, notes and
// gradients are those of the norm and the layer one after the other, to the bit.
//
// What the norm returns is a tensor without bytes. The layer takes its operand from it; any other
// op has the bytes calculated first, from what was normalized, so that a wrong guess about who
// reads costs time and nothing else. Under a scope of nn/read_by.h; one at a time.
#pragma once

#include <memory>

#include <tessera/autograd/fp8/layer.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera {

// In the context: the layer that reads what norms give that are called now, and the place of its
// weight. It is all that a context says of fp8.
struct Fp8Reader {
  std::shared_ptr<Fp8Linear> layer;
  const Tensor* weight = nullptr;
};

}  // namespace tessera
