// Llama (Touvron et al. 2023) and what is built like it: Mistral, Qwen2, Qwen3, Gemma 1 to 3 and
// Phi-3, with the parameter names and files of HuggingFace transformers: RMSNorm, rotary positions,
// grouped queries, a gated perceptron. LlamaConfig says in what they differ.
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
#include <tessera/nn/models/kv_cache.h>
#include <tessera/nn/models/llama_config.h>
#include <tessera/nn/models/visible_keys.h>
#include <tessera/nn/norm.h>
#include <tessera/nn/parallel_style.h>
#include <tessera/nn/transformer/documents.h>
#include <tessera/nn/transformer/rotary.h>

namespace tessera::nn::models {

// The parts of the model have transformers' names.
namespace llama {

// Holds `batch` sequences of `capacity` tokens (kv_cache.h).
class KvCache : public models::KvCache {
 public:
  KvCache(const LlamaConfig& config, int64_t batch, int64_t capacity, DType dtype = kF32,
          const Device& device = kCpu)
      : models::KvCache({.layers = config.layers,
                         .batch = batch,
                         .heads = config.keys(),
                         .capacity = capacity,
                         .width = config.head()},
                        dtype, device) {}
};

// Values that all layers of a kind share in one call.
struct View {
  RotaryAngles angles;
  SeenKeys keys;
  void visit_tensors(auto&& visit) { visit(angles), visit(keys); }
};
struct Positions {
  View all, window;  // of layers without and with a window
  void visit_tensors(auto&& visit) { visit(all), visit(window); }
};

struct Attention : Module<Attention> {
  Attention(const LlamaConfig& config, int64_t layer);
  Tensor forward(const Tensor& x, const Positions& positions, models::KvCache* cache);  // [B, T, C]

  const LlamaConfig config;
  const int64_t layer;
  Linear* qkv_proj = nullptr;  // with LlamaConfig::joined, in place of the three
  Linear* q_proj = nullptr;
  Linear* k_proj = nullptr;
  Linear* v_proj = nullptr;
  Linear& o_proj;
  RMSNorm* q_norm = nullptr;  // with LlamaConfig::head_norms
  RMSNorm* k_norm = nullptr;

 private:
  struct Projected {
    Tensor query, key, value;  // [B, H, T, E], not turned yet
  };
  Projected project(const Tensor& x);
};

// "SwiGLU" (Shazeer 2020): down(silu(gate(x)) * up(x)); the activation is the config's.
struct GatedMlp : Module<GatedMlp> {
  explicit GatedMlp(const LlamaConfig& config);
  Tensor forward(const Tensor& x);

  const GatedActivation activation;
  Linear* gate_up_proj = nullptr;  // with LlamaConfig::joined, in place of the two
  Linear* gate_proj = nullptr;
  Linear* up_proj = nullptr;
  Linear& down_proj;
};

struct DecoderLayer : Module<DecoderLayer> {
  DecoderLayer(const LlamaConfig& config, int64_t layer);
  Tensor forward(const Tensor& x, const Positions& positions, models::KvCache* cache);

  RMSNorm& input_layernorm;
  Attention& self_attn;
  RMSNorm& post_attention_layernorm;  // with post_norms of attention's result, else before the mlp
  RMSNorm* pre_feedforward_layernorm = nullptr;   // with LlamaConfig::post_norms
  RMSNorm* post_feedforward_layernorm = nullptr;  // with LlamaConfig::post_norms
  GatedMlp& mlp;
};

struct Decoder : Module<Decoder> {
  explicit Decoder(const LlamaConfig& config);
  // [B, T] -> [B, T, C]
  Tensor forward(const TokenRows& tokens, models::KvCache* cache, const Tensor& padding = {});

  const LlamaConfig config;
  Embedding& embed_tokens;
  ModuleList& layers;
  RMSNorm& norm;
  RotaryEmbedding& rotary_emb;
  RotaryEmbedding* window_rotary_emb = nullptr;  // with LlamaConfig::window_rotary
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
  // targets there is a loss and no logits, which are never in memory whole unless they are capped.
  // padding: [B] i64 or i32, tokens at the left of each sequence (of the cache and `tokens`) that
  // are none: nobody sees them, and positions count from the first token after them. Packed rows take neither
  // cache nor padding.
  LlamaOutput forward(const TokenRows& tokens, const Tensor& targets = {}, bool last_only = false,
                      KvCache* cache = nullptr, const Tensor& padding = {});

  // Reads a folder of transformers, with one model.safetensors or shards and an index.
  // `divide`: called with the model before it has memory, to divide it among ranks (fully_shard(),
  // parallelize_module()): then this rank reads and keeps its parts alone.
  static std::unique_ptr<Llama> from_pretrained(
      const std::string& folder, const std::function<void(ModuleBase& model)>& divide = {});
  // Files appear whole or not at all; config.json comes last.
  void save_pretrained(const std::string& folder, const std::string& max_shard_size = "10GB") const;

  std::unique_ptr<Llama> remake() const { return std::make_unique<Llama>(config); }
  std::vector<StyledModules> parallel_styles() const override;

  const LlamaConfig config;
  llama::Decoder& model;
  Linear& lm_head;
};

}  // namespace tessera::nn::models
