// tessera plan: what a training of many ranks takes and sends, without running it
// (accelerate/plan).
#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <memory>
#include <optional>
#include <set>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <tessera/accelerate/cli/commands.h>
#include <tessera/accelerate/plan/planned_model.h>
#include <tessera/accelerate/plan/training_plan.h>
#include <tessera/core/error.h>
#include <tessera/core/io/atomic_file.h>
#include <tessera/core/plain_text.h>
#include <tessera/distributed/pipeline/schedule_picture.h>

namespace tessera::cli {
namespace {

constexpr std::string_view kPlanCommand = "tessera plan";
using namespace accelerate;

struct PlanRequest {
  std::string model, sharding = "fsdp", mesh, dtype = "autocast-bf16", optimizer = "adamw";
  double momentum = 0;
  int64_t batch = 0, context = 0, accumulate = 1;
  std::vector<std::string> wrap_modules;
  int64_t min_num_params = 0;
  bool keeps_units = false, checkpoints = false, sync_each_batch = false;
  std::string memory, network, json;
  double bandwidth = 0, latency = 0, flops = 0;
  bool units = false;
  std::string pp_size = "1", pp_schedule = "1f1b", pp_stages_per_rank = "1", picture;
};

constexpr int64_t kMostRanks = 65536;

struct RequestedMesh {
  int64_t shard = 1, replicate = 1, tp = 1;
  int64_t ranks() const { return shard * replicate * tp; }
};

// "dp_shard=1024,dp_replicate=8"
RequestedMesh mesh_of(const std::string& text) {
  RequestedMesh mesh;
  std::set<std::string> seen;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string part = text.substr(begin, end - begin);
    const size_t sign = part.find('=');
    const std::string axis = part.substr(0, sign);
    TS_CHECK_AS(UsageError, axis == "dp_shard" || axis == "dp_replicate" || axis == "tp",
                kPlanCommand, "--mesh has the axes dp_shard, dp_replicate and tp; got \"", part,
                "\"; say --mesh dp_shard=8 or --mesh dp_shard=8,dp_replicate=4");
    TS_CHECK_AS(UsageError, seen.insert(axis).second, kPlanCommand, "--mesh names ", axis,
                " twice");
    const std::string digits = sign == std::string::npos ? "" : part.substr(sign + 1);
    const bool whole = !digits.empty() && digits.size() < 8 &&
                       std::ranges::all_of(digits, [](unsigned char c) { return std::isdigit(c); });
    const int64_t size = whole ? std::stoll(digits) : 0;
    TS_CHECK_AS(UsageError, size >= 1, kPlanCommand, "--mesh ", axis,
                " has to be a whole number above 0; got \"", digits, "\"");
    TS_CHECK_AS(UsageError, size <= kMostRanks, kPlanCommand, "--mesh makes ", size,
                " ranks; plans go up to ", kMostRanks);
    (axis == "dp_shard" ? mesh.shard : axis == "tp" ? mesh.tp : mesh.replicate) = size;
    begin = end + 1;
  }
  TS_CHECK_AS(UsageError, mesh.ranks() <= kMostRanks, kPlanCommand, "--mesh makes ", mesh.ranks(),
              " ranks; plans go up to ", kMostRanks);
  return mesh;
}

// "80GiB", "80GB", or bytes. A small number without a unit was meant in another one.
int64_t bytes_of(const std::string& text) {
  if (text.empty()) return 0;
  struct Unit {
    const char* name;
    double bytes;
  };
  constexpr Unit kUnits[] = {{"", 1},         {"B", 1},    {"GiB", 0x1p30}, {"GB", 1e9},
                             {"MiB", 0x1p20}, {"MB", 1e6}, {"TiB", 0x1p40}, {"TB", 1e12}};
  double number = 0;
  const char* const last = text.data() + text.size();
  const auto [end, problem] = std::from_chars(text.data(), last, number);
  for (const Unit& unit : kUnits) {
    if (problem == std::errc() && std::string_view(end, last) == unit.name &&
        number * unit.bytes >= 1 && number * unit.bytes < 1e18 &&
        (unit.name[0] != 0 || number >= 1e6)) {
      return static_cast<int64_t>(number * unit.bytes);
    }
  }
  TS_THROW(UsageError, kPlanCommand,
           "--memory is a number with MB, MiB, GB, GiB, TB or TiB, as 80GiB, or bytes, a million "
           "or more; got \"",
           text, "\"");
}

Settings settings_of(const PlanRequest& request) {
  const auto assign_text = [&](Settings& settings, const char* key, const std::string& value,
                               const std::string& flag) {
    assign(*find_setting(key), settings, value,
           {.source = accelerate::Source::kLaunchFlag, .name = flag});
  };
  Settings settings;
  const RequestedMesh mesh = mesh_of(request.mesh);
  assign_text(settings, "sharding", request.sharding, "--sharding");
  const Sharding mode = settings.sharding.value;
  if (mesh.tp > 1) assign_text(settings, "tp_size", std::to_string(mesh.tp), "--mesh");
  const bool cuts = mode == Sharding::kFsdp || mode == Sharding::kZero3;
  if (cuts) {
    TS_CHECK_AS(UsageError, mesh.replicate == 1 || mesh.shard > 1, kPlanCommand,
                "--mesh has nothing to cut along dp_shard for --sharding ", request.sharding,
                "; take --sharding ddp, or give dp_shard more than 1");
    if (mesh.replicate > 1) {
      const std::string replicas = std::to_string(mesh.replicate);
      assign_text(settings, "dp_replicate_size", replicas, "--mesh");
    }
  } else {
    TS_CHECK_AS(UsageError, mesh.shard == 1 || mesh.replicate == 1, kPlanCommand,
                "--mesh has one axis for --sharding ", request.sharding,
                "; replicas of shards are for fsdp and zero3");
  }
  if (request.dtype != "f32") {
    assign_text(settings, "mixed_precision", "bf16", "--dtype");
    assign_text(settings, "precision_policy", request.dtype == "bf16" ? "pure" : "autocast",
                "--dtype");
  }
  assign_text(settings, "gradient_accumulation_steps", std::to_string(request.accumulate),
              "--accumulate");
  std::string classes;
  for (const std::string& name : request.wrap_modules) {
    classes += (classes.empty() ? "" : ",") + name;
  }
  if (!classes.empty()) assign_text(settings, "fsdp_wrap_modules", classes, "--wrap-modules");
  if (request.min_num_params > 0) {
    assign_text(settings, "fsdp_min_num_params", std::to_string(request.min_num_params),
                "--min-num-params");
  }
  if (request.keeps_units) {
    assign_text(settings, "fsdp_reshard_after_forward", "false", "--no-reshard-after-forward");
  }
  if (request.checkpoints) {
    assign_text(settings, "fsdp_activation_checkpointing", "true", "--activation-checkpointing");
  }
  if (request.sync_each_batch) {
    assign_text(settings, "sync_each_batch", "true", "--sync-each-batch");
  }
  return settings;
}

std::optional<Network> network_of(const PlanRequest& request) {
  if (!request.network.empty()) {
    TS_CHECK_AS(UsageError, request.bandwidth == 0 && request.latency == 0 && request.flops == 0,
                kPlanCommand,
                "--network is a file that says what --bandwidth, --latency and --flops say; give "
                "one of both");
    return Network::read(request.network);
  }
  TS_CHECK_AS(UsageError, request.bandwidth > 0 || (request.latency == 0 && request.flops == 0),
              kPlanCommand, "--latency and --flops need --bandwidth");
  if (request.bandwidth == 0) return std::nullopt;
  return Network{.link = {.bandwidth = request.bandwidth * 1e9, .latency = request.latency * 1e-6},
                 .flops = request.flops * 1e12};
}

void write_json(const PlanRequest& request, const std::string& text) {
  if (request.json == "-") std::printf("%s\n", text.c_str());
  if (request.json.empty() || request.json == "-") return;
  PlainText<std::ofstream> out(request.json);
  out << text << "\n";
  out.close();
  TS_CHECK_AS(IoError, out.good(), kPlanCommand, "cannot write '", request.json, "'");
}

// ---- The schedule of a pipeline -----------------------------------------------------------------

// What `command` was given and a schedule does not know is not left out in silence.
void check_pipeline_options(const CLI::App& command) {
  for (const CLI::Option* option : command.get_options()) {
    const std::string& name = option->get_lnames().front();
    const bool known = name.starts_with("pp-") || name == "accumulate" || name == "json" ||
                       name == "schedule-picture" || name == "help";
    TS_CHECK_AS(UnsupportedError, known || option->count() == 0, kPlanCommand, "--", name,
                " does not go with --pp-size yet: memory and calls of a pipeline's ranks are not "
                "planned; leave it out for the schedule alone");
  }
}

int run_schedule(const PlanRequest& request, const Settings& settings) {
  const auto ranks = static_cast<int>(settings.pp_size),
             stages = static_cast<int>(settings.pp_stages_per_rank);
  const auto micro_batches = static_cast<int>(request.accumulate);
  TS_CHECK_AS(UsageError, ranks <= 1024, kPlanCommand, "--pp-size is at most 1024; got ", ranks);
  const distributed::PipelineSchedule kind = settings.pp_schedule.value;
  TS_CHECK_AS(UsageError, stages == 1 || kind == distributed::PipelineSchedule::kOneFOneB,
              kPlanCommand, "--pp-stages-per-rank above 1 is for --pp-schedule 1f1b; got ",
              request.pp_schedule);
  const distributed::PipelineTable schedule =
      distributed::make_schedule(kind, ranks, stages, micro_batches);
  const distributed::Timing timing = distributed::simulate(schedule);
  nlohmann::ordered_json json = {
      {"schedule", request.pp_schedule}, {"ranks", ranks},
      {"stages_per_rank", stages},       {"micro_batches", micro_batches},
      {"bubble", timing.bubble},         {"live_activations", timing.live_activations}};
  if (request.json != "-") {
    std::printf(
        "%s: %d stages on %d ranks, %d micro-batches a step\n\n"
        "bubble %.1f%% of the step, where a backward takes twice its forward and messages "
        "no time\n\nrank   live activations, in micro-batches of a rank's layers\n",
        request.pp_schedule.c_str(), schedule.stages, ranks, micro_batches, 100 * timing.bubble);
    for (int rank = 0; rank < ranks; ++rank) {
      const int live = timing.live_activations[static_cast<size_t>(rank)];
      std::printf("%4d   %.3g\n", rank, static_cast<double>(live) / stages);
    }
  }
  if (!request.picture.empty()) {
    write_file_atomically(request.picture,
                          distributed::schedule_picture(schedule, request.pp_schedule));
  }
  write_json(request, json.dump(1));
  return 0;
}

// True where the request was for a pipeline, whose schedule is told then.
bool ran_schedule(const PlanRequest& request, const CLI::App& command) {
  Settings settings;
  const auto take = [&](const char* key, const std::string& flag, const std::string& value) {
    try {
      assign(*find_setting(key), settings, value,
             {.source = accelerate::Source::kLaunchFlag, .name = flag});
    } catch (const ConfigError& error) {
      throw UsageError(error.what());
    }
    return command.get_option(flag)->count() > 0;
  };
  take("pp_size", "--pp-size", request.pp_size);
  const bool scheduled = take("pp_schedule", "--pp-schedule", request.pp_schedule);
  const bool staged =
      take("pp_stages_per_rank", "--pp-stages-per-rank", request.pp_stages_per_rank);
  if (settings.pp_size == 1) {
    TS_CHECK_AS(UsageError, !scheduled && !staged && request.picture.empty(), kPlanCommand,
                "--pp-schedule, --pp-stages-per-rank and --schedule-picture are of a pipeline: "
                "give --pp-size above 1, too");
    return false;
  }
  check_pipeline_options(command);
  run_schedule(request, settings);
  return true;
}

// ---- A training ---------------------------------------------------------------------------------

int run_plan(const PlanRequest& request, const CLI::App& command) {
  if (ran_schedule(request, command)) return 0;
  TS_CHECK_AS(UsageError, !request.model.empty() && !request.mesh.empty(), kPlanCommand,
              "--model and --mesh are required, or --pp-size above 1");
  const PlannedModel model = PlannedModel::read(request.model);
  TS_CHECK_AS(UsageError, (request.batch == 0) == (request.context == 0), kPlanCommand,
              "activations and operations need --batch-size and --context");
  const int64_t longest = model.dimensions.context;
  TS_CHECK_AS(UsageError, longest == 0 || request.context <= longest, kPlanCommand,
              "--context is at most ", longest, " for ", request.model, "; got ", request.context);
  TS_CHECK_AS(UnsupportedError, request.batch == 0 || model.dimensions.width > 0, kPlanCommand,
              "activations are known of bert, gpt2, llama, mistral and qwen by their config.json; "
              "this is ",
              model.kind, "; leave out --batch-size and --context");
  const RequestedMesh mesh = mesh_of(request.mesh);
  const int64_t memory = bytes_of(request.memory);
  const TrainingPlan plan = plan_training(
      [&] { return model.training(request.batch, request.context); },
      {.settings = settings_of(request),
       .ranks = static_cast<int>(mesh.ranks()),
       .optimizer = optimizer_named(
           request.optimizer,
           {.momentum = request.momentum, .not_by_muon = model.parameters.not_by_muon()}),
       .network = network_of(request)});
  if (request.json != "-") {
    std::printf("%s: %s, ", request.model.c_str(), model.kind.c_str());
    if (request.batch > 0) {
      std::printf("%lld x %lld tokens a micro-batch, ", static_cast<long long>(request.batch),
                  static_cast<long long>(request.context));
    }
    std::printf("%s\n%s", request.optimizer.c_str(), plan.describe(memory).c_str());
    if (request.batch == 0) {
      std::printf("without activations: give --batch-size and --context for them\n");
    }
    if (request.units) std::printf("\n%s", plan.units.c_str());
  }
  write_json(request, request.json.empty() ? "" : plan.to_json());
  return 0;
}

}  // namespace

void add_plan(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand(
      "plan", "what a training of many ranks takes on each and sends, without running it");
  const auto request = std::make_shared<PlanRequest>();
  const CLI::Range many(int64_t{1}, int64_t{1} << 30);
  command->add_option("--model", request->model,
                      "config.json of transformers, a program's report, safetensors, or a folder");
  command->add_option("--sharding", request->sharding, "ddp, zero1, zero2, zero3 or fsdp")
      ->check(CLI::IsMember({"ddp", "zero1", "zero2", "zero3", "fsdp"}))
      ->capture_default_str();
  command->add_option("--mesh", request->mesh,
                      "dp_shard=N, dp_replicate=M, tp=K, or several with commas");
  command->add_option("--batch-size", request->batch, "sequences of a micro-batch")->check(many);
  command->add_option("--context", request->context, "tokens of a sequence")->check(many);
  command
      ->add_option(
          "--dtype", request->dtype,
          "bf16: parameters too, with f32 masters; autocast-bf16: f32 parameters, products "
          "in bf16; f32")
      ->check(CLI::IsMember({"bf16", "autocast-bf16", "f32"}))
      ->capture_default_str();
  command
      ->add_option("--optimizer", request->optimizer,
                   "adamw, adam, sgd, lion, or muon with adamw for what are no matrices")
      ->check(CLI::IsMember({"adamw", "adam", "sgd", "lion", "muon"}))
      ->capture_default_str();
  command->add_option("--momentum", request->momentum, "of sgd")->check(CLI::Range(0.0, 1.0));
  command->add_option("--accumulate", request->accumulate, "micro-batches of a step")
      ->check(CLI::Range(int64_t{1}, int64_t{1024}))
      ->capture_default_str();
  command
      ->add_option("--wrap-modules", request->wrap_modules,
                   "classes of modules that are units, as fsdp_wrap_modules; none: one unit")
      ->delimiter(',');
  command->add_option("--min-num-params", request->min_num_params, "as fsdp_min_num_params")
      ->check(many);
  command->add_flag("--no-reshard-after-forward", request->keeps_units,
                    "units stay whole from forward to backward");
  command->add_flag("--activation-checkpointing", request->checkpoints,
                    "units keep their inputs alone");
  command->add_flag("--sync-each-batch", request->sync_each_batch,
                    "every micro-batch is reduced, also by ddp and zero1");
  command->add_option("--memory", request->memory, "of a device, to compare with: 80GiB");
  command->add_option("--network", request->network, "JSON file of links, for seconds");
  command->add_option("--bandwidth", request->bandwidth, "GB/s that each rank sends when all do")
      ->check(CLI::PositiveNumber);
  command->add_option("--latency", request->latency, "microseconds of a message")
      ->check(CLI::NonNegativeNumber);
  command->add_option("--flops", request->flops, "TFLOP/s that a device sustains")
      ->check(CLI::PositiveNumber);
  command->add_flag("--units", request->units, "also the units or buckets that the engine makes");
  command->add_option("--json", request->json, "file to write, - for the standard output");
  // In words of the settings of the same names, which a training does not have yet.
  const auto of_pipeline = [&](const char* key, std::string& text) {
    const Setting& setting = *find_setting(key);
    command->add_option(setting.flag(), text, std::string(setting.help))->capture_default_str();
  };
  of_pipeline("pp_size", request->pp_size);
  of_pipeline("pp_schedule", request->pp_schedule);
  of_pipeline("pp_stages_per_rank", request->pp_stages_per_rank);
  command->add_option("--schedule-picture", request->picture,
                      "SVG file to write: what each rank of a pipeline does when");
  command->callback([request, command, &exit_code] { exit_code = run_plan(*request, *command); });
}

}  // namespace tessera::cli
