// Multi-head attention (Vaswani et al. 2017), with torch's parameter names and masks.
#pragma once

#include <memory>
#include <optional>

#include <tessera/nn/linear.h>
#include <tessera/nn/module.h>

namespace tessera::nn {

struct MultiheadAttentionOptions {
  double dropout = 0;  // of attention weights, while training
  bool bias = true;
  // Widths of key and value if they differ from embed_dim; then q_proj_weight, k_proj_weight and
  // v_proj_weight replace in_proj_weight.
  std::optional<int64_t> kdim = {};
  std::optional<int64_t> vdim = {};
  bool batch_first = false;  // [N, L, E] instead of [L, N, E]
};

// Masks as torch's MultiheadAttention has them, where true means "not allowed"
// (scaled_dot_product_attention has the opposite); floating masks are added to the scores. Masks
// combine: a key is visible if no mask hides it, and a query without visible keys gets weights of
// 0.
struct AttentionMasks {
  Tensor key_padding_mask = {};  // [N, S] or [S]: keys hidden from all queries
  Tensor attn_mask = {};         // [L, S], or [N * heads, L, S]
  bool causal = false;           // a query sees keys up to its own position; fastest alone
  bool need_weights = false;     // also returns the attention weights, at the cost of [N, H, L, S]
  bool average_weights = true;   // over heads
  void visit_tensors(auto&& visit) { visit(key_padding_mask), visit(attn_mask); }
};

struct AttentionResult {
  Tensor output;   // like query
  Tensor weights;  // [N, L, S], by head [N, heads, L, S]; undefined unless requested
  void visit_tensors(auto&& visit) { visit(output), visit(weights); }
};

// query: [L, N, E], key: [S, N, kdim], value: [S, N, vdim], or without the batch dimension N.
// in_proj_weight: [3 E, E], Xavier-uniform at first; in_proj_bias: zeros; out_proj: a Linear whose
// bias is zero.
class MultiheadAttention : public Module<MultiheadAttention> {
 public:
  using Options = MultiheadAttentionOptions;
  MultiheadAttention(int64_t embed_dim, int64_t num_heads,
                     const MultiheadAttentionOptions& options = {});
  AttentionResult forward(const Tensor& query, const Tensor& key, const Tensor& value,
                          const AttentionMasks& masks = {});
  void reset_parameters();
  std::unique_ptr<MultiheadAttention> remake() const {
    return std::make_unique<MultiheadAttention>(embed_dim, num_heads, options);
  }

  const int64_t embed_dim;
  const int64_t num_heads;
  const MultiheadAttentionOptions options;
  const bool one_width;  // query, key and value have one width
  const Tensor& in_proj_weight;
  const Tensor& q_proj_weight;
  const Tensor& k_proj_weight;
  const Tensor& v_proj_weight;
  const Tensor& in_proj_bias;
  Linear& out_proj;

 private:
  struct Projected {
    Tensor query, key, value;  // [N, H, length, E / H]
  };
  Projected project(const Tensor& query, const Tensor& key, const Tensor& value) const;
};

}  // namespace tessera::nn
