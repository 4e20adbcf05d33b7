// GPT-2 (Radford et al. 2019) with the parameter names and files of HuggingFace transformers.
//
//     nn::models::Gpt model({.vocab_size = 256, .context = 64, .width = 128, .layers = 4});
//     auto out = model(batch.inputs, batch.targets);           // out.loss
//     model.save_pretrained("folder");                         // config.json, model.safetensors
//     auto same = nn::models::Gpt::from_pretrained("folder");  // also any GPT-2 from the hub
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <tessera/autograd/ops.h>
#include <tessera/nn/container.h>
#include <tessera/nn/dropout.h>
#include <tessera/nn/embedding.h>
#include <tessera/nn/fused.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/models/kv_cache.h>
#include <tessera/nn/models/visible_keys.h>
#include <tessera/nn/module.h>
#include <tessera/nn/norm.h>
#include <tessera/nn/parallel_style.h>
#include <tessera/nn/transformer/residual.h>

namespace tessera::nn::models {

struct GptConfig {
  int64_t vocab_size = 50257;
  int64_t context = 1024;  // n_positions: the longest sequence
  int64_t width = 768;     // n_embd
  int64_t layers = 12;
  int64_t heads = 12;
  int64_t inner = 0;  // width of the MLP, 0: 4 * width
  double dropout = 0;
  double layer_norm_eps = 1e-5;
  double initializer_range = 0.02;
  bool tied = true;  // the head's weight is the table's
  // The id that ends a document, as in transformers' generate(); negative: none.
  int64_t end_of_text = -1;
  std::string tokenizer = {};  // "bytes" or "gpt2", for programs that read the folder

  int64_t inner_width() const { return inner > 0 ? inner : 4 * width; }
  void check() const;  // throws ConfigError

  // config.json of transformers' GPT2Config. FormatError, IoError, ConfigError name file and field.
  static GptConfig read(const std::string& path);
  void write(const std::string& path, DType dtype) const;
};

// The parts of the model have transformers' names.
namespace gpt2 {

// Holds `batch` sequences of the model's context (kv_cache.h).
class KvCache : public models::KvCache {
 public:
  KvCache(const GptConfig& config, int64_t batch, DType dtype = kF32, const Device& device = kCpu)
      : models::KvCache({.layers = config.layers,
                         .batch = batch,
                         .heads = config.heads,
                         .capacity = config.context,
                         .width = config.width / config.heads},
                        dtype, device) {}
};

struct Attention : Module<Attention> {
  Attention(const GptConfig& config, size_t layer);
  Tensor forward(const Tensor& x, const SeenKeys& keys, models::KvCache* cache);  // [B, T, C]
  PartEnds ends() const { return {&c_attn, &c_proj}; }

  const int64_t heads;
  const size_t layer;
  const double dropout;
  Linear& c_attn;
  Linear& c_proj;
};

struct Block : Module<Block> {
  Block(const GptConfig& config, size_t layer);
  Residual forward(const Residual& x, const SeenKeys& keys, models::KvCache* cache);

  const double dropout;
  LayerNorm& ln_1;
  Attention& attn;
  LayerNorm& ln_2;
  Mlp& mlp;
};

struct Transformer : Module<Transformer> {
  explicit Transformer(const GptConfig& config);
  // [B, T] -> [B, T, C]
  Tensor forward(const TokenRows& tokens, models::KvCache* cache, const Tensor& padding = {});

  const GptConfig config;
  Embedding& wte;
  Embedding& wpe;
  ModuleList& h;
  LayerNorm& ln_f;
};

}  // namespace gpt2

enum class Logits {
  kWithoutLoss,  // computed where no targets are given; a loss alone never holds [B, T, V]
  kAll,
  kLast,  // for the last token of each sequence: [B, 1, V]
};

struct GptOutput {
  Tensor logits;  // [B, T, V] or undefined
  Tensor loss;    // mean cross-entropy over targets other than -100, or undefined
  void visit_tensors(auto&& visit) { visit(logits), visit(loss); }
};

class Gpt : public Module<Gpt> {
 public:
  explicit Gpt(const GptConfig& config);

  // tokens: [B, T] i64 or i32, T + cache length <= context; targets: [B, T], the token that follows
  // each one (-100: none). With both logits and loss, all logits are materialized. padding: [B] i64
  // or i32, tokens at the left of each sequence (of the cache and `tokens`) that are none: nobody
  // sees them, and positions count from the first token after them. Packed rows may be longer than
  // the context, their documents not, and take neither cache nor padding.
  GptOutput forward(const TokenRows& tokens, const Tensor& targets = {},
                    Logits logits = Logits::kWithoutLoss, KvCache* cache = nullptr,
                    const Tensor& padding = {});

  // Reads a folder of transformers: config.json and model.safetensors, names with or without the
  // prefix "transformer.", c_attn, c_fc and c_proj weights as [in, out] (Conv1D). Causal mask
  // buffers are ignored. If config.json ties the head to wte and the file has other values for it,
  // the head is untied, and a line on stderr says so. FormatError, IoError, ValueError.
  // `divide`: called with the model before it has memory, to divide it among ranks (fully_shard(),
  // parallelize_module()): then this rank reads and keeps its parts alone.
  static std::unique_ptr<Gpt> from_pretrained(
      const std::string& folder, const std::function<void(ModuleBase& model)>& divide = {});
  void load_weights(const std::string& safetensors_path);
  // The tensors of a file under the model's names, as views of its bytes: what is stored as [in,
  // out] is seen transposed. For big models (accelerate/big_model).
  static StateDict read_weights(const std::string& safetensors_path);
  // Works on any device. Creates a missing folder. Files appear whole or not at all,
  // model.safetensors last; `metadata` goes into its header.
  void save_pretrained(const std::string& folder,
                       const std::map<std::string, std::string>& metadata = {}) const;
  // The same with whole weights that were gathered from shards (distributed::full_state_dict).
  void save_pretrained(const StateDict& weights, const std::string& folder,
                       const std::map<std::string, std::string>& metadata = {}) const;

  std::unique_ptr<Gpt> remake() const { return std::make_unique<Gpt>(config); }
  std::vector<StyledModules> parallel_styles() const override;

  const GptConfig config;
  gpt2::Transformer& transformer;
  Linear& lm_head;  // shares wte's weight if tied

 private:
  void initialise();
};

}  // namespace tessera::nn::models
