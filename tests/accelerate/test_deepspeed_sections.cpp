// The sections of a DeepSpeed configuration that make objects: optimizers, schedules, the loss
// scale.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include <nlohmann/json.hpp>

#include <tessera/accelerate/deepspeed.h>
#include <tessera/accelerate/settings/deepspeed_config.h>
#include <tessera/accelerate/settings/deepspeed_keys.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/optim/optimizers.h>
#include <tessera/precision/grad_scaler.h>

#include "golden_files.h"
#include "message_of.h"

namespace tessera::accelerate::test_deepspeed_sections {
namespace {

DeepSpeedConfig read(const std::string& json) { return parse_deepspeed_config(json, "ds.json"); }

// ---- Optimizers

NamedTensors weights(const char* prefix = "w") {
  return {{std::string(prefix) + "0", tessera::ones({3})},
          {std::string(prefix) + "1", tessera::ones({2})}};
}

std::unique_ptr<optim::Optimizer> optimizer_of(const std::string& section,
                                               const ConfiguredOptimizerOptions& options = {}) {
  return make_optimizer(read(R"({"optimizer": )" + section + "}"), {{.parameters = weights()}},
                        options);
}

template <class Optimizer>
typename Optimizer::Options options_of(const std::string& section,
                                       const ConfiguredOptimizerOptions& options = {}) {
  const auto made = optimizer_of(section, options);
  const auto* typed = dynamic_cast<const Optimizer*>(made.get());
  if (typed == nullptr) {
    ADD_FAILURE() << section << " makes another optimizer";
    return {};
  }
  return typed->options();
}

TEST(DeepSpeedOptimizer, AdamDecaysAsAdamWUnlessTheFileSaysOtherwise) {
  EXPECT_EQ(options_of<optim::AdamW>(R"({"type": "Adam"})").weight_decay, 0);
  EXPECT_EQ(options_of<optim::AdamW>(R"({"type": "AdamW"})").weight_decay, 0);
  EXPECT_EQ(
      options_of<optim::AdamW>(R"({"type": "AdamW", "params": {"torch_adam": true}})").weight_decay,
      0.01);
  EXPECT_EQ(
      options_of<optim::Adam>(R"({"type": "adam", "params": {"adam_w_mode": false}})").weight_decay,
      0);
  // AdamW is AdamW whatever its mode.
  EXPECT_EQ(options_of<optim::AdamW>(R"({"type": "AdamW", "params": {"adam_w_mode": false}})").lr,
            1e-3);
}

TEST(DeepSpeedOptimizer, TakesItsNumbersByName) {
  const auto adam = options_of<optim::AdamW>(R"({"type": "AdamW", "params": {"lr": 3e-4,
    "betas": [0.8, 0.95], "eps": 1e-7, "weight_decay": 0.1, "amsgrad": true,
    "bias_correction": true, "fused": true, "adam_w_mode": true, "torch_adam": false}})");
  EXPECT_EQ(adam.lr, 3e-4);
  EXPECT_EQ(adam.betas, (std::array<double, 2>{0.8, 0.95}));
  EXPECT_EQ(adam.eps, 1e-7);
  EXPECT_EQ(adam.weight_decay, 0.1);
  EXPECT_TRUE(adam.amsgrad);
  const auto sgd = options_of<optim::SGD>(
      R"({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": true}})");
  EXPECT_EQ(sgd.momentum, 0.9);
  EXPECT_TRUE(sgd.nesterov);
  EXPECT_EQ(options_of<optim::Lion>(R"({"type": "Lion", "params": {"betas": [0.9, 0.98]}})").betas,
            (std::array<double, 2>{0.9, 0.98}));
  EXPECT_EQ(options_of<optim::Lion>(R"({"type": "Lion"})").lr, 1e-3);  // DeepSpeed's
  EXPECT_EQ(options_of<optim::Lion>(R"({"type": "Lion"})").betas, (std::array{0.9, 0.999}));
  EXPECT_EQ(options_of<optim::Adagrad>(R"({"type": "Adagrad", "params": {"eps": 1e-9}})").eps,
            1e-9);
  EXPECT_EQ(options_of<optim::RMSprop>(R"({"type": "RMSprop", "params": {"alpha": 0.5}})").alpha,
            0.5);
  for (const char* type : {"Adadelta", "Adamax", "NAdam", "RAdam"}) {
    EXPECT_NO_THROW(optimizer_of(std::string(R"({"type": ")") + type + "\"}")) << type;
  }
}

TEST(DeepSpeedOptimizer, AutoIsWhatTheProgramSays) {
  const std::string automatic = R"({"type": "AdamW", "params": {"lr": "auto", "betas": "auto",
    "eps": "auto", "weight_decay": "auto"}})";
  EXPECT_EQ(options_of<optim::AdamW>(automatic).lr, 1e-3);
  const auto said = options_of<optim::AdamW>(
      automatic, {.lr = 0.5, .weight_decay = 0.25, .betas = {{0.5, 0.75}}, .eps = 1e-3});
  EXPECT_EQ(said.lr, 0.5);
  EXPECT_EQ(said.weight_decay, 0.25);
  EXPECT_EQ(said.betas, (std::array<double, 2>{0.5, 0.75}));
  EXPECT_EQ(said.eps, 1e-3);
  const std::string message = message_of<ConfigError>(
      [] { optimizer_of(R"({"type": "AdamW", "params": {"lr": 0.1}})", {.lr = 0.2}); });
  EXPECT_TRUE(mentions(message, "optimizer.params.lr is 0.1, and the program says 0.2")) << message;
}

TEST(DeepSpeedOptimizer, GroupsHaveTheirOwnNumbersFirst) {
  const auto made = make_optimizer(
      read(R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.01}}})"),
      {{.parameters = weights("a"), .weight_decay = 0.0}, {.parameters = weights("b"), .lr = 0.2}});
  const auto& adam = dynamic_cast<const optim::AdamW&>(*made);
  EXPECT_EQ(adam.options(0).weight_decay, 0);
  EXPECT_EQ(adam.options(0).lr, 0.1);
  EXPECT_EQ(adam.options(1).weight_decay, 0.01);
  EXPECT_EQ(adam.options(1).lr, 0.2);
}

TEST(DeepSpeedOptimizer, BadSectionsAreNamedByTypeAndParameter) {
  struct Case {
    const char *section, *part;
  };
  for (const Case& one :
       {Case{R"({"type": "AdmaW"})", "optimizer.type is \"AdmaW\""},
        Case{R"({"type": "AdmaW"})", "did you mean \"adamw\"?"},
        Case{R"({"type": "AdamW", "params": {"weight_dcay": 1}})",
             R"("optimizer.params.weight_dcay" (did you mean "weight_decay"?))"},
        Case{R"({"type": "SGD", "params": {"eps": 1}})", "unknown to SGD"},
        Case{R"({"type": "AdamW", "params": {"lr": true}})",
             "optimizer.params.lr has to be a number; got true"},
        Case{R"({"type": "AdamW", "params": {"betas": [0.9]}})", "a list of two numbers"},
        Case{R"({"type": "AdamW", "params": {"amsgrad": "auto"}})", "nobody fills in"}}) {
    const std::string message = message_of<ConfigError>([&] { optimizer_of(one.section); });
    EXPECT_TRUE(mentions(message, one.part)) << message;
  }
  EXPECT_THROW(optimizer_of(R"({"type": "AdamW", "params": {"lr": -1}})"), ValueError);
  for (const char* type : {"OneBitAdam", "ZeroOneAdam", "OneBitLamb", "Lamb", "MuSGD"}) {
    EXPECT_THROW(optimizer_of(std::string(R"({"type": ")") + type + "\"}"), UnsupportedError)
        << type;
  }
  EXPECT_THROW(optimizer_of(R"({"type": "Adam", "params": {"bias_correction": false}})"),
               UnsupportedError);
  const std::string none =
      message_of<ConfigError>([] { make_optimizer(read("{}"), {{.parameters = weights()}}); });
  EXPECT_TRUE(mentions(none, "no section \"optimizer\"")) << none;
}

// A type is made, or the file is refused where it is read: not first when a program asks for it.
TEST(DeepSpeedTypes, AreMadeOrRefusedByTheReader) {
  const auto params = [](std::string_view type) -> std::string {
    if (type == "warmupdecaylr" || type == "warmupcosinelr") return R"({"total_num_steps": 2000})";
    return type == "onecycle" ? R"({"cycle_min_lr": 0.1, "cycle_max_lr": 0.2})" : "{}";
  };
  for (const std::string section : {"optimizer", "scheduler"}) {
    const auto file = [&](const std::string& type) {
      return "{\"" + section + R"(": {"type": ")" + type + R"(", "params": )" + params(type) + "}}";
    };
    for (const DeepSpeedType& type : deepspeed_types(section)) {
      SCOPED_TRACE(type.name);
      const std::string json = file(std::string(type.name));
      if (!type.refused.empty()) {
        const std::string message = message_of<UnsupportedError>([&] { read(json); });
        EXPECT_TRUE(mentions(message, std::string(type.refused))) << message;
      } else if (section == "optimizer") {
        EXPECT_NE(make_optimizer(read(json), {{.parameters = weights()}}), nullptr);
      } else {
        optim::SGD optimizer(weights(), {.lr = 0.1});
        EXPECT_NE(make_schedule(read(json), optimizer), nullptr);
      }
    }
    for (const char* type : {"Adamm", "WarmupLRR", "NoSuch"}) {
      const std::string message = message_of<ConfigError>([&] { read(file(type)); });
      EXPECT_TRUE(mentions(message, section + ".type is \"" + type + "\", which is unknown"))
          << message;
    }
  }
}

// ---- Schedules: before the first step (DeepSpeed's iteration -1) and after each.

std::vector<double> rates(const std::string& section, const std::vector<int64_t>& steps,
                          double lr = 0.1, const ConfiguredScheduleOptions& options = {}) {
  optim::SGD optimizer(weights(), {.lr = lr});
  const auto schedule =
      make_schedule(read(R"({"scheduler": )" + section + "}"), optimizer, options);
  std::vector<double> found;
  for (const int64_t step : steps) {
    while (schedule->current_step() < step) schedule->step();
    found.push_back(optimizer.lr());
  }
  return found;
}

void expect_rates(const std::vector<double>& found, const std::vector<double>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], expected[i], 1e-12) << i;
}

const std::vector<int64_t> kSteps = {0, 1, 2, 3, 4, 5, 6, 8, 10, 12};

TEST(DeepSpeedSchedule, WarmupLRHasDeepSpeedsRates) {
  expect_rates(
      rates(R"({"type": "WarmupLR", "params": {"warmup_min_lr": 0.01,
                         "warmup_max_lr": 0.1, "warmup_num_steps": 5}})",
            kSteps),
      {0.01, 0.01, 0.0487608902266, 0.0714345575037, 0.0875217804532, 0.1, 0.1, 0.1, 0.1, 0.1});
  expect_rates(rates(R"({"type": "WarmupLR", "params": {"warmup_min_lr": 0.01,
                         "warmup_max_lr": 0.1, "warmup_num_steps": 5, "warmup_type": "linear"}})",
                     kSteps),
               {0.01, 0.01, 0.028, 0.046, 0.064, 0.082, 0.1, 0.1, 0.1, 0.1});
}

TEST(DeepSpeedSchedule, WarmupDecayLRHasDeepSpeedsRatesAlsoWhereTheProgramSaysThem) {
  expect_rates(rates(R"({"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto",
                         "warmup_max_lr": "auto", "warmup_num_steps": "auto",
                         "total_num_steps": "auto"}})",
                     kSteps, 0.1, {.warmup_num_steps = 4, .total_num_steps = 10}),
               {0, 0, 0.05, 0.0792481250361, 0.1, 0.1, 0.0833333333333, 0.05, 0.0166666666667, 0});
  expect_rates(rates(R"({"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0.02,
                         "warmup_max_lr": 0.1, "warmup_num_steps": 4, "warmup_type": "linear",
                         "total_num_steps": 10}})",
                     kSteps),
               {0.02, 0.02, 0.04, 0.06, 0.08, 0.1, 0.0866666666667, 0.06, 0.0333333333333, 0.02});
}

TEST(DeepSpeedSchedule, WarmupCosineLRHasDeepSpeedsRatesAndStaysAtItsEnd) {
  const std::vector<int64_t> steps = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20};
  expect_rates(rates(R"({"type": "WarmupCosineLR", "params": {"warmup_min_ratio": 0.1,
                         "warmup_num_steps": 3, "cos_min_ratio": 0.05, "warmup_type": "linear",
                         "total_num_steps": 9}})",
                     steps, 0.5),
               {0, 0.05, 0.2, 0.35, 0.468181033399, 0.38125, 0.2625, 0.14375, 0.0568189666012,
                0.025, 0.025, 0.025});
  expect_rates(rates(R"({"type": "WarmupCosineLR", "params": {"warmup_num_steps": 3,
                         "total_num_steps": 9}})",
                     {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, 0.5),
               {0, 0, 0.315464876786, 0.5, 0.466509700311, 0.3750125, 0.250025, 0.1250375,
                0.033540299689, 5e-05});
}

TEST(DeepSpeedSchedule, LRRangeTestHasDeepSpeedsRates) {
  const std::string section = R"({"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 0.001,
    "lr_range_test_step_size": 4, "lr_range_test_step_rate": 2.0, "lr_range_test_staircase": )";
  expect_rates(rates(section + "false}}", kSteps),
               {0.001, 0.0015, 0.002, 0.0025, 0.003, 0.0035, 0.004, 0.005, 0.006, 0.007});
  expect_rates(rates(section + "true}}", kSteps),
               {0.001, 0.001, 0.001, 0.001, 0.003, 0.003, 0.003, 0.005, 0.005, 0.007});
}

TEST(DeepSpeedSchedule, OneCycleHasDeepSpeedsRatesAndMomentumGoesTheOtherWay) {
  std::vector<int64_t> steps(16);
  for (size_t i = 0; i < steps.size(); ++i) steps[i] = static_cast<int64_t>(i);
  const std::string section = R"({"type": "OneCycle", "params": {"cycle_min_lr": 0.01,
    "cycle_max_lr": 0.11, "cycle_first_step_size": 4, "cycle_second_step_size": 6,
    "decay_step_size": 2, "decay_lr_rate": 0.5, "cycle_min_mom": 0.8, "cycle_max_mom": 0.9}})";
  expect_rates(
      rates(section, steps),
      {0.01, 0.035, 0.06, 0.085, 0.11, 0.0933333333333, 0.0766666666667, 0.06, 0.0433333333333,
       0.0266666666667, 0.01, 0.008, 0.00666666666667, 0.00571428571429, 0.005, 0.00444444444444});
  optim::AdamW optimizer(weights(), {.lr = 0.1});
  const auto schedule = make_schedule(read(R"({"scheduler": )" + section + "}"), optimizer);
  EXPECT_NEAR(optimizer.options().betas[0], 0.8, 1e-12);
  schedule->step();
  EXPECT_NEAR(optimizer.options().betas[0], 0.875, 1e-12);
  for (int i = 0; i < 3; ++i) schedule->step();
  EXPECT_NEAR(optimizer.options().betas[0], 0.8, 1e-12);
}

// Of golden/deepspeed_cases.py.
TEST(DeepSpeedSchedule, EveryRateIsThatOfThePackage) {
  const nlohmann::json cases = tests::golden_json("deepspeed_schedules.json");
  EXPECT_EQ(cases.size(), 22u);
  for (const nlohmann::json& golden : cases) {
    SCOPED_TRACE(golden["type"].get<std::string>() + golden["params"].dump());
    std::vector<optim::ParameterGroup<optim::AdamWOptions>> groups;
    for (const double lr : golden["lr"]) {
      groups.push_back({weights(groups.empty() ? "a" : "b"), {.lr = lr}});
    }
    optim::AdamW optimizer(groups);
    const nlohmann::json section = {
        {"scheduler", {{"type", golden["type"]}, {"params", golden["params"]}}}};
    const auto schedule = make_schedule(read(section.dump()), optimizer);
    const nlohmann::json& steps = golden["lrs"];
    // Some roundings of numbers below the largest.
    double largest = 0;
    for (const auto& rates : steps) largest = std::max(largest, rates[0].get<double>());
    const double tolerance = 8 * std::numeric_limits<double>::epsilon();
    for (size_t step = 0; step < steps.size(); ++step) {
      if (step > 0) schedule->step();
      for (size_t group = 0; group < groups.size(); ++group) {
        EXPECT_NEAR(optimizer.lr(group), steps[step][group].get<double>(), tolerance * largest)
            << "step " << step << " group " << group;
      }
      if (golden.contains("beta1")) {
        EXPECT_NEAR(optimizer.options(1).betas[0], golden["beta1"][step].get<double>(), tolerance)
            << "step " << step;
      }
      if (golden.contains("beta2")) {
        EXPECT_EQ(optimizer.options(1).betas[1], golden["beta2"][step].get<double>());
      }
    }
  }
}

TEST(DeepSpeedSchedule, OneCycleLeavesMomentumAloneWhereThereAreNoBetas) {
  optim::SGD optimizer(weights(), {.lr = 0.1, .momentum = 0.3});
  const auto schedule = make_schedule(read(R"({"scheduler": {"type": "OneCycle",
               "params": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1}}})"),
                                      optimizer);
  schedule->step();
  EXPECT_EQ(optimizer.options().momentum, 0.3);
  EXPECT_GT(optimizer.lr(), 0.01);
}

TEST(DeepSpeedSchedule, BadSectionsAreNamed) {
  struct Case {
    const char *section, *part;
  };
  for (const Case& one :
       {Case{R"({"type": "WarmupDecay"})", "did you mean \"warmupdecaylr\"?"},
        Case{R"({"type": "WarmupDecayLR"})", "scheduler.params.total_num_steps"},
        Case{R"({"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}})",
             "schedule_from_config()"},
        Case{R"({"type": "WarmupLR", "params": {"warmup_num_step": 3}})",
             R"("scheduler.params.warmup_num_step" (did you mean "warmup_num_steps"?))"},
        Case{R"({"type": "WarmupLR", "params": {"warmup_type": "cosine"}})", "log or linear"},
        Case{R"({"type": "WarmupLR", "params": {"warmup_num_steps": 2.5}})", "a whole number"},
        Case{R"({"type": "WarmupLR", "params": {"warmup_min_lr": [0, 1]}})", "a number"},
        Case{R"({"type": "OneCycle", "params": {"cycle_min_lr": 0.1}})", "cycle_max_lr"}}) {
    const std::string message = message_of<ConfigError>([&] { rates(one.section, {0}); });
    EXPECT_TRUE(mentions(message, one.part)) << message;
  }
  EXPECT_THROW(rates(R"({"type": "WarmupLR", "params": {"warmup_min_lr": 1}})", {0}), ValueError);
  EXPECT_THROW(rates(R"({"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0.002,
                         "total_num_steps": 2000}})",
                     {0}),
               ValueError);
  EXPECT_THROW(rates(R"({"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2,
                         "cycle_second_stair_count": -3}})",
                     {0}),
               ValueError);
}

// ---- Loss scale

// DynamicLossScaler.update_scale() of deepspeed/runtime/fp16/loss_scaler.py.
struct Scaler {
  double scale;
  int window, delayed, hysteresis;
  bool consecutive;
  int iteration = 0, last_overflow = -1;
  void update(bool overflow) {
    if (overflow) {
      if (delayed == 1 || hysteresis == 1) {
        scale /= 2;
      } else {
        --hysteresis;
      }
      last_overflow = iteration;
    } else {
      if (consecutive) hysteresis = delayed;
      if ((iteration - last_overflow) % window == 0) {
        if (!consecutive) hysteresis = delayed;
        scale *= 2;
      }
    }
    ++iteration;
  }
};

TEST(DeepSpeedLossScale, FallsAndGrowsWhereDeepSpeedsDoes) {
  for (const int hysteresis : {1, 2, 3}) {
    for (const bool consecutive : {false, true}) {
      Scaler expected{1024, 5, hysteresis, hysteresis, consecutive};
      precision::GradScaler scaler({.init_scale = 1024,
                                    .growth_interval = 5,
                                    .hysteresis = hysteresis,
                                    .consecutive_hysteresis = consecutive});
      const Tensor weight = tessera::ones({2});
      weight.set_requires_grad();
      optim::SGD optimizer({{"w", weight}}, {.lr = 0});
      uint32_t random = 7;
      for (int i = 0; i < 300; ++i) {
        random = random * 1664525 + 1013904223;
        const bool overflow = (random >> 28) < 3;
        weight.set_grad(overflow ? full({2}, INFINITY) : tessera::ones({2}));
        scaler.step(optimizer);
        scaler.update();
        expected.update(overflow);
        ASSERT_EQ(scaler.loss_scale(), expected.scale) << i << " " << hysteresis << consecutive;
        if (i % 50 == 17) {  // goes on where it was saved
          precision::GradScaler again;
          again.load_state_dict(scaler.state_dict());
          EXPECT_EQ(again.options().hysteresis, hysteresis);
          again = precision::GradScaler({.consecutive_hysteresis = consecutive});
          again.load_state_dict(scaler.state_dict());
          scaler = again;
        }
      }
    }
  }
}

TEST(DeepSpeedLossScale, ThatIsConstantStaysAndLeavesBadStepsOut) {
  precision::GradScaler scaler(
      {.init_scale = 128, .growth_factor = 1, .backoff_factor = 1, .growth_interval = 1});
  const Tensor weight = tessera::ones({1});
  weight.set_requires_grad();
  optim::SGD optimizer({{"w", weight}}, {.lr = 0.5});
  for (const bool overflow : {false, true, false, true, true}) {
    weight.set_grad(full({1}, overflow ? INFINITY : 128.0));
    EXPECT_EQ(scaler.step(optimizer), !overflow);
    scaler.update();
    EXPECT_EQ(scaler.loss_scale(), 128);
  }
  EXPECT_EQ(weight.item<float>(), 0);
  EXPECT_THROW(precision::GradScaler({.backoff_factor = 1}), ConfigError);
  EXPECT_THROW(precision::GradScaler({.hysteresis = 0}), ConfigError);
  EXPECT_THROW(precision::GradScaler({.hysteresis = 2, .on_device = true}), ConfigError);
}

}  // namespace
}  // namespace tessera::accelerate::test_deepspeed_sections
