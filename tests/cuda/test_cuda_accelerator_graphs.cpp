// Loops of an Accelerator as graphs, beside the same loops as they are: the
// bits are the same, in every precision and place of the window.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/accelerate/accelerator.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/context.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/attention/attention.h>
#include <tessera/core/random.h>
#include <tessera/data/dataloader.h>
#include <tessera/nn/container.h>
#include <tessera/nn/dropout.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/loss.h>
#include <tessera/nn/models/gpt2.h>
#include <tessera/optim/graphed_step.h>
#include <tessera/optim/optimizers.h>
#include <tessera/optim/schedule.h>

#include "../message_of.h"
#include "gemm_model.h"
#include "on_emulation.h"

namespace tessera::test_cuda_accelerator_graphs {
namespace {

constexpr int64_t kContext = 8, kVocabulary = 32;

struct Texts : data::Dataset<std::array<Tensor, 2>> {
  explicit Texts(int64_t count) : count(count) {}
  int64_t count;
  int64_t size() const override { return count; }
  std::array<Tensor, 2> get(int64_t index) const override {
    std::vector<int64_t> ids(kContext + 1);
    for (size_t i = 0; i < ids.size(); ++i) {
      ids[i] = static_cast<int64_t>((i * i + 5 * static_cast<size_t>(index)) % kVocabulary);
    }
    const Tensor tokens = tensor(ids, {kContext + 1}, kI64);
    return {tokens.narrow(0, 0, kContext), tokens.narrow(0, 1, kContext)};
  }
};

struct Trained {
  std::vector<double> losses, norms, rates;
  std::vector<std::vector<double>> parameters;
  StateDict state = {};
  double scale = 0;
  uint64_t programs_stream = 0;
  int64_t graphs = 0, replays = 0, as_they_are = 0;
};

struct Ways {
  int64_t accumulation = 1;
  int64_t samples = 16, batch_size = 2;
  int epochs = 1;
  bool clips = true;
  accelerate::GraphedStepOptions step = {.warmup = 2};
};

Trained train(const AcceleratorOptions& given, const Ways& ways, bool graphs) {
  manual_seed(17);
  // cuDNN's attention has the same bits twice in this form alone.
  const ScopedValue deterministic(Context::current().slot<kernels::AttentionPolicy>().deterministic,
                                  true);
  AcceleratorOptions options = given;
  options.gradient_accumulation_steps = ways.accumulation;
  options.cuda_graphs = graphs;
  options.config_file = "";
  Accelerator accelerator(options);
  nn::models::Gpt model({.vocab_size = kVocabulary,
                         .context = kContext,
                         .width = 16,
                         .layers = 1,
                         .heads = 2,
                         .dropout = 0.1});
  optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-2});
  const Texts texts(ways.samples);
  data::DataLoader loader(texts, {.batch_size = ways.batch_size, .shuffle = true});
  optim::CosineSchedule schedule(optimizer, {.warmup = 3, .total = 30, .min_lr = 1e-4});
  accelerator.prepare(model, optimizer, loader, schedule);
  auto step = accelerator.graphed_step(
      [&](const TensorList& batch) -> TensorList {
        const auto micro = accelerator.accumulate(model);
        const Tensor loss = model(batch[0], batch[1]).loss;
        accelerator.backward(loss);
        Tensor norm = zeros({}, {.device = cuda(0)});
        if (ways.clips) norm = accelerator.clip_grad_norm(model.parameters(), 0.5);
        optimizer.step();
        optimizer.zero_grad();
        return {loss, norm};
      },
      ways.step);
  Trained run;
  for (int epoch = 0; epoch < ways.epochs; ++epoch) {
    for (auto& batch : loader) {
      const TensorList got = step({batch[0], batch[1]});
      schedule.step();
      run.losses.push_back(got[0].item());
      // A NaN equals nothing.
      const double norm = got[1].item();
      run.norms.push_back(std::isnan(norm) ? -1 : norm);
      run.rates.push_back(optimizer.lr());
    }
  }
  for (const Tensor& parameter : model.parameters()) {
    run.parameters.push_back(parameter.to_vector());
  }
  run.state = optimizer.state_dict();
  run.scale = accelerator.loss_scale();
  run.programs_stream = random_state().next_stream;
  run.graphs = step.num_graphs();
  run.replays = step.replays();
  run.as_they_are = step.calls_as_they_are();
  return run;
}

void expect_same(const Trained& got, const Trained& expected) {
  EXPECT_EQ(got.losses, expected.losses);
  EXPECT_EQ(got.norms, expected.norms);
  EXPECT_EQ(got.rates, expected.rates);
  EXPECT_EQ(got.parameters, expected.parameters);
  ASSERT_EQ(got.state.size(), expected.state.size());
  for (const auto& [name, tensor] : expected.state) {
    EXPECT_EQ(got.state.at(name).to_vector(), tensor.to_vector()) << name;
  }
  EXPECT_EQ(got.scale, expected.scale);
  EXPECT_EQ(got.programs_stream, expected.programs_stream);
}

struct Case {
  std::string name;
  AcceleratorOptions options;
};
std::vector<Case> precisions() {
  return {{"f32", {}},
          {"bf16", {.mixed_precision = Precision::kBF16}},
          {"pure bf16",
           {.mixed_precision = Precision::kBF16, .precision_policy = PrecisionPolicy::kPure}},
          {"fp16",
           {.mixed_precision = Precision::kFP16,
            .loss_scale = {.init_scale = 0x1p22, .growth_interval = 2, .on_device = true}}},
          {"fp8",
           {.mixed_precision = Precision::kFP8,
            .fp8 = {.recipe = precision::Fp8Scaling::kDelayed,
                    .filter = precision::Fp8Filter::kDefault}}}};
}

class GraphsOfPrecisions : public testing::TestWithParam<Case> {
  const gpu::GemmModelScope model_{GetParam().name == "fp8" ? gpu::run_by_model : nullptr};
};

TEST_P(GraphsOfPrecisions, TrainToTheSameBits) {
  const Trained expected = train(GetParam().options, {}, false);
  EXPECT_EQ(expected.replays, 0);
  EXPECT_NE(expected.parameters, train(GetParam().options, {.epochs = 0}, false).parameters);
  const Trained got = train(GetParam().options, {}, true);
  expect_same(got, expected);
  EXPECT_EQ(got.graphs, 1);
  EXPECT_EQ(got.as_they_are, 2);
  EXPECT_EQ(got.replays, 6);
}

// 13 samples in batches of two, windows of three: the last batch of an epoch is short and ends a
// window of one.
TEST_P(GraphsOfPrecisions, AccumulateToTheSameBits) {
  const Ways ways{.accumulation = 3, .samples = 13, .epochs = 4};
  const Trained expected = train(GetParam().options, ways, false);
  const Trained got = train(GetParam().options, ways, true);
  expect_same(got, expected);
  EXPECT_EQ(got.graphs, 4);  // first, middle, last, and the short one
  EXPECT_GT(got.replays, got.as_they_are);
}

INSTANTIATE_TEST_SUITE_P(All, GraphsOfPrecisions, testing::ValuesIn(precisions()),
                         [](const auto& info) {
                           std::string name = info.param.name;
                           std::erase(name, ' ');
                           return name;
                         });

TEST(AcceleratorGraphs, ASettingClipsInTheGraph) {
  const AcceleratorOptions options{.gradient_clipping = 0.1};
  const Ways ways{.accumulation = 2, .clips = false};
  expect_same(train(options, ways, true), train(options, ways, false));
}

// The places between come more often than the first one, whose graph has to be there before.
TEST(AcceleratorGraphs, AreMadeInTheOrderOfTheWindow) {
  const Ways ways{.accumulation = 4, .samples = 32};
  const Trained got = train({}, ways, true);
  expect_same(got, train({}, ways, false));
  EXPECT_EQ(got.graphs, 3);
  EXPECT_EQ(got.as_they_are, 8);
  EXPECT_EQ(got.replays, 8);
}

// A window whose begin no graph fits goes on as it is: its gradients lie elsewhere. Here windows go
// on over epochs, and the short batch comes at each of their places.
TEST(AcceleratorGraphs, GradientsThatLieElsewhereAreNotThoseOfAGraph) {
  const AcceleratorOptions options{.sync_with_dataloader = false};
  const Ways ways{.accumulation = 3, .samples = 13, .epochs = 6};
  const Trained got = train(options, ways, true);
  expect_same(got, train(options, ways, false));
  EXPECT_GT(got.replays, 15);
}

TEST(AcceleratorGraphs, OnesOfWhichThereAreNoMoreRunAsTheyAre) {
  const Ways ways{.accumulation = 3, .epochs = 2, .step = {.warmup = 2, .max_graphs = 1}};
  const Trained expected = train({}, ways, false);
  const Trained got = train({}, ways, true);
  expect_same(got, expected);
  EXPECT_EQ(got.graphs, 1);
  EXPECT_GT(got.as_they_are, 6);
}

TEST(AcceleratorGraphs, RunOnTheCpuAsTheyAre) {
  Accelerator accelerator({.cpu = true, .config_file = ""});
  nn::Linear model(3, 2);
  optim::SGD optimizer(model.named_parameters(), {.lr = 0.1});
  accelerator.prepare(model, optimizer);
  auto step = accelerator.graphed_step([&](const TensorList& in) -> TensorList {
    const auto micro = accelerator.accumulate(model);
    const Tensor loss = model(in[0]).sum();
    accelerator.backward(loss);
    optimizer.step();
    optimizer.zero_grad();
    return {loss};
  });
  for (int i = 0; i < 6; ++i) {
    const Tensor loss = step({ones({2, 3})})[0];
    EXPECT_FALSE(loss.requires_grad());
  }
  EXPECT_EQ(step.num_graphs(), 0);
  EXPECT_EQ(step.calls_as_they_are(), 6);
}

// ---- What a graph cannot know -------------------------------------------------------------------

struct Small {
  explicit Small(const AcceleratorOptions& given = {}) : accelerator(with_file(given)) {
    accelerator.prepare(model, optimizer, schedule);
  }
  static AcceleratorOptions with_file(AcceleratorOptions options) {
    manual_seed(3);
    options.config_file = "";
    return options;
  }
  Tensor forward_backward(const Tensor& x, const accelerate::BackwardOptions& options = {}) {
    const Tensor loss = mean(square(model(x)));
    accelerator.backward(loss, options);
    return loss;
  }
  void end() {
    optimizer.step();
    optimizer.zero_grad();
  }
  // Some steps, a refused capture, and more of them.
  std::vector<double> train(const accelerate::GraphedStep::Function& refused, const char* reason) {
    bool refuses = false;
    int tries = 0;
    auto step = accelerator.graphed_step(
        [&](const TensorList& in) -> TensorList {
          if (refuses) return ++tries, refused(in);
          const auto micro = accelerator.accumulate(model);
          const Tensor loss = forward_backward(in[0]);
          end();
          return {loss};
        },
        {.warmup = 2});
    std::vector<double> losses;
    for (int i = 0; i < 8; ++i) {
      const TensorList in{(ones({4, 6}) * (0.1 * (i + 1))).to(cuda(0))};
      refuses = refused != nullptr && i == 2;
      if (refuses) {
        const std::string text = message_of<UnsupportedError>([&] { step(in); });
        EXPECT_TRUE(mentions(text, reason)) << text;
        EXPECT_EQ(step.num_graphs(), 0);
        refuses = false;
      }
      losses.push_back(step(in)[0].item());
    }
    EXPECT_EQ(tries, refused != nullptr ? 1 : 0);
    EXPECT_EQ(step.num_graphs(), 1);
    for (const Tensor& parameter : model.parameters()) {
      for (const double value : parameter.to_vector()) losses.push_back(value);
    }
    return losses;
  }

  Accelerator accelerator;
  nn::Sequential model{nn::layer<nn::Linear>(6, 4), nn::layer<nn::Dropout>(0.5)};
  optim::AdamW optimizer{model.named_parameters(), {.lr = 3e-2}};
  optim::CosineSchedule schedule{optimizer, {.total = 100}};
};

TEST(AcceleratorGraphs, WhatTheyCannotKnowIsRefusedAndTheTrainingGoesOn) {
  Small plain;
  const std::vector<double> expected = plain.train(nullptr, "");
  using Body = std::function<TensorList(Small&, const TensorList&)>;
  const std::vector<std::pair<const char*, Body>> refused = {
      {"opens 0 micro-batches",
       [](Small& s, const TensorList& in) -> TensorList {
         s.forward_backward(in[0]);
         s.end();
         return {};
       }},
      {"opens 2 micro-batches",
       [](Small& s, const TensorList& in) -> TensorList {
         for (int i = 0; i < 2; ++i) {
           const auto micro = s.accelerator.accumulate(s.model);
           s.forward_backward(in[0]);
           s.end();
         }
         return {};
       }},
      {"an early end of the window",
       [](Small& s, const TensorList&) -> TensorList {
         const auto micro = s.accelerator.accumulate({&s.model}, {.ends_window = true});
         return {};
       }},
      {"a weight that is given",
       [](Small& s, const TensorList& in) -> TensorList {
         const auto micro = s.accelerator.accumulate(s.model);
         s.forward_backward(in[0], {.weight = 4});
         return {};
       }},
      {"a schedule's step",
       [](Small& s, const TensorList& in) -> TensorList {
         const auto micro = s.accelerator.accumulate(s.model);
         s.forward_backward(in[0]);
         s.end();
         s.schedule.step();
         return {};
       }},
      {"draws random numbers outside",
       [](Small& s, const TensorList& in) -> TensorList {
         const auto micro = s.accelerator.accumulate(s.model);
         s.forward_backward(dropout(in[0], 0.5));
         s.end();
         return {};
       }},
      {"does not step with them",
       [](Small& s, const TensorList& in) -> TensorList {
         const auto micro = s.accelerator.accumulate(s.model);
         s.forward_backward(in[0]);
         s.accelerator.clip_grad_norm(s.model.parameters(), 0.1);
         return {};
       }},
      {"makes the host wait",
       [](Small& s, const TensorList& in) -> TensorList {
         const auto micro = s.accelerator.accumulate(s.model);
         const Tensor loss = s.forward_backward(in[0]);
         loss.item();
         return {};
       }},
  };
  for (const auto& [reason, body] : refused) {
    SCOPED_TRACE(reason);
    Small small;
    EXPECT_EQ(small.train([&](const TensorList& in) { return body(small, in); }, reason), expected);
  }
}

TEST(AcceleratorGraphs, GradientsOfBeforeTheWindowAreRefused) {
  Small small;
  auto step = small.accelerator.graphed_step(
      [&](const TensorList& in) -> TensorList {
        const auto micro = small.accelerator.accumulate(small.model);
        small.forward_backward(in[0]);
        small.optimizer.step();
        small.optimizer.zero_grad(/*set_to_none=*/false);
        return {};
      },
      {.warmup = 2});
  const TensorList in{ones({4, 6}).to(cuda(0))};
  for (int i = 0; i < 2; ++i) step(in);
  const std::string text = message_of<UnsupportedError>([&] { step(in); });
  EXPECT_TRUE(mentions(text, "gradients are there before the window begins")) << text;
}

TEST(AcceleratorGraphs, AnF16ScaleOfTheHostIsRefused) {
  Small small({.mixed_precision = Precision::kFP16});
  EXPECT_THROW(small.train(nullptr, ""), UnsupportedError);
}

TEST(AcceleratorGraphs, OtherGraphsOfPreparedObjectsAreRefused) {
  Small small;
  optim::GraphedStep other(cuda(0),
                           [&](const TensorList&) -> TensorList {
                             small.optimizer.step();
                             return {};
                           },
                           {.warmup = 1});
  other({});
  const std::string text = message_of<UnsupportedError>([&] { other({}); });
  EXPECT_TRUE(mentions(text, "capture it by Accelerator::graphed_step()")) << text;
}

// A state that was loaded is not the graph's, and says so until reset().
TEST(AcceleratorGraphs, ALoadedStateIsNoticed) {
  Small small;
  auto step = small.accelerator.graphed_step(
      [&](const TensorList& in) -> TensorList {
        const auto micro = small.accelerator.accumulate(small.model);
        const Tensor loss = small.forward_backward(in[0]);
        small.end();
        return {loss};
      },
      {.warmup = 2});
  const TensorList in{ones({4, 6}).to(cuda(0))};
  for (int i = 0; i < 4; ++i) step(in);
  ASSERT_EQ(step.num_graphs(), 1);
  small.optimizer.load_state_dict(small.optimizer.state_dict().clone());
  EXPECT_THROW(step(in), ConfigError);
  step.reset();
  for (int i = 0; i < 3; ++i) step(in);
  EXPECT_EQ(step.num_graphs(), 1);
}

TEST(AcceleratorGraphs, ReplaysDoNotWaitForTheDevice) {
  TS_NEEDS_EMULATION("counts waits of the host");
  Small small;
  auto step = small.accelerator.graphed_step(
      [&](const TensorList& in) -> TensorList {
        const auto micro = small.accelerator.accumulate(small.model);
        const Tensor loss = small.forward_backward(in[0]);
        small.accelerator.clip_grad_norm(small.model.parameters(), 0.1);
        small.end();
        return {loss};
      },
      {.warmup = 2});
  const TensorList in{ones({4, 6}).to(cuda(0))};
  for (int i = 0; i < 4; ++i) step(in);
  EXPECT_GT(step.pool_bytes(), 0);
  const gpu::HostWaits waits;
  step(in);
  EXPECT_EQ(waits.count(), 0);
}

TEST(AcceleratorGraphs, OptionsThatCannotWorkAreErrors) {
  Small small;
  EXPECT_THROW(small.accelerator.graphed_step(nullptr), ValueError);
  EXPECT_THROW(
      small.accelerator.graphed_step([](const TensorList&) { return TensorList(); }, {.warmup = 1}),
      ValueError);
}

TEST(AcceleratorGraphs, AStepWithoutItsAcceleratorIsAnError) {
  std::optional<accelerate::GraphedStep> step;
  {
    Small small;
    step = small.accelerator.graphed_step([](const TensorList& in) { return in; });
  }
  EXPECT_THROW((*step)({}), ValueError);
}

}  // namespace
}  // namespace tessera::test_cuda_accelerator_graphs
