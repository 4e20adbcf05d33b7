// The configuration of a Llama-like decoder, as in config.json of transformers 5: Llama 1 to 3,
// Mistral, Qwen2, Qwen3, Gemma 1 to 3 (text) and Phi-3.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <tessera/core/dtype.h>
#include <tessera/nn/transformer/rotary.h>

namespace tessera::nn::models {

// What the gate of a perceptron goes through, "hidden_act" in config.json.
enum class GatedActivation {
  kSilu,      // "silu"
  kGelu,      // "gelu"
  kGeluTanh,  // "gelu_pytorch_tanh"
};

// The defaults are those of a small model of bytes.
struct LlamaConfig {
  // model_type: llama, mistral, qwen2, qwen3, gemma, gemma2, gemma3_text or phi3. It says how the
  // config.json is read and written, what files name the parts of, and nothing of the calculation,
  // which the fields below say.
  std::string kind = "llama";
  int64_t vocab_size = 256;
  int64_t context = 128;  // max_position_embeddings; positions have no limit of their own
  int64_t width = 128;    // hidden_size
  int64_t inner = 344;    // intermediate_size, of the gated perceptron
  int64_t layers = 4;
  int64_t heads = 4;
  int64_t kv_heads = 2;  // num_key_value_heads; 0: as many as heads
  int64_t head_dim = 0;  // 0: width / heads
  double rms_norm_eps = 1e-6;
  double initializer_range = 0.02;
  bool tied = true;       // the head's weight is the table's
  bool qkv_bias = false;  // qwen2; llama, qwen3 and gemma with attention_bias
  bool out_bias = false;  // llama, qwen3 and gemma with attention_bias
  bool mlp_bias = false;  // llama
  // qwen3, gemma3_text: queries and keys of each head go through an RMSNorm before the rotation.
  bool head_norms = false;
  RotaryOptions rotary = {};
  // Layers with a window attend to the `window` latest tokens only, including the current one; 0:
  // all layers attend to all tokens.
  int64_t window = 0;
  std::vector<bool> windowed = {};        // layer_types: which layers have the window; empty: all
  int64_t begin_of_text = -1;             // bos_token_id; negative: none
  std::vector<int64_t> end_of_text = {};  // eos_token_id: any of them ends a text
  GatedActivation activation = GatedActivation::kSilu;
  int64_t padding_token = -1;    // pad_token_id, kept for files alone; negative: none
  double attention_dropout = 0;  // of attention weights, while training
  double rotated = 1;  // partial_rotary_factor: this part of a head's features is rotated (phi3)
  std::optional<RotaryOptions> window_rotary = {};  // gemma3_text: of layers with a window
  // phi3: one layer makes queries, keys and values (qkv_proj), one gate and up (gate_up_proj).
  bool joined = false;
  // gemma, gemma2, gemma3_text: norms multiply with 1 + weight, and token embeddings are multiplied
  // with the root of the width, rounded to their dtype.
  bool norms_plus_one = false;
  bool scaled_embedding = false;
  bool post_norms = false;  // gemma2, gemma3_text: norms behind attention and perceptron, too
  double query_scalar = 0;  // query_pre_attn_scalar: scores over its root; 0: head()
  double score_cap = 0;     // attn_logit_softcapping: cap * tanh(score / cap); 0: none
  double logit_cap = 0;     // final_logit_softcapping

  int64_t keys() const { return kv_heads > 0 ? kv_heads : heads; }
  int64_t head() const { return head_dim > 0 ? head_dim : width / heads; }
  int64_t rotated_features() const {
    return static_cast<int64_t>(static_cast<double>(head()) * rotated);
  }
  int64_t window_of(int64_t layer) const {
    return windowed.empty() || windowed.at(static_cast<size_t>(layer)) ? window : 0;
  }
  void check() const;  // throws ConfigError

  // Fields of transformers 4 (rope_theta, rope_scaling) and 5 (rope_parameters); fields that are not
  // there are those of transformers' classes. FormatError, IoError, ConfigError and UnsupportedError
  // name file and field.
  static LlamaConfig read(const std::string& path);
  void write(const std::string& path, DType dtype) const;
  // The model_type of all kinds, with commas.
  static std::string known_kinds();
  static bool is_known(const std::string& kind);
};

}  // namespace tessera::nn::models
