#include "task.h"

#include <filesystem>

#include <tessera/autograd/autograd.h>
#include <tessera/precision/autocast.h>

namespace tessera::examples {

using namespace nn::models;

void TaskOptions::add_to(CLI::App& app) {
  app.add_option("--data", data, "folder with bert/, intent/ and pairs/")->required();
  app.add_option("--task", task)->check(CLI::IsMember({"intents", "qnli", "mrpc"}));
  app.add_option("--model", model, "a BERT folder of transformers to begin from");
  app.add_option("--save", save, "folder for the trained model");
  app.add_option("--mixed-precision,--dtype", mixed_precision,
                 "default: as the launch, the environment or a settings file say")
      ->check(CLI::IsMember({"no", "f32", "bf16", "fp16", "fp8"}));
  app.add_option("--fp8-recipe", fp8_recipe, "with fp8: whose maxima scale the operands")
      ->check(CLI::IsMember(
          {"tensorwise", "current", "delayed", "rowwise", "rowwise_with_gw_hp", "blockwise"}));
  app.add_option("--fp8-filter", fp8_filter, "with fp8: which linear layers")
      ->check(CLI::IsMember({"default", "all", "pays"}));
  app.add_option("--epochs", epochs)->check(CLI::PositiveNumber);
  app.add_option("--batch-size", batch_size, "of one rank")->check(CLI::PositiveNumber);
  app.add_option("--accumulate", accumulate, "micro-batches of an update")
      ->check(CLI::PositiveNumber);
  app.add_option("--max-length", max_length, "tokens of a text")->check(CLI::PositiveNumber);
  app.add_option("--train-rows", train_rows, "train on so many examples; 0: all");
  app.add_option("--width", width)->check(CLI::PositiveNumber);
  app.add_option("--layers", layers)->check(CLI::PositiveNumber);
  app.add_option("--heads", heads)->check(CLI::PositiveNumber);
  app.add_option("--lr", lr);
  app.add_option("--dropout", dropout);
  app.add_option("--tp-size,--tp_size", tp_size, "ranks that share each layer");
  app.add_option("--weight-decay", weight_decay);
  app.add_option("--seed", seed)->check(CLI::NonNegativeNumber);
}

std::optional<Precision> TaskOptions::precision() const {
  if (mixed_precision.empty()) return std::nullopt;
  if (mixed_precision == "bf16") return Precision::kBF16;
  if (mixed_precision == "fp8") return Precision::kFP8;
  return mixed_precision == "fp16" ? Precision::kFP16 : Precision::kNo;
}

Fp8Options TaskOptions::fp8() const {
  Fp8Options options;
  if (!fp8_recipe.empty()) options.recipe = precision::Fp8Recipe::named(fp8_recipe).scaling;
  if (!fp8_filter.empty()) options.filter = precision::fp8_filter_named(fp8_filter);
  return options;
}

namespace {

Task read_parts(const TaskOptions& options, const data::WordPieceTokenizer& tokenizer) {
  const std::string& root = options.data;
  const int64_t length = options.max_length;
  if (options.task == "intents") {
    Task task;
    task.labels = read_label_names(root + "/intent/banking77-categories.json");
    const auto read = [&](const char* part) {
      return read_intents(root + "/intent/banking77-" + part + ".csv", task.labels, tokenizer,
                          length);
    };
    task.train = read("train"), task.validation = read("test");
    return task;
  }
  if (options.task == "mrpc") {
    return {read_mrpc(root + "/pairs/mrpc-sample-train.csv", tokenizer, length),
            read_mrpc(root + "/pairs/mrpc-sample-dev.csv", tokenizer, length),
            {"not_equivalent", "equivalent"}};
  }
  const auto all = read_qnli(root + "/pairs/qnli-dev.tsv", tokenizer, length);
  std::vector<TextExample> train, validation;
  for (int64_t i = 0; i < all->size(); ++i) {
    (i % 10 == 0 ? validation : train).push_back(all->get(i));
  }
  return {std::make_shared<TextDataset>(std::move(train)),
          std::make_shared<TextDataset>(std::move(validation)),
          {"entailment", "not_entailment"}};
}

}  // namespace

data::WordPieceTokenizer make_tokenizer(const TaskOptions& options) {
  const bool has_own =
      !options.model.empty() && std::filesystem::exists(options.model + "/vocab.txt");
  return data::WordPieceTokenizer::from_pretrained(has_own ? options.model
                                                           : options.data + "/bert");
}

Task read_task(const TaskOptions& options, const data::WordPieceTokenizer& tokenizer) {
  Task task = read_parts(options, tokenizer);
  const int64_t rows = options.train_rows, all = task.train->size();
  if (rows > 0 && rows < all) {
    task.train =
        data::random_split(task.train, {rows, all - rows}, static_cast<uint64_t>(options.seed))[0];
  }
  return task;
}

std::unique_ptr<Bert> make_model(const TaskOptions& options, const Task& task, int64_t vocab_size,
                                 const Accelerator& accelerator) {
  const auto labels = static_cast<int64_t>(task.labels.size());
  if (options.model.empty()) {
    return std::make_unique<Bert>(BertConfig{.vocab_size = vocab_size,
                                             .width = options.width,
                                             .layers = options.layers,
                                             .heads = options.heads,
                                             .context = options.max_length,
                                             .labels = labels,
                                             .dropout = options.dropout,
                                             .attention_dropout = options.dropout,
                                             .label_names = task.labels});
  }
  std::vector<std::string> fresh;
  auto model = Bert::from_pretrained(options.model, &fresh);
  TS_CHECK_AS(ConfigError, model->config.labels == labels, options.model, "holds a model of ",
              model->config.labels, " labels, and the task has ", labels, "; choose another");
  for (const auto& name : fresh) accelerator.print("fresh: ", name);
  return model;
}

ClassificationScore evaluate(Accelerator& accelerator, Bert& model,
                             data::DataLoader<TextExample>& loader) {
  const NoGradGuard no_grad;
  model.eval();
  ClassificationScore score(model.config.labels);
  for (auto& batch : loader) {
    const Tensor logits =
        model(batch.ids, TokenFeatures{.type_ids = batch.type_ids, .lengths = batch.lengths})
            .logits;
    const auto [predictions, labels] =
        accelerator.gather_for_metrics(std::pair(logits.argmax(-1), batch.labels));
    score.add(predictions, labels);
  }
  model.train();
  return score;
}

std::string fp8_calls_of(const Bert& model) {
  const auto layers = precision::fp8_of(model);
  if (!layers) return {};
  const precision::Fp8Report report = layers->report();
  return "  fp8_calls " + std::to_string(report.fp8_calls()) + "  fp8_fallbacks " +
         std::to_string(report.fallbacks());
}

double f1_of(const ClassificationScore& score, const Task& task) {
  return task.labels.size() == 2 ? score.f1(1) : score.macro_f1();
}

}  // namespace tessera::examples
