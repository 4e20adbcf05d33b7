// What a GPU knows of a quantized part that travels: its label, 24 bytes that the host never reads
// (distributed/fully_shard/fp8_part.h has the same for the host).
//
//     f32 scale, 0 of an empty part | f32 largest magnitude | i64 saturated | i64 underflown
#pragma once

#include <cstdint>

#include <tessera/core/tensor/tensor.h>

namespace tessera::kernels {

inline constexpr int64_t kPartLabelBytes = 24;

// All on one GPU. `label`: u8 [24]; scale, largest: f32 of one number; counts: i64 [2].
void write_part_label(const Tensor& label, const Tensor& scale, const Tensor& largest,
                      const Tensor& counts);

struct WholeOfParts {
  Tensor scale, inverse;   // f32 [1, 1]; NaN where parts have different scales
  Tensor largest, counts;  // of all parts: f32 [1], i64 [2]
};
// labels: u8 [parts, bytes], in each row a label at `first`, a multiple of 8.
WholeOfParts read_part_labels(const Tensor& labels, int64_t first);

}  // namespace tessera::kernels
