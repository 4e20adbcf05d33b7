#include <tessera/nn/models/gguf.h>
#include <tessera/nn/quantize/quantize.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/io/atomic_file.h>

namespace tessera::nn::models {
namespace {

constexpr std::string_view kGguf = "save_gguf";
constexpr uint64_t kAlignment = 32;
constexpr int64_t kBlock = 32;

// The numbers of the format.
enum class ValueType : uint32_t { kU32 = 4, kF32 = 6, kString = 8 };
enum class TensorType : uint32_t { kF32 = 0, kF16 = 1, kQ8_0 = 8, kBF16 = 30 };

class Bytes {
 public:
  template <class T>
  void put(T value) {
    const auto* bytes = reinterpret_cast<const char*>(&value);
    data_.append(bytes, sizeof value);
  }
  void put_text(const std::string& text) {
    put<uint64_t>(text.size());
    data_ += text;
  }
  const std::string& data() const { return data_; }

 private:
  std::string data_;
};

class Metadata {
 public:
  void add(const std::string& key, const std::string& value) {
    begin(key, ValueType::kString);
    bytes_.put_text(value);
  }
  void add(const std::string& key, int64_t value) {
    begin(key, ValueType::kU32);
    bytes_.put(static_cast<uint32_t>(value));
  }
  void add(const std::string& key, double value) {
    begin(key, ValueType::kF32);
    bytes_.put(static_cast<float>(value));
  }
  uint64_t count() const { return count_; }
  const std::string& data() const { return bytes_.data(); }

 private:
  void begin(const std::string& key, ValueType type) {
    bytes_.put_text(key);
    bytes_.put(type);
    ++count_;
  }
  Bytes bytes_;
  uint64_t count_ = 0;
};

std::string architecture_of(const LlamaConfig& config) {
  if (config.kind == "mistral") return "llama";
  return config.kind == "gemma3_text" ? "gemma3" : config.kind;
}
bool interleaves_heads(const LlamaConfig& config) { return architecture_of(config) == "llama"; }

void refuse_what_has_no_field(const LlamaConfig& config) {
  const auto check = [](bool holds, const char* what) {
    TS_CHECK_AS(UnsupportedError, holds, kGguf, what,
                ", which GGUF has no field for; keep such a model as safetensors");
  };
  check(config.rotary.scaling != RotaryScaling::kDynamic, "the rotary scaling is dynamic");
  check(config.rotary.truncate, "the rotary scaling yarn is not truncated to whole pairs");
  check(!config.mlp_bias, "the perceptron has biases (mlp_bias)");
  check(!config.window_rotary || config.window_rotary->scaling == RotaryScaling::kNone,
        "the rotation of layers with a window is scaled");
  check(!config.window_rotary || config.window_rotary->theta == 1e4,
        "rope_local_base_freq is not that of Gemma 3, 10000");
  // llama.cpp knows by the architecture which layers have a window: every second of gemma2, all but
  // every sixth of gemma3, all of a phi3, none of the others.
  const int64_t period = config.kind == "gemma2" ? 2 : config.kind == "gemma3_text" ? 6 : 0;
  for (int64_t i = 0; i < config.layers && config.window > 0; ++i) {
    const bool windowed = period > 0 ? (i + 1) % period != 0 : config.kind == "phi3";
    const bool is_wide = config.window >= config.context;  // and hides nothing
    check(
        is_wide || (config.window_of(i) > 0) == windowed,
        "the layers with a window (layer_types, sliding_window) are not those of the architecture");
  }
}

void add_rope(Metadata& data, const std::string& prefix, const LlamaConfig& config) {
  const RotaryOptions& rotary = config.rotary;
  data.add(prefix + "rope.dimension_count", config.rotated_features());
  data.add(prefix + "rope.freq_base", rotary.theta);
  // Of llama3 and longrope the pairs' divisors are tensors.
  if (rotary.scaling == RotaryScaling::kLinear || rotary.scaling == RotaryScaling::kYarn) {
    data.add(prefix + "rope.scaling.type",
             std::string(rotary.scaling == RotaryScaling::kLinear ? "linear" : "yarn"));
    data.add(prefix + "rope.scaling.factor", rotary.factor);
  }
  if (rotary.scaling == RotaryScaling::kYarn) {
    data.add(prefix + "rope.scaling.yarn_beta_fast", rotary.beta_fast);
    data.add(prefix + "rope.scaling.yarn_beta_slow", rotary.beta_slow);
  }
  if (rotary.scaling == RotaryScaling::kYarn || rotary.scaling == RotaryScaling::kLongRope) {
    data.add(prefix + "rope.scaling.original_context_length", rotary.context);
    // llama.cpp multiplies with yarn's 0.1 log(factor) + 1 itself.
    const double amplitude = RotaryEmbedding(config.rotated_features(), rotary).amplitude();
    const double known =
        rotary.scaling == RotaryScaling::kYarn ? 0.1 * std::log(rotary.factor) + 1 : 1;
    data.add(prefix + "rope.scaling.attn_factor", amplitude / known);
  }
}

Metadata metadata_of(const LlamaConfig& config, GgufType type) {
  constexpr int64_t kFileTypes[] = {0, 1, 32, 7};  // llama.cpp's, in the order of GgufType
  const std::string name = architecture_of(config), prefix = name + ".";
  Metadata data;
  data.add("general.architecture", name);
  data.add("general.file_type", kFileTypes[static_cast<size_t>(type)]);
  data.add("general.quantization_version", int64_t{2});
  data.add(prefix + "vocab_size", config.vocab_size);
  data.add(prefix + "context_length", config.context);
  data.add(prefix + "embedding_length", config.width);
  data.add(prefix + "block_count", config.layers);
  data.add(prefix + "feed_forward_length", config.inner);
  data.add(prefix + "attention.head_count", config.heads);
  data.add(prefix + "attention.head_count_kv", config.keys());
  data.add(prefix + "attention.key_length", config.head());
  data.add(prefix + "attention.value_length", config.head());
  data.add(prefix + "attention.layer_norm_rms_epsilon", config.rms_norm_eps);
  if (config.window > 0) data.add(prefix + "attention.sliding_window", config.window);
  if (config.score_cap > 0) data.add(prefix + "attn_logit_softcapping", config.score_cap);
  if (config.logit_cap > 0) data.add(prefix + "final_logit_softcapping", config.logit_cap);
  if (config.query_scalar > 0) {
    data.add(prefix + "attention.scale", 1 / std::sqrt(config.query_scalar));
  }
  add_rope(data, prefix, config);
  if (config.begin_of_text >= 0) data.add("tokenizer.ggml.bos_token_id", config.begin_of_text);
  if (!config.end_of_text.empty()) {
    data.add("tokenizer.ggml.eos_token_id", config.end_of_text.front());
  }
  return data;
}

struct Entry {
  std::string name;
  Tensor tensor;
  TensorType type = TensorType::kF32;
};

uint64_t bytes_of(const Entry& entry) {
  const auto count = static_cast<uint64_t>(entry.tensor.numel());
  if (entry.type == TensorType::kQ8_0) return count / kBlock * (kBlock + 2);
  return count * (entry.type == TensorType::kF32 ? 4 : 2);
}
uint64_t padded(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

std::string name_in_gguf(const std::string& name, const LlamaConfig& config) {
  static const std::pair<std::string, std::string> kWhole[] = {
      {"model.embed_tokens.", "token_embd."},
      {"model.norm.", "output_norm."},
      {"lm_head.", "output."}};
  for (const auto& [here, there] : kWhole) {
    if (name.starts_with(here)) return there + name.substr(here.size());
  }
  const std::string before_mlp = config.post_norms ? "post_attention_norm." : "ffn_norm.";
  const std::pair<std::string, std::string> of_layer[] = {
      {"input_layernorm.", "attn_norm."},
      {"self_attn.q_proj.", "attn_q."},
      {"self_attn.k_proj.", "attn_k."},
      {"self_attn.v_proj.", "attn_v."},
      {"self_attn.qkv_proj.", "attn_qkv."},
      {"self_attn.o_proj.", "attn_output."},
      {"self_attn.q_norm.", "attn_q_norm."},
      {"self_attn.k_norm.", "attn_k_norm."},
      {"post_attention_layernorm.", before_mlp},
      {"pre_feedforward_layernorm.", "ffn_norm."},
      {"post_feedforward_layernorm.", "post_ffw_norm."},
      {"mlp.gate_proj.", "ffn_gate."},
      {"mlp.up_proj.", "ffn_up."},
      {"mlp.gate_up_proj.", "ffn_up."},
      {"mlp.down_proj.", "ffn_down."}};
  const std::string prefix = "model.layers.";
  const size_t dot = name.find('.', prefix.size());
  const std::string rest = name.substr(dot + 1);
  for (const auto& [here, there] : of_layer) {
    if (rest.starts_with(here)) {
      return "blk." + name.substr(prefix.size(), dot - prefix.size()) + "." + there +
             rest.substr(here.size());
    }
  }
  TS_THROW(UnsupportedError, kGguf, "'", name,
           "' has no name in GGUF; merge and remove adapters first");
}

// Rows of a head: its pairs (i, i + E/2) side by side.
Tensor interleaved(const Tensor& x, int64_t head) {
  Shape shape = {x.size(0) / head, 2, head / 2};
  Shape whole = {x.size(0)};
  if (x.dim() == 2) {
    return x.reshape({x.size(0) / head, 2, head / 2, x.size(1)})
        .transpose(1, 2)
        .reshape({x.size(0), x.size(1)});
  }
  return x.reshape(shape).transpose(1, 2).reshape(whole);
}

// What a pair's frequency is divided by, of scalings that differ between pairs.
void add_divisors(std::vector<Entry>& entries, const LlamaConfig& config) {
  const RotaryOptions& rotary = config.rotary;
  const int64_t pairs = config.rotated_features() / 2;
  const auto add = [&](const char* name, const std::vector<double>& values) {
    entries.push_back({name, tensor(std::span<const double>(values), {pairs}, kF32)});
  };
  if (rotary.scaling == RotaryScaling::kLongRope) {
    add("rope_factors_long.weight", rotary.long_factor);
    add("rope_factors_short.weight", rotary.short_factor);
  } else if (rotary.scaling == RotaryScaling::kLlama3) {
    const RotaryEmbedding plain(2 * pairs, {.theta = rotary.theta}), scaled(2 * pairs, rotary);
    const Tensor values = plain.frequencies(1, kCpu) / scaled.frequencies(1, kCpu);
    entries.push_back({"rope_freqs.weight", values.to(kF32)});
  }
}

std::vector<Entry> entries_of(const Llama& model, GgufType type) {
  constexpr TensorType kTypes[] = {TensorType::kF32, TensorType::kF16, TensorType::kBF16,
                                   TensorType::kQ8_0};
  const LlamaConfig& config = model.config;
  std::vector<Entry> entries;
  add_divisors(entries, config);
  const bool tied = model.lm_head.weight.is(model.model.embed_tokens.weight);
  for (const auto& [name, given] : model.state_dict()) {
    if (tied && name == "lm_head.weight") continue;
    Tensor x = given.detach().to(kCpu);
    if (interleaves_heads(config) &&
        (name.find("q_proj.") != std::string::npos || name.find("k_proj.") != std::string::npos)) {
      x = interleaved(x, config.head());
    }
    if (x.dim() == 1) {
      x = x.to(kF32);
      if (config.norms_plus_one && name.ends_with("norm.weight")) x = x + 1;
      entries.push_back({name_in_gguf(name, config), x});
      continue;
    }
    TensorType of_matrix = kTypes[static_cast<size_t>(type)];
    if (of_matrix == TensorType::kQ8_0 && x.size(1) % kBlock != 0) of_matrix = TensorType::kF16;
    entries.push_back({name_in_gguf(name, config), x, of_matrix});
  }
  return entries;
}

void write_quantized(AtomicFile& file, const Tensor& tensor) {
  const Tensor x = tensor.to(kF32).contiguous().view({-1, kBlock});
  const Tensor scale = amax(abs(x), {1}) / 127.0;
  const Tensor stored = scale.to(kF16);
  const auto* const scales = static_cast<const float*>(scale.data());
  const auto* const values = static_cast<const float*>(x.data());
  const auto* const halves = static_cast<const char*>(stored.data());
  for (int64_t block = 0; block < x.size(0); ++block) {
    char bytes[kBlock + 2];
    std::memcpy(bytes, halves + 2 * block, 2);
    const float rate = scales[block] > 0 ? 1 / scales[block] : 0;
    for (int64_t i = 0; i < kBlock; ++i) {
      bytes[2 + i] = static_cast<char>(std::round(values[block * kBlock + i] * rate));
    }
    file.write(bytes, sizeof bytes);
  }
}

void write_tensor(AtomicFile& file, const Entry& entry) {
  const uint64_t before = file.size();
  if (entry.type == TensorType::kQ8_0) {
    write_quantized(file, entry.tensor);
  } else {
    const DType dtype = entry.type == TensorType::kF32   ? kF32
                        : entry.type == TensorType::kF16 ? kF16
                                                         : kBF16;
    const Tensor x = entry.tensor.to(dtype).contiguous();
    file.write(x.data(), static_cast<size_t>(x.nbytes()));
  }
  const uint64_t written = file.size() - before;
  file.write(std::string(static_cast<size_t>(padded(written) - written), '\0'));
}

}  // namespace

void save_gguf(const Llama& model, const std::string& path, const GgufOptions& options) {
  const NoGradGuard no_grad;
  refuse_what_has_no_field(model.config);
  refuse_quantized_layers(model, "save_gguf");
  const std::vector<Entry> entries = entries_of(model, options.type);
  const Metadata metadata = metadata_of(model.config, options.type);
  Bytes head;
  head.put<uint32_t>(0x46554747);  // "GGUF"
  head.put<uint32_t>(3);
  head.put<uint64_t>(entries.size());
  head.put<uint64_t>(metadata.count());
  Bytes table;
  uint64_t offset = 0;
  for (const Entry& entry : entries) {
    table.put_text(entry.name);
    table.put(static_cast<uint32_t>(entry.tensor.dim()));
    for (int d = entry.tensor.dim() - 1; d >= 0; --d) {  // the innermost first
      table.put(static_cast<uint64_t>(entry.tensor.size(d)));
    }
    table.put(entry.type);
    table.put(offset);
    offset += padded(bytes_of(entry));
  }
  AtomicFile file(path);
  file.write(head.data());
  file.write(metadata.data());
  file.write(table.data());
  file.write(std::string(static_cast<size_t>(padded(file.size()) - file.size()), '\0'));
  for (const Entry& entry : entries) write_tensor(file, entry);
  file.commit();
}

}  // namespace tessera::nn::models
