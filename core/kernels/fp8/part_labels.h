// The label of a quantized part that ranks exchange: 24 bytes on a GPU that the host never reads
// (distributed/fully_shard/fp8_part.h is the host's form).
//
//     f32 scale, 0 of an empty part | f32 largest magnitude | i64 saturated | i64 underflown
#pragma once

#include <cstdint>

#include <tessera/core/tensor/tensor.h>

namespace tessera::kernels {

inline constexpr int64_t kPartLabelBytes = 24;

// All tensors are on one GPU. `label`: u8 [24]; scale, largest: f32, one number each; counts: i64
// [2].
void write_part_label(const Tensor& label, const Tensor& scale, const Tensor& largest,
                      const Tensor& counts);

struct WholeOfParts {
  Tensor scale, inverse;   // f32 [1, 1]; NaN if parts have different scales
  Tensor largest, counts;  // of all parts: f32 [1], i64 [2]
};
// labels: u8 [parts, bytes]; each row has a label at byte `first`, a multiple of 8.
WholeOfParts read_part_labels(const Tensor& labels, int64_t first);

}  // namespace tessera::kernels
