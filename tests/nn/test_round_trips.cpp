// Whatever has state: saved after any step and loaded into a new object, it goes on as if nothing
// had been, to the bit.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/state/state_dict.h>
#include <tessera/data/dataloader.h>
#include <tessera/data/sampler.h>
#include <tessera/optim/ema.h>
#include <tessera/optim/schedule.h>
#include <tessera/precision/grad_scaler.h>

#include "data/number_data.h"
#include "optim/optimizer_kinds.h"

namespace tessera::test_round_trips {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// What a test drives: `step(i)` does the i-th step and says all that can be seen after it.
struct Stateful {
  std::shared_ptr<void> owner;
  std::function<std::vector<double>(int)> step;
  std::function<StateDict()> save;
  std::function<void(const StateDict&)> load;
};

void expect_round_trips(const std::string& name, const std::function<Stateful()>& make, int steps) {
  SCOPED_TRACE(name);
  std::vector<std::vector<double>> expected;
  const Stateful whole = make();
  for (int i = 0; i < steps; ++i) expected.push_back(whole.step(i));
  EXPECT_NE(expected.front(), expected.back()) << "the steps do something";
  for (int stop = 0; stop <= steps; ++stop) {
    const Stateful first = make();
    for (int i = 0; i < stop; ++i) EXPECT_EQ(first.step(i), expected[static_cast<size_t>(i)]);
    const StateDict state = first.save().clone();
    if (stop < steps) first.step(stop);  // what is loaded later is not touched
    const Stateful second = make();
    second.load(state);
    for (int i = stop; i < steps; ++i) {
      ASSERT_EQ(second.step(i), expected[static_cast<size_t>(i)])
          << "step " << i << ", loaded after " << stop;
    }
  }
}

// ---- Optimizers --------------------------------------------------------------------------------

struct Weights {
  explicit Weights(DType dtype) {
    for (const char* name : {"a", "b"}) {
      tensors.push_back({name, (raw::arange(1, 1, 4, kF32).view({2, 2}) / 8)
                                   .to(dtype)
                                   .detach()
                                   .clone()
                                   .set_requires_grad()});
    }
  }
  void set_gradients(int step) const {
    const NoGradGuard no_grad;
    for (size_t i = 0; i < tensors.size(); ++i) {
      const Tensor& tensor = tensors[i].tensor;
      if ((step + static_cast<int>(i)) % 4 == 3) {  // a step without one
        tensor.zero_grad();
        continue;
      }
      const double value = std::sin(1.0 + step + 2.0 * static_cast<double>(i));
      tensor.set_grad((raw::arange(-1, 1, 4, kF32).view({2, 2}) * value).to(tensor.dtype()));
    }
  }
  std::vector<double> values() const {
    std::vector<double> all;
    for (const auto& [name, tensor] : tensors) {
      for (const double value : tensor.to_vector()) all.push_back(value);
    }
    return all;
  }
  StateDict state() const {
    StateDict state;
    for (const auto& [name, tensor] : tensors) state.set("weights." + name, tensor.detach());
    return state;
  }
  void load(const StateDict& state) const {
    const NoGradGuard no_grad;
    for (const auto& [name, tensor] : tensors) copy_(tensor, state.at("weights." + name));
  }

  NamedTensors tensors;
};

template <class Optimizer, class Options>
void optimizer_round_trips(const std::string& name, const Options& options) {
  for (const DType dtype : {kF32, kBF16}) {
    const auto make = [&] {
      struct Run {
        explicit Run(DType dtype, const Options& first, const Options& second)
            : weights(dtype),
              optimizer({{{weights.tensors[0]}, first}, {{weights.tensors[1]}, second}}) {}
        Weights weights;
        Optimizer optimizer;
      };
      Options second = options;
      second.lr /= 2;
      const auto run = std::make_shared<Run>(dtype, options, second);
      return Stateful{run,
                      [run](int i) {
                        run->weights.set_gradients(i);
                        run->optimizer.set_lr(1, 0.05 / (1 + i));
                        run->optimizer.step();
                        return run->weights.values();
                      },
                      [run] {
                        StateDict state = run->weights.state();
                        state.merge("optimizer.", run->optimizer.state_dict());
                        return state;
                      },
                      [run](const StateDict& state) {
                        run->weights.load(state);
                        run->optimizer.load_state_dict(state.with_prefix("optimizer."));
                      }};
    };
    expect_round_trips(name + " " + std::string(name_of(dtype)), make, 9);
  }
}

template <class T>
class RoundTripsOfOptimizers : public testing::Test {};
TYPED_TEST_SUITE(RoundTripsOfOptimizers, optim::OptimizerKinds);

TYPED_TEST(RoundTripsOfOptimizers, HoldWithAllTheirStates) {
  for (const auto& options : optim::kOptions<TypeParam>) {
    optimizer_round_trips<TypeParam>(TypeParam::kName, options);
  }
}

TEST(RoundTrips, OfAnAverageOfParameters) {
  for (const DType dtype : {kF32, kBF16}) {
    const auto make = [&] {
      struct Run {
        explicit Run(DType dtype) : weights(dtype), average(weights.tensors, {.decay = 0.8}) {}
        Weights weights;
        optim::EMA average;
      };
      const auto run = std::make_shared<Run>(dtype);
      return Stateful{
          run,
          [run](int i) {
            const NoGradGuard no_grad;
            for (const auto& [name, tensor] : run->weights.tensors) {
              copy_(tensor, full({2, 2}, std::cos(i)).to(tensor.dtype()));
            }
            run->average.update();
            std::vector<double> seen = {static_cast<double>(run->average.num_updates())};
            for (const auto& [name, tensor] : run->average.averages()) {
              for (const double value : tensor.to_vector()) seen.push_back(value);
            }
            return seen;
          },
          [run] { return run->average.state_dict(); },
          [run](const StateDict& state) { run->average.load_state_dict(state); }};
    };
    expect_round_trips(std::string(name_of(dtype)), make, 5);
  }
}

// ---- Schedules ---------------------------------------------------------------------------------

struct Rates {
  Rates()
      : weights(kF32),
        optimizer({{{weights.tensors[0]}, {.lr = 1}}, {{weights.tensors[1]}, {.lr = 0.5}}}) {}
  std::vector<double> seen() const {
    return {optimizer.lr(0), optimizer.lr(1), optimizer.options(0).betas[0]};
  }
  Weights weights;
  optim::AdamW optimizer;
};

template <class Rule>
void schedule_round_trips(const std::string& name, const Rule& rule) {
  const auto make = [&] {
    struct Run : Rates {
      explicit Run(const Rule& rule) : schedule(optimizer, rule) {}
      optim::RuleSchedule<Rule> schedule;
    };
    const auto run = std::make_shared<Run>(rule);
    return Stateful{run,
                    [run](int) {
                      run->schedule.step();
                      std::vector<double> seen = run->seen();
                      seen.push_back(static_cast<double>(run->schedule.current_step()));
                      return seen;
                    },
                    [run] { return run->schedule.state_dict(); },
                    [run](const StateDict& state) { run->schedule.load_state_dict(state); }};
  };
  expect_round_trips(name, make, 10);
}

TEST(RoundTrips, OfEverySchedule) {
  using namespace optim;
  schedule_round_trips("Constant", Constant{});
  schedule_round_trips("Linear", Linear{});
  schedule_round_trips("Step", Step{.step_size = 3});
  schedule_round_trips("MultiStep", MultiStep{.milestones = {2, 5}});
  schedule_round_trips("Exponential", Exponential{.gamma = 0.9});
  schedule_round_trips("Polynomial", Polynomial{.warmup = 2, .total = 8, .power = 2});
  schedule_round_trips("Cosine", Cosine{.warmup = 2, .total = 8, .min_lr = 0.1});
  schedule_round_trips("CosineRestarts", CosineRestarts{.period = 3, .growth = 2});
  schedule_round_trips("CosineHardRestarts",
                       CosineHardRestarts{.warmup = 1, .total = 12, .cycles = 2});
  schedule_round_trips("OneCycle", OneCycle{.max_lr = 1, .total = 14});
  schedule_round_trips("InverseSqrt", InverseSqrt{.warmup = 3});
  schedule_round_trips("Warmup", Warmup{.warmup = 12});
}

// Every field of its state decides at some step: the best, the steps without improvement, the
// cooldown.
TEST(RoundTrips, OfAPlateauBeforeInAndAfterItsCooldown) {
  const double metrics[] = {5,    4, 4, 4.1, 4,   3.9, 4,   4,   4,
                            kNaN, 4, 4, 3.8, 3.9, 3.9, 3.9, 3.9, 3.9};
  for (const int64_t cooldown : {0, 1, 3}) {
    const auto make = [&] {
      struct Run : Rates {
        explicit Run(int64_t cooldown)
            : schedule(optimizer, {.factor = 0.5, .patience = 1, .cooldown = cooldown}) {}
        optim::PlateauSchedule schedule;
      };
      const auto run = std::make_shared<Run>(cooldown);
      return Stateful{run,
                      [run, &metrics](int i) {
                        const bool lowered = run->schedule.step(metrics[i]);
                        return std::vector<double>{run->optimizer.lr(0), run->schedule.best(),
                                                   static_cast<double>(lowered)};
                      },
                      [run] {
                        StateDict state = run->schedule.state_dict();
                        state.merge("optimizer.", run->optimizer.state_dict());
                        return state;
                      },
                      [run](const StateDict& state) {
                        run->optimizer.load_state_dict(state.with_prefix("optimizer."));
                        StateDict own;
                        for (const auto& [name, tensor] : state) {
                          if (!name.starts_with("optimizer.")) own.set(name, tensor);
                        }
                        run->schedule.load_state_dict(own);
                      }};
    };
    expect_round_trips("cooldown " + std::to_string(cooldown), make,
                       static_cast<int>(std::size(metrics)));
  }
}

// ---- Loss scale --------------------------------------------------------------------------------

TEST(RoundTrips, OfALossScaleBeforeAndAfterItGrowsAndFalls) {
  const double gradients[] = {1, 1, kInfinity, 1, 1, 1, kNaN, kNaN, 1, 1, 1, 1};
  const auto make = [&] {
    struct Run {
      Run() : weights(kF32), optimizer(weights.tensors, {.lr = 0.1}) {}
      Weights weights;
      optim::SGD optimizer;
      precision::GradScaler scaler{{.init_scale = 1024, .growth_factor = 4, .growth_interval = 3}};
    };
    const auto run = std::make_shared<Run>();
    return Stateful{run,
                    [run, &gradients](int i) {
                      for (const auto& [name, tensor] : run->weights.tensors) {
                        tensor.set_grad(raw::full({2, 2}, gradients[i], kF32));
                      }
                      const auto skipped = run->scaler.skipped_steps();
                      run->scaler.step(run->optimizer);
                      run->scaler.update();
                      return std::vector<double>{
                          run->scaler.loss_scale(),
                          static_cast<double>(run->scaler.growth_tracker()),
                          static_cast<double>(run->scaler.skipped_steps()),
                          static_cast<double>(run->scaler.skipped_steps() - skipped)};
                    },
                    [run] { return run->scaler.state_dict(); },
                    [run](const StateDict& state) { run->scaler.load_state_dict(state); }};
  };
  expect_round_trips("GradScaler", make, static_cast<int>(std::size(gradients)));
}

// ---- Loaders -----------------------------------------------------------------------------------

TEST(RoundTrips, OfALoaderInTheMiddleOfAnyEpoch) {
  const data::Numbers numbers(11);
  for (const bool shuffle : {false, true}) {
    for (const bool drop_last : {false, true}) {
      for (const int workers : {0, 2}) {
        const auto make = [&] {
          const auto loader = std::make_shared<data::DataLoader<int64_t>>(
              numbers, data::DataLoaderOptions{.batch_size = 3,
                                               .shuffle = shuffle,
                                               .seed = 5,
                                               .drop_last = drop_last,
                                               .workers = workers});
          return Stateful{loader,
                          [loader](int) {
                            std::vector<double> seen;
                            // An epoch's end is no batch.
                            while (seen.empty()) {
                              if (const auto batch = loader->next()) seen = batch->to_vector();
                            }
                            seen.push_back(static_cast<double>(loader->cursor().epoch));
                            seen.push_back(static_cast<double>(loader->cursor().position));
                            return seen;
                          },
                          [loader] { return loader->state_dict(); },
                          [loader](const StateDict& state) { loader->load_state_dict(state); }};
        };
        expect_round_trips(std::string(shuffle ? "shuffled " : "") +
                               (drop_last ? "drop_last " : "") + std::to_string(workers),
                           make, 13);
      }
    }
  }
}

}  // namespace
}  // namespace tessera::test_round_trips
