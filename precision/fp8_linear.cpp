#include <tessera/precision/fp8_linear.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>
#include <utility>

#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/checkpoint.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/fp8/scale_history.h>
#include <tessera/core/plain_text.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/core/tensor/unreadable_storage.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/quantize/quantize.h>

namespace tessera::precision {
namespace {

constexpr const char* kFp8 = "fp8";
constexpr int64_t kMultiple = 16;  // of each dimension of a product of bytes, on a GPU
constexpr const char* kEvaluates = "the module evaluates";

bool ends_with_name(const std::string& dotted, const std::string& end) {
  return dotted == end || dotted.ends_with("." + end);
}

std::string not_a_multiple(const char* what, int64_t size) {
  return std::string(what) + " (" + std::to_string(size) + ") is no multiple of 16";
}

double noise_of(const Tensor& x, const kernels::Quantized& q, double& signal) {
  const Tensor rows = raw::view(x.contiguous(), q.values.shape()).to(kF32);
  const Tensor back = kernels::dequantize(q, kF32);
  const float *from = rows.data_as<float>(), *to = back.data_as<float>();
  double noise = 0;
  for (int64_t i = 0; i < rows.numel(); ++i) {
    const double value = static_cast<double>(from[i]);
    const double error = static_cast<double>(to[i]) - value;
    signal += value * value;
    noise += error * error;
  }
  return noise;
}

}  // namespace

// Lives as long as a graph that a layer recorded.
struct Fp8Shared {
  Fp8Recipe recipe;
  Fp8Casts casts;
  int64_t operands = 0;  // 3 x layers
  bool measures_noise = false;
  bool ended = false;  // the layers take part no more: a graph may still hold them
  // Delayed: maxima of this step, scales in use, the rows of history; where the model computes.
  kernels::ScaleHistory history;
  int64_t rolls = 0;  // at least as many rows as there are
  // Of a GPU, what it notes: f32 [operands] for recipes that are not delayed, i64 [operands, 2].
  Tensor largest, counts;

  bool is_delayed() const { return recipe.scaling == Fp8Scaling::kDelayed; }
  const Tensor& noted_largest() const { return is_delayed() ? history.maxima : largest; }

  void begin() {
    if (!is_delayed()) return;
    history = {.rows = raw::zeros({std::min<int64_t>(recipe.history, 16), operands}, kF32),
               .position = raw::zeros({2}, kI64),
               .maxima = raw::zeros({operands}, kF32),
               .scales = raw::full({operands}, 1, kF32)};
  }
  // To where the model computes now.
  void follow(const Device& device) {
    if (!device.is_cuda() && !counts.defined()) return;
    if (counts.defined() && counts.device() == device) return;
    const NoGradGuard no_grad;
    if (is_delayed()) {
      for (Tensor* each : {&history.rows, &history.position, &history.maxima, &history.scales}) {
        *each = each->to(device);
      }
    } else {
      largest = raw::zeros({operands}, kF32, device);
    }
    counts = raw::zeros({operands, 2}, kI64, device);
  }
  // Room for one more row, while the ring has not been filled once.
  void grow() {
    const int64_t steps = history.rows.size(0);
    if (rolls++ < steps || steps == recipe.history) return;
    const Tensor rows =
        raw::zeros({std::min(recipe.history, 2 * steps), operands}, kF32, history.rows.device());
    kernels::copy_into(raw::narrow(rows, 0, 0, steps), history.rows);
    history.rows = rows;
  }
};

class Fp8Layer final : public Fp8Linear {
 public:
  // `excluded`: why the filter left it out; empty where it takes part.
  Fp8Layer(std::shared_ptr<Fp8Shared> shared, nn::Linear& module, std::string name, size_t index,
           std::string excluded = {})
      : owner_(std::move(shared)),
        module_(module),
        name_(std::move(name)),
        index_(index),
        excluded_(std::move(excluded)) {}

  const Fp8Casts& casts() const override { return owner_->casts; }

  bool is_left_out() const override { return owner_->ended || !excluded_.empty(); }

  bool takes(const Tensor& x, const Tensor& weight, int64_t rows) override {
    if (owner_->ended) return false;
    const std::string reason = reason_against(x, weight, rows);
    // Shapes alone are no calls: pipeline stages have them of the layers of other ranks.
    const bool calculates = !x.is_meta() && !weight.is_meta();
    const bool counts = !is_recomputing() && calculates;
    if (reason.empty() && calculates) owner_->follow(x.device());
    if (reason.empty()) {
      if (counts) {
        ++calls_;
        check_updated(weight);
      }
      return true;
    }
    TS_CHECK_AS(UnsupportedError,
                !owner_->recipe.strict || reason == kEvaluates || !excluded_.empty(), kFp8, "'",
                name_, "' cannot run in fp8, and strict lets nothing else run: ", reason);
    if (counts) {
      ++fallbacks_[reason];
      ++dtypes_[std::string(tessera::name_of(dtype_of_other(x)))];
    }
    return false;
  }

  bool could_take(const Tensor& x, const Tensor& weight, int64_t rows) const override {
    return !owner_->ended && reason_against(x, weight, rows).empty();
  }

  // The tensor is part of the key of a kept weight, so that it stays the same.
  Tensor scale(Fp8Role role) override {
    if (!owner_->is_delayed()) return {};
    const Tensor& all = owner_->history.scales;
    if (!scales_[0].defined() || scales_[0].storage() != all.storage()) {
      for (size_t each = 0; each < scales_.size(); ++each) {
        scales_[each] = raw::narrow(all, 0, index_of(static_cast<Fp8Role>(each)), 1);
      }
    }
    return scales_[static_cast<size_t>(role)];
  }

  kernels::QuantizeWants notes(Fp8Role role) override {
    if (is_recomputing() || !owner_->counts.defined()) return {};
    const bool notes = !owner_->is_delayed() || role != Fp8Role::kInput || grad_enabled();
    const int64_t index = index_of(role);
    return {.largest = notes ? raw::narrow(owner_->noted_largest(), 0, index, 1) : Tensor(),
            .counts = raw::narrow(owner_->counts, 0, index, 1)};
  }

  void saw(Fp8Role role, const Tensor& x, const kernels::Quantized& q) override {
    if (is_recomputing() || q.any().is_meta()) return;
    Counts& counts = counts_[static_cast<size_t>(role)];
    counts.elements += q.any().numel();
    const bool on_host = !q.device().is_cuda();
    TS_CHECK_AS(UnsupportedError, on_host || !owner_->measures_noise, kFp8,
                "measures the noise of operands on the CPU; '", name_, "' computes on ",
                q.device());
    if (owner_->is_delayed() && role == Fp8Role::kInput && grad_enabled()) {
      noted_version_ = module_.weight.version();
      noted_ = true;
    }
    if (!on_host) return;  // see notes()
    counts.amax = q.amax;
    counts.saturated += q.saturated;
    counts.underflown += q.underflown;
    counts.not_finite += std::isfinite(q.amax) ? 0 : 1;
    if (owner_->measures_noise) {
      // Of a weight that came as bytes: its values come, too.
      if (const UnreadableStorage* bytes = unreadable_storage(x)) bytes->bring();
      counts.noise += noise_of(x, q, counts.signal);
    }
    if (!owner_->is_delayed()) return;
    // Backward runs without grad mode, and only after a forward that noted.
    if (role == Fp8Role::kInput && !grad_enabled()) return;
    float& maximum = owner_->history.maxima.data_as<float>()[index_of(role)];
    // Infinite for NaN, too, so that a maximum over ranks keeps it.
    maximum =
        std::max(maximum, std::isfinite(q.amax) ? q.amax : std::numeric_limits<float>::infinity());
  }

  const std::string& name() const { return name_; }
  nn::Linear& module() const { return module_; }
  void begin_window() { noted_ = false; }
  int64_t index_of(Fp8Role role) const {
    return static_cast<int64_t>(index_) * kNumFp8Roles + static_cast<int64_t>(role);
  }

  // `largest`, `noted`: what a GPU noted, on the host; or undefined.
  Fp8LayerReport report(const Tensor& largest, const Tensor& noted) const {
    Fp8LayerReport result{.name = name_,
                          .excluded = excluded_,
                          .fp8_calls = calls_,
                          .fallbacks = fallbacks_,
                          .dtypes = dtypes_};
    for (size_t role = 0; role < counts_.size(); ++role) {
      const Counts& counts = counts_[role];
      const double all = static_cast<double>(std::max<int64_t>(counts.elements, 1));
      result.operands[role] = {
          .amax = counts.amax,
          .elements = counts.elements,
          .saturated = static_cast<double>(counts.saturated) / all,
          .underflown = static_cast<double>(counts.underflown) / all,
          .not_finite = counts.not_finite,
          .sqnr = counts.noise > 0 ? 10 * std::log10(counts.signal / counts.noise) : 0};
      if (!noted.defined()) continue;
      Fp8OperandReport& operand = result.operands[role];
      const int64_t index = index_of(static_cast<Fp8Role>(role));
      const int64_t* const two = noted.data_as<int64_t>() + 2 * index;
      operand.amax = largest.data_as<float>()[index];
      operand.saturated += static_cast<double>(two[0]) / all;
      operand.underflown += static_cast<double>(two[1]) / all;
      operand.not_finite += std::isfinite(operand.amax) ? 0 : 1;
    }
    return result;
  }
  void reset_counts() {
    calls_ = 0;
    fallbacks_.clear();
    dtypes_.clear();
    counts_ = {};
  }

 private:
  struct Counts {
    float amax = 0;
    int64_t elements = 0, saturated = 0, underflown = 0, not_finite = 0;
    double signal = 0, noise = 0;
  };

  // What autocast gives a product.
  static DType dtype_of_other(const Tensor& x) {
    const AutocastMode& autocast = Context::current().slot<AutocastMode>();
    return autocast.enabled && x.dtype() != kF64 ? autocast.dtype : x.dtype();
  }

  std::string reason_against(const Tensor& x, const Tensor& weight, int64_t rows) const {
    if (!excluded_.empty()) return excluded_;
    if (!owner_->recipe.in_evaluation && !module_.is_training()) return kEvaluates;
    const AutocastMode& autocast = Context::current().slot<AutocastMode>();
    if (!autocast.enabled) return "autocast is off around the call";
    if (x.dtype() == kF64 || weight.dtype() == kF64) return "an operand is f64";
    if (weight.size(1) % kMultiple != 0) return not_a_multiple("in_features", weight.size(1));
    if (weight.size(0) % kMultiple != 0) return not_a_multiple("out_features", weight.size(0));
    if (rows % kMultiple != 0) return not_a_multiple("the number of rows", rows);
    return {};
  }

  // See [Note: delayed scales]: without update() the scales would stay for ever, and nobody know.
  void check_updated(const Tensor& weight) const {
    TS_CHECK(
        !owner_->is_delayed() || !noted_ || !grad_enabled() || weight.version() == noted_version_,
        kFp8, "'", name_,
        "': its weight was written since the last call, and the delayed scales are those of "
        "the step before; call Fp8Layers::update() after each step of the optimizers");
  }

  const std::shared_ptr<Fp8Shared> owner_;
  nn::Linear& module_;  // of forward alone
  const std::string name_;
  const size_t index_;
  const std::string excluded_;
  std::array<Tensor, kNumFp8Roles> scales_;  // f32 [1], views
  int64_t calls_ = 0;
  std::map<std::string, int64_t> fallbacks_, dtypes_;
  std::array<Counts, kNumFp8Roles> counts_;
  uint32_t noted_version_ = 0;
  bool noted_ = false;
};

Fp8Layers::Fp8Layers(nn::ModuleBase& model, const Fp8Recipe& recipe) {
  check(recipe);
  shared_ = std::make_shared<Fp8Shared>();
  shared_->recipe = recipe;
  shared_->casts = recipe.casts();
  std::vector<std::pair<std::string, nn::Linear*>> linears;
  for (const auto& [name, module] : model.named_modules()) {
    if (auto* linear = dynamic_cast<nn::Linear*>(module)) linears.emplace_back(name, linear);
  }
  // Of those that are no part of another: adapters stand inside of their layer.
  const nn::Linear* last = nullptr;
  std::string outer;
  for (const auto& [name, linear] : linears) {
    if (last != nullptr && name.starts_with(outer + ".")) continue;
    last = linear;
    outer = name;
  }
  for (const auto& [name, linear] : linears) {
    const int64_t in = linear->in_features, out = linear->out_features;
    std::string reason;
    if (nn::is_quantized(*linear)) reason = "its weight is quantized";
    for (const std::string& end : recipe.exclude) {
      if (ends_with_name(name, end)) reason = "excluded by name: " + end;
    }
    if (recipe.filter != Fp8Filter::kAll && reason.empty()) {
      if (in % kMultiple != 0) {
        reason = not_a_multiple("in_features", in);
      } else if (out % kMultiple != 0) {
        reason = not_a_multiple("out_features", out);
      } else if (linear == last) {
        reason = "the last Linear of the model";
      } else if (recipe.filter == Fp8Filter::kPays) {
        reason = reason_not_to_pay(recipe.scaling, in, out);
      }
    }
    if (reason.empty()) {
      order_.emplace_back(true, layers_.size());
      layers_.push_back(std::make_shared<Fp8Layer>(shared_, *linear, name, layers_.size()));
      linear->set_fp8(layers_.back());
    } else {
      order_.emplace_back(false, excluded_.size());
      excluded_.push_back(std::make_shared<Fp8Layer>(shared_, *linear, name, 0, std::move(reason)));
      linear->set_fp8(excluded_.back());
    }
  }
  shared_->operands = static_cast<int64_t>(layers_.size()) * kNumFp8Roles;
  shared_->begin();
}
Fp8Layers::~Fp8Layers() { shared_->ended = true; }

const Fp8Recipe& Fp8Layers::recipe() const { return shared_->recipe; }
void Fp8Layers::measure_noise(bool measure) { shared_->measures_noise = measure; }

void Fp8Layers::update() {
  if (!is_delayed() || layers_.empty()) return;
  const NoGradGuard no_grad;
  if (reduction_) reduction_(shared_->history.maxima);
  if (!shared_->history.maxima.device().is_cuda()) {  // a GPU finds out by itself
    const float* const maxima = shared_->history.maxima.data_as<float>();
    if (std::all_of(maxima, maxima + shared_->operands, [](float one) { return one == 0; })) return;
  }
  shared_->grow();
  kernels::roll_scales(shared_->history,
                       {.format = shared_->casts.input.format,
                        .grad_format = shared_->casts.grad_output.format,
                        .of_newest = recipe().algorithm == AmaxAlgorithm::kMostRecent,
                        .power_of_two = recipe().power_of_two_or_default(),
                        .margin = static_cast<int>(recipe().margin)});
  // Weights in the cache are of the old ones.
  shared_->history.scales.bump_version("new scales");
  for (const auto& layer : layers_) layer->begin_window();
}

StateDict Fp8Layers::state_dict() const {
  StateDict state;
  if (!is_delayed()) return state;
  const NoGradGuard no_grad;
  const Tensor rows = shared_->history.rows.to(kCpu), scales = shared_->history.scales.to(kCpu);
  const Tensor position = shared_->history.position.to(kCpu);
  const int64_t count = position.data_as<int64_t>()[0], newest = position.data_as<int64_t>()[1];
  const int64_t steps = rows.size(0), operands = shared_->operands;
  for (size_t i = 0; i < layers_.size(); ++i) {
    const auto first = static_cast<int64_t>(i * kNumFp8Roles);
    const Tensor history = raw::empty({kNumFp8Roles, count}, kF32);
    for (int64_t role = 0; role < kNumFp8Roles; ++role) {
      for (int64_t age = 0; age < count; ++age) {
        history.data_as<float>()[role * count + age] =
            rows.data_as<float>()[(newest - age + steps) % steps * operands + first + role];
      }
    }
    state.set(layers_[i]->name() + ".history", history);
    state.set(layers_[i]->name() + ".scale", raw::narrow(scales, 0, first, kNumFp8Roles).clone());
  }
  return state;
}

void Fp8Layers::load_state_dict(const StateDict& state) {
  if (!is_delayed()) return;
  std::string wrong;
  const auto complain = [&](const std::string& text) {
    wrong += (wrong.empty() ? "" : ", ") + text;
  };
  int64_t steps = -1;  // that all layers have
  for (const auto& layer : layers_) {
    for (const char* const key : {".history", ".scale"}) {
      const std::string name = layer->name() + key;
      if (!state.contains(name)) {
        complain(name + " is missing");
        continue;
      }
      const Tensor& value = state.at(name);
      const bool history = key == std::string_view(".history");
      if (value.dim() != (history ? 2 : 1) || value.size(0) != kNumFp8Roles) {
        complain(name + " is " + value.describe());
      } else if (history && steps >= 0 && value.size(1) != steps) {
        complain(name + " has " + std::to_string(value.size(1)) + " steps and others " +
                 std::to_string(steps));
      } else if (history) {
        steps = value.size(1);
      }
    }
  }
  TS_CHECK(wrong.empty(), kFp8, "the state of delayed scales does not fit: ", wrong,
           "; was it saved with another recipe or filter?");
  const NoGradGuard no_grad;
  const Device device = shared_->history.scales.device();
  const int64_t kept = std::min(std::max<int64_t>(steps, 0), recipe().history);
  const int64_t operands = shared_->operands;
  const Tensor rows =
      raw::zeros({std::min(recipe().history, std::max<int64_t>(kept, 16)), operands}, kF32);
  const Tensor scales = raw::empty({operands}, kF32);
  for (size_t i = 0; i < layers_.size(); ++i) {
    const Tensor history = state.at(layers_[i]->name() + ".history").to(kCpu).to(kF32).contiguous();
    const std::vector<double> scale = state.at(layers_[i]->name() + ".scale").to_vector();
    for (int64_t role = 0; role < kNumFp8Roles; ++role) {
      const int64_t operand = static_cast<int64_t>(i) * kNumFp8Roles + role;
      for (int64_t age = 0; age < kept; ++age) {
        rows.data_as<float>()[(kept - 1 - age) * operands + operand] =
            history.data_as<float>()[role * steps + age];
      }
      scales.data_as<float>()[operand] = static_cast<float>(scale[static_cast<size_t>(role)]);
    }
    layers_[i]->begin_window();
  }
  shared_->rolls = kept;
  shared_->history.rows = rows.to(device);
  const Tensor position = raw::empty({2}, kI64);
  position.data_as<int64_t>()[0] = kept;
  position.data_as<int64_t>()[1] = std::max<int64_t>(kept - 1, 0);
  shared_->history.position = position.to(device);
  kernels::copy_into(shared_->history.scales, scales.to(device));
  shared_->history.scales.bump_version("a state that was loaded");
  kernels::fill(shared_->history.maxima, 0);
}

Fp8Report Fp8Layers::report() const {
  Fp8Report report{.recipe = recipe(), .layers = {}};
  Tensor largest, noted;
  if (shared_->counts.defined()) {
    const NoGradGuard no_grad;
    largest = shared_->noted_largest().to(kCpu);
    noted = shared_->counts.to(kCpu);
  }
  for (const auto& [takes_part, index] : order_) {
    report.layers.push_back(takes_part ? layers_[index]->report(largest, noted)
                                       : excluded_[index]->report({}, {}));
  }
  return report;
}

void Fp8Layers::reset_counts() {
  for (const auto* all : {&layers_, &excluded_}) {
    for (const auto& layer : *all) layer->reset_counts();
  }
  if (!shared_->counts.defined()) return;
  kernels::fill(shared_->counts, 0);
  if (!is_delayed()) kernels::fill(shared_->largest, 0);
}

int64_t Fp8Report::fp8_calls() const {
  int64_t total = 0;
  for (const Fp8LayerReport& layer : layers) total += layer.fp8_calls;
  return total;
}
int64_t Fp8Report::fallbacks() const {
  int64_t total = 0;
  for (const Fp8LayerReport& layer : layers) {
    if (!layer.excluded.empty()) continue;
    for (const auto& [reason, calls] : layer.fallbacks) {
      if (reason != kEvaluates) total += calls;
    }
  }
  return total;
}

std::string Fp8Report::table() const {
  PlainText<std::ostringstream> text;
  text << describe(recipe) << ": " << fp8_calls() << " calls in fp8, " << fallbacks()
       << " that fell back\n";
  for (const Fp8LayerReport& layer : layers) {
    text << "  " << (layer.name.empty() ? "(model)" : layer.name) << ": ";
    if (!layer.excluded.empty()) {
      text << "not in fp8: " << layer.excluded;
      for (const auto& [dtype, calls] : layer.dtypes)
        text << ", " << calls << " calls in " << dtype;
      text << "\n";
      continue;
    }
    text << layer.fp8_calls << " calls";
    for (const auto& [reason, calls] : layer.fallbacks) {
      text << ", " << calls << " fell back: " << reason;
    }
    for (const auto& [dtype, calls] : layer.dtypes) {
      text << ", " << calls << " of them in " << dtype;
    }
    constexpr const char* kNames[] = {"x", "W", "dy"};
    for (size_t role = 0; role < layer.operands.size(); ++role) {
      const Fp8OperandReport& operand = layer.operands[role];
      if (operand.elements == 0) continue;
      text << "; " << kNames[role] << " amax " << operand.amax << ", saturated "
           << 100 * operand.saturated << "%, to zero " << 100 * operand.underflown << "%";
      if (operand.not_finite > 0) text << ", not finite " << operand.not_finite << " times";
      if (operand.sqnr != 0) text << ", " << operand.sqnr << " dB";
    }
    text << "\n";
  }
  return text.str();
}

namespace {

// The first call of a layer: delayed scales are 1.
class FirstFp8Call final : public Fp8Linear {
 public:
  FirstFp8Call(const Fp8Recipe& recipe, const Device& device) : casts_(recipe.casts()) {
    if (recipe.scaling == Fp8Scaling::kDelayed) one_ = raw::full({1}, 1, kF32, device);
  }
  const Fp8Casts& casts() const override { return casts_; }
  bool takes(const Tensor&, const Tensor&, int64_t) override { return true; }
  bool could_take(const Tensor&, const Tensor&, int64_t) const override { return true; }
  Tensor scale(Fp8Role) override { return one_; }

 private:
  Fp8Casts casts_;
  Tensor one_;
};

}  // namespace

Tensor fp8_linear(const Tensor& x, const Tensor& weight, const Tensor& bias,
                  const Fp8Recipe& recipe) {
  check(recipe);
  TS_CHECK_SHAPE(weight.dim() == 2 && x.dim() >= 1 && x.size(-1) == weight.size(1), kFp8,
                 "inner dimensions differ: x is ", x, " and weight is ", weight);
  TS_CHECK_SHAPE(!bias.defined() || (bias.dim() == 1 && bias.size(0) == weight.size(0)), kFp8,
                 "expects a bias of [", weight.size(0), "]; got ", bias);
  return tessera::fp8_linear(x, weight, bias, std::make_shared<FirstFp8Call>(recipe, x.device()));
}

}  // namespace tessera::precision
