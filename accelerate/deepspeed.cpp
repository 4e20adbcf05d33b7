#include <tessera/accelerate/deepspeed.h>

#include <algorithm>
#include <numbers>
#include <set>
#include <type_traits>

#include <tessera/accelerate/settings/deepspeed_config.h>
#include <tessera/accelerate/settings/edit_distance.h>
#include <tessera/accelerate/settings/letter_case.h>
#include <tessera/core/error.h>
#include <tessera/optim/optimizers.h>

namespace tessera::accelerate {

// ---- Schedules ---------------------------------------------------------------------------------

namespace {

// Part of the way up at DeepSpeed's iteration `at`, below `steps`.
double warmed_up(int64_t at, int64_t steps, bool linear) {
  if (linear) return static_cast<double>(at) / static_cast<double>(steps);
  return 1.0 / std::log(static_cast<double>(steps)) * std::log(static_cast<double>(at + 1));
}
int64_t at_least_two(int64_t steps) { return std::max<int64_t>(2, steps); }
WarmupLR with_default(WarmupLR rule, double max_lr) {
  rule.warmup_max_lr = rule.warmup_max_lr.value_or(max_lr);
  return rule;
}
constexpr double kWarmupDecayMaxLr = 0.001;

void check_number(bool fits, const char* rule, const char* name, const char* what, auto value) {
  TS_CHECK(fits, rule, name, " must ", what, "; got ", value);
}

}  // namespace

double WarmupLR::rate(int64_t step, double base) const {
  const int64_t at = step - 1, steps = at_least_two(warmup_num_steps);
  if (at < 0) return warmup_min_lr;
  const double gamma = at < steps ? warmed_up(at, steps, linear) : 1;
  return warmup_min_lr + (warmup_max_lr.value_or(base) - warmup_min_lr) * gamma;
}
void WarmupLR::check() const {
  check_number(warmup_num_steps >= 0, "WarmupLR", "warmup_num_steps", "not be negative",
               warmup_num_steps);
  check_number(warmup_min_lr >= 0, "WarmupLR", "warmup_min_lr", "not be negative", warmup_min_lr);
  if (!warmup_max_lr) return;
  check_number(*warmup_max_lr >= warmup_min_lr, "WarmupLR", "warmup_max_lr",
               "not be below warmup_min_lr", *warmup_max_lr);
}

double WarmupDecayLR::rate(int64_t step, double base) const {
  const int64_t at = step - 1, steps = at_least_two(warmup.warmup_num_steps);
  const WarmupLR whole = with_default(warmup, kWarmupDecayMaxLr);
  if (at < steps) return whole.rate(step, base);
  const double gamma =
      std::max(0.0, static_cast<double>(total_num_steps - at) /
                        static_cast<double>(std::max<int64_t>(1, total_num_steps - steps)));
  return whole.warmup_min_lr + (*whole.warmup_max_lr - whole.warmup_min_lr) * gamma;
}
void WarmupDecayLR::check() const {
  with_default(warmup, kWarmupDecayMaxLr).check();
  check_number(total_num_steps > 0 && total_num_steps >= warmup.warmup_num_steps, "WarmupDecayLR",
               "total_num_steps", "be positive, and not below warmup_num_steps", total_num_steps);
}

double WarmupCosineLR::rate(int64_t step, double base) const {
  const int64_t at = step - 1, steps = at_least_two(warmup_num_steps);
  if (at < 0) return 0;
  if (at < steps) {
    return base * (warmup_min_ratio + warmed_up(at, steps, linear) * (1 - warmup_min_ratio));
  }
  const int64_t total = std::max<int64_t>(1, total_num_steps - steps);
  const double progress =
      std::min(1.0, static_cast<double>(at - steps + 1) / static_cast<double>(total));
  const double cosine = (1 + std::cos(std::numbers::pi * progress)) / 2;
  return base * std::max(0.0, cos_min_ratio + (1 - cos_min_ratio) * cosine);
}
void WarmupCosineLR::check() const {
  check_number(warmup_num_steps >= 0, "WarmupCosineLR", "warmup_num_steps", "not be negative",
               warmup_num_steps);
  check_number(warmup_min_ratio >= 0 && warmup_min_ratio <= 1, "WarmupCosineLR", "warmup_min_ratio",
               "lie between 0 and 1", warmup_min_ratio);
  check_number(cos_min_ratio >= 0 && cos_min_ratio <= 1, "WarmupCosineLR", "cos_min_ratio",
               "lie between 0 and 1", cos_min_ratio);
  check_number(total_num_steps > 0 && total_num_steps >= warmup_num_steps, "WarmupCosineLR",
               "total_num_steps", "be positive, and not below warmup_num_steps", total_num_steps);
}

double LRRangeTest::rate(int64_t step, double) const {
  if (step == 0) return lr_range_test_min_lr;
  double interval = static_cast<double>(step) / static_cast<double>(lr_range_test_step_size);
  if (lr_range_test_staircase) interval = std::floor(interval);
  return lr_range_test_min_lr * (1 + lr_range_test_step_rate * interval);
}
void LRRangeTest::check() const {
  check_number(lr_range_test_min_lr >= 0, "LRRangeTest", "lr_range_test_min_lr", "not be negative",
               lr_range_test_min_lr);
  check_number(lr_range_test_step_size > 0, "LRRangeTest", "lr_range_test_step_size", "be positive",
               lr_range_test_step_size);
}

int64_t DeepSpeedOneCycle::length() const {
  return cycle_first_step_size + cycle_second_step_size.value_or(cycle_first_step_size);
}
bool DeepSpeedOneCycle::is_over(int64_t step) const { return step - 1 >= length(); }
double DeepSpeedOneCycle::scale(int64_t step) const {
  const double total = static_cast<double>(length());
  const double up = static_cast<double>(cycle_first_step_size) / total;
  const double at = static_cast<double>(step) / total;
  const double cycle = std::floor(1 + at);
  const double x = 1 + at - cycle;
  const bool rises = x <= up;  // by its own roundings: lines have its bits
  const int64_t stairs =
      rises ? cycle_first_stair_count : cycle_second_stair_count.value_or(cycle_first_stair_count);
  if (stairs == 0) return rises ? x / up : (x - 1) / (up - 1);
  // Of whole numbers: x may lie just below the edge of a stair.
  const int64_t in_cycle = step % length();
  const int64_t climbed = in_cycle <= cycle_first_step_size
                              ? in_cycle * stairs / cycle_first_step_size
                              : (length() - in_cycle) * stairs / (length() - cycle_first_step_size);
  return static_cast<double>(climbed) / static_cast<double>(stairs);
}
double DeepSpeedOneCycle::decayed(int64_t step) const {
  if (decay_step_size == 0) return 0;
  return static_cast<double>(step - length()) / static_cast<double>(decay_step_size);
}
double DeepSpeedOneCycle::rate(int64_t step, double) const {
  if (is_over(step)) return cycle_min_lr / (1 + decay_lr_rate * decayed(step));
  return cycle_min_lr + (cycle_max_lr - cycle_min_lr) * scale(step);
}
std::optional<double> DeepSpeedOneCycle::momentum(int64_t step) const {
  if (!cycle_momentum) return std::nullopt;
  if (step == 0) return cycle_min_mom;
  if (is_over(step)) return cycle_max_mom * (1 + decay_mom_rate * decayed(step));
  return cycle_max_mom - (cycle_max_mom - cycle_min_mom) * scale(step);
}
void DeepSpeedOneCycle::check() const {
  check_number(cycle_min_lr >= 0 && cycle_max_lr >= cycle_min_lr, "OneCycle", "cycle_max_lr",
               "not be below cycle_min_lr, nor that be negative", cycle_max_lr);
  check_number(cycle_first_step_size > 0, "OneCycle", "cycle_first_step_size", "be positive",
               cycle_first_step_size);
  const int64_t second = cycle_second_step_size.value_or(0);
  check_number(second >= 0, "OneCycle", "cycle_second_step_size", "not be negative", second);
  check_number(cycle_first_stair_count >= 0, "OneCycle", "cycle_first_stair_count",
               "not be negative", cycle_first_stair_count);
  const int64_t second_stairs = cycle_second_stair_count.value_or(0);
  check_number(second_stairs >= 0, "OneCycle", "cycle_second_stair_count", "not be negative",
               second_stairs);
  check_number(decay_step_size >= 0, "OneCycle", "decay_step_size", "not be negative",
               decay_step_size);
}

// ---- The sections ------------------------------------------------------------------------------

namespace {

constexpr std::string_view kFromConfig = "DeepSpeed configuration";

std::string shown_value(const DeepSpeedValue& value) {
  struct Show {
    std::string operator()(std::monostate) const { return "null"; }
    std::string operator()(bool truth) const { return truth ? "true" : "false"; }
    std::string operator()(double number) const { return tessera::detail::concatenate(number); }
    std::string operator()(const std::string& text) const { return '"' + text + '"'; }
    std::string operator()(const std::vector<double>& list) const {
      std::string all;
      for (const double number : list)
        all += (all.empty() ? "" : ", ") + tessera::detail::concatenate(number);
      return "[" + all + "]";
    }
  };
  return std::visit(Show(), value);
}

// The params of a section, each taken once; what is left at the end is unknown.
class Params {
 public:
  Params(const DeepSpeedConfig& config, const char* name, const DeepSpeedSection& section)
      : config_(config), name_(name), section_(section) {}

  std::string place(std::string_view param) const {
    return tessera::detail::concatenate(config_.name, ": ", name_, ".params.", param);
  }
  // Null: absent, or null, or "auto".
  const DeepSpeedValue* find(std::string_view param) {
    known_.emplace(param);
    for (const auto& [name, value] : section_.params) {
      if (name != param || std::holds_alternative<std::monostate>(value)) continue;
      return means_auto(value) ? nullptr : &value;
    }
    return nullptr;
  }
  bool is_auto(std::string_view param) const {
    return std::ranges::any_of(section_.params, [&](const auto& entry) {
      return entry.first == param && means_auto(entry.second);
    });
  }

  // Into `target`, where the file says it. `automatic`: "auto" leaves it as it is.
  template <class T>
  bool read(std::string_view param, T& target, bool automatic = false) {
    const DeepSpeedValue* value = find(param);
    TS_CHECK_AS(ConfigError, automatic || !is_auto(param), kFromConfig, place(param),
                " is \"auto\", which nobody fills in; write a value, or leave it out");
    if (value == nullptr) return false;
    target = as<T>(param, *value);
    return true;
  }
  // The program's word, where the file leaves it open; both have to be the same.
  template <class T>
  void read(std::string_view param, T& target, const std::optional<T>& said) {
    const bool from_file = read(param, target, true);
    if (!said) return;
    TS_CHECK_AS(ConfigError, !from_file || target == *said, kFromConfig, place(param), " is ",
                shown_value(*find(param)), ", and the program says ", shown_value(from(*said)),
                "; leave one of them out, or write \"auto\" in the file");
    target = *said;
  }
  // Refuses a param unless it has the value with which nothing is asked for.
  template <class T>
  void expect(std::string_view param, const T& value, std::string_view why) {
    T given = value;
    read(param, given);
    TS_CHECK_AS(UnsupportedError, given == value, kFromConfig, place(param), " is ",
                shown_value(*find(param)), ", which cannot be served: ", why);
  }
  void skip(std::string_view param) { find(param); }

  void check_all_known() const {
    std::string unknown;
    for (const auto& [name, value] : section_.params) {
      if (known_.contains(name)) continue;
      std::string near;
      size_t least = name.size() / 3 + 2;
      for (const std::string& other : known_) {
        const size_t distance = edit_distance(name, other);
        if (distance < least) least = distance, near = other;
      }
      unknown += tessera::detail::concatenate(unknown.empty() ? "\"" : ", \"", name_, ".params.",
                                              name, "\"") +
                 (near.empty() ? "" : " (did you mean \"" + near + "\"?)");
    }
    TS_CHECK_AS(ConfigError, unknown.empty(), kFromConfig, config_.name,
                " has keys that are unknown to ", section_.type, ": ", unknown,
                "; docs/deepspeed.md lists all keys; correct or remove them");
  }

 private:
  static bool means_auto(const DeepSpeedValue& value) {
    const auto* text = std::get_if<std::string>(&value);
    return text != nullptr && *text == "auto";
  }
  template <class T>
  static DeepSpeedValue from(const T& value) {
    if constexpr (std::is_same_v<T, std::array<double, 2>>) {
      return std::vector<double>{value[0], value[1]};
    } else if constexpr (std::is_arithmetic_v<T> && !std::is_same_v<T, bool>) {
      return static_cast<double>(value);
    } else {
      return value;
    }
  }
  template <class T>
  T as(std::string_view param, const DeepSpeedValue& value) const {
    const auto fail = [&](std::string_view what) {
      TS_THROW(ConfigError, kFromConfig, place(param), " has to be ", what, "; got ",
               shown_value(value));
    };
    if constexpr (std::is_same_v<T, bool>) {
      if (const auto* truth = std::get_if<bool>(&value)) return *truth;
      fail("true or false");
    } else if constexpr (std::is_same_v<T, std::string>) {
      if (const auto* text = std::get_if<std::string>(&value)) return *text;
      fail("a text");
    } else if constexpr (std::is_same_v<T, std::array<double, 2>>) {
      const auto* list = std::get_if<std::vector<double>>(&value);
      if (list != nullptr && list->size() == 2) return {(*list)[0], (*list)[1]};
      fail("a list of two numbers");
    } else if constexpr (std::is_same_v<T, std::optional<int64_t>> ||
                         std::is_same_v<T, std::optional<double>>) {
      return as<typename T::value_type>(param, value);
    } else {
      const auto* number = std::get_if<double>(&value);
      if (number != nullptr && (!std::is_integral_v<T> ||
                                (std::floor(*number) == *number && std::abs(*number) < 1e15))) {
        return static_cast<T>(*number);
      }
      fail(std::is_integral_v<T> ? "a whole number" : "a number");
    }
    return {};  // fail() has thrown
  }

  const DeepSpeedConfig& config_;
  const char* name_;
  const DeepSpeedSection& section_;
  std::set<std::string, std::less<>> known_;
};

const DeepSpeedSection& section_of(const DeepSpeedConfig& config,
                                   const std::optional<DeepSpeedSection>& section, const char* name,
                                   std::string_view where) {
  TS_CHECK_AS(ConfigError, section.has_value(), where, config.name, " has no section \"", name,
              "\"; add one, or make the ",
              name == std::string_view("optimizer") ? name : "schedule", " in the program");
  return *section;
}

// ---- Optimizers

using Groups = std::vector<ConfiguredGroup>;

// Options whose names are the file's.
template <class Options>
struct OptionReader {
  Params& params;
  const ConfiguredOptimizerOptions& said;
  void operator()(const char* name, double& value, auto...) const {
    const std::string_view option = name;
    if (option == "lr") {
      params.read(option, value, said.lr);
    } else if (option == "weight_decay") {
      params.read(option, value, said.weight_decay);
    } else if (option == "eps") {
      params.read(option, value, said.eps);
    } else {
      params.read(option, value);
    }
  }
  void operator()(const char* name, std::array<double, 2>& values, auto...) const {
    params.read(name, values, said.betas);
  }
  void operator()(const char* name, bool& value, auto...) const {
    if (std::string_view(name) != "master_weights") params.read(name, value);
  }
  void operator()(const char*, DType&, auto...) const {}  // no word of DeepSpeed's
};

template <class Optimizer>
std::unique_ptr<optim::Optimizer> made_from(Params& params, const Groups& groups,
                                            const ConfiguredOptimizerOptions& said,
                                            typename Optimizer::Options options) {
  using Options = typename Optimizer::Options;
  // DummyOptim's.
  if (params.is_auto("lr")) options.lr = 1e-3;
  if (params.is_auto("weight_decay")) options.weight_decay = 0;
  options.visit(OptionReader<Options>{params, said});
  // How torch's and DeepSpeed's kernels go over parameters.
  for (const char* how : {"fused", "foreach", "capturable", "differentiable", "set_grad_none"}) {
    params.skip(how);
  }
  params.check_all_known();
  std::vector<optim::ParameterGroup<Options>> all;
  for (const ConfiguredGroup& group : groups) {
    Options own = options;
    if (group.lr) own.lr = *group.lr;
    if (group.weight_decay) own.weight_decay = *group.weight_decay;
    all.push_back({group.parameters, own});
  }
  return std::make_unique<Optimizer>(all);
}

// Of DeepSpeed's own kernels.
template <class Options>
Options with_defaults(Options options) {
  options.lr = 1e-3;
  options.weight_decay = 0;
  return options;
}

// DeepSpeed's Adam is AdamW unless adam_w_mode is false; its own kernels decay by 0, torch's AdamW
// (torch_adam) by 0.01.
std::unique_ptr<optim::Optimizer> make_adam(bool decoupled, Params& params, const Groups& groups,
                                            const ConfiguredOptimizerOptions& said) {
  bool torch_adam = false, adam_w_mode = true;
  params.read("torch_adam", torch_adam);
  params.read("adam_w_mode", adam_w_mode);
  params.expect("bias_correction", true, "moments are corrected; leave it out");
  params.expect("fp32_optimizer_states", true, "states are f32; leave it out");
  if (decoupled || adam_w_mode) {
    auto options = with_defaults(optim::AdamWOptions());
    if (torch_adam) options.weight_decay = optim::AdamWOptions().weight_decay;
    return made_from<optim::AdamW>(params, groups, said, options);
  }
  return made_from<optim::Adam>(params, groups, said, with_defaults(optim::AdamOptions()));
}

template <class Optimizer>
std::unique_ptr<optim::Optimizer> make_torchs(Params& params, const Groups& groups,
                                              const ConfiguredOptimizerOptions& said) {
  return made_from<Optimizer>(params, groups, said, typename Optimizer::Options());
}

struct OptimizerType {
  std::string_view name;  // in small letters
  std::unique_ptr<optim::Optimizer> (*make)(Params&, const Groups&,
                                            const ConfiguredOptimizerOptions&);
};
const OptimizerType kOptimizers[] = {
    {"adam",
     [](Params& params, const Groups& groups, const ConfiguredOptimizerOptions& said) {
       return make_adam(false, params, groups, said);
     }},
    {"adamw",
     [](Params& params, const Groups& groups, const ConfiguredOptimizerOptions& said) {
       return make_adam(true, params, groups, said);
     }},
    {"lion",
     [](Params& params, const Groups& groups, const ConfiguredOptimizerOptions& said) {
       optim::LionOptions options;
       options.betas = {0.9, 0.999};  // its kernels' own default
       return made_from<optim::Lion>(params, groups, said, with_defaults(options));
     }},
    {"adagrad", make_torchs<optim::Adagrad>},
    {"sgd", make_torchs<optim::SGD>},
    {"rmsprop", make_torchs<optim::RMSprop>},
    {"adadelta", make_torchs<optim::Adadelta>},
    {"adamax", make_torchs<optim::Adamax>},
    {"nadam", make_torchs<optim::NAdam>},
    {"radam", make_torchs<optim::RAdam>},
};

// The reader has refused the types that are in no table (deepspeed_types()).
template <class Types>
const auto& type_of(const std::string& name, const Types& types) {
  return *std::ranges::find(types, lower(name), [](const auto& type) { return type.name; });
}

// ---- Schedules

struct ScheduleSources {
  Params& params;
  optim::Optimizer& optimizer;
  const ConfiguredScheduleOptions& said;
};

bool read_linear(Params& params) {
  std::string type = "log";
  params.read("warmup_type", type);
  TS_CHECK_AS(ConfigError, type == "log" || type == "linear", kFromConfig,
              params.place("warmup_type"), " has to be log or linear; got \"", type, "\"");
  return type == "linear";
}

void read_total(const ScheduleSources& from, int64_t& total) {
  from.params.read("total_num_steps", total, from.said.total_num_steps);
  TS_CHECK_AS(ConfigError, total > 0, kFromConfig, from.params.place("total_num_steps"),
              " has to say after how many updates the rate ends; write it, or \"auto\" and say "
              "total_num_steps in schedule_from_config()");
}

// As Accelerate fills them in: from 0 to the optimizer's rate.
WarmupLR read_warmup(const ScheduleSources& from) {
  WarmupLR rule;
  rule.warmup_min_lr = 0;
  from.params.read("warmup_min_lr", rule.warmup_min_lr, true);
  if (from.params.is_auto("warmup_max_lr")) rule.warmup_max_lr = from.optimizer.lr();
  from.params.read("warmup_max_lr", rule.warmup_max_lr, true);
  if (from.params.is_auto("warmup_num_steps")) rule.warmup_num_steps = 0;
  from.params.read("warmup_num_steps", rule.warmup_num_steps, from.said.warmup_num_steps);
  rule.linear = read_linear(from.params);
  return rule;
}

template <class Rule>
std::unique_ptr<optim::Schedule> scheduled(const ScheduleSources& from, const Rule& rule) {
  from.params.skip("last_batch_iteration");  // checkpoints hold it
  from.params.check_all_known();
  return std::make_unique<optim::RuleSchedule<Rule>>(from.optimizer, rule);
}

std::unique_ptr<optim::Schedule> make_warmup(const ScheduleSources& from) {
  const WarmupLR rule = read_warmup(from);
  for (size_t i = 0; i < from.optimizer.num_groups(); ++i) {
    with_default(rule, from.optimizer.lr(i)).check();
  }
  return scheduled(from, rule);
}

std::unique_ptr<optim::Schedule> make_warmup_decay(const ScheduleSources& from) {
  WarmupDecayLR rule{.warmup = read_warmup(from)};
  read_total(from, rule.total_num_steps);
  return scheduled(from, rule);
}

std::unique_ptr<optim::Schedule> make_warmup_cosine(const ScheduleSources& from) {
  WarmupCosineLR rule;
  Params& params = from.params;
  params.read("warmup_min_ratio", rule.warmup_min_ratio);
  if (params.is_auto("warmup_num_steps")) rule.warmup_num_steps = 0;
  params.read("warmup_num_steps", rule.warmup_num_steps, from.said.warmup_num_steps);
  params.read("cos_min_ratio", rule.cos_min_ratio);
  rule.linear = read_linear(params);
  read_total(from, rule.total_num_steps);
  return scheduled(from, rule);
}

std::unique_ptr<optim::Schedule> make_range_test(const ScheduleSources& from) {
  LRRangeTest rule;
  Params& params = from.params;
  params.read("lr_range_test_min_lr", rule.lr_range_test_min_lr);
  params.read("lr_range_test_step_size", rule.lr_range_test_step_size);
  params.read("lr_range_test_step_rate", rule.lr_range_test_step_rate);
  params.read("lr_range_test_staircase", rule.lr_range_test_staircase);
  return scheduled(from, rule);
}

// DeepSpeed's OneCycle moves beta1 alone, and writes 0.99 beside it. False where there are no
// betas.
template <class... Optimizers>
bool set_cycled_beta2(optim::Optimizer& optimizer) {
  const auto set = [](auto* typed) {
    if (typed == nullptr) return false;
    for (size_t i = 0; i < typed->num_groups(); ++i) typed->options(i).betas[1] = 0.99;
    return true;
  };
  return (set(dynamic_cast<Optimizers*>(&optimizer)) || ...);
}

std::unique_ptr<optim::Schedule> make_one_cycle(const ScheduleSources& from) {
  DeepSpeedOneCycle rule;
  Params& params = from.params;
  for (const char* needed : {"cycle_min_lr", "cycle_max_lr"}) {
    TS_CHECK_AS(ConfigError, params.find(needed) != nullptr, kFromConfig, params.place(needed),
                " is missing; OneCycle needs it");
  }
  params.read("cycle_min_lr", rule.cycle_min_lr);
  params.read("cycle_max_lr", rule.cycle_max_lr);
  params.read("decay_lr_rate", rule.decay_lr_rate);
  params.read("cycle_first_step_size", rule.cycle_first_step_size);
  params.read("cycle_second_step_size", rule.cycle_second_step_size);
  params.read("decay_step_size", rule.decay_step_size);
  params.read("cycle_momentum", rule.cycle_momentum);
  params.read("cycle_min_mom", rule.cycle_min_mom);
  params.read("cycle_max_mom", rule.cycle_max_mom);
  params.read("decay_mom_rate", rule.decay_mom_rate);
  params.read("cycle_first_stair_count", rule.cycle_first_stair_count);
  params.read("cycle_second_stair_count", rule.cycle_second_stair_count);
  rule.cycle_momentum =
      rule.cycle_momentum && set_cycled_beta2<optim::AdamW, optim::Adam, optim::Lion, optim::Adamax,
                                              optim::NAdam, optim::RAdam>(from.optimizer);
  return scheduled(from, rule);
}

struct ScheduleType {
  std::string_view name;  // in small letters
  std::unique_ptr<optim::Schedule> (*make)(const ScheduleSources&);
};
const ScheduleType kSchedules[] = {
    {"warmuplr", make_warmup},
    {"warmupdecaylr", make_warmup_decay},
    {"warmupcosinelr", make_warmup_cosine},
    {"lrrangetest", make_range_test},
    {"onecycle", make_one_cycle},
};

}  // namespace

std::unique_ptr<optim::Optimizer> make_optimizer(const DeepSpeedConfig& config,
                                                 const std::vector<ConfiguredGroup>& groups,
                                                 const ConfiguredOptimizerOptions& options) {
  const DeepSpeedSection& section =
      section_of(config, config.optimizer, "optimizer", "optimizer_from_config");
  const OptimizerType& type = type_of(section.type, kOptimizers);
  Params params(config, "optimizer", section);
  return type.make(params, groups, options);
}

std::unique_ptr<optim::Schedule> make_schedule(const DeepSpeedConfig& config,
                                               optim::Optimizer& optimizer,
                                               const ConfiguredScheduleOptions& options) {
  const DeepSpeedSection& section =
      section_of(config, config.scheduler, "scheduler", "schedule_from_config");
  const ScheduleType& type = type_of(section.type, kSchedules);
  Params params(config, "scheduler", section);
  return type.make({params, optimizer, options});
}

}  // namespace tessera::accelerate
