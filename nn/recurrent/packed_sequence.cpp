#include <tessera/nn/recurrent/packed_sequence.h>

#include <algorithm>
#include <numeric>

#include <tessera/autograd/ops.h>

namespace tessera::nn {
namespace {

Tensor index_of(const std::vector<int64_t>& positions, const Device& device) {
  return to(tensor(positions, {static_cast<int64_t>(positions.size())}, kI64), device);
}

Shape with_leading(const Shape& leading, const Tensor& x, int from) {
  Shape shape = leading;
  for (int d = from; d < x.dim(); ++d) shape.push_back(x.size(d));
  return shape;
}

// The rows of data, and behind them one of `value`, by `positions`, of which -1 is that one.
Tensor rows_or(const Tensor& data, double value, std::vector<int64_t> positions) {
  const int64_t behind = data.size(0);
  for (int64_t& position : positions) {
    if (position < 0) position = behind;
  }
  const Tensor row =
      full(with_leading({1}, data, 1), value, {.dtype = data.dtype(), .device = data.device()});
  return index_select(cat(TensorList{data, row}, 0), 0, index_of(positions, data.device()));
}

void check_packed(const char* where, const Tensor& data, const std::vector<int64_t>& sizes) {
  const int64_t total = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  TS_CHECK_SHAPE(data.defined() && data.dim() >= 1 && data.size(0) == total, where,
                 "batch_sizes sum to ", total, " rows; got ", data);
  TS_CHECK(!sizes.empty() && sizes.back() > 0 && std::ranges::is_sorted(sizes, std::greater<>()),
           where, "batch_sizes must be positive and not ascend");
}

}  // namespace

PackedSequence pack_padded_sequence(const Tensor& x, const std::vector<int64_t>& lengths,
                                    bool batch_first, bool enforce_sorted) {
  constexpr const char* kWhere = "pack_padded_sequence";
  TS_CHECK_SHAPE(x.defined() && x.dim() >= 2, kWhere, "expects ",
                 batch_first ? "[N, L, ...]" : "[L, N, ...]", "; got ", x);
  const int64_t L = x.size(batch_first ? 1 : 0), N = x.size(batch_first ? 0 : 1);
  TS_CHECK(static_cast<int64_t>(lengths.size()) == N && N > 0, kWhere,
           "needs a length for each of the ", N, " sequences of ", x, "; got ", lengths.size());
  for (const int64_t length : lengths) {
    TS_CHECK(length >= 1 && length <= L, kWhere, "lengths must be in [1, ", L, "]; got ", length);
  }
  PackedSequence packed;
  std::vector<int64_t> order(static_cast<size_t>(N));
  std::iota(order.begin(), order.end(), int64_t{0});
  const auto length_of = [&](int64_t n) { return lengths[static_cast<size_t>(n)]; };
  if (!std::ranges::is_sorted(lengths, std::greater<>())) {
    TS_CHECK(!enforce_sorted, kWhere,
             "lengths must not ascend; sort the sequences or pass enforce_sorted = false");
    std::ranges::stable_sort(order, std::greater<>(), length_of);
    packed.sorted_indices = order;
    packed.unsorted_indices.resize(order.size());
    for (size_t i = 0; i < order.size(); ++i) {
      packed.unsorted_indices[static_cast<size_t>(order[i])] = static_cast<int64_t>(i);
    }
  }
  std::vector<int64_t> rows;  // of x seen as [L * N, ...] or [N * L, ...]
  for (int64_t t = 0; t < length_of(order[0]); ++t) {
    int64_t size = 0;
    for (; size < N && length_of(order[static_cast<size_t>(size)]) > t; ++size) {
      const int64_t n = order[static_cast<size_t>(size)];
      rows.push_back(batch_first ? n * L + t : t * N + n);
    }
    packed.batch_sizes.push_back(size);
  }
  packed.data =
      index_select(reshape(x, with_leading({L * N}, x, 2)), 0, index_of(rows, x.device()));
  return packed;
}

PackedSequence pack_sequence(const TensorList& sequences, bool enforce_sorted) {
  std::vector<int64_t> lengths;
  for (const Tensor& sequence : sequences) {
    TS_CHECK_SHAPE(sequence.defined() && sequence.dim() >= 1, "pack_sequence",
                   "expects sequences [length, ...]; got ", sequence);
    lengths.push_back(sequence.size(0));
  }
  return pack_padded_sequence(pad_sequence(sequences), lengths, false, enforce_sorted);
}

PaddedSequence pad_packed_sequence(const PackedSequence& packed, bool batch_first,
                                   double padding_value, std::optional<int64_t> total_length) {
  constexpr const char* kWhere = "pad_packed_sequence";
  const std::vector<int64_t>& sizes = packed.batch_sizes;
  check_packed(kWhere, packed.data, sizes);
  const auto longest = static_cast<int64_t>(sizes.size());
  const int64_t N = sizes[0], L = total_length.value_or(longest);
  TS_CHECK(L >= longest, kWhere, "total_length must be at least the longest length, ", longest,
           "; got ", L);
  const auto place_of = [&](int64_t n) {
    return packed.unsorted_indices.empty() ? n : packed.unsorted_indices[static_cast<size_t>(n)];
  };
  std::vector<int64_t> first = {0};
  for (const int64_t size : sizes) first.push_back(first.back() + size);
  PaddedSequence result;
  for (int64_t n = 0; n < N; ++n) {
    result.lengths.push_back(
        std::ranges::count_if(sizes, [&](int64_t size) { return size > place_of(n); }));
  }
  std::vector<int64_t> rows;
  const auto add_row = [&](int64_t t, int64_t n) {
    const bool inside = t < result.lengths[static_cast<size_t>(n)];
    rows.push_back(inside ? first[static_cast<size_t>(t)] + place_of(n) : -1);
  };
  for (int64_t outer = 0; outer < (batch_first ? N : L); ++outer) {
    for (int64_t inner = 0; inner < (batch_first ? L : N); ++inner) {
      batch_first ? add_row(inner, outer) : add_row(outer, inner);
    }
  }
  const Shape leading = batch_first ? Shape{N, L} : Shape{L, N};
  result.sequence = reshape(rows_or(packed.data, padding_value, std::move(rows)),
                            with_leading(leading, packed.data, 1));
  return result;
}

Tensor pad_sequence(const TensorList& sequences, bool batch_first, double padding_value) {
  TS_CHECK(!sequences.empty(), "pad_sequence", "needs at least one sequence");
  int64_t longest = 0;
  for (const Tensor& sequence : sequences) {
    TS_CHECK_SHAPE(sequence.defined() && sequence.dim() >= 1, "pad_sequence",
                   "expects sequences [length, ...]; got ", sequence);
    longest = std::max(longest, sequence.size(0));
  }
  TensorList padded;
  for (const Tensor& sequence : sequences) {
    Shape sizes = Shape::filled(2 * sequence.dim(), 0);
    sizes[2 * sequence.dim() - 1] = longest - sequence.size(0);
    padded.push_back(pad(sequence, sizes, Pad::kConstant, padding_value));
  }
  return stack(padded, batch_first ? 0 : 1);
}

Tensor detail::reordered(const Tensor& x, const std::vector<int64_t>& order) {
  return order.empty() ? x : index_select(x, 1, index_of(order, x.device()));
}

}  // namespace tessera::nn
