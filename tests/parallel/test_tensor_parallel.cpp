// GPT-2 whose layers several ranks calculate together: losses, gradients and parameters are those
// of one process.
// ctest labels: threads
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <vector>

#include <tessera/core/parallel.h>
#include <tessera/core/random.h>
#include <tessera/distributed/data_parallel/replicate.h>
#include <tessera/distributed/mesh/dtensor.h>
#include <tessera/distributed/mesh/mesh.h>
#include <tessera/distributed/tensor_parallel/compute_mesh.h>
#include <tessera/distributed/tensor_parallel/convert.h>
#include <tessera/distributed/tensor_parallel/parallelize.h>
#include <tessera/nn/models/bert.h>
#include <tessera/nn/models/gpt2.h>
#include <tessera/nn/models/llama.h>
#include <tessera/optim/optimizers.h>

#include "distributed/compared_ranks.h"
#include "message_of.h"

namespace tessera::distributed::test_tensor_parallel {
namespace {

constexpr int kSteps = 3;
constexpr double kTolerance = 1e-11;  // f64; of each tensor's largest element

// A vocabulary that does not divide.
constexpr nn::models::GptConfig kTiny{
    .vocab_size = 51, .context = 16, .width = 32, .layers = 2, .heads = 4};

struct Batch {
  Tensor inputs, targets;  // [2, 8]
};
Batch batch_of(int step) {
  const RandomStream stream{5, static_cast<uint64_t>(step)};
  const Tensor tokens = randint(0, kTiny.vocab_size, {2, 9}, kI64, stream);
  Batch batch{tokens.narrow(1, 0, 8).contiguous(), tokens.narrow(1, 1, 8).contiguous()};
  batch.targets.select(1, 3).fill_(-100);
  return batch;
}

// What is trained: a model and its loss of a batch.
struct Training {
  std::unique_ptr<nn::ModuleBase> model;
  std::function<Tensor(const Batch& batch)> loss;
};
template <class Model>
Training training_of(std::unique_ptr<Model> model,
                     const std::function<Tensor(Model& model, const Batch& batch)>& loss) {
  model->to(kF64);
  Model& reference = *model;
  return {std::move(model),
          [&reference, loss](const Batch& batch) { return loss(reference, batch); }};
}
std::unique_ptr<nn::models::Gpt> tiny_model(double dropout = 0) {
  manual_seed(1);
  nn::models::GptConfig config = kTiny;
  config.dropout = dropout;
  auto model = std::make_unique<nn::models::Gpt>(config);
  model->to(kF64);
  return model;
}
Training gpt(nn::models::Logits logits = nn::models::Logits::kWithoutLoss, double dropout = 0) {
  return training_of<nn::models::Gpt>(tiny_model(dropout),
                                      [logits](nn::models::Gpt& model, const Batch& b) {
                                        return model(b.inputs, b.targets, logits).loss;
                                      });
}
Training llama(bool head_norms = false) {
  manual_seed(1);
  auto model =
      std::make_unique<nn::models::Llama>(nn::models::LlamaConfig{.vocab_size = 51,
                                                                  .width = 32,
                                                                  .inner = 24,
                                                                  .layers = 2,
                                                                  .heads = 4,
                                                                  .kv_heads = 2,
                                                                  .tied = false,
                                                                  .qkv_bias = true,
                                                                  .head_norms = head_norms});
  return training_of<nn::models::Llama>(
      std::move(model),
      [](nn::models::Llama& model, const Batch& b) { return model(b.inputs, b.targets).loss; });
}
Training bert(double dropout = 0) {
  manual_seed(1);
  auto model =
      std::make_unique<nn::models::Bert>(nn::models::BertConfig{.vocab_size = 51,
                                                                .width = 32,
                                                                .layers = 2,
                                                                .heads = 4,
                                                                .context = 16,
                                                                .dropout = dropout,
                                                                .attention_dropout = dropout});
  return training_of<nn::models::Bert>(
      std::move(model), [](nn::models::Bert& model, const Batch& b) {
        return model(b.inputs, {}, b.inputs.select(1, 0).remainder(2)).loss;
      });
}

using Values = std::map<std::string, std::vector<double>>;

// All of a model's parameters or gradients, whole.
Values whole_values(const nn::ModuleBase& model, bool of_gradients) {
  const NoGradGuard no_grad;
  Values values;
  for (const auto& [name, parameter] : model.named_parameters()) {
    const Tensor x = of_gradients ? parameter.grad() : parameter;
    values[name] = (is_dtensor(x) ? full_tensor(x) : x).to_vector();
  }
  return values;
}

struct Trained {
  std::vector<double> losses;
  std::vector<Values> gradients;
  Values parameters;
};
using MakeOptimizer = std::unique_ptr<optim::Optimizer> (*)(const NamedTensors& parameters);

Trained train(const Training& training, MakeOptimizer make_optimizer) {
  Trained run;
  const auto optimizer = make_optimizer(training.model->named_parameters());
  for (int step = 0; step < kSteps; ++step) {
    const Tensor loss = training.loss(batch_of(step));
    loss.backward();
    run.losses.push_back(loss.item());
    run.gradients.push_back(whole_values(*training.model, true));
    optimizer->step();
    optimizer->zero_grad();
  }
  run.parameters = whole_values(*training.model, false);
  return run;
}

void expect_close(const Values& own, const Values& expected, const std::string& what) {
  ASSERT_EQ(own.size(), expected.size());
  for (const auto& [name, values] : expected) {
    const std::vector<double>& got = own.at(name);
    ASSERT_EQ(got.size(), values.size()) << what << " " << name;
    double scale = 1e-3, worst = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      scale = std::max(scale, std::abs(values[i]));
      worst = std::max(worst, std::abs(got[i] - values[i]));
    }
    EXPECT_LE(worst, kTolerance * scale) << what << " of " << name;
  }
}

void compare_with_one_process(const std::function<Training()>& make, MakeOptimizer optimizer,
                              int ranks, bool sequence, bool recompute = false) {
  SCOPED_TRACE(std::to_string(ranks) + (sequence ? " ranks, sequence" : " ranks"));
  Trained expected;
  {
    Context context;
    const ContextGuard guard(context);
    set_num_threads(1);
    expected = train(make(), optimizer);
  }
  compared_ranks(ranks, [&](int) {
    Mesh mesh(world(), {{"tp", ranks}});
    const Training training = make();
    parallelize_module(*training.model, mesh["tp"], {.sequence = sequence});
    std::vector<HookHandle> checkpoints;
    for (const auto& [name, module] : training.model->named_modules()) {
      if (recompute && module->type_name() == "Block") {
        checkpoints.push_back(module->checkpoint_calls());
      }
    }
    EXPECT_EQ(checkpoints.size(), recompute ? 2u : 0u);
    const Trained own = train(training, optimizer);
    for (size_t step = 0; step < kSteps; ++step) {
      EXPECT_NEAR(own.losses[step], expected.losses[step], kTolerance * expected.losses[step]);
      expect_close(own.gradients[step], expected.gradients[step], "gradient");
    }
    expect_close(own.parameters, expected.parameters, "parameter");
  });
}

std::unique_ptr<optim::Optimizer> sgd(const NamedTensors& parameters) {
  return std::make_unique<optim::SGD>(parameters, optim::SGD::Options{.lr = 0.1, .momentum = 0.9});
}
// A large eps: a key's bias has no gradient but rounding, of which Adam would make steps.
std::unique_ptr<optim::Optimizer> adamw(const NamedTensors& parameters) {
  return std::make_unique<optim::AdamW>(parameters, optim::AdamW::Options{.lr = 1e-2, .eps = 1e-3});
}

TEST(TensorParallel, LossesGradientsAndParametersAreThoseOfOneProcess) {
  for (const int ranks : {2, 4}) {
    for (const bool sequence : {false, true}) {
      compare_with_one_process([] { return gpt(); }, sgd, ranks, sequence);
      compare_with_one_process([] { return gpt(); }, adamw, ranks, sequence);
    }
  }
}

TEST(TensorParallel, SoAreThoseOfLlamaAndBert) {
  for (const bool sequence : {false, true}) {
    for (const bool head_norms : {false, true}) {
      compare_with_one_process([&] { return llama(head_norms); }, sgd, 2, sequence);
    }
    compare_with_one_process([] { return bert(); }, sgd, 2, sequence);
  }
}

// Residuals drop by tokens, attention by heads: each element as in one process.
TEST(TensorParallel, DropoutDrawsByThePlaceInTheWhole) {
  constexpr auto kLoss = nn::models::Logits::kWithoutLoss;
  for (const bool sequence : {false, true}) {
    for (const bool recompute : {false, true}) {
      compare_with_one_process([] { return gpt(kLoss, 0.3); }, sgd, 2, sequence, recompute);
    }
    compare_with_one_process([] { return gpt(kLoss, 0.3); }, sgd, 4, sequence);
    compare_with_one_process([] { return bert(0.3); }, sgd, 2, sequence);
  }
}

TEST(TensorParallel, WholeLogitsAndRecomputedBlocksGiveTheSame) {
  for (const bool sequence : {false, true}) {
    compare_with_one_process([] { return gpt(nn::models::Logits::kAll); }, sgd, 2, sequence);
    compare_with_one_process([] { return gpt(); }, sgd, 2, sequence, true);
  }
}

TEST(TensorParallel, ABlockGathersTwiceAndScattersTwiceInEachDirection) {
  compared_ranks(2, [&](int) {
    Mesh mesh(world(), {{"tp", 2}});
    const auto model = tiny_model();
    parallelize_module(*model, mesh["tp"], {.sequence = true});
    const Tensor tokens = randint(0, kTiny.vocab_size, {2, 8}, kI64, RandomStream{5, 0});
    Tensor loss;
    // In front of the blocks the table's rows are scattered, behind them the head gathers; the loss
    // has a maximum and two sums. When backward ends the norms' and positions' summands are added up.
    const int64_t expected = 2 * kTiny.layers + 1;
    for (const bool backward : {false, true}) {
      const CommTrace::Scope scope(*rank_context().trace);
      if (backward) {
        loss.backward();
      } else {
        loss = (*model)(tokens, tokens).loss;
      }
      const auto records = scope.records();
      EXPECT_EQ(count(records, Operation::kAllGather), expected) << backward;
      EXPECT_EQ(count(records, Operation::kReduceScatter), expected) << backward;
      EXPECT_EQ(count(records, Operation::kAllReduce), backward ? 1 : 3);
      EXPECT_EQ(std::ssize(records), 2 * expected + (backward ? 1 : 3));
    }
  });
}

TEST(TensorParallel, ParametersAreDTensorsAndInCallsThisRanksParts) {
  compared_ranks(2, [&](int rank) {
    Mesh mesh(world(), {{"tp", 2}});
    const auto whole = tiny_model();
    const auto model = tiny_model();
    parallelize_module(*model, mesh["tp"], {.sequence = true});
    const auto& block = model->transformer.h.at<nn::models::gpt2::Block>(0);
    const std::vector<std::pair<Tensor, Placement>> expected = {
        {block.attn.c_attn.weight, BlockShard(0, 3)}, {block.attn.c_proj.weight, Shard(1)},
        {block.attn.c_proj.bias, Replicate()},        {block.ln_1.weight, Replicate()},
        {model->transformer.wte.weight, Shard(0)},    {model->transformer.wpe.weight, Replicate()},
    };
    for (const auto& [tensor, placement] : expected) {
      EXPECT_EQ(placements_of(tensor), Placements{placement});
      EXPECT_EQ(&mesh_of(tensor), &mesh["tp"]);
    }
    EXPECT_EQ(block.attn.c_attn.weight.shape(), (Shape{48, 32}));
    EXPECT_EQ(block.attn.c_proj.weight.shape(), (Shape{32, 16}));
    EXPECT_EQ(model->transformer.wte.weight.shape(), (Shape{rank == 0 ? 26 : 25, 32}));
    EXPECT_TRUE(model->transformer.wte.weight.is(model->lm_head.weight));
    // Norms and positions work on this rank's tokens, the bias of rows on all.
    EXPECT_EQ(*grad_placements_of(block.ln_1.weight), Placements{Partial()});
    EXPECT_EQ(*grad_placements_of(model->transformer.wpe.weight), Placements{Partial()});
    EXPECT_EQ(grad_placements_of(block.attn.c_proj.bias), nullptr);

    int seen = 0;
    const HookHandle look =
        model->transformer.register_forward_pre_hook([&](nn::ModuleBase&, nn::TensorRefs) {
          const auto mark = [](const Tensor& x) {
            EXPECT_FALSE(is_dtensor(x));
            return mark_of(x, 0);
          };
          EXPECT_EQ(mark(block.attn.c_attn.weight), Mark::shard(0, 3));
          EXPECT_EQ(mark(block.attn.c_proj.weight), Mark::shard(1));
          EXPECT_EQ(mark(block.attn.c_proj.bias), Mark::invariant());
          EXPECT_EQ(mark(block.ln_1.weight), Mark::replicated());
          EXPECT_THROW(model->state_dict(), UnsupportedError);
          ++seen;
        });
    (*model)(batch_of(0).inputs, batch_of(0).targets).loss.backward();
    EXPECT_EQ(seen, 1);
    for (const auto& [name, tensor] : model->named_parameters()) {
      ASSERT_TRUE(is_dtensor(tensor)) << name;
      EXPECT_EQ(placements_of(tensor.grad()), placements_of(tensor)) << name;
    }
    Mesh data(world());
    EXPECT_THROW(replicate(*model, data), UnsupportedError);
    EXPECT_EQ(whole_values(*model, false), whole_values(*whole, false));
  });
}

struct Pair : nn::Module<Pair> {
  Pair() : first(add<nn::Linear>("first", 4, 8)), second(add<nn::Linear>("second", 8, 4)) {}
  Tensor forward(const Tensor& x) { return second(relu(first(x))); }
  nn::Linear& first;
  nn::Linear& second;
};

TEST(TensorParallel, RefusesTablesThatDoNotFit) {
  using enum nn::ParallelStyle;
  compared_ranks(2, [&](int) {
    Mesh mesh(world(), {{"tp", 2}});
    const auto refusal = [&](std::vector<nn::StyledModules> styles) {
      Pair pair;
      return message_of([&] { parallelize_module(pair, mesh["tp"], {.styles = styles}); });
    };
    EXPECT_TRUE(mentions(refusal({}), "Pair does not say how it may be divided"));
    EXPECT_TRUE(mentions(refusal({{"third", kRowwise}}),
                         "no module is named 'third'; there are , first, second"));
    EXPECT_TRUE(mentions(refusal({{"first", kVocabulary}}),
                         "kVocabulary does not serve 'first', a Linear"));
    EXPECT_TRUE(mentions(refusal({{"first", kColumnwise, 3}}),
                         "the 8 outputs of 'first' do not divide among 2 ranks in 3 blocks"));
    EXPECT_TRUE(mentions(refusal({{"first", kColumnwise, 1, 3}}),
                         "the 3 heads of 'first' do not divide among 2 ranks"));
    EXPECT_TRUE(mentions(refusal({{"*", kSequence}}), "kSequence serves LayerNorm"));
  });
}

// What the types refuse, each with its op, axis, marks, parameter and remedy.
TEST(TensorParallel, AWrongCompositionDoesNotRun) {
  using enum nn::ParallelStyle;
  compared_ranks(2, [&](int) {
    Mesh mesh(world(), {{"tp", 2}});
    const Tensor x = ones({3, 4});
    Pair fitting;
    parallelize_module(fitting, mesh["tp"],
                       {.styles = {{"first", kColumnwise}, {"second", kRowwise}}});
    EXPECT_EQ(fitting(x).shape(), (Shape{3, 4}));
    const auto call = [&](std::vector<nn::StyledModules> styles) {
      Pair pair;
      parallelize_module(pair, mesh["tp"], {.styles = std::move(styles)});
      return message_of([&] { pair(x); });
    };
    const std::string alone = call({{"first", kColumnwise}});
    EXPECT_TRUE(mentions(alone, "second: linear: inner dimensions differ")) << alone;
    const std::string unmatched = call({{"second", kRowwise}});
    EXPECT_TRUE(mentions(unmatched, "second: linear: inner dimensions differ")) << unmatched;

    // A bias that all ranks add to a summand.
    const Tensor weight = convert(ones({4, 4}), "tp", Mark::shard(1));
    const Tensor part = convert(x, "tp", Mark::shard(1));
    const Tensor bias = ones({4}).set_requires_grad();
    const std::string counted = message_of([&] { linear(part, weight) + bias; });
    EXPECT_TRUE(mentions(counted, "add: along 'tp' input 0")) << counted;
    EXPECT_TRUE(mentions(counted,
                         "is a summand and input 1 f32[4] cpu is invariant: the sum "
                         "would count it 2 times"))
        << counted;
    // A summand through what is not linear, whole tables beside parts, sums along parts.
    EXPECT_TRUE(mentions(message_of([&] { gelu(linear(part, weight)); }), "the op is not linear"));
    const Tensor tokens = convert(ones({2, 4, 4}), "tp", Mark::shard(1));
    EXPECT_TRUE(mentions(message_of([&] { tokens + ones({2, 4}); }), "one rank has a part"));
    EXPECT_TRUE(mentions(message_of([&] { softmax(tokens, 1); }), "goes along the dimension"));
    const Tensor uneven = convert(ones({2, 5}), "tp", Mark::shard(1), {.uneven = true});
    EXPECT_TRUE(mentions(message_of([&] { dropout(relu(uneven), 0.5); }),
                         "random numbers go by the place of an element in the whole, and its "
                         "chunks differ in length"));
    EXPECT_TRUE(mentions(message_of([&] { rand_like(tokens); }), "a part of a tensor"));
    EXPECT_TRUE(mentions(message_of([&] { convert(uneven, "tp", Mark::replicated()); }),
                         "give the whole .length"));
    nn::LayerNorm norm(4);
    const std::string whole = message_of([&] { norm(tokens); });
    EXPECT_TRUE(mentions(whole, "its gradient would be a summand that nobody adds")) << whole;
    EXPECT_TRUE(mentions(whole, "style kSequence")) << whole;
  });
}

// Another thread's context has no compute mesh to check by.
TEST(TensorParallel, OpsOfAContextWithoutAComputeMeshRefuseMarkedOperands) {
  Tensor part, loss;
  compared_ranks(2, [&](int rank) {
    Mesh mesh(world(), {{"tp", 2}});
    use_compute_mesh(mesh);
    const Tensor x = convert(ones({4, 4}), "tp", Mark::shard(1)).set_requires_grad();
    if (rank == 0) part = x, loss = mul(x, x);
  });
  Context other;
  const ContextGuard guard(other);
  const std::string refusal = message_of<UnsupportedError>([&] { part + part; });
  EXPECT_TRUE(mentions(refusal, "add: ") && mentions(refusal, "no compute mesh")) << refusal;
  EXPECT_THROW(zeros_like(part), UnsupportedError);
  EXPECT_THROW(dropout(part, 0.5), UnsupportedError);
  {
    const NoGradGuard no_grad;
    EXPECT_THROW(part.mul_(2), UnsupportedError);
  }
  // Backward goes where it is asked for: forward was checked.
  loss.backward(ones({4, 2}));
  EXPECT_EQ(part.grad().to_vector(), std::vector<double>(8, 2));
}

}  // namespace
}  // namespace tessera::distributed::test_tensor_parallel
