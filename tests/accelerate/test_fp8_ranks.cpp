// Training in fp8 through the Accelerator, on one rank and on several in every mode of sharding.
// ctest labels: threads
#include <array>
#include <span>
#include <string>
#include <vector>

#include <tessera/precision/autocast.h>

#include "accelerate/sharded_words.h"
#include "finished_process.h"
#include "message_of.h"
#include "thinned.h"

namespace tessera::test_fp8_ranks {
namespace {

using accelerate::Sharding;
using distributed::compared_ranks;
using precision::Fp8Filter;
using precision::Fp8Scaling;
using Values = std::vector<std::vector<float>>;

// Modes that add up micro-batches in one order (docs/sharding.md), the first as what is compared
// with; with one micro-batch a step all are alike.
const std::vector<std::vector<Sharding>> kClasses = {
    {Sharding::kDdp, Sharding::kZero1}, {Sharding::kZero2, Sharding::kZero3, Sharding::kFsdp}};
const std::vector<Sharding> kWays = {Sharding::kDdp, Sharding::kZero1, Sharding::kZero2,
                                     Sharding::kZero3, Sharding::kFsdp};
constexpr int64_t kSamples = 96;

// All of its Linears have dimensions of 32 and 64, and a batch of 8 has 48 rows.
struct Wide : nn::Module<Wide> {
  Wide()
      : embedding(add<nn::Embedding>("embedding", 131, 32)),
        blocks(add<nn::ModuleList>("blocks")),
        head(add<nn::Linear>("head", 32, 144)) {
    for (int i = 0; i < 2; ++i) blocks.append<Block>(32);
  }
  Tensor forward(const Tensor& tokens) {
    Tensor x = embedding(tokens);
    for (size_t i = 0; i < blocks.num_children(); ++i) x = blocks.child(i).call_tensor(x);
    return head(x);
  }
  nn::Embedding& embedding;
  nn::ModuleList& blocks;
  nn::Linear& head;
};

struct Training {
  Training(Sharding sharding, Fp8Scaling recipe, int64_t micro_batches = 1)
      : accelerator({.mixed_precision = Precision::kFP8,
                     .gradient_accumulation_steps = micro_batches,
                     .seed = 5,
                     .sharding = sharding,
                     .fp8 = {.recipe = recipe, .filter = Fp8Filter::kAll, .strict = true},
                     .config_file = ""}),
        loader(std::make_shared<Tokens>(kSamples), {.batch_size = 8, .shuffle = true}),
        optimizer(model.named_parameters(), {.lr = 1e-2}) {
    accelerator.prepare(model, optimizer, loader);
  }
  // Micro-batches of the loader; all where it is negative.
  void train(int64_t micro_batches = -1) {
    int64_t turn = 0;
    for (const auto& batch : loader) {
      if (turn++ == micro_batches) break;
      const auto micro = accelerator.accumulate(model);
      const Tensor loss = cross_entropy(model(batch[0]).reshape({-1, 144}), batch[1].reshape({-1}));
      accelerator.backward(loss);
      accelerator.clip_grad_norm(model.parameters(), 0.5);
      optimizer.step(), optimizer.zero_grad();
    }
  }
  precision::Fp8Layers& fp8() const { return *precision::fp8_of(model); }
  // Weights, then scales and histories.
  Values values() const {
    Values all = whole_values(model);
    for (const auto& [name, tensor] : fp8().state_dict()) all.push_back(tensor.to_vector<float>());
    return all;
  }

  Accelerator accelerator;
  Wide model;
  data::DataLoader<std::array<Tensor, 2>> loader;
  optim::AdamW optimizer;
};

std::vector<Values> outcomes_of(int ranks, Sharding sharding, Fp8Scaling recipe,
                                int64_t micro_batches) {
  std::vector<Values> outcomes(static_cast<size_t>(ranks));
  compared_ranks(ranks, [&](int rank) {
    manual_seed(5);
    Training run(sharding, recipe, micro_batches);
    run.train();
    const precision::Fp8Report report = run.fp8().report();
    EXPECT_EQ(report.fallbacks(), 0) << report.table();
    EXPECT_EQ(report.fp8_calls(), 5 * kSamples / 8 / ranks) << report.table();
    outcomes[static_cast<size_t>(rank)] = run.values();
  });
  return outcomes;
}

void expect_equal_bits(const std::vector<Sharding>& ways, int ranks, Fp8Scaling recipe,
                       int64_t micro_batches) {
  const std::vector<Values> expected = outcomes_of(ranks, ways[0], recipe, micro_batches);
  for (const Values& each : expected) EXPECT_EQ(each, expected[0]) << "the same on all ranks";
  for (size_t i = 1; i < ways.size(); ++i) {
    SCOPED_TRACE(testing::Message()
                 << name_of(recipe) << ", way " << static_cast<int>(ways[i]) << " on " << ranks
                 << " ranks, micro-batches " << micro_batches);
    EXPECT_TRUE(outcomes_of(ranks, ways[i], recipe, micro_batches) == expected);
  }
}

TEST(Fp8Ranks, ModesOfAClassHaveTheSameBits) {
  for (const Fp8Scaling recipe : {Fp8Scaling::kTensorwise, Fp8Scaling::kDelayed}) {
    for (const int ranks : tests::thinned({2, 3}, 2)) {
      for (const auto& ways : kClasses) expect_equal_bits(ways, ranks, recipe, 2);
    }
    expect_equal_bits(kWays, 2, recipe, 1);
  }
}

TEST(Fp8Ranks, OtherRecipesTrainInShardsAsInReplicas) {
  for (const Fp8Scaling recipe : {Fp8Scaling::kRowwise, Fp8Scaling::kBlockwise}) {
    expect_equal_bits({Sharding::kDdp, Sharding::kFsdp}, 2, recipe, 1);
  }
}

// ---- Delayed scales ----------------------------------------------------------------------------

TEST(Fp8Ranks, MaximaAreThoseOfAllRanksOnceAStep) {
  constexpr int kRanks = 3;
  std::array<float, kRanks> own{}, noted{};
  compared_ranks(kRanks, [&](int rank) {
    manual_seed(5);
    Training run(Sharding::kDdp, Fp8Scaling::kDelayed, 2);
    const distributed::CommTrace::Scope scope(*distributed::rank_context().trace);
    for (int step = 0; step < 3; ++step) run.train(2);
    int64_t reductions = 0;
    for (const distributed::CommRecord& record : scope.records()) {
      reductions += record.tag == "fp8_maxima";
    }
    EXPECT_EQ(reductions, 3);

    // A step whose inputs differ from rank to rank.
    float& largest = own[static_cast<size_t>(rank)];
    const HookHandle hook =
        run.model.head.register_forward_pre_hook([&](nn::ModuleBase&, nn::TensorRefs inputs) {
          *inputs[0] = *inputs[0] * static_cast<double>(1 + rank);
          const Tensor x = inputs[0]->detach().to(kBF16).to(kF32);
          largest = std::max(largest, static_cast<float>(max(abs(x)).item()));
        });
    run.train(2);
    const std::vector<float> history = run.fp8().state_dict().at("head.history").to_vector<float>();
    noted[static_cast<size_t>(rank)] = history[0];
  });
  const float all = *std::max_element(own.begin(), own.end());
  EXPECT_LT(*std::min_element(own.begin(), own.end()), all) << "or nothing is shown";
  for (const float each : noted) EXPECT_EQ(each, all);
}

TEST(Fp8Ranks, ScalesAreInCheckpointsAcrossModes) {
  const TestFolder folder;
  const std::string path = folder.path("state");
  Values expected;
  compared_ranks(2, [&](int rank) {
    manual_seed(5);
    Training run(Sharding::kZero3, Fp8Scaling::kDelayed);
    run.train();
    run.accelerator.save_state(path);
    run.train();
    const Values values = run.values();
    if (rank == 0) expected = values;
  });
  compared_ranks(2, [&](int) {
    manual_seed(5);
    Training run(Sharding::kDdp, Fp8Scaling::kDelayed);
    run.train(2);  // other scales, until the state comes
    run.accelerator.load_state(path);
    run.train();
    EXPECT_TRUE(run.values() == expected);
  });
}

// ---- The settings ------------------------------------------------------------------------------

TEST(Fp8Ranks, TheAcceleratorSaysWhatEachLayerDid) {
  Training run(Sharding::kDdp, Fp8Scaling::kTensorwise);
  run.train(2);
  const std::string text = run.accelerator.describe();
  EXPECT_NE(text.find("fp8 tensorwise (hybrid), filter all, strict: 10 calls in fp8"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("blocks.0.up: 2 calls; x amax"), std::string::npos) << text;
}

TEST(Fp8Ranks, ContradictingSettingsAreErrors) {
  const auto make = [](const Fp8Options& fp8, PrecisionPolicy policy = PrecisionPolicy::kAutocast) {
    Accelerator accelerator({.mixed_precision = Precision::kFP8,
                             .precision_policy = policy,
                             .fp8 = fp8,
                             .config_file = ""});
  };
  EXPECT_NO_THROW(make({}));
  EXPECT_NO_THROW(make({.recipe = Fp8Scaling::kRowwise}));
  EXPECT_NO_THROW(make({.margin = 1}));  // delayed: no other recipe has one
  EXPECT_THROW(make({.recipe = Fp8Scaling::kRowwise, .margin = 1}), ConfigError);
  EXPECT_THROW(make({.recipe = Fp8Scaling::kRowwise, .format = precision::Fp8Format::kHybrid}),
               ConfigError);
  EXPECT_THROW(make({}, PrecisionPolicy::kPure), ConfigError);
}

}  // namespace
}  // namespace tessera::test_fp8_ranks
