// The settings tp_size and tp_sequence: models whose layers ranks share, under the Accelerator.
// ctest labels: threads
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <tessera/accelerate/accelerator.h>
#include <tessera/accelerate/batch_size.h>
#include <tessera/autograd/autograd.h>
#include <tessera/core/context.h>
#include <tessera/core/error.h>
#include <tessera/core/parallel.h>
#include <tessera/core/random.h>
#include <tessera/data/dataloader.h>
#include <tessera/data/dataset.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/models/gpt2.h>
#include <tessera/optim/optimizers.h>

#include "distributed/compared_ranks.h"
#include "message_of.h"

namespace tessera::test_accelerator_tensor_parallel {
namespace {

using distributed::compared_ranks;

constexpr int64_t kTokens = 8, kSamples = 24, kBatch = 4;
constexpr double kTolerance = 1e-11;

std::unique_ptr<nn::models::Gpt> make_model(uint64_t seed = 3, double dropout = 0.2) {
  manual_seed(seed);
  auto model = std::make_unique<nn::models::Gpt>(nn::models::GptConfig{.vocab_size = 38,
                                                                       .context = kTokens,
                                                                       .width = 16,
                                                                       .layers = 2,
                                                                       .heads = 4,
                                                                       .dropout = dropout});
  model->to(kF64);
  return model;
}

data::DataLoader<std::array<Tensor, 1>> make_loader(int64_t batch_size,
                                                    std::optional<uint64_t> seed = 9) {
  const Tensor tokens = randint(0, 37, {kSamples, kTokens}, kI64, RandomStream{11, 0});
  return data::DataLoader<std::array<Tensor, 1>>(
      std::make_shared<data::TensorDataset<1>>(tokens),
      {.batch_size = batch_size, .shuffle = true, .seed = seed});
}

struct Trained {
  std::vector<double> losses, norms;
  StateDict state;
};

Trained train(const AcceleratorOptions& options, int64_t batch_size, double dropout = 0.2) {
  const auto model = make_model(3, dropout);
  Accelerator accelerator(options);
  auto loader = make_loader(batch_size);
  optim::SGD optimizer(model->named_parameters(), {.lr = 0.2, .momentum = 0.9});
  accelerator.prepare(*model, optimizer, loader);
  Trained run;
  for (const auto& batch : loader) {
    const auto micro = accelerator.accumulate(*model);
    const Tensor loss = (*model)(batch[0], batch[0]).loss;
    accelerator.backward(loss);
    run.losses.push_back(accelerator.reduce(loss.detach()).item());
    if (accelerator.sync_gradients()) {
      run.norms.push_back(accelerator.clip_grad_norm(model->parameters(), 0.5).item());
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  run.state = accelerator.get_state_dict(*model);
  return run;
}

void expect_close(const std::vector<double>& got, const std::vector<double>& expected,
                  const std::string& what) {
  ASSERT_EQ(got.size(), expected.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_NEAR(got[i], expected[i], kTolerance * std::max(1.0, std::abs(expected[i])))
        << what << " " << i;
  }
}

TEST(AcceleratorTensorParallel, ATrainingIsThatOfOneProcess) {
  const AcceleratorOptions alone{.gradient_accumulation_steps = 2, .seed = 5, .config_file = ""};
  Trained expected;
  {
    Context context;
    const ContextGuard guard(context);
    set_num_threads(1);
    expected = train(alone, kBatch);
  }
  EXPECT_EQ(expected.norms.size(), 3u);
  for (const bool sequence : {true, false}) {
    for (const int ranks : {2, 4}) {
      SCOPED_TRACE(testing::Message() << ranks << " ranks, sequence " << sequence);
      compared_ranks(ranks, [&](int rank) {
        AcceleratorOptions options = alone;
        options.tp_size = ranks, options.tp_sequence = sequence;
        const Trained own = train(options, kBatch);
        expect_close(own.losses, expected.losses, "loss");
        expect_close(own.norms, expected.norms, "norm");
        if (rank != 0) return;
        ASSERT_EQ(own.state.size(), expected.state.size());
        for (const auto& [name, tensor] : expected.state) {
          expect_close(own.state.find(name)->to_vector(), tensor.to_vector(), name);
        }
      });
    }
  }
}

// Two groups of two: each group has half of each batch, and both shard what tp leaves them.
TEST(AcceleratorTensorParallel, SoIsOneThatShardsAsWell) {
  const AcceleratorOptions alone{.gradient_accumulation_steps = 2, .seed = 5, .config_file = ""};
  Trained expected;
  {
    Context context;
    const ContextGuard guard(context);
    set_num_threads(1);
    expected = train(alone, kBatch, 0);
  }
  for (const Sharding sharding :
       {Sharding::kZero1, Sharding::kZero2, Sharding::kFsdp, Sharding::kZero3}) {
    SCOPED_TRACE(static_cast<int>(sharding));
    compared_ranks(4, [&](int rank) {
      AcceleratorOptions options = alone;
      options.tp_size = 2, options.sharding = sharding;
      const Trained own = train(options, kBatch / 2, 0);
      expect_close(own.norms, expected.norms, "norm");
      if (rank != 0) return;
      for (const auto& [name, tensor] : expected.state) {
        expect_close(own.state.find(name)->to_vector(), tensor.to_vector(), name);
      }
    });
  }
}

// The parts of ranks whose seeds differ are those of the first one's model.
TEST(AcceleratorTensorParallel, RanksBeginWithTheFirstOnesValues) {
  compared_ranks(2, [](int rank) {
    const auto first = make_model(1);
    const auto model = make_model(static_cast<uint64_t>(1 + rank));
    Accelerator accelerator({.tp_size = 2, .config_file = ""});
    accelerator.prepare(*model);
    const StateDict state = accelerator.get_state_dict(*model);
    if (rank != 0) return;
    for (const auto& [name, tensor] : first->state_dict()) {
      EXPECT_EQ(state.find(name)->to_vector(), tensor.to_vector()) << name;
    }
  });
}

TEST(AcceleratorTensorParallel, LoadersDealAlongDataRanksAlone) {
  compared_ranks(4, [](int rank) {
    Accelerator accelerator({.sharding = Sharding::kFsdp, .tp_size = 2, .config_file = ""});
    EXPECT_EQ(accelerator.data_ranks().size(), 2);
    // The seeds that loaders take of themselves differ; the first rank's is that of all.
    manual_seed(static_cast<uint64_t>(rank));
    auto loader = make_loader(kBatch, {});
    accelerator.prepare(loader);
    EXPECT_EQ(loader.size(), kSamples / kBatch / 2);
    for (const auto& batch : loader) {
      const Tensor all = distributed::all_gather(batch[0].select(1, 0));  // [ranks x batch]
      const std::vector<double> numbers = all.to_vector();
      const auto of = [&](int of_rank) {
        const auto begin = numbers.begin() + of_rank * kBatch;
        return std::vector<double>(begin, begin + kBatch);
      };
      EXPECT_EQ(of(0), of(1));
      EXPECT_EQ(of(2), of(3));
      EXPECT_NE(of(0), of(2));
    }
  });
}

TEST(AcceleratorTensorParallel, DescribesTheMeshAndWhatARankHasOfEachLayer) {
  for (const bool sequence : {true, false}) {
    compared_ranks(4, [&](int) {
      const auto model = make_model();
      Accelerator accelerator(
          {.sharding = Sharding::kFsdp, .tp_size = 2, .tp_sequence = sequence, .config_file = ""});
      accelerator.prepare(*model);
      const std::string told = accelerator.describe();
      // C 16, vocabulary 38, context 8. Of a block's weights and biases half, but of rows' biases
      // and norms all.
      constexpr int64_t kBlock = 12 * 16 * 16 + 7 * 16, kWhole = 2 * 16 + 4 * 16;
      constexpr int64_t kOwn = 38 * 16 / 2 + 8 * 16 + 2 * (kBlock / 2 + kWhole) + 2 * 16;
      constexpr int64_t kAll = 38 * 16 + 8 * 16 + 2 * (kBlock + kWhole) + 2 * 16;
      const std::string elements = "layers along tp=2: this rank has " + std::to_string(kOwn) +
                                   " of " + std::to_string(kAll) + " elements\n";
      const std::string copies = sequence ? "replicated: its gradients are summands" : "invariant";
      for (const std::string& part :
           {std::string("mesh(dp_shard=2, tp=2)"), elements,
            std::string(
                "transformer.wte.weight                    [19, 16] of [38, 16], Shard(0)\n"),
            std::string("attn.c_attn.weight  x 2   [24, 16] of [48, 16], Shard(0) of 3 blocks\n"),
            std::string("attn.c_proj.weight  x 2   [16, 8] of [16, 16], Shard(1)\n"),
            std::string("attn.c_proj.bias    x 2   [16], invariant\n"),
            "ln_1.weight         x 2   [16], " + copies + "\n"}) {
        EXPECT_TRUE(mentions(told, part)) << part << "\n" << told;
      }
    });
  }
  compared_ranks(2, [](int) {
    const auto model = make_model();
    Accelerator accelerator({.config_file = ""});
    accelerator.prepare(*model);
    EXPECT_FALSE(mentions(accelerator.describe(), "layers along"));
  });
}

// Also those that read alike, and would wait for the others' gradients.
TEST(AcceleratorTensorParallel, RanksThatReadDifferentBatchesAreToldSo) {
  for (const int data_ranks : {1, 2}) {
    compared_ranks(
        2 * data_ranks,
        [&](int rank) {
          const auto model = make_model();
          AcceleratorOptions options{.tp_size = 2, .config_file = ""};
          if (data_ranks > 1) options.sharding = Sharding::kFsdp;
          Accelerator accelerator(options);
          auto loader = make_loader(kBatch);
          accelerator.prepare(*model, loader);
          auto batch = loader.next();
          const bool skips = rank == 2 * data_ranks - 1;
          if (skips) batch = loader.next();  // one rank skips a batch
          const auto micro = accelerator.accumulate(*model);
          const Tensor loss = (*model)((*batch)[0], (*batch)[0]).loss;
          const std::string message = message_of<ValueError>([&] { accelerator.backward(loss); });
          const auto position = [&](int batches) {
            return " has position " + std::to_string(kBatch * data_ranks * batches) + " of epoch 0";
          };
          EXPECT_TRUE(mentions(message, "tp rank 0" + position(1))) << message;
          EXPECT_TRUE(mentions(message, "tp rank 1" + position(2))) << message;
        },
        {.timeout_seconds = 20});
  }
}

// A group's weight is its own; its ranks have one.
TEST(AcceleratorTensorParallel, GroupsWeighTheirOwnBatches) {
  compared_ranks(
      4,
      [](int rank) {
        const auto model = make_model();
        Accelerator accelerator({.sharding = Sharding::kFsdp, .tp_size = 2, .config_file = ""});
        accelerator.prepare(*model);
        const Tensor tokens = randint(0, 37, {kBatch, kTokens}, kI64, RandomStream{11, 1});
        const auto backward = [&](double weight) {
          const auto micro = accelerator.accumulate(*model);
          accelerator.backward((*model)(tokens, tokens).loss, {.weight = weight});
        };
        EXPECT_NO_THROW(backward(1 + rank / 2));
        const std::string message = message_of<ValueError>([&] { backward(1 + rank / 3); });
        EXPECT_TRUE(mentions(message, "(ranks 2 and 3 of")) << message;
      },
      {.timeout_seconds = 20});
}

// What ranks that know of each other alone make known, and what they train on with.
StateDict train_past_a_failure(const AcceleratorOptions& options, int rank, int failing_block) {
  const auto model = make_model(3, 0);
  Accelerator accelerator(options);
  optim::SGD optimizer(model->named_parameters(), {.lr = 0.2});
  accelerator.prepare(*model, optimizer);
  const Tensor tokens = randint(0, 37, {kBatch, kTokens}, kI64, RandomStream{11, 1});
  std::function<void()> in_backward;
  HookHandle watch;
  if (failing_block >= 0) {
    watch = model->transformer.h[static_cast<size_t>(failing_block)].register_forward_hook(
        [&](nn::ModuleBase&, nn::TensorRefs, nn::TensorRefs outputs) {
          if (!in_backward) return;
          register_hook(*outputs[0], [&](const Tensor&) {
            in_backward();
            return Tensor();
          });
        });
  }
  const auto step = [&] {
    const Tensor loss = (*model)(tokens, tokens).loss;
    accelerator.backward(loss);
    optimizer.step(), optimizer.zero_grad();
  };
  step();
  if (failing_block >= 0 && rank == 1) {
    in_backward = [] { TS_THROW(ValueError, "here", "no luck"); };
    EXPECT_TRUE(mentions(message_of<ValueError>(step), "no luck"));
    in_backward = nullptr;
  } else if (failing_block >= 0) {
    const std::string message = message_of<DistributedError>(step);
    EXPECT_TRUE(mentions(message, "rank 1 has failed in its backward")) << message;
    EXPECT_TRUE(mentions(message, "no luck")) << message;
    EXPECT_FALSE(mentions(message, "waited")) << message;
  }
  optimizer.zero_grad();
  step();
  return accelerator.get_state_dict(*model);
}

TEST(AcceleratorTensorParallel, ABackwardThatFailsOnOneRankIsToldToAllAndTheyGoOn) {
  std::vector<AcceleratorOptions> layouts(6, {.seed = 5, .config_file = ""});
  layouts[0].tp_size = 2;
  layouts[1].tp_size = 2, layouts[1].tp_sequence = false;
  layouts[2].tp_size = 4;
  layouts[3].tp_size = 2, layouts[3].sharding = Sharding::kFsdp;
  layouts[4].tp_size = 2, layouts[4].sharding = Sharding::kFsdp, layouts[4].tp_sequence = false;
  layouts[5].tp_size = 2, layouts[5].sharding = Sharding::kZero1;
  for (size_t i = 0; i < layouts.size(); ++i) {
    const int ranks = i < 2 ? 2 : 4;
    StateDict expected;
    compared_ranks(ranks, [&](int rank) {
      const StateDict state = train_past_a_failure(layouts[i], rank, -1);
      if (rank == 0) expected = state;
    });
    for (const int block : {1, 0}) {
      SCOPED_TRACE(testing::Message() << "layout " << i << ", block " << block);
      distributed::failing_ranks(
          "one fails in its backward", ranks,
          [&](int rank) {
            const StateDict state = train_past_a_failure(layouts[i], rank, block);
            if (rank != 0) return;
            for (const auto& [name, tensor] : expected) {
              EXPECT_EQ(state.find(name)->to_vector(), tensor.to_vector()) << name;
            }
          },
          {.timeout_seconds = 20});
    }
  }
}

// Where one rank has no room the others may be in conversions.
TEST(AcceleratorTensorParallel, WantOfMemoryOnOneRankLetsAllTryASmallerBatch) {
  for (const int data_ranks : {1, 2}) {
    for (const bool in_backward : {false, true}) {
      SCOPED_TRACE(testing::Message() << data_ranks << " data ranks, in backward " << in_backward);
      distributed::failing_ranks(
          "one of them runs out of memory", 2 * data_ranks,
          [&](int rank) {
            AcceleratorOptions options{.tp_size = 2, .config_file = ""};
            if (data_ranks > 1) options.sharding = Sharding::kFsdp;
            Accelerator accelerator(options);
            const int64_t found = find_executable_batch_size(accelerator, 16, [&](int64_t size) {
              accelerator.free_memory();
              const auto model = make_model(3, 0);
              optim::SGD optimizer(model->named_parameters(), {.lr = 0.2});
              accelerator.prepare(*model, optimizer);
              const auto run_out = [&] {
                if (rank == 1 && size > 12) throw OutOfMemory("allocate: no room");
              };
              const HookHandle watch = model->transformer.h[1].register_forward_hook(
                  [&](nn::ModuleBase&, nn::TensorRefs, nn::TensorRefs outputs) {
                    if (!in_backward) return run_out();
                    register_hook(*outputs[0], [&](const Tensor&) {
                      run_out();
                      return Tensor();
                    });
                  });
              for (int step = 0; step < 2; ++step) {
                const Tensor tokens = randint(0, 37, {size, kTokens}, kI64, RandomStream{11, 1});
                accelerator.backward((*model)(tokens, tokens).loss);
                optimizer.step(), optimizer.zero_grad();
              }
              return size;
            });
            EXPECT_EQ(found, 12);
          },
          {.timeout_seconds = 20});
    }
  }
}

struct Plain : nn::Module<Plain> {
  Plain() : layer(add<nn::Linear>("layer", 4, 4)) {}
  Tensor forward(const Tensor& x) { return layer(x); }
  nn::Linear& layer;
};

TEST(AcceleratorTensorParallel, WhatDoesNotComposeIsAConfigErrorOnEveryRank) {
  compared_ranks(4, [](int) {
    const auto refusal = [](const AcceleratorOptions& options, nn::ModuleBase& model) {
      return message_of<ConfigError>([&] {
        Accelerator accelerator(options);
        accelerator.prepare(model);
      });
    };
    const auto gpt = make_model();
    const std::string copies = refusal({.tp_size = 2, .config_file = ""}, *gpt);
    EXPECT_TRUE(mentions(copies, "tp_size=2 (code) leaves 2 ranks with batches of their own"))
        << copies;
    EXPECT_TRUE(mentions(copies, "set sharding to fsdp")) << copies;
    EXPECT_TRUE(mentions(refusal({.tp_size = 3, .config_file = ""}, *gpt), "tp_size=3"));
    EXPECT_TRUE(mentions(
        refusal({.mixed_precision = Precision::kFP8, .tp_size = 4, .config_file = ""}, *gpt),
        "linear layers that are cut along tp run in bf16"));
    const std::string pure = refusal({.mixed_precision = Precision::kBF16,
                                      .precision_policy = PrecisionPolicy::kPure,
                                      .tp_size = 4,
                                      .config_file = ""},
                                     *gpt);
    EXPECT_TRUE(mentions(pure, "tp_size=4") && mentions(pure, "precision_policy=pure")) << pure;
    Plain plain;
    EXPECT_TRUE(mentions(refusal({.tp_size = 4, .config_file = ""}, plain),
                         "Plain does not say how it may be divided"));
  });
}

}  // namespace
}  // namespace tessera::test_accelerator_tensor_parallel
