// Packed documents: rows of a batch that hold several documents each, which attention keeps apart.
//
//     data::DataLoader loader(packed, {.batch_size = 8});  // data::PackedDataset
//     for (auto& batch : loader) {
//       const auto documents = nn::document_bounds(batch.position_ids);
//       Tensor loss = model({batch.inputs, documents}, batch.targets).loss;
//     }
//
// Gpt, Llama and Bert take such rows. Attention costs what the documents cost (AttentionOptions::
// starts), positions begin at 0 in each document, and on a CPU the bits of a document's attention
// are those of the document alone. A row may be longer than the model's context, a document not.
#pragma once

#include <cstdint>
#include <utility>

#include <tessera/core/tensor/tensor.h>

namespace tessera::nn {

struct Documents {
  Tensor position_ids;  // [B, T] i64: each token's place in its document
  Tensor starts, ends;  // [B, T] i32: where its document begins and ends in the row

  bool defined() const { return position_ids.defined(); }
  void visit_tensors(auto&& visit) { visit(position_ids), visit(starts), visit(ends); }
};

// From position ids, [B, T] i64 or i32, which begin at 0 in each document and rise by one, as
// transformers has them for packed batches; padding behind the last document is a document of its
// own. Or from cu_seqlens, [N + 1] i64 or i32, of one row of N documents: 0, their ends in the row,
// all ascending. ShapeError, DTypeError; ValueError for other numbers. Position ids on a GPU are
// not read by the host: there attention reports wrong ones (IndexError).
Documents document_bounds(const Tensor& given);

// Token ids [B, T], of documents where the rows are packed. A tensor of ids is one.
struct TokenRows {
  TokenRows(Tensor ids, Documents documents = {})
      : ids(std::move(ids)), documents(std::move(documents)) {}

  Tensor ids;
  Documents documents;
  void visit_tensors(auto&& visit) { visit(ids), visit(documents); }
};

// ShapeError, in the name of `where`, unless ids are [B, T] and the documents, if any, of that
// shape.
void check_rows(const char* where, const TokenRows& rows);

}  // namespace tessera::nn
