// ctest labels: threads
// Whole trainings: the same bits again, after a stop, and beside another training.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <thread>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/core/context.h>
#include <tessera/core/state/safetensors.h>
#include <tessera/data/token_dataset.h>
#include <tessera/nn/models/gpt2.h>
#include <tessera/optim/clip.h>
#include <tessera/optim/optimizers.h>
#include <tessera/optim/schedule.h>

namespace tessera::nn::models::test_training {
namespace {

constexpr int64_t kBatch = 3, kContext = 16;

// A text of 4000 tokens with some order in it.
data::TokenArray make_tokens() {
  std::vector<data::TokenId> ids(4000);
  uint32_t state = 1;
  for (size_t i = 0; i < ids.size(); ++i) {
    state = state * 1664525u + 1013904223u;
    ids[i] = static_cast<data::TokenId>(i % 7 == 0 ? state >> 27 : (i * i) % 31);
  }
  return data::TokenArray::from_ids(ids, 32);
}

// A small GPT with dropout, AdamW, clipping and a schedule.
struct Training {
  explicit Training(uint64_t seed, DType dtype = kF32)
      : model((manual_seed(seed), GptConfig{.vocab_size = 32,
                                            .context = kContext,
                                            .width = 32,
                                            .layers = 2,
                                            .heads = 2,
                                            .dropout = 0.1})),
        windows(make_tokens(), kContext, seed, kBatch),
        optimizer((model.to(dtype), model.named_parameters()), {.lr = 1e-2}),
        schedule(optimizer, {.warmup = 3, .total = 12, .min_lr = 1e-3}) {}

  // The losses of steps up to `end`.
  std::vector<double> run_to(int64_t end) {
    std::vector<double> losses;
    for (; step < end; ++step) {
      const data::TokenExample batch = windows.batch(step, kBatch);
      const Tensor loss = model(batch.inputs, batch.targets).loss;
      loss.backward();
      optim::clip_grad_norm(model.parameters(), 1, {.fold_into = &optimizer});
      optimizer.step();
      schedule.step();
      optimizer.zero_grad();
      losses.push_back(loss.item());
    }
    return losses;
  }

  void save(const std::string& path) const {
    StateDict state;
    state.merge("model.", model.state_dict());
    state.merge("optimizer.", optimizer.state_dict());
    state.merge("schedule.", schedule.state_dict());
    state.set("step", scalar_tensor(step, kI64));
    state.set("random.next_stream",
              scalar_tensor(static_cast<int64_t>(random_state().next_stream), kI64));
    save_safetensors(path, state.to_map());
  }
  void load(const std::string& path) {
    const StateDict state = StateDict::from_map(load_safetensors(path));
    model.load_state_dict(state.with_prefix("model."));
    optimizer.load_state_dict(state.with_prefix("optimizer."));
    schedule.load_state_dict(state.with_prefix("schedule."));
    step = state.at("step").item<int64_t>();
    random_state().next_stream =
        static_cast<uint64_t>(state.at("random.next_stream").item<int64_t>());
  }

  Gpt model;
  data::RandomWindows windows;
  optim::AdamW optimizer;
  optim::CosineSchedule schedule;
  int64_t step = 0;
};

TEST(Training, TheSameSeedGivesTheSameBits) {
  const auto first = Training(1).run_to(8), second = Training(1).run_to(8);
  EXPECT_EQ(first, second);
  EXPECT_LT(first.back(), first.front()) << "and it learns";
  EXPECT_NE(first, Training(2).run_to(8));
}

TEST(Training, AfterAStopItGoesOnBitForBit) {
  const std::string path = (std::filesystem::path(testing::TempDir()) /
                            ("tessera_training_" + std::to_string(getpid()) + ".safetensors"))
                               .string();
  for (const DType dtype : {kF32, kBF16}) {
    Training whole(1, dtype);
    whole.run_to(4);
    const auto expected = whole.run_to(8);
    Training first(1, dtype);
    first.run_to(4);
    first.save(path);
    Training resumed(99, dtype);  // everything but the data's seed comes from the file
    resumed.windows = data::RandomWindows(make_tokens(), kContext, 1, kBatch);
    manual_seed(1);
    resumed.load(path);
    EXPECT_EQ(resumed.run_to(8), expected) << name_of(dtype);
  }
  std::filesystem::remove(path);
}

TEST(Training, TwoInOneProcessDoNotSeeEachOther) {
  const auto alone_1 = Training(1).run_to(6), alone_2 = Training(2).run_to(6);
  std::vector<double> beside_1, beside_2;
  const auto run = [](uint64_t seed, std::vector<double>& losses) {
    Context context;
    const ContextGuard guard(context);
    losses = Training(seed).run_to(6);
  };
  std::thread other([&] { run(2, beside_2); });
  run(1, beside_1);
  other.join();
  EXPECT_EQ(beside_1, alone_1);
  EXPECT_EQ(beside_2, alone_2);
}

}  // namespace
}  // namespace tessera::nn::models::test_training
