// A vocabulary of which each rank has some entries: its rows of a table, its classes of a loss.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <tessera/core/tensor/tensor.h>

namespace tessera::distributed {

struct VocabularyPart {
  std::string axis;   // of the compute mesh
  int64_t first = 0;  // this rank's entries: from here on as many as its weight has rows
  int64_t whole = 0;  // of all ranks
};

// This rank's rows where the index names them, 0 elsewhere: a summand. index: any shape, entries of
// the whole vocabulary. Communicates nothing. IndexError for an entry that no rank has.
// padding_idx: the whole vocabulary's, in [0, whole).
Tensor embedding(const VocabularyPart& part, const Tensor& index, const Tensor& weight,
                 std::optional<int64_t> padding_idx = {});

// The cross-entropy over all classes of the logits x weight^T, invariant: no rank has all logits.
// x: [N, C], replicated; weight: [classes here, C], Shard(0); target: [N] of i64 or i32, entries of
// the whole vocabulary, those equal to ignore_index left out. Three all_reduces of N numbers;
// backward communicates nothing. Keeps [N, classes here] once, in f32 at least.
Tensor linear_cross_entropy(const VocabularyPart& part, const Tensor& x, const Tensor& weight,
                            const Tensor& target, int64_t ignore_index, bool mean);

}  // namespace tessera::distributed
