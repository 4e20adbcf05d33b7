// Fine-tunes a BERT on texts of your own.
//
//     fine_tune_bert bert-base-uncased texts.csv out/classifier
//
// The first is a folder of transformers (config.json, model.safetensors, vocab.txt), as
// `huggingface-cli download` makes it; the table has the columns `text` and `label`, a label being
// any text. The result is such a folder again, which transformers loads, and `serve`.
#include <filesystem>
#include <map>

#include <tessera.h>

#include "bert/text_data.h"

using namespace tessera;

void fine_tune(const std::string& folder, const std::string& table_file, const std::string& out) {
  Accelerator accelerator({.seed = 1});
  const auto tokenizer = data::WordPieceTokenizer::from_pretrained(folder);
  const data::CsvTable table = data::read_csv(table_file);

  std::map<std::string, int64_t> labels;  // in alphabetical order
  for (int64_t row = 0; row < table.num_rows(); ++row) {
    labels[std::string(table.cell(row, "label"))] = 0;
  }
  nn::models::BertConfig config = nn::models::BertConfig::read(folder + "/config.json");
  config.labels = static_cast<int64_t>(labels.size());
  config.label_names.clear();
  for (auto& [name, id] : labels) {
    id = static_cast<int64_t>(config.label_names.size());
    config.label_names.push_back(name);
  }
  std::vector<examples::TextExample> examples;
  for (int64_t row = 0; row < table.num_rows(); ++row) {
    auto encoding = tokenizer.encode_text(table.cell(row, "text"), {.max_length = config.context});
    examples.push_back({std::move(encoding.ids), std::move(encoding.type_ids),
                        labels.at(std::string(table.cell(row, "label")))});
  }
  const auto texts = std::make_shared<examples::TextDataset>(std::move(examples));
  const int64_t known = texts->size() * 9 / 10;
  const auto parts = data::random_split(texts, {known, texts->size() - known}, /*seed=*/1);
  data::DataLoader<examples::TextExample> loader(parts[0], {.batch_size = 16, .shuffle = true});
  data::DataLoader<examples::TextExample> validation(parts[1], {.batch_size = 64});

  nn::models::Bert model(config);
  std::vector<std::string> fresh;  // the classifier, which no checkpoint before fine-tuning has
  model.load_weights(folder + "/model.safetensors", &fresh);
  for (const std::string& name : fresh) accelerator.print("from random values: ", name);
  optim::AdamW optimizer(model.named_parameters(), {.lr = 5e-5, .weight_decay = 0.01});
  accelerator.prepare(model, optimizer, loader, validation);
  const int64_t epochs = 3;
  optim::PolynomialSchedule schedule(optimizer, {.total = epochs * loader.size()});
  accelerator.prepare(schedule);

  for (int64_t epoch = 0; epoch < epochs; ++epoch) {
    model.train();
    for (const auto& batch : loader) {
      const auto micro = accelerator.accumulate(model);
      const nn::models::TokenFeatures features{.type_ids = batch.type_ids,
                                               .lengths = batch.lengths};
      accelerator.backward(model(batch.ids, features, batch.labels).loss);
      accelerator.clip_grad_norm(model.parameters(), 1.0);
      optimizer.step(), schedule.step(), optimizer.zero_grad();
    }
    model.eval();
    double right = 0, seen = 0;
    for (const auto& batch : validation) {
      const NoGradGuard no_grad;
      const nn::models::TokenFeatures features{.type_ids = batch.type_ids,
                                               .lengths = batch.lengths};
      const auto [guesses, truth] = accelerator.gather_for_metrics(
          std::pair(model(batch.ids, features).logits.argmax(-1), batch.labels));
      right += eq(guesses, truth).sum().item(), seen += static_cast<double>(truth.size(0));
    }
    accelerator.print("epoch ", epoch, ": ", right / seen, " of ", seen, " texts right");
  }
  const StateDict weights = accelerator.get_state_dict(model);
  accelerator.on_main_process([&] {
    model.save_pretrained(weights, out);
    for (const std::string file : {"/vocab.txt", "/tokenizer_config.json", "/tokenizer.json"}) {
      if (!std::filesystem::exists(folder + file)) continue;
      std::filesystem::copy(folder + file, out + file,
                            std::filesystem::copy_options::overwrite_existing);
    }
  });
}

int main(int argc, char** argv) {
  return run(argc, argv, [](std::span<const std::string> arguments) {
    TS_CHECK(arguments.size() == 3, "fine_tune_bert", "give it FOLDER TABLE OUT");
    fine_tune(arguments[0], arguments[1], arguments[2]);
  });
}
