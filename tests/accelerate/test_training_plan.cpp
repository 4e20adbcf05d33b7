// Plans of trainings, held against trainings that run on ranks that are threads: the same calls,
// the same bytes of the allocator. And plans of more ranks than any machine has threads.
// ctest labels: threads
#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <tessera/accelerate/accelerator.h>
#include <tessera/accelerate/plan/planned_model.h>
#include <tessera/accelerate/plan/training_plan.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/random.h>
#include <tessera/nn/container.h>
#include <tessera/nn/embedding.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/models/gpt2.h>
#include <tessera/nn/models/llama.h>
#include <tessera/nn/norm.h>
#include <tessera/nn/parallel_style.h>
#include <tessera/optim/optimizers.h>

#include "distributed/compared_ranks.h"
#include "finished_process.h"
#include "message_of.h"

namespace tessera::test_training_plan {
namespace {

using namespace accelerate;
using distributed::CommRecord;

// ---- A small training ---------------------------------------------------------------------------

// Of a model, and rows of a batch.
struct Sizes {
  int64_t width, hidden, rows;
  int64_t words() const { return width % 8 == 0 ? 12 : 11; }
};
constexpr Sizes kOdd{9, 13, 10};    // rows that no number of ranks divides
constexpr Sizes kWide{32, 48, 16};  // that products in fp8 take
constexpr Sizes kEven{8, 12, 12};   // that layers of several ranks take

// With a table that is read twice.
struct Block : nn::Module<Block> {
  explicit Block(const Sizes& sizes)
      : norm(add<nn::LayerNorm>("norm", sizes.width)),
        up(add<nn::Linear>("up", sizes.width, sizes.hidden)),
        down(add<nn::Linear>("down", sizes.hidden, sizes.width)) {}
  Tensor forward(const Tensor& x) { return x + down(relu(up(norm(x)))); }
  nn::LayerNorm& norm;
  nn::Linear& up;
  nn::Linear& down;
};
struct Small : nn::Module<Small> {
  explicit Small(const Sizes& sizes_in = kOdd)
      : sizes(sizes_in),
        table(add<nn::Embedding>("table", sizes.words(), sizes.width)),
        h(add<nn::ModuleList>("h")),
        head(add<nn::Linear>("head", sizes.width, sizes.words())) {
    for (int i = 0; i < 3; ++i) h.append<Block>(sizes);
    head.share_parameter("weight", table.weight);
  }
  Tensor forward(const Tensor& tokens) {
    Tensor x = table(tokens);
    for (size_t i = 0; i < h.size(); ++i) x = h.at<Block>(i)(x);
    return head(x);
  }
  std::vector<nn::StyledModules> parallel_styles() const override {
    using enum nn::ParallelStyle;
    return {{"table", kVocabulary},
            {"h.*.norm", kSequence},
            {"h.*.up", kColumnwise},
            {"h.*.down", kRowwise},
            {"head", kLossHead}};
  }
  const Sizes sizes;
  nn::Embedding& table;
  nn::ModuleList& h;
  nn::Linear& head;
};
Tensor loss_of(Small& model, const Device& device) {
  const Tensor tokens = zeros({model.sizes.rows}, {.dtype = kI64, .device = device});
  return cross_entropy(model(tokens), tokens);
}

struct Way {
  Sharding sharding = Sharding::kDdp;
  int ranks = 2;
  int64_t accumulate = 1;
  Precision precision = Precision::kNo;
  PrecisionPolicy policy = PrecisionPolicy::kAutocast;
  int64_t replicas = 1;
  bool reshards = true, checkpoints = false, sync_each_batch = false;
  const char* name = "adamw";
  double momentum = -1;  // of sgd; negative: of the name
  LossWeighting weighting = LossWeighting::kSamples;
  Fp8Scaling recipe = Fp8Scaling::kTensorwise;
  int64_t tp = 1;
  bool sequence = true;

  const Sizes& sizes() const {
    return precision == Precision::kFP8 ? kWide : tp > 1 ? kEven : kOdd;
  }
  std::string describe() const {
    static const char* const kModes[] = {"ddp", "zero1", "zero2", "zero3", "fsdp"};
    return std::string(kModes[static_cast<int>(sharding)]) + " on " + std::to_string(ranks) + ", " +
           std::to_string(accumulate) + " micro-batches, precision " +
           std::to_string(static_cast<int>(precision)) + " " + std::string(name_of(recipe)) +
           (policy == PrecisionPolicy::kPure ? " pure" : "") + ", replicas " +
           std::to_string(replicas) + (reshards ? "" : ", kept") +
           (checkpoints ? ", checkpointed" : "") + (sync_each_batch ? ", each batch" : "") +
           (tp > 1 ? ", tp " + std::to_string(tp) : "") + (sequence ? "" : " without sequence");
  }
  Optimizers optimizers(const NamedTensors& parameters) const {
    if (momentum < 0) return optimizer_named(name, {.not_by_muon = {"table"}})(parameters);
    optim::SGDOptions options;
    options.lr = 0.01;
    options.momentum = momentum;
    Optimizers one;
    one.push_back(std::make_unique<optim::SGD>(parameters, options));
    return one;
  }
};

constexpr double kBucketMegabytes = 0.0015, kFirstMegabytes = 0.0004;

TrainingPlan plan_of(const Way& way, int rank = 0) {
  Settings settings;
  settings.sharding.value = way.sharding;
  settings.gradient_accumulation_steps.value = way.accumulate;
  settings.mixed_precision.value = way.precision;
  settings.precision_policy.value = way.policy;
  settings.dp_replicate_size.value = way.replicas;
  settings.fsdp_reshard_after_forward.value = way.reshards;
  settings.fsdp_activation_checkpointing.value = way.checkpoints;
  settings.sync_each_batch.value = way.sync_each_batch;
  settings.loss_weighting.value = way.weighting;
  settings.fp8_recipe.value = way.recipe;
  settings.fp8_filter.value = Fp8Filter::kAll;
  settings.tp_size.value = way.tp;
  settings.tp_sequence.value = way.sequence;
  settings.ddp_bucket_cap_mb.value = kBucketMegabytes;
  settings.ddp_first_bucket_mb.value = kFirstMegabytes;
  return plan_training(
      [&] {
        auto model = std::make_shared<Small>(way.sizes());
        return PlannedTraining{model, [model] { return loss_of(*model, kMeta); }};
      },
      {.settings = settings,
       .ranks = way.ranks,
       .optimizer = [&](const NamedTensors& parameters) { return way.optimizers(parameters); },
       .rank = rank});
}

// What a rank of a training that runs has called in its third step, and held.
struct Measured {
  std::vector<CommRecord> records;
  PlannedBytes persistent, peaks;
};

PlannedBytes bytes_now(bool peaks) {
  PlannedBytes bytes;
  for (int i = 0; i < kNumMemoryCategories; ++i) {
    const auto category = static_cast<MemoryCategory>(i);
    bytes[category] = peaks ? memory_stats()->peak(category) : memory_stats()->current(category);
  }
  return bytes;
}

std::vector<Measured> measure(const Way& way) {
  std::vector<Measured> measured(static_cast<size_t>(way.ranks));
  distributed::compared_ranks(way.ranks, [&](int rank) {
    Measured& own = measured[static_cast<size_t>(rank)];
    manual_seed(3);
    Small model(way.sizes());
    Accelerator accelerator(
        {.mixed_precision = way.precision,
         .precision_policy = way.policy,
         .gradient_accumulation_steps = way.accumulate,
         .loss_weighting = way.weighting,
         .sync_each_batch = way.sync_each_batch,
         .sharding = way.sharding,
         .dp_replicate_size = way.replicas,
         .tp_size = way.tp,
         .tp_sequence = way.sequence,
         .fsdp = {.reshard_after_forward = way.reshards,
                  .activation_checkpointing = way.checkpoints},
         .ddp = {.bucket_cap_mb = kBucketMegabytes, .first_bucket_mb = kFirstMegabytes},
         .fp8 = {.recipe = way.recipe, .filter = Fp8Filter::kAll},
         .config_file = ""});
    const Optimizers optimizers = way.optimizers(model.named_parameters());
    accelerator.prepare(model);
    for (const auto& optimizer : optimizers) accelerator.prepare(*optimizer);
    memory_stats()->reset_peak();
    for (int step = 0; step < 3; ++step) {
      const distributed::CommTrace::Scope scope(*distributed::rank_context().trace);
      for (int64_t i = 0; i < way.accumulate; ++i) {
        const MicroBatch micro = accelerator.accumulate(model);
        accelerator.backward(loss_of(model, kCpu));
      }
      for (const auto& optimizer : optimizers) optimizer->step();
      own.persistent = bytes_now(false);
      for (const auto& optimizer : optimizers) optimizer->zero_grad();
      own.records = scope.records();
    }
    own.peaks = bytes_now(true);
  });
  return measured;
}

std::vector<std::string> lines_of(const std::vector<CommRecord>& records) {
  std::vector<std::string> lines;
  for (const CommRecord& record : records) {
    if (record.tag == "one_batch") continue;  // of loaders, which plans have none of
    lines.push_back(
        record.phase + " " + std::string(name_of(record.operation)) + " " +
        std::string(name_of(record.channel)) + " " + std::string(name_of(record.dtype)) + " x" +
        std::to_string(record.count) + " " + std::to_string(record.bytes) + " bytes of " +
        std::to_string(record.group_size) + " '" + record.tag + "'" + (record.onto ? " onto" : ""));
  }
  return lines;
}

// What the engine and the optimizer hold: of activations a plan knows those that ops save, and no
// workspace of kernels.
constexpr MemoryCategory kHeld[] = {MemoryCategory::kParameter,   MemoryCategory::kGradient,
                                    MemoryCategory::kOptimizer,   MemoryCategory::kUnsharded,
                                    MemoryCategory::kWeightCache, MemoryCategory::kCommunication};

void expect_rank_as_planned(const TrainingPlan& plan, size_t rank, const Measured& measured) {
  SCOPED_TRACE("rank " + std::to_string(rank));
  EXPECT_EQ(lines_of(plan.records), lines_of(measured.records));
  for (const MemoryCategory category : kHeld) {
    EXPECT_EQ(plan.ranks[rank].persistent[category], measured.persistent[category])
        << "persistent " << name_of(category);
    EXPECT_EQ(plan.ranks[rank].peaks[category], measured.peaks[category])
        << "peak " << name_of(category);
  }
}

void expect_as_planned(const Way& way) {
  SCOPED_TRACE(way.describe());
  const TrainingPlan plan = plan_of(way);
  const std::vector<Measured> measured = measure(way);
  ASSERT_EQ(plan.ranks.size(), measured.size());
  for (size_t rank = 0; rank < measured.size(); ++rank) {
    expect_rank_as_planned(plan, rank, measured[rank]);
  }
  EXPECT_FALSE(plan.collectives.empty());
}

constexpr Sharding kModes[] = {Sharding::kDdp, Sharding::kZero1, Sharding::kZero2, Sharding::kZero3,
                               Sharding::kFsdp};

TEST(TrainingPlan, IsTheTraceAndTheAllocatorOfF32OnTwoToFourRanks) {
  for (const Sharding mode : kModes) {
    for (const int ranks : {2, 3, 4}) {
      expect_as_planned({.sharding = mode, .ranks = ranks, .accumulate = ranks == 3 ? 3 : 1});
    }
  }
}

TEST(TrainingPlan, IsTheTraceAndTheAllocatorOf16Bits) {
  for (const Sharding mode : kModes) {
    for (const auto& [ranks, accumulate] : {std::pair(3, 1), std::pair(2, 2)}) {
      for (const PrecisionPolicy policy : {PrecisionPolicy::kAutocast, PrecisionPolicy::kPure}) {
        expect_as_planned({.sharding = mode,
                           .ranks = ranks,
                           .accumulate = accumulate,
                           .precision = Precision::kBF16,
                           .policy = policy});
      }
    }
  }
}

TEST(TrainingPlan, IsTheTraceAndTheAllocatorOfFp8) {
  for (const Sharding mode : kModes) {
    for (const Fp8Scaling recipe : {Fp8Scaling::kTensorwise, Fp8Scaling::kDelayed}) {
      expect_as_planned(
          {.sharding = mode, .ranks = 3, .precision = Precision::kFP8, .recipe = recipe});
    }
  }
  expect_as_planned(
      {.sharding = Sharding::kFsdp, .ranks = 2, .accumulate = 2, .precision = Precision::kFP8});
  expect_as_planned({.sharding = Sharding::kFsdp,
                     .ranks = 2,
                     .precision = Precision::kFP8,
                     .recipe = Fp8Scaling::kRowwise});
}

// Ranks own different matrices, so that each has a plan of its own.
TEST(TrainingPlan, IsTheTraceAndTheAllocatorOfMuon) {
  for (const Sharding mode : kModes) {
    for (const Precision precision : {Precision::kNo, Precision::kBF16}) {
      const Way way{.sharding = mode, .ranks = 3, .precision = precision, .name = "muon"};
      SCOPED_TRACE(way.describe());
      const std::vector<Measured> measured = measure(way);
      for (size_t rank = 0; rank < measured.size(); ++rank) {
        expect_rank_as_planned(plan_of(way, static_cast<int>(rank)), rank, measured[rank]);
      }
    }
  }
}

// Layers of several ranks: their calls, and what a rank has of them.
TEST(TrainingPlan, IsTheTraceAndTheAllocatorOfTensorParallelism) {
  for (const bool sequence : {true, false}) {
    for (const Precision precision : {Precision::kNo, Precision::kBF16}) {
      expect_as_planned(
          {.ranks = 2, .accumulate = 2, .precision = precision, .tp = 2, .sequence = sequence});
    }
    for (const Sharding mode : {Sharding::kFsdp, Sharding::kZero3, Sharding::kZero1}) {
      expect_as_planned({.sharding = mode, .ranks = 4, .tp = 2, .sequence = sequence});
    }
  }
  const TrainingPlan plan = plan_of({.sharding = Sharding::kFsdp, .ranks = 4, .tp = 2});
  const std::string told = plan.describe();
  for (const char* part :
       {"fsdp on mesh(dp_shard=2, tp=2)", "layers along tp=2: this rank has ",
        "h.*.up.weight    x 3   [6, 8] of [12, 8], Shard(0)\n",
        "h.*.norm.weight  x 3   [8], replicated: its gradients are summands\n"}) {
    EXPECT_TRUE(mentions(told, part)) << part << "\n" << told;
  }
  std::map<std::string, int64_t> calls;  // of modules' activations, along the axis
  for (const PlannedCollective& one : plan.collectives) {
    EXPECT_NE(one.axis, "") << one.phase << " " << name_of(one.operation) << "\n" << told;
    if (one.channel != distributed::Channel::kModule) continue;
    EXPECT_EQ(one.axis, "tp");
    calls[one.phase + " " + std::string(name_of(one.operation))] += one.count;
  }
  // Each block once, the table and the head: the head's logits are gathered once more.
  EXPECT_EQ(calls["forward reduce_scatter"], 3 + 1) << told;
  EXPECT_EQ(calls["forward all_gather"], 3 + 1 + 1) << told;
  EXPECT_EQ(plan_of({.sharding = Sharding::kFsdp}).layers, "");
}

// The figures of docs/precision.md.
TEST(TrainingPlan, Gpt2InFp8GathersAByteForEachWeightOfItsBlocks) {
  constexpr int kRanks = 8;
  const auto gathered = [](Precision precision) {
    Settings settings;
    settings.sharding.value = Sharding::kFsdp;
    settings.mixed_precision.value = precision;
    const TrainingPlan plan = plan_training(
        [] {
          auto model = std::make_shared<nn::models::Gpt>(nn::models::GptConfig());
          const Tensor tokens = zeros({1, 64}, {.dtype = kI64, .device = kMeta});
          return PlannedTraining{model, [=] { return (*model)(tokens, tokens).loss; }};
        },
        {.settings = settings, .ranks = kRanks});
    int64_t bytes = 0;
    for (const CommRecord& record : plan.records) {
      if (record.channel == distributed::Channel::kParameter) bytes += record.bytes * kRanks;
    }
    return bytes;
  };
  const int64_t f32 = gathered(Precision::kNo), bf16 = gathered(Precision::kBF16);
  const int64_t fp8 = gathered(Precision::kFP8);
  constexpr int64_t kBlocks = 12, kWeights = kBlocks * 12 * 768 * 768;  // of Linears, in all blocks
  constexpr int64_t kLabels = kBlocks * 4 * 24 * kRanks;
  EXPECT_EQ(bf16 - fp8, 2 * (kWeights - kLabels)) << "gathered for forward and for backward";
  EXPECT_EQ(f32, 837998592);
  EXPECT_EQ(bf16, 497928192);
  EXPECT_EQ(fp8, 328077312);
}

TEST(TrainingPlan, FollowsWhatElseIsSet) {
  expect_as_planned({.sharding = Sharding::kFsdp, .ranks = 4, .accumulate = 2, .replicas = 2});
  expect_as_planned({.sharding = Sharding::kZero3,
                     .ranks = 4,
                     .accumulate = 2,
                     .precision = Precision::kBF16,
                     .replicas = 2});
  expect_as_planned({.sharding = Sharding::kFsdp, .ranks = 3, .reshards = false});
  expect_as_planned({.sharding = Sharding::kZero3, .ranks = 3, .checkpoints = true});
  expect_as_planned({.sharding = Sharding::kDdp, .ranks = 2, .checkpoints = true});
  for (const Sharding mode : {Sharding::kDdp, Sharding::kZero1}) {
    expect_as_planned({.sharding = mode, .ranks = 3, .accumulate = 3, .sync_each_batch = true});
  }
  expect_as_planned({.sharding = Sharding::kZero1, .ranks = 3, .momentum = 0.9});
  expect_as_planned({.sharding = Sharding::kZero3, .ranks = 2, .momentum = 0});
  expect_as_planned({.sharding = Sharding::kZero2,
                     .ranks = 2,
                     .accumulate = 2,
                     .weighting = LossWeighting::kHuggingFace});
}

// What the other ranks are said to hold is what they say themselves.
TEST(TrainingPlan, EveryRankSaysTheSame) {
  for (const Sharding mode : kModes) {
    const Way way{.sharding = mode, .ranks = 7, .precision = Precision::kBF16};
    const TrainingPlan first = plan_of(way);
    for (int rank = 1; rank < way.ranks; ++rank) {
      const TrainingPlan own = plan_of(way, rank);
      EXPECT_EQ(own.ranks, first.ranks) << way.describe() << " by rank " << rank;
      EXPECT_EQ(lines_of(own.records), lines_of(first.records));
    }
  }
}

// ---- Models of files ----------------------------------------------------------------------------

std::string gpt2_config(int64_t width, int64_t layers, int64_t heads, int64_t positions,
                        int64_t words) {
  return nlohmann::json{{"model_type", "gpt2"},
                        {"n_embd", width},
                        {"n_layer", layers},
                        {"n_head", heads},
                        {"n_positions", positions},
                        {"vocab_size", words},
                        {"activation_function", "gelu_new"}}
      .dump();
}

PlannedModel gpt2_of(int64_t width, int64_t layers, int64_t heads, int64_t positions,
                     int64_t words) {
  TestFolder folder;
  return PlannedModel::read(
      folder.write("gpt2.json", gpt2_config(width, layers, heads, positions, words)));
}

TrainingPlan plan_of(const PlannedModel& model, const Settings& settings, int ranks,
                     int64_t batch = 0, int64_t length = 0) {
  return plan_training([&] { return model.training(batch, length); },
                       {.settings = settings, .ranks = ranks});
}

Settings settings_with(Sharding sharding, Precision precision = Precision::kNo) {
  Settings settings;
  settings.sharding.value = sharding;
  settings.mixed_precision.value = precision;
  return settings;
}

using Shapes = std::vector<std::pair<std::string, Shape>>;

Shapes shapes_of(const nn::ModuleBase& model) {
  Shapes shapes;
  for (const auto& [name, tensor] : model.named_parameters()) {
    shapes.emplace_back(name, tensor.shape());
  }
  std::ranges::sort(shapes, {}, &Shapes::value_type::first);
  return shapes;
}
Shapes shapes_of(const ParameterList& list) {
  Shapes shapes;
  for (const ListedModule& module : list.modules) {
    for (const auto& [name, shape] : module.parameters) {
      shapes.emplace_back(module.name + "." + name, shape);
    }
  }
  std::ranges::sort(shapes, {}, &Shapes::value_type::first);
  return shapes;
}

TEST(PlannedModel, HasAsManyParametersAsTheModelsThatAreKnown) {
  TestFolder folder;
  const auto count = [&](const std::string& config) {
    return PlannedModel::read(folder.write("config.json", config)).parameters.num_parameters();
  };
  EXPECT_EQ(count(gpt2_config(768, 12, 12, 1024, 50257)), 124439808);
  EXPECT_EQ(count(gpt2_config(1600, 48, 25, 1024, 50257)), 1557611200);
  // TinyLlama 1.1B, Llama 2 7B, Mistral 7B, Qwen2 0.5B.
  EXPECT_EQ(count(R"({"model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632,
                      "num_hidden_layers": 22, "num_attention_heads": 32,
                      "num_key_value_heads": 4, "vocab_size": 32000})"),
            1100048384);
  EXPECT_EQ(count(R"({"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
                      "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000})"),
            6738415616);
  EXPECT_EQ(count(R"({"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336,
                      "num_hidden_layers": 32, "num_attention_heads": 32,
                      "num_key_value_heads": 8, "vocab_size": 32000})"),
            7241732096);
  EXPECT_EQ(count(R"({"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
                      "num_hidden_layers": 24, "num_attention_heads": 14,
                      "num_key_value_heads": 2, "vocab_size": 151936,
                      "tie_word_embeddings": true})"),
            494032768);
}

// A training of a model that a file describes holds what its plan says. The most activations at
// once come within 2%: a kernel has a workspace besides.
template <class Model, class Config>
void expect_model_as_planned(const std::string& config, Sharding mode, Precision precision) {
  constexpr int kRanks = 2, kBatch = 4, kLength = 32;
  SCOPED_TRACE(config + " mode " + std::to_string(static_cast<int>(mode)) + " precision " +
               std::to_string(static_cast<int>(precision)));
  TestFolder folder;
  const std::string path = folder.write("config.json", config);
  const TrainingPlan plan =
      plan_of(PlannedModel::read(path), settings_with(mode, precision), kRanks, kBatch, kLength);
  std::vector<Measured> measured(kRanks);
  distributed::compared_ranks(kRanks, [&](int rank) {
    manual_seed(4);
    Model model(Config::read(path));
    Accelerator accelerator({.mixed_precision = precision, .sharding = mode, .config_file = ""});
    optim::AdamW optimizer(model.named_parameters(), {.lr = 0.001});
    accelerator.prepare(model, optimizer);
    const Tensor tokens = randint(0, 61, {kBatch, kLength});
    memory_stats()->reset_peak();
    for (int step = 0; step < 3; ++step) {
      const distributed::CommTrace::Scope scope(*distributed::rank_context().trace);
      accelerator.backward(model(tokens, tokens).loss);
      optimizer.step();
      measured[static_cast<size_t>(rank)].persistent = bytes_now(false);
      optimizer.zero_grad();
      measured[static_cast<size_t>(rank)].records = scope.records();
    }
    measured[static_cast<size_t>(rank)].peaks = bytes_now(true);
  });
  for (size_t rank = 0; rank < measured.size(); ++rank) {
    expect_rank_as_planned(plan, rank, measured[rank]);
    const auto planned = static_cast<double>(plan.ranks[rank].peaks[MemoryCategory::kActivation]);
    const auto held = static_cast<double>(measured[rank].peaks[MemoryCategory::kActivation]);
    EXPECT_NEAR(planned, held, 0.02 * held) << "activations of rank " << rank;
  }
}

TEST(PlannedModel, HoldsWhatARunHoldsActivationsToo) {
  const std::string gpt2 = gpt2_config(48, 3, 4, 32, 61);
  const std::string llama =
      R"({"model_type": "llama", "hidden_size": 48, "num_hidden_layers": 3, "vocab_size": 61,
          "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 100,
          "max_position_embeddings": 32})";
  for (const Precision precision : {Precision::kNo, Precision::kBF16}) {
    for (const Sharding mode : {Sharding::kDdp, Sharding::kZero2, Sharding::kFsdp}) {
      expect_model_as_planned<nn::models::Gpt, nn::models::GptConfig>(gpt2, mode, precision);
      expect_model_as_planned<nn::models::Llama, nn::models::LlamaConfig>(llama, mode, precision);
    }
  }
}

TEST(PlannedModel, EveryKindHasAPlanWithAndWithoutABatch) {
  for (const char* config :
       {R"({"model_type": "bert", "hidden_size": 48, "num_hidden_layers": 2, "vocab_size": 61,
            "num_attention_heads": 4, "intermediate_size": 100, "max_position_embeddings": 32})",
        R"({"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 32,
            "vocab_size": 61})",
        R"({"model_type": "llama", "hidden_size": 48, "num_hidden_layers": 2, "vocab_size": 61,
            "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 100})",
        R"({"model_type": "qwen3", "hidden_size": 48, "num_hidden_layers": 2, "vocab_size": 61,
            "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 100})"}) {
    TestFolder folder;
    const PlannedModel model = PlannedModel::read(folder.write("config.json", config));
    const TrainingPlan none = plan_of(model, settings_with(Sharding::kFsdp), 2);
    const TrainingPlan some = plan_of(model, settings_with(Sharding::kFsdp), 2, 4, 16);
    EXPECT_EQ(none.parameters, model.parameters.num_parameters()) << config;
    EXPECT_EQ(lines_of(none.records), lines_of(some.records)) << config;
    EXPECT_LT(none.ranks[0].peak, some.ranks[0].peak) << config;
  }
}

TEST(PlannedModel, CheckpointingLetsActivationsGo) {
  const PlannedModel model = gpt2_of(48, 12, 4, 32, 61);
  Settings settings = settings_with(Sharding::kFsdp);
  const TrainingPlan all = plan_of(model, settings, 3, 8, 32);
  settings.fsdp_activation_checkpointing.value = true;
  const TrainingPlan few = plan_of(model, settings, 3, 8, 32);
  EXPECT_LT(3 * few.ranks[0].peaks[MemoryCategory::kActivation],
            2 * all.ranks[0].peaks[MemoryCategory::kActivation]);
  EXPECT_LT(few.ranks[0].peak, all.ranks[0].peak);
  EXPECT_EQ(lines_of(few.records), lines_of(all.records));
  EXPECT_GT(few.flops, 1.2 * all.flops);  // a forward of the units more
}

// ---- Many ranks ---------------------------------------------------------------------------------

TEST(TrainingPlan, AThousandRanksHold16BytesAParameterAndPadding) {
  const PlannedModel gpt2 = gpt2_of(768, 12, 12, 1024, 50257);
  constexpr int kRanks = 1024;
  const TrainingPlan plan = plan_of(gpt2, settings_with(Sharding::kFsdp), kRanks);
  ASSERT_EQ(plan.ranks.size(), static_cast<size_t>(kRanks));
  // Parts have room for ceil(rows / ranks) rows of each parameter, up to 16 bytes; states of what is
  // there.
  int64_t padded = 0, sum = 0, largest = 0;
  for (const ListedModule& module : gpt2.parameters.modules) {
    for (const auto& [name, shape] : module.parameters) {
      const int64_t rows = (shape[0] + kRanks - 1) / kRanks;
      padded += (rows * (numel_of(shape) / shape[0]) + 3) / 4 * 4 * kRanks;
    }
  }
  for (const RankPlan& rank : plan.ranks) {
    sum += rank.persistent.total() - rank.persistent[MemoryCategory::kActivation];
    largest = std::max(largest, rank.persistent.total());
  }
  EXPECT_EQ(sum, 8 * padded + 8 * gpt2.parameters.num_parameters());
  EXPECT_LT(static_cast<double>(padded),
            1.16 * static_cast<double>(gpt2.parameters.num_parameters()));
  EXPECT_LE(static_cast<double>(largest), 1.2 * plan.mean_persistent());
}

TEST(TrainingPlan, ReplicasOfShardsOnThousandsOfRanks) {
  const PlannedModel model = gpt2_of(64, 2, 4, 32, 500);
  for (const size_t shards : {64, 1024}) {
    Settings settings = settings_with(Sharding::kZero3);
    settings.dp_replicate_size.value = 64;
    const size_t ranks = 64 * shards;
    const TrainingPlan plan = plan_of(model, settings, static_cast<int>(ranks));
    ASSERT_EQ(plan.ranks.size(), ranks);
    EXPECT_EQ(plan.mesh, "mesh(dp_replicate=64, dp_shard=" + std::to_string(shards) + ")");
    // Each group of shards is as the first one.
    for (size_t rank = 0; rank < ranks; ++rank) {
      ASSERT_EQ(plan.ranks[rank], plan.ranks[rank % shards]) << rank;
    }
    std::map<std::string, int64_t> axes;
    for (const PlannedCollective& one : plan.collectives) axes[one.axis] += one.count;
    EXPECT_EQ(axes["dp_replicate"], 3);      // sums of two blocks and of the root
    EXPECT_EQ(axes["dp_shard"], 2 * 3 + 3);  // gathers twice, reductions once
  }
}

// ---- Networks and text --------------------------------------------------------------------------

TEST(Network, SecondsAreLatenciesAndBytesOnTheWire) {
  const Network network = Network::parse(
      R"({"bandwidth_bytes_per_second": 1e9, "latency_seconds": 1e-6,
          "dp_replicate": {"bandwidth_bytes_per_second": 1e8}})",
      "net.json");
  const auto call = [](distributed::Operation operation, int ranks) {
    CommRecord record;
    record.operation = operation;
    record.bytes = 1000000;
    record.group_size = ranks;
    return record;
  };
  // Eight times what a rank has, in four rounds.
  const CommRecord gather = call(distributed::Operation::kAllGather, 9);
  EXPECT_DOUBLE_EQ(network.seconds(gather, "dp_shard"), 4e-6 + 8e-3);
  const CommRecord sum = call(distributed::Operation::kAllReduce, 2);
  EXPECT_DOUBLE_EQ(network.seconds(sum, "dp_shard"), 2e-6 + 1e-3);
  EXPECT_DOUBLE_EQ(network.seconds(sum, "dp_replicate"), 2e-6 + 1e-2);
  EXPECT_EQ(network.seconds(call(distributed::Operation::kAllReduce, 1), ""), 0);
}

TEST(Network, MistakesNameTheKey) {
  const auto complaint = [](const std::string& text) {
    return message_of<ConfigError>([&] { Network::parse(text, "net.json"); });
  };
  const std::string both = R"("bandwidth_bytes_per_second": 1, "latency_seconds": 0)";
  EXPECT_NE(complaint("{}").find("bandwidth_bytes_per_second"), std::string::npos);
  EXPECT_NE(complaint(R"({"bandwidth_bytes_per_second": 1})").find("latency_seconds"),
            std::string::npos);
  EXPECT_NE(complaint(R"({"bandwidth_bytes_per_second": 0, "latency_seconds": 0})").find("above 0"),
            std::string::npos);
  EXPECT_NE(complaint("{" + both + R"(, "bandwith": 1})").find("\"bandwith\" is unknown"),
            std::string::npos);
  EXPECT_NE(complaint("{" + both + R"(, "dp_shard": {"latency": 1}})").find("dp_shard.latency"),
            std::string::npos);
  EXPECT_THROW(Network::parse("[]", "net.json"), FormatError);
}

TEST(ParameterList, AReportIsReadAsItWasWrittenAndMistakesNameTheKey) {
  TestFolder folder;
  const nn::ParameterDefaultsGuard without_memory({.device = kMeta, .initialise = false});
  Small model;
  const ParameterList list = ParameterList::of_model(model);
  EXPECT_EQ(list.block_class, "Block");
  EXPECT_EQ(shapes_of(list), shapes_of(model));
  const PlannedModel again = PlannedModel::read(folder.write("report.json", list.to_json()));
  EXPECT_EQ(again.parameters.to_json(), list.to_json());
  const TrainingPlan plan = plan_of(again, settings_with(Sharding::kFsdp), 2);
  EXPECT_EQ(plan.parameters, model.num_parameters());
  const auto complaint = [](const std::string& text) {
    return message_of<FormatError>([&] { ParameterList::parse(text, "r.json"); });
  };
  EXPECT_NE(complaint("{}").find("modules"), std::string::npos);
  EXPECT_NE(complaint(R"({"modules": []})").find("modules"), std::string::npos);
  EXPECT_NE(complaint(R"({"modules": [{"name": 3}]})").find("\"modules\"[0].\"name\""),
            std::string::npos);
  EXPECT_NE(complaint(R"({"modules": [{"name": "a", "parameters": [["w", [-1]]]}]})")
                .find("\"parameters\""),
            std::string::npos);
  EXPECT_NE(complaint(R"({"modules": [{"nam": "a"}]})").find("\"nam\" is unknown"),
            std::string::npos);
  EXPECT_NE(complaint(R"({"modules": [{"name": "a"}], "withd": 3})").find("\"withd\""),
            std::string::npos);
}

TEST(TrainingPlan, JsonHasWhatTheTableSays) {
  Way way{.sharding = Sharding::kZero3, .ranks = 4, .accumulate = 2, .replicas = 2};
  TrainingPlan plan = plan_of(way);
  auto json = nlohmann::json::parse(plan.to_json());
  EXPECT_EQ(json["parameters"], plan.parameters);
  ASSERT_EQ(json["ranks"].size(), 4u);
  EXPECT_EQ(json["ranks"][3]["persistent"]["parameter"],
            plan.ranks[3].persistent[MemoryCategory::kParameter]);
  EXPECT_EQ(json["ranks"][3]["peak"], plan.ranks[3].peak);
  EXPECT_EQ(json["step_seconds"], nullptr);
  int64_t calls = 0;
  for (const auto& entry : json["collectives"]) calls += entry["count"].get<int64_t>();
  EXPECT_EQ(calls, std::ssize(plan.records));
  const std::string table = plan.describe(int64_t{1} << 30);
  EXPECT_NE(table.find("fits:"), std::string::npos) << table;
  EXPECT_NE(plan.describe(64).find("DOES NOT FIT"), std::string::npos);
}

// They are one function: what it says of a setting it says of the same one.
TEST(TrainingPlan, RefusesAsPrepareDoes) {
  for (const char* classes : {"none", "Blok"}) {
    distributed::compared_ranks(2, [&](int) {
      Small model;
      Accelerator accelerator({.sharding = Sharding::kFsdp,
                               .fsdp = {.wrap_modules = std::vector<std::string>{classes},
                                        .activation_checkpointing = true},
                               .config_file = ""});
      const std::string message = message_of<ConfigError>([&] { accelerator.prepare(model); });
      EXPECT_NE(message.find("prepare: fsdp_"), std::string::npos) << message;
      EXPECT_EQ(message_of<ConfigError>([&] {
                  plan_training(
                      [] {
                        auto small = std::make_shared<Small>();
                        return PlannedTraining{small, [small] { return loss_of(*small, kMeta); }};
                      },
                      {.settings = accelerator.settings(), .ranks = 2});
                }),
                message);
    });
  }
}

TEST(TrainingPlan, MistakesAreTyped) {
  EXPECT_THROW(plan_of({.ranks = 0}), ValueError);
  EXPECT_THROW(plan_of({.ranks = 3}, 3), ValueError);
  EXPECT_THROW(plan_of({.sharding = Sharding::kFsdp, .ranks = 6, .replicas = 4}), ConfigError);
  EXPECT_THROW(optimizer_named("adamv"), ConfigError);
  // A model that has memory would be held by every rank.
  EXPECT_THROW(plan_training(
                   [] {
                     const nn::ParameterDefaultsGuard memory({.device = kCpu});
                     auto model = std::make_shared<Small>();
                     return PlannedTraining{model, [model] { return loss_of(*model, kCpu); }};
                   },
                   {.ranks = 2}),
               DeviceError);
}

}  // namespace
}  // namespace tessera::test_training_plan
