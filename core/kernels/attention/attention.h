// Scaled dot product attention in tiles: softmax(scale * Q K^T + mask) V, without a (T, S) matrix.
// Method: Dao et al., "FlashAttention" (2022); here a block of 32 queries sees all its keys at
// once, as a row of scores fits the L2 cache of a CPU, and no running maximum is needed. Up to 8
// queries, as of a token beside a cache, take keys and values as they lie, once for all heads that
// share them, where these lie in rows.
//
// query: [B, H, T, E]; key: [B, Hk, S, E]; value: [B, Hk, S, Ev]; H a multiple of Hk; any strides.
// f64, f32, f16, bf16; scores and sums are f32 (f64 for f64). bf16 runs on AMX where it is there,
// else on AVX-512 BF16, with probabilities rounded to bf16 (gemm.h says how that adds). Shapes are
// checked by the public ops.
//
// On a CPU, queries that share no key with those before them are a problem of their own
// (attention_pieces.h): a packed document's bits and cost are those of the document alone. Within
// such a piece whole tiles that no query sees are skipped.
//
// On a GPU cuDNN runs it where it can, with probabilities rounded to the operands' dtype and,
// unless the policy says otherwise, other dropout numbers and an order of sums in backward that
// changes; else own tiles do, whose bits depend on the operands alone. A single query is theirs
// too, and ranges of keys are, whose tiles that no query sees they skip.
#pragma once

#include <tessera/core/random.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera::kernels {

// How attention runs on a GPU where NVIDIA's cuDNN serves it
// (core/cuda/libraries/attention_graph.h); a slot of the context, read by the op and kept for its
// backward.
struct AttentionPolicy {
  bool library = true;         // false: own kernels only
  bool deterministic = false;  // backward with the same bits each run: slower, 2 B H T S bytes
  bool equal_dropout = false;  // dropout draws the CPU's numbers: own kernels
};

// Of a part, whose heads and queries are some of the whole's: where its first probability lies in
// the whole's [B, H, T, S], and the whole's H and T. Without heads: it is whole.
struct AttentionPlace {
  int64_t batch = 0, head = 0, query = 0;
  int64_t heads = 0, queries = 0;
  bool is_part() const { return heads > 0; }
};

struct AttentionSpec {
  double scale = 1;
  bool causal = false;  // query t sees keys 0..t
  // Of probabilities. Element (b, h, t, s) draws number ((b H + h) T + t) S + s of the whole; of a
  // part the policy's equal_dropout is set.
  double dropout = 0;
  RandomStream stream = {};
  AttentionPlace place = {};
  Tensor mask = {};     // [B, H, T, S] (expanded), bool or floating; or undefined
  Tensor lengths = {};  // [B] i64 or i32: keys of each sample, 1 to S; or undefined
  // [B, T] i32, or undefined: query t sees keys from its start on, and before its end. Without a
  // mask and lengths. A start without ends is for causal.
  Tensor starts = {}, ends = {};
  AttentionPolicy policy = {};
};

// Which number each probability draws.
struct AttentionDraws {
  int64_t first_row = 0, heads = 0, queries = 0;
};
inline AttentionDraws draws_of(const AttentionPlace& place, int64_t heads, int64_t queries) {
  if (!place.is_part()) return {0, heads, queries};
  return {(place.batch * place.heads + place.head) * place.queries + place.query, place.heads,
          place.queries};
}

struct AttentionResult {
  Tensor output;    // [B, H, T, Ev], in memory [B, T, H, Ev]
  Tensor log_sums;  // [B, H, T] logarithm of each row's sum; infinity where a row sees no key
};

// A row that sees no key gives zeros.
AttentionResult attention(const Tensor& query, const Tensor& key, const Tensor& value,
                          const AttentionSpec& spec);

// Writes the gradients, tensors of any strides in the shapes of query, key and value. Probabilities
// are calculated again from log_sums.
void attention_backward(const Tensor& grad_output, const Tensor& query, const Tensor& key,
                        const Tensor& value, const Tensor& output, const Tensor& log_sums,
                        const AttentionSpec& spec, const Tensor& grad_query, const Tensor& grad_key,
                        const Tensor& grad_value);

}  // namespace tessera::kernels
