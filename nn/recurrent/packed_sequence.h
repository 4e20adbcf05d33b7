// Sequences of different lengths without their padding, as torch.nn.utils.rnn: what LSTM, GRU and
// RNN take, so that nothing is calculated behind a sequence's end and states are those of its last
// step.
//
//     nn::PackedSequence packed = nn::pack_padded_sequence(x, {5, 3, 2});  // x: [5, 3, in]
//     nn::LSTM lstm(16, 32);
//     nn::PackedLstmResult result = lstm(packed);
//     nn::PaddedSequence padded = nn::pad_packed_sequence(result.output);  // [5, 3, 32]
//
// The sequences stand in the order of their lengths, the longest first; those that are given in
// another order are sorted, and states and pad_packed_sequence are in the order given. Lengths are
// numbers of the host. Packing and padding are one gather each. Throws ShapeError, ValueError.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <tessera/core/tensor/tensor.h>

namespace tessera::nn {

struct PackedSequence {
  Tensor data;                       // [sum of lengths, ...]: step by step, in each the sequences
  std::vector<int64_t> batch_sizes;  // of each step: how many sequences reach it
  // Of each place in a step, the sequence as it was given; empty: in the order given.
  std::vector<int64_t> sorted_indices = {};
  // Its inverse.
  std::vector<int64_t> unsorted_indices = {};
  void visit_tensors(auto&& visit) { visit(data); }
};

// x: [L, N, ...], or [N, L, ...] with batch_first; a length in [1, L] for each of the N.
// enforce_sorted: lengths that do not descend are an error instead of being sorted.
PackedSequence pack_padded_sequence(const Tensor& x, const std::vector<int64_t>& lengths,
                                    bool batch_first = false, bool enforce_sorted = true);
// Of sequences [length, ...] each.
PackedSequence pack_sequence(const TensorList& sequences, bool enforce_sorted = true);

struct PaddedSequence {
  Tensor sequence;               // [L, N, ...], or [N, L, ...] with batch_first
  std::vector<int64_t> lengths;  // of each sequence, in the order given
};
// total_length: L, at least the longest length, which it is by default.
PaddedSequence pad_packed_sequence(const PackedSequence& packed, bool batch_first = false,
                                   double padding_value = 0,
                                   std::optional<int64_t> total_length = {});
// [longest length, N, ...] (batch_first: [N, ...]) of N sequences [length, ...].
Tensor pad_sequence(const TensorList& sequences, bool batch_first = false,
                    double padding_value = 0);

namespace detail {
// x with dimension 1 in another order; x itself where `order` is empty.
Tensor reordered(const Tensor& x, const std::vector<int64_t>& order);
}  // namespace detail

}  // namespace tessera::nn
