#include <tessera/nn/lora/lora.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <iterator>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/regex.h>
#include <tessera/core/tensor/element_guard.h>
#include <tessera/nn/conv.h>
#include <tessera/nn/embedding.h>
#include <tessera/nn/init.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/lora/lora_adapter.h>
#include <tessera/nn/quantize/quantize.h>

namespace tessera::nn {

using detail::LoraAdapter;
using detail::LoraEntry;
using detail::LoraTarget;

namespace {

constexpr const char* kAllLinear = "all-linear";
// What transformers calls the layer that makes logits; PEFT leaves it out of all-linear.
constexpr const char* kOutputLayer = "lm_head";
constexpr const char* kFirstAdapter = "default";
constexpr const char* kKeyPrefix = "base_model.model.";

std::string under(const std::string& module, std::string_view name) {
  return module.empty() ? std::string(name) : module + "." + std::string(name);
}

// Whether `name` is the whole of `dotted` or its end behind a dot.
bool names_end_of(std::string_view name, std::string_view dotted) {
  if (!dotted.ends_with(name)) return false;
  return dotted.size() == name.size() || dotted[dotted.size() - name.size() - 1] == '.';
}
bool any_names_end_of(const std::vector<std::string>& names, std::string_view dotted) {
  return std::ranges::any_of(names, [&](const auto& name) { return names_end_of(name, dotted); });
}

Regex compiled(const std::string& pattern, const char* option) {
  return Regex(pattern, std::string("add_lora: ") + option);
}

// The patterns of ranks or alphas as PEFT applies them: to the end of a dotted name. A name that is
// written out needs no expression, of which a stranger's file could have millions.
template <class Value>
class EndPatterns {
 public:
  EndPatterns(const LoraPatterns<Value>& patterns, const char* option) : patterns_(patterns) {
    constexpr int64_t kMostExpressions = 256;  // names written out have no bound
    for (const auto& [pattern, value] : patterns) {
      expressions_.emplace_back();
      if (is_plain(pattern)) continue;
      TS_CHECK_AS(ConfigError, ++count_ <= kMostExpressions, "add_lora", option, " has more than ",
                  kMostExpressions, " regular expressions; write the names out");
      expressions_.back() = compiled("(?:.*\\.)?(?:" + pattern + ")", option);
    }
    matched_.resize(patterns.size());
  }
  // The value of the first pattern that matches the end of the name.
  Value of(const std::string& name, Value otherwise) {
    std::optional<Value> first;
    for (size_t i = 0; i < patterns_.size(); ++i) {
      const std::string& pattern = patterns_[i].first;
      if (!(expressions_[i] ? expressions_[i]->matches(name) : plain_names_end_of(pattern, name))) {
        continue;
      }
      matched_[i] = true;
      if (!first) first = patterns_[i].second;
    }
    return first.value_or(otherwise);
  }
  const std::string* unmatched() const {
    for (size_t i = 0; i < patterns_.size(); ++i) {
      if (!matched_[i]) return &patterns_[i].first;
    }
    return nullptr;
  }

 private:
  static bool is_plain(const std::string& pattern) {
    return std::ranges::all_of(pattern, [](unsigned char c) {
      return std::isalnum(c) != 0 || c == '_' || c == '-' || c == '.';
    });
  }
  // A dot of an expression is any character.
  static bool plain_names_end_of(std::string_view pattern, std::string_view dotted) {
    if (pattern.size() > dotted.size()) return false;
    const size_t begin = dotted.size() - pattern.size();
    if (begin > 0 && dotted[begin - 1] != '.') return false;
    for (size_t i = pattern.size(); i-- > 0;) {
      if (pattern[i] != '.' && pattern[i] != dotted[begin + i]) return false;
    }
    return true;
  }

  const LoraPatterns<Value>& patterns_;
  std::vector<std::optional<Regex>> expressions_;
  std::vector<bool> matched_;
  int64_t count_ = 0;
};

// ---- Layers that can be adapted ----------------------------------------------------------------

struct LowRankPair {
  std::unique_ptr<ModuleBase> a, b;
};

template <class Conv>
LowRankPair conv_pair(const Conv& base, int64_t rank) {
  ConvLayerOptions options = base.options;
  options.bias = false;
  return {
      std::make_unique<Conv>(base.in_channels, rank, base.kernel_size, options),
      std::make_unique<Conv>(rank, base.out_channels, int64_t{1}, ConvLayerOptions{.bias = false})};
}

bool is_adaptable(const ModuleBase& module) {
  return dynamic_cast<const Linear*>(&module) != nullptr ||
         dynamic_cast<const Embedding*>(&module) != nullptr ||
         dynamic_cast<const Conv1d*>(&module) != nullptr ||
         dynamic_cast<const Conv2d*>(&module) != nullptr;
}
int64_t groups_of(const ModuleBase& module) {
  if (const auto* conv = dynamic_cast<const Conv1d*>(&module)) return conv->options.groups;
  if (const auto* conv = dynamic_cast<const Conv2d*>(&module)) return conv->options.groups;
  return 1;
}

// The modules of A and B, with the parameters of the context's defaults.
LowRankPair make_pair_for(const ModuleBase& base, int64_t rank) {
  const LinearOptions plain{.bias = false};
  if (const auto* layer = dynamic_cast<const Linear*>(&base)) {
    return {std::make_unique<Linear>(layer->in_features, rank, plain),
            std::make_unique<Linear>(rank, layer->out_features, plain)};
  }
  if (const auto* layer = dynamic_cast<const Embedding*>(&base)) {
    return {std::make_unique<Embedding>(layer->num_embeddings, rank, layer->options),
            std::make_unique<Linear>(rank, layer->embedding_dim, plain)};
  }
  if (const auto* layer = dynamic_cast<const Conv1d*>(&base)) return conv_pair(*layer, rank);
  return conv_pair(dynamic_cast<const Conv2d&>(base), rank);
}

// Shapes of A and B for a weight.
std::pair<Shape, Shape> pair_shapes(const LoraTarget& target) {
  if (const auto* layer = dynamic_cast<const Linear*>(target.module)) {  // its weight may be packed
    return {{target.rank, layer->in_features}, {layer->out_features, target.rank}};
  }
  const Shape weight = target.module->get_parameter("weight").shape();
  if (dynamic_cast<const Embedding*>(target.module) != nullptr) {
    return {{weight[0], target.rank}, {weight[1], target.rank}};
  }
  Shape a = weight, b = Shape::filled(weight.size(), 1);
  a[0] = target.rank;
  b[0] = weight[0], b[1] = target.rank;
  return {a, b};
}

double scaling_of(double alpha, int64_t rank, const LoraOptions& options) {
  const double r = static_cast<double>(rank);
  return alpha / (options.use_rslora ? std::sqrt(r) : r);
}

}  // namespace

// ---- The adapter of a layer --------------------------------------------------------------------

namespace detail {

LoraAdapter::LoraAdapter(ModuleBase& module, int64_t rank, double alpha,
                         std::shared_ptr<const LoraOptions> options)
    : module_(module),
      rank_(rank),
      alpha_(alpha),
      scaling_(scaling_of(alpha, rank, *options)),
      options_(std::move(options)),
      weight_(module.get_parameter("weight")) {}

LoraAdapter::~LoraAdapter() { hook_.remove(); }

void LoraAdapter::install(const LoraTarget& target, std::shared_ptr<const LoraOptions> options) {
  ModuleBase& module = *target.module;
  std::unique_ptr<LoraAdapter> adapter(
      new LoraAdapter(module, target.rank, target.alpha, std::move(options)));
  const Tensor& weight = adapter->weight_;
  const bool initialise = ParameterDefaultsGuard::current().initialise;
  const ParameterDefaultsGuard defaults({.dtype = weight.dtype() == kF64 ? kF64 : kF32,
                                         .device = weight.device(),
                                         .initialise = false});
  LowRankPair pair = make_pair_for(module, target.rank);
  const Tensor& a = pair.a->get_parameter("weight");
  const Tensor& b = pair.b->get_parameter("weight");
  if (initialise) {
    const auto stream = [&](const char* part) {
      const std::string name =
          under(under(module.dotted_name(), lora_part(adapter->options(), part)), "weight");
      return named_random_stream(under(InitialName::current(), name));
    };
    if (dynamic_cast<const Embedding*>(&module) != nullptr) {
      init::zeros(a);
      init::normal(b, 0, 1, stream("lora_B"));
    } else {
      if (adapter->options().init == LoraInit::kGaussian) {
        init::normal(a, 0, 1.0 / static_cast<double>(target.rank), stream("lora_A"));
      } else {
        init::kaiming_uniform(a, {.slope = std::sqrt(5.0)}, stream("lora_A"));
      }
      init::zeros(b);
    }
  }
  pair.a->train(module.is_training());
  pair.b->train(module.is_training());
  adapter->a_ = pair.a.get();
  adapter->b_ = pair.b.get();
  module.adopt(lora_part(adapter->options(), "lora_A"), std::move(pair.a));
  module.adopt(lora_part(adapter->options(), "lora_B"), std::move(pair.b));
  adapter->hook_ = module.register_forward_hook(
      [self = adapter.get()](ModuleBase&, TensorRefs inputs, TensorRefs outputs) {
        self->add_to(inputs, outputs);
      });
  if (const std::vector<LoraAdapter*> others = all_of(module); !others.empty()) {
    others.back()->next_ = std::move(adapter);
  } else {
    // There is one extension: the adapter's does what that of a quantized layer did.
    if (is_quantized(module)) module.set_extension(nullptr);
    module.set_extension(std::move(adapter));
  }
}

std::vector<LoraAdapter*> LoraAdapter::all_of(const ModuleBase& module) {
  std::vector<LoraAdapter*> all;
  for (auto* one = dynamic_cast<LoraAdapter*>(module.extension()); one != nullptr;
       one = one->next_.get()) {
    all.push_back(one);
  }
  return all;
}
LoraAdapter* LoraAdapter::of(const ModuleBase& module) {
  for (LoraAdapter* one : all_of(module)) {
    if (one->active_) return one;
  }
  return nullptr;
}
LoraAdapter* LoraAdapter::of(const ModuleBase& module, const std::string& adapter) {
  for (LoraAdapter* one : all_of(module)) {
    if (one->options().adapter == adapter) return one;
  }
  return nullptr;
}

void LoraAdapter::requires_grad(bool value) {
  a_->requires_grad_(value);
  b_->requires_grad_(value);
}

void LoraAdapter::add_to(TensorRefs inputs, TensorRefs outputs) const {
  if (merged()) {
    // A sharded unit that puts its weights back would undo the merging in silence.
    TS_CHECK(weight_.impl() == merged_.impl(), "lora", "the merged weight was replaced by ",
             weight_, "; unmerge_lora() first");
    return;
  }
  if (!enabled_ || !active_) return;
  Tensor x = *inputs[0];
  const AutocastMode& mode = Context::current().slot<AutocastMode>();
  const Tensor& a = a_->get_parameter("weight");
  if (is_floating(x.dtype())) {
    if (!mode.enabled && mode.boundary == nullptr) x = x.to(a.dtype());
    x = dropout(x, options_->dropout, module_.is_training());
  }
  const Tensor change = b_->call_tensor(a_->call_tensor(x));
  Tensor& y = *outputs[0];
  y = add(y, change, scaling_).to(y.dtype());
}

Tensor LoraAdapter::merged_weight(const Tensor& weight, const Tensor& a, const Tensor& b) const {
  const NoGradGuard no_grad;
  const AutocastGuard exact(kBF16, false);
  const bool is_table = dynamic_cast<const Embedding*>(&module_) != nullptr;
  const Tensor change = is_table
                            ? matmul(a, transpose(b, 0, 1))
                            : matmul(flatten(b, 1, -1), flatten(a, 1, -1)).view(weight.shape());
  return add(weight.detach().to(change.dtype()), change, scaling_).to(weight.dtype()).detach();
}

void LoraAdapter::merge() {
  const MemoryCategoryGuard category(MemoryCategory::kParameter);
  const Tensor merged =
      merged_weight(weight_, a_->get_parameter("weight"), b_->get_parameter("weight"));
  original_ = weight_;
  merged_ = module_.share_parameter("weight", merged);
}

void LoraAdapter::unmerge() {
  module_.share_parameter("weight", std::exchange(original_, Tensor()));
  merged_ = Tensor();
}

void LoraAdapter::remove(LoraAdapter* adapter) {
  ModuleBase& module = adapter->module_;
  for (const char* part : {"lora_A", "lora_B"}) {
    module.release(lora_part(adapter->options(), part));
  }
  const std::vector<LoraAdapter*> all = all_of(module);
  const auto place = std::ranges::find(all, adapter);
  std::unique_ptr<LoraAdapter> next = std::move(adapter->next_);
  if (place != all.begin()) {
    (*std::prev(place))->next_ = std::move(next);
    return;
  }
  module.set_extension(nullptr);
  if (!next && is_quantized(module)) module.set_extension(quantized_extension(module));
  if (next) module.set_extension(std::move(next));
}

void LoraAdapter::extend(ModuleBase& copy) const {
  const ParameterDefaultsGuard values_come(
      {.dtype = ParameterDefaultsGuard::current().dtype, .initialise = false});
  if (is_quantized(module_) && !is_quantized(copy)) extend_quantized(module_, copy);
  install({.name = {}, .module = &copy, .rank = rank_, .alpha = alpha_}, options_);
  LoraAdapter& other = *of(copy, options_->adapter);
  other.enabled_ = enabled_;
  other.active_ = active_;
  if (next_) next_->extend(copy);
  if (!merged()) return;
  // The copy's own weight, tied to what it is tied to, is the one kept aside.
  other.original_ = other.weight_;
  other.original_.set_data(original_.detach().clone());
  other.original_.set_requires_grad(original_.requires_grad());
  other.merged_ = copy.share_parameter("weight", merged_.detach().clone());
}

// ---- Which layers ------------------------------------------------------------------------------

std::string lora_part(const LoraOptions& options, const char* part) {
  return options.adapter == kFirstAdapter ? part : std::string(part) + "_" + options.adapter;
}

std::vector<NamedLora> lora_adapters(ModuleBase& model) {
  std::vector<NamedLora> found;
  for (const auto& [name, module] : model.named_modules()) {
    if (LoraAdapter* adapter = LoraAdapter::of(*module)) found.push_back({name, module, adapter});
  }
  return found;
}
std::vector<NamedLora> lora_adapters(ModuleBase& model, const std::string& adapter) {
  std::vector<NamedLora> found;
  for (const auto& [name, module] : model.named_modules()) {
    if (LoraAdapter* one = LoraAdapter::of(*module, adapter)) found.push_back({name, module, one});
  }
  return found;
}

namespace {

void make_active(ModuleBase& model, const std::string& adapter) {
  for (const auto& [name, module] : model.named_modules()) {
    for (LoraAdapter* one : LoraAdapter::all_of(*module)) {
      one->set_active(one->options().adapter == adapter);
    }
  }
}

}  // namespace

LoraInHand::LoraInHand(ModuleBase& model, const std::string& adapter)
    : model_(model), before_(active_lora(model)) {
  make_active(model, adapter);
}
LoraInHand::~LoraInHand() {
  if (!before_.empty()) make_active(model_, before_);
}

std::vector<LoraTarget> installed_targets(ModuleBase& model) {
  std::vector<LoraTarget> targets;
  for (const auto& [name, module, adapter] : lora_adapters(model)) {
    targets.push_back(adapter->target(name));
  }
  return targets;
}

}  // namespace detail

namespace {

// "c_attn (Linear), wte (Embedding)": the ends of the names of what can be adapted.
std::string described_layers(ModuleBase& model) {
  std::set<std::string> seen;
  std::string text;
  for (const auto& [name, module] : model.named_modules()) {
    if (!is_adaptable(*module)) continue;
    const std::string end = name.substr(name.rfind('.') + 1);
    const std::string entry = "'" + end + "' (" + module->type_name() + ")";
    if (!seen.insert(entry).second) continue;
    text += (text.empty() ? "" : ", ") + entry;
  }
  return text.empty() ? "no layer that can be adapted" : text;
}

std::string quoted_list(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "'" : ", '") + name + "'";
  return text;
}

void check_numbers(const LoraOptions& options) {
  const auto check_rank = [](int64_t rank, const std::string& where) {
    TS_CHECK_AS(ConfigError, rank >= 1, "add_lora", where, " must be at least 1; got ", rank);
  };
  const bool named =
      !options.adapter.empty() && std::ranges::all_of(options.adapter, [](unsigned char c) {
        return std::isalnum(c) != 0 || c == '-' || c == '_';
      });
  TS_CHECK_AS(ConfigError, named, "add_lora",
              "an adapter's name has letters, digits, - and _ alone; got '", options.adapter, "'");
  check_rank(options.rank, "rank");
  for (const auto& [pattern, rank] : options.rank_pattern) {
    check_rank(rank, "the rank of '" + pattern + "'");
  }
  TS_CHECK_AS(ConfigError, options.dropout >= 0 && options.dropout < 1, "add_lora",
              "dropout must be in [0, 1); got ", options.dropout);
  TS_CHECK_AS(ConfigError, options.names.empty() != options.pattern.empty(), "add_lora",
              "takes either names or a pattern of the layers to adapt; ",
              options.names.empty() ? "neither was given" : "both were given");
  TS_CHECK_AS(ConfigError, !options.base_dtype || is_floating(*options.base_dtype), "add_lora",
              "base_dtype must be floating; got ", options.base_dtype.value_or(kF32));
  TS_CHECK_AS(ConfigError, options.pattern.empty() || options.layers.empty(), "add_lora",
              "layers go with names; a pattern can say them itself");
  TS_CHECK_AS(ConfigError, options.layers_pattern.empty() || !options.layers.empty(), "add_lora",
              "layers_pattern says where the numbers of layers stand, and no layers are given");
  const bool all_linear = std::ranges::count(options.names, kAllLinear) != 0;
  TS_CHECK_AS(ConfigError, !all_linear || options.names.size() == 1, "add_lora", "'", kAllLinear,
              "' stands alone; got ", quoted_list(options.names));
}

// The elements of `names` that are the end of no module's name.
std::vector<std::string> names_of_nothing(ModuleBase& model,
                                          const std::vector<std::string>& names) {
  std::vector<std::string> missing = names;
  for (const auto& [dotted, module] : model.named_modules()) {
    std::erase_if(missing, [&](const auto& name) { return names_end_of(name, dotted); });
  }
  return missing;
}

// The modules that are trained in full: the outermost ones that the names name.
std::vector<NamedModule> saved_modules(ModuleBase& model, const LoraOptions& options) {
  std::vector<NamedModule> saved;
  for (const auto& named : model.named_modules()) {
    if (!any_names_end_of(options.modules_to_save, named.name)) continue;
    const bool inside = std::ranges::any_of(
        saved, [&](const NamedModule& outer) { return named.name.starts_with(outer.name + "."); });
    if (!inside) saved.push_back(named);
  }
  return saved;
}

// Whether another module holds the weight, too.
bool has_tied_weight(const ModuleBase& module,
                     const std::unordered_map<const TensorImpl*, int>& holders) {
  return holders.at(module.get_parameter("weight").impl()) > 1;
}

// Which modules the options name.
class Choice {
 public:
  explicit Choice(const LoraOptions& options) : options_(options) {
    if (!options.pattern.empty()) pattern_ = compiled(options.pattern, "pattern");
    if (options.layers.empty()) return;
    // As PEFT writes them (tuners_utils.py, check_target_module_exists): the first number counts.
    if (options.layers_pattern.empty()) {
      layers_.push_back(compiled(".*?\\.[^.]*\\.(?P<idx>\\d+)\\.", "layers"));
    }
    for (const std::string& pattern : options.layers_pattern) {
      layers_.push_back(
          compiled("(?:^|.*?\\.)" + pattern + "\\.(?P<idx>\\d+)\\.", "layers_pattern"));
    }
  }
  bool has(const NamedModule& named,
           const std::unordered_map<const TensorImpl*, int>& holders) const {
    if (pattern_) return pattern_->matches(named.name);
    if (std::ranges::count(options_.names, named.name) != 0) return true;
    const bool named_so = options_.names.front() == kAllLinear
                              ? dynamic_cast<Linear*>(named.module) != nullptr &&
                                    !names_end_of(kOutputLayer, named.name) &&
                                    !has_tied_weight(*named.module, holders)
                              : any_names_end_of(options_.names, named.name);
    return named_so && (options_.layers.empty() || in_layers(named.name));
  }

 private:
  bool in_layers(const std::string& name) const {
    for (const Regex& layer : layers_) {
      const auto number = layer.group(name, "idx");
      if (!number) continue;
      return std::ranges::any_of(options_.layers, [&](int64_t wanted) {
        const size_t digits = std::min(number->find_first_not_of('0'), number->size() - 1);
        return number->substr(digits) == std::to_string(wanted);
      });
    }
    return false;
  }

  const LoraOptions& options_;
  std::optional<Regex> pattern_;
  std::vector<Regex> layers_;
};

}  // namespace

namespace detail {
namespace {

void check_beside_others(ModuleBase& model, const LoraOptions& options) {
  const std::vector<std::string> others = nn::lora_adapter_names(model);
  if (others.empty()) return;
  TS_CHECK_AS(ConfigError, std::ranges::count(others, options.adapter) == 0, "add_lora",
              "the model has an adapter '", options.adapter,
              "'; give this one another name, or remove_lora() takes that one away");
  TS_CHECK_AS(ConfigError, !is_lora_merged(model), "add_lora",
              "the active adapter is merged; unmerge_lora() first");
  TS_CHECK_AS(
      UnsupportedError,
      options.bias == LoraBias::kNone && options.modules_to_save.empty() && !options.base_dtype,
      "add_lora", "'", options.adapter,
      "' stands beside another adapter and has A and B alone; bias, modules_to_save and "
      "base_dtype belong to the first one");
}

}  // namespace

std::vector<LoraTarget> lora_targets(ModuleBase& model, const LoraOptions& options, bool strict) {
  check_numbers(options);
  std::unordered_map<const TensorImpl*, int> holders;
  for (const ParameterPlace& place : model.parameter_places()) {
    if (!place.tensor->defined()) continue;
    ++holders[place.tensor->impl()];
    TS_CHECK_AS(ConfigError, element_guard(*place.tensor) == nullptr, "add_lora", "'", place.name,
                "' is ", *place.tensor, "; add adapters before the model is sharded");
  }
  check_beside_others(model, options);

  const std::vector<NamedModule> saved = saved_modules(model, options);
  const std::vector<std::string> unsaved = names_of_nothing(model, options.modules_to_save);
  TS_CHECK_AS(ConfigError, unsaved.empty() || !strict, "add_lora",
              "modules_to_save names what is not there: ", quoted_list(unsaved),
              "; see the model's repr()");
  const std::vector<std::string> unexcluded = names_of_nothing(model, options.exclude);
  TS_CHECK_AS(ConfigError, unexcluded.empty() || !strict, "add_lora",
              "exclude names what is not there: ", quoted_list(unexcluded));

  std::unordered_set<const ModuleBase*> parts;  // of other adapters
  for (const auto& [name, module] : model.named_modules()) {
    for (const LoraAdapter* other : LoraAdapter::all_of(*module)) {
      for (size_t i = 0; i < module->num_children(); ++i) {
        if (other->is_part(module->child(i))) parts.insert(&module->child(i));
      }
    }
  }
  const Choice choice(options);
  EndPatterns ranks(options.rank_pattern, "rank_pattern");
  EndPatterns alphas(options.alpha_pattern, "alpha_pattern");
  std::vector<LoraTarget> targets;
  std::string refused;
  for (const NamedModule& named : model.named_modules()) {
    if (parts.contains(named.module)) continue;
    const bool inside_saved = std::ranges::any_of(saved, [&](const NamedModule& outer) {
      return named.name == outer.name || named.name.starts_with(outer.name + ".");
    });
    if (inside_saved || any_names_end_of(options.exclude, named.name)) continue;
    if (!choice.has(named, holders)) continue;
    if (!is_adaptable(*named.module) || groups_of(*named.module) != 1) {
      refused += (refused.empty() ? "'" : ", '") + named.name + "' (" + named.module->type_name() +
                 (is_adaptable(*named.module) ? " in groups)" : ")");
      continue;
    }
    TS_CHECK_AS(ConfigError,
                named.module->extension() == nullptr || is_quantized(*named.module) ||
                    !LoraAdapter::all_of(*named.module).empty(),
                "add_lora", "'", named.name, "' has an extension of another kind");
    targets.push_back({named.name, named.module, ranks.of(named.name, options.rank),
                       alphas.of(named.name, options.alpha)});
  }
  TS_CHECK_AS(UnsupportedError, refused.empty(), "add_lora", "cannot adapt ", refused,
              "; Linear, Embedding, Conv1d and Conv2d without groups can be: choose among ",
              described_layers(model));
  const std::vector<std::string> unmatched = options.names == std::vector<std::string>{kAllLinear}
                                                 ? std::vector<std::string>()
                                                 : names_of_nothing(model, options.names);
  TS_CHECK_AS(ConfigError, unmatched.empty() || !strict, "add_lora", "no module is named ",
              quoted_list(unmatched), "; there are ", described_layers(model));
  TS_CHECK_AS(ConfigError, !targets.empty(), "add_lora",
              !options.pattern.empty() ? "the pattern '" + options.pattern + "' matches nothing"
                                       : quoted_list(options.names) + " name nothing",
              " that is not excluded or trained in full; there are ", described_layers(model));
  const auto check_matched = [&](const auto& patterns, const char* option) {
    const std::string* const unmatched = strict ? patterns.unmatched() : nullptr;
    if (unmatched == nullptr) return;
    TS_THROW(ConfigError, "add_lora", option, " '", *unmatched, "' matches no adapted layer");
  };
  check_matched(ranks, "rank_pattern");
  check_matched(alphas, "alpha_pattern");
  return targets;
}

std::vector<LoraEntry> lora_entries(ModuleBase& model, const std::vector<LoraTarget>& targets,
                                    const LoraOptions& options) {
  std::vector<LoraEntry> entries;
  std::unordered_set<std::string> named;
  const auto append = [&](const std::string& key, const std::string& name, const Shape& shape,
                          bool transposed = false) {
    if (named.insert(name).second) entries.push_back({kKeyPrefix + key, name, shape, transposed});
  };
  std::unordered_set<std::string> adapted;
  for (const LoraTarget& target : targets) {
    const auto [a, b] = pair_shapes(target);
    const std::string a_name = under(under(target.name, lora_part(options, "lora_A")), "weight");
    const std::string b_name = under(under(target.name, lora_part(options, "lora_B")), "weight");
    if (dynamic_cast<const Embedding*>(target.module) != nullptr) {
      append(under(target.name, "lora_embedding_A"), a_name, {a[1], a[0]}, true);
      append(under(target.name, "lora_embedding_B"), b_name, b);
    } else {
      append(under(target.name, "lora_A.weight"), a_name, a);
      append(under(target.name, "lora_B.weight"), b_name, b);
    }
    adapted.insert(under(target.name, "bias"));
  }
  for (const auto& [prefix, module] : saved_modules(model, options)) {
    for (const auto& [name, tensor] : module->state_dict()) {
      append(under(prefix, name), under(prefix, name), tensor.shape());
    }
  }
  if (options.bias == LoraBias::kNone) return entries;
  for (const ParameterPlace& place : model.parameter_places()) {
    const bool is_bias = names_end_of("bias", place.name);
    const bool in_adapted = adapted.contains(place.name);
    if (!place.tensor->defined() || !is_bias) continue;
    if (options.bias == LoraBias::kLoraOnly && !in_adapted) continue;
    const std::string owner = place.name.substr(0, place.name.rfind("bias"));
    append(owner + (in_adapted ? "base_layer.bias" : "bias"), place.name, place.tensor->shape());
  }
  return entries;
}

LoraSummary lora_summary(ModuleBase& model) {
  LoraSummary summary;
  for (const NamedLora& named : lora_adapters(model)) summary.adapted.push_back(named.name);
  for (const Tensor& tensor : model.parameters()) {
    summary.total += tensor.numel();
    if (tensor.requires_grad()) summary.trainable += tensor.numel();
  }
  return summary;
}

LoraSummary install_lora(ModuleBase& model, const std::vector<LoraTarget>& targets,
                         const LoraOptions& options) {
  if (!active_lora(model).empty()) {
    const auto kept = std::make_shared<const LoraOptions>(options);
    for (const LoraTarget& target : targets) {
      LoraAdapter::install(target, kept);
      LoraAdapter& added = *LoraAdapter::of(*target.module, options.adapter);
      added.set_active(false);
      added.requires_grad(false);
    }
    const LoraInHand scope(model, options.adapter);
    return lora_summary(model);
  }
  const std::vector<LoraEntry> entries = lora_entries(model, targets, options);
  std::unordered_set<std::string> trained;
  for (const LoraEntry& entry : entries) trained.insert(entry.name);
  for (const ParameterPlace& place : model.parameter_places()) {
    TS_CHECK_AS(ConfigError, !trained.contains(place.name) || is_floating(place.tensor->dtype()),
                "add_lora", "'", place.name, "' is to be trained in full and is ", *place.tensor,
                ", quantized, which has no gradient; leave it out of quantize() or of "
                "modules_to_save");
  }
  model.requires_grad_(false);
  for (const ParameterPlace& place : model.parameter_places()) {
    if (trained.contains(place.name)) place.tensor->set_requires_grad(true);
  }
  for (const Tensor& tensor : model.parameters()) {
    if (tensor.requires_grad() || !is_floating(tensor.dtype())) continue;
    tensor.zero_grad(true);
    if (options.base_dtype) {
      const MemoryCategoryGuard category(MemoryCategory::kParameter);
      const NoGradGuard no_grad;
      tensor.set_data(tensor.detach().to(*options.base_dtype));
    }
  }
  const auto kept = std::make_shared<const LoraOptions>(options);
  for (const LoraTarget& target : targets) LoraAdapter::install(target, kept);
  return lora_summary(model);
}

}  // namespace detail

// ---- Of a model --------------------------------------------------------------------------------

LoraSummary add_lora(ModuleBase& model, const LoraOptions& options) {
  return detail::install_lora(model, detail::lora_targets(model, options, true), options);
}

const LoraOptions* lora_options(ModuleBase& model) {
  const auto adapters = detail::lora_adapters(model);
  return adapters.empty() ? nullptr : &adapters.front().adapter->options();
}

std::vector<std::string> lora_adapter_names(ModuleBase& model) {
  std::set<std::string> names;
  for (const auto& [name, module] : model.named_modules()) {
    for (const LoraAdapter* one : LoraAdapter::all_of(*module)) {
      names.insert(one->options().adapter);
    }
  }
  return {names.begin(), names.end()};
}

std::string active_lora(ModuleBase& model) {
  const LoraOptions* const options = lora_options(model);
  return options == nullptr ? std::string() : options->adapter;
}

namespace {

void check_adapter(ModuleBase& model, const std::string& adapter, const char* who) {
  const std::vector<std::string> names = lora_adapter_names(model);
  TS_CHECK(std::ranges::count(names, adapter) != 0, who, model.type_name(), " has no adapter '",
           adapter, "'; it has ", names.empty() ? "none" : quoted_list(names));
}

}  // namespace

void set_lora(ModuleBase& model, const std::string& adapter) {
  check_adapter(model, adapter, "set_lora");
  TS_CHECK(!is_lora_merged(model), "set_lora",
           "the active adapter is merged; unmerge_lora() first");
  for (const auto& [name, module] : model.named_modules()) {
    for (LoraAdapter* one : LoraAdapter::all_of(*module)) {
      const bool active = one->options().adapter == adapter;
      one->set_active(active);
      one->requires_grad(active);
    }
  }
}

NamedTensors trainable_parameters(const ModuleBase& model) {
  NamedTensors trained = model.named_parameters();
  std::erase_if(trained, [](const NamedTensor& named) { return !named.tensor.requires_grad(); });
  return trained;
}

namespace {

// The adapters of a model that has some, all of them merged or none.
std::vector<detail::NamedLora> adapters_in_state(ModuleBase& model, bool merged, const char* who) {
  std::vector<detail::NamedLora> adapters = detail::lora_adapters(model);
  TS_CHECK(!adapters.empty(), who, model.type_name(), " has no adapters; add_lora() makes them");
  for (const detail::NamedLora& named : adapters) {
    TS_CHECK(named.adapter->merged() == merged, who, "the adapter of '", named.name, "' is ",
             merged ? "not merged" : "merged; unmerge_lora() first");
  }
  return adapters;
}

}  // namespace

namespace {

// The sum would have to be packed again, which rounds it as coarsely as the base.
void refuse_quantized(const detail::NamedLora& named, const char* where) {
  TS_CHECK_AS(UnsupportedError, !is_quantized(*named.module), where, "the weight of '", named.name,
              "' is quantized and cannot take an adapter in; save_lora() writes the adapter, and a "
              "base in floating numbers that loads it can be merged");
}

}  // namespace

void merge_lora(ModuleBase& model) {
  const auto adapters = adapters_in_state(model, false, "merge_lora");
  for (const auto& named : adapters) {
    refuse_quantized(named, "merge_lora");
    const LoraOptions& options = named.adapter->options();
    for (const std::string& name :
         {std::string("weight"), under(detail::lora_part(options, "lora_A"), "weight"),
          under(detail::lora_part(options, "lora_B"), "weight")}) {
      const Tensor& tensor = named.module->get_parameter(name);
      TS_CHECK(element_guard(tensor) == nullptr, "merge_lora", "'", under(named.name, name),
               "' is ", tensor,
               "; Accelerator::save_merged_lora writes the merged weights of such a model, or "
               "merge before the model is sharded");
    }
  }
  for (const auto& named : adapters) named.adapter->merge();
}

void unmerge_lora(ModuleBase& model) {
  for (const auto& named : adapters_in_state(model, true, "unmerge_lora")) {
    named.adapter->unmerge();
  }
}

std::vector<std::string> lora_part_names(ModuleBase& model) {
  std::vector<std::string> names;
  for (const std::string& adapter : lora_adapter_names(model)) {
    for (const auto& named : detail::lora_adapters(model, adapter)) {
      for (const char* part : {"lora_A", "lora_B"}) {
        const std::string module = detail::lora_part(named.adapter->options(), part);
        names.push_back(under(under(named.name, module), "weight"));
      }
    }
  }
  return names;
}

std::vector<LoraMerge> lora_merges(ModuleBase& model) {
  std::vector<LoraMerge> merges;
  for (const auto& named : adapters_in_state(model, false, "lora_merges")) {
    refuse_quantized(named, "lora_merges");
    const auto part = [&](const char* name) {
      const std::string module = detail::lora_part(named.adapter->options(), name);
      return under(under(named.name, module), "weight");
    };
    merges.push_back(
        {under(named.name, "weight"), part("lora_A"), part("lora_B"),
         [adapter = named.adapter](const Tensor& weight, const Tensor& a, const Tensor& b) {
           return adapter->merged_weight(weight, a, b);
         }});
  }
  return merges;
}

bool is_lora_merged(ModuleBase& model) {
  const auto adapters = detail::lora_adapters(model);
  return !adapters.empty() && adapters.front().adapter->merged();
}

void remove_lora(ModuleBase& model) {
  const std::vector<std::string> names = lora_adapter_names(model);
  TS_CHECK(!names.empty(), "remove_lora", model.type_name(), " has no adapters");
  for (const std::string& adapter : names) {
    for (const auto& named : detail::lora_adapters(model, adapter)) {
      LoraAdapter::remove(named.adapter);
    }
  }
}

void remove_lora(ModuleBase& model, const std::string& adapter) {
  check_adapter(model, adapter, "remove_lora");
  TS_CHECK(adapter != active_lora(model), "remove_lora", "'", adapter,
           "' is active; set_lora() another one first, or take all away");
  for (const auto& named : detail::lora_adapters(model, adapter)) {
    LoraAdapter::remove(named.adapter);
  }
}

LoraDisabled::LoraDisabled(ModuleBase& model) : model_(model) {
  for (const auto& named : adapters_in_state(model, false, "LoraDisabled")) {
    named.adapter->set_enabled(false);
  }
}
LoraDisabled::~LoraDisabled() {
  for (const auto& named : detail::lora_adapters(model_)) named.adapter->set_enabled(true);
}

}  // namespace tessera::nn
