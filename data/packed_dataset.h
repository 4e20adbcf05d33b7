// Rows of packed documents for language models: several documents in each row of `context` tokens,
// as many as fit, instead of one and padding.
//
//     auto documents = std::make_shared<data::TokenDocuments>(tokens, 50256);
//     data::PackedDataset packed(documents, {.context = 1024});
//     data::DataLoader loader(packed, {.batch_size = 8, .shuffle = true, .workers = 1});
//     for (auto& batch : loader) {
//       const auto rows = nn::document_bounds(batch.position_ids);  // keeps the documents apart
//       Tensor loss = model({batch.inputs, rows}, batch.targets).loss;
//     }
//
// Which documents make a row is a pure function of their lengths and the options, so a row is read
// by its number: a loader shuffles rows, deals them to ranks and resumes within an epoch exactly,
// as with any data set. Every token is in one row. A target that lies behind a document's end is
// kIgnoreTarget.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <tessera/core/tensor/tensor.h>
#include <tessera/data/dataset.h>
#include <tessera/data/text/token_file.h>
#include <tessera/data/token_dataset.h>

namespace tessera::data {

using TokenDocument = std::vector<TokenId>;

// The documents of a token sequence, each up to and with an id that ends it; what follows the last
// such id is one more. Finding them reads the sequence once.
class TokenDocuments : public Dataset<TokenDocument> {
 public:
  TokenDocuments(TokenArray tokens, TokenId end_of_document);
  int64_t size() const override { return static_cast<int64_t>(ends_.size()); }
  TokenDocument get(int64_t index) const override;
  int64_t length(int64_t index) const;
  std::vector<int64_t> lengths() const;

 private:
  int64_t begin(int64_t index) const {
    return index == 0 ? 0 : ends_[static_cast<size_t>(index) - 1];
  }

  TokenArray tokens_;
  std::vector<int64_t> ends_;
};

// One row, or a batch of them. Padding behind the last document is a document of its own.
struct PackedExample {
  Tensor inputs;        // [context] or [B, context] i64
  Tensor targets;       // i64: the token that follows in the same document, else kIgnoreTarget
  Tensor position_ids;  // i64: 0, 1, ... in each document
  Tensor weights;       // f32: of each target in a loss (PackedOptions::weights); 0 if ignored
  void visit_tensors(auto&& visit) {
    visit(inputs), visit(targets), visit(position_ids), visit(weights);
  }
};

enum class Packing : uint8_t {
  kSequential,          // in order: a document that does not fit begins the next row
  kFirstFitDecreasing,  // of each `buffer` documents the longest first, each into the first row of
                        // these where it fits; rows are then ordered by their first document
};
enum class LongDocuments : uint8_t {
  kError,
  kSplit,  // into parts of `context` tokens, and the rest; positions begin at 0 in each. The last
           // target of a part is the next part's first token, so that no target is lost.
};
enum class TargetWeights : uint8_t {
  kTokens,     // each target 1
  kDocuments,  // each 1 over the number of its document's targets: documents count alike
};
struct PackedOptions {
  int64_t context = 1024;
  Packing packing = Packing::kFirstFitDecreasing;
  int64_t buffer = 1024;  // documents, of kFirstFitDecreasing
  LongDocuments long_documents = LongDocuments::kError;
  TargetWeights weights = TargetWeights::kTokens;
  TokenId padding = 0;  // the input behind the last document
};

class PackedDataset : public Dataset<PackedExample> {
 public:
  // Reads every document once for its length, but TokenDocuments, which know it. ValueError without documents, for a context or buffer
  // below 1, and for a document longer than the context unless long ones are split.
  explicit PackedDataset(DatasetPtr<TokenDocument> documents, const PackedOptions& options = {});
  // With the lengths known.
  PackedDataset(DatasetPtr<TokenDocument> documents, std::span<const int64_t> lengths,
                const PackedOptions& options = {});

  int64_t size() const override { return static_cast<int64_t>(rows_.size()) - 1; }
  // ValueError if a document has not the length that it had.
  PackedExample get(int64_t index) const override;

  // Stretches of documents in a row, in their order.
  struct Part {
    int64_t document;
    int64_t begin, length;  // tokens
  };
  std::span<const Part> parts(int64_t index) const;

  int64_t num_tokens() const { return num_tokens_; }  // of all documents
  // The share of rows' places that are tokens and not padding; 1 without rows.
  double fill() const;

 private:
  void pack();

  DatasetPtr<TokenDocument> documents_;
  PackedOptions options_;
  std::vector<int64_t> lengths_;
  std::vector<Part> parts_;
  std::vector<int64_t> rows_;  // the first part of each row, and at the end their number
  int64_t num_tokens_ = 0;
};

}  // namespace tessera::data
