// Texts of different lengths from a model that ranks hold in parts: with the others' calls, or an
// error that says what the ranks did.
// ctest labels: threads
#include <tessera/accelerate/accelerator.h>
#include <tessera/core/random.h>
#include <tessera/distributed/mesh/dtensor.h>
#include <tessera/nn/models/generation.h>
#include <tessera/optim/optimizers.h>

#include "distributed/compared_ranks.h"
#include "message_of.h"

namespace tessera::nn::models::test_gpt2_generation {
namespace {

using accelerate::Sharding;

const GptConfig kLetters{.vocab_size = 29, .context = 12, .width = 16, .layers = 3, .heads = 2};

GenerateOptions wanted(int rank) {
  return {.max_tokens = 3 + 7 * rank, .temperature = 0.7, .seed = static_cast<uint64_t>(rank)};
}
std::vector<int64_t> prompt_of(int rank) {
  return std::vector<int64_t>(static_cast<size_t>(2 + rank), 5 + rank);
}

TEST(Gpt2Generation, RanksMakeTextsOfTheirOwnLengthTogether) {
  for (const Sharding sharding :
       {Sharding::kDdp, Sharding::kZero1, Sharding::kZero2, Sharding::kZero3, Sharding::kFsdp}) {
    distributed::compared_ranks(3, [&](int rank) {
      manual_seed(4);
      Gpt plain(kLetters), model(kLetters);
      const auto expected = generate(plain, prompt_of(rank), wanted(rank));
      EXPECT_EQ(static_cast<int>(expected.size()), 3 + 7 * rank);
      Accelerator accelerator({.sharding = sharding, .config_file = ""});
      accelerator.prepare(model);
      GenerateOptions options = wanted(rank);
      options.together = [](bool wants) { return distributed::any_rank(wants); };
      EXPECT_EQ(generate(model, prompt_of(rank), options), expected)
          << "rank " << rank << " in mode " << static_cast<int>(sharding);
      // None wants any.
      options.max_tokens = 0;
      EXPECT_TRUE(generate(model, prompt_of(rank), options).empty());
    });
  }
}

TEST(Gpt2Generation, ATextEndsWhereTheCallerSaysSo) {
  manual_seed(4);
  Gpt model(kLetters);
  std::vector<int64_t> seen;
  const auto made = generate(model, prompt_of(1), wanted(1), [&](int64_t token) {
    seen.push_back(token);
    return seen.size() < 3;
  });
  EXPECT_EQ(made.size(), 3U);
  EXPECT_EQ(seen, made);
}

// A folder that rank 0 alone sees, tied weights, and blocks that are calculated again.
TEST(Gpt2Generation, APretrainedModelOfRankZeroIsTrainedWithCheckpointsInEveryMode) {
  const std::string folder = testing::TempDir() + "gpt2_of_rank_zero";
  manual_seed(8);
  Gpt(kLetters).save_pretrained(folder);
  const Tensor tokens = randint(0, 29, {4, 9}, kI64, RandomStream{3, 0});
  for (const Sharding sharding :
       {Sharding::kDdp, Sharding::kZero1, Sharding::kZero2, Sharding::kZero3, Sharding::kFsdp}) {
    distributed::compared_ranks(2, [&](int rank) {
      std::vector<std::vector<float>> losses;
      for (const bool economical : {false, true}) {
        std::unique_ptr<Gpt> model;
        if (!economical || rank == 0) {
          model = Gpt::from_pretrained(folder);
        } else {
          const nn::ParameterDefaultsGuard without_memory({.device = kMeta});
          model = std::make_unique<Gpt>(kLetters);
        }
        Accelerator accelerator({.seed = 1,
                                 .sharding = sharding,
                                 .fsdp = {.activation_checkpointing = economical,
                                          .cpu_ram_efficient_loading = economical},
                                 .config_file = ""});
        optim::SGD optimizer(model->named_parameters(), {.lr = 0.1});
        accelerator.prepare(*model, optimizer);
        losses.emplace_back();
        for (int step = 0; step < 3; ++step) {
          const Tensor loss = (*model)(tokens, tokens).loss;
          losses.back().push_back(static_cast<float>(loss.item()));
          accelerator.backward(loss);
          optimizer.step(), optimizer.zero_grad();
        }
        EXPECT_TRUE(model->lm_head.weight.is(model->transformer.wte.weight));
        GenerateOptions options = wanted(rank);
        options.together = [](bool wants) { return distributed::any_rank(wants); };
        generate(*model, prompt_of(rank), options);
      }
      EXPECT_EQ(losses[1], losses[0]) << static_cast<int>(sharding);
    });
  }
}

// ZeRO-1 and 2 gather what a step has changed in the first call after it, and nothing later.
TEST(Gpt2Generation, RanksThatKeepWholeParametersNeedNobody) {
  for (const Sharding sharding : {Sharding::kZero1, Sharding::kZero2}) {
    distributed::compared_ranks(3, [&](int rank) {
      manual_seed(4);
      Gpt model(kLetters);
      Accelerator accelerator({.sharding = sharding, .config_file = ""});
      optim::SGD optimizer(model.named_parameters(), {.lr = 0.1});
      accelerator.prepare(model, optimizer);
      const Tensor tokens = ones({1, 4}, {.dtype = kI64});
      accelerator.backward(model(tokens, tokens).loss);
      optimizer.step(), optimizer.zero_grad();
      model(tokens);
      Gpt plain(kLetters);
      for (const auto& [name, tensor] : model.state_dict()) {
        const bool in_parts = distributed::is_dtensor(tensor);
        StateDict one;
        one.set(name, in_parts ? distributed::full_tensor(tensor) : tensor);
        plain.load_state_dict(one, {.strict = false});
      }
      EXPECT_EQ(generate(model, prompt_of(rank), wanted(rank)),
                generate(plain, prompt_of(rank), wanted(rank)));
    });
  }
}

TEST(Gpt2Generation, CallsThatSomeRanksLeaveOutAreAnErrorOnEveryRank) {
  distributed::failing_ranks("rank 1 calls the model more often", 2, [](int rank) {
    manual_seed(4);
    Gpt model(kLetters);
    Accelerator accelerator(
        {.sharding = Sharding::kFsdp, .collective_timeout = 0.5, .config_file = ""});
    accelerator.prepare(model);
    const std::string message = message_of<DistributedError>([&] {
      generate(model, prompt_of(rank), wanted(rank));
      accelerator.wait_for_everyone();
    });
    // Where each rank is: one waits for a gather, the other for rank 1.
    EXPECT_NE(message.find("waited"), std::string::npos) << message;
    EXPECT_NE(message.find("rank " + std::to_string(1 - rank) + " is at"), std::string::npos)
        << message;
  });
}

}  // namespace
}  // namespace tessera::nn::models::test_gpt2_generation
