// Two optimizers for one model, Muon for its matrices and AdamW for the rest, under the
// Accelerator: accumulation, clipping, loss scaling, schedules and checkpoints, in every mode of
// sharding.
// ctest labels: threads
#include <unistd.h>

#include <filesystem>
#include <limits>

#include <tessera/optim/muon.h>

#include "accelerate/sharded_words.h"

namespace tessera::test_accelerator_muon {
namespace {

using accelerate::Sharding;
using distributed::compared_ranks;

// Windows of ranks * micro batches of two examples.
struct Trip {
  Sharding sharding = Sharding::kDdp;
  int ranks = 1, micro = 1;
  std::optional<Precision> precision = {};
  DType states = kF32;
  int steps = 4;
  std::string load = {}, save = {};
};

struct Learned {
  std::vector<double> norms;
  std::vector<std::vector<float>> values;
  double muon_lr = 0, adamw_lr = 0;
};

Learned learn(const Trip& trip) {
  Learned learned;
  compared_ranks(trip.ranks, [&](int rank) {
    manual_seed(6);
    AcceleratorOptions options{.mixed_precision = trip.precision,
                               .gradient_accumulation_steps = trip.micro,
                               .sync_each_batch = true,
                               .seed = 6,
                               .sharding = trip.sharding,
                               .config_file = ""};
    if (trip.sharding != Sharding::kZero3 && trip.sharding != Sharding::kFsdp) {
      options.ddp.bucket_cap_mb = 0.01;
    }
    Accelerator accelerator(options);
    Words model;
    const auto [matrices, others] = optim::split_for_muon(model.named_parameters(), {"embedding"});
    optim::Muon muon(matrices, {.lr = 0.05, .state_dtype = trip.states});
    optim::AdamW adamw(others, {.lr = 0.01, .state_dtype = trip.states});
    optim::CosineSchedule muon_schedule(muon, {.warmup = 1, .total = 10});
    optim::CosineSchedule adamw_schedule(adamw, {.warmup = 1, .total = 10});
    data::DataLoader loader(std::make_shared<Tokens>(48), {.batch_size = 2});
    accelerator.prepare(model, muon, adamw, loader, muon_schedule, adamw_schedule);
    if (!trip.load.empty()) accelerator.load_state(trip.load);
    std::vector<double> norms;
    int steps = 0;
    for (const auto& batch : loader) {
      const auto window = accelerator.accumulate(model);
      const Tensor scores = model(batch[0]);
      accelerator.backward(cross_entropy(scores.reshape({-1, 131}), batch[1].reshape({-1})));
      const Tensor norm = accelerator.clip_grad_norm(model.parameters(), 0.5);
      muon.step(), adamw.step();
      muon_schedule.step(), adamw_schedule.step();
      muon.zero_grad(), adamw.zero_grad();
      if (!window.sync_gradients()) continue;
      norms.push_back(norm.item());
      if (++steps == trip.steps) break;
    }
    if (!trip.save.empty()) accelerator.save_state(trip.save);
    const auto values = whole_values(model);
    if (rank == 0) learned = {norms, values, muon.lr(), adamw.lr()};
  });
  return learned;
}

void expect_same(const Learned& got, const Learned& expected) {
  EXPECT_EQ(got.norms, expected.norms);
  EXPECT_TRUE(got.values == expected.values);
  EXPECT_EQ(got.muon_lr, expected.muon_lr);
  EXPECT_EQ(got.adamw_lr, expected.adamw_lr);
}

constexpr Sharding kFiveWays[] = {Sharding::kDdp, Sharding::kZero1, Sharding::kZero2,
                                  Sharding::kZero3, Sharding::kFsdp};

TEST(AcceleratorMuon, EveryModeIsOneProcess) {
  const Learned expected = learn({.ranks = 1, .micro = 6, .states = kBF16});
  EXPECT_EQ(expected.norms.size(), 4u);
  EXPECT_NE(expected.muon_lr, 0.05);
  EXPECT_DOUBLE_EQ(expected.muon_lr, 5 * expected.adamw_lr);
  for (const Sharding sharding : kFiveWays) {
    SCOPED_TRACE(static_cast<int>(sharding));
    expect_same(learn({.sharding = sharding, .ranks = 3, .micro = 2, .states = kBF16}), expected);
  }
}

TEST(AcceleratorMuon, OneLossScaleServesBothOptimizers) {
  const Learned expected = learn({.ranks = 1, .micro = 2, .precision = Precision::kFP16});
  for (const Sharding sharding : {Sharding::kZero1, Sharding::kFsdp}) {
    SCOPED_TRACE(static_cast<int>(sharding));
    expect_same(learn({.sharding = sharding, .ranks = 2, .precision = Precision::kFP16}), expected);
  }
}

TEST(AcceleratorMuon, ACheckpointGoesOnInAnotherModeAndOnOtherRanks) {
  const std::string folder =
      (std::filesystem::temp_directory_path() / ("muon_" + std::to_string(::getpid()))).string();
  const Learned expected = learn({.ranks = 1, .micro = 6, .states = kBF16});
  learn({.sharding = Sharding::kFsdp,
         .ranks = 3,
         .micro = 2,
         .states = kBF16,
         .steps = 2,
         .save = folder});
  const Learned rest = learn({.sharding = Sharding::kZero1,
                              .ranks = 2,
                              .micro = 3,
                              .states = kBF16,
                              .steps = 2,
                              .load = folder});
  EXPECT_TRUE(rest.values == expected.values);
  EXPECT_EQ(rest.muon_lr, expected.muon_lr);
  std::filesystem::remove_all(folder);
}

// ---- One norm for two optimizers ---------------------------------------------------------------

// Gradients are 0.75 and 1, whatever the parameters are: their norm is 1.25, and half of it is
// left.
struct Halves {
  explicit Halves(std::optional<Precision> precision = {})
      : accelerator(
            {.mixed_precision = precision, .loss_scale = {.init_scale = 1024}, .config_file = ""}),
        of_a({{"a", model.a}}, {.lr = 1}),
        of_b({{"b", model.b}}, {.lr = 1}) {
    accelerator.prepare(model, of_a, of_b);
  }
  void backward() {
    const auto micro = accelerator.accumulate(model);
    accelerator.backward(model(full({1}, 0.75)));
  }
  void clip() {
    const double norm = accelerator.clip_grad_norm(model.parameters(), 0.625).item();
    EXPECT_NEAR(norm, 1.25, 1.25 * kEps);
  }
  static void expect(const Tensor& value, double expected) {
    EXPECT_NEAR(value.item(), expected, 4e-6 * std::abs(expected));  // clipping divides by + 1e-6
  }
  // f16 holds all of these numbers.
  static constexpr double kEps = std::numeric_limits<float>::epsilon();
  Accelerator accelerator;
  Regression model;
  optim::SGD of_a, of_b;
};

constexpr Precision kBoth[] = {Precision::kNo, Precision::kFP16};

TEST(AcceleratorTwoOptimizers, EachPutsTheCommonFactorOnAsItSteps) {
  for (const Precision precision : kBoth) {
    Halves halves(precision);
    for (int step = 1; step <= 3; ++step) {
      halves.backward();
      const double a = halves.model.a.grad().item(), b = halves.model.b.grad().item();
      halves.clip();
      EXPECT_EQ(halves.model.a.grad().item(), a) << "no pass over the gradients";
      EXPECT_EQ(halves.model.b.grad().item(), b);
      halves.of_a.step(), halves.of_b.step();
      halves.of_a.zero_grad(), halves.of_b.zero_grad();
      Halves::expect(halves.model.a, -0.375 * step);
      Halves::expect(halves.model.b, -0.5 * step);
    }
  }
}

TEST(AcceleratorTwoOptimizers, AFactorThatOneDoesNotTakeIsOnItsGradientsInTheNextBackward) {
  Halves halves;
  halves.backward();
  halves.clip();
  halves.of_a.step(), halves.of_a.zero_grad();
  halves.backward();
  Halves::expect(halves.model.a, -0.375);
  Halves::expect(halves.model.a.grad(), 0.75);
  Halves::expect(halves.model.b.grad(), 1.5);
  halves.of_b.step();
  Halves::expect(halves.model.b, -1.5);
}

TEST(AcceleratorTwoOptimizers, ClippedTwiceHaveBothFactors) {
  Halves halves;
  halves.backward();
  halves.clip();
  const Tensor norm = halves.accelerator.clip_grad_norm(halves.model.parameters(), 0.3125);
  Halves::expect(norm, 0.625);
  halves.of_a.step(), halves.of_b.step();
  Halves::expect(halves.model.a, -0.1875);
  Halves::expect(halves.model.b, -0.25);
}

TEST(AcceleratorTwoOptimizers, AFactorOfTheProgramsForOneStaysItsOwn) {
  Halves halves;
  halves.backward();
  halves.of_a.scale_next_step(2);
  halves.clip();
  halves.of_a.step(), halves.of_b.step();
  Halves::expect(halves.model.a, -0.75);
  Halves::expect(halves.model.b, -0.5);
}

TEST(AcceleratorTwoOptimizers, WhatNoOptimizerHasIsClippedToo) {
  Halves halves;
  optim::SGD all(halves.model.named_parameters(), {.lr = 1});  // that nobody has prepared
  halves.accelerator.free_memory();
  halves.accelerator.prepare(halves.model, halves.of_a);
  halves.backward();
  halves.clip();
  all.step();
  Halves::expect(halves.model.a, -0.375);
  Halves::expect(halves.model.b, -0.5);
}

}  // namespace
}  // namespace tessera::test_accelerator_muon
