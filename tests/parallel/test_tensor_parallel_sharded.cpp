// Tensor parallelism and sharded data parallelism of one model: trained, clipped, saved and loaded
// as in one process.
// ctest labels: threads
#include <fstream>
#include <sstream>

#include <tessera/accelerate/state/model_io.h>
#include <tessera/accelerate/state/state_io.h>
#include <tessera/autograd/autocast_mode.h>
#include <tessera/core/parallel.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/distributed/fully_shard/fully_shard.h>
#include <tessera/distributed/fully_shard/zero.h>
#include <tessera/distributed/tensor_parallel/compute_mesh.h>
#include <tessera/distributed/tensor_parallel/parallelize.h>
#include <tessera/optim/clip.h>

#include "distributed/compared_ranks.h"
#include "finished_process.h"
#include "golden_files.h"
#include "message_of.h"
#include "parallel/divided_training.h"
#include "parallel/golden_numbers.h"

namespace tessera::distributed::test_tensor_parallel_sharded {
namespace {

constexpr int kSteps = 10;
constexpr double kTolerance = 1e-11;  // f64; of each tensor's largest element
constexpr double kMaxNorm = 0.2;      // below the first norms

enum class Way { kAlone, kTensor, kFully, kZero1, kZero2 };
struct Layout {
  Way way = Way::kAlone;
  int tp = 1, dp = 1;
  bool sequence = false;
  int accumulate = 1;  // micro-batches of a rank in a step
  int ranks() const { return tp * dp; }
  std::string describe() const {
    constexpr const char* kNames[] = {"alone", "tp", "tp x fsdp", "tp x zero1", "tp x zero2"};
    return std::string(kNames[static_cast<int>(way)]) + ", tp " + std::to_string(tp) + ", dp " +
           std::to_string(dp) + (sequence ? ", sequence" : "") + ", " + std::to_string(accumulate) +
           " micro-batches";
  }
};

using Make = std::function<Training()>;

// The blocks are units, and what is left.
void shard(nn::ModuleBase& model, Mesh& data, Way way) {
  if (way == Way::kZero1 || way == Way::kZero2) {
    zero(model, data, {.stage = way == Way::kZero1 ? 1 : 2, .bucket_bytes = 20000});
    return;
  }
  for (const auto& [name, module] : model.named_modules()) {
    const std::string type = module->type_name();
    if (type == "Block" || type == "Layer") fully_shard(*module, data);
  }
  fully_shard(model, data);
}

struct Trial {
  Trial(const Make& make, const Layout& layout_in, MakeOptimizer make_optimizer)
      : layout(layout_in), training(make()) {
    if (layout.ranks() > 1) {
      mesh = std::make_unique<Mesh>(
          world(), std::vector<MeshAxis>{{"dp_shard", layout.dp}, {"tp", layout.tp}});
      parallelize_module(model(), (*mesh)["tp"], {.sequence = layout.sequence});
      if (layout.way != Way::kTensor) shard(model(), (*mesh)["dp_shard"], layout.way);
    }
    optimizer = make_optimizer(model().named_parameters());
  }
  nn::ModuleBase& model() const { return *training.model; }

  // Micro-batches are dealt to the data ranks in turn.
  void train(int steps) {
    const int own = mesh == nullptr ? 0 : mesh->coordinate("dp_shard");
    for (int i = 0; i < steps; ++i, ++step) {
      double sum = 0;
      for (int micro = 0; micro < layout.accumulate; ++micro) {
        const int in_step = micro * layout.dp + own;
        if (seeds) manual_seed(static_cast<uint64_t>(step * 12 + in_step));
        const Tensor loss = training.loss(batch_of(step * 12 + in_step));
        sum += loss.item();
        (loss * Scalar(1.0 / layout.accumulate)).backward();
      }
      losses.push_back(sum / layout.accumulate);  // of this data rank
      if (mesh != nullptr && layout.dp > 1) {
        const Tensor all = full({1}, losses.back(), {.dtype = kF64});
        mesh->group("dp_shard").all_reduce(all).wait();
        losses.back() = all.item() / layout.dp;
      }
      norms.push_back(optim::clip_grad_norm(model().parameters(), kMaxNorm).item());
      optimizer->step();
      optimizer->zero_grad();
    }
  }

  accelerate::TrainingState state() const {
    return {.models = {&model()}, .optimizers = {optimizer.get()}};
  }
  // Of model and optimizer, whole. Collective.
  WholeValues values() const {
    const NoGradGuard no_grad;
    WholeValues values;
    for (const StateDict& one : {model().state_dict(), optimizer->state_dict()}) {
      for (const auto& [name, tensor] : one) {
        values[name] = (is_dtensor(tensor) ? full_tensor(tensor) : tensor).to_vector();
      }
    }
    return values;
  }

  const Layout layout;
  std::unique_ptr<Mesh> mesh;
  Training training;
  std::unique_ptr<optim::Optimizer> optimizer;
  std::vector<double> losses, norms;
  int step = 0;
  bool seeds = false;  // each micro-batch, so that it drops the same on any rank
};

// One process with as many micro-batches a step.
struct Expected {
  std::vector<double> losses, norms;
  WholeValues parameters;
};
Expected alone(const Make& make, int micro_batches, MakeOptimizer optimizer, int steps = kSteps,
               bool in_bf16 = false) {
  Context context;
  const ContextGuard guard(context);
  const AutocastGuard autocast(kBF16, in_bf16);
  set_num_threads(1);
  Trial run(make, {.accumulate = micro_batches}, optimizer);
  run.seeds = true;
  run.train(steps);
  return {run.losses, run.norms, wholes_of(run.model(), false)};
}

void expect_near(const std::vector<double>& own, const std::vector<double>& expected,
                 double tolerance, const std::string& what) {
  ASSERT_EQ(own.size(), expected.size());
  for (size_t i = 0; i < own.size(); ++i) {
    EXPECT_NEAR(own[i], expected[i], tolerance * std::abs(expected[i])) << what << " " << i;
  }
}

void compare(const Make& make, const Layout& layout, MakeOptimizer optimizer, bool in_f32 = false) {
  SCOPED_TRACE(layout.describe() + (in_f32 ? " in f32" : ""));
  const Expected expected = alone(make, layout.dp * layout.accumulate, optimizer);
  compared_ranks(layout.ranks(), [&](int) {
    Trial run(make, layout, optimizer);
    run.seeds = true;
    run.train(kSteps);
    expect_near(run.losses, expected.losses, in_f32 ? 2e-6 : kTolerance, "loss");
    expect_near(run.norms, expected.norms, in_f32 ? 1e-5 : kTolerance, "norm");
    EXPECT_GT(run.norms[0], kMaxNorm);
    if (in_f32) return;
    expect_close(wholes_of(run.model(), false), expected.parameters, kTolerance, "parameter");
  });
}

Training even_gpt() {  // for ZeRO, which cuts parts of one size
  nn::models::GptConfig config = kTiny;
  config.vocab_size = 52;
  return gpt_of(config);
}
Training untied_gpt() {
  nn::models::GptConfig config = kTiny;
  config.tied = false;
  config.inner = 36;  // a width that the ranks of both axes do not divide
  return gpt_of(config);
}

TEST(TensorParallelSharded, LossesNormsAndParametersAreThoseOfOneProcess) {
  for (const bool sequence : {false, true}) {
    for (const int accumulate : {1, 3}) {
      compare(gpt, {Way::kFully, 2, 2, sequence, accumulate}, adamw);
    }
    compare(untied_gpt, {Way::kFully, 2, 2, sequence}, adamw);
    compare(llama, {Way::kFully, 2, 2, sequence}, adamw);
    compare(gpt, {Way::kTensor, 4, 1, sequence, 3}, adamw);
    compare([] { return llama_of(4); }, {Way::kTensor, 4, 1, sequence}, adamw);
  }
  compare([] { return bert(); }, {Way::kFully, 2, 2, false, 3}, adamw);
  compare([] { return bert(); }, {Way::kTensor, 4, 1}, adamw);
}

TEST(TensorParallelSharded, SoTheyAreWithZero) {
  for (const Way way : {Way::kZero1, Way::kZero2}) {
    for (const bool sequence : {false, true}) compare(even_gpt, {way, 2, 2, sequence, 3}, adamw);
  }
}

// In f32 losses and norms to rounding. Parameters are no measure there: a key's bias has no gradient
// but rounding.
TEST(TensorParallelSharded, SoTheyAreOfEachModelInEachLayoutInF64AndF32) {
  const std::vector<Layout> layouts = {
      {Way::kTensor, 2, 1, false, 3}, {Way::kTensor, 2, 1, true},    {Way::kTensor, 4, 1, false},
      {Way::kTensor, 4, 1, true},     {Way::kFully, 2, 2, false, 3}, {Way::kFully, 2, 2, true},
  };
  for (const DType dtype : {kF64, kF32}) {
    for (const Layout& layout : layouts) {
      const bool f32 = dtype == kF32;
      const auto optimizer = f32 ? sgd : adamw;
      compare([&] { return gpt_of(kTiny, dtype); }, layout, optimizer, f32);
      compare([&] { return llama_of(layout.tp, dtype); }, layout, optimizer, f32);
      compare([&] { return bert(0, dtype); }, layout, optimizer, f32);
    }
  }
}

// Each micro-batch drops what one process drops, on whatever rank.
TEST(TensorParallelSharded, SoTheyAreWithDropout) {
  nn::models::GptConfig config = kTiny;
  config.dropout = 0.3;
  for (const bool sequence : {false, true}) {
    for (const Layout& layout :
         {Layout{Way::kTensor, 4, 1, sequence, 3}, Layout{Way::kFully, 2, 2, sequence, 3}}) {
      compare([&] { return gpt_of(config); }, layout, adamw);
      compare([] { return bert(0.3); }, layout, adamw);
    }
  }
}

TEST(TensorParallelSharded, UnderAutocastWeightsAreReadAndGatheredInBF16) {
  const auto make = [] { return gpt_of(kTiny, kF32); };
  const Expected expected = alone(make, 2, sgd, 3, true), in_f32 = alone(make, 2, sgd, 3);
  for (const Layout& layout :
       {Layout{Way::kTensor, 2, 1, true, 2}, Layout{Way::kFully, 2, 2, true}}) {
    compared_ranks(layout.ranks(), [&](int) {
      const AutocastGuard autocast(kBF16);
      Trial run(make, layout, sgd);
      run.train(1);
      const CommTrace::Scope scope(*rank_context().trace);
      run.train(2);
      expect_near(run.losses, expected.losses, 3e-3, layout.describe());
      EXPECT_NE(run.losses, in_f32.losses);
      int64_t gathered = 0;
      for (const CommRecord& record : scope.records()) {
        gathered += record.channel == Channel::kParameter;
      }
      EXPECT_EQ(gathered > 0, layout.way == Way::kFully);
    });
  }
}

// ---- Beside torch ------------------------------------------------------------------------------

struct Perceptron : nn::Module<Perceptron> {
  Perceptron()
      : norm(add<nn::LayerNorm>("norm", 8)),
        fc(add<nn::Linear>("fc", 8, 16)),
        proj(add<nn::Linear>("proj", 16, 8)) {
    to(kF64);
    const NoGradGuard no_grad;
    int64_t salt = 0;
    for (const Tensor& parameter : parameters()) {
      parameter.copy_(tests::golden_numbers(parameter.shape(), ++salt));
    }
  }
  Tensor forward(const Tensor& x) { return mean(square(proj(gelu(fc(norm(x)))))); }
  std::vector<nn::StyledModules> parallel_styles() const override {
    using enum nn::ParallelStyle;
    return {{"norm", kSequence}, {"fc", kColumnwise}, {"proj", kRowwise}};
  }
  nn::LayerNorm& norm;
  nn::Linear &fc, &proj;
};

TEST(TensorParallelSharded, LossesAndNormsAreThoseOfTorchsTensorParallelism) {
  const nlohmann::json golden = tests::golden_json("tensor_parallel.json");
  const auto losses = golden["losses"].get<std::vector<double>>();
  const auto norms = golden["norms"].get<std::vector<double>>();
  for (const Layout& layout : {Layout{Way::kTensor, 2}, Layout{Way::kFully, 2, 2}}) {
    compared_ranks(layout.ranks(), [&](int) {
      Mesh mesh(world(), {{"dp_shard", layout.dp}, {"tp", layout.tp}});
      Perceptron model;
      parallelize_module(model, mesh["tp"]);
      if (layout.dp > 1) fully_shard(model, mesh["dp_shard"]);
      const auto optimizer = std::make_unique<optim::SGD>(
          model.named_parameters(), optim::SGD::Options{.lr = 0.05, .momentum = 0.9});
      for (size_t step = 0; step < losses.size(); ++step) {
        const Tensor x = tests::golden_numbers({2, 4, 8}, 100 + static_cast<int64_t>(step));
        const Tensor loss = model(x);
        loss.backward();
        EXPECT_NEAR(loss.item(), losses[step], kTolerance) << step;
        EXPECT_NEAR(optim::clip_grad_norm(model.parameters(), 0.5).item(), norms[step], kTolerance);
        optimizer->step();
        optimizer->zero_grad();
      }
    });
  }
}

// transformers' models with torch's plan, on the weights of golden folders.
TEST(TensorParallelSharded, SoAreThoseOfTransformersModelsUnderTorchsTensorParallelism) {
  const nlohmann::json golden = tests::golden_json("tensor_parallel.json");
  constexpr int64_t kLength = 9;
  const auto words = [](int64_t vocabulary, int64_t step) {  // as the script of the golden file
    std::vector<int64_t> ids;
    for (int64_t i = 0; i < 2 * kLength; ++i) ids.push_back((i * 37 + step * 11) % vocabulary);
    return tensor(std::span<const int64_t>(ids), {2, kLength}, kI64);
  };
  const auto compare_with = [&](const std::string& name, const Layout& layout, const auto& make,
                                const auto& loss_of) {
    SCOPED_TRACE(name + ", " + layout.describe());
    const auto losses = golden[name]["losses"].get<std::vector<double>>();
    const auto norms = golden[name]["norms"].get<std::vector<double>>();
    compared_ranks(layout.ranks(), [&](int) {
      Mesh mesh(world(), {{"dp_shard", layout.dp}, {"tp", layout.tp}});
      const auto model = make(tests::golden_path(name));
      model->to(kF64);
      model->train();
      parallelize_module(*model, mesh["tp"], {.sequence = layout.sequence});
      if (layout.dp > 1) shard(*model, mesh["dp_shard"], Way::kFully);
      optim::SGD optimizer(model->named_parameters(), {.lr = 0.05, .momentum = 0.9});
      std::vector<double> own_losses, own_norms;
      for (size_t step = 0; step < losses.size(); ++step) {
        const Tensor loss =
            loss_of(*model, words(model->config.vocab_size, static_cast<int64_t>(step)));
        loss.backward();
        own_losses.push_back(loss.item());
        own_norms.push_back(optim::clip_grad_norm(model->parameters(), 1.0).item());
        optimizer.step();
        optimizer.zero_grad();
      }
      // transformers' norms and angles of Llama are f32 in an f64 model, too.
      const double tolerance = name == "llama" ? 1e-5 : 1e-10;
      expect_near(own_losses, losses, tolerance, "loss");
      expect_near(own_norms, norms, tolerance, "norm");
    });
  };
  const auto of_words = [](auto& model, const Tensor& ids) {
    return model(ids.narrow(1, 0, kLength - 1).contiguous(),
                 ids.narrow(1, 1, kLength - 1).contiguous())
        .loss;
  };
  for (const bool sequence : {false, true}) {
    for (const Layout& layout :
         {Layout{Way::kTensor, 2, 1, sequence}, Layout{Way::kTensor, 4, 1, sequence},
          Layout{Way::kFully, 2, 2, sequence}}) {
      compare_with(
          "gpt2", layout,
          [](const std::string& path) { return nn::models::Gpt::from_pretrained(path); }, of_words);
      if (layout.tp == 2) {  // two heads of keys
        compare_with(
            "llama", layout,
            [](const std::string& path) { return nn::models::Llama::from_pretrained(path); },
            of_words);
      }
      if (sequence) continue;  // nine tokens
      compare_with(
          "bert", layout,
          [](const std::string& path) { return nn::models::Bert::from_pretrained(path); },
          [](nn::models::Bert& model, const Tensor& ids) {
            return model(ids, {}, ids.select(1, 0).remainder(5)).loss;
          });
    }
  }
}

// ---- Placements, memory, collectives -----------------------------------------------------------

TEST(TensorParallelSharded, FullyShardCutsWhatTensorParallelismLeaves) {
  compared_ranks(4, [](int) {
    Trial run(gpt, {Way::kFully, 2, 2, true}, sgd);
    std::map<std::string, std::string> found;
    for (const auto& [name, tensor] : run.model().named_parameters()) {
      found[name] = describe(placements_of(tensor)) + " on " + mesh_of(tensor).describe();
    }
    const std::string both = " on mesh(dp_shard=2, tp=2)";
    const std::string one = "[Shard(0)] on mesh(dp_shard_tp=4) of mesh(dp_shard=2, tp=2)";
    const std::string block = "transformer.h.0.";
    EXPECT_EQ(found.at(block + "attn.c_attn.weight"), "[Shard(1), BlockShard(0, 3)]" + both);
    EXPECT_EQ(found.at(block + "attn.c_attn.bias"),
              "[StridedShard(0, 2), BlockShard(0, 3)]" + both);
    EXPECT_EQ(found.at(block + "attn.c_proj.weight"), "[Shard(0), Shard(1)]" + both);
    EXPECT_EQ(found.at(block + "attn.c_proj.bias"), "[Shard(0), Replicate]" + both);
    EXPECT_EQ(found.at(block + "ln_1.weight"), one);
    EXPECT_EQ(found.at("transformer.wte.weight"), "[Shard(1), Shard(0)]" + both);
    EXPECT_EQ(found.at("transformer.wpe.weight"), one);
  });
}

int64_t held(MemoryCategory category) { return memory_stats()->current(category); }

TEST(TensorParallelSharded, ARankKeepsWhatItOwnsToTheByte) {
  constexpr int64_t kSize = sizeof(double), kLine = 16;  // bytes
  const auto room = [](int64_t numel) { return (numel * kSize + kLine - 1) / kLine * kLine; };
  const auto ceil = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  for (const Layout& layout : {Layout{Way::kTensor, 2, 1, true}, Layout{Way::kTensor, 4, 1, true},
                               Layout{Way::kFully, 2, 2, true}}) {
    compared_ranks(layout.ranks(), [&](int) {
      const int64_t before = held(MemoryCategory::kParameter);
      const int64_t states_before = held(MemoryCategory::kOptimizer);
      Trial run(gpt, layout, adamw);
      run.train(2);
      const int t = layout.ranks() == 1 ? 0 : run.mesh->coordinate("tp");
      // From shapes alone. C: width, 4 C: inner width; every block's weights, the tables, the norms.
      const int64_t C = kTiny.width, tp = layout.tp, dp = layout.dp, all = tp * dp;
      const auto [begin, end] = chunk_of(kTiny.vocab_size, layout.tp, t);
      const std::vector<std::pair<int64_t, int64_t>> parameters = {
          {C / dp * 3 * C / tp, 2},       // c_attn
          {ceil(3 * C / tp, dp), 2},      //
          {C / dp * C / tp, 2},           // c_proj
          {C / dp, 2 * 2},                // and the mlp's: rows' biases
          {C / dp * 4 * C / tp, 2 * 2},   // c_fc, c_proj
          {ceil(4 * C / tp, dp), 2},      //
          {(end - begin) * (C / dp), 1},  // wte, which the head shares
          {(layout.way == Way::kFully ? ceil(kTiny.context, all) : kTiny.context) * C, 1},
          {layout.way == Way::kFully ? C / all : C, 2 * 4 + 2},  // norms
      };
      int64_t bytes = 0, elements = 0;
      for (const auto& [numel, count] : parameters) {
        bytes += count * (layout.way == Way::kFully ? room(numel) : numel * kSize);
        elements += count * numel;
      }
      EXPECT_EQ(held(MemoryCategory::kParameter) - before, bytes) << layout.describe();
      int64_t own = 0;
      for (const Tensor& parameter : run.model().parameters()) own += parameter.numel();
      EXPECT_EQ(own, elements) << layout.describe();
      const int64_t states = held(MemoryCategory::kOptimizer) - states_before;
      EXPECT_EQ(states, 2 * elements * kSize) << layout.describe();
    });
  }
}

// What a forward keeps of one block, beside one process. A block that is calculated again keeps its
// input.
TEST(TensorParallelSharded, ASequenceParallelBlockKeepsAPartOfItsActivations) {
  constexpr int64_t B = 2, T = 32, C = 64, kSize = sizeof(double);
  const auto of_block = [&](Mesh* tp, bool recompute, bool in_bf16 = false) {
    const AutocastGuard autocast(kBF16, in_bf16);
    const auto kept = [&](int64_t layers) {
      manual_seed(1);
      nn::models::Gpt model(
          {.vocab_size = 64, .context = T, .width = C, .layers = layers, .heads = 8});
      model.to(in_bf16 ? kF32 : kF64);
      if (tp != nullptr) parallelize_module(model, *tp, {.sequence = true});
      std::vector<HookHandle> checkpoints;
      for (const auto& [name, module] : model.named_modules()) {
        if (recompute && module->type_name() == "Block") {
          checkpoints.push_back(module->checkpoint_calls());
        }
      }
      const Tensor tokens = randint(0, 64, {B, T}, kI64, RandomStream{5, 0});
      const int64_t before = held(MemoryCategory::kActivation);
      const Tensor loss = model(tokens, tokens).loss;
      return held(MemoryCategory::kActivation) - before;
    };
    kept(1);  // what is made once
    return kept(3) - kept(2);
  };
  int64_t whole = 0, input = 0, in_bf16 = 0;
  compared_ranks(1, [&](int) {
    whole = of_block(nullptr, false), input = of_block(nullptr, true);
    in_bf16 = of_block(nullptr, false, true);
  });
  EXPECT_GE(input, B * T * C * kSize);
  for (const int ranks : {2, 4}) {
    compared_ranks(ranks, [&](int rank) {
      Mesh mesh(world(), {{"tp", ranks}});
      // The fused perceptron keeps what its rows add, zeros on all ranks but the first.
      const int64_t zeros = rank == 0 ? 0 : C * kSize;
      const int64_t own = of_block(&mesh["tp"], false), again = of_block(&mesh["tp"], true);
      EXPECT_EQ(own, whole / ranks + zeros) << ranks << " ranks";
      EXPECT_EQ(again, input / ranks) << ranks << " ranks";
      // Of the 16-bit copies that column products read it keeps those of all tokens, and one of
      // what rows add.
      constexpr int64_t kCopies = 2 * B * T * C * 2;
      const int64_t narrow = of_block(&mesh["tp"], false, true);
      EXPECT_EQ(narrow, (in_bf16 - kCopies) / ranks + kCopies + C * 2) << ranks << " ranks";
    });
  }
}

TEST(TensorParallelSharded, AGraphThatIsKeptHasPartsBehindItsBackwardToo) {
  compared_ranks(2, [](int) {
    Mesh mesh(world(), {{"tp", 2}});
    manual_seed(1);
    nn::models::Gpt model({.vocab_size = 64, .context = 32, .width = 64, .layers = 2, .heads = 8});
    model.to(kF64);
    parallelize_module(model, mesh["tp"], {.sequence = true});
    const Tensor tokens = randint(0, 64, {2, 32}, kI64, RandomStream{5, 0});
    const Tensor loss = model(tokens, tokens).loss;
    const int64_t kept = held(MemoryCategory::kActivation);
    constexpr int64_t kF64Size = sizeof(double);
    std::vector<double> gathers, gradients;
    for (int i = 0; i < 2; ++i) {
      const CommTrace::Scope backward(*rank_context().trace);
      loss.backward({}, true);
      gathers.push_back(0);
      for (const CommRecord& record : backward.records()) {
        gathers.back() += record.operation == Operation::kAllGather;
      }
      // Less than one tensor of all tokens.
      EXPECT_LT(held(MemoryCategory::kActivation) - kept, tokens.numel() * 64 * kF64Size) << i;
      gradients.push_back(optim::clip_grad_norm(model.parameters(), 1e9).item());
    }
    EXPECT_GT(gathers[0], 0);
    EXPECT_EQ(gathers[1], gathers[0]);
    EXPECT_NEAR(gradients[1], 2 * gradients[0], 1e-11 * gradients[0]);
  });
}

TEST(TensorParallelSharded, AUnitReducesOnceForEachSetOfRanksAndABlockTalksAsWithoutSharding) {
  compared_ranks(4, [](int) {
    Trial run(gpt, {Way::kFully, 2, 2, true}, sgd);
    run.train(1);
    const auto calls = [&](const CommTrace::Scope& scope, Channel channel, Operation operation) {
      int64_t count = 0;
      for (const CommRecord& record : scope.records()) {
        count += record.channel == channel && record.operation == operation;
      }
      return count;
    };
    constexpr int64_t kBlocks = 2, kAround = 1;  // the table's scatter, the head's gather
    const Batch batch = batch_of(0);
    const CommTrace::Scope forward(*rank_context().trace);
    const Tensor loss = run.training.loss(batch);
    EXPECT_EQ(calls(forward, Channel::kModule, Operation::kAllGather), 2 * kBlocks + kAround);
    EXPECT_EQ(calls(forward, Channel::kModule, Operation::kReduceScatter), 2 * kBlocks + kAround);
    // Weights that tp cuts along dp, and copies along both: of each block and of the root.
    EXPECT_EQ(calls(forward, Channel::kParameter, Operation::kAllGather), 2 * (kBlocks + 1));
    const CommTrace::Scope backward(*rank_context().trace);
    loss.backward();
    EXPECT_EQ(calls(backward, Channel::kGradient, Operation::kReduceScatter), 2 * (kBlocks + 1));
    EXPECT_EQ(calls(backward, Channel::kGradient, Operation::kAllReduce), 0);
    const CommTrace::Scope clip(*rank_context().trace);
    optim::clip_grad_norm(run.model().parameters(), 1.0);
    std::map<std::string, int> groups;
    for (const CommRecord& record : clip.records()) ++groups[record.group];
    for (const auto& [group, count] : groups) EXPECT_EQ(count, 1) << group;
  });
}

// A copy counts once in a norm, a part where it lies.
TEST(TensorParallelSharded, TheNormIsThatOfTheWholeGradients) {
  for (const Layout& layout : {Layout{Way::kTensor, 4, 1, true}, Layout{Way::kTensor, 2, 1, false},
                               Layout{Way::kFully, 2, 2, true}}) {
    compared_ranks(layout.ranks(), [&](int) {
      Trial run(gpt, layout, sgd);
      run.training.loss(batch_of(0)).backward();
      double squares = 0;
      for (const auto& [name, values] : wholes_of(run.model(), true)) {
        for (const double value : values) squares += value * value;
      }
      const double norm = optim::clip_grad_norm(run.model().parameters(), 1e9).item();
      EXPECT_NEAR(norm, std::sqrt(squares), 1e-12 * norm) << layout.describe();
    });
  }
}

TEST(TensorParallelSharded, TakenOverByFullyShardTheModelTrainsOnAsItWas) {
  const Expected expected = alone(gpt, 2, adamw, 4);
  compared_ranks(4, [&](int) {
    Trial trial(gpt, {Way::kTensor, 2, 2, true}, adamw);
    const Tensor before = trial.model().parameters()[0];
    trial.training.loss(batch_of(99));
    EXPECT_EQ(sharded_model(trial.model()).report().size(), 1u);
    shard(trial.model(), (*trial.mesh)["dp_shard"], Way::kFully);
    EXPECT_TRUE(trial.model().parameters()[0].is(before));
    EXPECT_EQ(sharded_model(trial.model()).report().size(), 3u);
    trial.train(4);
    expect_near(trial.losses, expected.losses, kTolerance, "loss");
    expect_close(wholes_of(trial.model(), false), expected.parameters, kTolerance, "parameter");
  });
}

// ---- Saved and loaded --------------------------------------------------------------------------

const std::vector<Layout> kLayouts = {
    {Way::kTensor, 2, 1, true},
    {Way::kTensor, 4, 1, false},
    {Way::kFully, 2, 2, true},
    {},
};

TEST(TensorParallelSharded, StatesLoadIntoEveryOtherLayoutAndTrainOn) {
  const TestFolder folder;
  const int micro_batches = 2;  // of every step, in whatever layout
  const auto with_batches = [&](Layout layout) {
    layout.accumulate = micro_batches / layout.dp;
    return layout;
  };
  const Expected expected = alone(gpt, micro_batches, adamw, 3);
  for (size_t i = 0; i < kLayouts.size(); ++i) {
    WholeValues saved;
    compared_ranks(kLayouts[i].ranks(), [&](int rank) {
      Trial run(gpt, with_batches(kLayouts[i]), adamw);
      run.train(2);
      accelerate::StateIo().save_state(run.state(), folder.path(std::to_string(i)));
      const WholeValues values = run.values();
      if (rank == 0) saved = values;
    });
    for (const Layout& to : kLayouts) {
      compared_ranks(to.ranks(), [&](int) {
        const std::string what = kLayouts[i].describe() + " to " + to.describe();
        Trial run(gpt, with_batches(to), adamw);
        accelerate::StateIo().load_state(run.state(), folder.path(std::to_string(i)));
        EXPECT_TRUE(run.values() == saved) << what;
        run.step = 2;
        run.train(1);
        EXPECT_NEAR(run.losses[0], expected.losses[2], kTolerance * expected.losses[2]) << what;
        EXPECT_NEAR(run.norms[0], expected.norms[2], kTolerance * expected.norms[2]) << what;
        expect_close(wholes_of(run.model(), false), expected.parameters, kTolerance, what);
      });
    }
  }
}

std::string file_in(const std::string& folder) {
  std::ifstream file(folder + "/model.safetensors", std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

TEST(TensorParallelSharded, AreExportedAsOneProcessDoesAndLoadedFromThere) {
  const TestFolder folder;
  Trial one(gpt, {.accumulate = 2}, adamw);
  one.train(1);
  accelerate::save_model(one.model(), folder.path("one"), {}, world());
  const std::string expected = file_in(folder.path("one"));
  ASSERT_FALSE(expected.empty());
  for (const Layout& layout : kLayouts) {
    compared_ranks(layout.ranks(), [&](int) {
      for (const bool first_rank_reads : {false, true}) {
        Trial run(gpt, layout, adamw);
        accelerate::load_model(run.model(), folder.path("one"),
                               {.first_rank_reads = first_rank_reads}, world());
        run.training.loss(batch_of(0)).backward();  // what it calculates with is what was loaded
        accelerate::save_model(run.model(), folder.path("parts"), {}, world());
      }
    });
    EXPECT_TRUE(file_in(folder.path("parts")) == expected) << layout.describe();
  }
}

// A folder of transformers, of which a rank takes its parts.
TEST(TensorParallelSharded, PretrainedFoldersAreReadIntoParts) {
  const TestFolder folder;
  manual_seed(4);
  const nn::models::Gpt gpt2(kTiny);
  gpt2.save_pretrained(folder.path("gpt2"));
  const nn::models::LlamaConfig config{
      .vocab_size = 51, .width = 32, .inner = 24, .layers = 2, .heads = 4, .kv_heads = 2};
  const nn::models::Llama llama_model(config);
  llama_model.save_pretrained(folder.path("llama"), "20KB");
  const nn::models::Bert bert_model(nn::models::BertConfig{
      .vocab_size = 51, .width = 32, .layers = 2, .heads = 4, .context = 16, .labels = 2});
  bert_model.save_pretrained(folder.path("bert"));
  const WholeValues of_gpt2 = wholes_of(gpt2, false), of_llama = wholes_of(llama_model, false);
  const WholeValues of_bert = wholes_of(bert_model, false);
  for (const bool sharded : {false, true}) {
    compared_ranks(4, [&](int) {
      Mesh mesh(world(), {{"dp_shard", sharded ? 2 : 1}, {"tp", -1}});
      const auto divide = [&](nn::ModuleBase& model) {
        for (const Tensor& tensor : model.parameters()) EXPECT_TRUE(tensor.is_meta());
        parallelize_module(model, mesh["tp"], {.sequence = false});
        if (sharded) shard(model, mesh["dp_shard"], Way::kFully);
      };
      const int64_t before = held(MemoryCategory::kParameter);
      const auto own = nn::models::Gpt::from_pretrained(folder.path("gpt2"), divide);
      int64_t bytes = 0;
      for (const Tensor& tensor : own->parameters()) bytes += tensor.nbytes();
      EXPECT_EQ(held(MemoryCategory::kParameter) - before, bytes);
      EXPECT_EQ(wholes_of(*own, false), of_gpt2);
      EXPECT_EQ(own->transformer.wte.weight.impl(), own->lm_head.weight.impl());
      if (sharded) {  // two heads of keys
        const auto of_folder = nn::models::Llama::from_pretrained(folder.path("llama"), divide);
        EXPECT_EQ(wholes_of(*of_folder, false), of_llama);
      }
      const auto classifier =
          nn::models::Bert::from_pretrained(folder.path("bert"), nullptr, divide);
      EXPECT_EQ(wholes_of(*classifier, false), of_bert);
      // And what was read is what is calculated with.
      const Batch batch = batch_of(0);
      const double loss = (*own)(batch.inputs, batch.targets).loss.item();
      nn::models::Gpt whole(kTiny);
      whole.load_weights(folder.path("gpt2") + "/model.safetensors");
      EXPECT_NEAR(loss, whole(batch.inputs, batch.targets).loss.item(), 2e-6 * loss);
    });
  }
}

// ---- Mistakes: one error on every rank, and what to do -----------------------------------------

template <class Error, class Body>
void expect_error(const std::string& part, const Body& body) {
  const std::string message = message_of<Error>(body);
  EXPECT_TRUE(mentions(message, part)) << message;
}

TEST(TensorParallelSharded, MistakesAreErrorsOnEveryRank) {
  compared_ranks(4, [&](int) {
    expect_error<ConfigError>("tp", [] { Mesh(world(), {{"dp_shard", 2}, {"tp", 3}}); });
    Mesh mesh(world(), {{"tp", 4}});
    const Training keys = llama();
    expect_error<ConfigError>("the 2 heads of 'model.layers.0.self_attn.k_proj' do not divide",
                              [&] { parallelize_module(*keys.model, mesh["tp"]); });
    nn::models::GptConfig config = kTiny;
    config.width = 48, config.heads = 6;
    const Training heads = gpt_of(config);
    expect_error<ConfigError>("the 6 heads of 'transformer.h.0.attn.c_attn' do not divide",
                              [&] { parallelize_module(*heads.model, mesh["tp"]); });
  });
}

TEST(TensorParallelSharded, SoAreModesAndStatesThatDoNotFit) {
  const TestFolder folder;
  Trial other([] { return llama(); }, {}, adamw);
  accelerate::StateIo().save_state(other.state(), folder.path("llama"));
  compared_ranks(4, [&](int) {
    Trial run(gpt, {Way::kTensor, 2, 2, true}, adamw);
    Mesh& data = (*run.mesh)["dp_shard"];
    expect_error<ConfigError>("is divided already",
                              [&] { parallelize_module(run.model(), (*run.mesh)["tp"]); });
    expect_error<UnsupportedError>("zero: cuts parts of one size, and 'transformer.wte.weight' is",
                                   [&] { zero(run.model(), data, {.stage = 1}); });
    expect_error<ConfigError>("share 'tp'", [&] { fully_shard(run.model(), *run.mesh); });
    EXPECT_TRUE(run.training.loss(batch_of(0)).defined());  // it is as it was
    fully_shard(run.model(), data);
    EXPECT_THROW(parallelize_module(run.model(), (*run.mesh)["tp"]), ConfigError);
    EXPECT_THROW(accelerate::StateIo().load_state(run.state(), folder.path("llama")), Error);
    EXPECT_THROW(accelerate::load_model(run.model(), folder.path("llama"), {}, world()),
                 ValueError);
    run.train(1);
  });
}

}  // namespace
}  // namespace tessera::distributed::test_tensor_parallel_sharded
