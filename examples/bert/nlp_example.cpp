// A BERT that learns to tell texts apart: the plain loop of the Accelerator, as one process or
// many.
//
//     nlp_example --data FOLDER                       77 intents of bank customers, from random
//     weights nlp_example --data FOLDER --task qnli           does the sentence answer the
//     question? tessera launch -n 2 nlp_example --data FOLDER --mixed-precision bf16
//
// FOLDER has bert/vocab.txt, intent/ and pairs/. --model takes a BERT folder of transformers to
// begin from; --save writes one.
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>

#include <tessera/accelerate/accelerator.h>
#include <tessera/accelerate/run.h>
#include <tessera/data/dataloader.h>
#include <tessera/optim/adamw.h>
#include <tessera/optim/schedule.h>

#include "../common/classification.h"
#include "model.h"
#include "text_data.h"

using namespace tessera;

namespace {

struct Options {
  std::string data, task = "intents", model, save;
  std::string mixed_precision = "no";
  int64_t epochs = 12, batch_size = 32, accumulate = 1, max_length = 64, train_rows = 0;
  int64_t width = 128, layers = 2, heads = 4;
  double lr = 1e-3, dropout = 0.1, weight_decay = 0.01;
  double at_least = 0;  // accuracy; below it the exit code is 1
  uint64_t seed = 42;
};

struct Task {
  bert::TextDatasetPtr train, validation;
  std::vector<std::string> labels;
};

Task read_task(const Options& options, const data::WordPieceTokenizer& tokenizer) {
  const std::string& root = options.data;
  const int64_t length = options.max_length;
  if (options.task == "intents") {
    Task task;
    task.labels = bert::read_label_names(root + "/intent/banking77-categories.json");
    const auto read = [&](const char* part) {
      return bert::read_intents(root + "/intent/banking77-" + part + ".csv", task.labels, tokenizer,
                                length);
    };
    task.train = read("train"), task.validation = read("test");
    return task;
  }
  if (options.task == "mrpc") {
    return {bert::read_mrpc(root + "/pairs/mrpc-sample-train.csv", tokenizer, length),
            bert::read_mrpc(root + "/pairs/mrpc-sample-dev.csv", tokenizer, length),
            {"not_equivalent", "equivalent"}};
  }
  // Of QNLI only the development part is at hand: every tenth question validates.
  const auto all = bert::read_qnli(root + "/pairs/qnli-dev.tsv", tokenizer, length);
  std::vector<bert::TextExample> train, validation;
  for (int64_t i = 0; i < all->size(); ++i) {
    (i % 10 == 0 ? validation : train).push_back(all->get(i));
  }
  return {std::make_shared<bert::TextDataset>(std::move(train)),
          std::make_shared<bert::TextDataset>(std::move(validation)),
          {"entailment", "not_entailment"}};
}

examples::ClassificationScore evaluate(Accelerator& accelerator, bert::Bert& model,
                                       data::DataLoader<bert::TextExample>& loader) {
  const NoGradGuard no_grad;
  model.eval();
  examples::ClassificationScore score(model.config.labels);
  for (auto& batch : loader) {
    const Tensor logits =
        model(batch.ids, bert::TokenFeatures{batch.type_ids, batch.attention_mask}).logits;
    const auto [predictions, labels] =
        accelerator.gather_for_metrics(std::pair(logits.argmax(-1), batch.labels));
    score.add(predictions, labels);
  }
  model.train();
  return score;
}

int train(const Options& options) {
  Accelerator accelerator({.mixed_precision = options.mixed_precision == "bf16"   ? Precision::kBF16
                                              : options.mixed_precision == "fp16" ? Precision::kFP16
                                                                                  : Precision::kNo,
                           .gradient_accumulation_steps = options.accumulate,
                           .seed = options.seed});

  const auto tokenizer = data::WordPieceTokenizer::from_file(options.data + "/bert/vocab.txt");
  Task task = read_task(options, tokenizer);
  data::DatasetPtr<bert::TextExample> training = task.train;
  if (options.train_rows > 0 && options.train_rows < task.train->size()) {
    training = data::random_split(
        training, {options.train_rows, task.train->size() - options.train_rows}, options.seed)[0];
  }
  data::DataLoader<bert::TextExample> loader(
      training, {.batch_size = options.batch_size, .shuffle = true, .seed = options.seed});
  data::DataLoader<bert::TextExample> validation(task.validation, {.batch_size = 64});

  std::vector<std::string> fresh;
  const auto model = options.model.empty() ? std::make_unique<bert::Bert>(bert::BertConfig{
                                                 .vocab_size = tokenizer.vocab_size(),
                                                 .width = options.width,
                                                 .layers = options.layers,
                                                 .heads = options.heads,
                                                 .context = options.max_length,
                                                 .labels = static_cast<int64_t>(task.labels.size()),
                                                 .dropout = options.dropout,
                                                 .attention_dropout = options.dropout,
                                                 .label_names = task.labels})
                                           : bert::Bert::load(options.model, &fresh);
  TS_CHECK_AS(ConfigError, model->config.labels == static_cast<int64_t>(task.labels.size()),
              "nlp_example", "the task has ", task.labels.size(), " labels and the model in ",
              options.model, " has ", model->config.labels);
  for (const auto& name : fresh) accelerator.print("fresh: " + name);

  optim::AdamW optimizer(model->named_parameters(),
                         {.lr = options.lr, .weight_decay = options.weight_decay});
  accelerator.prepare(*model, optimizer, loader, validation);
  // Counted in updates, so it is made when the loader knows its share.
  const int64_t updates =
      options.epochs * ((loader.size() + options.accumulate - 1) / options.accumulate);
  optim::PolynomialSchedule schedule(optimizer, {.warmup = updates / 12, .total = updates});
  accelerator.prepare(schedule);

  const auto begin = std::chrono::steady_clock::now();
  double accuracy = 0;
  for (int64_t epoch = 1; epoch <= options.epochs; ++epoch) {
    double loss_sum = 0;
    int64_t batches = 0;
    for (auto& batch : loader) {
      const auto micro = accelerator.accumulate(*model);
      const auto out = (*model)(
          batch.ids, bert::TokenFeatures{batch.type_ids, batch.attention_mask}, batch.labels);
      accelerator.backward(out.loss);
      accelerator.clip_grad_norm(model->parameters(), 1.0);
      optimizer.step();
      schedule.step();
      optimizer.zero_grad();
      loss_sum += out.loss.item();
      ++batches;
    }
    const auto score = evaluate(accelerator, *model, validation);
    accuracy = score.accuracy();
    const double f1 = task.labels.size() == 2 ? score.f1(1) : score.macro_f1();
    char line[160];
    std::snprintf(line, sizeof line,
                  "epoch %lld  loss %.4f  accuracy %.4f  f1 %.4f  samples %lld  %.1f s",
                  static_cast<long long>(epoch), loss_sum / static_cast<double>(batches), accuracy,
                  f1, static_cast<long long>(score.samples()),
                  std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    accelerator.print(line);
  }
  if (!options.save.empty()) {
    accelerator.on_main_process([&] { model->save(options.save); });
    accelerator.print("saved " + options.save);
  }
  return accuracy >= options.at_least ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("A BERT that learns to tell texts apart");
  app.add_option("--data", options.data, "folder with bert/, intent/ and pairs/")->required();
  app.add_option("--task", options.task)->check(CLI::IsMember({"intents", "qnli", "mrpc"}));
  app.add_option("--model", options.model, "a BERT folder of transformers to begin from");
  app.add_option("--save", options.save, "folder for the trained model");
  app.add_option("--mixed-precision", options.mixed_precision)
      ->check(CLI::IsMember({"no", "bf16", "fp16"}));
  app.add_option("--epochs", options.epochs)->check(CLI::PositiveNumber);
  app.add_option("--batch-size", options.batch_size, "of one rank")->check(CLI::PositiveNumber);
  app.add_option("--accumulate", options.accumulate, "micro-batches of an update")
      ->check(CLI::PositiveNumber);
  app.add_option("--max-length", options.max_length, "tokens of a text")
      ->check(CLI::PositiveNumber);
  app.add_option("--train-rows", options.train_rows, "train on so many examples; 0: all");
  app.add_option("--width", options.width)->check(CLI::PositiveNumber);
  app.add_option("--layers", options.layers)->check(CLI::PositiveNumber);
  app.add_option("--heads", options.heads)->check(CLI::PositiveNumber);
  app.add_option("--lr", options.lr);
  app.add_option("--dropout", options.dropout);
  app.add_option("--weight-decay", options.weight_decay);
  app.add_option("--seed", options.seed);
  app.add_option("--at-least", options.at_least, "accuracy that must be reached, or exit code 1");
  CLI11_PARSE(app, argc, argv);
  int code = 0;
  const int failed = run(argc, argv, [&](std::span<const std::string>) { code = train(options); });
  return failed != 0 ? failed : code;
}
