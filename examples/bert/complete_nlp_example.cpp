// nlp_example with what a long training needs: checkpoints that resume to the bit, also after
// SIGTERM and on another number of ranks, and trackers.
//
//     complete_nlp_example --data FOLDER --project-dir runs/intents --track jsonl,tensorboard
//     complete_nlp_example --data FOLDER --project-dir runs/intents --resume
//
// --checkpoint-every N saves every N updates; each epoch ends with a checkpoint. The last three and
// the best one by accuracy stay.
#include <cstdio>

#include <tessera/accelerate/process/run.h>
#include <tessera/accelerate/state/state_io.h>
#include <tessera/accelerate/tracking/progress.h>
#include <tessera/optim/optimizers.h>
#include <tessera/optim/schedule.h>

#include "task.h"

using namespace tessera;

namespace {

struct Options : examples::TaskOptions {
  std::string project_dir = "out/nlp";
  bool resume = false;
  int64_t checkpoint_every = 0;
  std::vector<std::string> track = {"jsonl"};
};

// What the loop itself counts; a checkpoint holds it beside the objects' states.
struct LoopState {
  int64_t updates = 0;
  double loss_sum = 0;  // of this epoch
  int64_t batches = 0;
  StateDict state_dict() const {
    StateDict state;
    state.set("updates", full({}, updates, {.dtype = kI64}));
    state.set("loss_sum", full({}, loss_sum, {.dtype = kF64}));
    state.set("batches", full({}, batches, {.dtype = kI64}));
    return state;
  }
  void load_state_dict(const StateDict& state) {
    const auto get = [&](const char* name) { return state.find(name)->item(); };
    updates = static_cast<int64_t>(get("updates")), loss_sum = get("loss_sum");
    batches = static_cast<int64_t>(get("batches"));
  }
};

void train(const Options& options) {
  Accelerator accelerator({.mixed_precision = options.precision(),
                           .gradient_accumulation_steps = options.accumulate,
                           .seed = options.seed,
                           .project_dir = options.project_dir,
                           .log_with = options.track,
                           .automatic_checkpoint_naming = true,
                           .total_limit = 3,
                           .keep_best = 1,
                           .larger_is_better = true,
                           .tp_size = options.tp_size,
                           .tp_sequence = options.tp_sequence(),
                           .fp8 = options.fp8()});
  const auto tokenizer = examples::make_tokenizer(options);
  const examples::Task task = examples::read_task(options, tokenizer);
  data::DataLoader<examples::TextExample> loader(
      task.train, {.batch_size = options.batch_size, .shuffle = true});
  data::DataLoader<examples::TextExample> validation(task.validation, {.batch_size = 64});
  const auto model = examples::make_model(options, task, tokenizer.vocab_size(), accelerator);
  optim::AdamW optimizer(model->named_parameters(),
                         {.lr = options.lr, .weight_decay = options.weight_decay});
  accelerator.prepare(*model, optimizer, loader);
  const int64_t updates =
      options.epochs * ((loader.size() + options.accumulate - 1) / options.accumulate);
  optim::PolynomialSchedule schedule(optimizer, {.warmup = updates / 12, .total = updates});
  LoopState loop;
  accelerator.prepare(schedule, validation);
  accelerator.register_for_checkpointing(loop);
  accelerator.init_trackers("nlp", {{"task", options.task},
                                    {"lr", options.lr},
                                    {"batch_size", options.batch_size},
                                    {"ranks", accelerator.num_processes()}});
  if (options.resume) {
    const auto loaded = accelerator.load_state();
    accelerator.print("resumed ", loaded.folder, " after ", loop.updates, " updates");
  }

  Progress progress(
      updates,
      {.description = options.task, .enabled = accelerator.is_main_process(), .unit = "updates"});
  progress.advance(loop.updates);
  while (loop.updates < updates) {
    for (auto& batch : loader) {
      {
        const auto micro = accelerator.accumulate(*model);
        const auto out = (*model)(
            batch.ids,
            nn::models::TokenFeatures{.type_ids = batch.type_ids, .lengths = batch.lengths},
            batch.labels);
        accelerator.backward(out.loss);
        accelerator.clip_grad_norm(model->parameters(), 1.0);
        optimizer.step();
        schedule.step();
        optimizer.zero_grad();
        loop.loss_sum += out.loss.item();
        ++loop.batches;
      }
      if (!accelerator.sync_gradients()) continue;
      ++loop.updates;
      progress.advance();
      const RunRequest request = accelerate::should_checkpoint(accelerator.world());
      const bool due = options.checkpoint_every > 0 && loop.updates % options.checkpoint_every == 0;
      if (due || request != RunRequest::kNone) accelerator.save_state();
      if (request == RunRequest::kCheckpointAndStop) {
        accelerator.print("stopped after ", loop.updates, " updates; --resume goes on");
        accelerator.end_training();
        return;
      }
    }
    const double loss = loop.loss_sum / static_cast<double>(loop.batches);
    loop.loss_sum = 0, loop.batches = 0;
    const auto score = examples::evaluate(accelerator, *model, validation);
    accelerator.log(
        {{"train", {{"loss", loss}, {"lr", optimizer.lr()}}},
         {"validation", {{"accuracy", score.accuracy()}, {"f1", examples::f1_of(score, task)}}}},
        loop.updates);
    char line[120];
    std::snprintf(line, sizeof line, "after %lld updates  loss %.6f  accuracy %.4f",
                  static_cast<long long>(loop.updates), loss, score.accuracy());
    accelerator.print(line, examples::fp8_calls_of(*model));
    accelerator.save_state({}, {.metric = score.accuracy()});
  }
  if (!options.save.empty()) {
    const StateDict weights = accelerator.get_state_dict(*model);
    accelerator.on_main_process([&] { model->save_pretrained(weights, options.save); });
  }
  accelerator.end_training();
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("A BERT that learns to tell texts apart, with checkpoints and tracking");
  options.add_to(app);
  app.add_option("--project-dir", options.project_dir, "checkpoints and what trackers write");
  app.add_flag("--resume", options.resume, "go on from the newest checkpoint that is whole");
  app.add_option("--checkpoint-every", options.checkpoint_every, "updates; 0: only epochs");
  app.add_option("--track", options.track, "jsonl, csv, tensorboard, all")->delimiter(',');
  CLI11_PARSE(app, argc, argv);
  return run(argc, argv, [&](std::span<const std::string>) { train(options); });
}
