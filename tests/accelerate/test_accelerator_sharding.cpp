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
  Outcome run;
  for (const auto& batch : loader) {
    auto micro = accelerator.accumulate(model);
    const Tensor logits = model(batch[0]);
    const Tensor loss = cross_entropy(logits.reshape({-1, 131}), batch[1].reshape({-1}));
    run.losses.push_back(loss.item());
    accelerator.backward(loss);
    const Tensor norm = accelerator.clip_grad_norm(model.parameters(), 0.5);
    if (micro.sync_gradients()) run.norms.push_back(norm.item());
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

TEST(AcceleratorSharding, ReplicasOfShardsTrain) {
  const std::vector<Outcome> expected = train_on(4, {});
  const std::vector<Outcome> hybrid = train_on(4, {.sharding = Sharding::kFsdp, .replicas = 2});
  ASSERT_EQ(hybrid.size(), expected.size());
  // A double sum has an order of its own.
  for (size_t i = 0; i < expected[0].values.size(); ++i) {
    for (size_t j = 0; j < expected[0].values[i].size(); ++j) {
      EXPECT_NEAR(hybrid[0].values[i][j], expected[0].values[i][j], 1e-5);
    }
  }
  for (const Outcome& other : hybrid) EXPECT_TRUE(other.values == hybrid[0].values);
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
