// N ranks with M micro-batches each have the bits of one process that accumulates N * M, in every
// mode that reduces each micro-batch: losses, norms, parameters, also across a resume on another
// number of ranks.
// ctest labels: threads
#include <filesystem>
#include <string>
#include <vector>

#include <tessera/nn/models/gpt2.h>

#include "accelerate/sharded_words.h"
#include "thinned.h"

namespace tessera::test_accelerator_one_hash {
namespace {

using accelerate::Sharding;
using distributed::compared_ranks;

constexpr Sharding kEveryWay[] = {Sharding::kDdp, Sharding::kZero1, Sharding::kZero2,
                                  Sharding::kZero3, Sharding::kFsdp};
constexpr int kWindow = 12;  // micro-batches of a step, of all ranks
constexpr int kSteps = 3;

// Nothing divides by the ranks; the head is the embedding.
const nn::models::GptConfig kOddGpt{
    .vocab_size = 131, .context = 6, .width = 90, .layers = 2, .heads = 3, .dropout = 0.1};

struct Hashed {
  std::vector<double> losses, norms;
  std::vector<std::vector<float>> values;
};

struct Leg {
  int64_t from = 0, until = kSteps;  // steps
  std::string load = {}, save = {};
  bool clears = true;
};

Hashed train_part(Sharding sharding, int ranks, const Leg& leg) {
  manual_seed(5);
  Accelerator accelerator({.gradient_accumulation_steps = kWindow / ranks,
                           .sync_each_batch = true,
                           .seed = 5,
                           .sharding = sharding,
                           .config_file = ""});
  nn::models::Gpt model(kOddGpt);
  optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-2, .weight_decay = 0.1});
  data::DataLoader loader(std::make_shared<Tokens>(kSteps * kWindow),
                          {.batch_size = 1, .shuffle = true});
  accelerator.prepare(model, optimizer, loader);
  if (!leg.load.empty()) accelerator.load_state(leg.load);
  Hashed run;
  int64_t done = leg.from;
  for (const auto& batch : loader) {
    const auto micro = accelerator.accumulate(model);
    const Tensor loss = model(batch[0], batch[1]).loss;
    run.losses.push_back(loss.item());
    accelerator.backward(loss);
    const Tensor norm = accelerator.clip_grad_norm(model.parameters(), 0.5);
    if (micro.sync_gradients()) run.norms.push_back(norm.item());
    optimizer.step();
    if (leg.clears) optimizer.zero_grad();
    if (micro.sync_gradients() && ++done == leg.until) break;
  }
  EXPECT_EQ(done, leg.until);
  if (!leg.save.empty()) accelerator.save_state(leg.save);
  run.values = whole_values(model);
  return run;
}

// The first rank's, with the losses of all in the order of the batches: they are dealt in turn.
Hashed train_on(Sharding sharding, int ranks, const Leg& leg = {}) {
  std::vector<Hashed> runs(static_cast<size_t>(ranks));
  compared_ranks(
      ranks, [&](int rank) { runs[static_cast<size_t>(rank)] = train_part(sharding, ranks, leg); });
  Hashed all = runs[0];
  all.losses.clear();
  for (size_t turn = 0; turn < runs[0].losses.size(); ++turn) {
    for (const Hashed& run : runs) all.losses.push_back(run.losses[turn]);
  }
  for (const Hashed& run : runs) {
    EXPECT_EQ(run.norms, all.norms);
    EXPECT_TRUE(run.values == all.values);
  }
  return all;
}

TEST(OneHash, RanksTimesMicroBatchesIsOneProcessInEveryMode) {
  const Hashed expected = train_on(Sharding::kDdp, 1);
  ASSERT_EQ(expected.losses.size(), kSteps * kWindow);
  ASSERT_EQ(expected.norms.size(), kSteps);
  for (const double norm : expected.norms) EXPECT_GT(norm, 0.5) << "clips nothing";
  for (const Sharding sharding : kEveryWay) {
    for (const int ranks : tests::thinned({1, 2, 3, 4, 6}, 2)) {
      SCOPED_TRACE(testing::Message() << "mode " << static_cast<int>(sharding) << " on " << ranks);
      const Hashed run = train_on(sharding, ranks);
      EXPECT_EQ(run.losses, expected.losses);
      EXPECT_EQ(run.norms, expected.norms);
      EXPECT_TRUE(run.values == expected.values);
    }
  }
}

TEST(OneHash, AResumeOnOtherRanksInAnotherModeGoesOn) {
  const Hashed expected = train_on(Sharding::kDdp, 1);
  const std::string folder = testing::TempDir() + "one_hash_state";
  for (const auto& [from, ranks] : tests::thinned<std::pair<Sharding, int>>(
           {{Sharding::kDdp, 4}, {Sharding::kZero1, 3}, {Sharding::kFsdp, 6}}, 3)) {
    std::filesystem::remove_all(folder);
    const Hashed begun = train_on(from, ranks, {.until = 2, .save = folder});
    EXPECT_TRUE(std::equal(begun.losses.begin(), begun.losses.end(), expected.losses.begin()));
    for (const auto& [into, others] :
         tests::thinned<std::pair<Sharding, int>>({{Sharding::kDdp, 1},
                                                   {Sharding::kDdp, 3},
                                                   {Sharding::kZero1, 6},
                                                   {Sharding::kZero2, 2},
                                                   {Sharding::kZero3, 4}},
                                                  2)) {
      SCOPED_TRACE(testing::Message() << static_cast<int>(from) << " on " << ranks << " into "
                                      << static_cast<int>(into) << " on " << others);
      const Hashed run = train_on(into, others, {.from = 2, .load = folder});
      EXPECT_TRUE(std::equal(run.losses.begin(), run.losses.end(), expected.losses.end() - kWindow,
                             expected.losses.end()));
      EXPECT_EQ(run.norms.back(), expected.norms.back());
      EXPECT_TRUE(run.values == expected.values);
    }
  }
}

// Nobody clears gradients: each window's mean is added to what is there.
TEST(OneHash, WindowsThatAddUpDoSoInEveryMode) {
  const Hashed expected = train_on(Sharding::kDdp, 1, {.clears = false});
  for (const Sharding sharding : kEveryWay) {
    for (const int ranks : tests::thinned({2, 3}, 2)) {
      SCOPED_TRACE(testing::Message() << "mode " << static_cast<int>(sharding) << " on " << ranks);
      const Hashed run = train_on(sharding, ranks, {.clears = false});
      EXPECT_EQ(run.losses, expected.losses);
      EXPECT_EQ(run.norms, expected.norms);
      EXPECT_TRUE(run.values == expected.values);
    }
  }
}

}  // namespace
}  // namespace tessera::test_accelerator_one_hash
