// Windows of a token sequence for language models: inputs, and as targets the same ids shifted by
// one.
#pragma once

#include <cstdint>

#include <tessera/core/tensor/tensor.h>
#include <tessera/data/dataset.h>
#include <tessera/data/text/token_file.h>

namespace tessera::data {

// One window or a batch of them; all i64.
struct TokenExample {
  Tensor inputs;   // [context] or [B, context]
  Tensor targets;  // the same shape; kIgnoreTarget where there is no id to predict
  void visit_tensors(auto&& visit) { visit(inputs), visit(targets); }
};

// The target that losses ignore (cross_entropy's default ignore_index).
inline constexpr int64_t kIgnoreTarget = -100;

// Windows at random positions: the position is a pure function of (seed, step, row), uniform over
// the sequence, so that a step has the same windows on any number of ranks and after any restart.
//
// As a Dataset it has steps * rows examples: example step * rows + row. Read it in order, with a
// batch size of `rows` or a part of it.
class RandomWindows : public Dataset<TokenExample> {
 public:
  // ValueError if the sequence has no window (fewer than context + 1 ids), or for a context, rows
  // or steps out of range.
  RandomWindows(TokenArray tokens, int64_t context, uint64_t seed, int64_t rows = 1,
                int64_t steps = int64_t{1} << 40);

  int64_t size() const override { return rows_ * steps_; }
  TokenExample get(int64_t index) const override;

  // Rows [first_row, first_row + rows) of a step, without a loader.
  TokenExample batch(int64_t step, int64_t rows, int64_t first_row = 0) const;
  // The position of a row's window.
  int64_t start(int64_t step, int64_t row) const;

 private:
  TokenArray tokens_;
  int64_t context_;
  uint64_t seed_;
  int64_t rows_, steps_;
};

// The sequence from its first to its last id, each target once, in consecutive windows. The last
// one is filled up with input 0 and target kIgnoreTarget. For the loss over a whole text.
class ConsecutiveWindows : public Dataset<TokenExample> {
 public:
  ConsecutiveWindows(TokenArray tokens, int64_t context);  // ValueError if context < 1
  int64_t size() const override;
  TokenExample get(int64_t index) const override;
  int64_t num_targets() const { return std::max<int64_t>(tokens_.size() - 1, 0); }

 private:
  TokenArray tokens_;
  int64_t context_;
};

}  // namespace tessera::data
