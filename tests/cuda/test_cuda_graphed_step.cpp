// Training steps as graphs, beside the same steps queued op by op: the bits are the same.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/autograd/weight_cache.h>
#include <tessera/core/cuda/device_memory.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/random.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/models/gpt2.h>
#include <tessera/optim/clip.h>
#include <tessera/optim/graphed_step.h>
#include <tessera/optim/optimizers.h>
#include <tessera/optim/schedule.h>
#include <tessera/precision/grad_scaler.h>

#include "../optim/master_writes.h"
#include "../optim/optimizer_kinds.h"
#include "on_emulation.h"

namespace tessera::optim::test_cuda_graphed_step {
namespace {

// ---- A GPT --------------------------------------------------------------------------------------

constexpr int64_t kBatch = 2, kContext = 8, kWidth = 16, kVocabulary = 29;

Tensor tokens_of(int step) {
  std::vector<int64_t> ids(kBatch * (kContext + 1));
  for (size_t i = 0; i < ids.size(); ++i) {
    ids[i] = static_cast<int64_t>((i * i + 7 * static_cast<size_t>(step)) % kVocabulary);
  }
  return tensor(ids, {kBatch, kContext + 1}, kI64);
}

struct Trained {
  std::vector<double> losses, norms;
  std::vector<std::vector<double>> parameters;
  uint64_t next_stream = 0;
};

// Dropout, clipping, a schedule and AdamW, with or without a graph.
Trained train_gpt(const Device& device, bool graphed, int steps) {
  manual_seed(17);
  nn::models::Gpt model({.vocab_size = kVocabulary,
                         .context = kContext,
                         .width = kWidth,
                         .layers = 1,
                         .heads = 2,
                         .dropout = 0.1});
  model.to(device);
  AdamW optimizer(model.named_parameters(), {.lr = 1e-2});
  CosineSchedule schedule(optimizer, {.warmup = 5, .total = 20, .min_lr = 1e-4});
  const auto function = [&](const TensorList& batch) -> TensorList {
    const Tensor loss = model(batch[0], batch[1]).loss;
    loss.backward();
    const Tensor norm = clip_grad_norm(model.parameters(), 0.5, {.fold_into = &optimizer});
    optimizer.step();
    optimizer.zero_grad();
    return {loss, norm};
  };
  GraphedStep graph(device, function, {.warmup = 2});
  Trained result;
  for (int i = 0; i < steps; ++i) {
    const Tensor tokens = tokens_of(i).to(device);
    const TensorList batch{tokens.narrow(1, 0, kContext), tokens.narrow(1, 1, kContext)};
    const TensorList got = graphed ? graph(batch) : function(batch);
    schedule.step();
    result.losses.push_back(got[0].item());
    result.norms.push_back(got[1].item());
  }
  EXPECT_EQ(graph.captured(), graphed && device.is_cuda());
  for (const Tensor& parameter : model.parameters()) {
    result.parameters.push_back(parameter.to_vector());
  }
  result.next_stream = random_state().next_stream;
  return result;
}

void expect_same(const Trained& got, const Trained& expected) {
  EXPECT_EQ(got.losses, expected.losses);
  EXPECT_EQ(got.norms, expected.norms);
  EXPECT_EQ(got.parameters, expected.parameters);
  EXPECT_EQ(got.next_stream, expected.next_stream);
}

TEST(GraphedStep, TrainsAGptToTheSameBitsAsWithoutTheGraph) {
  const Trained expected = train_gpt(cuda(0), false, 20);
  EXPECT_LT(expected.losses.back(), expected.losses.front());
  EXPECT_GT(expected.norms.front(), 0.5);  // clipping takes part
  expect_same(train_gpt(cuda(0), true, 20), expected);
}

// What the warm-up leaves in the cache goes back before the graph takes memory of its own.
TEST(GraphedStep, CapturesWithoutTheCacheOfItsWarmUp) {
  constexpr int64_t kTemporary = int64_t{64} << 20;
  gpu::DeviceAllocator& memory = gpu::caching_allocator(0);
  memory.release_cached();
  std::vector<int64_t> cached;
  GraphedStep step(cuda(0),
                   [&](const TensorList& in) -> TensorList {
                     cached.push_back(memory.cached_bytes());
                     raw::empty({kTemporary}, kU8, cuda(0));
                     return {mul(in[0], 2)};
                   },
                   {.warmup = 1});
  const Tensor x = rand({8}).to(cuda(0));
  step({x});
  EXPECT_GE(memory.cached_bytes(), kTemporary);
  step({x});
  ASSERT_EQ(cached.size(), 2U);
  EXPECT_LT(cached[1], kTemporary);
}

TEST(GraphedStep, RunsTheFunctionOnTheCpu) {
  expect_same(train_gpt(kCpu, true, 3), train_gpt(kCpu, false, 3));
}

// ---- Something small ----------------------------------------------------------------------------

struct Small {
  explicit Small(DType dtype = kF32) : model(6, 5) {
    model.to(dtype);
    model.to(cuda(0));
  }
  TensorList inputs(int step) const {
    const Tensor x = sin(mul(raw::arange(0, 1, 24, kF32), Scalar(0.3 + 0.1 * step)));
    return {x.view({4, 6}).to(model.weight.dtype()).to(cuda(0))};
  }
  Tensor loss(const Tensor& x) {
    const Tensor y = model(x);
    return mean(mul(y, y).to(kF32));
  }
  nn::Linear model;
};

struct Outcome {
  std::vector<double> weight;
  std::vector<std::vector<double>> state;
  friend bool operator==(const Outcome&, const Outcome&) = default;
};
Outcome outcome_of(const Small& small, const Optimizer& optimizer) {
  Outcome outcome{small.model.weight.to_vector(), {}};
  for (const auto& [name, value] : optimizer.state_dict()) {
    outcome.state.push_back(value.to_vector());
  }
  return outcome;
}

template <class T>
Outcome train_small(const typename T::Options& options, bool graphed) {
  manual_seed(1);
  Small small;
  T optimizer(small.model.named_parameters(), options);
  const auto function = [&](const TensorList& in) -> TensorList {
    const Tensor loss = small.loss(in[0]);
    loss.backward();
    clip_grad_norm(small.model.parameters(), 0.01, {.fold_into = &optimizer});
    optimizer.step();
    optimizer.zero_grad();
    return {loss};
  };
  GraphedStep graph(cuda(0), function, {.warmup = 1});
  for (int i = 0; i < 6; ++i) {
    optimizer.set_lr(0.1 / (1 + i));
    const TensorList in = small.inputs(i);
    graphed ? graph(in) : function(in);
  }
  return outcome_of(small, optimizer);
}

template <class T>
class EveryGraphedOptimizer : public testing::Test {};
TYPED_TEST_SUITE(EveryGraphedOptimizer, OptimizerKinds);

TYPED_TEST(EveryGraphedOptimizer, StepsToTheSameBitsAsWithoutTheGraph) {
  for (const auto& options : kOptions<TypeParam>) {
    const Outcome expected = train_small<TypeParam>(options, false);
    const Outcome got = train_small<TypeParam>(options, true);
    EXPECT_EQ(got.weight, expected.weight);
    EXPECT_EQ(got.state, expected.state);
  }
}

// The factor of clipping stays on the device for all of them.
TYPED_TEST(EveryGraphedOptimizer, WaitsForNoFoldedClip) {
  TS_NEEDS_EMULATION("counts waits of the host");
  for (const auto& options : kOptions<TypeParam>) {
    Small small;
    TypeParam optimizer(small.model.named_parameters(), options);
    const TensorList in = small.inputs(0);
    const auto step = [&] {
      small.loss(in[0]).backward();
      clip_grad_norm(small.model.parameters(), 0.01, {.fold_into = &optimizer});
      optimizer.step();
      optimizer.zero_grad();
    };
    step();  // makes the state
    const gpu::HostWaits waits;
    step();
    EXPECT_EQ(waits.count(), 0);
  }
}

struct SmallStep : Small {
  SmallStep() : optimizer(model.named_parameters(), {.lr = 0.1}) {}
  TensorList operator()(const TensorList& in) {
    const Tensor value = loss(in[0]);
    value.backward();
    optimizer.step();
    optimizer.zero_grad();
    return {value};
  }
  AdamW optimizer;
};

// The memory of results is the step's stream's, on which it may come into other hands before the
// caller's stream came by.
TEST(GraphedStep, ResultsThatAreFreedAreThereForWhatTheCallerQueued) {
  for (const int calls : {1, 3}) {  // as it is; captured
    SCOPED_TRACE(calls);
    std::optional<GraphedStep> step;
    step.emplace(
        cuda(0), [](const TensorList& x) { return TensorList{x[0].sum()}; },
        GraphedStepOptions{.warmup = 1});
    const Tensor x = raw::full({5}, 3, kF32, cuda(0));
    Tensor twice;
    for (int i = 0; i < calls; ++i) twice = (*step)({x})[0] * 2;
    EXPECT_EQ(step->captured(), calls > 1);
    step.reset();
    EXPECT_EQ(twice.item(), 30);
  }
}

TEST(GraphedStep, ReplaysDoNotWaitForTheDevice) {
  TS_NEEDS_EMULATION("counts waits of the host");
  SmallStep step;
  GraphedStep graph(cuda(0), std::ref(step), {.warmup = 1});
  const TensorList in = step.inputs(0);
  graph(in);
  const double first = graph(in)[0].item();
  const gpu::HostWaits waits;
  graph(in);
  const Tensor loss = graph(in)[0];
  EXPECT_EQ(waits.count(), 0);
  EXPECT_LT(loss.item(), first);
  EXPECT_GT(graph.num_nodes(), 5);
  EXPECT_GT(graph.pool_bytes(), 0);
}

TEST(GraphedStep, ASkippedStepOfTheHostLeavesTheReplayOut) {
  SmallStep step;
  GraphedStep graph(cuda(0), std::ref(step), {.warmup = 1});
  const TensorList in = step.inputs(0);
  graph(in);
  graph(in);
  const std::vector<double> weight = step.model.weight.to_vector();
  step.optimizer.next_step().data_as<double>()[1] = 1;
  graph(in);
  EXPECT_EQ(step.model.weight.to_vector(), weight);
  EXPECT_EQ(step.optimizer.state_dict().at("state.weight.step").item(), 2);
  graph(in);
  EXPECT_NE(step.model.weight.to_vector(), weight);
  EXPECT_EQ(step.optimizer.state_dict().at("state.weight.step").item(), 3);
}

TEST(GraphedStep, OtherInputsAreRefusedAndCanBeCapturedAnew) {
  SmallStep step;
  GraphedStep graph(cuda(0), std::ref(step), {.warmup = 1});
  const TensorList in = step.inputs(0);
  graph(in);
  EXPECT_THROW(graph({in[0].narrow(0, 0, 2)}), ShapeError);
  EXPECT_THROW(graph({in[0].to(kF64)}), DTypeError);
  EXPECT_THROW(graph({in[0], in[0]}), ValueError);
  graph(in);
  EXPECT_TRUE(graph.captured());
  graph.reset();
  EXPECT_FALSE(graph.captured());
  graph({in[0].narrow(0, 0, 2)});
  graph({in[0].narrow(0, 0, 2)});
  EXPECT_TRUE(graph.captured());
}

TEST(GraphedStep, WhatAGraphCannotKnowIsRefused) {
  SmallStep step;
  GraphedStep graph(cuda(0), std::ref(step), {.warmup = 1});
  const TensorList in = step.inputs(0);
  graph(in);
  graph(in);
  step.optimizer.options().betas[0] = 0.5;  // a constant of the capture
  EXPECT_THROW(graph(in), ConfigError);
  graph.reset();
  graph(in);
  graph(in);
  EXPECT_TRUE(graph.captured());
  step.optimizer.load_state_dict(step.optimizer.state_dict());  // other tensors
  EXPECT_THROW(graph(in), ConfigError);
  graph.reset();
  step.optimizer.set_step_gate([] { return StepDecision{}; });
  graph(in);
  EXPECT_THROW(graph(in), UnsupportedError);
  EXPECT_FALSE(graph.captured());
  EXPECT_THROW(GraphedStep(cuda(0), std::ref(step), {.warmup = 0}), ValueError);
}

TEST(GraphedStep, AReplayThatIsRefusedCountsNoStep) {
  Small small;
  const NamedTensors weight{{"weight", small.model.weight}}, bias{{"bias", small.model.bias}};
  AdamW optimizer({{weight, {}}, {bias, {}}});
  GraphedStep graph(cuda(0),
                    [&](const TensorList& in) -> TensorList {
                      small.loss(in[0]).backward();
                      optimizer.step();
                      optimizer.zero_grad();
                      return {};
                    },
                    {.warmup = 1});
  const TensorList in = small.inputs(0);
  graph(in);
  graph(in);
  optimizer.options(1).betas[0] = 0.5;
  EXPECT_THROW(graph(in), ConfigError);
  EXPECT_EQ(optimizer.state_dict().at("state.weight.step").item(), 2);
  EXPECT_EQ(optimizer.state_dict().at("state.bias.step").item(), 2);
}

TEST(GraphedStep, AStepThatReadsIsRefusedAndTrainsOnWithoutAGraph) {
  SmallStep step;
  bool reads = true;
  GraphedStep graph(cuda(0),
                    [&](const TensorList& in) {
                      const TensorList results = step(in);
                      if (reads) results[0].item();
                      return results;
                    },
                    {.warmup = 1});
  const TensorList in = step.inputs(0);
  graph(in);
  const std::vector<double> weight = step.model.weight.to_vector();
  EXPECT_THROW(graph(in), UnsupportedError);
  EXPECT_EQ(step.model.weight.to_vector(), weight);  // no step was done
  reads = false;
  graph(in);
  EXPECT_TRUE(graph.captured());
  EXPECT_NE(step.model.weight.to_vector(), weight);
}

// ---- Autocast's copies of weights ---------------------------------------------------------------

// Forward alone, in bf16.
struct LowForward : Small {
  TensorList operator()(const TensorList& in) {
    const NoGradGuard no_grad;
    const AutocastGuard autocast(kBF16);
    return {model(in[0]).to(kF32)};
  }
  std::vector<double> values(const TensorList& in) { return (*this)(in)[0].to_vector(); }
  void write(double value) {
    const NoGradGuard no_grad;
    fill_(model.weight, value);
  }
  bool keeps_a_copy() const { return weight_cache::find(model.weight, {.dtype = kBF16}).defined(); }
};

TEST(GraphedStep, AWeightThatIsWrittenWhileTheGraphReadsItsCopyIsNoticed) {
  LowForward forward;
  GraphedStep graph(cuda(0), std::ref(forward), {.warmup = 1});
  const TensorList in = forward.inputs(0);
  graph(in);
  EXPECT_EQ(graph(in)[0].to_vector(), forward.values(in));
  forward.write(0.5);
  EXPECT_THROW(graph(in), ConfigError);
  const std::vector<double> expected = forward.values(in);  // makes another copy
  EXPECT_THROW(graph(in), ConfigError);
  graph.reset();
  graph(in);
  EXPECT_EQ(graph(in)[0].to_vector(), expected);
}

// Masters of 16-bit parameters follow writes between replays, and those that the graph makes
// itself, behind the step and before it.
TEST(GraphedStep, MastersFollowWritesOfTheirParameters) {
  enum class Place { kBetween, kBehind, kBefore };
  for (const Place place : {Place::kBetween, Place::kBehind, Place::kBefore}) {
    for (const Write& write : writes()) {
      const std::string name = write.name;
      if (name == "set_data" || name.starts_with("nothing")) continue;  // no write of the memory
      if (name == "copy_" && place != Place::kBetween) continue;        // from the host
      SCOPED_TRACE(name + " " + std::to_string(static_cast<int>(place)));
      const Tensor wide = tensor(initial_values(), {2, 3}, kF32).to(cuda(0)).set_requires_grad();
      const Tensor narrow = wide.detach().to(kBF16).set_requires_grad();
      AdamW of_wide({{"p", wide}}, {.lr = 0.1}), of_narrow({{"p", narrow}}, {.lr = 0.1});
      const auto step = [&](AdamW& optimizer, const Tensor& parameter, const Tensor& gradient) {
        const NoGradGuard no_grad;
        if (place == Place::kBefore) write.run(parameter, 0);
        parameter.set_grad(gradient);
        optimizer.step();
        if (place == Place::kBehind) write.run(parameter, 0);
      };
      GraphedStep graph(cuda(0),
                        [&](const TensorList& in) -> TensorList {
                          step(of_narrow, narrow, in[0]);
                          return {narrow};
                        },
                        {.warmup = 2});
      for (int i = 0; i < 7; ++i) {
        if (place == Place::kBetween && (i == 3 || i == 5)) {
          const NoGradGuard no_grad;
          write.run(wide, i);
          write.run(narrow, i);
        }
        const Tensor gradient = gradient_of_step(i).to(cuda(0));
        step(of_wide, wide, gradient);
        graph({gradient.to(kBF16)});
        if (i != 2 && i != 4) {  // reads; before a write nobody looks
          EXPECT_EQ(narrow.to_vector(), wide.detach().to(kBF16).to_vector()) << i;
          EXPECT_EQ(of_narrow.state_dict().at("state.p.master").to_vector(), wide.to_vector()) << i;
        }
      }
      EXPECT_TRUE(graph.captured());
    }
  }
}

TEST(GraphedStep, ACopyThatTheCaptureMakesGoesWithTheGraph) {
  LowForward forward;
  const TensorList in = forward.inputs(0);
  std::vector<double> expected;
  {
    GraphedStep graph(cuda(0), std::ref(forward), {.warmup = 1});
    graph(in);
    forward.write(0.5);
    graph(in);
    EXPECT_FALSE(forward.keeps_a_copy());
    forward.write(0.25);
    expected = graph(in)[0].to_vector();  // made by each replay anew
  }
  EXPECT_EQ(forward.values(in), expected);
}

TEST(GraphedStep, ACopyThatIsFreedIsThereForTheStepOutsideThatWritesIt) {
  {
    LowForward forward;
    SGD optimizer(forward.model.named_parameters(), {.lr = 0.1});
    GraphedStep graph(cuda(0), std::ref(forward));
    const TensorList in = forward.inputs(0);
    graph(in);  // makes it, on the stream of steps
    EXPECT_TRUE(forward.keeps_a_copy());
    forward.loss(in[0]).backward();
    optimizer.step();
  }
  EXPECT_NO_THROW(gpu::synchronize(0));
}

TEST(GraphedStep, ACopyThatAGraphReadsIsRenewedByStepsOutsideOfIt) {
  LowForward forward;
  SGD optimizer(forward.model.named_parameters(), {.lr = 0.1});
  GraphedStep graph(cuda(0), std::ref(forward), {.warmup = 1});
  const TensorList in = forward.inputs(0);
  graph(in);
  for (int step = 0; step < 4; ++step) {
    const std::vector<double> replayed = graph(in)[0].to_vector();
    EXPECT_EQ(replayed, (linear(in[0].to(kBF16), forward.model.weight.detach().to(kBF16),
                                forward.model.bias.detach().to(kBF16)))
                            .to(kF32)
                            .to_vector());
    forward.loss(in[0]).backward();  // in f32: reads no copy
    optimizer.step();
    optimizer.zero_grad();
  }
}

// ---- Loss scaling -------------------------------------------------------------------------------

struct ScaledRun {
  Outcome outcome;
  double scale = 0;
  int64_t tracker = 0, skipped = 0;
  friend bool operator==(const ScaledRun&, const ScaledRun&) = default;
};

enum class Scaling { kHost, kDevice, kGraph };

// f16 weights and gradients at a scale that overflows now and then.
template <class T, class Options>
ScaledRun train_scaled(Scaling scaling, bool clips, const Options& options) {
  manual_seed(1);
  Small small(kF16);
  T optimizer(small.model.named_parameters(), options);
  precision::GradScaler scaler(
      {.init_scale = 0x1p18, .growth_interval = 2, .on_device = scaling != Scaling::kHost});
  const auto function = [&](const TensorList& in) -> TensorList {
    const Tensor loss = small.loss(in[0]);
    scaler.scale(loss).backward();
    if (clips) {
      scaler.unscale(optimizer);
      const Tensor norm = clip_grad_norm(small.model.parameters(), 0.1, {.fold_into = &optimizer});
      scaler.note_norm(optimizer, norm);
    }
    scaler.step(optimizer);
    scaler.update();
    optimizer.zero_grad();
    return {loss};
  };
  GraphedStep graph(cuda(0), function, {.warmup = 1});
  for (int i = 0; i < 14; ++i) {
    const TensorList in = small.inputs(i);
    scaling == Scaling::kGraph ? graph(in) : function(in);
  }
  EXPECT_EQ(graph.captured(), scaling == Scaling::kGraph);
  return {outcome_of(small, optimizer), scaler.loss_scale(), scaler.growth_tracker(),
          scaler.skipped_steps()};
}

template <class T, class Options>
void expect_one_scaling(const Options& options) {
  for (const bool clips : {false, true}) {
    const ScaledRun expected = train_scaled<T>(Scaling::kHost, clips, options);
    EXPECT_GT(expected.skipped, 1);
    EXPECT_LT(expected.skipped, 10);
    for (const Scaling scaling : {Scaling::kDevice, Scaling::kGraph}) {
      const ScaledRun got = train_scaled<T>(scaling, clips, options);
      EXPECT_EQ(got.outcome.weight, expected.outcome.weight);
      EXPECT_EQ(got.outcome.state, expected.outcome.state);
      EXPECT_EQ(got.scale, expected.scale);
      EXPECT_EQ(got.tracker, expected.tracker);
      EXPECT_EQ(got.skipped, expected.skipped);
    }
  }
}

TEST(GraphedStep, ScalesAnF16LossAsTheHostDoes) {
  expect_one_scaling<AdamW>(AdamWOptions{.lr = 0.01});
  expect_one_scaling<SGD>(SGDOptions{.lr = 0.01, .momentum = 0.9, .dampening = 0.5});
}

TEST(GraphedStep, AScaleOnTheDeviceIsSavedAndLoaded) {
  precision::GradScaler scaler({.growth_interval = 1, .on_device = true});
  const Tensor loss = raw::full({}, 2, kF32, cuda(0));
  EXPECT_EQ(scaler.scale(loss).item(), 131072);
  const precision::GradScaler other({.init_scale = 16});
  scaler.load_state_dict(other.state_dict());
  EXPECT_EQ(scaler.scale(loss).item(), 32);
  EXPECT_EQ(scaler.loss_scale(), 16);
  EXPECT_EQ(scaler.state_dict().at("scale").item(), 16);
}

TEST(GraphedStep, TheHostsScaleIsRefusedInAGraph) {
  Small small;
  AdamW optimizer(small.model.named_parameters());
  precision::GradScaler scaler;
  GraphedStep graph(cuda(0),
                    [&](const TensorList& in) -> TensorList {
                      const Tensor loss = small.loss(in[0]);
                      scaler.scale(loss).backward();
                      scaler.step(optimizer);
                      scaler.update();
                      optimizer.zero_grad();
                      return {loss};
                    },
                    {.warmup = 1});
  const TensorList in = small.inputs(0);
  graph(in);
  EXPECT_THROW(graph(in), UnsupportedError);
}

}  // namespace
}  // namespace tessera::optim::test_cuda_graphed_step
