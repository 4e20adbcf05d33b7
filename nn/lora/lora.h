// LoRA (Hu et al. 2021, https://arxiv.org/abs/2106.09685): a frozen model learns through small
// adapters. An adapted layer with weight W has matrices A and B of a low rank r and returns
//
//     base(x) + scaling * B(A(dropout(x)))        scaling = alpha / r
//
//     nn::add_lora(model, {.names = {"c_attn", "c_proj"}, .rank = 8, .alpha = 16});
//     optim::AdamW optimizer(nn::trainable_parameters(model), {.lr = 1e-4});
//     ...                               // train as ever: only the adapters learn
//     nn::save_lora(model, "adapter");  // the files of PEFT: PeftModel.from_pretrained
//     nn::merge_lora(model);            // W + scaling * B A: no cost in serving
//
// Adapters are added in place: types and names of the model and the keys of its state do not
// change. The adapters are children of the layers, "NAME.lora_A" and "NAME.lora_B", called by the
// layer's forward hook, so autocast, checkpoint(), clone(), train(), replicas and sharded units
// treat them as any other module, and fused ops (nn/fused.h) do not bypass them. A module that
// reads the layer's weight itself (a tied head) reads the base's.
//
// Adapters work on Linear, Embedding, Conv1d and Conv2d without groups. For weights [out, in], A is
// [r, in] and B is [out, r]; for an Embedding of [rows, width], A is [rows, r] and B is [width, r];
// for convolutions A is [r, in, kernel...] and B is [out, r, 1...]. Adapters are f32 (f64 for f64)
// whatever dtype the base is stored in. A call costs 2 r (in + out) more operations a row, and one
// pass over the output.
//
// A model can have several named adapters. One is active: only it is called and trained, and every
// function here applies to it unless it names another.
//
//     nn::add_lora(model, {.names = {"c_attn"}});                          // "default"
//     nn::add_lora(model, {.adapter = "poems", .names = {"c_attn", "c_proj"}, .rank = 16});
//     nn::set_lora(model, "poems");
//
// First load the base, then add_lora, then replicate, shard or prepare. The names and meanings of
// the options are those of PEFT's LoraConfig (https://github.com/huggingface/peft).
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <tessera/core/state/state_dict.h>
#include <tessera/nn/module.h>

namespace tessera::nn {

enum class LoraBias {
  kNone,      // no bias is trained
  kAll,       // every bias of the model
  kLoraOnly,  // biases of adapted layers
};
// B begins as zeros, so that the model is unchanged; an Embedding's A is zeros and its B standard
// normal. Values depend on the seed and the dotted names only.
enum class LoraInit {
  kKaiming,   // A uniform in +-1/sqrt(fan in): kaiming_uniform with slope sqrt(5)
  kGaussian,  // A normal with deviation 1/r
};

template <class Value>
using LoraPatterns = std::vector<std::pair<std::string, Value>>;

struct LoraOptions {
  std::string adapter = "default";  // its name: letters, digits, - and _
  // Which layers: dotted names or their ends ("c_attn" also means "transformer.h.0.attn.c_attn").
  // {"all-linear"}: every Linear except lm_head, as PEFT leaves it out, and those whose weight is
  // tied to another module's.
  std::vector<std::string> names = {};  // PEFT: target_modules, a list
  // Instead of names: a regular expression (Perl's, core/regex.h) that matches whole dotted names.
  std::string pattern = {};  // PEFT: target_modules, a string
  // With names: only modules in blocks of these numbers, the first number of a dotted name, or the
  // first after one of `layers_pattern` (regular expressions) if given. Whole dotted names are
  // adapted in any case.
  std::vector<int64_t> layers = {};              // PEFT: layers_to_transform
  std::vector<std::string> layers_pattern = {};  // PEFT: the same
  std::vector<std::string> exclude = {};         // names or ends of names that are left out
  int64_t rank = 8;                              // PEFT: r
  double alpha = 8;                              // PEFT: lora_alpha
  double dropout = 0;  // of a Linear's or convolution's input, in training
  LoraBias bias = LoraBias::kNone;
  bool use_rslora = false;  // scaling = alpha / sqrt(r): Kalajdzievski 2023
  LoraInit init = LoraInit::kKaiming;
  // Modules (names or ends of names) that are trained and saved in full, such as a new head. They
  // change in place, without a copy of their old values, and are not adapted.
  std::vector<std::string> modules_to_save = {};
  // Another rank or alpha for some layers: the end of a dotted name, as a regular expression. The
  // first that matches counts.
  LoraPatterns<int64_t> rank_pattern = {};
  LoraPatterns<double> alpha_pattern = {};
  // Frozen parameters are stored in this dtype, kBF16 for half the bytes; trained ones are not
  // converted. Calls then need autocast, or inputs of this dtype and no module that is trained in
  // full.
  std::optional<DType> base_dtype = {};
};

struct LoraSummary {
  std::vector<std::string> adapted;  // dotted names, in the order of the model
  int64_t trainable = 0;             // elements of parameters that require grad
  int64_t total = 0;                 // elements of all parameters, adapters included
};

// Freezes the model, drops the gradients of frozen parameters, and adds adapters. On an error
// nothing is changed. ConfigError: a name, an exclusion or a pattern that matches nothing (the
// message lists what exists), a rank below 1, dropout outside of [0, 1), an existing adapter, a
// model that is merged or sharded. UnsupportedError: a match that is none of the layers above. A
// further adapter does not change the active one until set_lora(); it may train nothing besides A
// and B, and may not change the base's dtype: else UnsupportedError.
LoraSummary add_lora(ModuleBase& model, const LoraOptions& options);

// The options of add_lora; nullptr for a model without adapters.
const LoraOptions* lora_options(ModuleBase& model);

// The adapters' names, sorted, and the active one's (empty without adapters).
std::vector<std::string> lora_adapter_names(ModuleBase& model);
std::string active_lora(ModuleBase& model);
// Activates this adapter: only it takes part in calls and requires grad. Biases and modules that
// are trained in full do not change. Make the optimizer anew from trainable_parameters(); shard a
// model after activating the adapter to train. ValueError: no such adapter, merged.
// adapter, merged.
void set_lora(ModuleBase& model, const std::string& adapter);

// Named parameters that require grad, for the optimizer of an adapted model.
NamedTensors trainable_parameters(const ModuleBase& model);

// Replaces each adapted weight by W + scaling * B A, calculated in the adapters' dtype and rounded
// once; adapters then add nothing. The original weight is kept, and unmerge_lora restores that
// tensor, discarding writes to the merged one. Weights that are tied to an adapted one keep their
// values. Memory: adapted weights twice while merged. ValueError: no adapters, merged already (not
// merged), a sharded weight.
void merge_lora(ModuleBase& model);
void unmerge_lora(ModuleBase& model);
bool is_lora_merged(ModuleBase& model);

// Removes the adapters. Merged weights stay merged: after merge_lora the model is a plain one with
// the adapted weights. Frozen parameters stay frozen; requires_grad_() unfreezes them.
void remove_lora(ModuleBase& model);
// Removes one of several. ValueError: no such adapter, or the active one.
void remove_lora(ModuleBase& model, const std::string& adapter);

// In the scope the adapters add nothing: the model without adapters, for example as the reference
// of a preference loss. Biases and modules that are trained in place keep their trained values.
// ValueError: no adapters, or merged.
class [[nodiscard]] LoraDisabled {
 public:
  explicit LoraDisabled(ModuleBase& model);
  ~LoraDisabled();
  LoraDisabled(const LoraDisabled&) = delete;
  LoraDisabled& operator=(const LoraDisabled&) = delete;

 private:
  ModuleBase& model_;
};

// Adapters, trained biases and modules trained in full by PEFT's names
// ("base_model.model.NAME.lora_A.weight"; "NAME.lora_embedding_A" for an Embedding, transposed as
// in PEFT). Tensors share memory with the model, except transposed ones.
StateDict lora_state_dict(ModuleBase& model);
// Copies such a state into the model. On a mismatch nothing is written: one ValueError lists all
// missing, unexpected and misshapen names. Parameters of the base may be among them. ConfigError
// for a sharded model: load before sharding.
void load_lora_state_dict(ModuleBase& model, const StateDict& state);

// Writes PEFT's folder: adapter_model.safetensors, and adapter_config.json last. Files appear whole
// or not at all. For a sharded model use Accelerator::save_lora.
void save_lora(ModuleBase& model, const std::string& folder);

// For sharded models, whose whole tensors the caller gathers: the names in the model's state of
// what save_lora writes, and the same with these tensors.
std::vector<std::string> lora_state_names(ModuleBase& model);
using WholeByName = std::function<Tensor(const std::string& name)>;
void save_lora(ModuleBase& model, const std::string& folder, const WholeByName& whole);
// The names in the model's state of every A and B of all adapters.
std::vector<std::string> lora_part_names(ModuleBase& model);
// An adapted weight, by its name in the model's state, and its merged value.
struct LoraMerge {
  std::string weight, a, b;
  std::function<Tensor(const Tensor& weight, const Tensor& a, const Tensor& b)> merged;
};
// ValueError: no adapters, or merged. They refer to the model.
std::vector<LoraMerge> lora_merges(ModuleBase& model);

struct LoadLoraOptions {
  std::string adapter = {};  // the name to add or load into; empty: the active one
  bool trainable = false;    // for a model without adapters: whether they train
  std::optional<DType> base_dtype = {};
};
// Adds the adapter of a folder of PEFT's, unless the model has it, and loads its values from
// adapter_model.safetensors or else adapter_model.bin. On an error nothing is changed. FormatError,
// IoError name the file; UnsupportedError names unsupported requests of the folder (DoRA,
// replicated layers, initializations that change the base...); ValueError lists all tensors that do
// not fit.
LoraSummary load_lora(ModuleBase& model, const std::string& folder,
                      const LoadLoraOptions& options = {});

}  // namespace tessera::nn
