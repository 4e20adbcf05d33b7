// Labelled texts and pairs of texts as token ids, and their batches.
//
//     const auto tokenizer = data::WordPieceTokenizer::from_pretrained("bert");
//     auto intents = examples::read_intents("intent/banking77-train.csv", labels, tokenizer, 64);
//     data::DataLoader loader(intents, {.batch_size = 32, .shuffle = true});
//     for (examples::TextBatch& batch : loader) ...
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <tessera/core/tensor/tensor.h>
#include <tessera/data/collate.h>
#include <tessera/data/dataset.h>
#include <tessera/data/text/wordpiece.h>

namespace tessera::examples {

struct TextExample {
  std::vector<data::TokenId> ids, type_ids;
  int64_t label = 0;
};

// Padded on the right to the longest example of the batch.
struct TextBatch {
  Tensor ids, type_ids;    // i64[B, T]
  Tensor lengths, labels;  // i64[B]
  void visit_tensors(auto&& visit) { visit(ids), visit(type_ids), visit(lengths), visit(labels); }
};

class TextDataset : public data::Dataset<TextExample> {
 public:
  explicit TextDataset(std::vector<TextExample> examples) : examples_(std::move(examples)) {}
  int64_t size() const override { return static_cast<int64_t>(examples_.size()); }
  TextExample get(int64_t index) const override;
  int64_t longest() const;

 private:
  std::vector<TextExample> examples_;
};
using TextDatasetPtr = std::shared_ptr<TextDataset>;

// A JSON array of label names; FormatError for anything else.
std::vector<std::string> read_label_names(const std::string& path);

// CSV with the columns text and category (Banking77, Casanueva et al. 2020). FormatError naming
// file and line for a category that `labels` lacks; max_length counts [CLS] and [SEP].
TextDatasetPtr read_intents(const std::string& path, const std::vector<std::string>& labels,
                            const data::WordPieceTokenizer& tokenizer, int64_t max_length);

// TSV with the columns question, sentence, label (QNLI of GLUE): 0 entailment, 1 not_entailment.
// `rows` > 0 takes that many from the beginning.
TextDatasetPtr read_qnli(const std::string& path, const data::WordPieceTokenizer& tokenizer,
                         int64_t max_length, int64_t rows = 0);

// CSV with the columns label, sentence1, sentence2 (MRPC): 0 not_equivalent, 1 equivalent.
TextDatasetPtr read_mrpc(const std::string& path, const data::WordPieceTokenizer& tokenizer,
                         int64_t max_length);

}  // namespace tessera::examples

template <>
struct tessera::data::Collate<tessera::examples::TextExample> {
  static tessera::examples::TextBatch batch(std::span<tessera::examples::TextExample> examples);
};
