// The places of tokens in their sequences.
//
//     const Tensor places = nn::positions(ids.size(1), ids.device());  // 0, 1, 2, ...
//
// Whatever in a model goes by the place of a token asks here and makes no arange() of its own:
// tables of positions do, and nn::RotaryEmbedding. So there is one function that answers. Where a rank
// holds a part of each sequence (context parallelism), a slot of the Context can answer in it with
// the places of that part, and models stay as they are.
#pragma once

#include <cstdint>

#include <tessera/core/tensor/tensor.h>

namespace tessera::nn {

// [length]: past, past + 1, ..., of tokens that stand behind `past` others.
Tensor positions(int64_t length, const Device& device, int64_t past = 0, DType dtype = kI64);

}  // namespace tessera::nn
