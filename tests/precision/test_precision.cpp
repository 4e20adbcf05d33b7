// The loss scaler and the dtypes of mixed-precision training.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/nn/linear.h>
#include <tessera/optim/clip.h>
#include <tessera/optim/optimizers.h>
#include <tessera/precision/grad_scaler.h>

#include "message_of.h"
#include "refusals.h"

namespace tessera::precision::test_precision {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

Tensor filled(const std::vector<double>& values) {
  return tensor(std::span<const double>(values), {static_cast<int64_t>(values.size())}, kF32);
}

// One parameter with a gradient of its own, and its optimizer.
struct OneWeight {
  explicit OneWeight(std::vector<double> values = {1, 2})
      : weight(filled(values)), optimizer({{"w", weight}}, {.lr = 0.5}) {
    weight.set_requires_grad();
  }
  void set_gradient(std::vector<double> values) { weight.set_grad(filled(values)); }
  std::vector<float> values() const { return weight.detach().to_vector<float>(); }
  Tensor weight;
  optim::SGD optimizer;
};
using Values = std::vector<float>;

TEST(GradScaler, BeginsAsTorchDoesAndScalesTheLoss) {
  const GradScaler scaler;
  EXPECT_EQ(scaler.loss_scale(), 65536);
  EXPECT_EQ(scaler.options().growth_factor, 2);
  EXPECT_EQ(scaler.options().backoff_factor, 0.5);
  EXPECT_EQ(scaler.options().growth_interval, 2000);
  const Tensor scaled = scaler.scale(tensor({3}, kF32));
  EXPECT_EQ(scaled.item<float>(), 3 * 65536.0f);
}

TEST(GradScaler, A16BitLossIsScaledInF32) {
  const GradScaler scaler;
  for (const DType dtype : {kF16, kBF16}) {
    const Tensor loss = tensor({3}, dtype).set_requires_grad();
    const Tensor scaled = scaler.scale(loss);
    EXPECT_EQ(scaled.dtype(), kF32);
    EXPECT_EQ(scaled.item<float>(), 3 * 65536.0f);
  }
}

TEST(GradScaler, TheInverseIsAppliedByTheStepAndTheGradientsStayAsTheyAre) {
  OneWeight one;
  GradScaler scaler;
  one.set_gradient({65536, -131072});
  EXPECT_TRUE(scaler.step(one.optimizer));
  EXPECT_EQ(one.values(), (Values{0.5, 3}));
  EXPECT_EQ(one.weight.grad().to_vector<float>(), (Values{65536, -131072}));
}

TEST(GradScaler, AnOverflowLeavesTheStepOutHalvesTheScaleAndSaysWhy) {
  for (const double bad : {kNaN, kInfinity, -kInfinity}) {
    OneWeight one;
    GradScaler scaler;
    one.set_gradient({1, bad});
    EXPECT_FALSE(scaler.step(one.optimizer));
    EXPECT_EQ(one.optimizer.skip_reason(), "a gradient is not finite");
    EXPECT_EQ(one.values(), (Values{1, 2}));
    scaler.update();
    EXPECT_EQ(scaler.loss_scale(), 32768);
    EXPECT_EQ(scaler.skipped_steps(), 1);
    one.set_gradient({32768, 0});
    EXPECT_TRUE(scaler.step(one.optimizer));
    EXPECT_EQ(one.values(), (Values{0.5, 2}));
    scaler.update();
    EXPECT_EQ(scaler.loss_scale(), 32768);
  }
}

// KW-1: what is given counts, what is not keeps its default.
TEST(GradScaler, KW1OptionsAreHonouredOneByOne) {
  OneWeight one;
  GradScaler scaler({.init_scale = 1024, .growth_factor = 4});
  EXPECT_EQ(scaler.loss_scale(), 1024);
  EXPECT_EQ(scaler.options().growth_interval, 2000);
  for (int iteration = 0; iteration < 2000; ++iteration) {
    EXPECT_EQ(scaler.loss_scale(), 1024);
    one.set_gradient({0, 0});
    scaler.step(one.optimizer);
    scaler.update();
  }
  EXPECT_EQ(scaler.loss_scale(), 4096);
  one.set_gradient({kInfinity, 0});
  scaler.step(one.optimizer);
  scaler.update();
  EXPECT_EQ(scaler.loss_scale(), 2048);
}

TEST(GradScaler, GrowsAfterTheIntervalAndAnOverflowBeginsItAnew) {
  OneWeight one;
  GradScaler scaler({.init_scale = 4, .growth_interval = 3});
  const auto iteration = [&](double gradient) {
    one.set_gradient({gradient, 0});
    scaler.step(one.optimizer);
    scaler.update();
    return scaler.loss_scale();
  };
  EXPECT_EQ(iteration(1), 4);
  EXPECT_EQ(iteration(1), 4);
  EXPECT_EQ(iteration(1), 8);
  EXPECT_EQ(iteration(1), 8);
  EXPECT_EQ(iteration(1), 8);
  EXPECT_EQ(iteration(kNaN), 4);
  EXPECT_EQ(iteration(1), 4);
  EXPECT_EQ(iteration(1), 4);
  EXPECT_EQ(iteration(1), 8);
}

TEST(GradScaler, DoesNotGrowBeyondF32) {
  OneWeight one;
  GradScaler scaler({.init_scale = 0x1p127, .growth_interval = 1});
  one.set_gradient({1, 1});
  scaler.step(one.optimizer);
  scaler.update();
  EXPECT_EQ(scaler.loss_scale(), 0x1p127);
}

TEST(GradScaler, AStepGateMayAskItAndTheReasonIsReported) {
  OneWeight one;
  GradScaler scaler;
  one.optimizer.set_step_gate([&] {
    std::string reason = scaler.before_step(one.optimizer);
    return reason.empty() ? optim::StepDecision{} : optim::StepDecision::skip(std::move(reason));
  });
  one.set_gradient({65536, 0});
  EXPECT_TRUE(one.optimizer.step());  // unscaled by the gate, for this very step
  EXPECT_EQ(one.values(), (Values{0.5, 2}));
  scaler.update();
  one.set_gradient({kInfinity, 0});
  EXPECT_FALSE(one.optimizer.step());
  EXPECT_EQ(one.optimizer.skip_reason(), "a gradient is not finite at a loss scale of 65536");
  scaler.update();
  one.set_gradient({32768, 0});
  EXPECT_TRUE(one.optimizer.step());
  EXPECT_EQ(one.values(), (Values{0, 2}));
}

TEST(GradScaler, ClippingAfterUnscaleSeesTheTrueNorm) {
  OneWeight folded({0, 0}), in_place({0, 0});
  for (OneWeight* one : {&folded, &in_place}) {
    GradScaler scaler;
    one->set_gradient({3 * 65536.0, 4 * 65536.0});
    scaler.unscale(one->optimizer);
    const double pending = one->optimizer.next_step().data_as<double>()[0];
    const Tensor norm =
        one == &folded ? optim::clip_grad_norm({one->weight}, 1, {.fold_into = &one->optimizer})
                       : optim::clip_grad_norm({one->weight}, 1, {.gradient_scale = pending});
    EXPECT_EQ(norm.item<double>(), 5);
    scaler.note_norm(one->optimizer, norm);
    EXPECT_TRUE(scaler.step(one->optimizer));
    EXPECT_NEAR(one->values()[0], -0.5 * 3 / 5, 1e-6);
    EXPECT_NEAR(one->values()[1], -0.5 * 4 / 5, 1e-6);
  }
}

TEST(GradScaler, ClippingByValueHasTheTrueLimit) {
  OneWeight one({0, 0});
  GradScaler scaler;
  one.set_gradient({3 * 65536.0, -0.25 * 65536.0});
  scaler.unscale(one.optimizer);
  optim::clip_grad_value({one.weight}, 1, one.optimizer.next_step().data_as<double>()[0]);
  scaler.step(one.optimizer);
  EXPECT_EQ(one.values(), (Values{-0.5, 0.125}));
}

TEST(GradScaler, ANotedNormSparesTheLookAtTheGradients) {
  OneWeight one;
  GradScaler scaler;
  one.set_gradient({kNaN, 0});
  scaler.unscale(one.optimizer);
  scaler.note_norm(one.optimizer, scalar_tensor(1.0, kF64));  // what was noted is believed
  EXPECT_TRUE(scaler.step(one.optimizer));
  scaler.update();
  EXPECT_EQ(scaler.loss_scale(), 65536);
  one.set_gradient({1, 0});
  scaler.unscale(one.optimizer);
  scaler.note_norm(one.optimizer, scalar_tensor(kNaN, kF64));
  EXPECT_FALSE(scaler.step(one.optimizer));
}

// Accelerate updates the scale once for each optimizer, so that the second may see it changed.
TEST(GradScaler, TrapOneUpdateServesSeveralOptimizersOfAnIteration) {
  OneWeight first, second, third;
  GradScaler scaler({.init_scale = 16, .growth_interval = 2});
  for (int iteration = 0; iteration < 2; ++iteration) {
    first.set_gradient({16, 0});
    second.set_gradient({kInfinity, 0});
    third.set_gradient({16, 0});
    const double scale = scaler.loss_scale();
    for (OneWeight* one : {&first, &second, &third}) {
      EXPECT_EQ(scaler.step(one->optimizer), one != &second);
      EXPECT_EQ(scaler.loss_scale(), scale);
    }
    scaler.update();
    EXPECT_EQ(scaler.loss_scale(), scale / 2);
  }
  EXPECT_EQ(first.values(), (Values{1 - 0.5 - 1, 2}));
  EXPECT_EQ(third.values(), first.values());
  EXPECT_EQ(second.values(), (Values{1, 2}));
  // Growth counts iterations, not optimizers.
  second.set_gradient({1, 0});
  for (int iteration = 0; iteration < 2; ++iteration) {
    EXPECT_EQ(scaler.loss_scale(), 4);
    for (OneWeight* one : {&first, &second, &third}) scaler.step(one->optimizer);
    scaler.update();
  }
  EXPECT_EQ(scaler.loss_scale(), 8);
}

TEST(GradScaler, TrapUnscalingTwiceIsAnErrorAndSoIsASecondStep) {
  OneWeight one;
  GradScaler scaler;
  one.set_gradient({65536, 0});
  scaler.unscale(one.optimizer);
  EXPECT_THROW(scaler.unscale(one.optimizer), ValueError);
  EXPECT_TRUE(scaler.step(one.optimizer));
  EXPECT_EQ(one.values(), (Values{0.5, 2}));  // divided once
  EXPECT_THROW(scaler.unscale(one.optimizer), ValueError);
  EXPECT_THROW(scaler.step(one.optimizer), ValueError);
  scaler.update();
  EXPECT_THROW(scaler.update(), ValueError);
  EXPECT_TRUE(scaler.step(one.optimizer));
}

TEST(GradScaler, AnUpdateForgetsAnUnscaledStepThatNeverCame) {
  OneWeight one;
  GradScaler scaler;
  one.set_gradient({1, 0});
  scaler.unscale(one.optimizer);
  scaler.update();
  EXPECT_EQ(one.optimizer.next_step().to_vector<double>(), (std::vector<double>{1, 0}));
  EXPECT_EQ(scaler.growth_tracker(), 0);
}

TEST(GradScaler, RanksAgreeOnWhatWasFound) {
  OneWeight one;
  GradScaler scaler;
  int asked = 0;
  scaler.set_agreement([&](const Tensor& found) {
    ++asked;
    EXPECT_EQ(found.dtype(), kF32);
    EXPECT_EQ(found.numel(), 1);
    found.data_as<float>()[0] = 1;  // another rank has found something
  });
  one.set_gradient({1, 1});
  EXPECT_FALSE(scaler.step(one.optimizer));
  EXPECT_EQ(asked, 1);
  scaler.update();
  EXPECT_EQ(scaler.loss_scale(), 32768);
}

TEST(GradScaler, DisabledItLeavesEverythingAsItIs) {
  OneWeight one;
  GradScaler scaler({.enabled = false});
  const Tensor loss = tensor({1}, kF16);
  EXPECT_TRUE(scaler.scale(loss).is(loss));
  EXPECT_EQ(scaler.loss_scale(), 1);
  one.set_gradient({kInfinity, 1});
  scaler.unscale(one.optimizer);
  EXPECT_TRUE(scaler.step(one.optimizer));
  scaler.update();
  EXPECT_EQ(one.values()[1], 1.5f);
}

TEST(GradScaler, GradientsThatOverflowAtAnyScaleEndInAnError) {
  OneWeight one;
  GradScaler scaler({.init_scale = 4, .min_scale = 1});
  one.set_gradient({kNaN, 0});
  for (int iteration = 0; iteration < 2; ++iteration) {
    scaler.step(one.optimizer);
    scaler.update();
  }
  EXPECT_EQ(scaler.loss_scale(), 1);
  scaler.step(one.optimizer);
  EXPECT_THROW(scaler.update(), ValueError);
}

TEST(GradScaler, StateGoesOnWhereItWasSaved) {
  OneWeight one;
  GradScaler scaler({.init_scale = 1024, .growth_factor = 4, .growth_interval = 3});
  const auto iteration = [&](GradScaler& of, double gradient) {
    one.set_gradient({gradient, 0});
    of.step(one.optimizer);
    EXPECT_THROW(of.state_dict(), ValueError);
    of.update();
  };
  iteration(scaler, kNaN);
  iteration(scaler, 1);
  iteration(scaler, 1);
  const StateDict state = scaler.state_dict().clone();
  GradScaler resumed;
  resumed.load_state_dict(state);
  EXPECT_EQ(resumed.loss_scale(), 512);
  EXPECT_EQ(resumed.growth_tracker(), 2);
  EXPECT_EQ(resumed.skipped_steps(), 1);
  for (GradScaler* each : {&scaler, &resumed}) iteration(*each, 1);
  EXPECT_EQ(scaler.loss_scale(), 2048);
  EXPECT_EQ(resumed.loss_scale(), 2048);
}

TEST(GradScaler, DamagedStatesAndOptionsThatCannotWorkAreErrors) {
  EXPECT_THROW(GradScaler({.init_scale = 0}), ConfigError);
  EXPECT_THROW(GradScaler({.init_scale = 1e39}), ConfigError);
  EXPECT_THROW(GradScaler({.growth_factor = 1}), ConfigError);
  EXPECT_THROW(GradScaler({.backoff_factor = 1}), ConfigError);
  EXPECT_THROW(GradScaler({.growth_interval = 0}), ConfigError);
  GradScaler scaler;
  StateDict state = scaler.state_dict();
  state.set("scale", scalar_tensor(kNaN, kF64));
  EXPECT_THROW(scaler.load_state_dict(state), ConfigError);
  EXPECT_THROW(scaler.load_state_dict({}), ValueError);
  EXPECT_EQ(scaler.loss_scale(), 65536);
}

// Every bound of every option: on it there is a scaler, beside it none, and none by a state.
TEST(GradScaler, OptionsReachToTheirBoundsAndNoFurther) {
  const double least = std::numeric_limits<double>::denorm_min();
  const double below_one = std::nextafter(1.0, 0.0), above_one = std::nextafter(1.0, 2.0);
  const double largest = std::numeric_limits<float>::max();
  const double least_f32 = std::numeric_limits<float>::denorm_min();
  const auto count = [](double value) { return scalar_tensor(static_cast<int64_t>(value), kI64); };
  const auto number = [](double value) { return scalar_tensor(value, kF64); };
  struct Row {
    const char* name;  // in a state
    std::function<void(GradScalerOptions&, double)> write;
    std::vector<double> accepted, refused;
    bool counts = false;
  };
  const Row rows[] = {
      {"scale",
       [](auto& o, double x) { o.init_scale = x, o.min_scale = 0; },
       {least_f32, largest},
       {0, -1, 0x1p-151, 0x1p128, kInfinity, kNaN}},
      {"growth_factor",
       [](auto& o, double x) { o.growth_factor = x; },
       {above_one, std::numeric_limits<double>::max()},
       {1, below_one, kInfinity, kNaN}},
      {"backoff_factor",
       [](auto& o, double x) { o.backoff_factor = x; },
       {least, below_one},
       {0, -least, 1, above_one, kNaN}},
      {"growth_interval",
       [](auto& o, double x) { o.growth_interval = static_cast<int64_t>(x); },
       {1},
       {0, -1},
       true},
      {"min_scale",
       [](auto& o, double x) { o.min_scale = x; },
       {0, 65536},
       {-least, std::nextafter(65536.0, 1e6), kNaN}},
      {"growth_tracker", nullptr, {0}, {-1}, true},
      {"skipped_steps", nullptr, {0}, {-1}, true},
  };
  for (const Row& row : rows) {
    for (const bool fits : {true, false}) {
      for (const double value : fits ? row.accepted : row.refused) {
        SCOPED_TRACE(std::string(row.name) + " = " + std::to_string(value));
        GradScalerOptions options;
        if (row.write != nullptr) {
          row.write(options, value);
          if (fits) {
            EXPECT_NO_THROW(GradScaler{options});
          } else {
            EXPECT_THROW(GradScaler{options}, ConfigError);
          }
        }
        GradScaler scaler;
        StateDict state = scaler.state_dict();
        state.set("min_scale", number(options.min_scale));
        state.set(row.name, row.counts ? count(value) : number(value));
        if (fits) {
          EXPECT_NO_THROW(scaler.load_state_dict(state));
          EXPECT_EQ(scaler.state_dict().scalar(row.name), value);
        } else {
          EXPECT_THROW(scaler.load_state_dict(state), Error);
          EXPECT_EQ(scaler.loss_scale(), 65536);
          EXPECT_EQ(scaler.options().growth_factor, 2);
          EXPECT_EQ(scaler.growth_tracker(), 0);
          EXPECT_EQ(scaler.skipped_steps(), 0);
        }
      }
    }
  }
}

TEST(GradScaler, HysteresisIsACountAndItsStateFits) {
  for (const int64_t hysteresis : {1, 3}) {
    for (const int64_t left : {int64_t{0}, int64_t{1}, hysteresis, hysteresis + 1}) {
      GradScaler scaler({.hysteresis = hysteresis});
      StateDict state = scaler.state_dict();
      EXPECT_EQ(state.contains("overflows_left"), hysteresis > 1);
      state.set("hysteresis", scalar_tensor(hysteresis, kI64));
      state.set("overflows_left", scalar_tensor(left, kI64));
      if (left >= 1 && left <= hysteresis) {
        EXPECT_NO_THROW(scaler.load_state_dict(state));
      } else {
        EXPECT_TRUE(mentions(message_of([&] { scaler.load_state_dict(state); }), "overflows_left"));
      }
    }
  }
  expect_refusals({
      {"hysteresis must be at least 1; got 0", [] { GradScaler({.hysteresis = 0}); }},
      {"keeps no count of overflows", [] { GradScaler({.hysteresis = 2, .on_device = true}); }},
      {"make growth_factor 1, too", [] { GradScaler({.backoff_factor = 1}); }},
      {"make backoff_factor 1, too", [] { GradScaler({.growth_factor = 1}); }},
  });
  EXPECT_NO_THROW(GradScaler({.growth_factor = 1, .backoff_factor = 1}));
}

TEST(GradScaler, CallsOutOfTheirOrderSayWhatTheOrderIs) {
  OneWeight one;
  GradScaler scaler;
  const Tensor norm = scalar_tensor(1.0, kF64);
  one.set_gradient({1, 0});
  expect_refusals({
      {"call unscale() first", [&] { scaler.note_norm(one.optimizer, norm); }},
      {"no optimizer was unscaled or stepped", [&] { scaler.update(); }},
  });
  scaler.unscale(one.optimizer);
  EXPECT_TRUE(scaler.is_unscaled(one.optimizer));
  expect_refusals({{"were unscaled since", [&] { scaler.unscale(one.optimizer); }}});
  EXPECT_NO_THROW(static_cast<void>(scaler.state_dict()));  // nothing has stepped
  scaler.step(one.optimizer);
  const StateDict before = GradScaler().state_dict();
  expect_refusals({
      {"were stepped with since", [&] { scaler.unscale(one.optimizer); }},
      {"note the norm before", [&] { scaler.note_norm(one.optimizer, norm); }},
      {"stepped since the last update()", [&] { scaler.step(one.optimizer); }},
      {"before saving", [&] { static_cast<void>(scaler.state_dict()); }},
      {"before loading", [&] { scaler.load_state_dict(before); }},
  });
  scaler.update();
  EXPECT_FALSE(scaler.is_unscaled(one.optimizer));
}

// torch refuses f16 gradients; here the factor meets them in f32.
TEST(GradScaler, F16GradientsAreUnscaledInF32) {
  const Tensor weight = tensor({1.0}, kF16).set_requires_grad();
  optim::SGD optimizer({{"w", weight}}, {.lr = 1024});
  GradScaler scaler;
  const double small = 0x1p-20;  // below f16's smallest normal number
  weight.set_grad(tensor({small * 65536}, kF16));
  EXPECT_TRUE(scaler.step(optimizer));
  EXPECT_EQ(optimizer.state_dict().at("state.w.master").item<float>(), 1 - 1024 * small);
}

}  // namespace
}  // namespace tessera::precision::test_precision
