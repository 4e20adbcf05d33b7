// A BERT that learns to tell texts apart: the plain loop of the Accelerator, as one process or
// many.
//
//     nlp_example --data FOLDER                 77 intents of bank customers, from random weights
//     nlp_example --data FOLDER --task qnli     does the sentence answer the question?
//     tessera launch -n 2 nlp_example --data FOLDER --mixed-precision bf16
//     nlp_example --data FOLDER --dtype fp8 --fp8-recipe delayed
//     tessera launch --mixed-precision fp8 --fp8-filter all nlp_example --data FOLDER
//
// FOLDER has bert/vocab.txt, intent/ and pairs/. --model takes a BERT folder of transformers to
// begin from, with its vocabulary where it has one; --save writes one. complete_nlp_example adds checkpoints and tracking.
#include <chrono>
#include <cstdio>

#include <tessera/accelerate/process/run.h>
#include <tessera/optim/optimizers.h>
#include <tessera/optim/schedule.h>

#include "task.h"

using namespace tessera;

namespace {

double train(const examples::TaskOptions& options) {
  Accelerator accelerator({.mixed_precision = options.precision(),
                           .gradient_accumulation_steps = options.accumulate,
                           .seed = options.seed,
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
  accelerator.prepare(*model, optimizer, loader, validation);
  // Counts updates, so it is made when the loader knows its share.
  const int64_t updates =
      options.epochs * ((loader.size() + options.accumulate - 1) / options.accumulate);
  optim::PolynomialSchedule schedule(optimizer, {.warmup = updates / 12, .total = updates});
  accelerator.prepare(schedule);

  const auto begin = std::chrono::steady_clock::now();
  double accuracy = 0;
  for (int64_t epoch = 1; epoch <= options.epochs; ++epoch) {
    double loss_sum = 0;
    for (auto& batch : loader) {
      const auto micro = accelerator.accumulate(*model);
      const auto out =
          (*model)(batch.ids,
                   nn::models::TokenFeatures{.type_ids = batch.type_ids, .lengths = batch.lengths},
                   batch.labels);
      accelerator.backward(out.loss);
      accelerator.clip_grad_norm(model->parameters(), 1.0);
      optimizer.step();
      schedule.step();
      optimizer.zero_grad();
      loss_sum += out.loss.item();
    }
    const auto score = examples::evaluate(accelerator, *model, validation);
    accuracy = score.accuracy();
    char line[160];
    std::snprintf(line, sizeof line,
                  "epoch %lld  loss %.4f  accuracy %.4f  f1 %.4f  samples %lld  %.1f s",
                  static_cast<long long>(epoch), loss_sum / static_cast<double>(loader.size()),
                  accuracy, examples::f1_of(score, task), static_cast<long long>(score.samples()),
                  std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    accelerator.print(line, examples::fp8_calls_of(*model));
  }
  if (!options.save.empty()) {
    const StateDict weights = accelerator.get_state_dict(*model);
    accelerator.on_main_process([&] { model->save_pretrained(weights, options.save); });
    accelerator.print("saved ", options.save);
  }
  return accuracy;
}

}  // namespace

int main(int argc, char** argv) {
  examples::TaskOptions options;
  double at_least = 0, accuracy = 0;
  CLI::App app("A BERT that learns to tell texts apart");
  options.add_to(app);
  app.add_option("--at-least", at_least, "accuracy that must be reached, or exit code 1");
  CLI11_PARSE(app, argc, argv);
  const int failed =
      run(argc, argv, [&](std::span<const std::string>) { accuracy = train(options); });
  return failed || accuracy < at_least;
}
