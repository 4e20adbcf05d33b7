// Attention of few queries to keys and values of 8 bits, which are read as they lie: a cache's time
// is its reading, and bytes are a quarter of f32's.
//
// A vector of a head and token is its least value and a step: element e is least + step * byte e. So
// a score is least * sum(query) + step * (query . bytes), and an output is the sum of p least plus that
// of (p step) bytes: the values that are meant are never in memory. Sums are f32 in a fixed order;
// against attention to the converted values each score is off by rounding of f32 alone, at most
// (E + 4) eps sum|query| (|least| + 255 step), and each output by (S + 4) eps of the largest such
// magnitude of a value, besides what scores do to probabilities.
#pragma once

#include <cstdint>

#include <tessera/core/kernels/attention/attention.h>

namespace tessera::kernels {

// On a CPU as many queries take keys and values as they lie.
inline constexpr int64_t kFewQueries = 8;

struct ByteVectors {
  Tensor bytes;        // [B, Hk, S, E] u8, each vector in one piece
  Tensor least, step;  // [B, Hk, S, 1] f32, a head's in one piece
};

// query: [B, H, T, E] f32, f16 or bf16 on a CPU, T up to kFewQueries, H a multiple of Hk. The result is
// [B, H, T, Ev], in memory [B, T, H, Ev]. spec: scale, and a mask or causal. ShapeError, DTypeError,
// DeviceError (a GPU has no such kernel), ValueError: what else spec asks for.
Tensor attention_of_bytes(const Tensor& query, const ByteVectors& key, const ByteVectors& value,
                          const AttentionSpec& spec);

}  // namespace tessera::kernels
