// Activation checkpointing by the setting, in every mode of sharding and of one rank: the bits and
// the collectives of a training without it, and less memory for activations.
// ctest labels: threads
#include <tessera/autograd/checkpoint.h>
#include <tessera/autograd/function.h>
#include <tessera/core/error.h>
#include <tessera/core/memory/allocator.h>
#include <tessera/distributed/sync_batch_norm.h>
#include <tessera/nn/norm.h>

#include "accelerate/sharded_words.h"
#include "message_of.h"
#include "thinned.h"

namespace tessera::test_activation_checkpointing {
namespace {

using accelerate::Sharding;
using distributed::compared_ranks;

constexpr Sharding kModes[] = {Sharding::kDdp, Sharding::kZero1, Sharding::kZero2, Sharding::kZero3,
                               Sharding::kFsdp};

struct CheckpointedRun {
  Values values;
  std::vector<std::string> calls;  // collectives of the last step, in order
};

struct Asked {
  Sharding sharding = Sharding::kDdp;
  bool checkpointing = false;
  int micro = 1;
  std::optional<Precision> precision = {};
  std::optional<PrecisionPolicy> policy = {};
  std::optional<int64_t> least = {};
};

CheckpointedRun train_words(const Asked& asked) {
  manual_seed(5);
  Words model;
  Accelerator accelerator(
      {.mixed_precision = asked.precision,
       .precision_policy = asked.policy,
       .gradient_accumulation_steps = asked.micro,
       .seed = 5,
       .sharding = asked.sharding,
       .fsdp = {.min_num_params = asked.least, .activation_checkpointing = asked.checkpointing},
       .config_file = ""});
  data::DataLoader loader(std::make_shared<Tokens>(48), {.batch_size = 2, .shuffle = true});
  optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-2});
  accelerator.prepare(model, optimizer, loader);
  CheckpointedRun result;
  for (const auto& batch : loader) {
    const distributed::CommTrace::Scope scope(*distributed::rank_context().trace);
    const auto micro = accelerator.accumulate(model);
    accelerator.backward(cross_entropy(model(batch[0]).reshape({-1, 131}), batch[1].reshape({-1})));
    accelerator.clip_grad_norm(model.parameters(), 0.5);
    optimizer.step(), optimizer.zero_grad();
    result.calls.clear();
    for (const distributed::CommRecord& record : scope.records()) {
      result.calls.push_back(record.tag + " " + std::to_string(static_cast<int>(record.operation)) +
                             " " + std::to_string(record.bytes));
    }
  }
  result.values = whole_values(model);
  return result;
}

std::vector<CheckpointedRun> train_words_on(int ranks, const Asked& asked) {
  std::vector<CheckpointedRun> results(static_cast<size_t>(ranks));
  compared_ranks(ranks, [&](int rank) { results[static_cast<size_t>(rank)] = train_words(asked); });
  return results;
}

TEST(ActivationCheckpointing, HasTheBitsAndTheCollectivesOfATrainingWithout) {
  for (const int ranks : tests::thinned({1, 2, 3}, 3)) {
    for (const Sharding sharding : kModes) {
      for (const int micro : {1, 2}) {
        SCOPED_TRACE(testing::Message() << "mode " << static_cast<int>(sharding) << " on " << ranks
                                        << " ranks, windows of " << micro);
        const auto without = train_words_on(ranks, {.sharding = sharding, .micro = micro});
        const auto with =
            train_words_on(ranks, {.sharding = sharding, .checkpointing = true, .micro = micro});
        for (size_t rank = 0; rank < without.size(); ++rank) {
          EXPECT_TRUE(with[rank].values == without[rank].values);
          EXPECT_EQ(with[rank].calls, without[rank].calls);
        }
      }
    }
  }
}

TEST(ActivationCheckpointing, HasTheBitsOfEveryPrecision) {
  for (const PrecisionPolicy policy :
       {PrecisionPolicy::kAutocast, PrecisionPolicy::kBoundary, PrecisionPolicy::kPure}) {
    for (const Sharding sharding : {Sharding::kDdp, Sharding::kZero2, Sharding::kFsdp}) {
      Asked asked{.sharding = sharding, .precision = Precision::kBF16, .policy = policy};
      const Values without = train_words_on(2, asked)[0].values;
      asked.checkpointing = true;
      EXPECT_TRUE(train_words_on(2, asked)[0].values == without)
          << static_cast<int>(policy) << " in mode " << static_cast<int>(sharding);
    }
  }
}

// Eight blocks keep more than six times their input each; with checkpointing the input alone, and
// one block at a time all.
TEST(ActivationCheckpointing, KeepsTheInputsOfUnitsAlone) {
  for (const Sharding sharding : kModes) {
    std::array<int64_t, 2> peaks{};
    const int64_t input = 32 * 64 * 4;
    for (const bool checkpointing : {false, true}) {
      compared_ranks(2, [&](int rank) {
        Accelerator accelerator({.sharding = sharding,
                                 .fsdp = {.activation_checkpointing = checkpointing},
                                 .config_file = ""});
        nn::Sequential model;
        for (int i = 0; i < 8; ++i) model.append<Block>(64);
        accelerator.prepare(model);
        const Tensor x = ones({32, 64});
        memory_stats()->reset_peak();
        const int64_t before = memory_stats()->current(MemoryCategory::kActivation);
        accelerator.backward(model(x).sum());
        if (rank == 0) {
          peaks[checkpointing] = memory_stats()->peak(MemoryCategory::kActivation) - before;
        }
      });
    }
    EXPECT_GT(peaks[0], 8 * 6 * input) << static_cast<int>(sharding);
    EXPECT_LT(peaks[1], (8 + 20) * input) << static_cast<int>(sharding);
  }
}

// A function of the user's own that keeps more than its input.
struct Kept : Function<Kept> {
  static constexpr const char* kName = "kept";
  static Tensor forward(FunctionContext& context, const Tensor& x) {
    const Tensor wide = x.repeat({1, 4});
    context.save(wide);
    return x * 2.0;
  }
  static TensorList backward(FunctionContext& context, Grads dy, const Saved&) {
    const Tensor wide = context.saved(0);
    return {dy[0] * 2.0 + wide.narrow(1, 0, dy[0].size(1)) * 0.0};
  }
};

// What fused ops keep of their own: attention its sums, an MLP what GELU was applied to, a loss the
// gradients that it has calculated.
TEST(ActivationCheckpointing, KeepsNothingOfWhatOpsMake) {
  const NoGradGuard outside;
  const Tensor x = randn({64, 16}), weight = randn({256, 16}), bias = randn({256}),
               out = randn({16, 256}), heads = randn({2, 4, 32, 8}), words = randn({64, 16}),
               targets = randint(0, 64, {64});
  const EnableGradGuard grad;
  using Call = std::function<Tensor(const Tensor&)>;
  const std::vector<std::pair<Tensor, Call>> calls = {
      {x, [&](const Tensor& in) { return linear_gelu(in, weight, bias); }},
      {x, [&](const Tensor& in) { return linear_gelu_linear(in, weight, bias, out, {}); }},
      {heads, [](const Tensor& in) { return scaled_dot_product_attention(in, in, in); }},
      {x, [&](const Tensor& in) { return linear_cross_entropy(in, words, targets); }},
      {x, [](const Tensor& in) { return layer_norm(in, {16}); }},
      {x, [](const Tensor& in) { return dropout(in, 0.5); }},
      {x, [](const Tensor& in) { return Kept::apply(in); }}};
  for (size_t i = 0; i < calls.size(); ++i) {
    SCOPED_TRACE(i);
    const auto& [start, call] = calls[i];
    std::array<Tensor, 2> gradients;
    for (const bool checkpointed : {false, true}) {
      manual_seed(3);
      const Tensor in = start.detach().clone();
      in.set_requires_grad();
      const int64_t before = memory_stats()->current();
      const Tensor result = checkpointed ? checkpoint(call, in) : call(in);
      const int64_t kept = memory_stats()->current() - before - result.nbytes();
      if (checkpointed) {
        EXPECT_EQ(kept, 0);
      }
      // A second one calculates it again.
      for (int turn = 0; turn < 2; ++turn) result.sum().backward({}, /*retain_graph=*/true);
      gradients[checkpointed] = in.grad();
    }
    EXPECT_EQ(gradients[0].to_vector(), gradients[1].to_vector());
  }
}

// Units are found by size in every mode.
TEST(ActivationCheckpointing, TakesUnitsAsSettingsNameThem) {
  const Values without = train_words_on(2, {})[0].values;
  EXPECT_TRUE(train_words_on(2, {.checkpointing = true, .least = 500})[0].values == without);
}

// checkpoint() around calls in a model whose unit is a larger one.
struct ByHand : nn::Module<ByHand> {
  ByHand() : blocks(add<nn::ModuleList>("blocks")) {
    for (int i = 0; i < 3; ++i) blocks.append<Block>(8);
  }
  Tensor forward(const Tensor& x) {
    Tensor y = x;
    for (size_t i = 0; i < blocks.num_children(); ++i) {
      const auto call = [this, i](const Tensor& in) { return blocks.child(i).call_tensor(in); };
      y = again ? checkpoint(call, y) : call(y);
    }
    return y;
  }
  nn::ModuleList& blocks;
  bool again = false;
};

TEST(ActivationCheckpointing, ByHandIsPossibleInEveryMode) {
  const auto train = [](Sharding sharding, std::vector<std::string> wrap, bool again) {
    Values values;
    compared_ranks(2, [&](int rank) {
      manual_seed(5);
      AcceleratorOptions options{.seed = 5, .sharding = sharding, .config_file = ""};
      if (!wrap.empty()) options.fsdp.wrap_modules = wrap;
      Accelerator accelerator(options);
      ByHand model;
      model.again = again;
      optim::SGD optimizer(model.named_parameters(), {.lr = 0.1});
      accelerator.prepare(model, optimizer);
      for (uint64_t step = 0; step < 3; ++step) {
        const Tensor x = randn({4, 8}, {}, RandomStream{step, static_cast<uint64_t>(rank)});
        accelerator.backward((model(x) * model(x)).mean());
        optimizer.step(), optimizer.zero_grad();
      }
      const Values own = whole_values(model);
      if (rank == 0) values = own;
    });
    return values;
  };
  for (const Sharding sharding : kModes) {
    EXPECT_TRUE(train(sharding, {}, true) == train(sharding, {}, false))
        << static_cast<int>(sharding);
  }
  EXPECT_TRUE(train(Sharding::kFsdp, {"none"}, true) == train(Sharding::kFsdp, {"none"}, false));
}

// What dropout gives is kept for the matrix behind it.
struct Dropped : nn::Module<Dropped> {
  Dropped()
      : up(add<nn::Linear>("up", 8, 16)),
        dropout(add<nn::Dropout>("dropout", 0.3)),
        down(add<nn::Linear>("down", 16, 8)) {}
  Tensor forward(const Tensor& x) { return x + down(dropout(up(x))); }
  nn::Linear& up;
  nn::Dropout& dropout;
  nn::Linear& down;
};

TEST(ActivationCheckpointing, DropsAgainWhatTheFirstRunHasDropped) {
  const auto train = [](Sharding sharding, bool checkpointing) {
    Values values;
    compared_ranks(2, [&](int rank) {
      manual_seed(5);
      Accelerator accelerator({.seed = 5,
                               .sharding = sharding,
                               .fsdp = {.activation_checkpointing = checkpointing},
                               .config_file = ""});
      nn::Sequential model;
      for (int i = 0; i < 3; ++i) model.append<Dropped>();
      optim::SGD optimizer(model.named_parameters(), {.lr = 0.1});
      accelerator.prepare(model, optimizer);
      for (uint64_t step = 0; step < 3; ++step) {
        const Tensor x = randn({4, 8}, {}, RandomStream{step, static_cast<uint64_t>(rank)});
        const auto micro = accelerator.accumulate(model);
        accelerator.backward((model(x) * model(x)).mean());
        optimizer.step(), optimizer.zero_grad();
      }
      const Values own = whole_values(model);
      if (rank == 0) values = own;
    });
    return values;
  };
  for (const Sharding sharding : kModes) {
    EXPECT_TRUE(train(sharding, true) == train(sharding, false)) << static_cast<int>(sharding);
  }
}

struct Normed : nn::Module<Normed> {
  Normed() : fc(add<nn::Linear>("fc", 8, 8)), norm(add<nn::BatchNorm1d>("norm", 8)) {}
  Tensor forward(const Tensor& x) { return x + tanh(norm(fc(x))); }
  nn::Linear& fc;
  nn::BatchNorm1d& norm;
};

TEST(ActivationCheckpointing, CountsABatchInRunningStatisticsOnce) {
  const auto buffers_of = [](Sharding sharding, bool checkpointing) {
    std::vector<std::vector<double>> values;
    compared_ranks(2, [&](int rank) {
      manual_seed(5);
      Accelerator accelerator({.seed = 5,
                               .sharding = sharding,
                               .fsdp = {.activation_checkpointing = checkpointing},
                               .config_file = ""});
      nn::Sequential model;
      for (int i = 0; i < 2; ++i) model.append<Normed>();
      optim::SGD optimizer(model.named_parameters(), {.lr = 0.1});
      accelerator.prepare(model, optimizer);
      for (uint64_t step = 0; step < 2; ++step) {
        const Tensor x = randn({4, 8}, {}, RandomStream{step, static_cast<uint64_t>(rank)});
        const auto micro = accelerator.accumulate(model);
        accelerator.backward((model(x) * model(x)).mean());
        optimizer.step(), optimizer.zero_grad();
      }
      if (rank != 0) return;
      for (const auto& [name, buffer] : model.named_buffers()) values.push_back(buffer.to_vector());
    });
    return values;
  };
  for (const Sharding sharding : kModes) {
    const auto values = buffers_of(sharding, true);
    EXPECT_EQ(values.size(), 6u);
    EXPECT_EQ(values, buffers_of(sharding, false)) << static_cast<int>(sharding);
  }
}

TEST(ActivationCheckpointing, CountsABatchOfAllRanksOnce) {
  const auto statistics = [](bool again) {
    std::vector<double> values;
    compared_ranks(2, [&](int rank) {
      nn::BatchNorm1d norm(4);
      norm.set_function([](const nn::BatchNormCall& call) {
        return distributed::sync_batch_norm(call, distributed::world());
      });
      HookHandle handle;
      if (again) handle = norm.checkpoint_calls();
      const Tensor x = randn({5, 4}, {}, RandomStream{7, static_cast<uint64_t>(rank)});
      tanh(norm(x)).sum().backward();
      if (rank != 0) return;
      for (const auto& [name, buffer] : norm.named_buffers()) {
        for (const double value : buffer.to_vector()) values.push_back(value);
      }
    });
    return values;
  };
  EXPECT_EQ(statistics(true), statistics(false));
}

struct Flat : nn::Module<Flat> {
  Flat() : fc(add<nn::Linear>("fc", 1, 1)) {}
  Tensor forward(const Tensor& x) { return fc(x); }
  nn::Linear& fc;
};

TEST(ActivationCheckpointing, WithoutUnitsIsAnErrorOnEveryRank) {
  for (const Sharding sharding : {Sharding::kDdp, Sharding::kFsdp}) {
    compared_ranks(2, [&](int) {
      Accelerator accelerator(
          {.sharding = sharding, .fsdp = {.activation_checkpointing = true}, .config_file = ""});
      Flat model;
      const std::string message = message_of<ConfigError>([&] { accelerator.prepare(model); });
      EXPECT_NE(message.find("Flat has none"), std::string::npos) << message;
      EXPECT_NE(message.find("fsdp_wrap_modules"), std::string::npos) << message;
    });
  }
}

TEST(ActivationCheckpointing, EndsWithTheAccelerator) {
  Words model;
  {
    Accelerator accelerator({.fsdp = {.activation_checkpointing = true}, .config_file = ""});
    accelerator.prepare(model);
    EXPECT_TRUE(model.blocks.child(0).has_hooks());
  }
  EXPECT_FALSE(model.blocks.child(0).has_hooks());
}

}  // namespace
}  // namespace tessera::test_activation_checkpointing
