// Attention of f16 and bf16 on tensor cores (wmma), for where cuDNN is missing or does not serve.
//
// As in attention.cu a block owns 64 rows and walks over tiles of 64; here each of its four warps
// owns 16 rows, and a tile's products are fragments: scores leave them through the warp's part of
// shared memory, since which lane holds which element is open, and probabilities return through it
// in 16 bits. Output and gradients stay in fragments over the whole walk. Where forward shrinks
// them, a lane must know the rows of its elements: it loads them once from a tile of row numbers.
//
// Sums are f32; probabilities and gradients of scores are rounded to the operands' dtype before
// they are multiplied. No atomics: every sum has one owner and a fixed order.
#include <mma.h>

#include <bit>
#include <cmath>
#include <type_traits>

#include <tessera/core/cuda/launch.h>
#include <tessera/core/dispatch.h>
#include <tessera/core/kernels/attention/attention_tiles.cuh>

namespace tessera::kernels {
namespace {

namespace wmma = nvcuda::wmma;

constexpr int kFragment = 16, kTile = kAttentionTile, kWarps = kTile / kFragment;
constexpr int kBlock = kWarps * gpu::kWarp;
constexpr int kAcross = kTile / kFragment;  // fragments of a warp's scores
constexpr int kWidth = 8;                   // elements of 16 bytes
// Rows of a warp's scores in f32, and of its weights in 16 bits at the same place, are 16 bytes
// longer than they need be: rows below each other begin in different banks.
constexpr int kScorePitch = kTile + 4, kWeightPitch = kTile + 8;
constexpr int kScores = kFragment * kScorePitch;  // floats
static_assert(kFragment * kWeightPitch * sizeof(uint16_t) <= kScores * sizeof(float));
// A lane has every other column of a row.
constexpr int kLanes = gpu::kWarp / kFragment, kEach = kTile / kLanes;

template <class T>
using Element = std::conditional_t<std::is_same_v<T, bf16>, __nv_bfloat16, __half>;
using Sums = wmma::fragment<wmma::accumulator, 16, 16, 16, float>;

// W: columns of a tile, those that the matrix lacks are zeros.
template <int W>
inline constexpr int kPitch = W + 8;
template <int W>
inline constexpr int kOperand = kTile* kPitch<W>;  // elements

// Rows row0... of x to shared memory, by the whole block.
template <int W, class T>
TS_DEVICE void load_tile(const Matrix<T>& x, int64_t row0, T* tile) {
  for (int v = static_cast<int>(threadIdx.x); v < kTile * W / kWidth; v += kBlock) {
    const int row = v / (W / kWidth), column = v % (W / kWidth) * kWidth;
    const T* const source = x.data + (row0 + row) * x.row + column * x.column;
    gpu::Vector<T, kWidth> values;
    if (x.vectors && row0 + row < x.rows && column < x.columns) {
      values = gpu::load_vector<kWidth>(source);
    } else {
      TS_UNROLL
      for (int i = 0; i < kWidth; ++i) {
        values.values[i] =
            row0 + row < x.rows && column + i < x.columns ? source[i * x.column] : T::from_bits(0);
      }
    }
    gpu::store_shared_vector(tile + row * kPitch<W> + column, values);
  }
}

// scores = left right^T: 16 rows of one tile with the 64 of another, to shared memory.
template <int W, class T>
TS_DEVICE void multiply_rows(const T* left, const T* right, int64_t columns, float* scores) {
  using E = Element<T>;
  Sums sums[kAcross];
  TS_UNROLL
  for (int j = 0; j < kAcross; ++j) wmma::fill_fragment(sums[j], 0.0f);
  for (int e = 0; e < W && e < columns; e += kFragment) {  // not unrolled: registers are scarce
    wmma::fragment<wmma::matrix_a, 16, 16, 16, E, wmma::row_major> a;
    wmma::load_matrix_sync(a, reinterpret_cast<const E*>(left + e), kPitch<W>);
    TS_UNROLL
    for (int j = 0; j < kAcross; ++j) {
      wmma::fragment<wmma::matrix_b, 16, 16, 16, E, wmma::col_major> b;
      const T* const from = right + j * kFragment * kPitch<W> + e;
      wmma::load_matrix_sync(b, reinterpret_cast<const E*>(from), kPitch<W>);
      wmma::mma_sync(sums[j], a, b, sums[j]);
    }
  }
  TS_UNROLL
  for (int j = 0; j < kAcross; ++j) {
    wmma::store_matrix_sync(scores + j * kFragment, sums[j], kScorePitch, wmma::mem_row_major);
  }
}

// sums += weights rows: a warp's 16 x 64 weights with the 64 rows of a tile.
template <int W, class T>
TS_DEVICE void add_product(const T* weights, const T* rows, int64_t columns,
                           Sums (&sums)[W / kFragment]) {
  using E = Element<T>;
  TS_UNROLL
  for (int k = 0; k < kTile; k += kFragment) {
    wmma::fragment<wmma::matrix_a, 16, 16, 16, E, wmma::row_major> a;
    wmma::load_matrix_sync(a, reinterpret_cast<const E*>(weights + k), kWeightPitch);
    TS_UNROLL
    for (int n = 0; n < W / kFragment; ++n) {
      if (n * kFragment >= columns) break;
      wmma::fragment<wmma::matrix_b, 16, 16, 16, E, wmma::row_major> b;
      const T* const from = rows + k * kPitch<W> + n * kFragment;
      wmma::load_matrix_sync(b, reinterpret_cast<const E*>(from), kPitch<W>);
      wmma::mma_sync(sums[n], a, b, sums[n]);
    }
  }
}

// ---- Dropout ------------------------------------------------------------------------------------
//
// A draw decides about four neighbours, so lanes draw whole runs and hand bits around.

// Bit i: dropout keeps number first + i of the probabilities; i < count <= 32.
TS_DEVICE uint32_t kept_run(const TiledAttention& p, int64_t first, int count) {
  const RandomStream stream = p.stream.now();
  const auto dropout = static_cast<float>(p.dropout);
  uint32_t bits = 0;
  int place = -static_cast<int>(first % 4);  // of the draw's first number
  TS_ROLLED
  for (int64_t draw = first / 4; place < count; ++draw, place += 4) {
    const auto drawn = philox4x32(stream.seed, stream.stream, static_cast<uint64_t>(draw));
    TS_UNROLL
    for (int i = 0; i < 4; ++i) {
      const bool is_of_run = place + i >= 0 && place + i < count;
      if (is_of_run && !(uniform_from_bits(drawn[i]) < dropout)) bits |= 1u << (place + i);
    }
  }
  return bits;
}

// What dropout keeps of a lane's columns: those of its row, which it shares with a neighbour.
struct KeptInRow {
  uint32_t left, right;  // halves of the row, from the lane's first column on
  TS_DEVICE bool has(int j) const {
    constexpr int kHalf = kEach / 2;
    return ((j < kHalf ? left : right) >> j % kHalf * kLanes & 1) != 0;
  }
};
TS_DEVICE KeptInRow kept_in_row(const TiledAttention& p, int64_t b, int64_t h, int64_t t,
                                int64_t s0, int part) {
  constexpr int kRun = kTile / kLanes;
  const int64_t first = number_of(p.draws, p.S, b, h, t, s0 + part * kRun);
  const uint32_t own = kept_run(p, first, kRun);
  const uint32_t other = __shfl_xor_sync(gpu::kAllLanes, own, 1);
  return {(part == 0 ? own : other) >> part, (part == 0 ? other : own) >> part};
}

// The same where rows are keys, s0... the warp's first, and columns are queries: a lane draws two
// queries' runs over the warp's keys.
struct KeptInColumns {
  uint32_t bits;
  // All lanes of the warp call it together.
  TS_DEVICE bool has(int row, int column) const {
    const uint32_t of_column = __shfl_sync(gpu::kAllLanes, bits, column % gpu::kWarp);
    return (of_column >> (row + column / gpu::kWarp * kFragment) & 1) != 0;
  }
};
TS_DEVICE KeptInColumns kept_in_columns(const TiledAttention& p, int64_t b, int64_t h, int64_t t0,
                                        int64_t s0, int lane) {
  uint32_t bits = 0;
  TS_ROLLED
  for (int column = lane; column < kTile; column += gpu::kWarp) {
    const int64_t first = number_of(p.draws, p.S, b, h, t0 + column, s0);
    bits |= kept_run(p, first, kFragment) << column / gpu::kWarp * kFragment;
  }
  return {bits};
}

// A warp's sums to rows row0... of x, `factor` times, by way of its scores.
template <int W, class T>
TS_DEVICE void write_rows(const Matrix<T>& x, int64_t row0, const Sums (&sums)[W / kFragment],
                          float factor, float* scores) {
  TS_UNROLL
  for (int n0 = 0; n0 < W / kFragment; n0 += kAcross) {
    if (n0 * kFragment >= x.columns) break;
    __syncwarp();
    TS_UNROLL
    for (int n = 0; n < kAcross; ++n) {
      wmma::store_matrix_sync(scores + n * kFragment, sums[n0 + n], kScorePitch,
                              wmma::mem_row_major);
    }
    __syncwarp();
    const int lane = static_cast<int>(threadIdx.x) % gpu::kWarp;
    if (x.vectors) {
      for (int i = lane; i < kFragment * kTile / kWidth; i += gpu::kWarp) {
        const int below = i / (kTile / kWidth), right = i % (kTile / kWidth) * kWidth;
        const int64_t row = row0 + below, column = n0 * kFragment + right;
        if (row >= x.rows || column >= x.columns) continue;
        const auto from = gpu::load_vector<kWidth>(scores + below * kScorePitch + right);
        gpu::Vector<T, kWidth> values;
        TS_UNROLL
        for (int e = 0; e < kWidth; ++e) values.values[e] = store<T>(factor * from.values[e]);
        gpu::store_vector(x.data + row * x.row + column, values);
      }
      continue;
    }
    for (int i = lane; i < kFragment * kTile; i += gpu::kWarp) {
      const int64_t row = row0 + i / kTile, column = n0 * kFragment + i % kTile;
      if (row < x.rows && column < x.columns) {
        x.data[row * x.row + column * x.column] =
            store<T>(factor * scores[i / kTile * kScorePitch + i % kTile]);
      }
    }
  }
}

// ---- Forward ------------------------------------------------------------------------------------

template <int W>
inline constexpr size_t kForwardBytes = 3 * kOperand<W> * sizeof(uint16_t) + kWarps*(kScores +
                                                                                     kFragment) *
                                                                                 sizeof(float);

template <class T, int W>
__global__ void __launch_bounds__(kBlock)
    attention_tensor_kernel(const TiledAttention p, const HeadsView<T> query,
                            const HeadsView<T> key, const HeadsView<T> value,
                            const HeadsView<T> output, float* log_sums) {
  constexpr float kNone = -static_cast<float>(INFINITY);
  T* const q_tile = gpu::dynamic_shared<T>();
  T *const k_tile = q_tile + kOperand<W>, *const v_tile = k_tile + kOperand<W>;
  const int warp = static_cast<int>(threadIdx.x) / gpu::kWarp;
  const int lane = static_cast<int>(threadIdx.x) % gpu::kWarp;
  float* const scores =
      reinterpret_cast<float*>(v_tile + kOperand<W>) + warp * (kScores + kFragment);
  float* const factors = scores + kScores;  // of the warp's rows
  T* const weights = reinterpret_cast<T*>(scores);
  const auto [b, h, t0] = place_of(p.H, p.T, p.causal);
  const int row = lane / kLanes, part = lane % kLanes;
  const int64_t t = t0 + warp * kFragment + row, S = p.keys_of(b);
  const Matrix<T> k = head_of(key, b, h / p.group, S, p.E);
  const Matrix<T> v = head_of(value, b, h / p.group, S, p.Ev);

  int rows[Sums::num_elements];  // of this lane's elements
  for (int i = lane; i < kFragment * kFragment; i += gpu::kWarp) {
    scores[i] = static_cast<float>(i / kFragment);
  }
  __syncwarp();
  {
    Sums numbers;
    wmma::load_matrix_sync(numbers, scores, kFragment, wmma::mem_row_major);
    TS_UNROLL
    for (int i = 0; i < Sums::num_elements; ++i) rows[i] = static_cast<int>(numbers.x[i]);
  }
  load_tile<W>(head_of(query, b, h, p.T, p.E), t0, q_tile);

  Sums sums[W / kFragment];
  TS_UNROLL
  for (int n = 0; n < W / kFragment; ++n) wmma::fill_fragment(sums[n], 0.0f);
  const auto scale_rows = [&] {
    TS_UNROLL
    for (int i = 0; i < Sums::num_elements; ++i) {
      const float factor = factors[rows[i]];
      TS_UNROLL
      for (int n = 0; n < W / kFragment; ++n) sums[n].x[i] *= factor;
    }
  };
  const bool drops = p.dropout > 0;
  const auto kept_scale = static_cast<float>(p.kept_scale);
  float largest = kNone, total = 0;
  const SeenKeys seen = p.seen_by(b, t, S), walk = p.seen_by_tile(b, t0, S);
  for (int64_t s0 = walk.begin; s0 < walk.end; s0 += kTile) {
    __syncthreads();  // the tiles before were read
    load_tile<W>(k, s0, k_tile);
    load_tile<W>(v, s0, v_tile);
    __syncthreads();
    multiply_rows<W>(q_tile + warp * kFragment * kPitch<W>, k_tile, p.E, scores);
    __syncwarp();
    float own[kEach], above = largest;
    TS_UNROLL
    for (int j = 0; j < kEach; ++j) {
      const int column = j * kLanes + part;
      own[j] = score_of(p, scores[row * kScorePitch + column], seen, b, h, t, s0 + column);
      above = gpu::Larger{}(above, own[j]);
    }
    above = gpu::Larger{}(above, __shfl_xor_sync(gpu::kAllLanes, above, 1));
    const bool sees_none = above == kNone;
    const float shrink = sees_none ? 1.0f : math::exp(largest - above);
    float sum = 0;
    TS_UNROLL
    for (int j = 0; j < kEach; ++j) {
      own[j] = sees_none ? 0.0f : math::exp(own[j] - above);
      sum += own[j];
    }
    if (drops) {
      const KeptInRow kept = kept_in_row(p, b, h, t, s0, part);
      TS_UNROLL
      for (int j = 0; j < kEach; ++j) own[j] *= kept.has(j) ? kept_scale : 0.0f;
    }
    sum += __shfl_xor_sync(gpu::kAllLanes, sum, 1);
    total = total * shrink + sum;
    largest = above;
    __syncwarp();  // the scores were read; the weights take their place
    TS_UNROLL
    for (int j = 0; j < kEach; ++j) {
      weights[row * kWeightPitch + j * kLanes + part] = store<T>(own[j]);
    }
    if (part == 0) factors[row] = shrink;
    __syncwarp();
    scale_rows();
    add_product<W>(weights, v_tile, p.Ev, sums);
  }
  const bool sees_none = largest == kNone;
  __syncwarp();
  if (part == 0) {
    factors[row] = sees_none ? 0.0f : 1 / total;
    if (t < p.T) {
      log_sums[(b * p.H + h) * p.T + t] =
          sees_none ? static_cast<float>(INFINITY) : largest + math::log(total);
    }
  }
  __syncwarp();
  scale_rows();
  write_rows<W>(head_of(output, b, h, p.T, p.Ev), t0 + warp * kFragment, sums, 1.0f, scores);
}

// ---- Backward -----------------------------------------------------------------------------------

// Two results in 16 bits take the place of a warp's gradients of scores, and a little more.
constexpr int kResult = kFragment * kWeightPitch;
constexpr int kOfWarp = kScores + kResult;  // floats
static_assert(2 * kResult * sizeof(uint16_t) <= kResult * sizeof(float) && kResult >= kScores);

// Four operands; logarithms and deltas of a tile; for each warp scores and their gradients.
template <int W>
inline constexpr size_t kBackwardBytes = 4 * kOperand<W> * sizeof(uint16_t) +
                                         (2 * kTile + kWarps * kOfWarp) * sizeof(float);

// A block for each (b, h, tile of queries): grad_query.
template <class T, int W>
__global__ void __launch_bounds__(kBlock)
    query_gradient_tensor_kernel(const TiledAttention p, const TiledGradients<T> g) {
  T* const q_tile = gpu::dynamic_shared<T>();
  T *const dy_tile = q_tile + kOperand<W>, *const k_tile = dy_tile + kOperand<W>;
  T* const v_tile = k_tile + kOperand<W>;
  const int warp = static_cast<int>(threadIdx.x) / gpu::kWarp;
  const int lane = static_cast<int>(threadIdx.x) % gpu::kWarp;
  float* const scores = reinterpret_cast<float*>(v_tile + kOperand<W>) + warp * kOfWarp;
  float* const grads = scores + kScores;
  T* const weights = reinterpret_cast<T*>(scores);
  const auto [b, h, t0] = place_of(p.H, p.T, p.causal);
  const int row = lane / kLanes, part = lane % kLanes, first = warp * kFragment;
  const int64_t t = t0 + first + row, S = p.keys_of(b);
  const Matrix<T> k = head_of(g.key, b, h / p.group, S, p.E);
  const Matrix<T> v = head_of(g.value, b, h / p.group, S, p.Ev);
  load_tile<W>(head_of(g.query, b, h, p.T, p.E), t0, q_tile);
  load_tile<W>(head_of(g.grad_output, b, h, p.T, p.Ev), t0, dy_tile);
  const int64_t at = (b * p.H + h) * p.T + t;
  const float log_sum = t < p.T ? g.log_sums[at] : 0.0f, delta = t < p.T ? g.deltas[at] : 0.0f;
  const bool drops = p.dropout > 0;
  const auto kept_scale = static_cast<float>(p.kept_scale);
  Sums sums[W / kFragment];
  TS_UNROLL
  for (int n = 0; n < W / kFragment; ++n) wmma::fill_fragment(sums[n], 0.0f);
  const SeenKeys seen = p.seen_by(b, t, S), walk = p.seen_by_tile(b, t0, S);
  for (int64_t s0 = walk.begin; s0 < walk.end; s0 += kTile) {
    __syncthreads();
    load_tile<W>(k, s0, k_tile);
    load_tile<W>(v, s0, v_tile);
    __syncthreads();
    multiply_rows<W>(q_tile + first * kPitch<W>, k_tile, p.E, scores);
    multiply_rows<W>(dy_tile + first * kPitch<W>, v_tile, p.Ev, grads);
    __syncwarp();
    KeptInRow kept{};
    if (drops) kept = kept_in_row(p, b, h, t, s0, part);
    float own[kEach];
    TS_UNROLL
    for (int j = 0; j < kEach; ++j) {
      const int column = j * kLanes + part, place = row * kScorePitch + column;
      const int64_t s = s0 + column;
      const float weight = math::exp(score_of(p, scores[place], seen, b, h, t, s) - log_sum);
      float grad = grads[place];
      if (drops) grad *= kept.has(j) ? kept_scale : 0.0f;
      own[j] = weight == 0 ? 0.0f : weight * (grad - delta);
    }
    __syncwarp();
    TS_UNROLL
    for (int j = 0; j < kEach; ++j) {
      weights[row * kWeightPitch + j * kLanes + part] = store<T>(own[j]);
    }
    __syncwarp();
    add_product<W>(weights, k_tile, p.E, sums);
  }
  write_rows<W>(head_of(g.grad_query, b, h, p.T, p.E), t0 + first, sums,
                static_cast<float>(p.scale), scores);
}

// A block for each (b, key head, tile of keys): grad_key and grad_value, summed over the group's
// heads and all queries in their order.
template <class T, int W>
__global__ void __launch_bounds__(kBlock)
    key_gradient_tensor_kernel(const TiledAttention p, const TiledGradients<T> g) {
  T* const k_tile = gpu::dynamic_shared<T>();
  T *const v_tile = k_tile + kOperand<W>, *const q_tile = v_tile + kOperand<W>;
  T* const dy_tile = q_tile + kOperand<W>;
  const int warp = static_cast<int>(threadIdx.x) / gpu::kWarp;
  const int lane = static_cast<int>(threadIdx.x) % gpu::kWarp;
  float* const log_sums = reinterpret_cast<float*>(dy_tile + kOperand<W>);  // of the queries' tile
  float* const deltas = log_sums + kTile;
  float* const scores = deltas + kTile + warp * kOfWarp;
  float* const grads = scores + kScores;
  T *const weights = reinterpret_cast<T*>(grads), *const gradients = weights + kResult;
  const int64_t Hk = p.H / p.group;
  const auto [b, hk, s0] = place_of(Hk, p.S, false);
  const int row = lane / kLanes, part = lane % kLanes, first = warp * kFragment;
  const int64_t s = s0 + first + row, S = p.keys_of(b);
  load_tile<W>(head_of(g.key, b, hk, S, p.E), s0, k_tile);
  load_tile<W>(head_of(g.value, b, hk, S, p.Ev), s0, v_tile);
  const bool drops = p.dropout > 0;
  const auto kept_scale = static_cast<float>(p.kept_scale);
  Sums key_sums[W / kFragment], value_sums[W / kFragment];
  TS_UNROLL
  for (int n = 0; n < W / kFragment; ++n) {
    wmma::fill_fragment(key_sums[n], 0.0f);
    wmma::fill_fragment(value_sums[n], 0.0f);
  }
  const int64_t heads = s0 < S ? p.group : 0;  // keys that the sample lacks: zeros
  for (int64_t h = hk * p.group; h < hk * p.group + heads; ++h) {
    const Matrix<T> q = head_of(g.query, b, h, p.T, p.E);
    const Matrix<T> dy = head_of(g.grad_output, b, h, p.T, p.Ev);
    for (int64_t t0 = p.causal ? s0 : 0; t0 < p.T; t0 += kTile) {
      if (!p.tile_sees(b, t0, s0)) continue;
      __syncthreads();
      load_tile<W>(q, t0, q_tile);
      load_tile<W>(dy, t0, dy_tile);
      if (threadIdx.x < kTile) {
        const int64_t t = t0 + threadIdx.x, at = (b * p.H + h) * p.T + t;
        log_sums[threadIdx.x] = t < p.T ? g.log_sums[at] : 0.0f;
        deltas[threadIdx.x] = t < p.T ? g.deltas[at] : 0.0f;
      }
      __syncthreads();
      multiply_rows<W>(k_tile + first * kPitch<W>, q_tile, p.E, scores);
      multiply_rows<W>(v_tile + first * kPitch<W>, dy_tile, p.Ev, grads);
      __syncwarp();
      KeptInColumns kept{};
      if (drops) kept = kept_in_columns(p, b, h, t0, s0 + first, lane);
      // Weight and gradient of a score wait at the score's place until all gradients were read.
      for (int j = 0; j < kEach; ++j) {
        const int column = j * kLanes + part, place = row * kScorePitch + column;
        const int64_t t = t0 + column;
        const float weight = math::exp(score_of(p, scores[place], p.seen_by(b, t, S), b, h, t, s) -
                                       log_sums[column]);
        float keep = 1;
        if (drops) keep = kept.has(row, column) ? kept_scale : 0.0f;
        const float grad = weight == 0 ? 0.0f : weight * (grads[place] * keep - deltas[column]);
        const uint32_t both = uint32_t{store<T>(weight * keep).bits} | uint32_t{store<T>(grad).bits}
                                                                           << 16;
        scores[place] = std::bit_cast<float>(both);
      }
      __syncwarp();
      for (int j = 0; j < kEach; ++j) {
        const int column = j * kLanes + part;
        const auto both = std::bit_cast<uint32_t>(scores[row * kScorePitch + column]);
        weights[row * kWeightPitch + column] = T::from_bits(static_cast<uint16_t>(both));
        gradients[row * kWeightPitch + column] = T::from_bits(static_cast<uint16_t>(both >> 16));
      }
      __syncwarp();
      add_product<W>(weights, dy_tile, p.Ev, value_sums);
      add_product<W>(gradients, q_tile, p.E, key_sums);
    }
  }
  write_rows<W>(head_of(g.grad_key, b, hk, p.S, p.E), s0 + first, key_sums,
                static_cast<float>(p.scale), scores);
  write_rows<W>(head_of(g.grad_value, b, hk, p.S, p.Ev), s0 + first, value_sums, 1.0f, scores);
}

// ---- Launches -----------------------------------------------------------------------------------

unsigned tiles_of(int64_t pairs, int64_t rows) {
  return static_cast<unsigned>(pairs * ((rows + kTile - 1) / kTile));
}

// Calls run<columns of a tile>.
template <class Run>
void dispatch_width(const TiledAttention& p, const Run& run) {
  p.E <= 64 && p.Ev <= 64 ? run.template operator()<64>() : run.template operator()<128>();
}

template <class T>
void run_backward(const TiledAttention& p, int64_t B, const TiledGradients<T>& g) {
  dispatch_width(p, [&]<int W>() {
    gpu::LaunchConfig config{
        .name = "attention_backward_tensor", .block = kBlock, .shared_bytes = kBackwardBytes<W>};
    if (B * p.H * p.T > 0) {
      config.grid = tiles_of(B * p.H, p.T);
      gpu::launch(config, query_gradient_tensor_kernel<T, W>, p, g);
    }
    const int64_t key_heads = B * (p.H / p.group);
    if (key_heads * p.S > 0) {
      config.grid = tiles_of(key_heads, p.S);
      gpu::launch(config, key_gradient_tensor_kernel<T, W>, p, g);
    }
  });
}

}  // namespace

void attention_on_tensor_cores(const TiledAttention& p, const Tensor& query, const Tensor& key,
                               const Tensor& value, const AttentionResult& result) {
  const auto run = [&]<class T>() {
    dispatch_width(p, [&]<int W>() {
      gpu::launch({.name = "attention_tensor",
                   .grid = tiles_of(query.size(0) * p.H, p.T),
                   .block = kBlock,
                   .shared_bytes = kForwardBytes<W>},
                  attention_tensor_kernel<T, W>, p, view_of<T>(query), view_of<T>(key),
                  view_of<T>(value), view_of<T>(result.output), result.log_sums.data_as<float>());
    });
  };
  query.dtype() == kBF16 ? run.template operator()<bf16>() : run.template operator()<f16>();
}

void attention_backward_on_tensor_cores(const TiledAttention& p, int64_t B,
                                        const TiledGradients<bf16>& gradients) {
  run_backward(p, B, gradients);
}
void attention_backward_on_tensor_cores(const TiledAttention& p, int64_t B,
                                        const TiledGradients<f16>& gradients) {
  run_backward(p, B, gradients);
}

}  // namespace tessera::kernels
