// A head in fp8, fused with its loss: cross_entropy(fp8_linear(x, weight), target) without
// whole logits.
//
// Up to 2^25 logits (64 MiB of bf16) it is those two ops. More are made in chunks of rows, of about
// as many each, and made again in backward, which alone knows the gradient that is to be quantized:
//
// | pass                        | of a chunk                                                |
// |-----------------------------|-----------------------------------------------------------|
// | forward                     | y = x8 W8^T, losses                                       |
// | backward, where a scale of  | y, dy, its largest magnitudes                             |
// | dy is of more than a chunk  |                                                           |
// | backward                    | y, dy, dy8 = quantize(dy), grad_x = dy8 W8, grad_W of all |
//
// So bytes and scales of x, W and dy are those of the two ops, whatever the chunks; grad_W is one
// f32 sum over all chunks, rounded once. Scales of dy are known at once where they are delayed, of
// rows and of blocks (chunks begin where blocks do); of the whole tensor, and of whole columns (dy
// of grad_W by rows), they cost the pass between.
//
// Cost: 4 or 5 products instead of the 3 of whole logits. Kept for backward: one byte an element of
// x, of W those of the weight cache, two f32 a row. In the chunk's time: 9 bytes a logit of it.
//
// On a GPU all logits are there at once, and for a mean their gradient overwrites them.
#pragma once

#include <cstdint>
#include <memory>

#include <tessera/autograd/fp8/layer.h>
#include <tessera/autograd/ops.h>

namespace tessera {

// linear_cross_entropy(x, weight, target) as `layer` takes it: in fp8, or as ever.
Tensor linear_cross_entropy_by(const std::shared_ptr<Fp8Linear>& layer, const Tensor& x,
                               const Tensor& weight, const Tensor& target, int64_t ignore_index,
                               Reduction reduction);

// x: [N, C]; weight: [V, C]; target: [N] i64 or i32; reduction: mean or sum. Result and errors are
// those of the two ops; no second derivatives. `chunk`: logits that are made at once.
Tensor fp8_linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& target,
                                std::shared_ptr<Fp8Linear> layer, int64_t ignore_index,
                                Reduction reduction, int64_t chunk = int64_t{1} << 25);

}  // namespace tessera
