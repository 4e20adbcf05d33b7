// Loops of an Accelerator as graphs on several emulated GPUs, over the mock of NCCL: the bits of
// the same loops as they are, also where one rank replays and another does not.
#include "nccl_fixture.h"

#include <array>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include <tessera/accelerate/accelerator.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/random.h>
#include <tessera/data/dataloader.h>
#include <tessera/nn/loss.h>
#include <tessera/optim/graphed_step.h>
#include <tessera/optim/optimizers.h>

#include "../message_of.h"
#include "sharded_blocks.h"

namespace tessera::distributed::test_cuda_accelerator_graph_ranks {
namespace {

using CudaAcceleratorGraphs = CudaNccl;

struct Rows : data::Dataset<std::array<Tensor, 2>> {
  explicit Rows(int64_t count) : count(count) {}
  int64_t count;
  int64_t size() const override { return count; }
  std::array<Tensor, 2> get(int64_t index) const override {
    return {randn({5}, {}, RandomStream{3, static_cast<uint64_t>(index)}),
            randn({9}, {}, RandomStream{4, static_cast<uint64_t>(index)})};
  }
};

struct Outcome {
  std::vector<double> losses, norms;
  std::vector<std::vector<float>> values;
  int64_t graphs = 0, replays = 0, as_they_are = 0;
};

struct Case {
  AcceleratorOptions options = {};
  int64_t micro = 1, samples = 20;
  int epochs = 1;
};

// Of every rank.
std::vector<Outcome> train(int ranks, const Case& one, bool graphs) {
  std::vector<Outcome> outcomes(static_cast<size_t>(ranks));
  on_gpus(ranks, [&](int rank) {
    Outcome& outcome = outcomes[static_cast<size_t>(rank)];
    manual_seed(5);
    Blocks model(9, 2);
    AcceleratorOptions options = one.options;
    options.gradient_accumulation_steps = one.micro;
    options.cuda_graphs = graphs;
    options.seed = 5;
    options.config_file = "";
    Accelerator accelerator(options);
    const Rows rows(one.samples);
    data::DataLoader loader(rows, {.batch_size = 2, .shuffle = true});
    optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-2, .weight_decay = 0.1});
    accelerator.prepare(model, optimizer, loader);
    auto step = accelerator.graphed_step(
        [&](const TensorList& batch) -> TensorList {
          const auto micro = accelerator.accumulate(model);
          const Tensor loss = mse_loss(model(batch[0]), batch[1]);
          accelerator.backward(loss);
          const Tensor norm = accelerator.clip_grad_norm(model.parameters(), 0.5);
          optimizer.step();
          optimizer.zero_grad();
          return {loss, norm};
        },
        {.warmup = 2});
    for (int epoch = 0; epoch < one.epochs; ++epoch) {
      for (const auto& batch : loader) {
        const TensorList got = step({batch[0], batch[1]});
        outcome.losses.push_back(got[0].to(kCpu).item());
        const double norm = got[1].to(kCpu).item();
        outcome.norms.push_back(std::isnan(norm) ? -1 : norm);
      }
    }
    for (const Tensor& parameter : model.parameters()) {
      outcome.values.push_back(values(parameter.to(kF32)));
    }
    outcome.graphs = step.num_graphs();
    outcome.replays = step.replays();
    outcome.as_they_are = step.calls_as_they_are();
  });
  return outcomes;
}

std::vector<Outcome> expect_same(int ranks, const Case& one) {
  const std::vector<Outcome> expected = train(ranks, one, false);
  std::vector<Outcome> got = train(ranks, one, true);
  for (size_t rank = 0; rank < got.size(); ++rank) {
    SCOPED_TRACE(rank);
    EXPECT_EQ(got[rank].losses, expected[rank].losses);
    EXPECT_EQ(got[rank].norms, expected[rank].norms);
    EXPECT_EQ(got[rank].values, expected[rank].values);
    EXPECT_EQ(got[rank].values, got[0].values);
    EXPECT_EQ(expected[rank].replays, 0);
  }
  return got;
}

TEST_F(CudaAcceleratorGraphs, ReduceToTheSameBits) {
  const Precision bf16 = Precision::kBF16;
  for (const Case& one :
       {Case{}, Case{.options = {.mixed_precision = bf16}},
        Case{.options = {.mixed_precision = bf16, .precision_policy = PrecisionPolicy::kPure}},
        Case{.options = {.mixed_precision = Precision::kFP16,
                        .loss_scale = {.init_scale = 0x1p20, .on_device = true}}},
        Case{.options = {.loss_weighting = LossWeighting::kHuggingFace}}}) {
    for (const Outcome& outcome : expect_same(2, one)) {
      EXPECT_EQ(outcome.graphs, 1);
      EXPECT_EQ(outcome.as_they_are, 2);
      EXPECT_EQ(outcome.replays, 3);
    }
  }
}

TEST_F(CudaAcceleratorGraphs, AccumulateToTheSameBits) {
  for (const bool each : {false, true}) {
    const Case one{.options = {.sync_each_batch = each}, .micro = 3, .samples = 36, .epochs = 2};
    for (const Outcome& outcome : expect_same(2, one)) {
      EXPECT_EQ(outcome.graphs, 3);
      EXPECT_EQ(outcome.as_they_are, 6);
      EXPECT_EQ(outcome.replays, 12);
    }
  }
}

TEST_F(CudaAcceleratorGraphs, OfThreeRanks) { expect_same(3, {.micro = 2, .samples = 48}); }

// A copy fills up the last batch of an epoch: its shape is that of all others, and it weighs half.
// The rank that has it comes to a graph of its own, the other one never does.
TEST_F(CudaAcceleratorGraphs, RanksReplayBesideOnesThatDoNot) {
  const std::vector<Outcome> got = expect_same(2, {.samples = 7, .epochs = 6});
  std::vector<int64_t> graphs;
  for (const Outcome& outcome : got) graphs.push_back(outcome.graphs);
  std::ranges::sort(graphs);
  EXPECT_EQ(graphs, (std::vector<int64_t>{1, 2}));
  EXPECT_NE(got[0].replays, got[1].replays);
}

struct SmallLoop {
  explicit SmallLoop(const AcceleratorOptions& given = {}) : accelerator(without_file(given)) {
    accelerator.prepare(model, optimizer);
  }
  static AcceleratorOptions without_file(AcceleratorOptions options) {
    manual_seed(5);
    options.config_file = "";
    return options;
  }
  accelerate::GraphedStep step() {
    return accelerator.graphed_step(
        [this](const TensorList& in) -> TensorList {
          const auto micro = accelerator.accumulate(model);
          accelerator.backward(sum(model(in[0])));
          optimizer.step();
          optimizer.zero_grad();
          return {};
        },
        {.warmup = 2});
  }
  Accelerator accelerator;
  Blocks model{9, 2};
  optim::AdamW optimizer{model.named_parameters(), {.lr = 1e-2}};
  const TensorList batch{on_gpu(ones({2, 5}))};
};

// The other rank hears of it at once.
TEST_F(CudaAcceleratorGraphs, ARefusedReplayIsToldToTheOthers) {
  std::vector<std::string> said(2);
  const auto run = [&] {
    on_gpus(2,
            [&](int rank) {
              SmallLoop loop;
              accelerate::GraphedStep step = loop.step();
              for (int i = 0; i < 4; ++i) step(loop.batch);
              EXPECT_EQ(step.num_graphs(), 1);
              if (rank == 1) loop.optimizer.load_state_dict(loop.optimizer.state_dict().clone());
              try {
                step(loop.batch);
              } catch (const Error& error) {
                said[static_cast<size_t>(rank)] = error.what();
                throw;
              }
            },
            {.fails = true});
  };
  EXPECT_THROW(run(), Error);
  EXPECT_TRUE(contains(said[0], "rank 1 of 'world' has thrown in its backward")) << said[0];
  EXPECT_TRUE(contains(said[1], "parameters or state were replaced")) << said[1];
}

TEST_F(CudaAcceleratorGraphs, PartsAndHooksAreRefused) {
  on_gpus(2, [](int) {
    const auto refused = [](const AcceleratorOptions& given) {
      SmallLoop loop(given);
      return message_of<UnsupportedError>([&] {
        accelerate::GraphedStep step = loop.step();
        for (int i = 0; i < 3; ++i) step(loop.batch);
      });
    };
    const std::string parts = refused({.sharding = accelerate::Sharding::kFsdp});
    EXPECT_TRUE(contains(parts, "gathers of parts are not captured")) << parts;
    const std::string hook = refused({.ddp = {.comm_hook = accelerate::CommHook::kBF16}});
    EXPECT_TRUE(contains(hook, "or a hook sends them")) << hook;
  });
}

// Nobody would count its calls.
TEST_F(CudaAcceleratorGraphs, CollectivesOfOtherGraphsAreRefused) {
  on_gpus(2, [](int rank) {
    optim::GraphedStep step(cuda(rank),
                            [&](const TensorList& in) -> TensorList {
                              const Tensor x = in[0] * 2.0;
                              world().all_reduce(x).wait();
                              return {x};
                            },
                            {.warmup = 1});
    const TensorList in{on_gpu(ones({3}))};
    EXPECT_EQ(values(step(in)[0]), (std::vector<float>{4, 4, 4}));
    const std::string text = message_of<UnsupportedError>([&] { step(in); });
    EXPECT_TRUE(contains(text, "ranks count their calls on the host")) << text;
  });
}

}  // namespace
}  // namespace tessera::distributed::test_cuda_accelerator_graph_ranks
