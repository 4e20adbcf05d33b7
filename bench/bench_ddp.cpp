// A training step of GPT-2 on several ranks: what it communicates, beside the formula, and how much
// of that backward hides.
//
//     bench_ddp --ranks 2                          # ranks are threads
//     tessera launch -n 2 -- bench_ddp             # ranks are processes
//     bench_ddp --ranks 1 --batch-size 16          # the same work on one rank
//     bench_ddp --ranks 2 --sharding fsdp          # ranks hold parts
//     bench_ddp --ranks 2 --compare                # all modes, step by step in turn
//     tessera launch -n 2 -- bench_ddp --sharding tp_sequence    # ranks divide layers and tokens
//     tessera launch -n 2 -- bench_ddp --sharding pp --micro-batches 8 --one-process    # stages
//
// Prints one JSON line for each mode. Ranks of tp and tp_sequence have one batch together; of them
// "products_ms" is the time of a rank's matrix products alone (forward, and both gradients), beside
// steps in turn, and "message_bytes" is what a rank copies out of others' messages. Ranks of pp,
// pp_gpipe, pp_interleaved (two stages each) and pp_zero_bubble send micro-batches of --batch-size
// sequences through an untied model; with --one-process rank 0 takes the same steps alone, in turn,
// and "bound_ms" is 1.1 (m + p - 1) / (m p) of their time. "hidden" is the share of the time under
// way, over all buckets, in which no wait stood still for it; resident bytes are those of the
// process over what it had before the models were made. Exits with 1 where counts or bytes differ
// from the report.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/accelerate/accelerator.h>
#include <tessera/accelerate/process/run.h>
#include <tessera/autograd/autocast_mode.h>
#include <tessera/core/memory/allocator.h>
#include <tessera/core/parallel.h>
#include <tessera/distributed/data_parallel/replicate.h>
#include <tessera/distributed/fully_shard/fully_shard.h>
#include <tessera/distributed/fully_shard/zero.h>
#include <tessera/distributed/mesh/mesh.h>
#include <tessera/distributed/mesh/parallel_dims.h>
#include <tessera/distributed/pipeline/schedule.h>
#include <tessera/distributed/tensor_parallel/parallelize.h>
#include <tessera/distributed/transport/process_group.h>
#include <tessera/distributed/transport/run_ranks.h>
#include <tessera/nn/models/gpt2.h>
#include <tessera/optim/clip.h>
#include <tessera/optim/optimizers.h>

#include "resident.h"

namespace {

using namespace tessera;

struct Options {
  int ranks = 2;
  int64_t layers = 6, width = 384, heads = 6, context = 256, batch_size = 8, vocab = 256;
  int64_t threads = 1, warmup = 2, steps = 10, accumulate = 1;
  int64_t bucket_bytes = distributed::kBucketBytes;
  std::string hook = "all_reduce", sharding = "ddp", dtype = "f32";
  bool compare = false, one_process = false;
};

const std::vector<std::string> kModes = {"ddp", "zero1", "zero2", "zero3", "fsdp"};
const std::vector<std::string> kDividing = {"tp", "tp_sequence"};
struct PipelineMode {
  std::string name;
  distributed::PipelineSchedule schedule;
  int stages_per_rank;
};
const std::vector<PipelineMode> kPipelines = {
    {"pp", distributed::PipelineSchedule::kOneFOneB, 1},
    {"pp_gpipe", distributed::PipelineSchedule::kGPipe, 1},
    {"pp_interleaved", distributed::PipelineSchedule::kOneFOneB, 2},
    {"pp_zero_bubble", distributed::PipelineSchedule::kZeroBubbleH1, 1}};
// Those of a pipeline in one process.
constexpr std::string_view kAlone = "one_process";

const PipelineMode* pipeline_mode(std::string_view name) {
  const auto found = std::ranges::find(kPipelines, name, &PipelineMode::name);
  return found == kPipelines.end() ? nullptr : &*found;
}

std::vector<std::string> all_modes() {
  std::vector<std::string> modes = kModes;
  modes.insert(modes.end(), kDividing.begin(), kDividing.end());
  for (const PipelineMode& mode : kPipelines) modes.push_back(mode.name);
  return modes;
}

Options parse(int argc, char** argv) {
  Options options;
  CLI::App app("GPT-2 on several ranks: communication of a step and what backward hides of it.");
  const auto add = [&](const char* name, auto& value, const char* help) {
    app.add_option(name, value, help)->capture_default_str()->check(CLI::PositiveNumber);
  };
  add("--ranks", options.ranks, "threads as ranks, where no launcher started this process");
  add("--layers", options.layers, "transformer blocks");
  add("--width", options.width, "size of the residual stream");
  add("--heads", options.heads, "attention heads");
  add("--context", options.context, "tokens of a sequence");
  add("--vocab", options.vocab, "size of the vocabulary");
  add("--batch-size", options.batch_size, "sequences of a rank");
  add("--threads", options.threads, "for compute, of each rank");
  add("--warmup", options.warmup, "steps before");
  add("--steps", options.steps, "measured steps");
  add("--accumulate,--micro-batches", options.accumulate, "micro-batches a step");
  add("--bucket-bytes", options.bucket_bytes, "where a bucket is closed");
  app.add_option("--hook", options.hook, "how gradients travel")
      ->capture_default_str()
      ->check(CLI::IsMember({"all_reduce", "f16", "bf16", "power_sgd", "batched_power_sgd"}));
  app.add_option("--sharding", options.sharding, "what ranks hold parts of")
      ->capture_default_str()
      ->check(CLI::IsMember(all_modes()));
  app.add_option("--dtype", options.dtype, "f32, or bf16 by autocast")
      ->capture_default_str()
      ->check(CLI::IsMember({"f32", "bf16"}));
  app.add_flag("--one-process", options.one_process,
               "of pp: steps of rank 0 alone in turn, and the bound that they give");
  app.add_flag("--compare", options.compare, "all modes in turn, and their speed beside ddp's");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error));
  }
  TS_CHECK(!options.one_process || pipeline_mode(options.sharding) != nullptr, "bench_ddp",
           "--one-process is for pp; --sharding is ", options.sharding);
  return options;
}

std::shared_ptr<distributed::CommunicationHook> make_hook(const std::string& name) {
  if (name == "f16") return std::make_shared<distributed::CastHook>(kF16);
  if (name == "bf16") return std::make_shared<distributed::CastHook>(kBF16);
  if (name == "power_sgd" || name == "batched_power_sgd") {
    return std::make_shared<distributed::PowerSgdHook>(
        distributed::PowerSgdOptions{.start_step = 0, .batched = name == "batched_power_sgd"});
  }
  return std::make_shared<distributed::AllReduceHook>();
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

using Clock = std::chrono::steady_clock;
double milliseconds_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

// What a rank of tp cannot do without: the matrix products of its layers and heads, and a copy of
// each byte that it gets.
class DividedFloor {
 public:
  DividedFloor(const Options& options, DType dtype) : options_(options) {
    const int64_t ranks = distributed::world_size(), width = options.width;
    const int64_t rows = options.batch_size * options.context;
    const auto layer = [&](int64_t in, int64_t out, int64_t times) {
      layers_.push_back({rand({rows, in}).to(dtype), rand({out, in}).to(dtype),
                         rand({rows, out}).to(dtype), times});
    };
    layer(width, 3 * width / ranks, options.layers);
    layer(width / ranks, width, options.layers);
    layer(width, 4 * width / ranks, options.layers);
    layer(4 * width / ranks, width, options.layers);
    layer(width, options.vocab / ranks, 1);
    const int64_t heads = options.heads / ranks, head_size = width / options.heads;
    heads_ = rand({options.batch_size, options.context, 3, heads, head_size}).to(dtype);
    of_heads_ = rand({options.batch_size, options.context, heads * head_size}).to(dtype);
    heads_.set_requires_grad();
    message_ = rand({rows / ranks, width});
    copy_ = empty_like(message_);
  }

  void run() {
    const auto begin = Clock::now();
    for (const Layer& layer : layers_) {
      const NoGradGuard no_grad;
      for (int64_t i = 0; i < layer.times; ++i) {
        Tensor result = linear(layer.x, layer.weight);
        result = matmul(layer.gradient, layer.weight);
        result = matmul(layer.gradient.transpose(0, 1), layer.x);
      }
    }
    for (int64_t i = 0; i < options_.layers; ++i) {
      packed_attention(heads_, {.causal = true}).backward(of_heads_);
      heads_.set_grad(Tensor());
    }
    products_.push_back(milliseconds_since(begin));
    const auto copying = Clock::now();
    for (int i = 0; i < 8; ++i) copy_.copy_(message_);
    const auto bytes = static_cast<double>(8 * message_.nbytes());
    milliseconds_a_byte_.push_back(milliseconds_since(copying) / bytes);
  }
  double products() const { return median(products_); }
  double copies(double bytes) const { return median(milliseconds_a_byte_) * bytes; }

 private:
  struct Layer {
    Tensor x, weight, gradient;
    int64_t times;
  };
  const Options& options_;
  std::vector<Layer> layers_;
  Tensor heads_, of_heads_, message_, copy_;
  std::vector<double> products_, milliseconds_a_byte_;
};

// A model with its optimizer, as the ranks train it in one mode.
class Training {
 public:
  Training(const Options& options, std::string mode) : options_(options), mode_(std::move(mode)) {
    manual_seed(1);
    model_ = std::make_unique<nn::models::Gpt>(nn::models::GptConfig{.vocab_size = options.vocab,
                                                                     .context = options.context,
                                                                     .width = options.width,
                                                                     .layers = options.layers,
                                                                     .heads = options.heads,
                                                                     .tied = !by_stages()});
    parameters_ = model_->num_parameters();
    const auto make_optimizer = [&] {
      optimizer_ = std::make_shared<optim::AdamW>(model_->named_parameters(),
                                                  optim::AdamWOptions{.lr = 3e-4});
    };
    if (const PipelineMode* mode = pipeline_mode(mode_)) {
      make_optimizer();
      deal(*mode);
    } else {
      shard();
      make_optimizer();
    }
    const Tensor tokens = randint(0, options.vocab, {options.batch_size, options.context + 1});
    inputs_ = tokens.narrow(1, 0, options.context).contiguous();
    targets_ = tokens.narrow(1, 1, options.context).contiguous();
  }

  void step(bool measured) {
    const distributed::CommTrace::Scope scope(distributed::world().trace());
    const auto begin = Clock::now();
    if (pipeline_) {
      step_by_stages();
      const double time = milliseconds_since(begin);
      message_bytes_ = 0;
      for (const distributed::CommRecord& record : scope.records()) {
        message_bytes_ += record.wire_bytes();
      }
      if (measured) times_.push_back(time);
      return;
    }
    for (int64_t micro = 0; micro < options_.accumulate; ++micro) {
      if (parallel_ != nullptr) {
        distributed::StepPlan plan = distributed::StepPlan::of(micro, options_.accumulate);
        plan.sync_gradients = plan.sync_gradients || parallel_->reduces_every_backward();
        parallel_->set_plan(plan);
      }
      Tensor loss;
      {
        const AutocastGuard autocast(kBF16, options_.dtype == "bf16");
        loss = (*model_)(inputs_, targets_).loss;
      }
      loss.backward();
    }
    optim::clip_grad_norm(model_->parameters(), 1.0, {.fold_into = optimizer_.get()});
    optimizer_->step();
    optimizer_->zero_grad();
    const double time = milliseconds_since(begin);
    gradients_ = gathers_ = {};
    message_bytes_ = 0;
    for (const distributed::CommRecord& record : scope.records()) {
      message_bytes_ += record.wire_bytes();
      if (record.channel == distributed::Channel::kGradient) gradients_ += {1, record.bytes};
      if (record.channel == distributed::Channel::kParameter) gathers_ += {1, record.bytes};
    }
    if (replica_ != nullptr) {
      const distributed::ShardReport report = replica_->report();
      TS_CHECK(gradients_ == report.gradients, "bench_ddp", "a step issued ",
               gradients_.collectives, " collectives of ", gradients_.bytes,
               " bytes; the formula says ", report.gradients.collectives, " of ",
               report.gradients.bytes);
    }
    if (!measured) return;
    times_.push_back(time);
    if (floor_) return floor_->run();
    if (parallel_ == nullptr) return;
    hidden_.push_back(hidden_share(scope.records(), distributed::Channel::kGradient));
    waited_.push_back(parallel_->pass().record().waited * 1e3);
  }

  double milliseconds() const { return median(times_); }
  const std::vector<double>& times() const { return times_; }

  // one_process_ms: 0 where it was not measured.
  void print(double speed_beside_ddp, int64_t start_up_bytes, double one_process_ms) const {
    const double ms = milliseconds();
    if (pipeline_) return print_stages(start_up_bytes, one_process_ms);
    if (parallel_ == nullptr) return print_divided(start_up_bytes);
    const auto tokens_in_step = static_cast<double>(
        options_.batch_size * options_.context * options_.accumulate * distributed::world_size());
    std::printf(
        "{\"ranks\": %d, \"threads\": %lld, \"sharding\": \"%s\", \"dtype\": \"%s\", \"hook\": "
        "\"%s\", "
        "\"parameters\": %lld, \"ms_per_step\": %.3f, \"tokens_per_s\": %.1f, "
        "\"speed_beside_ddp\": %.3f, \"collectives\": %lld, \"bytes\": %lld, "
        "\"gathers\": %lld, \"gathered_bytes\": %lld, \"hidden\": %.3f, \"waited_ms\": %.3f, "
        "\"resident_bytes\": %lld, \"peak_resident_bytes\": %lld}\n",
        distributed::world_size(), static_cast<long long>(options_.threads), mode_.c_str(),
        options_.dtype.c_str(), options_.hook.c_str(), static_cast<long long>(parameters_), ms,
        tokens_in_step / ms * 1e3, speed_beside_ddp, static_cast<long long>(gradients_.collectives),
        static_cast<long long>(gradients_.bytes), static_cast<long long>(gathers_.collectives),
        static_cast<long long>(gathers_.bytes), median(hidden_), median(waited_),
        static_cast<long long>(bench::resident_bytes() - start_up_bytes),
        static_cast<long long>(bench::peak_resident_bytes() - start_up_bytes));
  }

 private:
  void print_divided(int64_t start_up_bytes) const {
    const double ms = milliseconds();
    const auto tokens = static_cast<double>(options_.batch_size * options_.context);
    const double floor = floor_->products() + floor_->copies(message_bytes_);
    std::printf(
        "{\"ranks\": %d, \"threads\": %lld, \"sharding\": \"%s\", \"dtype\": \"%s\", "
        "\"parameters\": %lld, \"ms_per_step\": %.3f, \"tokens_per_s\": %.1f, "
        "\"message_bytes\": %.0f, \"products_ms\": %.3f, \"copies_ms\": %.3f, "
        "\"step_over_floor\": %.3f, \"resident_bytes\": %lld, \"peak_resident_bytes\": %lld}\n",
        distributed::world_size(), static_cast<long long>(options_.threads), mode_.c_str(),
        options_.dtype.c_str(), static_cast<long long>(parameters_), ms, tokens / ms * 1e3,
        message_bytes_, floor_->products(), floor_->copies(message_bytes_), ms / floor,
        static_cast<long long>(bench::resident_bytes() - start_up_bytes),
        static_cast<long long>(bench::peak_resident_bytes() - start_up_bytes));
  }

  bool by_stages() const { return mode_ == kAlone || pipeline_mode(mode_) != nullptr; }

  void deal(const PipelineMode& mode) {
    AcceleratorOptions settings{
        .mixed_precision = options_.dtype == "f32" ? Precision::kNo : Precision::kBF16,
        .gradient_accumulation_steps = options_.accumulate,
        .cpu = true};
    settings.pp.size = distributed::world_size();
    settings.pp.stages_per_rank = mode.stages_per_rank;
    settings.pp.schedule = mode.schedule;
    accelerator_ = std::make_unique<Accelerator>(settings);
    pipeline_.emplace(accelerator_->pipeline(*model_));
    accelerator_->prepare(*model_, optimizer_);
    bubble_ =
        distributed::simulate(distributed::make_schedule(mode.schedule, distributed::world_size(),
                                                         mode.stages_per_rank,
                                                         static_cast<int>(options_.accumulate)))
            .bubble;
  }

  void step_by_stages() {
    const std::vector<int64_t> window(static_cast<size_t>(options_.accumulate));
    pipeline_->step(window, [&](int64_t) -> Tensor { return (*model_)(inputs_, targets_).loss; });
    accelerator_->clip_grad_norm(model_->parameters(), 1.0);
    optimizer_->step();
    optimizer_->zero_grad();
  }

  void print_stages(int64_t start_up_bytes, double one_process_ms) const {
    const double ms = milliseconds();
    const auto p = static_cast<double>(distributed::world_size());
    const auto m = static_cast<double>(options_.accumulate);
    const auto tokens = static_cast<double>(options_.batch_size * options_.context) * m;
    char beside[96] = "";
    if (one_process_ms > 0) {
      std::snprintf(beside, sizeof beside, "\"one_process_ms\": %.3f, \"bound_ms\": %.3f, ",
                    one_process_ms, 1.1 * (m + p - 1) / (m * p) * one_process_ms);
    }
    std::printf(
        "{\"ranks\": %d, \"threads\": %lld, \"sharding\": \"%s\", \"dtype\": \"%s\", "
        "\"parameters\": %lld, \"micro_batches\": %lld, \"ms_per_step\": %.3f, "
        "\"tokens_per_s\": %.1f, \"bubble\": %.3f, \"message_bytes\": %.0f, %s"
        "\"resident_bytes\": %lld, \"peak_resident_bytes\": %lld}\n",
        distributed::world_size(), static_cast<long long>(options_.threads), mode_.c_str(),
        options_.dtype.c_str(), static_cast<long long>(parameters_),
        static_cast<long long>(options_.accumulate), ms, tokens / ms * 1e3, bubble_, message_bytes_,
        beside, static_cast<long long>(bench::resident_bytes() - start_up_bytes),
        static_cast<long long>(bench::peak_resident_bytes() - start_up_bytes));
  }

  void shard() {
    using namespace distributed;
    if (mode_ == kAlone) return;
    if (std::ranges::count(kDividing, mode_) != 0) {
      dims_ = std::make_unique<ParallelDims>(
          world(), ParallelSizes{.dp_shard = 1, .tp = distributed::world_size()});
      parallelize_module(*model_, dims_->mesh()["tp"], {.sequence = mode_ == "tp_sequence"});
      floor_ = std::make_unique<DividedFloor>(options_, options_.dtype == "f32" ? kF32 : kBF16);
      return;
    }
    Mesh& mesh = distributed::mesh();
    constexpr auto kAverage = GradientAverage::kWindow;
    if (mode_ == "ddp") {
      auto replica = std::make_unique<Replica>(
          replicate(*model_, mesh, {.bucket_bytes = options_.bucket_bytes, .average = kAverage}));
      replica->set_communication_hook(make_hook(options_.hook));
      replica_ = replica.get();
      parallel_ = std::move(replica);
    } else if (mode_ == "zero1" || mode_ == "zero2") {
      parallel_ = std::make_unique<ShardedModel>(zero(*model_, mesh,
                                                      {.stage = mode_ == "zero1" ? 1 : 2,
                                                       .bucket_bytes = options_.bucket_bytes,
                                                       .average = kAverage}));
    } else {
      for (size_t i = 0; i < model_->transformer.h.num_children(); ++i) {
        fully_shard(model_->transformer.h.child(i), mesh);
      }
      FullyShardOptions root{.average = kAverage};
      if (mode_ == "zero3") root.reshard_after_forward = true;
      fully_shard(*model_, mesh, root);
      parallel_ = std::make_unique<ShardedModel>(sharded_model(*model_));
    }
  }

  const Options& options_;
  std::string mode_;
  std::unique_ptr<nn::models::Gpt> model_;
  int64_t parameters_ = 0;
  std::unique_ptr<distributed::ParallelDims> dims_;           // of tp and tp_sequence
  std::unique_ptr<distributed::DataParallelModel> parallel_;  // of the others
  const distributed::Replica* replica_ = nullptr;             // it, where it is one
  std::unique_ptr<Accelerator> accelerator_;                  // of pp
  std::optional<Pipeline> pipeline_;
  double bubble_ = 0;  // of the simulated schedule
  std::shared_ptr<optim::AdamW> optimizer_;
  Tensor inputs_, targets_;
  distributed::Traffic gradients_, gathers_;  // of the last step
  double message_bytes_ = 0;
  std::unique_ptr<DividedFloor> floor_;
  std::vector<double> times_, hidden_, waited_;
};

void run(const Options& options) {
  set_num_threads(static_cast<int>(options.threads));
  const int64_t start_up_bytes = bench::resident_bytes();
  std::vector<std::unique_ptr<Training>> trainings;
  for (const std::string& mode : all_modes()) {
    const bool compares = options.compare && std::ranges::count(kModes, mode) != 0;
    if (compares || mode == options.sharding) {
      trainings.push_back(std::make_unique<Training>(options, mode));
    }
  }
  std::unique_ptr<Training> alone;
  if (options.one_process && distributed::rank() == 0) {
    alone = std::make_unique<Training>(options, std::string(kAlone));
  }
  for (int64_t step = 0; step < options.warmup + options.steps; ++step) {
    for (const auto& training : trainings) training->step(step >= options.warmup);
    if (!options.one_process) continue;
    // The others wait meanwhile.
    distributed::world().barrier();
    if (alone) alone->step(step >= options.warmup);
    distributed::world().barrier();
  }
  if (distributed::rank() != 0) return;
  for (const auto& training : trainings) {
    // Of pairs of neighbours in time.
    std::vector<double> ratios;
    for (size_t i = 0; i < training->times().size(); ++i) {
      ratios.push_back(trainings.front()->times()[i] / training->times()[i]);
    }
    training->print(options.compare ? median(ratios) : 0, start_up_bytes,
                    alone ? alone->milliseconds() : 0);
  }
}

}  // namespace

int main(int argc, char** argv) {
  return tessera::run(argc, argv, [&](auto) {
    const Options options = parse(argc, argv);
    const distributed::ProcessGroup processes;
    if (distributed::world_size() > 1) {
      run(options);
    } else {
      distributed::run_ranks(options.ranks, [&](int) { run(options); });
    }
  });
}
