// Positions of tokens in their sequences.
//
//     const Tensor places = nn::positions(ids.size(1), ids.device());  // 0, 1, 2, ...
//
// Position tables and nn::RotaryEmbedding use this function instead of their own arange(), so that
// only one function has to change where a rank holds a part of each sequence (context parallelism):
// a slot of the Context can then return the positions of that part.
#pragma once

#include <cstdint>

#include <tessera/core/tensor/tensor.h>
#include <tessera/nn/transformer/documents.h>

namespace tessera::nn {

// [length]: past, past + 1, ..., for tokens that follow `past` others.
Tensor positions(int64_t length, const Device& device, int64_t past = 0, DType dtype = kI64);
// [length], or of packed rows [B, length]: the places in their documents.
Tensor positions(const TokenRows& rows, int64_t past = 0);

}  // namespace tessera::nn
