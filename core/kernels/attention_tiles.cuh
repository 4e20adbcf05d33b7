// Attention on own tiles: one description for the kernels of attention.cu, which take anything, and
// those of attention_tensor.cu, which take f16 and bf16 on tensor cores.
#pragma once

#include <cmath>

#include <tessera/core/dispatch.h>
#include <tessera/core/kernels/attention.h>
#include <tessera/core/kernels/movable_stream.h>
#include <tessera/core/math.h>
#include <tessera/core/random.h>
#include <tessera/core/tensor.h>
#include <tessera/core/kernels/rows.cuh>

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

struct TiledAttention {
  int64_t H, group, T, S, E, Ev;  // group: query heads of a key head
  double scale, dropout;
  double kept_scale;  // of probabilities that dropout leaves
  bool causal, has_mask;
  DType mask_dtype;
  HeadsView<char> mask;    // its strides in bytes
  const int32_t* lengths;  // of each sample's keys, in [1, S]; nullptr: all have S
  MovableStream stream;
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

// What dropout multiplies a probability with. settled: p.stream.now() in shared memory, for kernels
// that are short of registers.
template <class A>
TS_DEVICE A kept(const TiledAttention& p, int64_t b, int64_t h, int64_t t, int64_t s,
                 const RandomStream* settled = nullptr) {
  if (p.dropout <= 0) return A(1);
  const int64_t element = ((b * p.H + h) * p.T + t) * p.S + s;
  const RandomStream stream = settled != nullptr ? *settled : p.stream.now();
  const auto drawn = philox4x32(stream.seed, stream.stream, static_cast<uint64_t>(element) / 4);
  const int64_t place = element % 4;  // not an index: the draw stays in registers
  const uint32_t bits =
      place < 2 ? (place == 0 ? drawn[0] : drawn[1]) : (place == 2 ? drawn[2] : drawn[3]);
  const float u = uniform_from_bits(bits);
  if (u < static_cast<float>(p.dropout)) return A(0);
  return static_cast<A>(p.kept_scale);
}

// All threads of the block call it.
TS_DEVICE void settle_stream(const TiledAttention& p, RandomStream* settled) {
  if (threadIdx.x == 0) *settled = p.stream.now();
  __syncthreads();
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
      .stream = movable(spec.stream)};
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
