// Optimizers, clipping, averages and schedules against PyTorch and transformers.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <set>
#include <string>

#include <tessera/core/factory/factory.h>
#include <tessera/core/state/safetensors.h>
#include <tessera/optim/clip.h>
#include <tessera/optim/ema.h>
#include <tessera/optim/schedule.h>

#include "golden_files.h"
#include "optim/optimizer_kinds.h"

namespace tessera::tests::test_golden_optim {
namespace {

using nlohmann::json;
using namespace tessera::optim;

constexpr size_t kParameters = 3;
constexpr int64_t kSteps = 10;

Tensor in_dtype(const Tensor& x, DType dtype) { return tensor(x.to_vector(), x.shape(), dtype); }
Tensor row_of(const Tensor& x, int64_t row) {
  const std::vector<double> all = x.to_vector();
  const int64_t size = x.numel() / x.size(0);
  const std::vector<double> values(all.begin() + row * size, all.begin() + (row + 1) * size);
  return tensor(values, x.shape().slice(1, x.dim()), x.dtype());
}

// Start values and gradients that all cases share.
struct Problem {
  explicit Problem(DType dtype) : file(golden_path("optimizers.safetensors")), dtype(dtype) {
    for (size_t i = 0; i < kParameters; ++i) {
      const std::string name = "p" + std::to_string(i);
      parameters.emplace_back(name,
                              in_dtype(file.view("start/" + name), dtype).set_requires_grad());
    }
  }
  void set_gradients(int64_t step) {
    for (auto& [name, parameter] : parameters) {
      parameter.set_grad(in_dtype(row_of(file.view("grads/" + name), step), dtype));
    }
  }
  SafeTensorsFile file;
  DType dtype;
  NamedTensors parameters;
};

template <class Options>
Options read_options(const json& values, Options options = {}) {
  struct Reader {
    const json& values;
    size_t read = 0;
    void operator()(const char* name, double& value, OptionRange = OptionRange::kAny) {
      if (values.contains(name)) value = values[name], ++read;
    }
    void operator()(const char* name, bool& value) {
      if (values.contains(name)) value = values[name], ++read;
    }
    void operator()(const char* name, std::array<double, 2>& value,
                    OptionRange = OptionRange::kAny) {
      if (values.contains(name)) value = {values[name][0], values[name][1]}, ++read;
    }
    void operator()(const char*, DType&) {}  // not torch's
  } reader{values};
  options.visit(reader);
  EXPECT_EQ(reader.read, values.size()) << values;
  return options;
}

template <class Kind>
std::unique_ptr<Optimizer> make(const json& golden, const NamedTensors& parameters) {
  using Options = typename Kind::Options;
  const Options options = read_options<Options>(golden["options"]);
  if (!golden.contains("groups")) return std::make_unique<Kind>(parameters, options);
  std::vector<ParameterGroup<Options>> groups;
  for (const json& group : golden["groups"]) {
    ParameterGroup<Options> made{{}, read_options(group.value("options", json::object()), options)};
    for (size_t position : group["parameters"]) made.parameters.push_back(parameters[position]);
    groups.push_back(std::move(made));
  }
  return std::make_unique<Kind>(std::move(groups));
}

template <class... Kinds>
std::unique_ptr<Optimizer> make_optimizer(testing::Types<Kinds...>, const json& golden,
                                          const NamedTensors& parameters) {
  std::unique_ptr<Optimizer> made;
  const auto offer = [&]<class Kind>() {
    if (golden["optimizer"] == Kind::kName) made = make<Kind>(golden, parameters);
  };
  (offer.template operator()<Kinds>(), ...);
  return made;
}

template <class... Kinds>
constexpr size_t number_of(testing::Types<Kinds...>) {
  return sizeof...(Kinds);
}

void expect_near(const Tensor& got, const Tensor& reference, double tolerance,
                 const std::string& where) {
  const std::vector<double> values = got.to_vector(), expected = reference.to_vector();
  ASSERT_EQ(values.size(), expected.size()) << where;
  for (size_t i = 0; i < values.size(); ++i) {
    ASSERT_NEAR(values[i], expected[i], tolerance) << where << " element " << i;
  }
}

// Ten steps accumulate the rounding of each: values are up to about 3.
double tolerance_of(DType dtype) { return (dtype == kF64 ? 1e-13 : 16 * 0x1p-24) * 3; }

class GoldenOptim : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(DTypes, GoldenOptim, testing::Values(kF64, kF32),
                         [](const auto& info) { return std::string(name_of(info.param)); });

TEST_P(GoldenOptim, TenStepsOfEachOptimizerAreThoseOfTorch) {
  std::set<std::string> kinds;
  for (const json& golden : golden_json("optimizers.json")) {
    if (!golden.contains("optimizer")) continue;
    Problem problem(GetParam());
    const std::string name = golden["name"];
    const std::unique_ptr<Optimizer> optimizer =
        make_optimizer(OptimizerKinds{}, golden, problem.parameters);
    ASSERT_NE(optimizer, nullptr) << name << ": an optimizer without a row in optimizer_kinds.h";
    kinds.insert(golden["optimizer"].get<std::string>());
    for (int64_t step = 0; step < kSteps; ++step) {
      problem.set_gradients(step);
      ASSERT_TRUE(optimizer->step());
      for (const auto& [key, parameter] : problem.parameters) {
        expect_near(parameter, row_of(problem.file.view(name + "/" + key), step),
                    tolerance_of(GetParam()), name + " " + key + " step " + std::to_string(step));
      }
    }
  }
  EXPECT_EQ(kinds.size(), number_of(OptimizerKinds{})) << "every optimizer has golden values";
}

TEST_P(GoldenOptim, ClippingIsThatOfTorch) {
  int cases = 0;
  for (const json& golden : golden_json("optimizers.json")) {
    const std::string name = golden["name"];
    Problem problem(GetParam());
    problem.set_gradients(0);
    TensorList parameters;
    for (const auto& [key, parameter] : problem.parameters) parameters.push_back(parameter);
    if (golden.contains("clip_grad_norm")) {
      const json& options = golden["clip_grad_norm"];
      const double type = options["norm_type"].is_string() ? std::numeric_limits<double>::infinity()
                                                           : options["norm_type"].get<double>();
      const Tensor norm = clip_grad_norm(parameters, options["max_norm"], {.norm_type = type});
      EXPECT_NEAR(norm.item(), golden["total"].get<double>(), tolerance_of(GetParam()) * 10)
          << name;
    } else if (golden.contains("clip_grad_value")) {
      clip_grad_value(parameters, golden["clip_grad_value"]["clip_value"]);
    } else {
      continue;
    }
    ++cases;
    for (const auto& [key, parameter] : problem.parameters) {
      expect_near(parameter.grad(), problem.file.view(name + "/" + key), tolerance_of(GetParam()),
                  name + " " + key);
    }
  }
  EXPECT_EQ(cases, 5);
}

TEST_P(GoldenOptim, TheMovingAverageIsThatOfTorch) {
  Problem problem(GetParam());
  const NamedTensors start = Problem(GetParam()).parameters;
  EMA average(problem.parameters, {.decay = 0.9});
  for (int64_t step = 0; step < kSteps; ++step) {  // parameter = start + gradient of the step
    for (size_t i = 0; i < kParameters; ++i) {
      const std::string& name = problem.parameters[i].name;
      const std::vector<double> base = start[i].tensor.to_vector();
      std::vector<double> values = row_of(problem.file.view("grads/" + name), step).to_vector();
      for (size_t k = 0; k < values.size(); ++k) values[k] += base[k];
      const Tensor source = tensor(values, start[i].tensor.shape(), GetParam());
      std::memcpy(problem.parameters[i].tensor.data(), source.data(),
                  static_cast<size_t>(source.nbytes()));
    }
    average.update();
  }
  for (const auto& [name, value] : average.averages()) {
    expect_near(value, problem.file.view("ema/" + name), tolerance_of(GetParam()), name);
  }
}

// ---- Schedules --------------------------------------------------------------------------------

// The rule of a golden case; its options are torch's.
std::unique_ptr<Schedule> make_schedule(const std::string& kind, const json& o,
                                        Optimizer& optimizer) {
  const auto integer = [&](const char* key, int64_t fallback = 0) {
    return o.value(key, fallback);
  };
  const auto number = [&](const char* key, double fallback = 0) { return o.value(key, fallback); };
  const auto schedule = [&](auto rule) -> std::unique_ptr<Schedule> {
    return std::make_unique<RuleSchedule<decltype(rule)>>(optimizer, rule);
  };
  const int64_t warmup = integer("num_warmup_steps"), total = integer("num_training_steps");
  if (kind == "ConstantLR") return schedule(Constant{number("factor"), integer("total_iters")});
  if (kind == "LinearLR")
    return schedule(Linear{number("start_factor"), number("end_factor"), integer("total_iters")});
  if (kind == "StepLR") return schedule(Step{integer("step_size"), number("gamma")});
  if (kind == "MultiStepLR") return schedule(MultiStep{o["milestones"], number("gamma")});
  if (kind == "ExponentialLR") return schedule(Exponential{number("gamma")});
  if (kind == "PolynomialLR")
    return schedule(Polynomial{.total = integer("total_iters"), .power = number("power")});
  if (kind == "CosineAnnealingLR")
    return schedule(
        Cosine{.total = integer("T_max"), .min_lr = number("eta_min"), .periodic = true});
  if (kind == "CosineAnnealingWarmRestarts")
    return schedule(CosineRestarts{integer("T_0"), integer("T_mult", 1), number("eta_min")});
  if (kind == "OneCycleLR") {
    return schedule(OneCycle{.max_lr = number("max_lr"),
                             .total = integer("total_steps"),
                             .pct_start = number("pct_start", 0.3),
                             .linear = o.value("anneal_strategy", std::string("cos")) == "linear",
                             .div_factor = number("div_factor", 25),
                             .final_div_factor = number("final_div_factor", 1e4),
                             .three_phase = o.value("three_phase", false)});
  }
  if (kind == "LambdaLR")
    return schedule(Lambda{
        [](int64_t step) { return std::pow(0.95, double(step)) + 0.01 * double(step % 3); }});
  if (kind == "SequentialLR")
    return schedule(
        Sequential{{Linear{0.1, 1.0, 5}, Cosine{.total = 20, .min_lr = 0.002, .periodic = true},
                    Constant{0.02, 1000}},
                   {5, 25}});
  if (kind == "ChainedScheduler") return schedule(Chained{{Constant{0.5, 6}, Exponential{0.9}}});
  if (kind == "get_constant_schedule_with_warmup") return schedule(Warmup{warmup});
  if (kind == "get_linear_schedule_with_warmup")
    return schedule(Polynomial{.warmup = warmup, .total = total});
  if (kind == "get_cosine_schedule_with_warmup")
    return schedule(Cosine{.warmup = warmup, .total = total, .periodic = true});
  if (kind == "get_cosine_with_hard_restarts_schedule_with_warmup")
    return schedule(CosineHardRestarts{warmup, total, integer("num_cycles")});
  if (kind == "get_polynomial_decay_schedule_with_warmup")
    return schedule(Polynomial{warmup, total, number("power"), number("lr_end")});
  if (kind == "get_inverse_sqrt_schedule") return schedule(InverseSqrt{.warmup = warmup});
  if (kind == "cosine_with_min_lr")
    return schedule(
        Cosine{.warmup = warmup, .total = total, .min_lr = number("min_lr"), .periodic = true});
  return nullptr;
}

TEST(GoldenSchedules, EveryRateIsThatOfTorchAndTransformers) {
  const json cases = golden_json("schedules.json");
  EXPECT_EQ(cases.size(), 25u);
  for (const json& golden : cases) {
    SCOPED_TRACE(golden["name"].get<std::string>());
    const json& options = golden["options"];
    const Tensor parameter = raw::zeros({1}, kF32).set_requires_grad();
    SGD optimizer({{"p", parameter}}, {.lr = options["lr"], .momentum = 0.9});
    const std::vector<double> expected = golden["lrs"];
    const double tolerance = 1e-12 * *std::max_element(expected.begin(), expected.end());
    if (golden["schedule"] == "ReduceLROnPlateau") {
      PlateauSchedule schedule(
          optimizer, {.maximize = options.value("mode", "min") == "max",
                      .factor = options["factor"],
                      .patience = options["patience"],
                      .threshold = options.value("threshold", 1e-4),
                      .absolute_threshold = options.value("threshold_mode", "rel") == "abs",
                      .cooldown = options.value("cooldown", 0),
                      .min_lr = options.value("min_lr", 0.0)});
      for (size_t step = 0; step < expected.size(); ++step) {
        EXPECT_NEAR(schedule.lr(), expected[step], tolerance) << "step " << step;
        schedule.step(golden["metrics"][step]);
      }
      continue;
    }
    const std::unique_ptr<Schedule> schedule =
        make_schedule(golden["schedule"], options, optimizer);
    ASSERT_NE(schedule, nullptr) << golden["schedule"];
    for (size_t step = 0; step < expected.size(); ++step) {
      EXPECT_NEAR(optimizer.lr(), expected[step], tolerance) << "step " << step;
      schedule->step();
    }
  }
}

}  // namespace
}  // namespace tessera::tests::test_golden_optim
