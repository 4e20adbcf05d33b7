// Mistakes with sharded models and the Accelerator: typed errors alike on every rank, after which
// training goes on with the bits of a run that made none.
// ctest labels: threads
#include <filesystem>
#include <string>

#include <tessera/core/error.h>

#include "accelerate/sharded_words.h"
#include "message_of.h"

namespace tessera::test_accelerator_sharding_mistakes {
namespace {

using accelerate::Sharding;
using distributed::compared_ranks;

constexpr Sharding kModesOf5[] = {Sharding::kDdp, Sharding::kZero1, Sharding::kZero2,
                                  Sharding::kZero3, Sharding::kFsdp};

struct Session {
  explicit Session(Sharding sharding)
      : accelerator({.seed = 5, .sharding = sharding, .config_file = ""}),
        loader(std::make_shared<Tokens>(36), {.batch_size = 2, .shuffle = true}),
        optimizer(model.named_parameters(), {.lr = 1e-2, .weight_decay = 0.1}) {
    accelerator.prepare(model, optimizer, loader);
  }
  // An epoch, with something in between.
  Values train(const std::function<void(int64_t step)>& between) {
    int64_t step = 0;
    for (const auto& batch : loader) {
      between(step++);
      const auto micro = accelerator.accumulate(model);
      accelerator.backward(
          cross_entropy(model(batch[0]).reshape({-1, 131}), batch[1].reshape({-1})));
      accelerator.clip_grad_norm(model.parameters(), 0.5);
      optimizer.step(), optimizer.zero_grad();
    }
    return whole_values(model);
  }
  Accelerator accelerator;
  Words model;
  data::DataLoader<std::array<Tensor, 2>> loader;
  optim::AdamW optimizer;
};

std::vector<Values> sessions(int ranks, Sharding sharding,
                             const std::function<void(Session&, int64_t step)>& between) {
  std::vector<Values> values(static_cast<size_t>(ranks));
  compared_ranks(ranks, [&](int rank) {
    manual_seed(5);
    Session session(sharding);
    values[static_cast<size_t>(rank)] =
        session.train([&](int64_t step) { between(session, step); });
  });
  return values;
}

// One rank, too: whoever asks for it has memory of a GPU in mind.
TEST(ShardingMistakes, RanksOnTheCpuHaveNothingToOffload) {
  for (const int ranks : {1, 2}) {
    compared_ranks(ranks, [&](int) {
      for (const Sharding sharding : {Sharding::kZero1, Sharding::kZero2, Sharding::kFsdp}) {
        Accelerator accelerator(
            {.sharding = sharding, .offload_optimizer = true, .config_file = ""});
        Words model;
        const std::string text = message_of<UnsupportedError>([&] { accelerator.prepare(model); });
        EXPECT_NE(text.find("which lies there; leave offload out"), std::string::npos) << text;
      }
    });
  }
}

std::string empty_folder(const std::string& name) {
  const std::string folder = testing::TempDir() + "sharding_mistakes_" + name;
  std::filesystem::remove_all(folder);
  return folder;
}

// Saved by a model of other shapes and names, in the midst of an epoch.
TEST(ShardingMistakes, AnotherModelsCheckpointIsRefusedAndTrainingGoesOn) {
  const std::string folder = empty_folder("state"), weights = empty_folder("model");
  compared_ranks(2, [&](int) {
    Accelerator accelerator({.sharding = Sharding::kFsdp, .config_file = ""});
    Net other;
    optim::AdamW optimizer(other.named_parameters(), {.lr = 1e-2});
    data::DataLoader loader(std::make_shared<Tokens>(8), {.batch_size = 2});
    accelerator.prepare(other, optimizer, loader);
    accelerator.save_state(folder);
    accelerate::save_model(other, weights);
  });
  for (const Sharding sharding : kModesOf5) {
    SCOPED_TRACE(static_cast<int>(sharding));
    const std::vector<Values> expected = sessions(3, sharding, [](Session&, int64_t) {});
    const std::vector<Values> own = sessions(3, sharding, [&](Session& session, int64_t step) {
      if (step != 2) return;
      const std::string message =
          message_of<Error>([&] { session.accelerator.load_state(folder); });
      EXPECT_NE(message.find("blocks.0"), std::string::npos) << message;
      EXPECT_THROW(accelerate::load_model(session.model, weights), Error);
    });
    EXPECT_TRUE(own == expected);
  }
}

TEST(ShardingMistakes, MeshesThatDoNotFitTheRanksAreConfigErrors) {
  compared_ranks(4, [](int) {
    manual_seed(5);
    Words model;
    for (const auto& [replicas, shards] :
         {std::pair{3, 1}, {2, 3}, {8, 1}, {1, 3}, {4, 1}, {2, 4}}) {
      AcceleratorOptions options{.sharding = Sharding::kFsdp, .config_file = ""};
      if (replicas > 1) options.dp_replicate_size = replicas;
      if (shards > 1) options.dp_shard_size = shards;
      const std::string message = message_of<ConfigError>([&] {
        Accelerator accelerator(options);
        accelerator.prepare(model);
      });
      EXPECT_FALSE(message.empty()) << replicas << " x " << shards;
      // Of what nobody said nothing is told.
      EXPECT_EQ(message.find("(default)"), std::string::npos) << message;
    }
    Accelerator accelerator(
        {.sharding = Sharding::kFsdp, .dp_replicate_size = 2, .config_file = ""});
    accelerator.prepare(model);
    EXPECT_TRUE(distributed::is_dtensor(model.embedding.weight));
  });
}

// A second Accelerator, in any mode, and what it does to the first one's model: nothing.
TEST(ShardingMistakes, ASecondAcceleratorLeavesTheFirstAsItWas) {
  for (const Sharding sharding :
       {Sharding::kZero1, Sharding::kZero2, Sharding::kZero3, Sharding::kFsdp}) {
    const std::vector<Values> expected = sessions(2, sharding, [](Session&, int64_t) {});
    for (const Sharding next : kModesOf5) {
      SCOPED_TRACE(testing::Message()
                   << static_cast<int>(sharding) << " and " << static_cast<int>(next));
      const std::vector<Values> own = sessions(2, sharding, [&](Session& session, int64_t step) {
        if (step != 1) return;
        Accelerator second({.seed = 5, .sharding = next, .config_file = ""});
        EXPECT_THROW(second.prepare(session.model), ConfigError);
      });
      EXPECT_TRUE(own == expected);
    }
  }
}

}  // namespace
}  // namespace tessera::test_accelerator_sharding_mistakes
