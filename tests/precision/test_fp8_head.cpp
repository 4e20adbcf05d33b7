// A head in fp8 that is fused with its loss: it gives what the two ops give, in chunks of rows.
#include <tessera/autograd/fp8/head.h>

#include <gtest/gtest.h>

#include <cmath>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/checkpoint.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/memory/allocator.h>
#include <tessera/core/profile/profiler.h>
#include <tessera/nn/embedding.h>
#include <tessera/nn/fused.h>
#include <tessera/precision/autocast.h>

#include "message_of.h"

namespace tessera::precision::test_fp8_head {
namespace {

using Values = std::vector<double>;
constexpr int64_t kRows = 400, kClasses = 96, kWidth = 48;
constexpr int64_t kSmall = 128 * kClasses;  // logits: chunks of 112 rows, or of 128
constexpr int64_t kWhole = int64_t{1} << 25;

Tensor random(const Shape& shape, double scale = 1) {
  return mul(randn(shape), Scalar(scale)).detach();
}
// Every 7th is ignored.
Tensor targets_of(int64_t rows, int64_t classes) {
  std::vector<int64_t> values(static_cast<size_t>(rows));
  for (int64_t i = 0; i < rows; ++i)
    values[static_cast<size_t>(i)] = i % 7 ? i * i % classes : -100;
  return tensor(values, {rows});
}
Fp8Recipe taking_all(Fp8Scaling scaling) { return {.scaling = scaling, .filter = Fp8Filter::kAll}; }

struct Head {
  explicit Head(const Fp8Recipe& recipe, int64_t classes = kClasses)
      : head(kWidth, classes, {.bias = false}) {
    applied = apply(head, Policy::fp8(recipe));
  }
  Tensor loss(const Tensor& x, const Tensor& target, int64_t chunk,
              Reduction reduction = Reduction::kMean) {
    nn::ModuleCall call(head);
    call.before({});
    const std::shared_ptr<Fp8Linear> layer = head.fp8();
    EXPECT_TRUE(layer->takes(x, head.weight, x.size(0)));
    return fp8_linear_cross_entropy(x, head.weight, target, layer, -100, reduction, chunk);
  }
  Fp8LayerReport report() const { return applied.fp8()->report().layers[0]; }
  nn::Linear head;
  AppliedPolicy applied;
};

struct Outcome {
  double loss;
  Values grad_x, grad_weight;
  Fp8LayerReport report;
  Values history;
};
Outcome run(const Fp8Recipe& recipe, int64_t chunk, double up, Reduction reduction) {
  manual_seed(31);
  Head head(recipe);
  const Tensor x = random({kRows, kWidth});
  x.narrow(0, 0, 16).fill_(2);  // the surest mistakes, and so the largest gradients, come first
  x.set_requires_grad();
  const Tensor target = targets_of(kRows, kClasses);
  if (head.applied.fp8()->is_delayed()) {  // scales that are not 1
    head.loss(x, target, kWhole, reduction).backward();
    head.applied.fp8()->update();
    head.applied.fp8()->reset_counts();
    x.grad().fill_(0), head.head.weight.grad().fill_(0);
  }
  const Tensor loss = head.loss(x, target, chunk, reduction);
  EXPECT_EQ(loss.dtype(), kF32);
  EXPECT_EQ(loss.shape(), Shape());
  loss.backward(full({}, up));
  Outcome outcome{.loss = loss.item(),
                  .grad_x = x.grad().to_vector(),
                  .grad_weight = head.head.weight.grad().to_vector(),
                  .report = head.report(),
                  .history = {}};
  head.applied.fp8()->update();
  const StateDict state = head.applied.fp8()->state_dict();
  if (!state.empty()) outcome.history = state.at(".history").to_vector();
  return outcome;
}

TEST(Fp8Head, ChunksHaveTheBytesScalesAndCountsOfWholeLogits) {
  for (const Fp8Scaling scaling :
       {Fp8Scaling::kTensorwise, Fp8Scaling::kDelayed, Fp8Scaling::kRowwise,
        Fp8Scaling::kRowwiseWithGwHp, Fp8Scaling::kBlockwise}) {
    for (const auto& [up, reduction] :
         {std::pair(1.0, Reduction::kMean), std::pair(1.0 / 3, Reduction::kSum)}) {
      SCOPED_TRACE(testing::Message() << name_of(scaling) << " times " << up);
      const Outcome whole = run(taking_all(scaling), kWhole, up, reduction);
      const Outcome chunks = run(taking_all(scaling), kSmall, up, reduction);
      EXPECT_EQ(chunks.loss, whole.loss);
      EXPECT_EQ(chunks.grad_x, whole.grad_x);
      EXPECT_EQ(chunks.history, whole.history);
      double largest = 0, error = 0;
      for (size_t i = 0; i < whole.grad_weight.size(); ++i) {
        largest = std::max(largest, std::abs(whole.grad_weight[i]));
        error = std::max(error, std::abs(whole.grad_weight[i] - chunks.grad_weight[i]));
      }
      EXPECT_GT(largest, 0);
      EXPECT_LE(error, epsilon_of(kBF16) * largest) << "sums in another order, rounded once";
      EXPECT_EQ(chunks.report.fp8_calls, 1);
      for (size_t role = 0; role < kNumFp8Roles; ++role) {
        const Fp8OperandReport &a = chunks.report.operands[role], &b = whole.report.operands[role];
        EXPECT_EQ(a.amax, b.amax) << role;
        EXPECT_EQ(a.elements, b.elements) << role;
        EXPECT_EQ(a.saturated, b.saturated) << role;
        EXPECT_EQ(a.underflown, b.underflown) << role;
      }
    }
  }
}

TEST(Fp8Head, OneGradientAloneIsThatOfBoth) {
  for (const Fp8Scaling scaling :
       {Fp8Scaling::kTensorwise, Fp8Scaling::kRowwise, Fp8Scaling::kRowwiseWithGwHp}) {
    const Outcome both = run(taking_all(scaling), kSmall, 1, Reduction::kMean);
    for (const bool of_x : {true, false}) {
      manual_seed(31);
      Head head(taking_all(scaling));
      const Tensor x = random({kRows, kWidth});
      x.narrow(0, 0, 16).fill_(2);
      (of_x ? x : head.head.weight).set_requires_grad(true);
      (of_x ? head.head.weight : x).set_requires_grad(false);
      head.loss(x, targets_of(kRows, kClasses), kSmall).backward();
      EXPECT_EQ((of_x ? x : head.head.weight).grad().to_vector(),
                of_x ? both.grad_x : both.grad_weight)
          << name_of(scaling);
      const bool quantises = of_x || scaling != Fp8Scaling::kRowwiseWithGwHp;
      EXPECT_EQ(head.report().operands[2].elements, quantises ? kRows * kClasses : 0) << "once";
    }
  }
}

TEST(Fp8Head, TheLogitsAreNeverWhole) {
  constexpr int64_t kMany = 2048, kVocabulary = 512, kChunk = 128 * kVocabulary;
  Head head(taking_all(Fp8Scaling::kTensorwise), kVocabulary);
  const Tensor x = random({kMany, kWidth}).set_requires_grad();
  const Tensor target = targets_of(kMany, kVocabulary);
  const auto peak_of = [&](int64_t chunk) {
    head.loss(x, target, chunk).backward();  // gradients and cached weights are there
    const auto stats = memory_stats();
    stats->reset_peak();
    const int64_t before = stats->current();
    head.loss(x, target, chunk).backward();
    return stats->peak() - before;
  };
  const int64_t kept = kMany * kWidth * 8;  // x, its bytes and gradients
  EXPECT_LE(peak_of(kChunk), 10 * kChunk + kept);
  EXPECT_GE(peak_of(kWhole), 4 * kMany * kVocabulary) << "or nothing is shown";
}

TEST(Fp8Head, ACheckpointGivesTheSame) {
  const Outcome expected = run(taking_all(Fp8Scaling::kRowwise), kSmall, 1, Reduction::kMean);
  manual_seed(31);
  Head head(taking_all(Fp8Scaling::kRowwise));
  const Tensor x = random({kRows, kWidth});
  x.narrow(0, 0, 16).fill_(2);
  x.set_requires_grad();
  const Tensor target = targets_of(kRows, kClasses);
  checkpoint([&](const Tensor& in) { return head.loss(in, target, kSmall); }, x).backward();
  EXPECT_EQ(x.grad().to_vector(), expected.grad_x);
  EXPECT_EQ(head.head.weight.grad().to_vector(), expected.grad_weight);
  EXPECT_EQ(head.report().fp8_calls, 1);
}

// ---- As models call it -------------------------------------------------------------------------

std::vector<std::string> ops_of(const std::function<void()>& function) {
  Profiler profiler;
  {
    const ProfilerScope scope(profiler);
    function();
  }
  std::vector<std::string> names;
  for (const auto& [name, entry] : profiler.entries()) names.push_back(name);
  return names;
}
bool has(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// GPT's head: the embedding's weight.
struct Tied : nn::Module<Tied> {
  explicit Tied(int64_t classes = 64)
      : embedding(add<nn::Embedding>("embedding", classes, 32)),
        head(add<nn::Linear>("head", 32, classes, nn::LinearOptions{.bias = false})) {
    head.share_parameter("weight", embedding.weight);
  }
  Tensor forward(const Tensor& tokens, const Tensor& targets) {
    return nn::linear_cross_entropy(head, embedding(tokens), targets);
  }
  nn::Embedding& embedding;
  nn::Linear& head;
};
Tensor tokens_of(int64_t count, int64_t classes) {
  std::vector<int64_t> values(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) values[static_cast<size_t>(i)] = (i * 5 + 3) % classes;
  return tensor(values, {count});
}

TEST(Fp8Head, TheFusedLossOfAModelRunsInFp8) {
  manual_seed(33);
  Tied model;
  const AppliedPolicy applied = apply(model, Policy::fp8(taking_all(Fp8Scaling::kTensorwise)));
  const Tensor tokens = tokens_of(48, 64), targets = targets_of(48, 64);
  const auto ops = ops_of([&] { model(tokens, targets).backward(); });
  EXPECT_TRUE(has(ops, "fp8_linear"));
  EXPECT_FALSE(has(ops, "linear"));
  const Fp8LayerReport head = applied.fp8()->report().layers[0];
  EXPECT_EQ(head.name, "head");
  EXPECT_EQ(head.fp8_calls, 1);
  EXPECT_TRUE(head.fallbacks.empty());
}

TEST(Fp8Head, ATiedWeightGetsTheGradientsOfBothUses) {
  manual_seed(34);
  Tied model;
  const AppliedPolicy applied = apply(model, Policy::fp8(taking_all(Fp8Scaling::kTensorwise)));
  const Tensor tokens = tokens_of(48, 64), targets = targets_of(48, 64);
  model(tokens, targets).backward();
  const Tensor both = model.embedding.weight.grad().clone();

  // The same with two weights.
  const Tensor weight = model.embedding.weight.detach();
  nn::Linear head(32, 64, {.bias = false});
  {
    const NoGradGuard no_grad;
    head.weight.copy_(weight);
  }
  const AppliedPolicy alone = apply(head, Policy::fp8(taking_all(Fp8Scaling::kTensorwise)));
  const Tensor table = weight.clone().set_requires_grad();
  nn::linear_cross_entropy(head, embedding(tokens, table), targets).backward();
  EXPECT_GT(max(abs(table.grad())).item(), 0);
  EXPECT_EQ(both.to_vector(), (table.grad() + head.weight.grad()).to_vector());
}

// GPT-2's 50257 tokens are no multiple of 16.
TEST(Fp8Head, AHeadThatCannotIsCountedAndStaysFused) {
  manual_seed(35);
  Tied model(50);
  const AppliedPolicy applied = apply(model, Policy::fp8(taking_all(Fp8Scaling::kTensorwise)));
  const Tensor tokens = tokens_of(48, 50), targets = targets_of(48, 50);
  const auto ops = ops_of([&] { model(tokens, targets).backward(); });
  EXPECT_TRUE(has(ops, "linear_cross_entropy"));
  const Fp8Report report = applied.fp8()->report();
  EXPECT_EQ(report.fallbacks(), 1);
  EXPECT_EQ(report.layers[0].fallbacks.at("out_features (50) is no multiple of 16"), 1);

  Fp8Recipe strict = taking_all(Fp8Scaling::kTensorwise);
  strict.strict = true;
  Tied other(50);
  const AppliedPolicy applied_other = apply(other, Policy::fp8(strict));
  const std::string message = message_of<UnsupportedError>([&] { other(tokens, targets); });
  EXPECT_NE(message.find("out_features (50)"), std::string::npos) << message;
  EXPECT_NE(message.find("head"), std::string::npos) << message;
}

TEST(Fp8Head, AHookOnTheHeadIsCalledWithItsLogits) {
  manual_seed(36);
  Tied model;
  const AppliedPolicy applied = apply(model, Policy::fp8(taking_all(Fp8Scaling::kTensorwise)));
  const Tensor tokens = tokens_of(48, 64), targets = targets_of(48, 64);
  const double expected = model(tokens, targets).item();
  Shape seen;
  const HookHandle hook = model.head.register_forward_hook(
      [&](nn::ModuleBase&, nn::TensorRefs, nn::TensorRefs outputs) { seen = outputs[0]->shape(); });
  EXPECT_EQ(model(tokens, targets).item(), expected);
  EXPECT_EQ(seen, Shape({48, 64}));
  EXPECT_EQ(applied.fp8()->report().layers[0].fp8_calls, 2);
}

TEST(Fp8Head, LossesOfRowsAddUpToTheirSum) {
  manual_seed(33);
  Head head(taking_all(Fp8Scaling::kTensorwise));
  const Tensor x = random({kRows, kWidth}), target = targets_of(kRows, kClasses);
  const auto loss = [&](Reduction reduction) {
    return nn::linear_cross_entropy(head.head, x, target, -100, reduction);
  };
  const Tensor rows = loss(Reduction::kNone);
  EXPECT_EQ(rows.shape(), Shape({kRows}));
  EXPECT_EQ(head.report().fp8_calls, 1);
  const double sum = loss(Reduction::kSum).item();
  EXPECT_NEAR(rows.sum().item(), sum, epsilon_of(kBF16) * sum);
}

TEST(Fp8Head, EvaluationKeepsNothing) {
  Head head(taking_all(Fp8Scaling::kTensorwise));
  const Tensor x = random({kRows, kWidth});
  const Tensor target = targets_of(kRows, kClasses);
  const NoGradGuard no_grad;
  EXPECT_EQ(head.loss(x, target, kSmall).item(), head.loss(x, target, kWhole).item());
}

TEST(Fp8Head, ATargetOutsideOfTheVocabularyIsAnError) {
  Head head(taking_all(Fp8Scaling::kTensorwise));
  const Tensor x = random({kRows, kWidth});
  EXPECT_THROW(head.loss(x, full({kRows}, int64_t{kClasses}, {.dtype = kI64}), kSmall), IndexError);
}

}  // namespace
}  // namespace tessera::precision::test_fp8_head
