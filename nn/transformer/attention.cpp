#include <tessera/nn/transformer/attention.h>

#include <cmath>
#include <limits>

#include <tessera/autograd/ops.h>
#include <tessera/nn/init.h>

namespace tessera::nn {
namespace {

int64_t checked_heads(int64_t embed_dim, int64_t num_heads) {
  TS_CHECK(num_heads > 0 && embed_dim % num_heads == 0, "MultiheadAttention",
           "embed_dim must be a multiple of num_heads; got ", embed_dim, " and ", num_heads);
  return num_heads;
}

constexpr double kHidden = -std::numeric_limits<double>::infinity();

// What is added to the scores, from a mask that forbids or adds.
Tensor additive(const Tensor& mask, DType dtype) {
  if (mask.dtype() != kBool) return mask.to(dtype);
  return zeros(mask.shape(), {.dtype = dtype, .device = mask.device()}).masked_fill(mask, kHidden);
}

// softmax(scores + mask); a row that sees no key is all 0, as in the fused op, with gradients of 0.
Tensor masked_softmax(const Tensor& scores, const Tensor& mask) {
  if (!mask.defined()) return softmax(scores, -1);
  const Tensor blind = all(eq(mask, kHidden), {-1}, true);
  return softmax((scores + mask).masked_fill(blind, 0), -1).masked_fill(blind, 0);
}

}  // namespace

MultiheadAttention::MultiheadAttention(int64_t embed_dim, int64_t num_heads,
                                       const MultiheadAttentionOptions& options)
    : embed_dim(embed_dim),
      num_heads(checked_heads(embed_dim, num_heads)),
      options(options),
      one_width(options.kdim.value_or(embed_dim) == embed_dim &&
                options.vdim.value_or(embed_dim) == embed_dim),
      in_proj_weight(one_width ? parameter("in_proj_weight", Shape{3 * embed_dim, embed_dim})
                               : parameter("in_proj_weight", Tensor())),
      q_proj_weight(one_width ? parameter("q_proj_weight", Tensor())
                              : parameter("q_proj_weight", Shape{embed_dim, embed_dim})),
      k_proj_weight(one_width ? parameter("k_proj_weight", Tensor())
                              : parameter("k_proj_weight",
                                          Shape{embed_dim, options.kdim.value_or(embed_dim)})),
      v_proj_weight(one_width ? parameter("v_proj_weight", Tensor())
                              : parameter("v_proj_weight",
                                          Shape{embed_dim, options.vdim.value_or(embed_dim)})),
      in_proj_bias(options.bias ? parameter("in_proj_bias", Shape{3 * embed_dim})
                                : parameter("in_proj_bias", Tensor())),
      out_proj(add<Linear>("out_proj", embed_dim, embed_dim, LinearOptions{.bias = options.bias})) {
  if (ParameterDefaultsGuard::current().initialise) reset_parameters();
}

void MultiheadAttention::reset_parameters() {
  for (const auto& [name, weight] :
       {NamedTensor{"in_proj_weight", in_proj_weight}, NamedTensor{"q_proj_weight", q_proj_weight},
        NamedTensor{"k_proj_weight", k_proj_weight}, NamedTensor{"v_proj_weight", v_proj_weight}}) {
    if (weight.defined()) init::xavier_uniform(weight, 1, initial_stream(name));
  }
  if (!options.bias) return;
  init::zeros(in_proj_bias);
  init::zeros(out_proj.bias);
}

MultiheadAttention::Projected MultiheadAttention::project(const Tensor& query, const Tensor& key,
                                                          const Tensor& value) const {
  const int64_t E = embed_dim;
  // [N, length, E] -> [N, H, length, E / H]
  const auto split_heads = [&](const Tensor& x) {
    return x.view({x.size(0), x.size(1), num_heads, E / num_heads}).transpose(1, 2);
  };
  if (one_width && query.is(key) && key.is(value)) {  // one product serves all three
    const TensorList parts = linear(query, in_proj_weight, in_proj_bias).chunk(3, -1);
    const auto heads = [&](const Tensor& x) {
      return x.reshape({x.size(0), x.size(1), num_heads, E / num_heads}).transpose(1, 2);
    };
    return {heads(parts[0]), heads(parts[1]), heads(parts[2])};
  }
  const auto weight = [&](int64_t i, const Tensor& own) {
    return one_width ? in_proj_weight.narrow(0, i * E, E) : own;
  };
  const auto bias = [&](int64_t i) {
    return options.bias ? in_proj_bias.narrow(0, i * E, E) : Tensor();
  };
  return {split_heads(linear(query, weight(0, q_proj_weight), bias(0))),
          split_heads(linear(key, weight(1, k_proj_weight), bias(1))),
          split_heads(linear(value, weight(2, v_proj_weight), bias(2)))};
}

AttentionResult MultiheadAttention::forward(const Tensor& query, const Tensor& key,
                                            const Tensor& value, const AttentionMasks& masks) {
  const bool batched = query.dim() == 3;
  TS_CHECK_SHAPE((query.dim() == 2 || batched) && key.dim() == query.dim() &&
                     value.dim() == query.dim() && query.size(-1) == embed_dim &&
                     key.size(-1) == options.kdim.value_or(embed_dim) &&
                     value.size(-1) == options.vdim.value_or(embed_dim),
                 "MultiheadAttention", "was made for widths ", embed_dim, ", ",
                 options.kdim.value_or(embed_dim), ", ", options.vdim.value_or(embed_dim),
                 "; got query ", query, ", key ", key, ", value ", value);
  // To [N, length, width]. One tensor given three times stays one tensor.
  const auto batch_first = [&](const Tensor& x) {
    if (!batched) return x.unsqueeze(0);
    return options.batch_first ? x : x.transpose(0, 1);
  };
  const Tensor q = batch_first(query);
  const Tensor k = key.is(query) ? q : batch_first(key);
  const Tensor v = value.is(key) ? k : value.is(query) ? q : batch_first(value);
  const auto [heads_q, heads_k, heads_v] = project(q, k, v);
  const int64_t N = heads_q.size(0), L = heads_q.size(2), S = heads_k.size(2);

  Tensor mask;  // additive, broadcastable to [N, H, L, S]
  const auto add_mask = [&](const Tensor& more) { mask = mask.defined() ? mask + more : more; };
  if (masks.attn_mask.defined()) {
    const Tensor& given = masks.attn_mask;
    TS_CHECK_SHAPE(given.shape() == (Shape{L, S}) || given.shape() == (Shape{N * num_heads, L, S}),
                   "MultiheadAttention", "attn_mask must be [", L, ", ", S, "] or [", N * num_heads,
                   ", ", L, ", ", S, "]; got ", given);
    const Tensor scores = additive(given, heads_q.dtype());
    add_mask(given.dim() == 2 ? scores : scores.view({N, num_heads, L, S}));
  }
  if (masks.key_padding_mask.defined()) {
    const Tensor& given = masks.key_padding_mask;
    TS_CHECK_SHAPE(given.numel() == N * S && given.size(-1) == S, "MultiheadAttention",
                   "key_padding_mask must be [", N, ", ", S, "]; got ", given);
    add_mask(additive(given, heads_q.dtype()).reshape({N, 1, 1, S}));
  }
  // Alone it is the fused op's own, which skips what nobody sees.
  const bool causal_alone = masks.causal && !mask.defined() && !masks.need_weights;
  if (masks.causal && !causal_alone) {
    const TensorOptions where{.dtype = kBool, .device = q.device()};
    add_mask(additive(triu(ones({L, S}, where), 1), heads_q.dtype()));
  }

  AttentionResult result;
  Tensor mixed;  // [N, H, L, E / H]
  const double dropout_p = is_training() ? options.dropout : 0;
  if (masks.need_weights) {
    const double scale = 1 / std::sqrt(static_cast<double>(embed_dim / num_heads));
    const Tensor scores = matmul(heads_q * scale, heads_k.transpose(-2, -1));
    const Tensor weights = dropout(masked_softmax(scores, mask), dropout_p, dropout_p > 0);
    mixed = matmul(weights, heads_v);
    result.weights = masks.average_weights ? weights.mean({1}) : weights;
    if (!batched) result.weights = result.weights.squeeze(0);
  } else {
    mixed = scaled_dot_product_attention(
        heads_q, heads_k, heads_v, {.mask = mask, .dropout = dropout_p, .causal = causal_alone});
  }
  const Tensor y = out_proj(mixed.transpose(1, 2).reshape({N, L, embed_dim}));
  result.output = !batched ? y.squeeze(0) : options.batch_first ? y : y.transpose(0, 1);
  return result;
}

}  // namespace tessera::nn
