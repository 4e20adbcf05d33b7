// GPT-2 whose layers several ranks calculate together: losses, gradients and parameters are those
// of one process.
// ctest labels: threads
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <tessera/autograd/op_observer.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/context.h>
#include <tessera/core/parallel.h>
#include <tessera/core/random.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/distributed/data_parallel/replicate.h>
#include <tessera/distributed/mesh/mesh.h>
#include <tessera/distributed/mesh/placement.h>
#include <tessera/distributed/tensor_parallel/compute_mesh.h>
#include <tessera/distributed/tensor_parallel/convert.h>
#include <tessera/distributed/tensor_parallel/parallelize.h>
#include <tessera/distributed/tensor_parallel/vocabulary.h>
#include <tessera/nn/models/generation.h>

#include "distributed/compared_ranks.h"
#include "message_of.h"
#include "parallel/divided_training.h"

namespace tessera::distributed::test_tensor_parallel {
namespace {

constexpr int kSteps = 3;
constexpr double kTolerance = 1e-11;  // f64; of each tensor's largest element

struct Trained {
  std::vector<double> losses;
  std::vector<WholeValues> gradients;
  WholeValues parameters;
};
Trained train(const Training& training, MakeOptimizer make_optimizer) {
  Trained run;
  const auto optimizer = make_optimizer(training.model->named_parameters());
  for (int step = 0; step < kSteps; ++step) {
    const Tensor loss = training.loss(batch_of(step));
    loss.backward();
    run.losses.push_back(loss.item());
    run.gradients.push_back(wholes_of(*training.model, true));
    optimizer->step();
    optimizer->zero_grad();
  }
  run.parameters = wholes_of(*training.model, false);
  return run;
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
      expect_close(own.gradients[step], expected.gradients[step], kTolerance, "gradient");
    }
    expect_close(own.parameters, expected.parameters, kTolerance, "parameter");
  });
}

TEST(TensorParallel, LossesGradientsAndParametersAreThoseOfOneProcess) {
  for (const int ranks : {2, 4}) {
    for (const bool sequence : {false, true}) {
      compare_with_one_process(gpt, sgd, ranks, sequence);
      compare_with_one_process(gpt, adamw, ranks, sequence);
    }
  }
}

TEST(TensorParallel, SoAreThoseOfLlamaAndBert) {
  for (const bool sequence : {false, true}) {
    for (const bool head_norms : {false, true}) {
      compare_with_one_process([&] { return llama_of(2, kF64, head_norms); }, sgd, 2, sequence);
    }
    compare_with_one_process([] { return bert(); }, sgd, 2, sequence);
  }
}

// Residuals drop by tokens, attention by heads: each element as in one process.
TEST(TensorParallel, DropoutDrawsByThePlaceInTheWhole) {
  nn::models::GptConfig config = kTiny;
  config.dropout = 0.3;
  const auto dropping = [&] { return gpt_of(config); };
  for (const bool sequence : {false, true}) {
    for (const bool recompute : {false, true}) {
      compare_with_one_process(dropping, sgd, 2, sequence, recompute);
    }
    compare_with_one_process(dropping, sgd, 4, sequence);
    compare_with_one_process([] { return bert(0.3); }, sgd, 2, sequence);
  }
}

TEST(TensorParallel, WholeLogitsAndRecomputedBlocksGiveTheSame) {
  for (const bool sequence : {false, true}) {
    compare_with_one_process([] { return gpt_of(kTiny, kF64, nn::models::Logits::kAll); }, sgd, 2,
                             sequence);
    compare_with_one_process(gpt, sgd, 2, sequence, true);
  }
}

// And in backward it gathers once more what the column products have read.
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
      const int64_t again = backward ? expected : 0;
      EXPECT_EQ(count(records, Operation::kAllGather), expected + again) << backward;
      EXPECT_EQ(count(records, Operation::kReduceScatter), expected) << backward;
      EXPECT_EQ(count(records, Operation::kAllReduce), backward ? 1 : 3);
      EXPECT_EQ(std::ssize(records), 2 * expected + again + (backward ? 1 : 3));
    }
  });
}

// Query, key and value, and gate and up, read what one gather has brought, in backward too. BERT's
// pooler gathers the tokens as well, and the gradient of that is a rank's own chunk.
TEST(TensorParallel, SoDoBlocksOfLlamaAndBert) {
  compared_ranks(2, [&](int) {
    Mesh mesh(world(), {{"tp", 2}});
    constexpr int64_t kBlocks = 2;
    for (const bool is_bert : {false, true}) {
      const Training training = is_bert ? bert() : llama();
      parallelize_module(*training.model, mesh["tp"], {.sequence = true});
      const auto calls = [&](const CommTrace::Scope& scope) {
        const auto records = scope.records();
        return std::pair(count(records, Operation::kAllGather),
                         count(records, Operation::kReduceScatter));
      };
      const CommTrace::Scope forward(*rank_context().trace);
      const Tensor loss = training.loss(batch_of(0));
      EXPECT_EQ(calls(forward), std::pair(2 * kBlocks + 1, 2 * kBlocks + 1)) << is_bert;
      const CommTrace::Scope backward(*rank_context().trace);
      loss.backward();
      const int64_t heads = is_bert ? 0 : 1;
      EXPECT_EQ(calls(backward),
                std::pair(2 * kBlocks + 1 + 2 * kBlocks + heads, 2 * kBlocks + heads))
          << is_bert;
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
    EXPECT_EQ(wholes_of(*model, false), wholes_of(*whole, false));
  });
}

Tensor numbers_of(const Shape& shape, uint64_t stream) {
  return randn(shape, {.dtype = kF64}, RandomStream{11, stream});
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
    EXPECT_TRUE(mentions(refusal({{"first", kHeads}}), "kHeads serves LayerNorm"));
    EXPECT_TRUE(mentions(refusal({{"first", kRowwise, 3}}),
                         "the 4 inputs of 'first' do not divide among 2 ranks in 3 blocks"));
    for (const nn::ParallelStyle style : {kColumnwise, kRowwise}) {
      EXPECT_TRUE(mentions(refusal({{"first", style, 0}}), "in 0 blocks"));
    }
    EXPECT_TRUE(mentions(refusal({{"first", kLossHead}, {"second", kLossHead}, {"fir", kWhole}}),
                         "no module is named 'fir'"));
    // A table and a head that share their weight.
    const auto tied = [&](nn::ParallelStyle of_head) {
      auto model = tiny_model();
      std::vector<nn::StyledModules> styles = model->parallel_styles();
      for (nn::StyledModules& entry : styles) {
        if (entry.pattern == "lm_head") entry.style = of_head;
      }
      return message_of<ConfigError>(
          [&] { parallelize_module(*model, mesh["tp"], {.styles = styles}); });
    };
    const std::string unlike = tied(kRowwise);
    EXPECT_TRUE(mentions(unlike,
                         "'lm_head.weight' is tied to a parameter that is Shard(0) and "
                         "would be Shard(1); give both modules styles that cut alike"))
        << unlike;
  });
}

// Of what a column product has read a rank keeps its tokens: backwards gather them as often as they
// come, second derivatives too, and refuse tokens that were written since.
TEST(TensorParallel, TokensAreGatheredAgainForEachBackwardThatReadsThem) {
  using enum nn::ParallelStyle;
  constexpr int kRanks = 2;
  const Tensor tokens = randn({2, 4, 4}, {.dtype = kF64}, RandomStream{3, 0});
  struct Outcome {
    std::vector<double> once, twice, second;
  };
  const auto run = [](Pair& pair, const Tensor& x, bool divided) {
    const auto loss_of = [&] {
      const Tensor squares = sum(square(pair(x)));
      return divided ? convert(squares, "tp", Mark::invariant()) : squares;
    };
    Outcome outcome;
    const Tensor loss = loss_of();
    backward(loss, {}, {.retain_graph = true});
    outcome.once = x.grad().to_vector();
    loss.backward();
    outcome.twice = x.grad().to_vector();
    x.set_grad({});
    const Tensor gradient = grad(loss_of(), x, {}, {.create_graph = true})[0];
    sum(square(gradient)).backward();
    outcome.second = x.grad().to_vector();
    return outcome;
  };
  const auto make = [] {
    manual_seed(2);
    auto pair = std::make_unique<Pair>();
    pair->to(kF64);
    return pair;
  };
  Outcome expected;
  {
    Context context;
    const ContextGuard guard(context);
    const Tensor x = tokens.clone().set_requires_grad();
    expected = run(*make(), x, false);
  }
  compared_ranks(kRanks, [&](int rank) {
    Mesh mesh(world(), {{"tp", kRanks}});
    const auto pair = make();
    parallelize_module(
        *pair, mesh["tp"],
        {.styles = {{"first", kColumnwise}, {"second", kRowwise}}, .sequence = true});
    const Tensor x = convert(tokens, "tp", Mark::shard(1)).set_requires_grad();
    const Outcome own = run(*pair, x, true);
    const auto expect_chunk = [&](const std::vector<double>& got,
                                  const std::vector<double>& whole) {
      const Tensor all = tensor(std::span<const double>(whole), tokens.shape(), kF64);
      const std::vector<double> chunk = chunk_at(all, Mark::shard(1), kRanks, rank).to_vector();
      ASSERT_EQ(got.size(), chunk.size());
      for (size_t i = 0; i < chunk.size(); ++i) EXPECT_NEAR(got[i], chunk[i], 1e-12);
    };
    expect_chunk(own.once, expected.once);
    expect_chunk(own.twice, expected.twice);
    expect_chunk(own.second, expected.second);

    const Tensor y = sum(square((*pair)(x)));
    {
      const NoGradGuard no_grad;
      x.add_(1);
    }
    EXPECT_TRUE(mentions(message_of<AutogradError>([&] { y.backward(); }), "written in place"));
  });
}

TEST(TensorParallel, RefusesModelsThatDoNotFit) {
  using enum nn::ParallelStyle;
  compared_ranks(2, [&](int) {
    Mesh mesh(world(), {{"dp", 1}, {"tp", 2}});
    const auto refusal = [&](nn::ModuleBase& model, std::vector<nn::StyledModules> styles) {
      return message_of<ConfigError>(
          [&] { parallelize_module(model, mesh["tp"], {.styles = styles}); });
    };
    Pair pair;
    EXPECT_TRUE(mentions(message_of<ConfigError>([&] {
                           parallelize_module(pair, mesh, {.styles = {{"first", kColumnwise}}});
                         }),
                         "along one axis"));
    parallelize_module(pair, mesh["tp"], {.styles = {{"first", kColumnwise}}});
    EXPECT_TRUE(mentions(refusal(pair, {{"first", kColumnwise}}), "'first' is divided already"));
    Pair trained;
    trained(ones({3, 4})).sum().backward();
    EXPECT_TRUE(mentions(refusal(trained, {{"first", kColumnwise}}), "has a gradient"));
    // Each rank has an entry, or there is no vocabulary to divide.
    nn::Embedding one(1, 4), two(2, 4);
    EXPECT_TRUE(mentions(refusal(one, {{"", kVocabulary}}), "the 1 entries of '' are too few"));
    parallelize_module(two, mesh["tp"], {.styles = {{"", kVocabulary}}});
    nn::Linear narrow(4, 1);
    EXPECT_TRUE(mentions(refusal(narrow, {{"", kLossHead}}), "the 1 entries of '' are too few"));
    nn::models::Gpt tied({.vocab_size = 8, .context = 4, .width = 8, .layers = 1, .heads = 2});
    const std::string unlike =
        refusal(tied, {{"transformer.wte", kVocabulary}, {"lm_head", kRowwise}});
    EXPECT_TRUE(mentions(unlike, "is tied to a parameter that is")) << unlike;
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
    // What a part of a vocabulary looks up is no part itself.
    const VocabularyPart words{"tp", 0, 8};
    const Tensor index = convert(zeros({4}, {.dtype = kI64}), "tp", Mark::summand());
    EXPECT_TRUE(mentions(message_of([&] { embedding(words, index, weight); }), "the index"));
    EXPECT_TRUE(
        mentions(message_of([&] { linear_cross_entropy(words, x, weight, index, -100, true); }),
                 "the target"));
    nn::LayerNorm norm(4);
    const std::string whole = message_of([&] { norm(tokens); });
    EXPECT_TRUE(mentions(whole, "its gradient would be a summand that nobody adds")) << whole;
    EXPECT_TRUE(mentions(whole, "style kSequence")) << whole;
  });
}

// The fused ops of a forward, each as often as it was called. The loss of a vocabulary of which each
// rank has a part is made of other ops.
class FusedOps : public OpObserver {
 public:
  void saw(const Op& op, std::span<const Tensor>, std::span<const Tensor>) override {
    if (!op.composed.empty() && op.name != "linear_cross_entropy") ++calls[std::string(op.name)];
  }
  std::map<std::string, int> calls;
};
std::map<std::string, int> fused_ops_of(const Training& training) {
  FusedOps seen;
  const ScopedValue<OpObserver*> scope(Context::current().slot<OpObserverSlot>().observer, &seen);
  training.loss(batch_of(0));
  return seen.calls;
}

TEST(TensorParallel, WhatIsFusedInOneProcessStaysSo) {
  nn::models::GptConfig dropping = kTiny;
  dropping.dropout = 0.3;
  for (const std::function<Training()>& make :
       {std::function<Training()>(gpt), std::function<Training()>([&] { return gpt_of(dropping); }),
        std::function<Training()>(llama), std::function<Training()>([] { return bert(); })}) {
    std::map<std::string, int> expected;
    {
      Context context;
      const ContextGuard guard(context);
      expected = fused_ops_of(make());
    }
    EXPECT_FALSE(expected.empty());
    for (const bool sequence : {false, true}) {
      compared_ranks(2, [&](int) {
        Mesh mesh(world(), {{"tp", 2}});
        const Training training = make();
        parallelize_module(*training.model, mesh["tp"], {.sequence = sequence});
        EXPECT_EQ(fused_ops_of(training), expected) << "sequence " << sequence;
      });
    }
  }
}

// Answers with a cache, and with sequence shards the logits of the last token alone.
TEST(TensorParallel, WhatIsNotBuiltIsATypedErrorOnEveryRank) {
  compared_ranks(2, [&](int) {
    const NoGradGuard no_grad;
    Mesh mesh(world(), {{"tp", 2}});
    const Batch batch = batch_of(0);
    for (const bool sequence : {false, true}) {
      const auto model = tiny_model();
      parallelize_module(*model, mesh["tp"], {.sequence = sequence});
      nn::models::gpt2::KvCache cache(kTiny, 2, kF64);
      EXPECT_THROW((*model)(batch.inputs, {}, nn::models::Logits::kAll, &cache), Error);
      const auto last = [&] { (*model)(batch.inputs, {}, nn::models::Logits::kLast); };
      if (sequence) {
        EXPECT_THROW(last(), UnsupportedError);
      } else {
        EXPECT_NO_THROW(last());
      }
      const std::vector<int64_t> prompt = {1, 2, 3};
      EXPECT_THROW(nn::models::generate(*model, prompt, {.max_tokens = 2, .temperature = 0}),
                   Error);
    }
  });
}

// As where a state is loaded or memory given: any of the parameters, and the others stay.
TEST(TensorParallel, AParameterThatGotOtherMemoryIsReadThere) {
  using enum nn::ParallelStyle;
  const Tensor x = numbers_of({3, 4}, 5).to(kF32);
  for (const char* name : {"first.weight", "first.bias", "second.weight", "second.bias"}) {
    SCOPED_TRACE(name);
    const NoGradGuard no_grad;
    manual_seed(2);
    Pair whole;
    whole.get_parameter(name).mul_(3);
    const std::vector<double> expected = whole(x).to_vector();
    compared_ranks(2, [&](int) {
      Mesh mesh(world(), {{"tp", 2}});
      manual_seed(2);
      Pair pair;
      parallelize_module(pair, mesh["tp"],
                         {.styles = {{"first", kColumnwise}, {"second", kRowwise}}});
      pair(x);
      const Tensor own = pair.get_parameter(name);
      own.set_data(raw::alias(own) * 3);
      own.bump_version("other memory");
      const std::vector<double> found = pair(x).to_vector();
      for (size_t i = 0; i < expected.size(); ++i) {
        EXPECT_NEAR(found[i], expected[i], 16 * 0x1p-23 * (1 + std::abs(expected[i]))) << i;
      }
    });
  }
}

// ---- Parts of a vocabulary ----------------------------------------------------------------------

constexpr int64_t kWords = 7, kFeatures = 3;  // words that do not divide

VocabularyPart words_of(int ranks, int rank) {
  return {"tp", chunk_of(kWords, ranks, rank).first, kWords};
}
Tensor rows_of(const Tensor& table) {
  return convert(table, "tp", Mark::shard(0), {.uneven = true});
}

TEST(TensorParallel, PartsOfAVocabularyLookUpWhatTheWholeDoes) {
  const Tensor index = tensor({0, 6, 3, 2, 5, 1, 4, 3, 0, 6}, kI64);
  const Tensor factor = numbers_of({10, kFeatures}, 1);
  for (const int ranks : {2, 3}) {
    for (int64_t padding = -1; padding < kWords; ++padding) {
      SCOPED_TRACE(testing::Message() << ranks << " ranks, padding " << padding);
      const auto padding_idx = padding < 0 ? std::nullopt : std::optional(padding);
      const Tensor whole = numbers_of({kWords, kFeatures}, 2).set_requires_grad();
      const Tensor expected = tessera::embedding(index, whole, padding_idx);
      (expected * factor).sum().backward();
      compared_ranks(ranks, [&](int rank) {
        Mesh mesh(world(), {{"tp", ranks}});
        use_compute_mesh(mesh);
        const Tensor table = numbers_of({kWords, kFeatures}, 2).set_requires_grad();
        const Tensor rows = embedding(words_of(ranks, rank), index, rows_of(table), padding_idx);
        const Tensor found = convert(rows, "tp", Mark::invariant());
        EXPECT_EQ(found.to_vector(), expected.to_vector());
        (found * factor).sum().backward();
        EXPECT_EQ(table.grad().to_vector(), whole.grad().to_vector());
      });
    }
  }
}

TEST(TensorParallel, TheLossOverPartsOfAVocabularyIsThatOverTheWhole) {
  constexpr int64_t kIgnored = 5;  // a word, too
  const Tensor target = tensor({0, 6, 3, 5, 2, 5, 4}, kI64);
  const auto close = [](const Tensor& got, const Tensor& expected) {
    const auto a = got.to_vector(), b = expected.to_vector();
    ASSERT_EQ(a.size(), b.size());
    // A sum of seven terms in another order.
    for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 64 * 0x1p-52) << i;
  };
  for (const int ranks : {2, 3}) {
    for (const bool mean : {true, false}) {
      SCOPED_TRACE(testing::Message() << ranks << " ranks, mean " << mean);
      const Tensor x = numbers_of({7, kFeatures}, 3).set_requires_grad();
      const Tensor whole = numbers_of({kWords, kFeatures}, 4).set_requires_grad();
      const Tensor expected = cross_entropy(
          linear(x, whole), target,
          {.ignore_index = kIgnored, .reduction = mean ? Reduction::kMean : Reduction::kSum});
      expected.backward();
      compared_ranks(ranks, [&](int rank) {
        Mesh mesh(world(), {{"tp", ranks}});
        use_compute_mesh(mesh);
        const Tensor own = numbers_of({7, kFeatures}, 3).set_requires_grad();
        const Tensor table = numbers_of({kWords, kFeatures}, 4).set_requires_grad();
        const Tensor loss =
            linear_cross_entropy(words_of(ranks, rank), convert(own, "tp", Mark::replicated()),
                                 rows_of(table), target, kIgnored, mean);
        close(loss, expected);
        loss.backward();
        close(own.grad(), x.grad());
        close(table.grad(), whole.grad());
      });
    }
  }
}

TEST(TensorParallel, TheLossOverPartsOf16BitLogitsIsOneOfF32) {
  const Tensor target = tensor({0, 6, 3, 5, 2, 5, 4}, kI64);
  const Tensor x = (numbers_of({7, kFeatures}, 3) * 4.0).to(kBF16);
  const Tensor whole = (numbers_of({kWords, kFeatures}, 4) * 4.0).to(kBF16);
  const double expected = cross_entropy(linear(x, whole).to(kF64), target).item();
  compared_ranks(2, [&](int rank) {
    Mesh mesh(world(), {{"tp", 2}});
    use_compute_mesh(mesh);
    const Tensor loss =
        linear_cross_entropy(words_of(2, rank), convert(x, "tp", Mark::replicated()),
                             rows_of(whole.clone()), target, -100, true);
    EXPECT_EQ(loss.dtype(), kF32);
    EXPECT_NEAR(loss.item(), expected, 64 * 0x1p-23 * expected);
  });
}

TEST(TensorParallel, EntriesThatNoRankHasAreErrorsOnEveryRank) {
  for (const int ranks : {2, 3}) {
    compared_ranks(ranks, [&](int rank) {
      Mesh mesh(world(), {{"tp", ranks}});
      use_compute_mesh(mesh);
      const Tensor rows = rows_of(numbers_of({kWords, kFeatures}, 2));
      const VocabularyPart part = words_of(ranks, rank);
      for (const int64_t entry : {int64_t{-1}, kWords, kWords + 1, int64_t{-100}}) {
        EXPECT_THROW(embedding(part, tensor({0, entry}, kI64), rows), IndexError) << entry;
      }
    });
  }
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
