// The facade trains in every mode of sharding with the same loop and the same bits.
// ctest labels: threads
#include "accelerate/sharded_words.h"
#include "thinned.h"

namespace tessera::test_accelerator_sharding {
namespace {

using accelerate::Sharding;
using distributed::compared_ranks;
using distributed::is_dtensor;

struct Outcome {
  std::vector<double> losses, norms;
  std::vector<std::vector<float>> values;
  friend bool operator==(const Outcome&, const Outcome&) = default;
};

struct Case {
  Sharding sharding = Sharding::kDdp;
  int micro = 1;
  bool optimizer_first = false;
  std::optional<Precision> precision = {};
  std::optional<PrecisionPolicy> policy = {};
  std::optional<int64_t> replicas = {};
  bool clips_parts = false;  // the blocks' parameters, then two of the others, instead of all
  int double_sum = 0;        // in one process: as two replicas of so many ranks each add up
};

// Of one process that has the batches of all ranks: those of the two replicas add up apart.
class DoubleSum {
 public:
  DoubleSum(const nn::ModuleBase& model, int shards, int micro)
      : parameters_(model.parameters()), shards_(shards), micro_(micro) {}
  void after_backward() {
    const NoGradGuard no_grad;
    const int done = ++done_ % micro_;
    if (done == 0) {  // the sum is divided
      for (size_t i = 0; i < others_.size(); ++i) {
        add_(parameters_[i].grad(), others_[i] * (1.0 / micro_));
      }
      others_.clear();
    } else if (done % shards_ == 0) {
      others_.resize(parameters_.size());
      for (size_t i = 0; i < parameters_.size(); ++i) {
        const Tensor& sum = parameters_[i].grad();
        const Tensor other = others_[i].defined() ? others_[i] : zeros_like(sum);
        others_[i] = sum.clone();
        copy_(sum, other);
      }
    }
  }

 private:
  const TensorList parameters_;
  const int shards_, micro_;
  int done_ = 0;
  TensorList others_;
};

Outcome train(const Case& one) {
  manual_seed(5);
  Words model;
  Accelerator accelerator({.mixed_precision = one.precision,
                           .precision_policy = one.policy,
                           .gradient_accumulation_steps = one.micro,
                           .seed = 5,
                           .sharding = one.sharding,
                           .dp_replicate_size = one.replicas,
                           .config_file = ""});
  Tokens data(48);
  data::DataLoader loader(data, {.batch_size = 2, .shuffle = true});
  std::unique_ptr<optim::AdamW> optimizer;
  const auto make = [&] {
    optimizer = std::make_unique<optim::AdamW>(
        model.named_parameters(), optim::AdamW::Options{.lr = 1e-2, .weight_decay = 0.1});
  };
  if (one.optimizer_first) make();
  accelerator.prepare(model);
  if (!one.optimizer_first) make();
  accelerator.prepare(*optimizer, loader);
  DoubleSum double_sum(model, one.double_sum, one.micro);
  const TensorList blocks = model.blocks.parameters();
  Outcome run;
  for (const auto& batch : loader) {
    auto micro = accelerator.accumulate(model);
    const Tensor logits = model(batch[0]);
    const Tensor loss = cross_entropy(logits.reshape({-1, 131}), batch[1].reshape({-1}));
    run.losses.push_back(loss.item());
    accelerator.backward(loss);
    if (one.double_sum > 0) double_sum.after_backward();
    TensorList norms;
    if (one.clips_parts) {
      norms.push_back(accelerator.clip_grad_norm(blocks, 0.05));
      norms.push_back(
          accelerator.clip_grad_norm(TensorList{model.norm.bias, model.embedding.weight}, 0.2));
    } else {
      norms.push_back(accelerator.clip_grad_norm(model.parameters(), 0.5));
    }
    for (const Tensor& norm : norms) {
      if (micro.sync_gradients()) run.norms.push_back(norm.item());
    }
    optimizer->step();
    optimizer->zero_grad();
  }
  run.values = whole_values(model);
  return run;
}

std::vector<Outcome> train_on(int ranks, const Case& one) {
  std::vector<Outcome> runs(static_cast<size_t>(ranks));
  compared_ranks(ranks, [&](int rank) { runs[static_cast<size_t>(rank)] = train(one); });
  return runs;
}

TEST(AcceleratorSharding, EveryModeHasTheBitsOfReplicas) {
  for (const int ranks : tests::thinned({2, 3}, 2)) {
    const std::vector<Outcome> expected = train_on(ranks, {});
    for (const Sharding sharding :
         {Sharding::kZero1, Sharding::kZero2, Sharding::kZero3, Sharding::kFsdp}) {
      for (const bool first : {false, true}) {
        EXPECT_TRUE(train_on(ranks, {.sharding = sharding, .optimizer_first = first}) == expected)
            << ranks << " ranks, mode " << static_cast<int>(sharding);
      }
    }
  }
}

constexpr Sharding kSharded[] = {Sharding::kZero1, Sharding::kZero2, Sharding::kZero3,
                                 Sharding::kFsdp};

TEST(AcceleratorSharding, EveryPrecisionHasTheBitsOfReplicas) {
  for (const Precision precision : {Precision::kBF16, Precision::kFP16}) {
    for (const PrecisionPolicy policy :
         {PrecisionPolicy::kAutocast, PrecisionPolicy::kBoundary, PrecisionPolicy::kPure}) {
      const Case one{.precision = precision, .policy = policy};
      const std::vector<Outcome> expected = train_on(2, one);
      for (const Sharding sharding : kSharded) {
        SCOPED_TRACE(testing::Message()
                     << "precision " << static_cast<int>(precision) << " policy "
                     << static_cast<int>(policy) << " mode " << static_cast<int>(sharding));
        Case sharded = one;
        sharded.sharding = sharding;
        const std::vector<Outcome> outcome = train_on(2, sharded);
        EXPECT_EQ(outcome[0].losses, expected[0].losses);
        EXPECT_EQ(outcome[0].norms, expected[0].norms);
        EXPECT_TRUE(outcome == expected);
      }
    }
  }
}

// The sum over ranks and micro-batches is one sum, however many of each there are: what reduces
// every micro-batch goes on with it, and its order is that of the batches.
TEST(AcceleratorSharding, RanksTimesMicroBatchesIsOneHash) {
  for (const Sharding sharding : {Sharding::kZero2, Sharding::kZero3, Sharding::kFsdp}) {
    std::vector<Outcome> outcomes;
    for (const auto& [ranks, micro] :
         tests::thinned<std::pair<int, int>>({{1, 12}, {2, 6}, {3, 4}, {4, 3}, {6, 2}}, 2)) {
      std::vector<Outcome> runs = train_on(ranks, {.sharding = sharding, .micro = micro});
      outcomes.push_back(runs[0]);
      // Dealt in turn: rank r has the batches r, r + ranks...
      std::vector<double> losses;
      for (size_t turn = 0; turn < runs[0].losses.size(); ++turn) {
        for (const Outcome& run : runs) losses.push_back(run.losses[turn]);
      }
      outcomes.back().losses = losses;
      EXPECT_EQ(outcomes.back().losses, outcomes.front().losses) << ranks << " x " << micro;
      EXPECT_EQ(outcomes.back().norms, outcomes.front().norms) << ranks << " x " << micro;
      EXPECT_TRUE(outcomes.back().values == outcomes.front().values) << ranks << " x " << micro;
    }
  }
}

TEST(AcceleratorSharding, Zero1AddsUpLocallyAsReplicasDo) {
  const std::vector<Outcome> expected = train_on(2, {.micro = 3});
  EXPECT_TRUE(train_on(2, {.sharding = Sharding::kZero1, .micro = 3}) == expected);
}

// Losses, norms and parameters of ranks that have the batches in turn, beside one process.
void expect_one_process(const std::vector<Outcome>& runs, const Outcome& expected) {
  std::vector<double> losses;
  for (size_t turn = 0; turn < runs[0].losses.size(); ++turn) {
    for (const Outcome& run : runs) losses.push_back(run.losses[turn]);
  }
  EXPECT_EQ(losses, expected.losses);
  for (const Outcome& run : runs) {
    EXPECT_EQ(run.norms, expected.norms);
    EXPECT_TRUE(run.values == expected.values);
  }
}

TEST(AcceleratorSharding, ReplicasOfShardsHaveTheBitsOfTheirDoubleSum) {
  for (const int micro : {1, 2}) {  // so that dividing rounds nothing
    const Outcome expected = train_on(1, {.micro = 4 * micro, .double_sum = 2})[0];
    EXPECT_FALSE(train_on(1, {.micro = 4 * micro})[0].values == expected.values);
    for (const Sharding sharding : {Sharding::kZero3, Sharding::kFsdp}) {
      SCOPED_TRACE(testing::Message()
                   << "mode " << static_cast<int>(sharding) << ", " << micro << " micro-batches");
      expect_one_process(train_on(4, {.sharding = sharding, .micro = micro, .replicas = 2}),
                         expected);
    }
  }
}

TEST(AcceleratorSharding, PartsOfTheParametersAreClippedAsInOneProcess) {
  Outcome expected = train_on(1, {.micro = 2, .clips_parts = true})[0];
  EXPECT_FALSE(train_on(1, {.micro = 2})[0].values == expected.values);
  expect_one_process(train_on(2, {.clips_parts = true}), expected);
  const std::vector<Outcome> halves =
      train_on(2, {.precision = Precision::kFP16, .clips_parts = true});
  for (const Sharding sharding : kSharded) {
    SCOPED_TRACE(testing::Message() << "mode " << static_cast<int>(sharding));
    expect_one_process(train_on(2, {.sharding = sharding, .clips_parts = true}), expected);
    EXPECT_TRUE(
        train_on(2, {.sharding = sharding, .precision = Precision::kFP16, .clips_parts = true}) ==
        halves);
  }
  expected = train_on(1, {.micro = 4, .clips_parts = true, .double_sum = 2})[0];
  expect_one_process(train_on(4, {.sharding = Sharding::kFsdp, .replicas = 2, .clips_parts = true}),
                     expected);
}

TEST(AcceleratorSharding, AStateDictIsWholeOnTheFirstRank) {
  for (const Sharding sharding : kSharded) {
    compared_ranks(2, [&](int rank) {
      manual_seed(5);
      Words model, plain;
      Accelerator accelerator({.sharding = sharding, .config_file = ""});
      manual_seed(5);
      accelerator.prepare(model);
      const StateDict state = accelerator.get_state_dict(model);
      if (rank != 0) {
        EXPECT_TRUE(state.empty());
        return;
      }
      ASSERT_EQ(state.size(), plain.state_dict().size());
      for (const auto& [name, tensor] : plain.state_dict()) {
        EXPECT_EQ(state.at(name).to_vector<float>(), tensor.to_vector<float>()) << name;
      }
    });
  }
}

TEST(AcceleratorSharding, ParametersAreCountedAsTheWholeModels) {
  const int64_t expected = Words().num_parameters();
  for (const Sharding sharding : kSharded) {
    compared_ranks(3, [&](int) {
      Words model;
      Accelerator accelerator({.sharding = sharding, .config_file = ""});
      accelerator.prepare(model);
      EXPECT_EQ(model.num_parameters(), expected);
    });
  }
}

TEST(AcceleratorSharding, ParametersAreShardsAndTheModeSaysSo) {
  compared_ranks(2, [](int) {
    Words model;
    Accelerator accelerator({.sharding = Sharding::kFsdp, .config_file = ""});
    accelerator.prepare(model);
    for (const auto& [name, tensor] : model.named_parameters()) {
      EXPECT_TRUE(is_dtensor(tensor)) << name;
    }
    const std::string text = accelerator.describe();
    EXPECT_NE(text.find("fully_shard on mesh(dp_shard=2)"), std::string::npos) << text;
    EXPECT_NE(text.find("blocks.2"), std::string::npos) << text;
  });
}

}  // namespace
}  // namespace tessera::test_accelerator_sharding
