// Models that are trained by pipeline stages through the Accelerator: losses, norms and parameters
// have the bits of one process that accumulates the same micro-batches.
// ctest labels: threads
#include <latch>

#include <tessera/data/dataloader.h>
#include <tessera/distributed/mesh/dtensor.h>
#include <tessera/nn/dropout.h>
#include <tessera/nn/norm.h>
#include <tessera/optim/muon.h>

#include "finished_process.h"
#include "message_of.h"
#include "parallel/pipeline_training.h"

namespace tessera::test_pipeline_training {
namespace {

using namespace test_pipeline;

void expect_same_bits(const Trained& own, const Trained& expected, int rank) {
  EXPECT_EQ(own.losses, expected.losses) << rank;
  EXPECT_EQ(own.scales, expected.scales) << rank;
  EXPECT_EQ(own.norms, expected.norms) << rank;
  if (rank != 0) return;
  EXPECT_EQ(own.parameters.size(), expected.parameters.size());
  for (const auto& [name, values] : expected.parameters) {
    ASSERT_TRUE(own.parameters.contains(name)) << name;
    EXPECT_TRUE(own.parameters.at(name) == values) << name;
  }
}

void expect_as_alone(const MakeTraining& make, const Way& way, bool ties_apart = false) {
  SCOPED_TRACE(std::to_string(way.pp) + " ranks, " + std::to_string(way.stages_per_rank) +
               " stages each, " + std::to_string(way.micro_batches) + " micro-batches");
  Way alone = way;
  alone.options.ties_apart = ties_apart;
  alone.schedule = distributed::PipelineSchedule::kOneFOneB;  // if it has several stages
  const Trained expected = train_alone(make, alone);
  compared_ranks(way.pp, [&](int rank) { expect_same_bits(train(make, way), expected, rank); });
}

void freeze_in_turn(nn::ModuleBase& model, int step);

// ---- Bits --------------------------------------------------------------------------------------

TEST(PipelineTraining, GptHasTheBitsOfOneProcess) {
  for (const int pp : {2, 3, 4}) expect_as_alone(untied, {.pp = pp});
  for (const int64_t micro_batches : {1, 2, 3, 8}) {
    expect_as_alone(untied, {.pp = 2, .micro_batches = micro_batches});
  }
  expect_as_alone(untied, {.pp = 2, .stages_per_rank = 2});
  expect_as_alone(untied, {.pp = 2, .schedule = distributed::PipelineSchedule::kGPipe});
}

// Gradients of weights are calculated later than those of inputs.
TEST(PipelineTraining, BackwardsInTwoHalvesHaveTheBitsOfOneProcess) {
  constexpr auto kHalves = distributed::PipelineSchedule::kZeroBubbleH1;
  for (const int pp : {2, 3, 4}) expect_as_alone(untied, {.pp = pp, .schedule = kHalves});
  for (const int64_t micro_batches : {1, 2, 8}) {
    expect_as_alone(untied, {.pp = 2, .micro_batches = micro_batches, .schedule = kHalves});
  }
  for (const MakeTraining& make : {MakeTraining(llama), MakeTraining(bert), MakeTraining(normed)}) {
    expect_as_alone(make, {.pp = 3, .schedule = kHalves});
  }
  expect_as_alone([] { return gpt(true); }, {.pp = 3, .schedule = kHalves}, true);
  for (const bool checkpoints : {false, true}) {
    expect_as_alone([] { return gpt(false, 0.2); },
                    {.pp = 3, .schedule = kHalves, .checkpoints = checkpoints});
  }
  expect_as_alone([] { return gpt(false, 0, nn::models::Logits::kWithoutLoss); },
                  {.pp = 2, .schedule = kHalves});
  for (const Precision precision : {Precision::kBF16, Precision::kFP16}) {
    expect_as_alone(untied, {.pp = 3, .schedule = kHalves, .precision = precision});
  }
  expect_as_alone(untied, {.pp = 2, .schedule = kHalves, .weights = {3, 1, 2, 5}});
  expect_as_alone(untied,
                  {.pp = 2, .schedule = kHalves, .zeroes = false, .change = double_some_gradients});
  expect_as_alone(untied, {.pp = 2, .schedule = kHalves, .before_step = freeze_in_turn});
}

TEST(PipelineTraining, FewerMicroBatchesThanStagesRun) {
  expect_as_alone(untied, {.pp = 4, .micro_batches = 2});
}

TEST(PipelineTraining, ATiedTableIsSummedApartInOneProcessToo) {
  for (const int pp : {2, 3}) {
    expect_as_alone([] { return gpt(true); }, {.pp = pp, .micro_batches = 3}, true);
  }
  expect_as_alone([] { return gpt(true); }, {.pp = 2, .stages_per_rank = 2}, true);
}

TEST(PipelineTraining, LlamaAndBertHaveTheBitsOfOneProcess) {
  for (const int pp : {2, 3}) {
    expect_as_alone(llama, {.pp = pp});
    expect_as_alone(bert, {.pp = pp});
  }
  expect_as_alone(llama, {.pp = 2, .stages_per_rank = 2});
}

TEST(PipelineTraining, DropoutDrawsTheNumbersOfOneProcess) {
  const auto dropping = [] { return gpt(false, 0.2); };
  expect_as_alone(dropping, {.pp = 3});
  expect_as_alone(dropping, {.pp = 2, .stages_per_rank = 2});
  expect_as_alone(dropping, {.pp = 2, .checkpoints = true});
}

TEST(PipelineTraining, RecomputedBlocksGiveTheSame) {
  expect_as_alone(llama, {.pp = 2, .checkpoints = true});
  expect_as_alone(untied, {.pp = 2, .stages_per_rank = 2, .checkpoints = true});
}

TEST(PipelineTraining, TheHeadsFusedLossGivesTheSame) {
  const auto fused = [] { return gpt(false, 0, nn::models::Logits::kWithoutLoss); };
  expect_as_alone(fused, {.pp = 2});
}

TEST(PipelineTraining, UnequalMicroBatchesCountByTheirWeights) {
  expect_as_alone(untied, {.pp = 2, .weights = {3, 1, 2, 5}});
}

TEST(PipelineTraining, GradientsThatNobodyClearedAreAddedTo) {
  expect_as_alone(untied, {.pp = 2, .zeroes = false});
  expect_as_alone(untied, {.pp = 2, .micro_batches = 1, .zeroes = false});
}

TEST(PipelineTraining, HooksOfParametersChangeTheirGradients) {
  for (const bool zeroes : {true, false}) {
    expect_as_alone(untied, {.pp = 2, .zeroes = zeroes, .change = double_some_gradients});
    expect_as_alone(
        untied,
        {.pp = 2, .weights = {3, 1, 2, 5}, .zeroes = zeroes, .change = double_some_gradients});
  }
}

TEST(PipelineTraining, HooksBehindTheSumRunOnceAStepWhereTheParameterLies) {
  compared_ranks(2, [&](int) {
    Accelerator accelerator(settings_of({.pp = 2}));
    const Training training = untied();
    std::map<std::string, std::vector<int64_t>> sizes;
    for (const auto& [name, parameter] : training.model->named_parameters()) {
      register_post_accumulate_hook(parameter, [&sizes, name](const Tensor& leaf) {
        sizes[name].push_back(leaf.grad().numel());
      });
    }
    Pipeline pipeline = accelerator.pipeline(*training.model);
    for (int step = 0; step < 2; ++step) {
      pipeline.step(std::vector{batch_of(0), batch_of(1), batch_of(2)}, training.loss);
      training.model->zero_grad();
    }
    for (const auto& [name, parameter] : training.model->named_parameters()) {
      EXPECT_EQ(sizes[name], std::vector<int64_t>(2, parameter.numel())) << name;
    }
  });
}

TEST(PipelineTraining, MixedPrecisionHasTheBitsOfOneProcess) {
  expect_as_alone(untied, {.pp = 2, .precision = Precision::kBF16});
  expect_as_alone(untied, {.pp = 2, .precision = Precision::kFP16});
}

// Gradients overflow in some stage, and all leave the step out.
TEST(PipelineTraining, AStepIsLeftOutByAllStagesOrByNone) {
  const Way way{.pp = 2, .precision = Precision::kFP16, .init_scale = 0x1p24};
  const Trained alone = train_alone(untied, way);
  EXPECT_LT(alone.scales.back(), way.init_scale);
  Way finite = way;
  finite.init_scale = 65536;
  EXPECT_NE(alone.parameters, train_alone(untied, finite).parameters);
  compared_ranks(2, [&](int rank) {
    const Trained own = train(untied, way);
    EXPECT_EQ(own.scales, alone.scales);
    EXPECT_TRUE(rank != 0 || own.parameters == alone.parameters);
  });
}

TEST(PipelineTraining, RunningStatisticsOfAllStagesAreSaved) {
  for (const int pp : {2, 3}) expect_as_alone(normed, {.pp = pp, .micro_batches = 2});
}

TEST(PipelineTraining, MuonBringsItsMatricesTogether) {
  const MakeOptimizer muon = [](const NamedTensors& all) -> std::unique_ptr<optim::Optimizer> {
    NamedTensors matrices;
    for (const NamedTensor& named : all) {
      if (named.tensor.dim() == 2) matrices.push_back(named);
    }
    return std::make_unique<optim::Muon>(matrices, optim::MuonOptions{.lr = 1e-2});
  };
  expect_as_alone(untied, {.pp = 2, .optimizer = muon});
}

TEST(PipelineTraining, FrozenStagesSendNoGradients) {
  const auto freeze = [](const std::string& prefix) {
    return [prefix](nn::ModuleBase& model) {
      for (const auto& [name, tensor] : model.named_parameters()) {
        if (name.starts_with(prefix)) tensor.set_requires_grad(false);
      }
    };
  };
  for (const char* prefix : {"transformer.w", "transformer.h.2", "lm_head"}) {
    expect_as_alone(untied, {.pp = 2, .change = freeze(prefix)});
  }
  const auto whole_first = [](nn::ModuleBase& model) {
    for (const auto& [name, tensor] : model.named_parameters()) {
      tensor.set_requires_grad(name.starts_with("transformer.ln_f") || name.starts_with("lm_head"));
    }
  };
  expect_as_alone(untied, {.pp = 2, .change = whole_first});
}

// The first stage, then the last one, then all. What is frozen keeps the gradient that nobody cleared.
void freeze_in_turn(nn::ModuleBase& model, int step) {
  for (const auto& [name, tensor] : model.named_parameters()) {
    const bool of_last = name.starts_with("transformer.h.2") ||
                         name.starts_with("transformer.h.3") ||
                         name.starts_with("transformer.ln_f") || name.starts_with("lm_head");
    tensor.set_requires_grad(step == 2 || of_last == (step == 0));
  }
}

TEST(PipelineTraining, WhatRequiresGradMayChangeBetweenSteps) {
  for (const bool zeroes : {true, false}) {
    for (const int64_t micro_batches : {1, 3}) {
      SCOPED_TRACE(zeroes);
      expect_as_alone(untied, {.pp = 2,
                               .micro_batches = micro_batches,
                               .zeroes = zeroes,
                               .before_step = freeze_in_turn});
    }
  }
}

// A block that draws numbers only while it is trained: other stages draw as many before theirs.
struct AskingBlock : nn::Module<AskingBlock> {
  explicit AskingBlock(int64_t width)
      : fc(add<nn::Linear>("fc", width, width)), dropout(add<nn::Dropout>("dropout", 0.3)) {}
  Tensor forward(const Tensor& x) {
    const Tensor y = fc(x);
    return x + (fc.weight.requires_grad() ? dropout(y) : y);
  }
  nn::Linear& fc;
  nn::Dropout& dropout;
};

TEST(PipelineTraining, FrozenParametersAreFrozenInAllStages) {
  const auto freeze = [](nn::ModuleBase& model, int step) {
    for (const auto& [name, tensor] : model.named_parameters()) {
      if (name.starts_with("blocks.0.fc")) tensor.set_requires_grad(step != 1);
    }
  };
  for (const int pp : {2, 3}) {
    expect_as_alone(stacked<AskingBlock>, {.pp = pp, .micro_batches = 2, .before_step = freeze});
  }
}

// Whoever looks at gradients (clipping, optimizers, averages) finds those of the same parameters.
TEST(PipelineTraining, AllRanksHaveGradientsOfTheSameParameters) {
  compared_ranks(3, [&](int) {
    Accelerator accelerator(settings_of({.pp = 3, .micro_batches = 2}));
    const Training training = untied();
    Gpt& model = static_cast<Gpt&>(*training.model);
    Pipeline pipeline = accelerator.pipeline(model);
    const auto of_which = [&] {
      std::vector<bool> found;
      for (const Tensor& parameter : model.parameters()) {
        found.push_back(parameter.grad().defined());
        if (found.back()) {
          EXPECT_EQ(parameter.grad().numel(), parameter.numel());
        }
      }
      return found;
    };
    const std::vector<Batch> window = {batch_of(0), batch_of(1)};
    pipeline.step(window, training.loss);
    EXPECT_EQ(of_which(), std::vector<bool>(model.parameters().size(), true));
    // Those of a part that is frozen meanwhile go with the next zero_grad() alone.
    for (const auto& [name, tensor] : model.named_parameters()) {
      if (name.starts_with("transformer.h.1")) tensor.set_requires_grad(false);
      tensor.set_grad(Tensor());
    }
    pipeline.step(window, training.loss);
    std::vector<bool> expected;
    for (const auto& [name, tensor] : model.named_parameters()) {
      expected.push_back(!name.starts_with("transformer.h.1"));
    }
    EXPECT_EQ(of_which(), expected);
  });
}

// ---- With data-parallel ranks ------------------------------------------------------------------

TEST(PipelineTraining, BesideDataParallelRanksGradientsAreAddedUp) {
  for (const bool tied : {false, true}) {
    const auto make = [tied] { return gpt(tied); };
    const Trained expected =
        train_alone(make, {.micro_batches = 4, .weights = {1, 3, 2, 1}, .dtype = kF64});
    compared_ranks(4, [&](int rank) {
      const Trained own = train(
          make, {.pp = 2, .micro_batches = 2, .weights_of_ranks = {{1, 2}, {3, 1}}, .dtype = kF64});
      for (size_t step = 0; step < kSteps; ++step) {
        EXPECT_NEAR(own.norms[step], expected.norms[step], 1e-11 * expected.norms[step]);
      }
      if (rank != 0) return;
      for (const auto& [name, values] : expected.parameters) {
        const std::vector<double>& got = own.parameters.at(name);
        for (size_t i = 0; i < values.size(); ++i) ASSERT_NEAR(got[i], values[i], 1e-11) << name;
      }
    });
  }
}

// ---- State -------------------------------------------------------------------------------------

TEST(PipelineTraining, ACheckpointGoesOnWithAnyNumberOfStages) {
  const auto dropping = [] { return gpt(false, 0.2); };
  const Trained whole = train_alone(dropping, {});
  const auto from = [&](int before, int after) {
    const TestFolder folder;
    const Way way{.pp = before, .last = 2, .save = folder.path("state")};
    compared_ranks(before, [&](int) { train(dropping, way); });
    const Way on{.pp = after, .first = 2, .load = folder.path("state")};
    compared_ranks(after, [&](int rank) {
      const Trained rest = train(dropping, on);
      EXPECT_EQ(rest.losses.at(0), whole.losses.at(2));
      EXPECT_TRUE(rank != 0 || rest.parameters == whole.parameters) << before << " " << after;
    });
  };
  from(2, 1);
  from(1, 2);
  from(3, 2);
}

// What its product saves for backward is a buffer.
struct ScaledBlock : nn::Module<ScaledBlock> {
  explicit ScaledBlock(int64_t width)
      : fc(add<nn::Linear>("fc", width, width)), scale(buffer("scale", full({width}, 0.5))) {}
  Tensor forward(const Tensor& x) { return fc(x) * scale + x; }
  nn::Linear& fc;
  const Tensor& scale;
};

TEST(PipelineTraining, BuffersThatNobodyHasWrittenAreNotSent) {
  constexpr int64_t kBytes = 16 * 4;  // of each of four
  compared_ranks(2, [&](int rank) {
    Accelerator accelerator(settings_of({.pp = 2}));
    const Training training = stacked<ScaledBlock>();
    Pipeline pipeline = accelerator.pipeline(*training.model);
    const std::vector window = {batch_of(0), batch_of(1)};
    const auto sent = [&](const std::function<void()>& body) {
      const distributed::CommTrace::Scope scope(*distributed::rank_context().trace);
      body();
      int64_t bytes = 0;
      for (const distributed::CommRecord& record : scope.records()) {
        if (record.operation == distributed::Operation::kBroadcast && record.tag == "buffers") {
          bytes += record.bytes;
        }
      }
      return bytes;
    };
    const auto step = [&] { pipeline.step(window, training.loss); };
    const auto evaluate = [&] { pipeline.evaluate(window, training.loss); };
    const auto buffer = [&](int block) {
      return static_cast<ScaledBlock&>(training.model->submodule("blocks." + std::to_string(block)))
          .scale;
    };
    EXPECT_EQ(sent(step), 4 * kBytes);
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(sent(step), 0);
      EXPECT_EQ(sent(evaluate), 0);
    }
    // Written by the rank that has the stage, by all ranks, by the other one.
    for (const int block : {0, 3}) {
      for (const int writers : {0, 1, 2}) {
        const bool has_it = rank == (block == 3 ? 1 : 0);
        const bool writes = writers == 1 || has_it == (writers == 0);
        if (writes) buffer(block).mul_(has_it ? 1.25 : 3.0);
        EXPECT_EQ(sent(evaluate), kBytes) << block << writers;
        EXPECT_EQ(sent(step), 0) << block << writers;
        EXPECT_EQ(buffer(block).to_vector(),
                  std::vector<double>(16, writers == 0 ? 0.625 : 0.78125))
            << block << writers;
      }
    }
    // Other elements behind the same tensor.
    buffer(1).set_data(full({16}, 2.0));
    EXPECT_EQ(sent(step), kBytes);
  });
}

// Rank 0's buffers arrive while backwards of earlier micro-batches are still to come.
TEST(PipelineTraining, BuffersThatGraphsHaveSavedAreNotWritten) {
  for (const Sharding sharding : {Sharding::kDdp, Sharding::kFsdp}) {
    compared_ranks(4, [&](int) {
      Accelerator accelerator(settings_of({.pp = 2, .sharding = sharding}));
      const Training training = stacked<ScaledBlock>();
      Pipeline pipeline = accelerator.pipeline(*training.model);
      const std::vector window = {batch_of(0), batch_of(1), batch_of(2), batch_of(3)};
      EXPECT_NO_THROW(pipeline.step(window, training.loss));
    });
  }
}

TEST(PipelineTraining, ARankHoldsTheParametersOfItsStagesAlone) {
  compared_ranks(2, [&](int rank) {
    Accelerator accelerator(settings_of({.pp = 2}));
    const Training training = untied();
    const int64_t elements = training.model->num_parameters();
    accelerator.prepare(*training.model);
    EXPECT_EQ(training.model->num_parameters(), elements);
    for (const auto& [name, tensor] : training.model->named_parameters()) {
      const bool of_last = name.starts_with("transformer.h.2") ||
                           name.starts_with("transformer.h.3") ||
                           name.starts_with("transformer.ln_f") || name.starts_with("lm_head");
      EXPECT_EQ(tensor.numel() > 0, of_last == (rank == 1)) << name;
    }
  });
}

TEST(PipelineTraining, EvaluationGivesEveryRankTheResultsOfOneProcess) {
  const auto losses_and_logits = [](const Way& way, TensorList& losses, TensorList& logits) {
    Accelerator accelerator(settings_of(way));
    const Training training = untied();
    Gpt& model = static_cast<Gpt&>(*training.model);
    Pipeline pipeline = accelerator.pipeline(model);
    model.eval();
    const std::vector<Batch> window = {batch_of(0), batch_of(1), batch_of(2)};
    losses = pipeline.evaluate(window, training.loss);
    logits = pipeline.evaluate(
        window, [&](const Batch& batch) -> Tensor { return model(batch.inputs).logits; });
  };
  TensorList losses, logits;
  compared_ranks(1, [&](int) { losses_and_logits({}, losses, logits); });
  for (const int per_rank : {1, 2}) {
    compared_ranks(2, [&](int) {
      TensorList own_losses, own_logits;
      losses_and_logits({.pp = 2, .stages_per_rank = per_rank}, own_losses, own_logits);
      ASSERT_EQ(own_losses.size(), 3u);
      for (size_t i = 0; i < 3; ++i) {
        EXPECT_EQ(own_losses[i].item(), losses[i].item());
        EXPECT_EQ(own_logits[i].shape(), (Shape{2, 8, kVocabulary}));
        EXPECT_EQ(own_logits[i].to_vector(), logits[i].to_vector());
      }
    });
  }
}

class Examples : public data::Dataset<std::array<Tensor, 2>> {
 public:
  int64_t size() const override { return 22; }
  std::array<Tensor, 2> get(int64_t index) const override {
    const Batch batch = batch_of(index / 2);
    return {batch.inputs.select(0, index % 2), batch.targets.select(0, index % 2)};
  }
};

// 22 examples: 3 windows of two batches of 4, and one in which the last batch has 2.
TEST(PipelineTraining, WindowsOfALoaderCountTheirSamples) {
  const Examples examples;
  const auto losses_of = [&](int pp) {
    Accelerator accelerator(settings_of({.pp = pp, .micro_batches = 2}));
    const Training training = untied();
    optim::SGD optimizer(training.model->named_parameters(), {.lr = 0.1});
    data::DataLoader loader(examples, {.batch_size = 4});
    accelerator.prepare(*training.model, optimizer, loader);
    Pipeline pipeline = accelerator.pipeline(*training.model, {.shapes_vary = true});
    std::vector<double> losses;
    std::vector<size_t> sizes;
    for (auto& window : pipeline.windows(loader)) {
      sizes.push_back(window.batches.size());
      losses.push_back(pipeline
                           .step(window,
                                 [&](const std::array<Tensor, 2>& batch) -> Tensor {
                                   return training.loss({batch[0], batch[1]});
                                 })
                           .item());
      optimizer.step();
      optimizer.zero_grad();
    }
    EXPECT_EQ(sizes, (std::vector<size_t>{2, 2, 2}));
    return losses;
  };
  std::vector<double> expected;
  compared_ranks(1, [&](int) { expected = losses_of(1); });
  compared_ranks(2, [&](int) { EXPECT_EQ(losses_of(2), expected); });
}

// ---- What is refused ---------------------------------------------------------------------------

template <class E>
std::string refusal(int pp, const std::function<void(Accelerator&, Training&)>& body,
                    const Way& way = {}) {
  Way own = way;
  own.pp = pp;
  return message_of<E>([&] {
    distributed::failing_ranks("the call is refused", pp, [&](int) {
      Accelerator accelerator(settings_of(own));
      Training training = untied();
      body(accelerator, training);
    });
  });
}

TEST(PipelineTraining, SchedulesOfOneStageOnARankRefuseSeveralBeforeTheModelIsDealt) {
  for (const auto schedule :
       {distributed::PipelineSchedule::kGPipe, distributed::PipelineSchedule::kZeroBubbleH1}) {
    const std::string message = refusal<ConfigError>(
        2,
        [](Accelerator& accelerator, Training& training) { accelerator.prepare(*training.model); },
        {.stages_per_rank = 2, .schedule = schedule});
    EXPECT_TRUE(mentions(message, "pp_stages_per_rank=2")) << message;
    EXPECT_TRUE(mentions(message, "take pp_schedule 1f1b")) << message;
  }
}

TEST(PipelineTraining, CutsThatDoNotFitAreErrorsThatNameThem) {
  const auto with = [](std::vector<std::string> cuts) {
    return refusal<ConfigError>(2, [&](Accelerator& accelerator, Training& training) {
      accelerator.pipeline(*training.model, {.cuts = cuts});
    });
  };
  EXPECT_TRUE(mentions(with({"transformer.h.9"}), "the cut 'transformer.h.9' names no module"));
  EXPECT_TRUE(mentions(with({"transformer.h.1", "transformer.h.2"}), "take 1 cuts; got 2"));
  const std::string many = refusal<ConfigError>(
      2, [](Accelerator& accelerator, Training& training) { accelerator.prepare(*training.model); },
      {.stages_per_rank = 3});
  EXPECT_TRUE(mentions(many, "asks for 6 stages, and Gpt has 4 blocks")) << many;
  const std::string order = refusal<ConfigError>(
      2,
      [](Accelerator& accelerator, Training& training) {
        accelerator.pipeline(*training.model,
                             {.cuts = {"transformer.h.3", "transformer.h.2", "lm_head"}});
      },
      {.stages_per_rank = 2});
  EXPECT_TRUE(mentions(order, "'transformer.h.2' does not come after 'transformer.h.3'")) << order;
}

TEST(PipelineTraining, ThePlainLoopNamesThePipeline) {
  for (const bool opens : {true, false}) {
    const std::string loop =
        refusal<ConfigError>(2, [&](Accelerator& accelerator, Training& training) {
          accelerator.prepare(*training.model);
          if (opens) {
            const auto micro = accelerator.accumulate(*training.model);
          } else {
            accelerator.backward(ones({}).requires_grad_());
          }
        });
    EXPECT_TRUE(mentions(loop, "accelerator.pipeline(model)")) << loop;
  }
  const std::string call =
      refusal<ConfigError>(2, [](Accelerator& accelerator, Training& training) {
        accelerator.prepare(*training.model);
        training.loss(batch_of(0));
      });
  EXPECT_TRUE(mentions(call, "pipeline.step()")) << call;
}

TEST(PipelineTraining, WhatDoesNotPassTheCutIsAnErrorThatNamesIt) {
  const auto step = [](const std::function<Tensor(Gpt&, const Batch&)>& loss) {
    return [loss](Accelerator& accelerator, Training& training) {
      Gpt& model = static_cast<Gpt&>(*training.model);
      Pipeline pipeline = accelerator.pipeline(model, {.cuts = {"transformer.h.2"}});
      const std::vector<Batch> window = {batch_of(0), batch_of(1)};
      pipeline.step(window, [&](const Batch& batch) -> Tensor { return loss(model, batch); });
    };
  };
  const std::string early = refusal<ConfigError>(2, step([](Gpt& model, const Batch& batch) {
                                                   return model.transformer.wte(batch.inputs).sum();
                                                 }));
  EXPECT_TRUE(mentions(early, "ended without one of 'transformer.h.2'")) << early;
  const std::string unseen =
      refusal<DeviceError>(2, step([](Gpt& model, const Batch& batch) {
                             const Tensor table = model.transformer.wte(batch.inputs).mean();
                             return model(batch.inputs, batch.targets).loss + table;
                           }));
  EXPECT_TRUE(mentions(unseen, "begins with 'transformer.h.2'")) << unseen;
  EXPECT_TRUE(mentions(unseen, "crosses the cut unseen")) << unseen;
  EXPECT_TRUE(mentions(unseen, "forward of stage 1, micro-batch 0")) << unseen;
  const std::string twice = refusal<ConfigError>(2, step([](Gpt& model, const Batch& batch) {
                                                   model(batch.inputs);
                                                   return model(batch.inputs, batch.targets).loss;
                                                 }));
  EXPECT_TRUE(mentions(twice, "'transformer.h.2' is called several times")) << twice;
}

TEST(PipelineTraining, WhatIsNotBuiltSaysSo) {
  const auto prepared = [](Accelerator& accelerator, Training& training) {
    accelerator.prepare(*training.model);
  };
  EXPECT_TRUE(mentions(refusal<UnsupportedError>(2,
                                                 [](Accelerator& accelerator, Training& training) {
                                                   Pipeline pipeline =
                                                       accelerator.pipeline(*training.model);
                                                   pipeline.generate([] { return 1; });
                                                 }),
                       "generate() is not built"));
  EXPECT_TRUE(mentions(message_of<UnsupportedError>([&] {
                         distributed::failing_ranks("the call is refused", 2, [&](int) {
                           AcceleratorOptions settings = settings_of({.pp = 2});
                           settings.precision_policy = PrecisionPolicy::kPure;
                           settings.mixed_precision = Precision::kBF16;
                           Accelerator accelerator(settings);
                           Training training = untied();
                           prepared(accelerator, training);
                         });
                       }),
                       "does not go with parameters in 16 bits"));
}

// A rank that is elsewhere until the other one's timeout, and one that has ended.
TEST(PipelineTraining, StepsThatCannotBeAreRefusedOnOneRankAndOnStages) {
  const std::vector<Batch> window{batch_of(0), batch_of(1)};
  for (const int pp : {1, 2}) {
    SCOPED_TRACE(pp);
    const auto stepped = [&](std::vector<double> weights) {
      return refusal<ValueError>(pp, [&](Accelerator& accelerator, Training& training) {
        Pipeline pipeline = accelerator.pipeline(*training.model);
        pipeline.step(window, training.loss, {.weights = weights});
      });
    };
    for (const std::vector<double>& weights : {std::vector<double>{1}, {1, 2, 3}}) {
      EXPECT_TRUE(mentions(stepped(weights), "give one for each"));
    }
    const std::string alike =
        refusal<ValueError>(pp,
                            [&](Accelerator& accelerator, Training& training) {
                              Pipeline pipeline = accelerator.pipeline(*training.model);
                              pipeline.step(window, training.loss, {.weights = {1, 2}});
                            },
                            {.alike = true});
    EXPECT_TRUE(mentions(alike, "gives every micro-batch the same weight")) << alike;
    for (const double wrong : {-1.0, std::nan(""), HUGE_VAL}) {
      EXPECT_TRUE(mentions(stepped({1, wrong}), "is not negative"));
      EXPECT_TRUE(mentions(stepped({wrong, 1}), "is not negative"));
    }
    const std::string empty =
        refusal<ValueError>(pp, [&](Accelerator& accelerator, Training& training) {
          accelerator.pipeline(*training.model).step(std::vector<Batch>(), training.loss);
        });
    EXPECT_TRUE(mentions(empty, "this one is empty")) << empty;
    const std::string two =
        refusal<ShapeError>(pp, [&](Accelerator& accelerator, Training& training) {
          Pipeline pipeline = accelerator.pipeline(*training.model);
          pipeline.step(window, [&](const Batch& batch) {
            return training.loss(batch).reshape({1}).expand({2}) * 1;
          });
        });
    EXPECT_TRUE(mentions(two, "the loss must have one element")) << two;
  }
}

TEST(PipelineTraining, OtherCutsThanThoseOfPrepareAreRefused) {
  const std::string other =
      refusal<ConfigError>(2, [](Accelerator& accelerator, Training& training) {
        accelerator.prepare(*training.model);
        accelerator.pipeline(*training.model, {.cuts = {"transformer.h.2"}});  // the same ones
        accelerator.pipeline(*training.model, {.cuts = {"transformer.h.1"}});
      });
  EXPECT_TRUE(mentions(other, "over other stages")) << other;
  const std::string apart =
      refusal<ConfigError>(2, [](Accelerator& accelerator, Training& training) {
        accelerator.pipeline(*training.model, {.ties_apart = true});
      });
  EXPECT_TRUE(mentions(apart, "ties_apart is for comparisons")) << apart;
}

TEST(PipelineTraining, ARankThatDoesNotComeIsNamedWithTheAction) {
  for (const bool ended : {false, true}) {
    std::string message;
    std::latch over(1);
    distributed::failing_ranks("a rank stays away", 2, [&](int rank) {
      Accelerator accelerator(settings_of({.pp = 2}));
      const Training training = untied();
      Pipeline pipeline = accelerator.pipeline(*training.model);
      if (rank == 1) {
        if (!ended) over.wait();
        return;
      }
      distributed::rank_context().timeouts.collective = 0.5;
      message = message_of<DistributedError>([&] {
        pipeline.step(std::vector{batch_of(0), batch_of(1)}, training.loss);
      });
      over.count_down();
    });
    EXPECT_TRUE(mentions(message, "pipeline, rank 0, ")) << message;
    EXPECT_TRUE(mentions(message, "micro-batch 0")) << message;
    EXPECT_TRUE(mentions(message, ended ? "rank 1 ended" : "of stage 0, micro-batch 0")) << message;
  }
}

// The last rank has no action left when the first hangs in a backward.
TEST(PipelineTraining, ARankWhoseSendsNobodyReceivesNamesItsPlace) {
  std::string message;
  std::latch over(1);
  distributed::failing_ranks("a rank receives no more gradients", 2, [&](int rank) {
    Accelerator accelerator(
        settings_of({.pp = 2, .schedule = distributed::PipelineSchedule::kGPipe}));
    const Training training = untied();
    Pipeline pipeline = accelerator.pipeline(*training.model);
    const std::vector batches = {batch_of(0), batch_of(1), batch_of(2), batch_of(3)};
    if (rank == 0) {
      training.model->submodule("transformer.h.0")
          .register_full_backward_hook([&](nn::ModuleBase&, nn::TensorRefs, nn::TensorRefs) {
            over.wait();
            throw ValueError("that was all");
          });
      EXPECT_THROW(pipeline.step(batches, training.loss), ValueError);
      return;
    }
    distributed::rank_context().timeouts.collective = 0.5;
    message = message_of<DistributedError>([&] { pipeline.step(batches, training.loss); });
    over.count_down();
  });
  EXPECT_TRUE(mentions(message, "pipeline, rank 1, behind the last action")) << message;
  EXPECT_TRUE(mentions(message, "'gradient, micro-batch ")) << message;
}

TEST(PipelineTraining, DescriptionsNameStagesAndTheBubble) {
  compared_ranks(2, [&](int) {
    Accelerator accelerator(settings_of({.pp = 2, .micro_batches = 1}));
    const Training training = untied();
    Pipeline pipeline = accelerator.pipeline(*training.model);
    const std::string text = pipeline.describe();
    EXPECT_TRUE(mentions(text, "2 stages on 2 ranks, 1 micro-batches: a bubble of 50.0%")) << text;
    EXPECT_TRUE(mentions(text, "fewer micro-batches than ranks")) << text;
    EXPECT_TRUE(mentions(text, "each rank keeps at most: 1 1")) << text;
    EXPECT_TRUE(mentions(text, "stage 1 on rank 1, from 'transformer.h.2'")) << text;
    EXPECT_TRUE(mentions(accelerator.describe(), "stage 1 on rank 1, from 'transformer.h.2'"));
  });
}

struct Norms : nn::Module<Norms> {
  Norms() : first(add<nn::LayerNorm>("first", 8)), second(add<nn::LayerNorm>("second", 8)) {}
  Tensor forward(const Tensor& x) { return second(first(x)); }
  nn::LayerNorm& first;
  nn::LayerNorm& second;
};

TEST(PipelineTraining, AModelWithoutProductsHasNoneToShare) {
  compared_ranks(2, [&](int) {
    Accelerator accelerator(settings_of({.pp = 2}));
    Norms model;
    const std::string text = accelerator.pipeline(model, {.cuts = {"second"}}).describe();
    EXPECT_TRUE(mentions(text, "'second': 0.0 MB of parameters, 0% of the arithmetic")) << text;
  });
}

}  // namespace
}  // namespace tessera::test_pipeline_training
