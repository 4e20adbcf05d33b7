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
//     tessera launch -n 4 -- train --data shakespeare.txt --pp-size 4 --accumulate 8   # stages
//     train --data shakespeare.txt --optimizer muon     # matrices of the blocks by Muon, the rest
//                                                       # by AdamW; with any --sharding
//
// A saved folder holds a model that transformers can load (config.json, model.safetensors, of gpt2
// the vocabulary: vocab.json, merges.txt), and in training/ a checkpoint of the Accelerator, which
// is all that it takes to go on. Each is replaced in one step, the checkpoint first: a save that
// fails or is cut off leaves whole what was there before.
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include <tessera/accelerate/accelerator.h>
#include <tessera/accelerate/process/run.h>
#include <tessera/autograd/autograd.h>
#include <tessera/core/io/atomic_file.h>
#include <tessera/core/memory/allocator.h>
#include <tessera/core/parallel.h>
#include <tessera/data/dataloader.h>
#include <tessera/distributed/fully_shard/update_report.h>
#include <tessera/nn/models/gpt2.h>
#include <tessera/optim/muon.h>
#include <tessera/optim/optimizers.h>
#include <tessera/optim/schedule.h>
#include <tessera/precision/autocast.h>

#include "corpus.h"
#include "options.h"
#include "training_log.h"

namespace tessera::examples {
namespace {

using namespace nn::models;

using accelerate::RankReduction;
using Clock = std::chrono::steady_clock;

AcceleratorOptions settings_of(const TrainOptions& options) {
  using accelerate::Sharding;
  static const std::map<std::string, Sharding> kModes = {
      {"none", Sharding::kDdp},    {"ddp", Sharding::kDdp},     {"zero1", Sharding::kZero1},
      {"zero2", Sharding::kZero2}, {"zero3", Sharding::kZero3}, {"fsdp", Sharding::kFsdp}};
  AcceleratorOptions settings{.gradient_accumulation_steps = options.accumulate,
                              .cuda_graphs = options.graph,
                              .device = options.device};
  if (!options.sharding.empty()) settings.sharding = kModes.at(options.sharding);
  if (options.pp_size > 1) {
    settings.pp = {.size = options.pp_size,
                   .schedule = options.pp_schedule == "gpipe"
                                   ? distributed::PipelineSchedule::kGPipe
                                   : distributed::PipelineSchedule::kOneFOneB,
                   .stages_per_rank = options.pp_stages_per_rank};
  }
  if (options.tp_size > 0) settings.tp_size = options.tp_size;
  if (options.dtype == "fp8") {
    settings.mixed_precision = Precision::kFP8;
    settings.fp8.recipe = precision::Fp8Recipe::named(options.fp8_recipe).scaling;
    settings.fp8.filter = precision::fp8_filter_named(options.fp8_filter);
  }
  return settings;
}

void check(const TrainOptions& options, const Accelerator& accelerator) {
  TS_CHECK_AS(ConfigError, options.sharding != "none" || !accelerator.use_distributed(), "train",
              "--sharding none is a training of one rank, of ", accelerator.num_processes(),
              " that there are; leave it out, or take ddp");
  TS_CHECK_AS(ConfigError, !options.graph || accelerator.device().is_cuda(), "train",
              "--graph repeats what a GPU does; give --device cuda, or leave it out");
  TS_CHECK_AS(ConfigError, !options.graph || options.pp_size == 1, "train",
              "--graph repeats steps of one stage; leave it out, or --pp-size 1");
}

std::unique_ptr<Gpt> make_model(TrainOptions& options, const data::Tokenizer& tokenizer) {
  const std::string source = options.resume.empty() ? options.init_from : options.resume;
  std::unique_ptr<Gpt> model;
  if (!source.empty()) {
    model = Gpt::from_pretrained(source);
    TS_CHECK_AS(ConfigError, model->config.vocab_size >= tokenizer.vocab_size(), "train",
                "the model in '", source, "' knows ", model->config.vocab_size,
                " tokens, the tokenizer '", options.tokenizer, "' makes ", tokenizer.vocab_size(),
                "; choose the --tokenizer it was trained with");
    options.context = std::min(options.context, model->config.context);
  } else {
    model = std::make_unique<Gpt>(GptConfig{.vocab_size = tokenizer.vocab_size(),
                                            .context = options.context,
                                            .width = options.width,
                                            .layers = options.layers,
                                            .heads = options.heads,
                                            .dropout = options.dropout,
                                            .end_of_text = tokenizer.end_of_text().value_or(-1),
                                            .tokenizer = options.tokenizer});
  }
  if (options.dtype == "bf16") model->to(kBF16);
  return model;
}

// AdamW, and with --optimizer muon Muon for the matrices of the blocks.
struct Optimizers {
  Optimizers(const Gpt& model, const TrainOptions& options) {
    optim::MuonParameters split{{}, model.named_parameters()};
    const DType states = options.states == "bf16" ? kBF16 : kF32;
    const auto curve = [&](double min_lr) {
      return optim::Cosine{
          .warmup = options.warmup, .total = options.schedule_steps, .min_lr = min_lr};
    };
    if (options.optimizer == "muon") {
      // The embeddings, whose table is the head's too, are matrices by shape alone.
      split = optim::split_for_muon(split.others, {"transformer.wte", "transformer.wpe"});
      muon = std::make_unique<optim::Muon>(
          split.matrices,
          optim::MuonOptions{
              .lr = options.muon_lr, .weight_decay = options.weight_decay, .state_dtype = states});
      // AdamW's curve, to the same share of its highest rate.
      const double share = options.lr > 0 ? options.min_lr / options.lr : 0;
      muon_schedule =
          std::make_unique<optim::CosineSchedule>(*muon, curve(share * options.muon_lr));
    }
    // Weight decay on matrices; biases and norms go without.
    NamedTensors matrices, others;
    for (const NamedTensor& named : split.others) {
      (named.tensor.dim() >= 2 ? matrices : others).push_back(named);
    }
    optim::AdamWOptions decayed{.lr = options.lr,
                                .betas = {options.beta1, options.beta2},
                                .weight_decay = options.weight_decay,
                                .state_dtype = states};
    optim::AdamWOptions plain = decayed;
    plain.weight_decay = 0;
    using Group = optim::ParameterGroup<optim::AdamWOptions>;
    adamw =
        std::make_unique<optim::AdamW>(std::vector<Group>{{matrices, decayed}, {others, plain}});
    schedule = std::make_unique<optim::CosineSchedule>(*adamw, curve(options.min_lr));
  }

  void step() {
    adamw->step(), adamw->zero_grad();
    if (muon) muon->step(), muon->zero_grad();
  }
  void step_schedules() {
    schedule->step();
    if (muon_schedule) muon_schedule->step();
  }

  std::unique_ptr<optim::AdamW> adamw;
  std::unique_ptr<optim::Muon> muon;  // null without
  std::unique_ptr<optim::CosineSchedule> schedule, muon_schedule;
};

// Of all ranks alike: where they hold parts of the parameters, all have to run the model.
double validation_loss(Gpt& model, Pipeline& pipeline, const data::TokenArray& tokens,
                       const TrainOptions& options, const Device& device) {
  const NoGradGuard no_grad;
  model.eval();
  const auto windows = std::make_shared<data::ConsecutiveWindows>(tokens, options.context);
  double sum = 0;
  // As many windows at once as a training step has, or about a thousand tokens.
  const int64_t at_once = std::max(options.batch_size, 1 + 1024 / options.context);
  int64_t targets_left = windows->num_targets();
  data::DataLoader loader(windows, {.batch_size = at_once, .device = device});
  for (const data::TokenExample& batch : loader) {
    const int64_t targets = std::min(targets_left, batch.targets.numel());  // without padding
    const TensorList losses =
        pipeline.evaluate(std::vector{batch}, [&](const data::TokenExample& one) -> Tensor {
          return model(one.inputs, one.targets).loss;
        });
    sum += losses[0].item() * static_cast<double>(targets);
    targets_left -= targets;
  }
  model.train();
  return sum / static_cast<double>(windows->num_targets());
}

// What can go wrong does so before the first step, not after hours of training.
void prepare_save_folder(const TrainOptions& options) {
  if (options.save.empty()) return;
  std::error_code error;
  std::filesystem::create_directories(options.save, error);
  TS_CHECK_AS(IoError, !error, "train", "cannot make the folder '", options.save,
              "': ", error.message(), "; choose a --save folder that can be written");
  const AtomicFile probe(options.save + "/model.safetensors");  // removed, not committed
  copy_tokenizer_files(options.tokenizer, options.tokenizer_files, options.save);
}

void tell_beginning(const Accelerator& accelerator, const Optimizers& optimizers,
                    int64_t num_parameters, const Corpus& corpus) {
  std::string report;
  if (optimizers.muon && accelerator.distributed_type() != "no" &&
      accelerator.distributed_type() != "ddp") {
    report = distributed::report_update(*optimizers.muon).describe();
  }
  if (!accelerator.is_main_process()) return;
  std::printf(
      "%lld parameters, %lld tokens to train on, %lld to validate with, %d x %d threads\n%s",
      static_cast<long long>(num_parameters), static_cast<long long>(corpus.training.size()),
      static_cast<long long>(corpus.validation.size()), accelerator.num_processes(), num_threads(),
      report.c_str());
}

void save(Accelerator& accelerator, const Gpt& model, const std::string& folder) {
  if (folder.empty()) return;
  accelerator.save_state(TrainOptions::checkpoint_in(folder));
  const StateDict weights = accelerator.get_state_dict(model);
  accelerator.on_main_process([&] { model.save_pretrained(weights, folder); });
}

void train(TrainOptions options) {
  if (options.threads > 0) set_num_threads(options.threads);
  Accelerator accelerator(settings_of(options));
  check(options, accelerator);
  accelerator.set_seed(options.seed, /*device_specific=*/false, options.deterministic);
  const auto tokenizer = make_tokenizer(options.tokenizer, options.tokenizer_files);
  const auto model = make_model(options, *tokenizer);
  const int64_t num_parameters = model->num_parameters();
  const Corpus corpus = read_corpus(options.data, *tokenizer, options.context);
  const Device device = accelerator.device();
  data::DataLoader loader(
      std::make_shared<data::RandomWindows>(corpus.training, options.context, options.seed),
      {.batch_size = options.batch_size, .workers = device.is_cuda() ? 1 : 0});
  Optimizers optimizers(*model, options);
  accelerator.prepare(*model, optimizers.adamw, optimizers.muon, loader, optimizers.schedule,
                      optimizers.muon_schedule);
  Pipeline pipeline = accelerator.pipeline(*model);
  if (!options.resume.empty()) accelerator.load_state(TrainOptions::checkpoint_in(options.resume));
  accelerator.on_main_process([&] { prepare_save_folder(options); });
  accelerator.state_io().register_save_state_pre_hook([&](auto&, const std::string& folder) {
    accelerator.on_main_process(
        [&] { write_file_atomically(folder + "/options.json", options.resumed_text()); });
  });
  int64_t step = optimizers.schedule->current_step();
  TrainingLog log(accelerator.is_main_process() ? options.log : "",
                  options.resume.empty() ? std::nullopt : std::optional(step));
  const bool is_followed = accelerator.broadcast_object(log.is_followed());
  const int ranks = accelerator.data_ranks().size();
  tell_beginning(accelerator, optimizers, num_parameters, corpus);

  // Loss and gradient norm stay on the device: a GPU works on while the host queues the next step.
  auto micro_batch = accelerator.graphed_step([&](const TensorList& batch) -> TensorList {
    const auto micro = accelerator.accumulate(*model);
    const Tensor loss = (*model)(batch[0], batch[1]).loss;
    accelerator.backward(loss);
    const Tensor norm =
        accelerator.clip_grad_norm(model->parameters(), options.clip > 0 ? options.clip : HUGE_VAL);
    optimizers.step();
    return {loss, norm};
  });
  // By stages a step is one call.
  const auto step_by_stages = [&]() -> TensorList {
    std::vector<data::TokenExample> window;
    for (int64_t i = 0; i < options.accumulate; ++i) window.push_back(*loader.next());
    const Tensor loss = pipeline.step(window, [&](const data::TokenExample& batch) -> Tensor {
      return (*model)(batch.inputs, batch.targets).loss;
    });
    const Tensor norm =
        accelerator.clip_grad_norm(model->parameters(), options.clip > 0 ? options.clip : HUGE_VAL);
    optimizers.step();
    return {loss * static_cast<double>(options.accumulate), norm};
  };
  std::signal(SIGINT, [](int) { std::raise(SIGTERM); });  // Ctrl-C saves, as SIGTERM does
  auto begin = Clock::now();                              // of the steps since the last row
  int64_t unread = 0;
  for (bool last = false; step < options.steps && !last;) {
    Tensor loss = zeros({}, {.dtype = kF64, .device = device});
    Tensor norm;
    do {
      TensorList results;
      if (options.pp_size > 1) {
        results = step_by_stages();
      } else {
        const std::optional<data::TokenExample> batch = loader.next();
        results = micro_batch({batch->inputs, batch->targets});
      }
      loss = loss + results[0].to(kF64);
      norm = results[1];
    } while (!accelerator.sync_gradients());
    optimizers.step_schedules();
    ++step, ++unread;

    const auto is_due = [&](int64_t every) { return every > 0 && step % every == 0; };
    const RunRequest request = accelerate::should_checkpoint(accelerator.world());
    last = step == options.steps || step == options.stop_at ||
           request == RunRequest::kCheckpointAndStop;
    const bool validates = last || is_due(options.eval_every);
    const bool saves = last || is_due(options.save_every) || request == RunRequest::kCheckpoint;
    const bool logs = validates || is_due(options.log_every);
    // Reading a number costs nothing on the CPU, and on a GPU the time until it is made.
    if (device.is_cpu() || validates || saves || (is_followed && logs) ||
        TrainingLog::is_shown(step)) {
      const auto micro_batches = static_cast<double>(options.accumulate * ranks);
      StepRow row{.step = step,
                  .loss = accelerator.reduce(loss, RankReduction::kSum).item() / micro_batches};
      row.milliseconds = std::chrono::duration<double, std::milli>(Clock::now() - begin).count() /
                         static_cast<double>(unread);
      row.tokens_per_s = 1e3 / row.milliseconds * micro_batches *
                         static_cast<double>(options.batch_size * options.context);
      row.peak_bytes = accelerator.gather_object(std::vector{memory_stats()->peak()});
      if (validates)
        row.val_loss = validation_loss(*model, pipeline, corpus.validation, options, device);
      if (accelerator.is_main_process()) {
        row.grad_norm = norm.item();
        row.lr = optimizers.adamw->lr();
        if (const auto fp8 = precision::fp8_of(*model)) row.fp8 = fp8->report();
        if (logs) log.write(row);
        if (logs || TrainingLog::is_shown(step)) log.show(row, options.steps, last);
      }
      TS_CHECK(std::isfinite(row.loss), "train", "the loss is ", row.loss, " at step ", step,
               "; lower --lr or raise --warmup. The last save is kept");
      begin = Clock::now();
      unread = 0;
    }
    if (saves) save(accelerator, *model, options.save);
  }
  if (!options.save.empty()) {
    accelerator.on_main_process([&] { std::printf("saved to %s\n", options.save.c_str()); });
  }
}

}  // namespace
}  // namespace tessera::examples

int main(int argc, char** argv) {
  return tessera::run(argc, argv, [&](auto) {
    tessera::examples::train(tessera::examples::parse_options(argc, argv));
  });
}
