// fp8 through the Accelerator: what trackers and describe() say, and a tied head that is fused
// with its loss, in every mode of sharding.
// ctest labels: threads
#include <array>
#include <map>
#include <string>
#include <vector>

#include <tessera/accelerate/tracking/fp8_values.h>
#include <tessera/nn/fused.h>
#include <tessera/precision/autocast.h>

#include "accelerate/sharded_words.h"
#include "finished_process.h"
#include "message_of.h"

namespace tessera::test_fp8_accelerator {
namespace {

using accelerate::Sharding;
using distributed::compared_ranks;
using precision::Fp8Filter;
using precision::Fp8Scaling;

// ---- Trackers and describe() -------------------------------------------------------------------

using Row = std::map<std::string, double>;
struct Collector final : Tracker {
  explicit Collector(std::vector<Row>& rows) : rows(rows) {}
  bool needs_folder() const override { return false; }
  void start(const TrackerRun&) override {}
  void store_configuration(const TrackedValues&) override {}
  void log(const TrackedValues& values, int64_t) override {
    Row row;
    for (const auto& [name, value] : flatten(values)) {
      const auto* number = std::get_if<double>(&value);
      row[name] = number != nullptr ? *number : static_cast<double>(std::get<int64_t>(value));
    }
    rows.push_back(std::move(row));
  }
  std::vector<Row>& rows;
};

struct Two : nn::Module<Two> {
  Two() : fc(add<nn::Linear>("fc", 32, 32)), head(add<nn::Linear>("head", 32, 16)) {}
  Tensor forward(const Tensor& x) { return head(fc(x)); }
  nn::Linear& fc;
  nn::Linear& head;
};

TEST(Fp8Tracking, EachLogHasTheCountsBesideItsValues) {
  manual_seed(3);
  std::vector<Row> rows;
  Accelerator accelerator({.mixed_precision = Precision::kFP8,
                           .log_with = std::vector<std::string>{"collector"},
                           .fp8 = {.filter = Fp8Filter::kAll},
                           .config_file = ""});
  accelerator.trackers().add("collector", [&] { return std::make_unique<Collector>(rows); });
  accelerator.init_trackers("fp8");
  Two model;
  optim::SGD optimizer(model.named_parameters(), {.lr = 0.01});
  accelerator.prepare(model, optimizer);
  const auto run = [&](const Tensor& x) {
    const auto micro = accelerator.accumulate(model);
    accelerator.backward(sum(model(x)));
    optimizer.step(), optimizer.zero_grad();
  };
  const Tensor plain = ones({16, 32});
  Tensor wide = plain.clone();
  wide.narrow(0, 0, 8).fill_(1e-7);  // half of it becomes 0 beside ones
  run(plain);
  accelerator.log({{"loss", 1.0}}, 1);
  run(wide);
  run(ones({15, 32}));  // cannot
  accelerator.log({{"loss", 2.0}}, 2);
  ASSERT_EQ(rows.size(), 2u);
  for (const Row& row : rows) {
    for (const char* name : {"loss", "fp8/calls", "fp8/fallbacks", "fp8/saturated",
                             "fp8/underflown", "fp8/not_finite"}) {
      EXPECT_TRUE(row.contains(name)) << name;
    }
  }
  EXPECT_EQ(rows[0]["fp8/calls"], 2);
  EXPECT_EQ(rows[0]["fp8/fallbacks"], 0);
  EXPECT_EQ(rows[0]["fp8/underflown"], 0);
  EXPECT_EQ(rows[1]["fp8/calls"], 4) << "since the model was prepared";
  EXPECT_EQ(rows[1]["fp8/fallbacks"], 2);
  // Of x of fc, 256 elements, among those of x, W and dy of both since the first row.
  const double elements = 2 * 16 * 32 + (32 * 32 + 16 * 32) + 16 * 32 + 16 * 16;
  EXPECT_NEAR(rows[1]["fp8/underflown"], 256 / elements, 2 / elements);
  EXPECT_EQ(rows[1]["fp8/not_finite"], 0);
}

TEST(Fp8Tracking, OtherPrecisionsHaveNoSuchValues) {
  std::vector<Row> rows;
  Accelerator accelerator({.mixed_precision = Precision::kBF16,
                           .log_with = std::vector<std::string>{"collector"},
                           .config_file = ""});
  accelerator.trackers().add("collector", [&] { return std::make_unique<Collector>(rows); });
  accelerator.init_trackers("bf16");
  Two model;
  accelerator.prepare(model);
  accelerator.log({{"loss", 1.0}}, 1);
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(rows[0], (Row{{"loss", 1.0}}));
}

TEST(Fp8Tracking, CountsThatWereResetBeginAnew) {
  const auto report = [](int64_t elements, double underflown) {
    precision::Fp8LayerReport layer{.name = "fc", .excluded = {}, .fp8_calls = 1};
    layer.operands[0] = {.elements = elements, .underflown = underflown};
    return std::vector<precision::Fp8Report>{{.recipe = {}, .layers = {layer}}};
  };
  accelerate::Fp8Values values;
  const auto underflown = [&](const std::vector<precision::Fp8Report>& reports) {
    for (const auto& [name, value] : flatten(values.next(reports))) {
      if (name == "fp8/underflown") return std::get<double>(value);
    }
    return -1.0;
  };
  EXPECT_EQ(underflown(report(100, 0.5)), 0.5);
  EXPECT_EQ(underflown(report(200, 0.25)), 0) << "50 of both";
  EXPECT_EQ(underflown(report(200, 0.25)), 0) << "nothing ran";
  EXPECT_EQ(underflown(report(100, 0.25)), 0.25);
}

TEST(Fp8Describe, NamesRecipeFilterAndWhatIsLeftOut) {
  Accelerator accelerator(
      {.mixed_precision = Precision::kFP8,
       .fp8 = {.recipe = Fp8Scaling::kRowwise, .exclude = std::vector<std::string>{"fc"}},
       .config_file = ""});
  Two model;
  accelerator.prepare(model);
  const std::string text = accelerator.describe();
  for (const char* part :
       {"fp8 rowwise (e4m3), filter default", "fc: not in fp8: excluded by name: fc",
        "head: not in fp8: the last Linear of the model", "fp8_recipe = rowwise"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  }
}

// ---- Delayed scales ----------------------------------------------------------------------------

// Of windows of two micro-batches, whose end two optimizers step at.
TEST(Fp8Delayed, AWindowRollsTheHistoryOnceForAllOptimizers) {
  compared_ranks(2, [](int) {
    manual_seed(4);
    Accelerator accelerator({.mixed_precision = Precision::kFP8,
                             .gradient_accumulation_steps = 2,
                             .fp8 = {.recipe = Fp8Scaling::kDelayed, .filter = Fp8Filter::kAll},
                             .config_file = ""});
    Two model;
    optim::SGD first(model.fc.named_parameters(), {.lr = 0.01});
    optim::SGD second(model.head.named_parameters(), {.lr = 0.01});
    accelerator.prepare(model, first, second);
    const distributed::CommTrace::Scope scope(*distributed::rank_context().trace);
    constexpr int64_t kWindows = 3;
    for (int64_t turn = 0; turn < 2 * kWindows; ++turn) {
      const auto micro = accelerator.accumulate(model);
      accelerator.backward(sum(model(full({16, 32}, static_cast<double>(1 + turn)))));
      first.step(), second.step();
      first.zero_grad(), second.zero_grad();
    }
    int64_t reductions = 0;
    for (const distributed::CommRecord& record : scope.records()) {
      reductions += record.tag == "fp8_maxima";
    }
    EXPECT_EQ(reductions, kWindows);
    const Tensor history = precision::fp8_of(model)->state_dict().at("fc.history");
    ASSERT_EQ(history.shape(), Shape({3, kWindows}));
    const std::vector<float> x = history.select(0, 0).to_vector<float>();
    EXPECT_EQ(x, (std::vector<float>{6, 4, 2})) << "the larger of both micro-batches";
  });
}

// ---- A tied head that is fused with its loss ---------------------------------------------------

struct TiedWords : nn::Module<TiedWords> {
  TiedWords()
      : embedding(add<nn::Embedding>("embedding", 144, 32)),
        blocks(add<nn::ModuleList>("blocks")),
        norm(add<nn::LayerNorm>("norm", 32)),
        head(add<nn::Linear>("head", 32, 144, nn::LinearOptions{.bias = false})) {
    blocks.append<Block>(32);
    head.share_parameter("weight", embedding.weight);
  }
  Tensor forward(const Tensor& tokens, const Tensor& targets) {
    Tensor x = norm(blocks.child(0).call_tensor(embedding(tokens)));
    return nn::linear_cross_entropy(head, x.reshape({-1, 32}), targets.reshape({-1}));
  }
  nn::Embedding& embedding;
  nn::ModuleList& blocks;
  nn::LayerNorm& norm;
  nn::Linear& head;
};

std::vector<std::vector<float>> trained(int ranks, Sharding sharding, Fp8Scaling recipe) {
  std::vector<std::vector<float>> outcome;
  compared_ranks(ranks, [&](int rank) {
    manual_seed(5);
    Accelerator accelerator({.mixed_precision = Precision::kFP8,
                             .seed = 5,
                             .sharding = sharding,
                             .fp8 = {.recipe = recipe, .filter = Fp8Filter::kAll, .strict = true},
                             .config_file = ""});
    data::DataLoader<std::array<Tensor, 2>> loader(std::make_shared<Tokens>(48),
                                                   {.batch_size = 8, .shuffle = true});
    TiedWords model;
    optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-2});
    accelerator.prepare(model, optimizer, loader);
    for (const auto& batch : loader) {
      const auto micro = accelerator.accumulate(model);
      accelerator.backward(model(batch[0], batch[1]));
      optimizer.step(), optimizer.zero_grad();
    }
    const auto values = whole_values(model);
    const precision::Fp8Report report = precision::fp8_of(model)->report();
    EXPECT_EQ(report.layers.back().name, "head");
    EXPECT_EQ(report.layers.back().fp8_calls, 6 / ranks) << report.table();
    if (rank == 0) outcome = values;
  });
  return outcome;
}

TEST(Fp8TiedHead, TrainsInEveryModeOfShardingWithTheSameBits) {
  for (const Fp8Scaling recipe : {Fp8Scaling::kTensorwise, Fp8Scaling::kDelayed}) {
    const auto expected = trained(2, Sharding::kDdp, recipe);
    for (const Sharding sharding :
         {Sharding::kZero1, Sharding::kZero2, Sharding::kZero3, Sharding::kFsdp}) {
      EXPECT_TRUE(trained(2, sharding, recipe) == expected)
          << name_of(recipe) << ", way " << static_cast<int>(sharding);
    }
  }
}

}  // namespace
}  // namespace tessera::test_fp8_accelerator
