// Attention on own tiles: one description for the kernels of attention.cu, which take anything, and
// those of attention_tensor.cu, which take f16 and bf16 on tensor cores.
#pragma once

#include <cmath>

#include <tessera/core/cuda/movable_stream.h>
#include <tessera/core/dispatch.h>
#include <tessera/core/kernels/attention/attention.h>
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

struct TiledAttention {
  int64_t H, group, T, S, E, Ev;  // group: query heads of a key head
  double scale, dropout;
  double kept_scale;  // of probabilities that dropout leaves
  bool causal, has_mask;
  DType mask_dtype;
  HeadsView<char> mask;    // its strides in bytes
  const int32_t* lengths;  // of each sample's keys, in [1, S]; nullptr: all have S
  MovableStream stream;
  AttentionDraws draws;
  TS_DEVICE int64_t keys_of(int64_t b) const { return lengths != nullptr ? lengths[b] : S; }
};

template <class T>
struct TiledGradients {
  HeadsView<T> query, key, value, output, grad_output, grad_query, grad_key, grad_value;
  const Compute<T>* log_sums;  // (B, H, T)
  Compute<T>* deltas;          // (B, H, T): sum of dy y
};

// scale (q k) + mask, or -infinity where the query does not see the key. `keys`: of the sample.
template <class A>
TS_DEVICE A score_of(const TiledAttention& p, A product, int64_t keys, int64_t b, int64_t h,
                     int64_t t, int64_t s) {
  if (t >= p.T || s >= keys || (p.causal && s > t)) return -static_cast<A>(INFINITY);
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

// Which rows a block owns, of tiles of kTile; the longest walks of a causal problem begin first.
struct TilePlace {
  int64_t b, h, row0;
};
template <int kTile>
TS_DEVICE TilePlace place_of(int64_t heads, int64_t rows, bool last_first) {
  const int64_t tiles = (rows + kTile - 1) / kTile;
  const int64_t tile = blockIdx.x % tiles, pair = blockIdx.x / tiles;
  return {pair / heads, pair % heads, (last_first ? tiles - 1 - tile : tile) * kTile};
}

// `lengths`: as prepare_lengths() gives them.
inline TiledAttention problem_of(const Tensor& query, const Tensor& key, const Tensor& value,
                                 const Tensor& lengths, const AttentionSpec& spec) {
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
      .lengths = lengths.defined() ? lengths.data_as<int32_t>() + query.size(0) : nullptr,
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
