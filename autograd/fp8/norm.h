// Norms in front of layers in fp8. If one layer reads a norm's result and its scale is known before
// (recipe `delayed`), the norm of a GPU writes that layer's operand in fp8, by rows and by columns,
// and no result: see kernels::row_norm_quantized(). Bytes, scales, notes and gradients are bit for
// bit those of the norm and the layer one after the other.
//
// The norm returns a tensor without bytes, from which the layer takes its operand. Any other op
// that reads it has the bytes calculated first, from the norm's input, so a wrong guess about the
// reader only costs time. Used in a scope of nn/read_by.h, one at a time.
#pragma once

#include <memory>

#include <tessera/autograd/fp8/layer.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera {

// The context's only fp8 state: the layer that reads the results of norms called now, and the place
// of its weight.
struct Fp8Reader {
  std::shared_ptr<Fp8Linear> layer;
  const Tensor* weight = nullptr;
};

}  // namespace tessera
