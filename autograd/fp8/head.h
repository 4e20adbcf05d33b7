// A head in fp8, fused with its loss: cross_entropy(fp8_linear(x, weight), target) without
// whole logits.
//
// Up to 2^25 logits (64 MiB of bf16) it is those two ops. More logits are calculated in chunks of
// rows of about equal size, and again in backward, where the gradient to be quantized is known:
//
// | pass                            | for each chunk                                            |
// |---------------------------------|-----------------------------------------------------------|
// | forward                         | y = x8 W8^T, losses                                       |
// | backward, if a scale of dy      | y, dy, its largest magnitudes                             |
// | covers more than a chunk        |                                                           |
// | backward                        | y, dy, dy8 = quantize(dy), grad_x = dy8 W8, grad_W of all |
//
// So bytes and scales of x, W and dy are those of the two ops, whatever the chunks; grad_W is one
// f32 sum over all chunks, rounded once. Delayed scales of dy, and those of rows and of blocks
// (chunks begin at blocks), are known at once. Scales of the whole tensor or of whole columns (dy
// of grad_W by rows) need the middle pass.
//
// Cost: 4 or 5 products instead of 3. Backward keeps one byte per element of x, the weight cache's
// bytes of W, and two f32 per row. While a chunk is calculated, it takes 9 bytes per logit.
//
// On a GPU all logits exist at once, and for a mean their gradient overwrites them.
#pragma once

#include <cstdint>
#include <memory>

#include <tessera/autograd/fp8/layer.h>
#include <tessera/autograd/ops.h>

namespace tessera {

// linear_cross_entropy(x, weight, target), in fp8 if `layer` is set up for it.
Tensor linear_cross_entropy_by(const std::shared_ptr<Fp8Linear>& layer, const Tensor& x,
                               const Tensor& weight, const Tensor& target, int64_t ignore_index,
                               Reduction reduction);

// x: [N, C]; weight: [V, C]; target: [N] i64 or i32; reduction: mean or sum. Result and errors are
// those of the two ops; no second derivatives. `chunk`: number of logits in a chunk.
Tensor fp8_linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& target,
                                std::shared_ptr<Fp8Linear> layer, int64_t ignore_index,
                                Reduction reduction, int64_t chunk = int64_t{1} << 25);

}  // namespace tessera
