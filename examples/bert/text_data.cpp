#include "text_data.h"

#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include <tessera/autograd/ops.h>
#include <tessera/data/csv.h>

namespace tessera::examples {
namespace {

int64_t label_of(const data::CsvTable& table, int64_t row, std::string_view column,
                 const std::map<std::string, int64_t, std::less<>>& labels) {
  const std::string_view name = table.cell(row, column);
  const auto found = labels.find(name);
  TS_CHECK_AS(FormatError, found != labels.end(), table.file(), "line ", table.line_of(row),
              ": the ", column, " '", name, "' is none of the ", labels.size(),
              " known; is it the right file?");
  return found->second;
}

TextExample to_example(data::Encoding encoding, int64_t label) {
  return {std::move(encoding.ids), std::move(encoding.type_ids), label};
}

}  // namespace

TextExample TextDataset::get(int64_t index) const {
  TS_CHECK_INDEX(index >= 0 && index < size(), "TextDataset", "has examples 0 to ", size() - 1,
                 "; got ", index);
  return examples_[static_cast<size_t>(index)];
}

int64_t TextDataset::longest() const {
  size_t longest = 0;
  for (const auto& example : examples_) longest = std::max(longest, example.ids.size());
  return static_cast<int64_t>(longest);
}

std::vector<std::string> read_label_names(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  TS_CHECK_AS(IoError, file, path, "cannot be read");
  const auto json = nlohmann::json::parse(file, nullptr, false);
  TS_CHECK_AS(FormatError, json.is_array(), path, "must hold a JSON array of label names");
  std::vector<std::string> names;
  for (const auto& name : json) {
    TS_CHECK_AS(FormatError, name.is_string(), path, "must hold texts; one is ", name.dump());
    names.push_back(name.get<std::string>());
  }
  return names;
}

TextDatasetPtr read_intents(const std::string& path, const std::vector<std::string>& labels,
                            const data::WordPieceTokenizer& tokenizer, int64_t max_length) {
  std::map<std::string, int64_t, std::less<>> ids;
  for (size_t i = 0; i < labels.size(); ++i) ids[labels[i]] = static_cast<int64_t>(i);
  const data::CsvTable table = data::read_csv(path);
  std::vector<TextExample> examples;
  for (int64_t row = 0; row < table.num_rows(); ++row) {
    examples.push_back(
        to_example(tokenizer.encode_text(table.cell(row, "text"), {.max_length = max_length}),
                   label_of(table, row, "category", ids)));
  }
  return std::make_shared<TextDataset>(std::move(examples));
}

TextDatasetPtr read_qnli(const std::string& path, const data::WordPieceTokenizer& tokenizer,
                         int64_t max_length, int64_t rows) {
  const std::map<std::string, int64_t, std::less<>> labels = {{"entailment", 0},
                                                              {"not_entailment", 1}};
  const data::CsvTable table = data::read_csv(path, data::kTsv);
  const int64_t count = rows > 0 ? std::min(rows, table.num_rows()) : table.num_rows();
  std::vector<TextExample> examples;
  for (int64_t row = 0; row < count; ++row) {
    examples.push_back(
        to_example(tokenizer.encode_pair(table.cell(row, "question"), table.cell(row, "sentence"),
                                         {.max_length = max_length}),
                   label_of(table, row, "label", labels)));
  }
  return std::make_shared<TextDataset>(std::move(examples));
}

TextDatasetPtr read_mrpc(const std::string& path, const data::WordPieceTokenizer& tokenizer,
                         int64_t max_length) {
  const std::map<std::string, int64_t, std::less<>> labels = {{"not_equivalent", 0},
                                                              {"equivalent", 1}};
  const data::CsvTable table = data::read_csv(path);
  std::vector<TextExample> examples;
  for (int64_t row = 0; row < table.num_rows(); ++row) {
    examples.push_back(
        to_example(tokenizer.encode_pair(table.cell(row, "sentence1"), table.cell(row, "sentence2"),
                                         {.max_length = max_length}),
                   label_of(table, row, "label", labels)));
  }
  return std::make_shared<TextDataset>(std::move(examples));
}

}  // namespace tessera::examples

tessera::examples::TextBatch tessera::data::Collate<tessera::examples::TextExample>::batch(
    std::span<tessera::examples::TextExample> examples) {
  TS_CHECK(!examples.empty(), "collate", "a batch needs an example; got none");
  size_t length = 0;
  for (const auto& example : examples) length = std::max(length, example.ids.size());
  const auto rows = static_cast<int64_t>(examples.size()), columns = static_cast<int64_t>(length);
  examples::TextBatch batch;
  // 0 is [PAD] in BERT's vocabularies, the first text, and "no token".
  batch.ids = zeros({rows, columns}, {.dtype = kI64});
  batch.type_ids = zeros({rows, columns}, {.dtype = kI64});
  batch.lengths = empty({rows}, {.dtype = kI64});
  batch.labels = empty({rows}, {.dtype = kI64});
  for (size_t row = 0; row < examples.size(); ++row) {
    const examples::TextExample& example = examples[row];
    std::copy(example.ids.begin(), example.ids.end(), batch.ids.data_as<int64_t>() + row * length);
    std::copy(example.type_ids.begin(), example.type_ids.end(),
              batch.type_ids.data_as<int64_t>() + row * length);
    batch.lengths.data_as<int64_t>()[row] = static_cast<int64_t>(example.ids.size());
    batch.labels.data_as<int64_t>()[row] = example.label;
  }
  return batch;
}
