#include <tessera/core/kernels/attention/attention_pieces.h>

#include <algorithm>
#include <limits>

#include <tessera/core/error.h>
#include <tessera/core/kernels/attention/attention.h>

namespace tessera::kernels {
namespace {

constexpr std::string_view kWhere = "scaled_dot_product_attention";

struct Bounds {
  std::vector<int64_t> starts, ends;  // [B, T], or empty

  explicit Bounds(const AttentionSpec& spec) {
    if (spec.starts.defined()) starts = spec.starts.to_vector<int64_t>();
    if (spec.ends.defined()) ends = spec.ends.to_vector<int64_t>();
  }
  // Of query t, whose row among all is `row`.
  int64_t start(size_t row) const { return starts.empty() ? 0 : starts[row]; }
  int64_t end(size_t row, int64_t t, int64_t S) const {
    return ends.empty() ? std::min(t + 1, S) : ends[row];
  }
};

void check(const Bounds& bounds, int64_t B, int64_t T, int64_t S) {
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t t = 0; t < T; ++t) {
      const auto row = static_cast<size_t>(b * T + t);
      const int64_t start = bounds.start(row), end = bounds.end(row, t, S);
      if (bounds.ends.empty()) {
        TS_CHECK_INDEX(start >= 0 && start <= t, kWhere, "query ", t, " of sample ", b,
                       " has the start ", start,
                       "; without ends a query sees no key behind its own place, so that a start "
                       "is in [0, ",
                       t, "]");
      } else {
        TS_CHECK_INDEX(start >= 0 && start <= end && end <= S, kWhere, "query ", t, " of sample ",
                       b, " sees the keys from ", start, " to ", end,
                       ", which must ascend and lie in [0, ", S, "]");
      }
    }
  }
}

// Says how a piece's queries see its keys, and counts their ranges from its first key.
void finish(AttentionPiece& piece, KeyRange* ranges) {
  const auto first = static_cast<int32_t>(piece.key);
  bool all = true, causal = true;
  for (int64_t i = 0; i < piece.queries; ++i) {
    KeyRange& range = ranges[i];
    if (range.begin == range.end) {
      range = {0, 0};
    } else {
      range = {range.begin - first, range.end - first};
    }
    all = all && range.begin == 0 && range.end == piece.keys;
    causal = causal && range.begin == 0 && range.end == std::min(i + 1, piece.keys);
  }
  piece.causal = causal && !all;
  piece.ranged = !causal && !all;
}

}  // namespace

AttentionPieces attention_pieces(const AttentionSpec& spec, int64_t B, int64_t T, int64_t S) {
  AttentionPieces result;
  if (!spec.starts.defined() && !spec.ends.defined()) {
    std::vector<int64_t> lengths;
    if (spec.lengths.defined()) lengths = spec.lengths.to_vector<int64_t>();
    for (int64_t b = 0; b < B; ++b) {
      const int64_t keys = lengths.empty() ? S : lengths[static_cast<size_t>(b)];
      TS_CHECK_INDEX(lengths.empty() || (keys >= 1 && keys <= S), kWhere, "sample ", b,
                     " has a length of ", keys, ", which is not in [1, ", S, "]");
      result.pieces.push_back({.sample = b,
                               .query = 0,
                               .queries = T,
                               .key = 0,
                               .keys = keys,
                               .padding = S - keys,
                               .causal = spec.causal,
                               .ranged = false});
    }
    return result;
  }
  const Bounds bounds(spec);
  check(bounds, B, T, S);
  result.ranges.resize(static_cast<size_t>(B * T));
  // The first key that queries from t on see.
  std::vector<int64_t> next(static_cast<size_t>(T) + 1);
  for (int64_t b = 0; b < B; ++b) {
    KeyRange* const ranges = result.ranges.data() + b * T;
    next[static_cast<size_t>(T)] = std::numeric_limits<int64_t>::max();
    for (int64_t t = T - 1; t >= 0; --t) {
      const auto row = static_cast<size_t>(b * T + t);
      const int64_t start = bounds.start(row), end = std::max(start, bounds.end(row, t, S));
      ranges[t] = {static_cast<int32_t>(start), static_cast<int32_t>(end)};
      const int64_t after = next[static_cast<size_t>(t) + 1];
      next[static_cast<size_t>(t)] = start < end ? std::min(start, after) : after;
    }
    // A query begins a piece if it sees keys, none of them before one that was seen by a query
    // before it. Those that see none stay with the queries before them.
    const size_t first_piece = result.pieces.size();
    AttentionPiece piece{.sample = b,
                         .query = 0,
                         .queries = 0,
                         .key = 0,
                         .keys = 0,
                         .padding = 0,
                         .causal = false,
                         .ranged = false};
    int64_t seen = 0;  // keys before this one were
    for (int64_t t = 0; t < T; ++t) {
      if (ranges[t].begin == ranges[t].end) continue;
      const int64_t begin = next[static_cast<size_t>(t)];
      if (seen > 0 && begin >= seen) {
        piece.queries = t - piece.query;
        piece.keys = begin - piece.key;
        result.pieces.push_back(piece);
        piece.query = t;
        piece.key = begin;
      }
      seen = std::max<int64_t>(seen, ranges[t].end);
    }
    piece.queries = T - piece.query;
    piece.keys = S - piece.key;
    result.pieces.push_back(piece);
    for (size_t i = first_piece; i < result.pieces.size(); ++i) {
      AttentionPiece& found = result.pieces[i];
      // Keys at its end that nobody sees are padding.
      int64_t last = found.key;
      for (int64_t t = found.query; t < found.query + found.queries; ++t) {
        if (ranges[t].begin < ranges[t].end) last = std::max<int64_t>(last, ranges[t].end);
      }
      found.padding = found.key + found.keys - last;
      found.keys = last - found.key;
      finish(found, ranges + found.query);
    }
  }
  return result;
}

double ranged_pairs(const AttentionSpec& spec, int64_t T, int64_t S) {
  const Bounds bounds(spec);
  double pairs = 0;
  for (size_t row = 0; row < std::max(bounds.starts.size(), bounds.ends.size()); ++row) {
    const int64_t t = static_cast<int64_t>(row) % T;
    pairs += static_cast<double>(std::max<int64_t>(bounds.end(row, t, S) - bounds.start(row), 0));
  }
  return pairs;
}

}  // namespace tessera::kernels
