// Transformer encoder and decoder (Vaswani et al. 2017), with torch's parameter names. A
// decoder-only model with fused kernels is in nn/models/gpt2.h.
#pragma once

#include <memory>

#include <tessera/nn/container.h>
#include <tessera/nn/dropout.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/module.h>
#include <tessera/nn/norm.h>
#include <tessera/nn/transformer/attention.h>

namespace tessera::nn {

struct TransformerLayerOptions {
  enum class Activation { kRelu, kGelu };
  int64_t dim_feedforward = 2048;
  double dropout = 0.1;
  Activation activation = Activation::kRelu;
  double layer_norm_eps = 1e-5;
  bool batch_first = false;  // [N, L, E] instead of [L, N, E]
  bool norm_first = false;   // x + f(norm(x)) instead of norm(x + f(x))
  bool bias = true;
};

// As in attention.h: true means "not allowed", floating masks are added to the scores.
struct EncoderMasks {
  Tensor src_mask = {};              // [L, L] or [N * heads, L, L]
  Tensor src_key_padding_mask = {};  // [N, L]
  bool causal = false;
  void visit_tensors(auto&& visit) { visit(src_mask), visit(src_key_padding_mask); }
};
struct DecoderMasks {
  Tensor tgt_mask = {};     // [T, T]
  Tensor memory_mask = {};  // [T, S]
  Tensor tgt_key_padding_mask = {};
  Tensor memory_key_padding_mask = {};
  bool causal = false;  // for the target
  void visit_tensors(auto&& visit) {
    visit(tgt_mask), visit(memory_mask);
    visit(tgt_key_padding_mask), visit(memory_key_padding_mask);
  }
};

// Self-attention and a two-layer perceptron, each with residual, dropout and LayerNorm.
class TransformerEncoderLayer : public Module<TransformerEncoderLayer> {
 public:
  using Options = TransformerLayerOptions;
  TransformerEncoderLayer(int64_t d_model, int64_t nhead,
                          const TransformerLayerOptions& options = {});
  Tensor forward(const Tensor& src, const EncoderMasks& masks = {});
  std::unique_ptr<TransformerEncoderLayer> remake() const {
    return std::make_unique<TransformerEncoderLayer>(d_model, nhead, options);
  }

  const int64_t d_model;
  const int64_t nhead;
  const TransformerLayerOptions options;
  MultiheadAttention& self_attn;
  Linear& linear1;
  Dropout& dropout;
  Linear& linear2;
  LayerNorm& norm1;
  LayerNorm& norm2;
  Dropout& dropout1;
  Dropout& dropout2;

 private:
  Tensor attend(const Tensor& x, const EncoderMasks& masks);
  Tensor feed_forward(const Tensor& x);
};

// Like the encoder's, with attention to `memory` between the two.
class TransformerDecoderLayer : public Module<TransformerDecoderLayer> {
 public:
  using Options = TransformerLayerOptions;
  TransformerDecoderLayer(int64_t d_model, int64_t nhead,
                          const TransformerLayerOptions& options = {});
  Tensor forward(const Tensor& tgt, const Tensor& memory, const DecoderMasks& masks = {});
  std::unique_ptr<TransformerDecoderLayer> remake() const {
    return std::make_unique<TransformerDecoderLayer>(d_model, nhead, options);
  }

  const int64_t d_model;
  const int64_t nhead;
  const TransformerLayerOptions options;
  MultiheadAttention& self_attn;
  MultiheadAttention& multihead_attn;
  Linear& linear1;
  Dropout& dropout;
  Linear& linear2;
  LayerNorm& norm1;
  LayerNorm& norm2;
  LayerNorm& norm3;
  Dropout& dropout1;
  Dropout& dropout2;
  Dropout& dropout3;

 private:
  Tensor attend(const Tensor& x, const DecoderMasks& masks);
  Tensor attend_memory(const Tensor& x, const Tensor& memory, const DecoderMasks& masks);
  Tensor feed_forward(const Tensor& x);
};

// num_layers layers "layers.0", ..., and a final LayerNorm "norm" if final_norm is set (norm_first
// needs it). Each layer draws its own initial values.
class TransformerEncoder : public Module<TransformerEncoder> {
 public:
  using Options = TransformerLayerOptions;
  TransformerEncoder(int64_t d_model, int64_t nhead, int64_t num_layers,
                     const TransformerLayerOptions& options = {}, bool final_norm = false);
  Tensor forward(const Tensor& src, const EncoderMasks& masks = {});
  std::unique_ptr<TransformerEncoder> remake() const;

  ModuleList& layers;
  LayerNorm* norm = nullptr;
};
class TransformerDecoder : public Module<TransformerDecoder> {
 public:
  using Options = TransformerLayerOptions;
  TransformerDecoder(int64_t d_model, int64_t nhead, int64_t num_layers,
                     const TransformerLayerOptions& options = {}, bool final_norm = false);
  Tensor forward(const Tensor& tgt, const Tensor& memory, const DecoderMasks& masks = {});
  std::unique_ptr<TransformerDecoder> remake() const;

  ModuleList& layers;
  LayerNorm* norm = nullptr;
};

}  // namespace tessera::nn
