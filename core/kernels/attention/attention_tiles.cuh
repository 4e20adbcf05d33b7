// Attention on own tiles: one description for the kernels of attention.cu, which take anything, and
// those of attention_tensor.cu, which take f16 and bf16 on tensor cores.
#pragma once

#include <cmath>
#include <limits>

#include <tessera/core/cuda/movable_stream.h>
#include <tessera/core/dispatch.h>
#include <tessera/core/error.h>
#include <tessera/core/kernels/attention/attention.h>
#include <tessera/core/kernels/attention/attention_head.h>
#include <tessera/core/math.h>
#include <tessera/core/random.h>
#include <tessera/core/tensor/tensor.h>
#include <tessera/core/kernels/common/rows.cuh>

namespace tessera::kernels {

template <class T>
struct HeadsView {  // [B, H, rows, columns], strides in elements
  T* data;
  int64_t batch, head, row, column;
  bool vectors;  // 16 bytes along the columns can be loaded at once
  TS_DEVICE T* at(int64_t b, int64_t h, int64_t r) const {
    return data + b * batch + h * head + r * row;
  }
};
template <class T>
HeadsView<T> view_of(const Tensor& x) {
  constexpr int64_t kVector = 16 / static_cast<int64_t>(sizeof(T));
  bool vectors = x.stride(3) == 1 && x.size(3) % kVector == 0 &&
                 reinterpret_cast<uintptr_t>(x.data()) % 16 == 0;
  for (int i = 0; i < 3; ++i) vectors = vectors && x.stride(i) % kVector == 0;
  return {x.data_as<T>(), x.stride(0), x.stride(1), x.stride(2), x.stride(3), vectors};
}

// Of probability (b, h, t, s) of S keys.
TS_DEVICE int64_t number_of(const AttentionDraws& draws, int64_t S, int64_t b, int64_t h, int64_t t,
                            int64_t s) {
  return (draws.first_row + (b * draws.heads + h) * draws.queries + t) * S + s;
}

// Rows of queries that a block owns, and of keys that it reads at a time.
inline constexpr int kAttentionTile = 64;
inline int64_t attention_tiles(int64_t rows) {
  return (rows + kAttentionTile - 1) / kAttentionTile;
}

// Of queries and of keys; a tile may reach beyond them.
inline constexpr int64_t kMostRows = std::numeric_limits<int32_t>::max() - kAttentionTile;

// From begin on, before end. Registers are scarce: rows are counted in 32 bits (kMostRows).
struct SeenKeys {
  int32_t begin, end;
  TS_DEVICE bool has(int64_t s) const {
    const auto key = static_cast<int32_t>(s);
    return key >= begin && key < end;
  }
};

struct TiledAttention {
  int64_t H, group, T, S, E, Ev;  // group: query heads of a key head
  double scale, dropout;
  double kept_scale;  // of probabilities that dropout leaves
  bool causal, has_mask;
  DType mask_dtype;
  HeadsView<char> mask;    // its strides in bytes
  const int32_t* lengths;  // of each sample's keys, in [1, S]; nullptr: all have S
  // The keys of each query, [B, T], and what a tile of queries sees between them, [B, tiles];
  // nullptr: all keys, or the causal ones.
  const KeyRange *ranges, *tile_ranges;
  MovableStream stream;
  AttentionDraws draws;

  TS_DEVICE int64_t keys_of(int64_t b) const { return lengths != nullptr ? lengths[b] : S; }
  // Of the sample's `keys`, whatever the ranges.
  TS_DEVICE SeenKeys seen_at_most(int64_t t, int64_t keys) const {
    if (t >= T) return {0, 0};
    return {0, static_cast<int32_t>(causal && t + 1 < keys ? t + 1 : keys)};
  }
  TS_DEVICE SeenKeys seen_by(int64_t b, int64_t t, int64_t keys) const {
    if (ranges == nullptr || t >= T) return seen_at_most(t, keys);
    const KeyRange range = ranges[b * T + t];
    return {range.begin, range.end};
  }
  // What the queries from t0 on, a tile of them, see, from the beginning of a tile on.
  TS_DEVICE SeenKeys seen_by_tile(int64_t b, int64_t t0, int64_t keys) const {
    constexpr int kTile = kAttentionTile;
    if (ranges == nullptr) {
      return {0, static_cast<int32_t>(causal && t0 + kTile < keys ? t0 + kTile : keys)};
    }
    const KeyRange range = tile_ranges[b * ((T + kTile - 1) / kTile) + t0 / kTile];
    return {range.begin / kTile * kTile, range.end};
  }
  // Whether one of these queries sees one of the keys from s0 on, a tile of them.
  TS_DEVICE bool tile_sees(int64_t b, int64_t t0, int64_t s0) const {
    if (ranges == nullptr) return true;
    const SeenKeys seen = seen_by_tile(b, t0, S);
    return seen.begin < s0 + kAttentionTile && s0 < seen.end;
  }
};

template <class T>
struct TiledGradients {
  HeadsView<T> query, key, value, output, grad_output, grad_query, grad_key, grad_value;
  const Compute<T>* log_sums;  // (B, H, T)
  Compute<T>* deltas;          // (B, H, T): sum of dy y
};

// scale (q k) + mask, or -infinity where the query does not see the key. `seen`: by query t.
template <class A>
TS_DEVICE A score_of(const TiledAttention& p, A product, const SeenKeys& seen, int64_t b, int64_t h,
                     int64_t t, int64_t s) {
  if (!seen.has(s)) return -static_cast<A>(INFINITY);
  A added = 0;
  if (p.has_mask) {
    const char* const m = p.mask.at(b, h, t) + s * p.mask.column;
    switch (p.mask_dtype) {
      case kBool:
        if (!*reinterpret_cast<const bool*>(m)) return -static_cast<A>(INFINITY);
        break;
      case kF64:
        added = static_cast<A>(*reinterpret_cast<const double*>(m));
        break;
      case kF32:
        added = static_cast<A>(*reinterpret_cast<const float*>(m));
        break;
      case kBF16:
        added = static_cast<A>(to_float(*reinterpret_cast<const bf16*>(m)));
        break;
      default:
        added = static_cast<A>(to_float(*reinterpret_cast<const f16*>(m)));
    }
  }
  return product * static_cast<A>(p.scale) + added;
}

// One head's matrix.
template <class T>
struct Matrix {
  T* data;
  int64_t row, column;  // strides
  int64_t rows, columns;
  bool vectors;
};
template <class T>
TS_DEVICE Matrix<T> head_of(const HeadsView<T>& x, int64_t b, int64_t h, int64_t rows,
                            int64_t columns) {
  T* const data = x.data != nullptr ? x.at(b, h, 0) : nullptr;  // no elements, no memory
  return {data, x.row, x.column, rows, columns, x.vectors};
}

// Which rows a block owns; the longest walks of a causal problem begin first.
struct TilePlace {
  int64_t b, h, row0;
};
TS_DEVICE TilePlace place_of(int64_t heads, int64_t rows, bool last_first) {
  const int64_t tiles = (rows + kAttentionTile - 1) / kAttentionTile;
  const int64_t tile = blockIdx.x % tiles, pair = blockIdx.x / tiles;
  return {pair / heads, pair % heads, (last_first ? tiles - 1 - tile : tile) * kAttentionTile};
}

// What kernels read of a spec's bounds, made by one of their own; to be held until they are queued.
struct PreparedKeys {
  Tensor lengths;  // i32 [2, B]: queries and keys of each sample; or undefined
  Tensor ranges;   // i32 [B T + B tiles, 2]: KeyRange of each query, then of each tile of queries
};

inline TiledAttention problem_of(const Tensor& query, const Tensor& key, const Tensor& value,
                                 const PreparedKeys& keys, const AttentionSpec& spec) {
  TS_CHECK_AS(UnsupportedError, query.size(2) <= kMostRows && key.size(2) <= kMostRows,
              "scaled_dot_product_attention", "takes up to ", kMostRows,
              " queries and keys on a GPU; got ", query, " and ", key);
  const int64_t queries = query.size(0) * query.size(2);
  const KeyRange* const ranges =
      keys.ranges.defined() ? static_cast<const KeyRange*>(keys.ranges.data()) : nullptr;
  TiledAttention p{
      .H = query.size(1),
      .group = key.size(1) == 0 ? 1 : query.size(1) / key.size(1),
      .T = query.size(2),
      .S = key.size(2),
      .E = query.size(3),
      .Ev = value.size(3),
      .scale = spec.scale,
      .dropout = spec.dropout,
      .kept_scale = spec.dropout < 1 ? 1 / (1 - spec.dropout) : 0,
      .causal = spec.causal,
      .has_mask = spec.mask.defined(),
      .mask_dtype = kBool,
      .mask = {},
      .lengths = keys.lengths.defined() ? keys.lengths.data_as<int32_t>() + query.size(0) : nullptr,
      .ranges = ranges,
      .tile_ranges = ranges != nullptr ? ranges + queries : nullptr,
      .stream = movable(spec.stream),
      .draws = draws_of(spec.place, query.size(1), query.size(2))};
  if (p.has_mask) {
    const int64_t bytes = size_of(spec.mask.dtype());
    p.mask_dtype = spec.mask.dtype();
    p.mask = {static_cast<char*>(spec.mask.data()), spec.mask.stride(0) * bytes,
              spec.mask.stride(1) * bytes,          spec.mask.stride(2) * bytes,
              spec.mask.stride(3) * bytes,          false};
  }
  return p;
}

// f16 and bf16 of widths to 128, whose probabilities and gradients of scores are rounded to the
// operands' dtype before they are multiplied, as cuDNN does.
inline bool runs_on_tensor_cores(const TiledAttention& p, DType dtype) {
  constexpr int64_t kWidest = 128;
  return is_low_precision(dtype) && p.E > 0 && p.Ev > 0 && p.E <= kWidest && p.Ev <= kWidest;
}
void attention_on_tensor_cores(const TiledAttention& p, const Tensor& query, const Tensor& key,
                               const Tensor& value, const AttentionResult& result);
// B: samples. The deltas of `gradients` are there.
void attention_backward_on_tensor_cores(const TiledAttention& p, int64_t B,
                                        const TiledGradients<bf16>& gradients);
void attention_backward_on_tensor_cores(const TiledAttention& p, int64_t B,
                                        const TiledGradients<f16>& gradients);

}  // namespace tessera::kernels
