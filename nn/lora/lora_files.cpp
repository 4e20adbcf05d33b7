// Adapters in PEFT's folders.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include <tessera/autograd/ops.h>
#include <tessera/core/io/atomic_file.h>
#include <tessera/core/io/bounded_json.h>
#include <tessera/core/state/safetensors.h>
#include <tessera/core/state/torch_file.h>
#include <tessera/core/tensor/element_guard.h>
#include <tessera/nn/describe.h>
#include <tessera/nn/lora/lora.h>
#include <tessera/nn/lora/lora_adapter.h>

namespace tessera::nn {

using detail::LoraEntry;
using detail::LoraTarget;

namespace {

using AdapterJson = nlohmann::ordered_json;

constexpr const char* kAdapterConfig = "adapter_config.json";
constexpr const char* kAdapterWeights = "adapter_model.safetensors";
constexpr const char* kTorchWeights = "adapter_model.bin";  // of PEFT before 0.6
constexpr std::string_view kAdapterPrefix = "base_model.model.";

// ---- adapter_config.json -----------------------------------------------------------------------

const char* peft_name(LoraBias bias) {
  static const char* const names[] = {"none", "all", "lora_only"};
  return names[static_cast<int>(bias)];
}

AdapterJson list_or_null(const std::vector<std::string>& names) {
  return names.empty() ? AdapterJson(nullptr) : AdapterJson(names);
}
// 16, not 16.0: what PEFT itself writes.
AdapterJson plain_number(double value) {
  return std::nearbyint(value) == value && std::abs(value) < 1e15
             ? AdapterJson(static_cast<int64_t>(value))
             : AdapterJson(value);
}

AdapterJson to_adapter_json(const LoraOptions& options, const std::vector<LoraTarget>& targets) {
  AdapterJson target_modules = options.names;
  if (!options.pattern.empty()) {
    target_modules = options.pattern;
  } else if (options.names.size() == 1 && options.names[0] == "all-linear") {
    // What it meant here: PEFT leaves out other layers than tied ones.
    target_modules = AdapterJson::array();
    for (const LoraTarget& target : targets) target_modules.push_back(target.name);
  }
  AdapterJson alphas = AdapterJson::object();
  for (const auto& [pattern, alpha] : options.alpha_pattern) alphas[pattern] = plain_number(alpha);
  AdapterJson ranks = AdapterJson::object();
  for (const auto& [pattern, rank] : options.rank_pattern) ranks[pattern] = rank;
  AdapterJson init = true;
  if (options.init == LoraInit::kGaussian) init = "gaussian";
  return {{"peft_type", "LORA"},
          {"task_type", nullptr},
          {"base_model_name_or_path", nullptr},
          {"inference_mode", true},
          {"r", options.rank},
          {"lora_alpha", plain_number(options.alpha)},
          {"lora_dropout", options.dropout},
          {"target_modules", target_modules},
          {"exclude_modules", list_or_null(options.exclude)},
          {"layers_to_transform",
           options.layers.empty() ? AdapterJson(nullptr) : AdapterJson(options.layers)},
          {"layers_pattern", list_or_null(options.layers_pattern)},
          {"modules_to_save", list_or_null(options.modules_to_save)},
          {"bias", peft_name(options.bias)},
          {"use_rslora", options.use_rslora},
          {"use_dora", false},
          {"fan_in_fan_out", false},
          {"init_lora_weights", init},
          {"rank_pattern", ranks},
          {"alpha_pattern", alphas}};
}

// Reads the fields of a configuration; each kind of mistake is named with file and field.
class AdapterFields {
 public:
  explicit AdapterFields(const std::string& path) : path_(path) {
    json_ = read_bounded_json<AdapterJson>(path);
    TS_CHECK_AS(FormatError, json_.is_object(), path_,
                "holds no JSON object; PEFT's adapter_config.json is one");
  }

  // nullptr where the field is missing, null, or has nothing in it.
  const AdapterJson* find(const char* field) const {
    const auto found = json_.find(field);
    if (found == json_.end() || found->is_null()) return nullptr;
    if ((found->is_array() || found->is_object()) && found->empty()) return nullptr;
    return &*found;
  }
  template <class T>
  T get(const char* field, T otherwise) const {
    const AdapterJson* value = find(field);
    return value == nullptr ? otherwise : as<T>(*value, field);
  }
  std::vector<std::string> names(const char* field, bool or_one = false) const {
    const AdapterJson* value = find(field);
    std::vector<std::string> result;
    if (value == nullptr || *value == "") return result;
    if (or_one && value->is_string()) return {value->get<std::string>()};
    check(value->is_array(), field, "a list of names", *value);
    for (const auto& name : *value) result.push_back(as<std::string>(name, field));
    return result;
  }
  // One, or a list of them.
  std::vector<int64_t> integers(const char* field) const {
    const AdapterJson* value = find(field);
    if (value == nullptr) return {};
    if (!value->is_array()) return {as<int64_t>(*value, field)};
    std::vector<int64_t> result;
    for (const auto& one : *value) result.push_back(as<int64_t>(one, field));
    return result;
  }
  template <class T>
  LoraPatterns<T> patterns(const char* field) const {
    LoraPatterns<T> result;
    const AdapterJson* value = find(field);
    if (value == nullptr) return result;
    check(value->is_object(), field, "an object", *value);
    for (const auto& [key, entry] : value->items()) result.emplace_back(key, as<T>(entry, field));
    return result;
  }
  template <class T>
  T as(const AdapterJson& value, const char* field) const {
    if constexpr (std::is_same_v<T, bool>) {
      check(value.is_boolean(), field, "true or false", value);
    } else if constexpr (std::is_integral_v<T>) {
      check(value.is_number_integer(), field, "an integer", value);
    } else if constexpr (std::is_floating_point_v<T>) {
      check(value.is_number(), field, "a number", value);
    } else {
      check(value.is_string(), field, "a string", value);
    }
    return value.get<T>();
  }
  void check(bool holds, const char* field, const char* wanted, const AdapterJson& value) const {
    TS_CHECK_AS(FormatError, holds, path_, "the field '", field, "' must be ", wanted, "; it is ",
                value.dump(-1, ' ', true, AdapterJson::error_handler_t::replace));
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  AdapterJson json_;
};

// What changes the result and is not done here.
void refuse_foreign_fields(const AdapterFields& fields) {
  std::string refused;
  const auto append = [&](const std::string& what) {
    refused += (refused.empty() ? "" : ", ") + what;
  };
  for (const char* const field :
       {"use_dora", "lora_bias", "use_qalora", "layer_replication", "target_parameters",
        "trainable_token_indices", "megatron_config", "alora_invocation_tokens", "use_bdlora",
        "arrow_config", "kasa_config", "velora_config", "monteclora_config"}) {
    const AdapterJson* const value = fields.find(field);
    if (value != nullptr && *value != false) append(field);
  }
  if (const AdapterJson* exclude = fields.find("exclude_modules");
      exclude != nullptr && exclude->is_string()) {
    append("exclude_modules as a pattern");
  }
  if (const AdapterJson* init = fields.find("init_lora_weights"); init != nullptr) {
    // The others change the base, too, or take what only PEFT's run had.
    if (!init->is_boolean() && *init != "gaussian") append("init_lora_weights=" + init->dump());
  }
  TS_CHECK_AS(UnsupportedError, refused.empty(), fields.path(), "asks for ", refused,
              ", which tessera's adapters do not have");
}

LoraOptions read_adapter_config(const std::string& path) {
  const AdapterFields fields(path);
  const std::string type = fields.get<std::string>("peft_type", "");
  TS_CHECK_AS(UnsupportedError, type == "LORA", path, "describes an adapter of the type '", type,
              "'; only LORA is read");
  refuse_foreign_fields(fields);
  LoraOptions options;
  const AdapterJson* const targets = fields.find("target_modules");
  TS_CHECK_AS(FormatError, targets != nullptr, path,
              "the field 'target_modules' is missing: which layers are adapted");
  if (!targets->is_string()) {
    options.names = fields.names("target_modules");
  } else if (targets->get<std::string>() == "all-linear") {
    options.names = {"all-linear"};
  } else {
    options.pattern = targets->get<std::string>();
  }
  options.layers = fields.integers("layers_to_transform");
  options.layers_pattern = fields.names("layers_pattern", true);
  options.exclude = fields.names("exclude_modules");
  options.rank = fields.get<int64_t>("r", 8);
  options.alpha = fields.get<double>("lora_alpha", 8);
  options.dropout = fields.get<double>("lora_dropout", 0);
  options.use_rslora = fields.get<bool>("use_rslora", false);
  options.modules_to_save = fields.names("modules_to_save");
  options.rank_pattern = fields.patterns<int64_t>("rank_pattern");
  options.alpha_pattern = fields.patterns<double>("alpha_pattern");
  if (const AdapterJson* init = fields.find("init_lora_weights");
      init != nullptr && *init == "gaussian") {
    options.init = LoraInit::kGaussian;
  }
  const std::string bias = fields.get<std::string>("bias", "none");
  bool known = false;
  for (const LoraBias kind : {LoraBias::kNone, LoraBias::kAll, LoraBias::kLoraOnly}) {
    if (bias != peft_name(kind)) continue;
    options.bias = kind;
    known = true;
  }
  TS_CHECK_AS(FormatError, known, path, "the field 'bias' must be none, all or lora_only; it is '",
              bias, "'");
  return options;
}

// ---- States ------------------------------------------------------------------------------------

// A parameter of the base under PEFT's name, without what PEFT puts around it.
std::string base_name(std::string_view key) {
  std::string name(key.starts_with(kAdapterPrefix) ? key.substr(kAdapterPrefix.size()) : key);
  const std::string_view wrapper = ".base_layer.";
  if (const size_t at = name.rfind(wrapper); at != std::string::npos) {
    name.replace(at, wrapper.size(), ".");
  }
  return name;
}

// The state under the model's names. Throws where it does not fit the entries.
StateDict fitted_state(ModuleBase& model, const std::vector<LoraEntry>& entries,
                       const StateDict& state, const std::string& where) {
  LoadReport report;
  StateDict result;
  std::unordered_map<std::string, const LoraEntry*> by_key;
  for (const LoraEntry& entry : entries) {
    by_key[entry.key] = &entry;
    if (!state.contains(entry.key)) report.missing.push_back(entry.key);
  }
  const StateDict own = model.state_dict();
  for (const auto& [key, tensor] : state) {
    const auto found = by_key.find(key);
    const std::string name = found == by_key.end() ? base_name(key) : found->second->name;
    if (found == by_key.end() && !own.contains(name)) {
      report.unexpected.push_back(key);
      continue;
    }
    const Shape& wanted = found == by_key.end() ? own.at(name).shape() : found->second->shape;
    if (tensor.shape() != wanted) {
      report.misshapen.push_back(key + ": the model needs " + detail::describe_shape(wanted) +
                                 ", there is " + detail::describe_shape(tensor.shape()));
      continue;
    }
    const bool transposed = found != by_key.end() && found->second->transposed;
    result.set(name, transposed ? transpose(tensor, 0, 1) : tensor);
  }
  TS_CHECK(report.complete(), where, "the adapters do not fit ", model.type_name(), ":",
           report.describe());
  return result;
}

}  // namespace

namespace {

std::vector<LoraEntry> entries_of(ModuleBase& model, const char* where) {
  const LoraOptions* const options = lora_options(model);
  TS_CHECK(options != nullptr, where, model.type_name(), " has no adapters");
  return detail::lora_entries(model, detail::installed_targets(model), *options);
}

StateDict lora_state_of(ModuleBase& model, const WholeByName& whole, const char* where) {
  const NoGradGuard no_grad;
  StateDict state;
  for (const LoraEntry& entry : entries_of(model, where)) {
    const Tensor tensor = whole(entry.name);
    check_whole(tensor, where);
    state.set(entry.key, entry.transposed ? transpose(tensor, 0, 1).contiguous() : tensor);
  }
  return state;
}

}  // namespace

StateDict lora_state_dict(ModuleBase& model) {
  const StateDict own = model.state_dict();
  return lora_state_of(
      model, [&](const std::string& name) { return own.at(name); }, "lora_state_dict");
}

std::vector<std::string> lora_state_names(ModuleBase& model) {
  std::vector<std::string> names;
  for (LoraEntry& entry : entries_of(model, "lora_state_names")) {
    names.push_back(std::move(entry.name));
  }
  return names;
}

namespace {

void load_into_adapters(ModuleBase& model, const StateDict& state, const std::string& where) {
  for (const NamedTensor& named : model.named_parameters()) {
    TS_CHECK_AS(ConfigError, element_guard(named.tensor) == nullptr, where, "'", named.name,
                "' is ", named.tensor, "; load adapters before the model is sharded");
  }
  const NoGradGuard no_grad;
  const auto entries =
      detail::lora_entries(model, detail::installed_targets(model), *lora_options(model));
  model.load_state_dict(fitted_state(model, entries, state, where), {.strict = false});
}

}  // namespace

void load_lora_state_dict(ModuleBase& model, const StateDict& state) {
  TS_CHECK(lora_options(model) != nullptr, "load_lora_state_dict", model.type_name(),
           " has no adapters; add_lora() or load_lora() makes them");
  load_into_adapters(model, state, "load_lora_state_dict");
}

void save_lora(ModuleBase& model, const std::string& folder) {
  const StateDict own = model.state_dict();
  save_lora(model, folder, [&](const std::string& name) { return own.at(name); });
}

void save_lora(ModuleBase& model, const std::string& folder, const WholeByName& whole) {
  const StateDict state = lora_state_of(model, whole, "save_lora");
  std::map<std::string, Tensor> tensors;
  for (const auto& [key, tensor] : state) {
    tensors[key] = tensor.device().is_cpu() ? tensor : tensor.to(kCpu);
  }
  const AdapterJson config =
      to_adapter_json(*lora_options(model), detail::installed_targets(model));
  make_folders(folder);
  const std::filesystem::path path(folder);
  save_safetensors((path / kAdapterWeights).string(), tensors, {{"format", "pt"}});
  write_file_atomically((path / kAdapterConfig).string(), config.dump(2) + "\n");
}

LoraSummary load_lora(ModuleBase& model, const std::string& folder,
                      const LoadLoraOptions& options) {
  const std::filesystem::path path(folder);
  LoraOptions described = read_adapter_config((path / kAdapterConfig).string());
  const std::string active = active_lora(model);
  if (!options.adapter.empty()) {
    described.adapter = options.adapter;
  } else if (!active.empty()) {
    described.adapter = active;
  }
  std::string weights = (path / kAdapterWeights).string();
  const std::string of_torch = (path / kTorchWeights).string();
  const bool is_torch = !std::filesystem::exists(weights) && std::filesystem::exists(of_torch);
  if (is_torch) weights = of_torch;
  const StateDict state =
      StateDict::from_map(is_torch ? load_torch_file(weights) : load_safetensors(weights));
  const std::vector<std::string> known = lora_adapter_names(model);
  if (std::ranges::count(known, described.adapter) != 0) {
    const detail::LoraInHand scope(model, described.adapter);
    load_into_adapters(model, state, weights);
    return detail::lora_summary(model);
  }
  const NoGradGuard no_grad;
  described.base_dtype = options.base_dtype;
  const std::vector<LoraTarget> targets = detail::lora_targets(model, described, false);
  const auto entries = detail::lora_entries(model, targets, described);
  const StateDict fitted = fitted_state(model, entries, state, weights);
  detail::install_lora(model, targets, described);
  model.load_state_dict(fitted, {.strict = false});
  if (!options.trainable && known.empty()) model.requires_grad_(false);
  const detail::LoraInHand scope(model, described.adapter);
  return detail::lora_summary(model);
}

}  // namespace tessera::nn
