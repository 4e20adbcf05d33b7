// Llama (Touvron et al. 2023), Mistral, Qwen2 and Qwen3 with the parameter names and files of
// HuggingFace transformers: RMSNorm, rotary positions, grouped queries, a gated perceptron.
//
//     auto model = nn::models::Llama::from_pretrained("TinyLlama-1.1B");
//     Tensor loss = (*model)(batch.inputs, batch.targets).loss;
//     model->save_pretrained("folder");  // config.json, model.safetensors
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <tessera/autograd/ops.h>
#include <tessera/nn/container.h>
#include <tessera/nn/embedding.h>
#include <tessera/nn/fused.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/models/llama_config.h>
#include <tessera/nn/norm.h>
#include <tessera/nn/parallel_style.h>
#include <tessera/nn/transformer/rotary.h>

namespace tessera::nn::models {

// The parts of the model have transformers' names.
namespace llama {

// Keys and values of earlier tokens, so that generation computes each token once.
class KvCache {
 public:
  // Allocates for `batch` sequences of `capacity` tokens.
  KvCache(const LlamaConfig& config, int64_t batch, int64_t capacity, DType dtype = kF32,
          const Device& device = kCpu);
  int64_t length() const { return length_; }  // tokens held
  struct Held {
    Tensor keys, values;  // [B, keys(), length + T, head()]
  };
  // Appends the keys and values [B, keys(), T, head()] of one layer and returns all of them.
  Held append(size_t layer, const Tensor& keys, const Tensor& values);
  void advance(int64_t tokens) { length_ += tokens; }  // after the last layer

 private:
  std::vector<Tensor> keys_, values_;
  int64_t length_ = 0;
};

// Values that all layers of one call share.
struct Positions {
  RotaryAngles angles;
  AttentionOptions all, window;  // masks of layers without and with a window
  void visit_tensors(auto&& visit) {
    visit(angles.cos), visit(angles.sin), visit(all.mask), visit(window.mask);
  }
};

struct Attention : Module<Attention> {
  Attention(const LlamaConfig& config, int64_t layer);
  Tensor forward(const Tensor& x, const Positions& positions, KvCache* cache);  // [B, T, C]

  const LlamaConfig config;
  const int64_t layer;
  Linear& q_proj;
  Linear& k_proj;
  Linear& v_proj;
  Linear& o_proj;
  RMSNorm* q_norm = nullptr;  // with LlamaConfig::head_norms
  RMSNorm* k_norm = nullptr;
};

// "SwiGLU" (Shazeer 2020): down(silu(gate(x)) * up(x)).
struct GatedMlp : Module<GatedMlp> {
  explicit GatedMlp(const LlamaConfig& config);
  Tensor forward(const Tensor& given) {
    const Tensor x = entered(gate_proj, given);
    return down_proj(silu(gate_proj(x)) * up_proj(x));
  }

  Linear& gate_proj;
  Linear& up_proj;
  Linear& down_proj;
};

struct DecoderLayer : Module<DecoderLayer> {
  DecoderLayer(const LlamaConfig& config, int64_t layer);
  Tensor forward(const Tensor& x, const Positions& positions, KvCache* cache) {
    const Tensor middle = x + self_attn(input_layernorm(x), positions, cache);
    return middle + mlp(post_attention_layernorm(middle));
  }

  RMSNorm& input_layernorm;
  Attention& self_attn;
  RMSNorm& post_attention_layernorm;
  GatedMlp& mlp;
};

struct Decoder : Module<Decoder> {
  explicit Decoder(const LlamaConfig& config);
  Tensor forward(const Tensor& tokens, KvCache* cache);  // [B, T] -> [B, T, C]

  const LlamaConfig config;
  Embedding& embed_tokens;
  ModuleList& layers;
  RMSNorm& norm;
  RotaryEmbedding& rotary_emb;
};

}  // namespace llama

struct LlamaOutput {
  Tensor logits;  // [B, T, V], or of the last tokens [B, 1, V]; undefined with a loss
  Tensor loss;    // mean cross-entropy over targets other than -100, or undefined
  void visit_tensors(auto&& visit) { visit(logits), visit(loss); }
};

class Llama : public Module<Llama> {
 public:
  explicit Llama(const LlamaConfig& config);
  // tokens: [B, T] i64 or i32; targets: [B, T], the token that follows each one (-100: none). With
  // targets there is a loss and no logits, which are never in memory whole.
  LlamaOutput forward(const Tensor& tokens, const Tensor& targets = {}, bool last_only = false,
                      llama::KvCache* cache = nullptr);

  // Reads a folder of transformers, with one model.safetensors or shards and an index.
  static std::unique_ptr<Llama> from_pretrained(const std::string& folder);
  // Files appear whole or not at all; config.json comes last.
  void save_pretrained(const std::string& folder, const std::string& max_shard_size = "10GB") const;

  std::unique_ptr<Llama> remake() const { return std::make_unique<Llama>(config); }
  std::vector<StyledModules> parallel_styles() const override;

  const LlamaConfig config;
  llama::Decoder& model;
  Linear& lm_head;
};

}  // namespace tessera::nn::models
