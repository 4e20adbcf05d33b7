// The configuration of a Llama, Mistral, Qwen2 or Qwen3, as in config.json of transformers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <tessera/core/dtype.h>
#include <tessera/nn/transformer/rotary.h>

namespace tessera::nn::models {

// The names of RotaryScaling in config.json, in its order.
inline constexpr std::string_view kRotaryScalings[] = {"default", "linear", "dynamic", "llama3"};

// The defaults are those of a small model of bytes.
struct LlamaConfig {
  std::string kind = "llama";  // model_type: llama, mistral, qwen2 or qwen3
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
  bool qkv_bias = false;  // qwen2; llama with attention_bias
  bool out_bias = false;  // llama and qwen3 with attention_bias
  bool mlp_bias = false;  // llama
  // qwen3: queries and keys of each head go through an RMSNorm before the rotation.
  bool head_norms = false;
  RotaryOptions rotary = {};
  // Layers from `first_window_layer` on attend to the `window` latest tokens only, including the
  // current one; 0: all layers attend to all tokens.
  int64_t window = 0;
  int64_t first_window_layer = 0;
  int64_t begin_of_text = -1;             // bos_token_id; negative: none
  std::vector<int64_t> end_of_text = {};  // eos_token_id: any of them ends a text

  int64_t keys() const { return kv_heads > 0 ? kv_heads : heads; }
  int64_t head() const { return head_dim > 0 ? head_dim : width / heads; }
  int64_t window_of(int64_t layer) const { return layer < first_window_layer ? 0 : window; }
  void check() const;  // throws ConfigError

  // Fields of transformers 4 (rope_theta, rope_scaling) and 5 (rope_parameters). FormatError,
  // IoError, ConfigError and UnsupportedError name file and field.
  static LlamaConfig read(const std::string& path);
  void write(const std::string& path, DType dtype) const;
};

}  // namespace tessera::nn::models
