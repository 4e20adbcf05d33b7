// tessera estimate-memory: what a model takes, from its configuration or from the headers of its
// files; no element is read.
//
// What each rank of a training keeps comes from plans (accelerate/plan): bytes of the largest rank
// when a step has been made, with AdamW. Activations are those of one micro-batch, see
// activation_bytes(). "Training (Adam)" of the first table is Accelerate's figure: four times the
// size in f32, twice the f32 size for 16 bits.
#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <tessera/accelerate/big_model/device_map.h>
#include <tessera/accelerate/big_model/transformers_tree.h>
#include <tessera/accelerate/cli/commands.h>
#include <tessera/accelerate/plan/planned_model.h>
#include <tessera/accelerate/plan/training_plan.h>
#include <tessera/core/error.h>

namespace tessera::cli {
namespace {

using accelerate::text_of_bytes;

constexpr std::string_view kEstimate = "tessera estimate-memory";
using accelerate::PlannedModel;

// A block that stays together on one device: embeddings, a layer.
struct Part {
  std::string name;
  double elements = 0;  // in units of 4 bytes where they are f32
};

struct Model {
  PlannedModel trained;
  std::vector<Part> parts = {};  // of the base model
  double elements() const {
    double sum = 0;
    for (const Part& part : parts) sum += part.elements;
    return sum;
  }
  const Part& largest() const {
    return *std::max_element(parts.begin(), parts.end(),
                             [](const Part& a, const Part& b) { return a.elements < b.elements; });
  }
};

// By the names of transformers' base models, whose size is spoken of: without the head of a
// classifier, and without the prefix of the model that has one.
std::string base_name(const std::string& kind, const std::string& name) {
  const std::string prefix = kind == "bert" ? "bert." : kind == "gpt2" ? "transformer." : "";
  return name.starts_with(prefix) ? name.substr(prefix.size()) : std::string();
}

Model read_model(const std::string& path) {
  Model model{PlannedModel::read(path)};
  const std::string& kind = model.trained.kind;
  std::map<std::string, size_t> known;
  for (const accelerate::ListedModule& module : model.trained.parameters.modules) {
    const std::string name = base_name(kind, module.name);
    if (name.empty() && !module.name.empty()) continue;
    // BERT's tables and its pooler are one block each.
    const std::string block = kind == "bert" && !name.starts_with("encoder.")
                                  ? name.substr(0, name.find('.'))
                                  : accelerate::ParameterList::block_of(name);
    const auto [at, is_new] = known.try_emplace(block, model.parts.size());
    if (is_new) model.parts.push_back({.name = block});
    Part* const part = &model.parts[at->second];
    part->elements += static_cast<double>(module.buffer_bytes) / 4;
    for (const auto& [own, shape] : module.parameters) {
      part->elements += static_cast<double>(numel_of(shape));
    }
    // transformers keeps position_ids and token_type_ids with the tables, in i64.
    if (name == "embeddings.word_embeddings") {
      part->elements += 2 * 8 / 4 * static_cast<double>(model.trained.dimensions.context);
    }
  }
  return model;
}

struct Dtype {
  std::string name;
  double bytes;
};
const Dtype kDtypes[] = {{"f32", 4}, {"f16", 2}, {"bf16", 2}, {"fp8", 1}, {"int4", 0.5}};

const Dtype& dtype_named(const std::string& name) {
  const std::map<std::string, std::string> kOthers = {{"float32", "f32"},
                                                      {"float16", "f16"},
                                                      {"bfloat16", "bf16"},
                                                      {"fp16", "f16"},
                                                      {"fp32", "f32"}};
  const auto other = kOthers.find(name);
  const std::string wanted = other == kOthers.end() ? name : other->second;
  for (const Dtype& dtype : kDtypes) {
    if (dtype.name == wanted) return dtype;
  }
  TS_THROW(UsageError, kEstimate, "--dtypes has to be of f32, f16, bf16, fp8, int4; got \"", name,
           "\"");
}

// What forward keeps for backward, of B sequences of T tokens, with C = width, F = inner, K = the
// width of keys and values, V = the vocabulary, s = bytes of the compute dtype. A layer of ours:
//   both norms' inputs and results 4 C, queries C, keys and values 2 K, attention's result C and
//   its statistics (f32, heads), the projection's result is not kept; feed-forward: its inner
//   values before and after the activation 2 F (gated: 3 F)
// and once the embedding C, the last norm 2 C, and logits V where the head is not fused with the
// loss. Attention is computed in tiles: no T x T.
double activation_bytes(const accelerate::ModelDimensions& m, double batch, double tokens,
                        double s) {
  const auto C = static_cast<double>(m.width), F = static_cast<double>(m.inner),
             K = static_cast<double>(m.kv_width), V = static_cast<double>(m.vocabulary);
  const double layer =
      (4 * C + 2 * C + 2 * K + (m.gated ? 3 : 2) * F) * s + 4 * static_cast<double>(m.heads);
  return batch * tokens * (static_cast<double>(m.layers) * layer + (3 * C + V) * s);
}

struct EstimateRequest {
  std::string path;
  std::string dtypes = "f32,f16,fp8,int4";
  int64_t ranks = 1;
  int64_t batch = 0;
  int64_t tokens = 0;
  std::string max_memory = {};
  bool json = false;
};

struct ModeRow {
  std::string mode;
  double parameters, gradients, optimizer, activations;
  double total() const { return parameters + gradients + optimizer + activations; }
};

// How a training comes to its dtype (precision/policy.h).
struct Way {
  const char* key;    // in JSON
  const char* label;  // after the dtype's name
  PrecisionPolicy policy;
};
std::vector<Way> ways_of(const Dtype& dtype) {
  if (dtype.bytes < 2) return {};  // nothing is trained in narrower ones alone
  if (dtype.bytes == 4) return {{"per_rank", "", PrecisionPolicy::kAutocast}};
  return {{"per_rank", " autocast (the default): f32 parameters and their 16-bit copies",
           PrecisionPolicy::kAutocast},
          {"per_rank_pure", " pure (precision_policy = pure): 16-bit parameters, f32 masters",
           PrecisionPolicy::kPure}};
}

// Of one rank.
std::vector<ModeRow> modes(const Model& model, const Dtype& dtype, const Way& way,
                           const EstimateRequest& request) {
  using accelerate::Sharding;
  const double activations =
      request.batch == 0
          ? 0
          : activation_bytes(model.trained.dimensions, static_cast<double>(request.batch),
                             static_cast<double>(request.tokens), dtype.bytes);
  accelerate::Settings settings;
  if (dtype.bytes == 2) {
    settings.mixed_precision.value = dtype.name == "f16" ? Precision::kFP16 : Precision::kBF16;
    settings.precision_policy.value = way.policy;
  }
  const auto row = [&](const char* name, Sharding mode, int64_t ranks) {
    settings.sharding.value = mode;
    const accelerate::TrainingPlan plan = accelerate::plan_training(
        [&] { return model.trained.training(0, 0); },
        {.settings = settings, .ranks = static_cast<int>(ranks), .steps = 2});
    const accelerate::PlannedBytes& kept = plan.largest().persistent;
    const auto bytes = [&](MemoryCategory category) { return static_cast<double>(kept[category]); };
    return ModeRow{name, bytes(MemoryCategory::kParameter) + bytes(MemoryCategory::kWeightCache),
                   bytes(MemoryCategory::kGradient), bytes(MemoryCategory::kOptimizer),
                   activations};
  };
  std::vector<ModeRow> rows = {row("one rank", Sharding::kDdp, 1)};
  if (request.ranks == 1) return rows;
  rows.push_back(row("DDP", Sharding::kDdp, request.ranks));
  rows.push_back(row("ZeRO-1", Sharding::kZero1, request.ranks));
  rows.push_back(row("ZeRO-2", Sharding::kZero2, request.ranks));
  rows.push_back(row("ZeRO-3", Sharding::kZero3, request.ranks));
  return rows;
}

// Where weights of `dtype` lie within the limits, by transformers' names.
accelerate::DeviceMap device_map_of(const Model& model, const Dtype& dtype,
                                    const EstimateRequest& request) {
  TS_CHECK_AS(UsageError, dtype.bytes >= 2, kEstimate,
              "--max-memory places weights of f32, f16 and bf16; got ", dtype.name);
  return accelerate::infer_auto_device_map(
      accelerate::transformers_tree(model.trained),
      {.max_memory = accelerate::parse_max_memory(request.max_memory),
       .no_split = {accelerate::kUndivided},
       .dtype = dtype.bytes == 4 ? kF32 : kF16});
}

// An integer where one can be so large.
nlohmann::json json_bytes(double bytes) {
  return bytes < 0x1p63 ? nlohmann::json(static_cast<int64_t>(bytes)) : nlohmann::json(bytes);
}

int estimate(const EstimateRequest& request) {
  const Model model = read_model(request.path);
  TS_CHECK_AS(UsageError, (request.batch == 0) == (request.tokens == 0), kEstimate,
              "activations need --batch-size and --sequence-length");
  TS_CHECK_AS(UnsupportedError, request.batch == 0 || model.trained.dimensions.width > 0, kEstimate,
              "activations are known of bert, gpt2, llama, mistral and qwen by their config.json; "
              "this is ",
              model.trained.kind);
  std::vector<Dtype> dtypes;
  for (size_t begin = 0; begin <= request.dtypes.size();) {
    const size_t end = std::min(request.dtypes.find(',', begin), request.dtypes.size());
    dtypes.push_back(dtype_named(request.dtypes.substr(begin, end - begin)));
    begin = end + 1;
  }
  const double f32 = 4 * model.elements();
  // Accelerate's rule, of weights, gradients, optimizer and the step itself.
  const auto adam = [&](const Dtype& dtype) {
    return dtype.bytes == 4 ? 4 * f32 : dtype.bytes == 2 ? 2 * f32 : 0;
  };

  if (request.json) {
    nlohmann::ordered_json out = {{"model", model.trained.kind},
                                  {"largest_layer", model.largest().name}};
    for (const Dtype& dtype : dtypes) {
      nlohmann::ordered_json row = {
          {"dtype", dtype.name},
          {"largest_layer_bytes", json_bytes(model.largest().elements * dtype.bytes)},
          {"total_bytes", json_bytes(model.elements() * dtype.bytes)},
          {"training_bytes", json_bytes(adam(dtype))}};
      for (const Way& way : ways_of(dtype)) {
        for (const ModeRow& mode : modes(model, dtype, way, request)) {
          row[way.key][mode.mode] = {{"parameters", json_bytes(mode.parameters)},
                                     {"gradients", json_bytes(mode.gradients)},
                                     {"optimizer", json_bytes(mode.optimizer)},
                                     {"activations", json_bytes(mode.activations)},
                                     {"total", json_bytes(mode.total())}};
        }
      }
      if (!request.max_memory.empty()) {
        nlohmann::ordered_json map = nlohmann::ordered_json::object();
        for (const auto& [name, place] : device_map_of(model, dtype, request)) {
          map[name] = place.describe();
        }
        if (dtypes.size() == 1) out["device_map"] = map;
        row["device_map"] = std::move(map);
      }
      out["dtypes"].push_back(row);
    }
    std::printf("%s\n", out.dump(2).c_str());
    return 0;
  }
  std::printf("%s: %s, %.0f elements, largest layer %s\n\n", request.path.c_str(),
              model.trained.kind.c_str(), model.elements(), model.largest().name.c_str());
  std::printf("%-6s %14s %14s %16s\n", "dtype", "largest layer", "total size", "training (Adam)");
  for (const Dtype& dtype : dtypes) {
    std::printf("%-6s %14s %14s %16s\n", dtype.name.c_str(),
                text_of_bytes(model.largest().elements * dtype.bytes).c_str(),
                text_of_bytes(model.elements() * dtype.bytes).c_str(),
                adam(dtype) == 0 ? "-" : text_of_bytes(adam(dtype)).c_str());
  }
  const auto print_modes = [&](const Dtype& dtype, const Way& way) {
    std::printf(
        "\ntraining in %s%s\nbytes of each of %lld rank%s%s\n%-9s %12s %12s %12s %12s %12s\n",
        dtype.name.c_str(), way.label, static_cast<long long>(request.ranks),
        request.ranks == 1 ? "" : "s", request.batch == 0 ? ", without activations" : "", "mode",
        "parameters", "gradients", "optimizer", "activations", "total");
    for (const ModeRow& row : modes(model, dtype, way, request)) {
      std::printf("%-9s %12s %12s %12s %12s %12s\n", row.mode.c_str(),
                  text_of_bytes(row.parameters).c_str(), text_of_bytes(row.gradients).c_str(),
                  text_of_bytes(row.optimizer).c_str(),
                  request.batch == 0 ? "-" : text_of_bytes(row.activations).c_str(),
                  text_of_bytes(row.total()).c_str());
    }
  };
  for (const Dtype& dtype : dtypes) {
    for (const Way& way : ways_of(dtype)) print_modes(dtype, way);
  }
  if (request.max_memory.empty()) return 0;
  for (const Dtype& dtype : dtypes) {
    std::printf("\nplaces of weights in %s within %s\n", dtype.name.c_str(),
                request.max_memory.c_str());
    for (const auto& [name, place] : device_map_of(model, dtype, request)) {
      std::printf("%-40s %s\n", name.empty() ? "(all)" : name.c_str(), place.describe().c_str());
    }
  }
  return 0;
}

}  // namespace

void add_estimate_memory(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand(
      "estimate-memory", "memory of a model: its size, and what training takes on each rank");
  const auto request = std::make_shared<EstimateRequest>();
  command
      ->add_option("PATH", request->path,
                   "config.json of transformers, a safetensors file or index, or a folder")
      ->required();
  command->add_option("--dtypes", request->dtypes, "of f32, f16, bf16, fp8, int4")
      ->capture_default_str();
  command->add_option("-n,--num-processes,--ranks", request->ranks, "ranks of DDP and ZeRO")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 16));
  command->add_option("--batch-size", request->batch, "sequences of a micro-batch, for activations")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 30));
  command->add_option("--sequence-length", request->tokens, "tokens of each")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 30));
  command->add_option("--max-memory", request->max_memory,
                      "cuda:0=10GB,cpu=30GB: which modules lie on which device, the rest on disk");
  command->add_flag("--json", request->json, "exact bytes, for programs");
  command->callback([request, &exit_code] { exit_code = estimate(*request); });
}

}  // namespace tessera::cli
