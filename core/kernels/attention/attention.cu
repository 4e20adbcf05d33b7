// Attention on a GPU: cuDNN where it serves the problem, else tensor cores (attention_tensor.cu)
// for f16 and bf16, else the tiles below, for any mask, range of keys, dropout, grouped heads,
// width and dtype.
//
// Method: Dao, "FlashAttention-2" (2023). A block holds 64 rows of queries and walks over tiles of
// 64 keys: the scores of a pair of tiles exist in registers and shared memory only. A running
// maximum and sum scale what was added up before. Backward walks twice, once a block for rows of
// queries and once for rows of keys, so that every sum has one owner and a fixed order: no atomics.
// Products run on the ordinary units, in the compute type.
#include <tessera/core/kernels/attention/attention.h>

#include <cmath>

#include <tessera/core/cuda/device_errors.h>
#include <tessera/core/cuda/libraries/library_graph.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/attention/attention_library.h>
#include <tessera/core/kernels/common/compute.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/core/kernels/attention/attention_tiles.cuh>

namespace tessera::kernels {
namespace {

// A block of 256 threads owns 64 rows; thread (ty, tx) of 16 x 16 has rows 4 ty + i and columns
// tx + 16 j of what it calculates.
constexpr int kTile = kAttentionTile, kSide = 16, kEach = kTile / kSide, kBlock = kSide * kSide;
constexpr int kInner = 32;         // columns (rows) of operands in shared memory at a time
constexpr int kPitch = kTile + 1;  // no two rows of a tile begin in one bank
constexpr int kWeights = kTile * kPitch, kOperands = 2 * kInner * kPitch;
static_assert(kOperands >= kInner * 2 * kTile);

// a b + c with one rounding, which is one instruction of a GPU.
TS_DEVICE float fused(float a, float b, float c) { return ::fmaf(a, b, c); }
TS_DEVICE double fused(double a, double b, double c) { return ::fma(a, b, c); }

// N elements of a row from `column`, 0 outside of the matrix.
template <int N, class T>
TS_DEVICE void load_columns(const Matrix<T>& x, int64_t row, int64_t column,
                            Compute<T> (&values)[N]) {
  const T* const source = x.data + row * x.row + column * x.column;
  if (x.vectors && row < x.rows && column < x.columns) {
    const gpu::Vector<T, N> loaded = gpu::load_vector<N>(source);
    TS_UNROLL
    for (int i = 0; i < N; ++i) values[i] = load<Compute<T>>(loaded.values[i]);
    return;
  }
  TS_UNROLL
  for (int i = 0; i < N; ++i) {
    values[i] = row < x.rows && column + i < x.columns ? load<Compute<T>>(source[i * x.column])
                                                       : Compute<T>(0);
  }
}

// tile[column][row]: kInner columns of kTile rows.
template <class T>
TS_DEVICE void load_by_columns(const Matrix<T>& x, int64_t row0, int64_t column0,
                               Compute<T>* tile) {
  constexpr int N = 16 / static_cast<int>(sizeof(T));
  for (int v = static_cast<int>(threadIdx.x); v < kTile * kInner / N; v += kBlock) {
    const int row = v / (kInner / N), column = v % (kInner / N) * N;
    Compute<T> values[N];
    load_columns<N>(x, row0 + row, column0 + column, values);
    TS_UNROLL
    for (int i = 0; i < N; ++i) tile[(column + i) * kPitch + row] = values[i];
  }
}

// tile[row][column]: kInner rows of `Columns` columns.
template <int Columns, class T>
TS_DEVICE void load_by_rows(const Matrix<T>& x, int64_t row0, int64_t column0, Compute<T>* tile) {
  constexpr int N = 16 / static_cast<int>(sizeof(T));
  for (int v = static_cast<int>(threadIdx.x); v < kInner * Columns / N; v += kBlock) {
    const int row = v / (Columns / N), column = v % (Columns / N) * N;
    Compute<T> values[N];
    load_columns<N>(x, row0 + row, column0 + column, values);
    TS_UNROLL
    for (int i = 0; i < N; ++i) tile[row * Columns + column + i] = values[i];
  }
}

// sums = the products of rows left0... of left with rows right0... of right. `operands`: shared.
template <class T>
TS_DEVICE void multiply_rows(const Matrix<T>& left, int64_t left0, const Matrix<T>& right,
                             int64_t right0, Compute<T>* operands,
                             Compute<T> (&sums)[kEach][kEach]) {
  using A = Compute<T>;
  const int tx = static_cast<int>(threadIdx.x) % kSide, ty = static_cast<int>(threadIdx.x) / kSide;
  A* const a_tile = operands;
  A* const b_tile = operands + kInner * kPitch;
  TS_UNROLL
  for (int i = 0; i < kEach; ++i) {
    TS_UNROLL
    for (int j = 0; j < kEach; ++j) sums[i][j] = A(0);
  }
  for (int64_t k0 = 0; k0 < left.columns; k0 += kInner) {
    __syncthreads();  // who read the tiles before is done
    load_by_columns(left, left0, k0, a_tile);
    load_by_columns(right, right0, k0, b_tile);
    __syncthreads();
    const int count = left.columns - k0 < kInner ? static_cast<int>(left.columns - k0) : kInner;
    for (int k = 0; k < count; ++k) {
      A a[kEach], b[kEach];
      TS_UNROLL
      for (int i = 0; i < kEach; ++i) {
        a[i] = a_tile[k * kPitch + ty * kEach + i];
        b[i] = b_tile[k * kPitch + tx + i * kSide];
      }
      TS_UNROLL
      for (int i = 0; i < kEach; ++i) {
        TS_UNROLL
        for (int j = 0; j < kEach; ++j) sums[i][j] = fused(a[i], b[j], sums[i][j]);
      }
    }
  }
}

// Writes what the threads hold to weights[row][column] in shared memory.
template <class A>
TS_DEVICE void store_weights(const A (&values)[kEach][kEach], A* weights) {
  const int tx = static_cast<int>(threadIdx.x) % kSide, ty = static_cast<int>(threadIdx.x) / kSide;
  TS_UNROLL
  for (int i = 0; i < kEach; ++i) {
    TS_UNROLL
    for (int j = 0; j < kEach; ++j) {
      weights[(ty * kEach + i) * kPitch + tx + j * kSide] = values[i][j];
    }
  }
}

// sums[i][j] += weights (kTile, kTile) times rows row0... of x, columns column0 + tx + 16 j. The
// weights may have been stored just before.
template <int Panels, class T>
TS_DEVICE void add_product(const Compute<T>* weights, const Matrix<T>& x, int64_t row0,
                           int64_t column0, Compute<T>* operands,
                           Compute<T> (&sums)[kEach][kEach * Panels]) {
  using A = Compute<T>;
  constexpr int kColumns = kTile * Panels;
  const int tx = static_cast<int>(threadIdx.x) % kSide, ty = static_cast<int>(threadIdx.x) / kSide;
  for (int r0 = 0; r0 < kTile && row0 + r0 < x.rows; r0 += kInner) {
    __syncthreads();
    load_by_rows<kColumns>(x, row0 + r0, column0, operands);
    __syncthreads();
    const int64_t left = x.rows - row0 - r0;
    const int count = left < kInner ? static_cast<int>(left) : kInner;
    for (int r = 0; r < count; ++r) {
      A a[kEach];
      TS_UNROLL
      for (int i = 0; i < kEach; ++i) a[i] = weights[(ty * kEach + i) * kPitch + r0 + r];
      TS_UNROLL
      for (int j = 0; j < kEach * Panels; ++j) {
        const A b = operands[r * kColumns + tx + j * kSide];
        TS_UNROLL
        for (int i = 0; i < kEach; ++i) sums[i][j] = fused(a[i], b, sums[i][j]);
      }
    }
  }
}

template <int Panels, class T>
TS_DEVICE void write_rows(const Matrix<T>& x, int64_t row0, int64_t column0,
                          const Compute<T> (&sums)[kEach][kEach * Panels],
                          const Compute<T> (&factors)[kEach]) {
  const int tx = static_cast<int>(threadIdx.x) % kSide, ty = static_cast<int>(threadIdx.x) / kSide;
  TS_UNROLL
  for (int i = 0; i < kEach; ++i) {
    const int64_t row = row0 + ty * kEach + i;
    TS_UNROLL
    for (int j = 0; j < kEach * Panels; ++j) {
      const int64_t column = column0 + tx + j * kSide;
      if (row < x.rows && column < x.columns) {
        x.data[row * x.row + column * x.column] = store<T>(sums[i][j] * factors[i]);
      }
    }
  }
}

// The 16 threads that share rows.
template <class A, class Op>
TS_DEVICE A row_reduce(A value, const Op& op) {
  for (int lanes = kSide / 2; lanes > 0; lanes /= 2) {
    value = op(value, __shfl_xor_sync(gpu::kAllLanes, value, lanes));
  }
  return value;
}

// What dropout draws by, in shared memory since registers are short.
struct Drawing {
  RandomStream stream;  // TiledAttention::stream, now
  AttentionDraws draws;
};

// What dropout multiplies a probability with.
template <class A>
TS_DEVICE A kept(const TiledAttention& p, int64_t b, int64_t h, int64_t t, int64_t s,
                 const Drawing* drawing) {
  if (p.dropout <= 0) return A(1);
  const int64_t element = number_of(drawing->draws, p.S, b, h, t, s);
  const RandomStream* const stream = &drawing->stream;
  const auto drawn = philox4x32(stream->seed, stream->stream, static_cast<uint64_t>(element) / 4);
  const int64_t place = element % 4;  // not an index: the draw stays in registers
  const uint32_t bits =
      place < 2 ? (place == 0 ? drawn[0] : drawn[1]) : (place == 2 ? drawn[2] : drawn[3]);
  const float u = uniform_from_bits(bits);
  if (u < static_cast<float>(p.dropout)) return A(0);
  return static_cast<A>(p.kept_scale);
}

// All threads of the block call it.
template <int Panels>
TS_DEVICE void settle(const TiledAttention& p, Drawing* settled) {
  const RandomStream fixed{p.stream.seed, p.stream.stream};
  if (threadIdx.x == 0) *settled = {Panels == 1 ? p.stream.now() : fixed, p.draws};
  __syncthreads();
}

// A block for each (b, h, tile of queries) and panel of output columns.
template <class T, int Panels>
__global__ void __launch_bounds__(kBlock)
    attention_kernel(const TiledAttention p, const HeadsView<T> query, const HeadsView<T> key,
                     const HeadsView<T> value, const HeadsView<T> output, Compute<T>* log_sums) {
  using A = Compute<T>;
  A* const operands = gpu::dynamic_shared<A>();
  A* const weights = operands + kOperands;
  TS_SHARED(Drawing, drawing, 1);
  settle<Panels>(p, drawing);
  const int tx = static_cast<int>(threadIdx.x) % kSide, ty = static_cast<int>(threadIdx.x) / kSide;
  const auto [b, h, t0] = place_of(p.H, p.T, p.causal);
  const int64_t column0 = int64_t{blockIdx.y} * kTile * Panels;
  const int64_t S = p.keys_of(b);
  const Matrix<T> q = head_of(query, b, h, p.T, p.E), k = head_of(key, b, h / p.group, S, p.E);
  const Matrix<T> v = head_of(value, b, h / p.group, S, p.Ev);
  A largest[kEach], total[kEach], sums[kEach][kEach * Panels];
  TS_UNROLL
  for (int i = 0; i < kEach; ++i) {
    largest[i] = -static_cast<A>(INFINITY);
    total[i] = A(0);
    TS_UNROLL
    for (int j = 0; j < kEach * Panels; ++j) sums[i][j] = A(0);
  }
  const SeenKeys walk = p.seen_by_tile(b, t0, S);
  for (int64_t s0 = walk.begin; s0 < walk.end; s0 += kTile) {
    A scores[kEach][kEach];
    multiply_rows(q, t0, k, s0, operands, scores);
    TS_UNROLL
    for (int i = 0; i < kEach; ++i) {
      const int64_t t = t0 + ty * kEach + i;
      const SeenKeys seen = p.seen_by(b, t, S);
      A above = largest[i];
      TS_UNROLL
      for (int j = 0; j < kEach; ++j) {
        scores[i][j] = score_of(p, scores[i][j], seen, b, h, t, s0 + tx + j * kSide);
        above = gpu::Larger{}(above, scores[i][j]);
      }
      above = row_reduce(above, gpu::Larger{});
      const bool sees_none = above == -static_cast<A>(INFINITY);
      const A shrink = sees_none ? A(1) : math::exp(largest[i] - above);
      A sum = 0;
      TS_UNROLL
      for (int j = 0; j < kEach; ++j) {
        scores[i][j] = sees_none ? A(0) : math::exp(scores[i][j] - above);
        sum += scores[i][j];
        if (p.dropout > 0 && scores[i][j] != A(0)) {
          scores[i][j] *= kept<A>(p, b, h, t, s0 + tx + j * kSide, drawing);
        }
      }
      total[i] = total[i] * shrink + row_reduce(sum, gpu::Plus{});
      largest[i] = above;
      TS_UNROLL
      for (int j = 0; j < kEach * Panels; ++j) sums[i][j] *= shrink;
    }
    __syncthreads();  // the weights of the tile before were read
    store_weights(scores, weights);
    add_product<Panels>(weights, v, s0, column0, operands, sums);
  }
  A factors[kEach];
  TS_UNROLL
  for (int i = 0; i < kEach; ++i) {
    const int64_t t = t0 + ty * kEach + i;
    const bool sees_none = largest[i] == -static_cast<A>(INFINITY);
    factors[i] = sees_none ? A(0) : A(1) / total[i];
    if (tx == 0 && blockIdx.y == 0 && t < p.T) {
      log_sums[(b * p.H + h) * p.T + t] =
          sees_none ? static_cast<A>(INFINITY) : largest[i] + math::log(total[i]);
    }
  }
  write_rows<Panels>(head_of(output, b, h, p.T, p.Ev), t0, column0, sums, factors);
}

// A warp for each (b, h, t).
template <class T>
__global__ void delta_kernel(const TiledAttention p, const TiledGradients<T> g, int64_t rows) {
  using A = Compute<T>;
  const int64_t row = gpu::first_index() / gpu::kWarp;
  if (row >= rows) return;
  const int64_t t = row % p.T, h = row / p.T % p.H, b = row / p.T / p.H;
  const T* const dy = g.grad_output.at(b, h, t);
  const T* const y = g.output.at(b, h, t);
  A delta = 0;
  for (int64_t e = threadIdx.x % gpu::kWarp; e < p.Ev; e += gpu::kWarp) {
    delta += load<A>(dy[e * g.grad_output.column]) * load<A>(y[e * g.output.column]);
  }
  delta = gpu::warp_reduce(delta, gpu::Plus{});
  if (threadIdx.x % gpu::kWarp == 0) g.deltas[row] = delta;
}

// A block for each (b, h, tile of queries) and panel of columns: grad_query.
template <class T, int Panels>
__global__ void __launch_bounds__(kBlock)
    query_gradient_kernel(const TiledAttention p, const TiledGradients<T> g) {
  using A = Compute<T>;
  A* const operands = gpu::dynamic_shared<A>();
  A* const weights = operands + kOperands;
  TS_SHARED(Drawing, drawing, 1);
  settle<Panels>(p, drawing);
  const int tx = static_cast<int>(threadIdx.x) % kSide, ty = static_cast<int>(threadIdx.x) / kSide;
  const auto [b, h, t0] = place_of(p.H, p.T, p.causal);
  const int64_t column0 = int64_t{blockIdx.y} * kTile * Panels;
  const int64_t S = p.keys_of(b);
  const Matrix<T> q = head_of(g.query, b, h, p.T, p.E);
  const Matrix<T> k = head_of(g.key, b, h / p.group, S, p.E);
  const Matrix<T> v = head_of(g.value, b, h / p.group, S, p.Ev);
  const Matrix<T> dy = head_of(g.grad_output, b, h, p.T, p.Ev);
  A log_sum[kEach], delta[kEach], sums[kEach][kEach * Panels];
  TS_UNROLL
  for (int i = 0; i < kEach; ++i) {
    const int64_t t = t0 + ty * kEach + i, row = (b * p.H + h) * p.T + t;
    log_sum[i] = t < p.T ? g.log_sums[row] : A(0);
    delta[i] = t < p.T ? g.deltas[row] : A(0);
    TS_UNROLL
    for (int j = 0; j < kEach * Panels; ++j) sums[i][j] = A(0);
  }
  const SeenKeys walk = p.seen_by_tile(b, t0, S);
  for (int64_t s0 = walk.begin; s0 < walk.end; s0 += kTile) {
    A scores[kEach][kEach], grads[kEach][kEach];
    multiply_rows(q, t0, k, s0, operands, scores);
    multiply_rows(dy, t0, v, s0, operands, grads);
    TS_UNROLL
    for (int i = 0; i < kEach; ++i) {
      const int64_t t = t0 + ty * kEach + i;
      const SeenKeys seen = p.seen_by(b, t, S);
      TS_UNROLL
      for (int j = 0; j < kEach; ++j) {
        const int64_t s = s0 + tx + j * kSide;
        const A weight = math::exp(score_of(p, scores[i][j], seen, b, h, t, s) - log_sum[i]);
        if (p.dropout > 0 && weight != A(0)) grads[i][j] *= kept<A>(p, b, h, t, s, drawing);
        grads[i][j] = weight == A(0) ? A(0) : weight * (grads[i][j] - delta[i]);
      }
    }
    __syncthreads();
    store_weights(grads, weights);
    add_product<Panels>(weights, k, s0, column0, operands, sums);
  }
  A factors[kEach];
  TS_UNROLL
  for (int i = 0; i < kEach; ++i) factors[i] = static_cast<A>(p.scale);
  write_rows<Panels>(head_of(g.grad_query, b, h, p.T, p.E), t0, column0, sums, factors);
}

// A block for each (b, key head, tile of keys) and panel of columns: grad_key and grad_value,
// summed over the group's heads and all queries in their order.
template <class T, int Panels>
__global__ void __launch_bounds__(kBlock)
    key_gradient_kernel(const TiledAttention p, const TiledGradients<T> g) {
  using A = Compute<T>;
  A* const operands = gpu::dynamic_shared<A>();
  A* const weights = operands + kOperands;
  TS_SHARED(Drawing, drawing, 1);
  settle<Panels>(p, drawing);
  const int tx = static_cast<int>(threadIdx.x) % kSide, ty = static_cast<int>(threadIdx.x) / kSide;
  const int64_t Hk = p.H / p.group;
  const auto [b, hk, s0] = place_of(Hk, p.S, false);
  const int64_t column0 = int64_t{blockIdx.y} * kTile * Panels;
  const int64_t S = p.keys_of(b);
  const Matrix<T> k = head_of(g.key, b, hk, S, p.E), v = head_of(g.value, b, hk, S, p.Ev);
  A key_sums[kEach][kEach * Panels], value_sums[kEach][kEach * Panels];
  TS_UNROLL
  for (int i = 0; i < kEach; ++i) {
    TS_UNROLL
    for (int j = 0; j < kEach * Panels; ++j) key_sums[i][j] = value_sums[i][j] = A(0);
  }
  const int64_t heads = s0 < S ? p.group : 0;  // keys that the sample lacks: zeros
  for (int64_t h = hk * p.group; h < hk * p.group + heads; ++h) {
    const Matrix<T> q = head_of(g.query, b, h, p.T, p.E);
    const Matrix<T> dy = head_of(g.grad_output, b, h, p.T, p.Ev);
    for (int64_t t0 = p.causal ? s0 : 0; t0 < p.T; t0 += kTile) {
      if (!p.tile_sees(b, t0, s0)) continue;
      A scores[kEach][kEach], grads[kEach][kEach];
      multiply_rows(k, s0, q, t0, operands, scores);
      multiply_rows(v, s0, dy, t0, operands, grads);
      TS_UNROLL
      for (int j = 0; j < kEach; ++j) {
        const int64_t t = t0 + tx + j * kSide, row = (b * p.H + h) * p.T + t;
        const A log_sum = t < p.T ? g.log_sums[row] : A(0), delta = t < p.T ? g.deltas[row] : A(0);
        const SeenKeys seen = p.seen_at_most(t, S);
        TS_UNROLL
        for (int i = 0; i < kEach; ++i) {
          const int64_t s = s0 + ty * kEach + i;
          const A weight = math::exp(score_of(p, scores[i][j], seen, b, h, t, s) - log_sum);
          const A keep = p.dropout > 0 && weight != A(0) ? kept<A>(p, b, h, t, s, drawing) : A(1);
          grads[i][j] = weight == A(0) ? A(0) : weight * (grads[i][j] * keep - delta);
          scores[i][j] = weight * keep;
        }
      }
      if (p.ranges != nullptr) {  // apart from the loop above, whose registers are all taken
        TS_UNROLL
        for (int j = 0; j < kEach; ++j) {
          const SeenKeys seen = p.seen_by(b, t0 + tx + j * kSide, S);
          TS_UNROLL
          for (int i = 0; i < kEach; ++i) {
            if (!seen.has(s0 + ty * kEach + i)) scores[i][j] = grads[i][j] = A(0);
          }
        }
      }
      __syncthreads();
      store_weights(scores, weights);
      add_product<Panels>(weights, dy, t0, column0, operands, value_sums);
      __syncthreads();
      store_weights(grads, weights);
      add_product<Panels>(weights, q, t0, column0, operands, key_sums);
    }
  }
  A scales[kEach], ones[kEach];
  TS_UNROLL
  for (int i = 0; i < kEach; ++i) {
    scales[i] = static_cast<A>(p.scale);
    ones[i] = A(1);
  }
  write_rows<Panels>(head_of(g.grad_key, b, hk, p.S, p.E), s0, column0, key_sums, scales);
  write_rows<Panels>(head_of(g.grad_value, b, hk, p.S, p.Ev), s0, column0, value_sums, ones);
}

// ---- Launches -----------------------------------------------------------------------------------

// prepared: i32 [2, B], the query and key lengths of each sample. A length that is not in [1, S] is
// reported, and S in its place.
template <class Length>
__global__ void prepare_lengths_kernel(const Length* lengths, int32_t* prepared, int64_t B,
                                       int64_t T, int64_t S, const char* op,
                                       gpu::DeviceErrorWord* errors) {
  const int64_t b = gpu::first_index();
  if (b >= B) return;
  const int64_t length = lengths[b];
  const bool fits = length >= 1 && length <= S;
  if (!fits && atomicCAS(&errors->found, 0, 1) == 0) {
    errors->op = op;
    errors->position = b;
    errors->value = length;
    errors->low = 1;
    errors->high = S + 1;
  }
  prepared[b] = static_cast<int32_t>(T);
  prepared[B + b] = static_cast<int32_t>(fits ? length : S);
}

// Undefined where the problem has no lengths.
Tensor prepare_lengths(const Tensor& query, const Tensor& key, const AttentionSpec& spec) {
  if (!spec.lengths.defined()) return {};
  const int64_t B = query.size(0);
  const Tensor prepared = raw::empty({2, B}, kI32, query.device());
  const Tensor lengths = contiguous(spec.lengths);
  const auto run = [&]<class Length>() {
    gpu::launch({.name = "attention_lengths", .grid = gpu::blocks(B, kBlock), .block = kBlock},
                prepare_lengths_kernel<Length>, lengths.data_as<Length>(),
                prepared.data_as<int32_t>(), B, query.size(2), key.size(2),
                "scaled_dot_product_attention (lengths)", gpu::device_error_word());
  };
  lengths.dtype() == kI64 ? run.operator()<int64_t>() : run.operator()<int32_t>();
  return prepared;
}

struct Bounds {
  const int32_t *starts, *ends;  // [B, T], or nullptr
  const char *starts_op, *ends_op;
  gpu::DeviceErrorWord* errors;
};

// ranges: [B, T]; tiles: [B, tiles]. A warp for each tile. What does not fit is reported, and such
// a query sees nothing.
__global__ void prepare_ranges_kernel(const Bounds bounds, KeyRange* ranges, KeyRange* tiles,
                                      int64_t B, int64_t T, int64_t S) {
  const int64_t count = (T + kTile - 1) / kTile;
  const int64_t tile = gpu::first_index() / gpu::kWarp;
  if (tile >= B * count) return;
  const int64_t b = tile / count, t0 = tile % count * kTile;
  const auto report = [&](const char* op, int64_t position, int64_t value, int64_t low,
                          int64_t high) {
    if (atomicCAS(&bounds.errors->found, 0, 1) != 0) return;
    *bounds.errors = {1, op, position, value, low, high};
  };
  int64_t left = 0, last = 0;  // keys from the first that is seen on; the end of the last
  for (int64_t t = t0 + threadIdx.x % gpu::kWarp; t < t0 + kTile && t < T; t += gpu::kWarp) {
    const int64_t at = b * T + t, causal_end = t + 1 < S ? t + 1 : S;
    const int64_t start = bounds.starts != nullptr ? bounds.starts[at] : 0;
    const int64_t end = bounds.ends != nullptr ? bounds.ends[at] : causal_end;
    const int64_t highest = bounds.ends != nullptr ? S : t;
    KeyRange range{0, 0};
    if (start < 0 || start > highest) {
      report(bounds.starts_op, at, start, 0, highest + 1);
    } else if (bounds.ends != nullptr && (end < start || end > S)) {
      report(bounds.ends_op, at, end, start, S + 1);
    } else if (start < end) {
      range = {static_cast<int32_t>(start), static_cast<int32_t>(end)};
      left = gpu::Larger{}(left, S - start);
      last = gpu::Larger{}(last, end);
    }
    ranges[at] = range;
  }
  left = gpu::warp_reduce(left, gpu::Larger{});
  last = gpu::warp_reduce(last, gpu::Larger{});
  if (threadIdx.x % gpu::kWarp != 0) return;
  tiles[tile] = {static_cast<int32_t>(last > 0 ? S - left : 0), static_cast<int32_t>(last)};
}

bool has_ranges(const AttentionSpec& spec) { return spec.starts.defined() || spec.ends.defined(); }

// Undefined where the problem has no ranges.
Tensor prepare_ranges(const Tensor& query, const Tensor& key, const AttentionSpec& spec) {
  const int64_t B = query.size(0), T = query.size(2), tiles = B * attention_tiles(T);
  if (!has_ranges(spec) || tiles == 0) return {};
  const Tensor prepared = raw::empty({B * T + tiles, 2}, kI32, query.device());
  auto* const ranges = static_cast<KeyRange*>(prepared.data());
  const Tensor starts = spec.starts.defined() ? contiguous(spec.starts) : Tensor();
  const Tensor ends = spec.ends.defined() ? contiguous(spec.ends) : Tensor();
  const auto at = [](const Tensor& x) { return x.defined() ? x.data_as<int32_t>() : nullptr; };
  gpu::launch({.name = "attention_ranges",
               .grid = gpu::blocks(tiles, kBlock / gpu::kWarp),
               .block = kBlock,
               .traffic = {B * T * 4 * (starts.defined() + ends.defined()), (B * T + tiles) * 8}},
              prepare_ranges_kernel,
              Bounds{at(starts), at(ends), "scaled_dot_product_attention (starts)",
                     "scaled_dot_product_attention (ends)", gpu::device_error_word()},
              ranges, ranges + B * T, B, T, key.size(2));
  return prepared;
}

PreparedKeys prepare_keys(const Tensor& query, const Tensor& key, const AttentionSpec& spec) {
  return {prepare_lengths(query, key, spec), prepare_ranges(query, key, spec)};
}

// Blocks for `pairs` of sample and head, and panels of `columns`.
template <class T>
gpu::LaunchConfig over_tiles(const char* name, int64_t pairs, int64_t rows, int64_t columns,
                             int panels) {
  return {.name = name,
          .grid = dim3(static_cast<unsigned>(pairs * ((rows + kTile - 1) / kTile)),
                       gpu::blocks(columns, kTile, panels)),
          .block = kBlock,
          .shared_bytes = (kOperands + kWeights) * sizeof(Compute<T>)};
}

// Calls run<T, panels>: 128 columns a block where there are so many and their sums fit registers,
// beside those of a stream that moves with a graph's replays.
template <class Run>
void dispatch_panels(const TiledAttention& p, DType dtype, int64_t columns, const Run& run) {
  dispatch_floating(dtype, "scaled_dot_product_attention", [&]<class T>() {
    if constexpr (sizeof(Compute<T>) == 4) {
      const bool wide = sizeof(T) == 2 || columns > kTile;  // 16 bits come here for their width
      if (wide && p.stream.state == nullptr) return run.template operator()<T, 2>();
    }
    run.template operator()<T, 1>();
  });
}

void attention_by_tiles(const Tensor& query, const Tensor& key, const Tensor& value,
                        const PreparedKeys& keys, const AttentionSpec& spec,
                        const AttentionResult& result) {
  const TiledAttention p = problem_of(query, key, value, keys, spec);
  if (runs_on_tensor_cores(p, query.dtype())) {
    return attention_on_tensor_cores(p, query, key, value, result);
  }
  dispatch_panels(p, query.dtype(), p.Ev, [&]<class T, int Panels>() {
    gpu::launch(over_tiles<T>("attention", query.size(0) * p.H, p.T, p.Ev > 0 ? p.Ev : 1, Panels),
                attention_kernel<T, Panels>, p, view_of<T>(query), view_of<T>(key),
                view_of<T>(value), view_of<T>(result.output),
                result.log_sums.data_as<Compute<T>>());
  });
}

// A single query, as each token of a generation asks for: its keys are one more each time, and a
// plan of the library is for an exact number. It reads them once, which own kernels do as well.
bool is_for_own_kernels(const Tensor& query) { return query.size(2) == 1; }

void count_by_library(const AttentionSpec& spec, bool by_library) {
  if (!spec.policy.library) return;
  gpu::count_graph("scaled_dot_product_attention", by_library, [&spec]() -> std::string {
    if (has_ranges(spec)) return "starts and ends are for own kernels, which skip what they hide";
    return gpu::graph_library_version() == 0
               ? gpu::graph_library()
               : "cuDNN has no graph of these operands, or the policy asks for more";
  });
}

AttentionResult attention_cuda(const Tensor& query, const Tensor& key, const Tensor& value,
                               const AttentionSpec& spec) {
  const int64_t B = query.size(0), H = query.size(1), T = query.size(2), Ev = value.size(3);
  const DType compute = compute_dtype(query.dtype());
  AttentionResult result{
      raw::transpose(raw::empty({B, T, H, Ev}, query.dtype(), query.device()), 1, 2),
      raw::empty({B, H, T}, compute, query.device())};
  if (B * H * T == 0) return result;
  const PreparedKeys keys = prepare_keys(query, key, spec);
  if (!is_for_own_kernels(query)) {
    const bool by_library =
        !has_ranges(spec) && attention_by_library(query, key, value, keys.lengths, spec, result);
    count_by_library(spec, by_library);
    if (by_library) return result;
  }
  attention_by_tiles(query, key, value, keys, spec, result);
  return result;
}

void attention_backward_cuda(const Tensor& grad_output, const Tensor& query, const Tensor& key,
                             const Tensor& value, const Tensor& output, const Tensor& log_sums,
                             const AttentionSpec& spec, const Tensor& grad_query,
                             const Tensor& grad_key, const Tensor& grad_value) {
  const int64_t B = query.size(0), Hk = key.size(1);
  const PreparedKeys keys = B > 0 ? prepare_keys(query, key, spec) : PreparedKeys();
  const TiledAttention p = problem_of(query, key, value, keys, spec);
  const int64_t rows = B * p.H * p.T;
  if (rows > 0 && B * Hk * p.S > 0 && !is_for_own_kernels(query)) {
    const bool by_library =
        !has_ranges(spec) &&
        attention_backward_by_library(grad_output, query, key, value, keys.lengths, spec,
                                      {output, log_sums}, {grad_query, grad_key, grad_value});
    count_by_library(spec, by_library);
    if (by_library) return;
  }
  const Tensor deltas = raw::empty({B, p.H, p.T}, log_sums.dtype(), query.device());
  const auto gradients = [&]<class T>() {
    return TiledGradients<T>{.query = view_of<T>(query),
                             .key = view_of<T>(key),
                             .value = view_of<T>(value),
                             .output = view_of<T>(output),
                             .grad_output = view_of<T>(grad_output),
                             .grad_query = view_of<T>(grad_query),
                             .grad_key = view_of<T>(grad_key),
                             .grad_value = view_of<T>(grad_value),
                             .log_sums = log_sums.data_as<Compute<T>>(),
                             .deltas = deltas.data_as<Compute<T>>()};
  };
  const char* const name = "attention_backward";
  if (rows > 0) {
    dispatch_floating(query.dtype(), name, [&]<class T>() {
      gpu::launch({.name = name, .grid = gpu::blocks(rows, kBlock / gpu::kWarp), .block = kBlock},
                  delta_kernel<T>, p, gradients.template operator()<T>(), rows);
    });
  }
  if (runs_on_tensor_cores(p, query.dtype())) {
    return query.dtype() == kBF16
               ? attention_backward_on_tensor_cores(p, B, gradients.template operator()<bf16>())
               : attention_backward_on_tensor_cores(p, B, gradients.template operator()<f16>());
  }
  if (rows > 0) {
    dispatch_panels(p, query.dtype(), p.E, [&]<class T, int Panels>() {
      if (p.E > 0) {
        gpu::launch(over_tiles<T>(name, B * p.H, p.T, p.E, Panels),
                    query_gradient_kernel<T, Panels>, p, gradients.template operator()<T>());
      }
    });
  }
  const int64_t columns = p.E > p.Ev ? p.E : p.Ev;
  if (B * Hk * p.S > 0 && columns > 0) {
    dispatch_panels(p, query.dtype(), columns, [&]<class T, int Panels>() {
      gpu::launch(over_tiles<T>(name, B * Hk, p.S, columns, Panels), key_gradient_kernel<T, Panels>,
                  p, gradients.template operator()<T>());
    });
  }
}

}  // namespace

void register_attention() {
  cuda_kernel<attention> = attention_cuda;
  cuda_kernel<attention_backward> = attention_backward_cuda;
}

}  // namespace tessera::kernels
