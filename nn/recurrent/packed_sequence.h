// Sequences of different lengths without their padding, as torch.nn.utils.rnn. LSTM, GRU and RNN
// take them, so that nothing is calculated after a sequence's end and final states are those of its
// last step.
//
//     nn::PackedSequence packed = nn::pack_padded_sequence(x, {5, 3, 2});  // x: [5, 3, in]
//     nn::LSTM lstm(16, 32);
//     nn::PackedLstmResult result = lstm(packed);
//     nn::PaddedSequence padded = nn::pad_packed_sequence(result.output);  // [5, 3, 32]
//
// The sequences are stored by descending length. Sequences in another order are sorted, and states
// and pad_packed_sequence use the original order. Lengths are host values. Packing and padding are
// one gather each. Throws ShapeError, ValueError.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <tessera/core/tensor/tensor.h>

namespace tessera::nn {

struct PackedSequence {
  Tensor data;                       // [sum of lengths, ...]: step by step, sequences in order
  std::vector<int64_t> batch_sizes;  // for each step, how many sequences reach it
  // For each stored sequence, its original index; empty if sorted already.
  std::vector<int64_t> sorted_indices = {};
  // Its inverse.
  std::vector<int64_t> unsorted_indices = {};
  void visit_tensors(auto&& visit) { visit(data); }
};

// x: [L, N, ...], or [N, L, ...] with batch_first; a length in [1, L] for each of the N.
// enforce_sorted: lengths that do not descend are an error instead of being sorted.
PackedSequence pack_padded_sequence(const Tensor& x, const std::vector<int64_t>& lengths,
                                    bool batch_first = false, bool enforce_sorted = true);
// Packs sequences of shape [length, ...].
PackedSequence pack_sequence(const TensorList& sequences, bool enforce_sorted = true);

struct PaddedSequence {
  Tensor sequence;               // [L, N, ...], or [N, L, ...] with batch_first
  std::vector<int64_t> lengths;  // of the sequences in original order
};
// total_length: L, at least (and by default) the longest length.
PaddedSequence pad_packed_sequence(const PackedSequence& packed, bool batch_first = false,
                                   double padding_value = 0,
                                   std::optional<int64_t> total_length = {});
// Pads N sequences [length, ...] to [longest length, N, ...] (batch_first: [N, ...]).
Tensor pad_sequence(const TensorList& sequences, bool batch_first = false,
                    double padding_value = 0);

namespace detail {
// x with dimension 1 in another order; x itself where `order` is empty.
Tensor reordered(const Tensor& x, const std::vector<int64_t>& order);
}  // namespace detail

}  // namespace tessera::nn
