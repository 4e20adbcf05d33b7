// What attention_cpu.cpp asks of attention_simd.cpp: one head. Internal.
#pragma once

#include <cstdint>

#include <tessera/core/dtype.h>
#include <tessera/core/isa.h>
#include <tessera/core/kernels/attention/attention.h>
#include <tessera/core/kernels/attention/attention_bytes.h>
#include <tessera/core/random.h>

namespace tessera::kernels {

struct HeadView {  // [B, H, rows, columns], strides in elements
  void* data = nullptr;
  int64_t batch_stride = 0, head_stride = 0, row_stride = 0, column_stride = 0;
};

struct KeyRange {
  int32_t begin, end;  // begin == end == 0: none
};

struct AttentionProblem {
  DType dtype;  // f64, f32, f16, bf16
  Isa isa;  // whose instructions multiply: kAmx tiles, kBf16 pairs of bf16; else f16 and bf16 are
            // widened
  bool in_pairs;  // bf16 of few queries is multiplied in pairs
  int64_t B, H, Hk, T, S, E, Ev;
  int64_t keys;  // of S, those that the sample has
  double scale;
  bool causal;
  const KeyRange* ranges;  // of T queries, or nullptr: all keys, or the causal ones
  // Where this problem lies in the whole one, of which dropout and log_sums are.
  int64_t first_query, first_key, all_T, all_S;
  double dropout;
  RandomStream stream;
  AttentionDraws draws;
  bool has_mask;
  DType mask_dtype;
  HeadView mask;  // (B, H, T, S)
  HeadView query, key, value, output;
  bool in_bytes;  // element e of keys and values is the vector's least + step * its byte
  HeadView key_least, key_step, value_least, value_step;  // (B, Hk, S) f32, rows in one piece
  void* log_sums;                                         // (B, H, T) f64 for f64, else f32
  HeadView grad_output, grad_query, grad_key, grad_value;
};

// Few queries: keys and values are read where they lie, and not packed.
inline bool reads_in_place(const AttentionProblem& p) {
  return p.T <= kFewQueries && (p.key.column_stride == 1 || p.E == 1) &&
         (p.value.column_stride == 1 || p.Ev == 1);
}
// Rows at once of the (H / Hk) T queries that share a key head.
inline constexpr int64_t kRowsAtOnce = 32;

TS_SIMD_DECLARE(int64_t attention_scratch_bytes(const AttentionProblem& problem, bool backward));
TS_SIMD_DECLARE(void attention_head(const AttentionProblem& problem, int64_t batch, int64_t head,
                                    void* scratch));
// Where reads_in_place(): kRowsAtOnce queries of a key head's, from `first` on.
TS_SIMD_DECLARE(void attention_rows(const AttentionProblem& problem, int64_t batch,
                                    int64_t key_head, int64_t first, void* scratch));
// All query heads of one key head, in their order.
TS_SIMD_DECLARE(void attention_head_backward(const AttentionProblem& problem, int64_t batch,
                                             int64_t key_head, void* scratch));

}  // namespace tessera::kernels
