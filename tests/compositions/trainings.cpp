#include "compositions/trainings.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <utility>

#include <tessera/accelerate/accelerator.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/random.h>
#include <tessera/distributed/fully_shard/fully_shard.h>
#include <tessera/distributed/mesh/dtensor.h>
#include <tessera/nn/lora/lora.h>
#include <tessera/optim/clip.h>
#include <tessera/optim/ema.h>
#include <tessera/optim/optimizers.h>
#include <tessera/optim/schedule.h>
#include <tessera/precision/autocast.h>

#include "compositions/subject.h"
#include "distributed/compared_ranks.h"

namespace tessera::compositions {
namespace {

constexpr double kRate = 0.02, kOtherRate = 0.01, kDecay = 0.1;

bool is_narrow(const Composition& one) {
  return one.numbers == Numbers::kBF16 || one.numbers == Numbers::kFP16;
}

// ---- What both loops are told --------------------------------------------------------------------

uint64_t mixed(uint64_t seed, int64_t index) {
  uint64_t z = seed * 0x9e3779b97f4a7c15 + static_cast<uint64_t>(index) * 0xd6e8feb86659fd93 + 1;
  z = (z ^ (z >> 32)) * 0xd6e8feb86659fd93;
  return z ^ (z >> 32);
}

// Whether the gradients of the window before are not to be added to.
bool clears(const Composition& one, int64_t before) {
  return before != one.left_out || !one.keeps_gradients;
}

double share_of(const Composition& one, int64_t window, int64_t index) {
  if (window == one.weightless) return 0;
  if (window == one.overflow_at) return 1;  // nothing is infinite where nothing counts
  if (one.weights == Weights::kEqual) return 1;
  const uint64_t drawn = mixed(one.seed, index) % 8;
  if (one.weights == Weights::kSomeZero && drawn < 3) return 0;
  return 0.2 + 0.1 * static_cast<double>(drawn);
}

int64_t micro_batches(const Composition& one, int64_t window) {
  return window == one.short_window ? 1 : one.setup_at(window).accumulate;
}
// The first micro-batch of a window: they are dealt to the ranks in turn.
int64_t first_index(const Composition& one, int64_t window) {
  int64_t index = 0;
  for (int64_t w = 0; w < window; ++w) index += micro_batches(one, w) * one.setup_at(w).ranks;
  return index;
}

// ---- What both loops hold ------------------------------------------------------------------------

struct Training {
  std::unique_ptr<Subject> subject;
  std::unique_ptr<optim::Optimizer> optimizer;
  std::unique_ptr<optim::Schedule> schedule;
  std::unique_ptr<optim::EMA> average;
  std::vector<HookHandle> hooks;
};

void make_model(Training& training, const Composition& one) {
  manual_seed(one.seed);
  const nn::ParameterDefaultsGuard numbers({.dtype = one.numbers == Numbers::kF64 ? kF64 : kF32});
  training.subject = make_subject();
  nn::ModuleBase& model = training.subject->model();
  if (one.adapters) {
    nn::add_lora(model, {.names = training.subject->adapted(), .rank = 2, .alpha = 4});
    const NoGradGuard no_grad;  // B begins as zeros: let all have gradients from the start
    for (const auto& [name, tensor] : nn::trainable_parameters(model)) {
      if (name.find("lora_B") == std::string::npos) continue;
      Tensor(tensor).copy_(rand(tensor.shape(), {.dtype = tensor.dtype()}, RandomStream{5, 0}) *
                           0.1);
    }
  }
  const std::vector<std::string> parts = training.subject->parts();
  if (one.recompute) {
    for (size_t i = 1; i < parts.size(); i += 2) {
      training.hooks.push_back(model.submodule(parts[i]).checkpoint_calls());
    }
  }
  if (one.hooks) {
    const NamedTensors parameters = nn::trainable_parameters(model);
    for (size_t i = 0; i < parameters.size(); i += 2) {
      training.hooks.push_back(
          register_hook(parameters[i].tensor, [](const Tensor& g) { return g * 2.0; }));
    }
  }
}

void set_trained(Training& training, const Composition& one, int64_t window) {
  if (window != one.freeze_at && window != one.thaw_at) return;
  const std::vector<std::string> parts = training.subject->parts();
  training.subject->model()
      .submodule(parts[static_cast<size_t>(one.part) % parts.size()])
      .requires_grad_(window == one.thaw_at);
}

// What a program does to its parameters and rates between steps.
void write_before(Training& training, const Composition& one, int64_t window) {
  if (window == one.written_at) {
    const NoGradGuard no_grad;
    nn::ModuleBase& model = training.subject->model();
    // Of parts their elements, or the wholes of which they are cut again.
    const bool is_cut = std::ranges::any_of(model.parameters(), distributed::is_dtensor);
    std::optional<distributed::FullParametersScope> wholes;
    if (is_cut && one.seed % 2 == 0) {
      wholes.emplace(model, true);
    }
    for (const Tensor& parameter : model.parameters()) {
      (distributed::is_dtensor(parameter) ? distributed::to_local(parameter) : parameter)
          .mul_(0.75);
    }
  }
  if (window == one.rated_at) {
    for (size_t group = 0; group < training.optimizer->num_groups(); ++group) {
      training.optimizer->set_lr(group, training.optimizer->lr(group) * 0.5);
    }
  }
}

// In the mode of evaluation, without gradients, amid a training.
double look_at(Training& training, int64_t index) {
  nn::ModuleBase& model = training.subject->model();
  model.eval();
  const NoGradGuard no_grad;
  const double loss = training.subject->loss(index, 1).loss.item();
  model.train();
  return loss;
}

// Every other one.
TensorList some_of(const NamedTensors& parameters) {
  TensorList some;
  for (size_t i = 0; i < parameters.size(); i += 2) some.push_back(parameters[i].tensor);
  return some;
}
constexpr double kGreatest = std::numeric_limits<double>::infinity();

// All that are ever trained: who thaws a part has it in the optimizer.
NamedTensors trained(const Training& training, const Composition& one) {
  const nn::ModuleBase& model = training.subject->model();
  return one.adapters ? nn::trainable_parameters(model) : model.named_parameters();
}

template <class Optimizer>
std::unique_ptr<optim::Optimizer> make(const NamedTensors& parameters, bool groups,
                                       typename Optimizer::Options options) {
  options.lr = kRate;
  if (!groups) return std::make_unique<Optimizer>(parameters, options);
  const auto middle = parameters.begin() + static_cast<ptrdiff_t>(parameters.size() / 2);
  typename Optimizer::Options others = options;
  others.lr = kOtherRate;
  others.weight_decay = kDecay;
  return std::make_unique<Optimizer>(
      std::vector<optim::ParameterGroup<typename Optimizer::Options>>{
          {NamedTensors(parameters.begin(), middle), options},
          {NamedTensors(middle, parameters.end()), others}});
}

void make_optimizer(Training& training, const Composition& one) {
  const NamedTensors all = trained(training, one);
  // A great eps: what is 0 but for the order of a sum, or a rounding, does not become a step.
  const double eps = is_narrow(one) ? 0.3 : 1e-3;
  training.optimizer = [&]() -> std::unique_ptr<optim::Optimizer> {
    using namespace optim;
    switch (one.optimizer) {
      case OptimizerKind::kSgd:
        return make<SGD>(all, one.groups, {});
      case OptimizerKind::kMomentum:
        return make<SGD>(all, one.groups, {.momentum = 0.9});
      case OptimizerKind::kAdamW:
        return make<AdamW>(all, one.groups, {.eps = eps, .weight_decay = 0.01});
      case OptimizerKind::kAdam:
        return make<Adam>(all, one.groups, {.eps = eps});
      case OptimizerKind::kRmsprop:
        return make<RMSprop>(all, one.groups, {.eps = eps, .momentum = 0.5});
      case OptimizerKind::kAdagrad:
        return make<Adagrad>(all, one.groups, {.eps = eps});
      case OptimizerKind::kLion:
        return make<Lion>(all, one.groups, {});
      case OptimizerKind::kAdamax:
        return make<Adamax>(all, one.groups, {.eps = eps});
      case OptimizerKind::kNAdam:
        return make<NAdam>(all, one.groups, {.eps = eps});
      case OptimizerKind::kAdadelta:
        return make<Adadelta>(all, one.groups, {.eps = eps});
    }
    return nullptr;
  }();
  training.schedule = [&]() -> std::unique_ptr<optim::Schedule> {
    using namespace optim;
    switch (one.schedule) {
      case ScheduleKind::kNone:
        return nullptr;
      case ScheduleKind::kCosine:
        return std::make_unique<CosineSchedule>(*training.optimizer,
                                                optim::Cosine{.warmup = 1, .total = 8});
      case ScheduleKind::kStep:
        return std::make_unique<StepSchedule>(*training.optimizer,
                                              optim::Step{.step_size = 2, .gamma = 0.5});
      case ScheduleKind::kWarmup:
        return std::make_unique<WarmupSchedule>(*training.optimizer, optim::Warmup{.warmup = 3});
    }
    return nullptr;
  }();
}

std::vector<double> doubles_of(const Tensor& tensor) {
  const NoGradGuard no_grad;
  return (distributed::is_dtensor(tensor) ? distributed::full_tensor(tensor) : tensor)
      .to(kF64)
      .to_vector<double>();
}
std::map<std::string, std::vector<double>> doubles_of(const NamedTensors& named) {
  std::map<std::string, std::vector<double>> values;
  for (const auto& [name, tensor] : named) values[name] = doubles_of(tensor);
  return values;
}

precision::Policy policy_of(const Composition& one) {
  const DType narrow = one.numbers == Numbers::kBF16 ? kBF16 : kF16;
  switch (one.policy) {
    case PrecisionPolicy::kAutocast:
      return precision::Policy::autocast(narrow);
    case PrecisionPolicy::kBoundary:
      return precision::Policy::boundary(narrow);
    case PrecisionPolicy::kPure:
      return precision::Policy::pure(narrow);
  }
  return {};
}

}  // namespace

// ---- One process, a plain loop -------------------------------------------------------------------

Outcome train_plainly(const Composition& one) {
  Training training;
  make_model(training, one);
  nn::ModuleBase& model = training.subject->model();
  set_trained(training, one, 0);
  const std::map<std::string, std::vector<double>> begin = doubles_of(model.named_parameters());
  precision::AppliedPolicy applied;
  if (is_narrow(one)) {
    precision::Policy policy = policy_of(one);
    policy.output = kF32;
    applied = precision::apply(model, policy);
  }
  make_optimizer(training, one);
  if (is_narrow(one) && one.policy == PrecisionPolicy::kPure) {
    training.optimizer->begin_masters(applied.take_originals());
  }
  const NamedTensors parameters = trained(training, one);
  if (one.ema) training.average = std::make_unique<optim::EMA>(parameters, optim::EMAOptions{0.9});
  Outcome outcome;
  for (int64_t window = 0; window < one.windows; ++window) {
    if (window > 0) set_trained(training, one, window);
    write_before(training, one, window);
    if (one.clears_first && clears(one, window - 1)) training.optimizer->zero_grad();
    const int64_t begin_index = first_index(one, window);
    const int64_t count = micro_batches(one, window) * one.setup_at(window).ranks;
    std::vector<MicroLoss> losses;
    double total = 0;
    for (int64_t i = begin_index; i < begin_index + count; ++i) {
      losses.push_back(training.subject->loss(i, share_of(one, window, i)));
      outcome.losses[i] = losses.back().loss.item();
      total += losses.back().weight;
    }
    if (window == one.looked_at) outcome.looks[window] = look_at(training, begin_index);
    for (const MicroLoss& micro : losses) {
      (micro.loss * (total > 0 ? micro.weight / total : 0)).backward();
    }
    const bool skips = total == 0 || window == one.overflow_at;
    outcome.skipped[window] = skips;
    if (window != one.left_out && !skips) {
      if (one.clip > 0 && one.clip_kind == ClipKind::kValue) {
        optim::clip_grad_value(parameters, one.clip / 20);
      } else if (one.clip > 0) {
        const bool all = one.clip_kind != ClipKind::kSome;
        outcome.norms[window] =
            optim::clip_grad_norm(
                all ? tensors_of(parameters) : some_of(parameters), one.clip,
                {.norm_type = one.clip_kind == ClipKind::kGreatest ? kGreatest : 2})
                .item();
      }
      training.optimizer->step();
      if (training.schedule) training.schedule->step();
      if (training.average) training.average->update();
    }
    if (!one.clears_first && clears(one, window)) training.optimizer->zero_grad();
    outcome.rates[window] = training.optimizer->lr();
  }
  outcome.values = doubles_of(model.named_parameters());
  if (training.average) outcome.averages = doubles_of(training.average->averages());
  for (const auto& [name, values] : outcome.values) {
    double& moved = outcome.moved[name];
    for (size_t i = 0; i < values.size(); ++i) {
      moved = std::max(moved, std::abs(values[i] - begin.at(name)[i]));
    }
  }
  return outcome;
}

// ---- The facade on its ranks ---------------------------------------------------------------------

namespace {

std::optional<Precision> precision_of(const Composition& one) {
  if (one.numbers == Numbers::kBF16) return Precision::kBF16;
  if (one.numbers == Numbers::kFP16) return Precision::kFP16;
  return std::nullopt;
}

// Windows [begin, end) on this rank, from a checkpoint or from the start.
void train_windows(const Composition& one, int64_t begin, int64_t end, int rank,
                   const std::string& folder, Outcome& outcome, std::mutex& mutex) {
  const Setup& setup = one.setup_at(begin);
  Training training;
  make_model(training, one);
  nn::ModuleBase& model = training.subject->model();
  for (int64_t window = 0; window <= begin; ++window) set_trained(training, one, window);
  const bool narrow = is_narrow(one);
  Accelerator accelerator(
      {.mixed_precision = precision_of(one),
       .precision_policy = narrow ? std::optional(one.policy) : std::nullopt,
       .gradient_accumulation_steps = setup.accumulate,
       .cpu = true,
       .sharding = setup.sharding,
       .dp_replicate_size = setup.replicas > 1 ? std::optional(setup.replicas) : std::nullopt,
       .loss_scale = {.init_scale = narrow ? std::optional(1024.0) : std::nullopt},
       .config_file = ""});
  if (one.early) make_optimizer(training, one);
  accelerator.prepare(model);
  if (!one.early) make_optimizer(training, one);
  accelerator.prepare(*training.optimizer);
  if (training.schedule) accelerator.prepare(*training.schedule);
  if (one.ema) {
    training.average = std::make_unique<optim::EMA>(trained(training, one), optim::EMAOptions{0.9});
    accelerator.register_for_checkpointing(*training.average);
  }
  if (begin > 0) accelerator.load_state(folder);
  for (int64_t window = begin; window < end; ++window) {
    if (window > begin) set_trained(training, one, window);
    write_before(training, one, window);
    const int64_t turns = micro_batches(one, window);
    for (int64_t turn = 0; turn < turns; ++turn) {
      const int64_t index = first_index(one, window) + turn * setup.ranks + rank;
      auto micro = accelerator.accumulate({&model}, {.ends_window = window == one.short_window});
      MicroLoss loss = training.subject->loss(index, share_of(one, window, index));
      {
        const std::lock_guard lock(mutex);
        outcome.losses[index] = loss.loss.item();
      }
      if (window == one.looked_at && turn == turns - 1) {
        const double look = look_at(training, first_index(one, window));
        const std::lock_guard lock(mutex);
        outcome.looks[window] = look;
      }
      const bool overflows =
          window == one.overflow_at && turn == turns - 1 && rank == setup.ranks - 1;
      if (one.clears_first && clears(one, window - 1)) training.optimizer->zero_grad();
      Tensor total = overflows ? loss.loss * std::numeric_limits<double>::infinity() : loss.loss;
      if (one.two_losses) {
        accelerator.backward(total * 0.25,
                             {.weight = loss.weight, .retain_graph = true, .more = true});
        total = total * 0.75;
      }
      accelerator.backward(total, {.weight = loss.weight});
      if (window != one.left_out) {
        Tensor norm;
        const NamedTensors all = trained(training, one);
        if (one.clip > 0 && one.clip_kind == ClipKind::kValue) {
          accelerator.clip_grad_value(all, one.clip / 20);
        } else if (one.clip > 0) {
          norm = accelerator.clip_grad_norm(
              one.clip_kind == ClipKind::kSome ? some_of(all) : tensors_of(all), one.clip,
              one.clip_kind == ClipKind::kGreatest ? kGreatest : 2);
        }
        training.optimizer->step();
        if (training.schedule) training.schedule->step();
        if (micro.sync_gradients()) {
          const bool skipped = accelerator.optimizer_step_was_skipped();
          if (training.average && !skipped) training.average->update();
          const std::lock_guard lock(mutex);
          outcome.skipped[window] = skipped;
          if (norm.defined() && !skipped) outcome.norms[window] = norm.item();
        }
      }
      if (!one.clears_first && clears(one, window)) training.optimizer->zero_grad();
    }
    const std::lock_guard lock(mutex);
    outcome.rates[window] = training.optimizer->lr();
  }
  if (end < one.windows) {
    accelerator.save_state(folder);
    return;
  }
  const auto values = doubles_of(model.named_parameters());
  const auto averages = training.average ? doubles_of(training.average->averages())
                                         : std::map<std::string, std::vector<double>>();
  const std::lock_guard lock(mutex);
  if (outcome.values.empty()) {
    outcome.values = values;
    outcome.averages = averages;
  }
  TS_CHECK_AS(ValueError, outcome.values == values && outcome.averages == averages, "compositions",
              "ranks end with different values");
}

}  // namespace

Outcome train_by_facade(const Composition& one, const std::string& folder) {
  Outcome outcome;
  std::mutex mutex;
  try {
    const int64_t middle = one.resume_at > 0 ? one.resume_at : one.windows;
    distributed::compared_ranks(static_cast<int>(one.first.ranks), [&](int rank) {
      train_windows(one, 0, middle, rank, folder, outcome, mutex);
    });
    if (middle < one.windows) {
      distributed::compared_ranks(static_cast<int>(one.second.ranks), [&](int rank) {
        train_windows(one, middle, one.windows, rank, folder, outcome, mutex);
      });
    }
  } catch (const UnsupportedError& error) {
    outcome.refusal = error.what();
  } catch (const ConfigError& error) {
    outcome.refusal = error.what();
  }
  std::filesystem::remove_all(folder);
  return outcome;
}

// ---- Comparison ----------------------------------------------------------------------------------

namespace {

struct Bounds {
  double loss, norm;  // relative
  double way;         // of the way that the tensor's elements went
  double stored = 0;  // of the values: what is stored in 16 bits
};
// Sums have another order: an epsilon, which windows and optimizers' quotients make greater. Losses
// of 16 bits have that epsilon themselves.
Bounds bounds_of(const Composition& one) {
  const bool pure = one.policy == PrecisionPolicy::kPure;
  switch (one.numbers) {
    case Numbers::kF64:
      return {1e-11, 1e-9, 1e-7, 0};
    case Numbers::kF32:
      return {1e-5, 1e-3, 1e-2, 0};
    case Numbers::kBF16:
      return {0x1p-5, 0x1p-3, 0.25, pure ? 0x1p-7 : 0};
    case Numbers::kFP16:
      return {0x1p-8, 0x1p-6, 0.1, pure ? 0x1p-10 : 0};
  }
  return {};
}

}  // namespace

std::string difference(const Composition& one, const Outcome& facade, const Outcome& plain) {
  std::ostringstream out;
  out.precision(12);
  const Bounds bounds = bounds_of(one);
  const auto compare = [&](const char* what, const auto& a, const auto& b, double bound) {
    for (const auto& [key, expected] : b) {
      if (!a.contains(key)) {
        out << what << " " << key << ": none, " << expected << " is right\n";
      } else if (!(std::abs(a.at(key) - expected) <= bound * std::max(1.0, std::abs(expected)))) {
        out << what << " " << key << ": " << a.at(key) << ", " << expected << " is right\n";
      }
    }
    for (const auto& [key, value] : a) {
      if (!b.contains(key)) out << what << " " << key << ": " << value << ", none is right\n";
    }
  };
  compare("loss of micro-batch", facade.losses, plain.losses, bounds.loss);
  for (const auto& [window, skips] : plain.skipped) {
    if (window != one.left_out && facade.skipped.contains(window) &&
        facade.skipped.at(window) != skips) {
      out << "window " << window
          << (skips ? ": stepped, though left out is right\n"
                    : ": left out, though a step is right\n");
    }
  }
  compare("look in window", facade.looks, plain.looks, bounds.loss);
  compare("norm of window", facade.norms, plain.norms, bounds.norm);
  compare("rate after window", facade.rates, plain.rates, 1e-12);
  const auto compare_values = [&](const char* what, const auto& a, const auto& b) {
    if (a.size() != b.size()) out << a.size() << " " << what << "s, " << b.size() << " are right\n";
    for (const auto& [name, expected] : b) {
      const auto place = a.find(name);
      if (place == a.end() || place->second.size() != expected.size()) {
        out << what << " " << name << ": none of " << expected.size() << " elements\n";
        continue;
      }
      const double way =
          bounds.way * std::max(plain.moved.contains(name) ? plain.moved.at(name) : 0.0, 1e-3);
      for (size_t i = 0; i < expected.size(); ++i) {
        const double bound = way + bounds.stored * std::abs(expected[i]);
        if (std::abs(place->second[i] - expected[i]) <= bound) continue;
        out << what << " " << name << "[" << i << "]: " << place->second[i] << ", " << expected[i]
            << " is right (bound " << bound << ")\n";
        break;
      }
    }
  };
  compare_values("parameter", facade.values, plain.values);
  compare_values("average", facade.averages, plain.averages);
  return out.str();
}

}  // namespace tessera::compositions
