// LoRA (Hu et al. 2021, https://arxiv.org/abs/2106.09685): a frozen model learns through small
// adapters. Beside the weight W of an adapted layer stand A and B of a low rank r; the layer gives
//
//     base(x) + scaling * B(A(dropout(x)))        scaling = alpha / r
//
//     nn::add_lora(model, {.names = {"c_attn", "c_proj"}, .rank = 8, .alpha = 16});
//     optim::AdamW optimizer(nn::trainable_parameters(model), {.lr = 1e-4});
//     ...                               // train as ever: only the adapters learn
//     nn::save_lora(model, "adapter");  // the files of PEFT: PeftModel.from_pretrained
//     nn::merge_lora(model);            // W + scaling * B A: no cost in serving
//
// In place: types and names of the model stay, and so do the names of its state. The adapters are
// children of the layers, "NAME.lora_A" and "NAME.lora_B", made by the layer's forward hook: where
// they are, autocast, checkpoint(), clone(), train(), replicas and sharded units see modules like
// all others, and fused ops (nn/fused.h) do not go around them. Where another module reads the
// layer's weight itself (a tied head), it reads the base's.
//
// Layers: Linear, Embedding, Conv1d and Conv2d without groups. Shapes, for weights [out, in]:
// A is [r, in], B is [out, r]; for an Embedding of [rows, width], A is [rows, r], B is [width, r];
// for convolutions A is [r, in, kernel...], B is [out, r, 1...]. Adapters are f32 (f64 for f64)
// whatever the base is stored in. Cost of a call: 2 r (in + out) operations a row, and one pass
// over the output.
//
// Several adapters stand side by side under names of their own. One is active: it takes part in
// calls and learns, and every function here is about it, where none is named.
//
//     nn::add_lora(model, {.names = {"c_attn"}});                          // "default"
//     nn::add_lora(model, {.adapter = "poems", .names = {"c_attn", "c_proj"}, .rank = 16});
//     nn::set_lora(model, "poems");
//
// Order: load the base, add_lora, then replicate, shard or prepare. The names and meanings of the
// options are those of PEFT's LoraConfig (https://github.com/huggingface/peft).
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
  kLoraOnly,  // those of adapted layers
};
// B begins as zeros, so that the model is what it was; an Embedding's A is zeros and its B standard
// normal. Values depend on the seed and on the dotted names.
enum class LoraInit {
  kKaiming,   // A uniform in +-1/sqrt(fan in): kaiming_uniform with slope sqrt(5)
  kGaussian,  // A normal with deviation 1/r
};

template <class Value>
using LoraPatterns = std::vector<std::pair<std::string, Value>>;

struct LoraOptions {
  std::string adapter = "default";  // its name: letters, digits, - and _
  // Which layers: dotted names or ends of them ("c_attn" is "transformer.h.0.attn.c_attn", too).
  // {"all-linear"}: every Linear but those whose weight is tied to another module's.
  std::vector<std::string> names = {};  // PEFT: target_modules, a list
  // Instead of names: a regular expression (Perl's, core/regex.h) that matches whole dotted names.
  std::string pattern = {};  // PEFT: target_modules, a string
  // With names: only modules in blocks of these numbers, the first number of a dotted name, or the
  // first behind one of `layers_pattern` (regular expressions) where it is given. Whole dotted names
  // are adapted in any case.
  std::vector<int64_t> layers = {};              // PEFT: layers_to_transform
  std::vector<std::string> layers_pattern = {};  // PEFT: the same
  std::vector<std::string> exclude = {};         // names or ends of names that are left out
  int64_t rank = 8;                              // PEFT: r
  double alpha = 8;                              // PEFT: lora_alpha
  double dropout = 0;  // of a Linear's or convolution's input, while it trains
  LoraBias bias = LoraBias::kNone;
  bool use_rslora = false;  // scaling = alpha / sqrt(r): Kalajdzievski 2023
  LoraInit init = LoraInit::kKaiming;
  // Modules (names or ends of names) that are trained and saved in full, as a new head. In place:
  // what they were is not kept. They are not adapted.
  std::vector<std::string> modules_to_save = {};
  // Another rank or alpha for some layers: the end of a dotted name, as a regular expression.
  // Of several that match, the first counts.
  LoraPatterns<int64_t> rank_pattern = {};
  LoraPatterns<double> alpha_pattern = {};
  // Frozen parameters are stored in this dtype: half the bytes in kBF16. Trained ones stay. Calls
  // then need autocast, or inputs of this dtype and no module that is trained in full.
  std::optional<DType> base_dtype = {};
};

struct LoraSummary {
  std::vector<std::string> adapted;  // dotted names, in the order of the model
  int64_t trainable = 0;             // elements of parameters that require grad
  int64_t total = 0;                 // of all parameters, adapters included
};

// Freezes the model, drops the gradients of what it froze, and adds adapters. Nothing is changed
// unless all is well. ConfigError: a name, an exclusion or a pattern that matches nothing (tells
// what there is), a rank below 1, dropout outside of [0, 1), an adapter that is there, a model that
// is merged or sharded. UnsupportedError: a match that is no layer of those above. A further
// adapter leaves the active one as it is, and waits for set_lora(); it trains nothing beside A and
// B, and leaves the base's dtype: else UnsupportedError.
LoraSummary add_lora(ModuleBase& model, const LoraOptions& options);

// What add_lora was given; nullptr for a model without adapters.
const LoraOptions* lora_options(ModuleBase& model);

// The adapters' names, sorted, and the active one's (empty without any).
std::vector<std::string> lora_adapter_names(ModuleBase& model);
std::string active_lora(ModuleBase& model);
// From now on this adapter takes part in calls and requires grad, the others neither; biases and
// modules that are trained in full stay as they are. An optimizer is made of trainable_parameters()
// anew; a model is sharded when the adapter that it will train is active. ValueError: no such
// adapter, merged.
void set_lora(ModuleBase& model, const std::string& adapter);

// Named parameters that require grad: what an optimizer of an adapted model takes.
NamedTensors trainable_parameters(const ModuleBase& model);

// Puts W + scaling * B A, calculated in the adapters' dtype and rounded once, in the place of each
// adapted weight; adapters then add nothing. The weight that was there is kept aside: unmerge_lora
// puts that tensor back, to the bit, and what was written to the merged one is gone. Weights that
// are tied to an adapted one keep their values. Memory: adapted weights twice while they are
// merged. ValueError: no adapters, merged already (not merged), a sharded weight.
void merge_lora(ModuleBase& model);
void unmerge_lora(ModuleBase& model);
bool is_lora_merged(ModuleBase& model);

// Takes the adapters away. What is merged stays merged: after merge_lora the model is a plain one
// with the adapted weights. What was frozen stays frozen: requires_grad_() trains it.
void remove_lora(ModuleBase& model);
// One of several. ValueError: no such adapter, or the active one.
void remove_lora(ModuleBase& model, const std::string& adapter);

// In the scope the adapters add nothing: the model as it was, the reference of a preference loss.
// Biases and modules that are trained in place stay as they are. ValueError: no adapters, or
// merged.
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
// PEFT has it). Tensors share elements with the model, transposed ones apart.
StateDict lora_state_dict(ModuleBase& model);
// Copies such a state in. Nothing is written unless all fits: one ValueError lists all missing,
// unexpected and misshapen names. Parameters of the base may be among them. A sharded model takes
// none, ConfigError: load before it is sharded.
void load_lora_state_dict(ModuleBase& model, const StateDict& state);

// PEFT's folder: adapter_model.safetensors, and adapter_config.json last. Files appear whole or not
// at all. Of a model that lies in parts: Accelerator::save_lora.
void save_lora(ModuleBase& model, const std::string& folder);

// For models that lie in parts, whose whole tensors come from elsewhere: the names in the model's
// state of what save_lora writes, and the same with these tensors.
std::vector<std::string> lora_state_names(ModuleBase& model);
using WholeByName = std::function<Tensor(const std::string& name)>;
void save_lora(ModuleBase& model, const std::string& folder, const WholeByName& whole);
// The names in the model's state of every A and B, whatever adapter's.
std::vector<std::string> lora_part_names(ModuleBase& model);
// An adapted weight, by names in the model's state, and what merge_lora puts in its place.
struct LoraMerge {
  std::string weight, a, b;
  std::function<Tensor(const Tensor& weight, const Tensor& a, const Tensor& b)> merged;
};
// ValueError: no adapters, or merged. They refer to the model.
std::vector<LoraMerge> lora_merges(ModuleBase& model);

struct LoadLoraOptions {
  std::string adapter = {};  // added under this name, or loaded into; empty: the active one
  bool trainable = false;    // of a model without adapters: whether they go on learning
  std::optional<DType> base_dtype = {};
};
// Adds the adapter that a folder of PEFT's describes, unless the model has it, and loads its
// values, of adapter_model.safetensors or else of adapter_model.bin. Nothing is changed unless all fits. FormatError, IoError name the file; UnsupportedError
// names what the folder asks for and tessera has not (DoRA, replicated layers, initialisations that
// change the base...); ValueError lists all tensors that do not fit.
LoraSummary load_lora(ModuleBase& model, const std::string& folder,
                      const LoadLoraOptions& options = {});

}  // namespace tessera::nn
