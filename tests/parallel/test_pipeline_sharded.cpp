// Pipelines whose stages are sharded over data-parallel ranks, or whose layers ranks divide:
// trained, clipped, saved and loaded as in one process.
// ctest labels: threads
#include <tessera/core/memory/allocator.h>
#include <tessera/distributed/mesh/dtensor.h>
#include <tessera/optim/muon.h>

#include "finished_process.h"
#include "message_of.h"
#include "parallel/pipeline_training.h"

namespace tessera::test_pipeline_sharded {
namespace {

using namespace test_pipeline;

constexpr double kTolerance = 1e-11;  // f64; of each tensor's largest element

void expect_near(const std::vector<double>& own, const std::vector<double>& expected,
                 double tolerance, const char* what) {
  ASSERT_EQ(own.size(), expected.size());
  for (size_t i = 0; i < own.size(); ++i) {
    EXPECT_NEAR(own[i], expected[i], tolerance * std::abs(expected[i])) << what << " " << i;
  }
}

void expect_close(const Values& own, const Values& expected, double tolerance) {
  EXPECT_EQ(own.size(), expected.size());
  for (const auto& [name, values] : expected) {
    double largest = 0;
    for (const double value : values) largest = std::max(largest, std::abs(value));
    const std::vector<double>& got = own.at(name);
    ASSERT_EQ(got.size(), values.size()) << name;
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_NEAR(got[i], values[i], tolerance * std::max(largest, 1.0)) << name << " " << i;
    }
  }
}

// In f64, beside one process with the micro-batches of all ranks.
void expect_as_alone(const MakeTraining& make, Way way) {
  way.dtype = kF64;
  Way alone = way;
  alone.sharding = Sharding::kDdp;
  const int data_ranks = way.ranks / way.pp / way.tp;
  alone.micro_batches = way.micro_batches * data_ranks;
  alone.weights_of_ranks.clear();
  for (int64_t micro = 0; !way.weights_of_ranks.empty() && micro < way.micro_batches; ++micro) {
    for (const std::vector<double>& of_rank : way.weights_of_ranks) {
      alone.weights.push_back(of_rank[static_cast<size_t>(micro)]);
    }
  }
  const Trained expected = train_alone(make, alone);
  compared_ranks(way.ranks, [&](int rank) {
    SCOPED_TRACE("rank " + std::to_string(rank) + ", " + std::to_string(way.pp) + " stages x " +
                 std::to_string(data_ranks) + " x " + std::to_string(way.tp) +
                 (way.sharding == Sharding::kFsdp ? ", fsdp" : ""));
    const Trained own = train(make, way);
    expect_near(own.of_all, expected.of_all, kTolerance, "loss");
    expect_near(own.norms, expected.norms, kTolerance, "norm");
    if (rank == 0) expect_close(own.parameters, expected.parameters, kTolerance);
  });
}

constexpr Sharding kWays[] = {Sharding::kZero1, Sharding::kFsdp};

TEST(PipelineSharded, StagesGiveWhatOneProcessGives) {
  for (const Sharding sharding : kWays) {
    const Way way{.pp = 2, .ranks = 4, .micro_batches = 2, .sharding = sharding};
    expect_as_alone(untied, way);
    expect_as_alone(llama, way);
    Way weighed = way;
    weighed.weights_of_ranks = {{1, 2}, {3, 1}};
    expect_as_alone(untied, weighed);
  }
}

TEST(PipelineSharded, StagesThatTakeTurnsGiveTheSame) {
  for (const Sharding sharding : kWays) {
    expect_as_alone(
        untied,
        {.pp = 2, .ranks = 4, .stages_per_rank = 2, .micro_batches = 4, .sharding = sharding});
    expect_as_alone(untied, {.pp = 2, .ranks = 6, .micro_batches = 1, .sharding = sharding});
  }
}

TEST(PipelineSharded, TiedTablesBelongToTheFirstStage) {
  for (const Sharding sharding : kWays) {
    for (const int per_rank : {1, 2}) {
      expect_as_alone([] { return gpt(true); }, {.pp = 2,
                                                 .ranks = 4,
                                                 .stages_per_rank = per_rank,
                                                 .micro_batches = 2,
                                                 .sharding = sharding});
    }
  }
}

TEST(PipelineSharded, DropoutAndRecomputedBlocksGiveTheSame) {
  for (const Sharding sharding : kWays) {
    expect_as_alone(
        [] { return gpt(false, 0.2); },
        {.pp = 2, .ranks = 4, .micro_batches = 2, .sharding = sharding, .checkpoints = true});
  }
}

TEST(PipelineSharded, BackwardsInTwoHalvesGiveTheSame) {
  constexpr auto kHalves = distributed::PipelineSchedule::kZeroBubbleH1;
  for (const Sharding sharding : {Sharding::kDdp, Sharding::kZero1, Sharding::kFsdp}) {
    for (const bool checkpoints : {false, true}) {
      expect_as_alone([] { return gpt(false, 0.2); }, {.pp = 2,
                                                       .ranks = 4,
                                                       .micro_batches = 3,
                                                       .schedule = kHalves,
                                                       .sharding = sharding,
                                                       .checkpoints = checkpoints});
    }
  }
  for (const bool sequence : {false, true}) {
    expect_as_alone(llama, {.pp = 2,
                            .ranks = 4,
                            .micro_batches = 3,
                            .schedule = kHalves,
                            .tp = 2,
                            .sequence = sequence});
  }
}

TEST(PipelineSharded, GradientsThatNobodyClearedAreAddedTo) {
  for (const bool alike : {false, true}) {
    Way way{.pp = 2, .ranks = 4, .micro_batches = 2, .alike = alike, .zeroes = false};
    for (const Sharding sharding : kWays) {
      way.sharding = sharding;
      expect_as_alone(untied, way);
    }
    way.sharding = Sharding::kDdp, way.tp = 2;
    expect_as_alone(untied, way);
  }
}

TEST(PipelineSharded, HooksOfParametersGetThePartsOfThisRank) {
  for (const bool zeroes : {true, false}) {
    Way way{
        .pp = 2, .ranks = 4, .micro_batches = 2, .zeroes = zeroes, .change = double_some_gradients};
    for (const Sharding sharding : {Sharding::kDdp, Sharding::kZero1, Sharding::kFsdp}) {
      way.sharding = sharding;
      expect_as_alone(untied, way);
    }
    way.sharding = Sharding::kDdp, way.tp = 2;
    expect_as_alone(untied, way);
  }
}

TEST(PipelineSharded, FrozenParametersStayAsTheyAre) {
  const auto freeze = [](nn::ModuleBase& model) {
    for (const auto& [name, tensor] : model.named_parameters()) {
      if (name.starts_with("transformer.h.2") || name.starts_with("transformer.wte")) {
        tensor.set_requires_grad(false);
      }
    }
  };
  const auto in_turns = [](nn::ModuleBase& model, int step) {
    for (const auto& [name, tensor] : model.named_parameters()) {
      if (name.starts_with("transformer.h.1.attn")) tensor.set_requires_grad(step != 1);
      if (name.starts_with("transformer.h.2")) tensor.set_requires_grad(step == 1);
    }
  };
  for (const Sharding sharding : kWays) {
    Way way{.pp = 2, .ranks = 4, .micro_batches = 2, .sharding = sharding};
    way.before_step = in_turns;
    expect_as_alone(untied, way);
    way.change = freeze;
    expect_as_alone(untied, way);
    way.before_step = {};
    expect_as_alone(untied, way);
  }
}

TEST(PipelineSharded, MuonBringsItsMatricesTogether) {
  const MakeOptimizer muon = [](const NamedTensors& all) -> std::unique_ptr<optim::Optimizer> {
    NamedTensors matrices;
    for (const NamedTensor& named : all) {
      if (named.tensor.dim() == 2) matrices.push_back(named);
    }
    return std::make_unique<optim::Muon>(matrices, optim::MuonOptions{.lr = 1e-2});
  };
  expect_as_alone(
      untied,
      {.pp = 2, .ranks = 4, .micro_batches = 2, .sharding = Sharding::kFsdp, .optimizer = muon});
}

TEST(PipelineSharded, LossesAndNormsInF32AreThoseOfOneProcess) {
  const MakeOptimizer sgd = [](const NamedTensors& parameters) {
    return std::make_unique<optim::SGD>(parameters, optim::SGD::Options{.lr = 0.1});
  };
  const Trained expected = train_alone(llama, {.micro_batches = 4, .optimizer = sgd});
  for (const Sharding sharding : kWays) {
    compared_ranks(4, [&](int) {
      const Trained own =
          train(llama, {.pp = 2, .micro_batches = 2, .sharding = sharding, .optimizer = sgd});
      expect_near(own.of_all, expected.of_all, 2e-6, "loss");
      expect_near(own.norms, expected.norms, 1e-5, "norm");
    });
  }
  compared_ranks(4, [&](int) {
    const Trained own = train(llama, {.pp = 2, .micro_batches = 4, .tp = 2, .optimizer = sgd});
    expect_near(own.of_all, expected.of_all, 2e-6, "loss");
    expect_near(own.norms, expected.norms, 1e-5, "norm");
  });
}

// The scaled gradients of one stage overflow: no rank steps.
TEST(PipelineSharded, AStepIsLeftOutByAllRanks) {
  const Way way{.pp = 2, .micro_batches = 2, .precision = Precision::kFP16, .init_scale = 0x1p24};
  Way alone = way;
  alone.micro_batches = 4;
  const Trained expected = train_alone(untied, alone);
  EXPECT_LT(expected.scales.back(), way.init_scale);
  for (const Sharding sharding : kWays) {
    compared_ranks(4, [&](int) {
      Way own = way;
      own.sharding = sharding;
      EXPECT_EQ(train(untied, own).scales, expected.scales);
    });
  }
}

TEST(PipelineSharded, EvaluationReadsWholeStages) {
  const auto evaluate = [](const Way& way) {
    Accelerator accelerator(settings_of(way));
    const Training training = untied();
    Pipeline pipeline = accelerator.pipeline(*training.model);
    std::vector<double> values;
    const std::vector<Batch> window = {batch_of(0), batch_of(1), batch_of(2)};
    for (const Tensor& loss : pipeline.evaluate(window, training.loss)) {
      values.push_back(loss.item());
    }
    EXPECT_EQ(memory_stats()->current(MemoryCategory::kUnsharded), 0);
    return values;
  };
  std::vector<double> expected;
  compared_ranks(1, [&](int) { expected = evaluate({}); });
  for (const Sharding sharding : kWays) {
    compared_ranks(4, [&](int) { EXPECT_EQ(evaluate({.pp = 2, .sharding = sharding}), expected); });
  }
}

// ---- With ranks that divide layers -------------------------------------------------------------

TEST(PipelineSharded, StagesOfDividedLayersGiveWhatOneProcessGives) {
  for (const bool sequence : {false, true}) {
    const Way way{.pp = 2, .ranks = 4, .micro_batches = 2, .tp = 2, .sequence = sequence};
    expect_as_alone(untied, way);
    expect_as_alone(llama, way);
    expect_as_alone([] { return gpt(true); }, way);
  }
}

TEST(PipelineSharded, DividedLayersOfStagesThatTakeTurns) {
  expect_as_alone(untied, {.pp = 2,
                           .ranks = 4,
                           .stages_per_rank = 2,
                           .micro_batches = 4,
                           .tp = 2,
                           .checkpoints = true});
  expect_as_alone([] { return gpt(false, 0, nn::models::Logits::kWithoutLoss); },
                  {.pp = 2, .ranks = 4, .micro_batches = 2, .tp = 2});
}

TEST(PipelineSharded, DividedLayersWithShardedStages) {
  for (const Sharding sharding : kWays) {
    expect_as_alone(untied,
                    {.pp = 2, .ranks = 8, .micro_batches = 2, .sharding = sharding, .tp = 2});
  }
}

TEST(PipelineSharded, PartsLieAlongTheirStageAndItsRanks) {
  compared_ranks(8, [](int) {
    Accelerator accelerator(settings_of({.pp = 2, .sharding = Sharding::kFsdp, .tp = 2}));
    const Training training = untied();
    accelerator.prepare(*training.model);
    const std::string mesh = " on mesh(pp_dp_shard=4, tp=2)";
    for (const auto& [name, tensor] : training.model->named_parameters()) {
      const std::string lies = distributed::describe(distributed::placements_of(tensor)) + " on " +
                               distributed::mesh_of(tensor).describe();
      SCOPED_TRACE(name + ": " + lies);
      EXPECT_TRUE(mentions(lies, "FlatShard"));
      if (name.ends_with("c_attn.weight")) {
        EXPECT_TRUE(mentions(lies, "BlockShard(0, 3)]" + mesh));
      }
      if (name.ends_with("c_proj.weight")) {
        EXPECT_TRUE(mentions(lies, "Shard(1)]" + mesh));
      }
      if (name.ends_with("ln_1.weight")) {
        EXPECT_TRUE(mentions(lies, "mesh(pp_dp_shard_tp=8)"));
      }
    }
  });
}

TEST(PipelineSharded, DividedLayersDrawTheNumbersOfOneProcess) {
  expect_as_alone([] { return gpt(false, 0.2); },
                  {.pp = 2, .ranks = 4, .micro_batches = 2, .tp = 2});
}

// ---- Memory ------------------------------------------------------------------------------------

TEST(PipelineSharded, ARankHoldsItsShareOfItsStageBetweenSteps) {
  const int64_t all = untied().model->num_parameters();
  for (const Sharding sharding : kWays) {
    compared_ranks(4, [&](int) {
      Accelerator accelerator(settings_of({.pp = 2, .micro_batches = 2, .sharding = sharding}));
      const Training training = untied();
      Pipeline pipeline = accelerator.pipeline(*training.model);
      optim::AdamW optimizer(training.model->named_parameters(), {.lr = 1e-2});
      accelerator.prepare(optimizer);
      int64_t own = 0;
      for (const auto& [name, tensor] : training.model->named_parameters()) {
        own += tensor.numel();
      }
      EXPECT_LT(own, all * 3 / 8);  // a quarter, and what stages and cuts are uneven by
      EXPECT_GT(own, all / 8);
      const bool cuts = sharding == Sharding::kFsdp;
      EXPECT_TRUE(mentions(pipeline.describe(),
                           cuts ? " (divided by 2 ranks)" : " (states divided by 2 ranks)"));
      const std::vector<Batch> window = {batch_of(0), batch_of(1)};
      pipeline.step(window, training.loss);
      for (const auto& [name, tensor] : training.model->named_parameters()) {
        ASSERT_TRUE(tensor.grad().defined()) << name;
        EXPECT_EQ(tensor.grad().numel(), tensor.numel()) << name;
      }
      optimizer.step();
      // docs/pipeline.md, "Memory". Slack: parameters and parts begin at multiples of bytes.
      constexpr int64_t kSlack = 4096;
      const auto bytes_of = [](MemoryCategory category) {
        return memory_stats()->current(category);
      };
      const int64_t parts = 4 * own, whole = 2 * parts;  // of two ranks
      const int64_t parameters = bytes_of(MemoryCategory::kParameter);
      const int64_t gradients = bytes_of(MemoryCategory::kGradient);
      EXPECT_NEAR(parameters, cuts ? parts : whole, kSlack);
      EXPECT_NEAR(gradients, cuts ? parts : whole, kSlack);
      EXPECT_NEAR(bytes_of(MemoryCategory::kOptimizer), 2 * parts, kSlack);
      if (cuts) {
        EXPECT_EQ(memory_stats()->current(MemoryCategory::kUnsharded), 0);
      }
    });
  }
}

// ---- State -------------------------------------------------------------------------------------

TEST(PipelineSharded, ACheckpointGoesOnInAnyComposition) {
  const auto dropping = [] { return gpt(false, 0.2); };
  struct Composition {
    int ranks, pp;
    Sharding sharding;
    int tp = 1;
  };
  const auto way_of = [](const Composition& one) {
    return Way{.pp = one.pp,
               .micro_batches = 4 / (one.ranks / one.pp / one.tp),
               .sharding = one.sharding,
               .tp = one.tp,
               .dtype = kF64};
  };
  const Trained whole = train_alone(dropping, {.micro_batches = 4, .dtype = kF64});
  const auto from = [&](const Composition& before, const Composition& after) {
    SCOPED_TRACE(std::to_string(before.ranks) + "/" + std::to_string(before.pp) + " to " +
                 std::to_string(after.ranks) + "/" + std::to_string(after.pp));
    const TestFolder folder;
    Way way = way_of(before);
    way.last = 2;
    way.save = folder.path("state");
    compared_ranks(before.ranks, [&](int) { train(dropping, way); });
    Way on = way_of(after);
    on.first = 2;
    on.load = folder.path("state");
    compared_ranks(after.ranks, [&](int rank) {
      const Trained rest = train(dropping, on);
      EXPECT_NEAR(rest.of_all.at(0), whole.of_all.at(2), kTolerance * whole.of_all.at(2));
      if (rank == 0) expect_close(rest.parameters, whole.parameters, kTolerance);
    });
  };
  const Composition alone{1, 1, Sharding::kDdp}, zero1{4, 2, Sharding::kZero1},
      fsdp{4, 2, Sharding::kFsdp}, layers{4, 2, Sharding::kDdp, 2}, stages{2, 2, Sharding::kDdp},
      shards{2, 1, Sharding::kFsdp};
  from(fsdp, alone);
  from(alone, fsdp);
  from(fsdp, zero1);
  from(zero1, stages);
  from(shards, fsdp);
  from(fsdp, shards);
  from(layers, fsdp);
  from(alone, layers);
}

// ---- What is refused ---------------------------------------------------------------------------

template <class E>
std::string refusal(int ranks, const Way& way, const MakeTraining& make,
                    const std::function<void(AcceleratorOptions&)>& change = {}) {
  return message_of<E>([&] {
    distributed::failing_ranks("the call is refused", ranks, [&](int) {
      AcceleratorOptions settings = settings_of(way);
      if (change) change(settings);
      Accelerator accelerator(settings);
      const Training training = make();
      accelerator.prepare(*training.model);
    });
  });
}

TEST(PipelineSharded, WhatIsNotBuiltSaysSo) {
  const auto unsupported = [](int ranks, const std::function<void(AcceleratorOptions&)>& change) {
    return refusal<UnsupportedError>(ranks, {.pp = 2, .sharding = Sharding::kFsdp}, untied, change);
  };
  const std::string zero2 =
      unsupported(4, [](AcceleratorOptions& settings) { settings.sharding = Sharding::kZero2; });
  EXPECT_TRUE(mentions(zero2, "take zero1 or fsdp")) << zero2;
  const std::string copies = unsupported(8, [](AcceleratorOptions& settings) {
    settings.dp_replicate_size = 2, settings.dp_shard_size = 2;
  });
  EXPECT_TRUE(mentions(copies, "give dp_shard_size the ranks of both")) << copies;
  const std::string ignored = unsupported(
      4, [](AcceleratorOptions& settings) { settings.fsdp.ignored_modules = "lm_head"; });
  EXPECT_TRUE(mentions(ignored, "does not go with fsdp_ignored_modules")) << ignored;
}

TEST(PipelineSharded, DividedLayersThatDoNotFitAreRefused) {
  const std::string copies =
      refusal<ConfigError>(8, {.pp = 2, .sharding = Sharding::kDdp, .tp = 2}, untied);
  EXPECT_TRUE(mentions(copies, "copies of a model whose layers are shared are not built"))
      << copies;
  const auto odd = [] {
    manual_seed(1);
    return training_of<Gpt>(
        std::make_unique<Gpt>(nn::models::GptConfig{
            .vocab_size = 51, .context = 16, .width = 32, .layers = 4, .heads = 4}),
        [](Gpt& model, const Batch& b) { return model(b.inputs, b.targets).loss; });
  };
  const std::string parts = refusal<UnsupportedError>(4, {.pp = 2, .tp = 2}, odd);
  EXPECT_TRUE(mentions(parts, "pad it to a multiple of the ranks")) << parts;
}

}  // namespace
}  // namespace tessera::test_pipeline_sharded
