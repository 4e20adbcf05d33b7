// A state that is saved in one mode on some ranks goes on in every other mode on any other number
// of ranks: values and optimizer states are the same, and so are the next five steps.
// ctest labels: threads
#include <cmath>
#include <filesystem>
#include <map>
#include <string>

#include <tessera/distributed/checkpoint/full_state.h>

#include "accelerate/sharded_words.h"
#include "thinned.h"

namespace tessera::test_shard_resume {
namespace {

using accelerate::Sharding;
using distributed::compared_ranks;

constexpr int kMicroBatches = 4;  // of a step, of all ranks
constexpr int64_t kSavedAfter = 2, kGoesOn = 5;

struct Layout {
  int ranks;
  Sharding sharding;
  int64_t replicas = 1;
  std::string name() const {
    static const char* const names[] = {"ddp", "zero1", "zero2", "zero3", "fsdp"};
    const char* mode = replicas > 1 ? "hsdp" : names[static_cast<int>(sharding)];
    return mode + std::string(" on ") + std::to_string(ranks);
  }
};

std::vector<Layout> layouts() {
  std::vector<Layout> all;
  for (const int ranks : {1, 2, 4}) {
    for (const Sharding sharding :
         {Sharding::kDdp, Sharding::kZero1, Sharding::kZero2, Sharding::kZero3, Sharding::kFsdp}) {
      all.push_back({ranks, sharding});
    }
  }
  all.push_back({4, Sharding::kFsdp, 2});
  return all;
}

// Two blocks that are units, rows that do not divide, a head that is an embedding.
struct Small : nn::Module<Small> {
  Small()
      : embedding(add<nn::Embedding>("embedding", 13, 6)), blocks(add<nn::ModuleList>("blocks")) {
    for (int i = 0; i < 2; ++i) blocks.append<Block>(6);
  }
  Tensor forward(const Tensor& tokens) {
    Tensor x = embedding(tokens);
    for (size_t i = 0; i < blocks.num_children(); ++i) x = blocks.child(i).call_tensor(x);
    return matmul(x, embedding.weight.t());
  }
  nn::Embedding& embedding;
  nn::ModuleList& blocks;
};

class Letters : public data::Dataset<std::array<Tensor, 2>> {
 public:
  int64_t size() const override { return kMicroBatches * (kSavedAfter + kGoesOn); }
  std::array<Tensor, 2> get(int64_t index) const override {
    const auto at = static_cast<uint64_t>(index);
    return {randint(0, 13, {3}, kI64, RandomStream{41, at}),
            randint(0, 13, {3}, kI64, RandomStream{42, at})};
  }
};

using Elements = std::map<std::string, std::vector<float>>;
struct Stage {
  Elements loaded;  // values and states, before the first step
  Elements ended;
};

Elements elements_of(const StateDict& state) {
  Elements elements;
  for (const auto& [name, tensor] : distributed::full_state_dict(state)) {
    elements[name] = tensor.to(kF32).to_vector<float>();
  }
  return elements;
}

// Rank 0's.
Stage train_in(const Layout& layout, const std::string& load, int64_t steps,
               const std::string& save) {
  Stage stage;
  compared_ranks(layout.ranks, [&](int rank) {
    manual_seed(5);
    AcceleratorOptions options{.gradient_accumulation_steps = kMicroBatches / layout.ranks,
                               .sync_each_batch = true,
                               .seed = 5,
                               .sharding = layout.sharding,
                               .config_file = ""};
    if (layout.replicas > 1) options.dp_replicate_size = layout.replicas;
    Accelerator accelerator(options);
    Small model;
    optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-2, .weight_decay = 0.1});
    data::DataLoader loader(std::make_shared<Letters>(), {.batch_size = 1, .shuffle = true});
    accelerator.prepare(model, optimizer, loader);
    if (!load.empty()) accelerator.load_state(load);
    const auto state = [&] {
      Elements all = elements_of(model.state_dict());
      all.merge(elements_of(optimizer.state_dict()));
      return all;
    };
    const Elements loaded = state();
    int64_t done = 0;
    for (const auto& batch : loader) {
      const auto micro = accelerator.accumulate(model);
      accelerator.backward(
          cross_entropy(model(batch[0]).reshape({-1, 13}), batch[1].reshape({-1})));
      accelerator.clip_grad_norm(model.parameters(), 0.5);
      optimizer.step();
      optimizer.zero_grad();
      if (micro.sync_gradients() && ++done == steps) break;
    }
    EXPECT_EQ(done, steps);
    if (!save.empty()) accelerator.save_state(save);
    const Elements ended = state();
    if (rank == 0) stage = {loaded, ended};
  });
  return stage;
}

void expect_near(const Elements& own, const Elements& expected) {
  ASSERT_EQ(own.size(), expected.size());
  for (const auto& [name, values] : expected) {
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_NEAR(own.at(name)[i], values[i], 1e-5 * std::max(1.f, std::abs(values[i]))) << name;
    }
  }
}

TEST(ShardResume, EveryLayoutGoesOnInEveryOther) {
  const Stage whole = train_in({1, Sharding::kDdp}, "", kSavedAfter + kGoesOn, "");
  const std::string folder = testing::TempDir() + "shard_resume";
  for (const Layout& from : tests::thinned(layouts(), 4)) {
    std::filesystem::remove_all(folder);
    const Stage saved = train_in(from, "", kSavedAfter, folder);
    ASSERT_GT(saved.ended.size(), 30u);
    const Stage alone = train_in({1, Sharding::kDdp}, folder, kGoesOn, "");
    for (const Layout& into : tests::thinned(layouts(), 3)) {
      SCOPED_TRACE(from.name() + " into " + into.name());
      const Stage stage = train_in(into, folder, kGoesOn, "");
      EXPECT_TRUE(stage.loaded == saved.ended);
      // Replicas of shards add in an order of their own.
      if (into.replicas > 1) {
        expect_near(stage.ended, alone.ended);
      } else {
        EXPECT_TRUE(stage.ended == alone.ended);
      }
    }
    if (from.replicas == 1) {
      EXPECT_TRUE(alone.ended == whole.ended) << from.name();
    } else {
      expect_near(alone.ended, whole.ended);
    }
  }
}

}  // namespace
}  // namespace tessera::test_shard_resume
