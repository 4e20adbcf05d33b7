// Trains a GPT on a text.
//
//     train --data shakespeare.txt --save model
//     train --resume model                      # goes on as if it had never stopped (Ctrl-C saves)
//     train --data more.txt --init-from model   # new training from given weights
//     train --data shakespeare.txt --device cuda --graph --log-every 100   # on a GPU
//     tessera launch -n 2 -- train --data shakespeare.txt   # each step: a micro-batch of each rank
//     tessera launch -n 8 -- train --data shakespeare.txt --device cuda   # with a GPU each
//     tessera launch -n 4 -- train --data shakespeare.txt --sharding fsdp   # with a part of it
//     each
//     train --data shakespeare.txt --optimizer muon     # matrices of the blocks by Muon, the rest
//                                                       # by AdamW; with any --sharding
//
// A saved folder holds a model that transformers can load (config.json, model.safetensors, of gpt2
// the vocabulary: vocab.json, merges.txt) and what it takes to go on (training-STEP.json and
// .safetensors). The model names its step and is replaced last, so that a save which fails or is
// cut off leaves the one before it whole.
#include <unistd.h>
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include <tessera/accelerate/process/rank_device.h>
#include <tessera/accelerate/process/run.h>
#include <tessera/autograd/autograd.h>
#include <tessera/core/context.h>
#include <tessera/core/io/atomic_file.h>
#include <tessera/core/kernels/attention/attention.h>
#include <tessera/core/memory/allocator.h>
#include <tessera/core/parallel.h>
#include <tessera/core/state/safetensors.h>
#include <tessera/data/dataloader.h>
#include <tessera/data/distributed_source.h>
#include <tessera/distributed/checkpoint/full_state.h>
#include <tessera/distributed/data_parallel/replicate.h>
#include <tessera/distributed/fully_shard/fully_shard.h>
#include <tessera/distributed/fully_shard/update_report.h>
#include <tessera/distributed/fully_shard/zero.h>
#include <tessera/distributed/mesh/mesh.h>
#include <tessera/distributed/transport/group.h>
#include <tessera/distributed/transport/process_group.h>
#include <tessera/nn/models/gpt2.h>
#include <tessera/optim/clip.h>
#include <tessera/optim/graphed_step.h>
#include <tessera/optim/muon.h>
#include <tessera/optim/optimizers.h>
#include <tessera/optim/schedule.h>
#include <tessera/precision/autocast.h>

#include "corpus.h"

namespace tessera::examples {
namespace {

using namespace nn::models;

using Json = nlohmann::json;
using Clock = std::chrono::steady_clock;
constexpr int64_t kShowEvery = 100;  // steps between lines where the output is a file

// ---- Options -----------------------------------------------------------------------------------

struct TrainOptions {
  std::string data, tokenizer = "bytes", tokenizer_files, dtype = "f32", device = "cpu";
  std::string fp8_recipe = "tensorwise", fp8_filter = "default";
  std::string sharding = "ddp", optimizer = "adamw", states = "f32";
  int64_t layers = 4, width = 128, heads = 4, context = 64;
  int64_t batch_size = 12, accumulate = 1, steps = 2000, warmup = 100, eval_every = 250,
          save_every = 0;
  int64_t schedule_steps = 0;  // 0: steps
  int64_t stop_at = 0;         // 0: steps
  double lr = 1e-3, min_lr = 1e-4, beta1 = 0.9, beta2 = 0.99, weight_decay = 0.1, clip = 1;
  double muon_lr = 0.02;
  double dropout = 0;
  bool graph = false, deterministic = false;
  int64_t log_every = 1;
  uint64_t seed = 1337;
  int threads = 0;  // 0: as the environment says
  std::string save, resume, init_from, log;

  // What a resumed run takes over from the one that was saved, unless a flag says otherwise.
  template <class Visit>
  void visit_resumed(Visit&& visit) {
    visit("data", data), visit("tokenizer", tokenizer), visit("tokenizer-files", tokenizer_files);
    visit("dtype", dtype), visit("batch-size", batch_size), visit("accumulate", accumulate);
    visit("fp8-recipe", fp8_recipe), visit("fp8-filter", fp8_filter);
    visit("steps", steps);
    visit("schedule-steps", schedule_steps), visit("warmup", warmup), visit("lr", lr);
    visit("min-lr", min_lr), visit("beta1", beta1), visit("beta2", beta2);
    visit("weight-decay", weight_decay), visit("clip", clip), visit("seed", seed);
    visit("context", context), visit("eval-every", eval_every), visit("threads", threads);
    visit("optimizer", optimizer), visit("muon-lr", muon_lr), visit("states", states);
  }
  // Of what a run that was saved by an earlier version does not speak.
  static bool is_newer(std::string_view name) {
    return name == "optimizer" || name == "muon-lr" || name == "states";
  }
};

std::string file_in(const std::string& folder, const std::string& name) {
  return (std::filesystem::path(folder) / name).string();
}

// What belongs to the model in `folder`, without an ending.
std::string state_of(const std::string& folder) {
  const SafeTensorsFile model(file_in(folder, "model.safetensors"));
  const auto found = model.metadata().find("step");
  const std::string step = found == model.metadata().end() ? "" : found->second;
  TS_CHECK_AS(ConfigError,
              !step.empty() && step.find_first_not_of("0123456789") == std::string::npos, "train",
              "--resume needs a folder that train saved; the model in '", folder,
              "' names no step; give --init-from to begin with its weights");
  return file_in(folder, "training-" + step);
}

Json read_json(const std::string& path) {
  std::ifstream file(path);
  TS_CHECK_AS(IoError, file, "train", "cannot read '", path,
              "'; --resume needs a folder that train saved");
  try {
    return Json::parse(file);
  } catch (const Json::exception& error) {
    TS_THROW(FormatError, path, "is not JSON (", error.what(), "); resume from another folder");
  }
}

TrainOptions parse_options(int argc, char** argv) {
  TrainOptions options;
  CLI::App app("Trains a GPT on a text and saves it as transformers does.");
  const auto add = [&](const std::string& name, auto& value, const std::string& help) {
    return app.add_option("--" + name, value, help)->capture_default_str();
  };
  add("data", options.data, "text file; its last tenth validates");
  add("tokenizer", options.tokenizer, "how text becomes tokens")
      ->check(CLI::IsMember({"bytes", "gpt2"}));
  add("tokenizer-files", options.tokenizer_files,
      "folder with the vocabulary of gpt2; default: that of --resume or --init-from");
  add("layers", options.layers, "transformer blocks")->check(CLI::PositiveNumber);
  add("width", options.width, "size of the residual stream")->check(CLI::PositiveNumber);
  add("heads", options.heads, "attention heads")->check(CLI::PositiveNumber);
  add("context", options.context, "longest sequence")->check(CLI::PositiveNumber);
  add("batch-size", options.batch_size, "sequences in a micro-batch")->check(CLI::PositiveNumber);
  add("accumulate", options.accumulate, "micro-batches a step (of each rank)")
      ->check(CLI::PositiveNumber);
  add("steps", options.steps, "optimizer steps in all")->check(CLI::NonNegativeNumber);
  add("schedule-steps", options.schedule_steps, "where the cosine ends; 0: at --steps");
  add("stop-at", options.stop_at, "stop early at this step and save, to --resume later; 0: no");
  add("optimizer", options.optimizer,
      "adamw, or muon for the matrices of the blocks and adamw for what else there is")
      ->check(CLI::IsMember({"adamw", "muon"}));
  add("states", options.states, "of the optimizers: f32, or bf16, rounded stochastically")
      ->check(CLI::IsMember({"f32", "bf16"}));
  add("lr", options.lr, "highest learning rate, of AdamW");
  add("muon-lr", options.muon_lr, "highest learning rate of Muon, which follows --lr's curve");
  add("min-lr", options.min_lr, "learning rate at the end");
  add("warmup", options.warmup, "steps of linear warm-up; by default at most --schedule-steps")
      ->check(CLI::NonNegativeNumber);
  add("beta1", options.beta1, "AdamW");
  add("beta2", options.beta2, "AdamW");
  add("weight-decay", options.weight_decay, "of matrices");
  add("clip", options.clip, "largest gradient norm; 0: none");
  add("dropout", options.dropout, "in the residual stream and attention");
  add("dtype", options.dtype,
      "of model and activations; fp8: f32 parameters, computing in bf16 and linear layers in "
      "fp8")
      ->check(CLI::IsMember({"f32", "bf16", "fp8"}));
  add("fp8-recipe", options.fp8_recipe, "with --dtype fp8: whose maxima scale the operands")
      ->check(CLI::IsMember(
          {"tensorwise", "current", "delayed", "rowwise", "rowwise_with_gw_hp", "blockwise"}));
  add("fp8-filter", options.fp8_filter,
      "with --dtype fp8: which linear layers; all but the head (default), all, or those that gain")
      ->check(CLI::IsMember({"default", "all", "pays"}));
  add("device", options.device,
      "cpu, cuda (each rank the GPU with its number) or cuda:N; a resumed run may take another "
      "one");
  app.add_flag("--graph", options.graph,
               "with --device cuda: repeats the step as a CUDA graph, to the same bits");
  app.add_flag(
      "--deterministic", options.deterministic,
      "with --device cuda: gradients of attention have the same bits in each run, which is "
      "slower; all else has them anyway");
  add("sharding", options.sharding,
      "what several ranks hold parts of: nothing (ddp), optimizer states (zero1), and gradients "
      "(zero2), and parameters (zero3, fsdp); none: every rank trains alone, on all of the data. A "
      "resumed run may take another one")
      ->check(CLI::IsMember({"none", "ddp", "zero1", "zero2", "zero3", "fsdp"}));
  add("seed", options.seed, "initial weights and order of data");
  add("threads", options.threads, "0: one a core")->check(CLI::NonNegativeNumber);
  add("eval-every", options.eval_every, "steps between validations; 0: only at the end");
  add("save-every", options.save_every, "steps between saves; 0: only at the end");
  add("save", options.save, "folder for the model and the state of training");
  add("resume", options.resume, "folder to go on from; without --save nothing is written back");
  add("init-from", options.init_from, "folder of a GPT-2 whose weights to begin with");
  add("log", options.log, "file for one JSON object a step");
  add("log-every", options.log_every,
      "steps between rows of the log and changes on the screen, for which a GPU is waited for")
      ->check(CLI::PositiveNumber);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error));
  }
  if (!options.resume.empty()) {
    const std::string path = state_of(options.resume) + ".json";
    const Json saved = read_json(path);
    options.visit_resumed([&](const char* name, auto& value) {
      if (app.get_option(std::string("--") + name)->count() > 0) return;
      if (TrainOptions::is_newer(name) && !saved.contains(name)) return;
      try {
        saved.at(name).get_to(value);
      } catch (const Json::exception& error) {
        TS_THROW(FormatError, path, "the field '", name, "' does not fit (", error.what(), ")");
      }
    });
    TS_CHECK_AS(ConfigError, options.init_from.empty(), "train",
                "--resume and --init-from exclude each other");
  }
  // A folder with a model brings its vocabulary along.
  if (app.get_option("--tokenizer-files")->count() == 0) {
    const std::string& folder = options.resume.empty() ? options.init_from : options.resume;
    const bool brings = !folder.empty() && std::filesystem::exists(file_in(folder, "vocab.json"));
    if (brings) options.tokenizer_files = folder;
  }
  if (options.schedule_steps == 0) options.schedule_steps = options.steps;
  if (app.get_option("--warmup")->count() == 0) {  // a short run warms up for all of it
    options.warmup = std::min(options.warmup, options.schedule_steps);
  }
  TS_CHECK_AS(ConfigError, !options.data.empty(), "train", "--data FILE is needed");
  return options;
}

// ---- Training ----------------------------------------------------------------------------------

volatile std::sig_atomic_t interrupted = 0;
void request_stop(int) { interrupted = 1; }

class Trainer {
 public:
  Trainer(TrainOptions options, const Device& device)
      : options_(std::move(options)),
        device_(device),
        tokenizer_(make_tokenizer(options_.tokenizer, options_.tokenizer_files)),
        model_(make_model()),
        num_parameters_(model_->num_parameters()),
        corpus_(read_corpus(options_.data, *tokenizer_, options_.context)),
        windows_(std::make_shared<data::RandomWindows>(corpus_.training, options_.context,
                                                       options_.seed, rows_in_step())),
        loader_(windows_, {.batch_size = options_.batch_size,
                           .workers = device_.is_cuda() ? 1 : 0,
                           .device = device_}),
        validation_(
            std::make_shared<data::ConsecutiveWindows>(corpus_.validation, options_.context)),
        split_(split_parameters()),
        optimizer_(parameter_groups()),
        schedule_(optimizer_, curve(options_.min_lr)) {
    Context::current().slot<kernels::AttentionPolicy>().deterministic = options_.deterministic;
    if (options_.dtype == "fp8") apply_fp8();
    if (options_.optimizer == "muon") {
      muon_.emplace(split_.matrices, optim::MuonOptions{.lr = options_.muon_lr,
                                                        .weight_decay = options_.weight_decay,
                                                        .state_dtype = state_dtype()});
      // AdamW's curve, to the same share of its highest rate.
      const double share = options_.lr > 0 ? options_.min_lr / options_.lr : 0;
      muon_schedule_.emplace(*muon_, curve(share * options_.muon_lr));
    }
    if (distributed::world_size() > 1) parallel_ = make_parallel();
    if (!options_.resume.empty()) load_state();
    loader_.set_source(std::make_shared<data::DistributedBatchSource>(
        std::make_shared<data::SequentialSampler>(windows_->size()), options_.batch_size,
        data::RankShare{.rank = distributed::rank(), .world_size = distributed::world_size()}));
    loader_.set_cursor({0, step_ * rows_in_step()});
    if (options_.graph) {
      TS_CHECK_AS(ConfigError, device_.is_cuda() && !parallel_, "train",
                  "--graph repeats the step of one process on a GPU; give --device cuda and one "
                  "rank, or leave it out");
      graph_.emplace(device_, [this](const TensorList& batches) { return compute(batches); });
    }
  }

  void run();

 private:
  // Of a step, on all ranks together.
  int64_t micro_batches() const { return options_.accumulate * distributed::world_size(); }
  int64_t rows_in_step() const { return micro_batches() * options_.batch_size; }
  int64_t tokens_in_step() const { return rows_in_step() * options_.context; }
  bool is_first_rank() const { return distributed::rank() == 0; }
  // Whether a rank holds only a part of what is saved.
  bool is_sharded() const { return parallel_ && options_.sharding != "ddp"; }
  std::unique_ptr<Gpt> make_model();
  void apply_fp8();
  std::unique_ptr<distributed::DataParallelModel> make_parallel();
  optim::MuonParameters split_parameters() const;
  std::vector<optim::ParameterGroup<optim::AdamWOptions>> parameter_groups() const;
  DType state_dtype() const { return options_.states == "bf16" ? kBF16 : kF32; }
  optim::Cosine curve(double min_lr) const {
    return {.warmup = options_.warmup, .total = options_.schedule_steps, .min_lr = min_lr};
  }
  TensorList compute(const TensorList& batches);
  Tensor train_step();
  Tensor agree(const Tensor& loss);
  void draw_for(int64_t micro);
  double validate();
  void save();
  void prepare_save_folder() const;
  void load_state();
  void check_replicas();
  void open_log();
  void log_row(double loss, std::optional<double> val_loss, double milliseconds);
  void show(double loss, std::optional<double> val_loss, double milliseconds, bool last);

  TrainOptions options_;
  Device device_;
  std::unique_ptr<data::Tokenizer> tokenizer_;
  std::unique_ptr<Gpt> model_;
  precision::AppliedPolicy policy_;
  int64_t num_parameters_;
  Corpus corpus_;
  std::shared_ptr<data::RandomWindows> windows_;
  data::DataLoader<data::TokenExample> loader_;  // this rank's micro-batches, one after the other
  std::shared_ptr<data::ConsecutiveWindows> validation_;
  optim::MuonParameters split_;  // with --optimizer muon; else all are others
  optim::AdamW optimizer_;       // of the others
  optim::CosineSchedule schedule_;
  std::optional<optim::Muon> muon_;  // of the matrices
  std::optional<optim::CosineSchedule> muon_schedule_;
  std::unique_ptr<distributed::DataParallelModel> parallel_;  // where there are several ranks
  int64_t step_ = 0;                                          // steps done
  bool stop_ = false, save_now_ = false;                      // asked for by a signal to any rank
  Tensor grad_norm_;                                          // of the last step, on the device
  std::vector<int64_t> peaks_;                                // bytes, by rank
  std::optional<optim::GraphedStep> graph_;                   // of compute(), with --graph
  double smooth_ms_ = 0;
  std::optional<double> last_val_loss_;
  std::FILE* log_ = nullptr;
};

std::unique_ptr<Gpt> Trainer::make_model() {
  if (options_.threads > 0) set_num_threads(options_.threads);
  manual_seed(options_.seed);
  const std::string source = options_.resume.empty() ? options_.init_from : options_.resume;
  std::unique_ptr<Gpt> model;
  if (!source.empty()) {
    model = Gpt::from_pretrained(source);
    TS_CHECK_AS(ConfigError, model->config.vocab_size >= tokenizer_->vocab_size(), "train",
                "the model in '", source, "' knows ", model->config.vocab_size,
                " tokens, the tokenizer '", options_.tokenizer, "' makes ",
                tokenizer_->vocab_size(), "; choose the --tokenizer it was trained with");
    options_.context = std::min(options_.context, model->config.context);
  } else {
    model = std::make_unique<Gpt>(GptConfig{.vocab_size = tokenizer_->vocab_size(),
                                            .context = options_.context,
                                            .width = options_.width,
                                            .layers = options_.layers,
                                            .heads = options_.heads,
                                            .dropout = options_.dropout,
                                            .end_of_text = tokenizer_->end_of_text().value_or(-1),
                                            .tokenizer = options_.tokenizer});
  }
  if (options_.dtype == "bf16") model->to(kBF16);
  model->to(device_);
  return model;
}

void Trainer::apply_fp8() {
  precision::Fp8Recipe recipe = precision::Fp8Recipe::named(options_.fp8_recipe);
  recipe.filter = precision::fp8_filter_named(options_.fp8_filter);
  const precision::Policy policy = precision::Policy::fp8(recipe);
  check(policy, device_);
  policy_ = apply(*model_, policy);
  if (distributed::world_size() == 1) return;
  policy_.fp8()->set_reduction([](const Tensor& maxima) {
    distributed::world().all_reduce(maxima, distributed::ReduceOp::kMax).wait();
  });
}

std::unique_ptr<distributed::DataParallelModel> Trainer::make_parallel() {
  distributed::Mesh& mesh = distributed::mesh();
  constexpr auto kAverage = distributed::GradientAverage::kWindow;
  const std::string& mode = options_.sharding;
  TS_CHECK_AS(ConfigError, mode != "none", "train",
              "--sharding none is a training of one rank, of ", distributed::world_size(),
              " that there are; leave it out, or take ddp");
  if (mode == "zero1" || mode == "zero2") {
    return std::make_unique<distributed::ShardedModel>(
        distributed::zero(*model_, mesh, {.stage = mode == "zero1" ? 1 : 2, .average = kAverage}));
  }
  if (mode == "zero3" || mode == "fsdp") {
    for (size_t i = 0; i < model_->transformer.h.num_children(); ++i) {
      distributed::fully_shard(model_->transformer.h.child(i), mesh);
    }
    distributed::FullyShardOptions root{.average = kAverage};
    if (mode == "zero3") root.reshard_after_forward = true;
    distributed::fully_shard(*model_, mesh, root);
    return std::make_unique<distributed::ShardedModel>(distributed::sharded_model(*model_));
  }
  return std::make_unique<distributed::Replica>(
      distributed::replicate(*model_, mesh, {.average = kAverage}));
}

// The embeddings, whose table is the head's too, are matrices by shape alone.
optim::MuonParameters Trainer::split_parameters() const {
  if (options_.optimizer != "muon") return {{}, model_->named_parameters()};
  return optim::split_for_muon(model_->named_parameters(), {"transformer.wte", "transformer.wpe"});
}

// Weight decay on matrices; biases and norms go without.
std::vector<optim::ParameterGroup<optim::AdamWOptions>> Trainer::parameter_groups() const {
  optim::AdamWOptions decayed{.lr = options_.lr,
                              .betas = {options_.beta1, options_.beta2},
                              .weight_decay = options_.weight_decay,
                              .state_dtype = state_dtype()};
  optim::AdamWOptions plain = decayed;
  plain.weight_decay = 0;
  NamedTensors matrices, others;
  for (const NamedTensor& named : split_.others) {
    (named.tensor.dim() >= 2 ? matrices : others).push_back(named);
  }
  return {{matrices, decayed}, {others, plain}};
}

// Ranks take the step's micro-batches in turn. With one each, N ranks do, to the bit, what one
// process does with --accumulate N: gradients are added in rank order and multiplied once.
//
// Loss and gradient norm stay on the device: a GPU works on while the host queues the next step.
Tensor Trainer::train_step() {
  TensorList batches;
  for (int64_t i = 0; i < options_.accumulate; ++i) {
    const std::optional<data::TokenExample> batch = loader_.next();
    batches.push_back(batch->inputs);
    batches.push_back(batch->targets);
  }
  draw_for(distributed::rank());
  const TensorList results = graph_ ? (*graph_)(batches) : compute(batches);
  const Tensor loss = agree(results[0]) / static_cast<double>(micro_batches());
  grad_norm_ = results[1];
  schedule_.step();
  if (muon_schedule_) muon_schedule_->step();
  ++step_;
  draw_for(0);
  return loss;
}

// What a graph can repeat. batches: inputs and targets of each micro-batch of this rank. Results:
// the sum of the losses, and the gradient norm.
TensorList Trainer::compute(const TensorList& batches) {
  Tensor loss = zeros({}, {.dtype = kF64, .device = device_});
  for (int64_t i = 0; i < options_.accumulate; ++i) {
    draw_for(i * distributed::world_size() + distributed::rank());
    if (parallel_) {
      distributed::StepPlan plan = distributed::StepPlan::of(i, options_.accumulate);
      plan.sync_gradients = plan.sync_gradients || parallel_->reduces_every_backward();
      parallel_->set_plan(plan);
    }
    const auto place = static_cast<size_t>(2 * i);
    const GptOutput out = (*model_)(batches[place], batches[place + 1]);
    out.loss.backward();
    loss = loss + out.loss.detach().to(kF64);
  }
  if (!parallel_ && options_.accumulate > 1) {
    const NoGradGuard no_grad;
    const Scalar scale(1 / static_cast<double>(options_.accumulate));
    for (const Tensor& parameter : model_->parameters()) mul_(parameter.grad(), scale);
  }
  optim::ClipOptions clip{.fold_into = &optimizer_};
  if (muon_) clip.fold_into_others = {&*muon_};
  const Tensor norm = optim::clip_grad_norm(model_->parameters(),
                                            options_.clip > 0 ? options_.clip : HUGE_VAL, clip);
  optimizer_.step();
  optimizer_.zero_grad();
  if (muon_) {
    muon_->step();
    muon_->zero_grad();
  }
  if (policy_.fp8()) policy_.fp8()->update();
  return {loss, norm};
}

// Dropout draws by step and micro-batch: the same masks for any number of ranks.
void Trainer::draw_for(int64_t micro) {
  random_state().next_stream = static_cast<uint64_t>(step_ * micro_batches() + micro) << 20;
}

// The sum of the ranks' losses. All save, and all stop, where one was asked to.
Tensor Trainer::agree(const Tensor& loss) {
  const RunRequest request = requested();
  const bool stop = interrupted != 0 || request == RunRequest::kCheckpointAndStop;
  const bool checkpoint = request == RunRequest::kCheckpoint;
  if (checkpoint) clear_request();
  stop_ |= stop;
  save_now_ = checkpoint;
  const int64_t peak = memory_stats()->peak();
  peaks_ = {peak};
  if (distributed::world_size() == 1) return loss;
  // The loss (one on a GPU is summed there: nobody waits for it), requests, and peaks by rank.
  constexpr int64_t kPeaks = 3;
  const Tensor message = zeros({kPeaks + distributed::world_size()}, {.dtype = kF64});
  double* const values = message.data_as<double>();
  if (device_.is_cpu()) values[0] = loss.item();
  values[1] = stop;
  values[2] = checkpoint;
  values[kPeaks + distributed::rank()] = static_cast<double>(peak);
  distributed::world().all_reduce(message).wait();
  stop_ |= values[1] > 0;
  save_now_ = values[2] > 0;
  peaks_.clear();
  for (int64_t i = kPeaks; i < message.numel(); ++i) {
    peaks_.push_back(static_cast<int64_t>(values[i]));
  }
  if (device_.is_cpu()) return scalar_tensor(values[0], kF64);
  distributed::world().all_reduce(loss).wait();
  return loss;
}

double Trainer::validate() {
  const NoGradGuard no_grad;
  model_->eval();
  double sum = 0;
  // As many windows at once as a training step has, or about a thousand tokens.
  const int64_t at_once = std::max(options_.batch_size, 1 + 1024 / options_.context);
  int64_t targets_left = validation_->num_targets();
  data::DataLoader loader(validation_, {.batch_size = at_once, .device = device_});
  for (const data::TokenExample& batch : loader) {
    const int64_t targets = std::min(targets_left, batch.targets.numel());  // without padding
    const Tensor loss = (*model_)(batch.inputs, batch.targets).loss;
    sum += loss.item() * static_cast<double>(targets);
    targets_left -= targets;
  }
  model_->train();
  return sum / static_cast<double>(validation_->num_targets());
}

// ---- State -------------------------------------------------------------------------------------

// The whole of it on the first rank, which writes; the others bring their parts.
void Trainer::save() {
  if (options_.save.empty()) return;
  StateDict state;
  state.merge("optimizer.", distributed::full_state_dict(optimizer_.state_dict()));
  if (muon_) state.merge("muon.", distributed::full_state_dict(muon_->state_dict()));
  const StateDict weights = distributed::full_state_dict(model_->state_dict());
  if (!is_first_rank()) return;
  state.merge("schedule.", schedule_.state_dict());
  if (policy_.fp8()) state.merge("fp8.", policy_.fp8()->state_dict());
  if (muon_) state.merge("muon_schedule.", muon_schedule_->state_dict());
  const RandomState& random = random_state();
  const int64_t numbers[] = {step_, static_cast<int64_t>(random.seed),
                             static_cast<int64_t>(random.next_stream)};
  state.set("step", scalar_tensor(numbers[0], kI64));
  state.set("random.seed", scalar_tensor(numbers[1], kI64));
  state.set("random.next_stream", scalar_tensor(numbers[2], kI64));
  Json json;
  options_.visit_resumed([&](const char* name, auto& value) { json[name] = value; });
  const std::string step = std::to_string(step_);
  const std::string current = "training-" + step;
  std::map<std::string, Tensor> tensors = state.to_map();
  for (auto& [name, tensor] : tensors) tensor = tensor.to(kCpu);
  save_safetensors(file_in(options_.save, current + ".safetensors"), tensors);
  write_file_atomically(file_in(options_.save, current + ".json"), json.dump(2) + "\n");
  model_->save_pretrained(weights, options_.save, {{"step", step}});
  // No model is left that the older ones belong to.
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(options_.save, ignored)) {
    const std::filesystem::path& path = entry.path();
    const bool is_state = path.extension() == ".json" || path.extension() == ".safetensors";
    if (is_state && path.stem().string().starts_with("training-") && path.stem() != current) {
      std::filesystem::remove(path, ignored);
    }
  }
}

// What can go wrong does so before the first step, not after hours of training.
void Trainer::prepare_save_folder() const {
  if (options_.save.empty() || !is_first_rank()) return;
  std::error_code error;
  std::filesystem::create_directories(options_.save, error);
  TS_CHECK_AS(IoError, !error, "train", "cannot make the folder '", options_.save,
              "': ", error.message(), "; choose a --save folder that can be written");
  const AtomicFile probe(file_in(options_.save, "model.safetensors"));  // removed, not committed
  copy_tokenizer_files(options_.tokenizer, options_.tokenizer_files, options_.save);
}

void Trainer::load_state() {
  const std::string path = state_of(options_.resume) + ".safetensors";
  const StateDict state = StateDict::from_map(load_safetensors(path));
  try {
    optimizer_.load_state_dict(state.with_prefix("optimizer."));
    schedule_.load_state_dict(state.with_prefix("schedule."));
    if (policy_.fp8()) policy_.fp8()->load_state_dict(state.with_prefix("fp8."));
    if (muon_) {
      muon_->load_state_dict(state.with_prefix("muon."));
      muon_schedule_->load_state_dict(state.with_prefix("muon_schedule."));
    }
    step_ = state.at("step").item<int64_t>();
    random_state() = {static_cast<uint64_t>(state.at("random.seed").item<int64_t>()),
                      static_cast<uint64_t>(state.at("random.next_stream").item<int64_t>())};
  } catch (Error& error) {
    error.add_context(path);
    throw;
  }
}

// ---- What is told ------------------------------------------------------------------------------

// A resumed run goes on in its log: rows of steps that come again are dropped.
void Trainer::open_log() {
  if (options_.log.empty() || !is_first_rank()) return;
  std::string kept;
  if (!options_.resume.empty()) {
    std::ifstream old(options_.log);
    for (std::string line; std::getline(old, line);) {
      const Json row = Json::parse(line, nullptr, false);
      if (row.is_object() && row.value("step", step_ + 1) <= step_) kept += line + "\n";
    }
  }
  // Devices cannot be replaced and have no rows to keep.
  if (!kept.empty()) write_file_atomically(options_.log, kept);
  log_ = std::fopen(options_.log.c_str(), kept.empty() ? "w" : "a");
  TS_CHECK_AS(IoError, log_ != nullptr, "train", "cannot write the log '", options_.log,
              "': ", std::strerror(errno), "; choose a --log file that can be written");
}

void Trainer::log_row(double loss, std::optional<double> val_loss, double milliseconds) {
  if (log_ == nullptr) return;
  const auto number = [](double value) { return std::isfinite(value) ? Json(value) : Json(); };
  const auto tokens = static_cast<double>(tokens_in_step());
  Json row = {{"step", step_},
              {"loss", number(loss)},
              {"val_loss", val_loss ? number(*val_loss) : Json()},
              {"grad_norm", number(grad_norm_.item())},
              {"lr", optimizer_.lr()},
              {"ms", milliseconds},
              {"tokens_per_s", tokens / milliseconds * 1e3},
              {"peak_bytes", std::ranges::max(peaks_)},
              {"peak_bytes_by_rank", peaks_}};
  if (policy_.fp8()) {  // since the training began, or went on
    const precision::Fp8Report report = policy_.fp8()->report();
    row["fp8_calls"] = report.fp8_calls();
    row["fp8_fallbacks"] = report.fallbacks();
  }
  std::fputs((row.dump() + "\n").c_str(), log_);
  TS_CHECK_AS(IoError, std::fflush(log_) == 0, "train", "cannot write the log '", options_.log,
              "' at step ", step_, ": ", std::strerror(errno),
              "; free some space or choose another --log. The last save is kept");
}

void Trainer::show(double loss, std::optional<double> val_loss, double milliseconds, bool last) {
  if (val_loss) last_val_loss_ = val_loss;
  smooth_ms_ = smooth_ms_ == 0 ? milliseconds : 0.95 * smooth_ms_ + 0.05 * milliseconds;
  const bool terminal = isatty(STDOUT_FILENO) != 0;
  if (!terminal && !val_loss && !last && step_ % kShowEvery != 0) return;
  const double seconds_left = static_cast<double>(options_.steps - step_) * smooth_ms_ / 1e3;
  char val_text[32] = "-";
  if (last_val_loss_) std::snprintf(val_text, sizeof val_text, "%.4f", *last_val_loss_);
  std::printf("%sstep %lld/%lld  loss %.4f  val %s  %.0f tokens/s  %.1f ms/step  %dm%02ds left%s",
              terminal ? "\r\033[K" : "", static_cast<long long>(step_),
              static_cast<long long>(options_.steps), loss, val_text,
              static_cast<double>(tokens_in_step()) / smooth_ms_ * 1e3, smooth_ms_,
              static_cast<int>(seconds_left) / 60, static_cast<int>(seconds_left) % 60,
              terminal && !val_loss && !last ? "" : "\n");
  std::fflush(stdout);
}

// Ranks that trained alike hold the same bits.
void Trainer::check_replicas() {
  if (!parallel_ || is_sharded()) return;
  for (const auto& [name, parameter] : model_->named_parameters()) {
    const Tensor first = parameter.detach().clone();
    distributed::world().broadcast(first, 0).wait();
    TS_CHECK_AS(DistributedError, first.to_vector() == parameter.to_vector(), "train", "'", name,
                "' of rank ", distributed::rank(), " differs from rank 0's");
  }
  if (is_first_rank()) {
    std::printf("parameters are equal on all %d ranks\n", distributed::world_size());
  }
}

void Trainer::run() {
  prepare_save_folder();
  open_log();
  if (is_first_rank()) {
    std::printf(
        "%lld parameters, %lld tokens to train on, %lld to validate with, %d x %d threads\n",
        static_cast<long long>(num_parameters_), static_cast<long long>(corpus_.training.size()),
        static_cast<long long>(corpus_.validation.size()), distributed::world_size(),
        num_threads());
  }
  if (muon_ && is_sharded()) {
    const std::string report = distributed::report_update(*muon_).describe();
    if (is_first_rank()) std::printf("%s", report.c_str());
  }
  std::signal(SIGINT, request_stop);
  const bool follows = log_ != nullptr || isatty(STDOUT_FILENO) != 0;
  auto begin = Clock::now();  // of the steps since the last one that was read
  int64_t unread = 0;
  while (step_ < options_.steps && !stop_) {
    const Tensor step_loss = train_step();
    ++unread;
    stop_ |= step_ == options_.stop_at;
    const bool last = step_ == options_.steps || stop_;
    const bool evaluate = last || (options_.eval_every > 0 && step_ % options_.eval_every == 0);
    const bool logs = evaluate || step_ % options_.log_every == 0;
    // Reading a number costs nothing on the CPU, and on a GPU the time until it is made.
    const bool due = options_.save_every > 0 && step_ % options_.save_every == 0;
    const bool saves = last || due || save_now_;
    if (device_.is_cpu() || evaluate || saves || (follows && logs) || step_ % kShowEvery == 0) {
      const double loss = step_loss.item();
      const double milliseconds =
          std::chrono::duration<double, std::milli>(Clock::now() - begin).count() /
          static_cast<double>(unread);
      // Where ranks hold parts of the parameters, all of them have to run the model.
      const bool validates = evaluate && (is_first_rank() || is_sharded());
      const std::optional<double> val_loss = validates ? std::optional(validate()) : std::nullopt;
      if (is_first_rank()) {
        if (logs) log_row(loss, val_loss, milliseconds);
        if (logs || step_ % kShowEvery == 0) show(loss, val_loss, milliseconds, last);
      }
      TS_CHECK(std::isfinite(loss), "train", "the loss is ", loss, " at step ", step_,
               "; lower --lr or raise --warmup. The last save is kept");
      begin = Clock::now();
      unread = 0;
    }
    if (saves) save();
  }
  if (log_ != nullptr) std::fclose(log_);
  if (!options_.save.empty() && is_first_rank()) {
    std::printf("saved to %s\n", options_.save.c_str());
  }
  check_replicas();
}

}  // namespace
}  // namespace tessera::examples

int main(int argc, char** argv) {
  return tessera::run(argc, argv, [&](auto) {
    const tessera::examples::TrainOptions options = tessera::examples::parse_options(argc, argv);
    const tessera::Device device = tessera::accelerate::rank_device(options.device, "--device");
    const tessera::distributed::ProcessGroup processes({.device = device});
    tessera::examples::Trainer(options, device).run();
  });
}
