#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <type_traits>

#if defined(TESSERA_WITH_ONEDNN)
#include <dnnl.h>
#include <omp.h>
#include <unistd.h>
#endif

#include <tessera/core/block_signals.h>
#include <tessera/core/dispatch.h>
#include <tessera/core/kernels/common/scratch.h>
#include <tessera/core/kernels/gemm/gemm.h>
#include <tessera/core/kernels/gemm/gemm_tile.h>

namespace tessera::kernels {
namespace {

const char* at(const void* data, int64_t elements, DType dtype) {
  return static_cast<const char*>(data) + elements * size_of(dtype);
}
char* at(void* data, int64_t elements, DType dtype) {
  return static_cast<char*>(data) + elements * size_of(dtype);
}

bool rounds_bf16() { return cpu_isa() >= Isa::kBf16 && has_isa(Isa::kBf16); }

// How C is cut: powers of two, so that two, four or eight threads get equal shares. A function of
// the shape, never of the thread count. A tile packs its operands by itself, so that small ones
// cost more: from 8 to 4 tiles of a weight gradient 1152 x 384 x 2048 gained 10% (bench_gemm, one
// core).
struct Tiling {
  int64_t rows, columns;  // of a tile
  int64_t row_tiles, column_tiles;

  Tiling(int64_t m, int64_t n, int64_t k, int64_t batch, int64_t most_columns,
         int64_t column_multiple) {
    constexpr double kLeastWork = 3.2e7;  // multiplications of a tile that is split off
    int64_t by_rows = 1, by_columns = 1;
    while (m > by_rows * kGemmTileRows) by_rows *= 2;
    while (n > by_columns * most_columns) by_columns *= 2;
    const double work = static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
    while (by_rows * by_columns * batch < 4 &&
           work / static_cast<double>(by_rows * by_columns) > 2 * kLeastWork) {
      const bool split_rows = m / by_rows >= n / by_columns;
      if ((split_rows ? m / by_rows : n / by_columns) < 128) break;
      (split_rows ? by_rows : by_columns) *= 2;
    }
    rows = std::max<int64_t>(1, (m + by_rows - 1) / by_rows);
    const int64_t own_columns = (n + by_columns - 1) / by_columns;
    columns = (own_columns + column_multiple - 1) / column_multiple * column_multiple;
    row_tiles = (m + rows - 1) / rows;
    column_tiles = (n + columns - 1) / columns;
  }
};

#if defined(TESSERA_WITH_ONEDNN)
// The leading dimension under which sgemm can read an operand, and how; 0 where it cannot.
struct SgemmView {
  char transposed = 'N';
  int64_t leading = 0;

  SgemmView(const GemmOperand& operand, int64_t rows, int64_t columns) {
    if (operand.column_stride == 1 && (rows == 1 || operand.row_stride >= columns)) {
      leading = std::max(operand.row_stride, columns);
    } else if (operand.row_stride == 1 && (columns == 1 || operand.column_stride >= rows)) {
      transposed = 'T';
      leading = std::max(operand.column_stride, rows);
    }
  }
};
#endif

#if defined(TESSERA_WITH_ONEDNN)
// A tile of a wide matrix has its rows on different pages: a long K then costs sgemm's packing an
// address translation a row, and pages that are a power of two apart fall into the same cache sets.
// Gathered first, weight gradients 1536 x 384 x 2048 and 384 x 1536 x 2048 gain 18% and 13%, 1152 x
// 384 x 2048 5% (one core).
bool gathers_tile(int64_t width, int64_t leading, int64_t k) {
  return width < leading && leading >= 1024 && k >= 512;
}

const void* gather_tile(const void* from, int64_t rows, int64_t width, int64_t leading, char* to) {
  const auto bytes = static_cast<size_t>(width) * sizeof(float);
  for (int64_t row = 0; row < rows; ++row) {
    std::memcpy(to + static_cast<size_t>(row) * bytes, at(from, row * leading, kF32), bytes);
  }
  return to;
}

// Whether our own engine is faster in f32: AMX, and with AVX2 panels of a transposed A (a weight's
// gradient), which sgemm reads slowly. On Zen 3, two processes on two cores, 1536 x 384 x 2048 has
// 78 GFLOP/s for 67, 384 x 1536 x 2048 73 for 59; an A in rows is as fast either way, and small
// products are not.
bool beats_sgemm(const Gemm& p, Isa isa, const SgemmView& a) {
  if (isa == Isa::kV3) return a.transposed == 'T' && std::min({p.m, p.n, p.k}) >= 128;
  return isa == Isa::kAmx;
}

// exit() destroys oneDNN's kernels, which are static objects of the first product, before static
// objects of the program that are older: their destructors multiply by our own engine ([Note: after
// main]). It ends the main thread's own objects first; the function of atexit() is for
// programs whose main thread never multiplied.
std::atomic<bool> sgemm_is_gone = false;
struct MainThread {
  ~MainThread() {
    if (::gettid() == ::getpid()) sgemm_is_gone = true;
  }
};
bool has_sgemm() {
  thread_local const MainThread of_this_thread;
  static_cast<void>(of_this_thread);
  return !sgemm_is_gone.load(std::memory_order_relaxed);
}
void tell_end_of_sgemm() {
  static const int told = std::atexit([] { sgemm_is_gone = true; });
  static_cast<void>(told);
}

// TESSERA_ISA holds for the library's kernels too, which must not have been chosen before.
void keep_library_to_isa() {
  static const bool kept = [] {
    if (!isa_is_asked_for() || cpu_isa() < Isa::kV3) return true;  // these have one set
    const dnnl_cpu_isa_t most = cpu_isa() == Isa::kV3     ? dnnl_cpu_isa_avx2
                                : cpu_isa() == Isa::kV4   ? dnnl_cpu_isa_avx512_core
                                : cpu_isa() == Isa::kBf16 ? dnnl_cpu_isa_avx512_core_bf16
                                                          : dnnl_cpu_isa_avx512_core_amx;
    return dnnl_set_max_cpu_isa(most) == dnnl_success;
  }();
  TS_CHECK_AS(UnsupportedError, kept, "gemm", "TESSERA_ISA is ", name_of(cpu_isa()),
              ", and oneDNN cannot be kept to it: this process has used oneDNN before; unset "
              "TESSERA_ISA, or set ONEDNN_MAX_CPU_ISA as well");
}

// sgemm on this thread alone, whose signals are held: with AVX-512 some kernels of oneDNN 2.6 keep
// their operands in the stack pointer's register, so that a handler's frame is written over the
// heap. It would cut K by the number of threads that OpenMP offers, and so change bits with it.
void sgemm_on_this_thread(const SgemmView& a_view, const SgemmView& b_view, int64_t m, int64_t n,
                          int64_t k, const void* a, const void* b, bool accumulate, void* c,
                          int64_t c_row_stride) {
  const int threads = omp_get_max_threads();
  omp_set_num_threads(1);
  dnnl_sgemm(a_view.transposed, b_view.transposed, m, n, k, 1.0f, static_cast<const float*>(a),
             a_view.leading, static_cast<const float*>(b), b_view.leading, accumulate ? 1.0f : 0.0f,
             static_cast<float*>(c), c_row_stride);
  omp_set_num_threads(threads);
}
#endif

// Below it the tiles of a product of split f32 are mostly padding.
constexpr int64_t kLeastSplit = 32;

void gemm_floating(const Gemm& p) {
  const bool is_f64 = p.dtype == kF64;
  const DType sum_dtype = is_f64 ? kF64 : kF32;
  const bool splits = (p.dtype == kF32 || p.dtype == kF16) && p.m >= kLeastSplit &&
                      p.n >= kLeastSplit && p.k >= kLeastSplit;
  const Isa isa = cpu_isa() == Isa::kAmx && !splits && p.dtype != kBF16 ? Isa::kV4 : cpu_isa();
  // Sums go straight to C where C has their type and is set or added to.
  const bool in_place = p.result_dtype == sum_dtype && p.alpha == 1 && (p.beta == 0 || p.beta == 1);
  bool use_sgemm = false;
#if defined(TESSERA_WITH_ONEDNN)
  const SgemmView view_a(p.a, p.m, p.k), view_b(p.b, p.k, p.n);
  use_sgemm = p.dtype == kF32 && view_a.leading > 0 && view_b.leading > 0 &&
              !beats_sgemm(p, isa, view_a) && has_sgemm();
  if (use_sgemm) keep_library_to_isa();
#endif
  // sgemm cuts columns by itself.
  const Tiling tiling(p.m, p.n, p.k, p.batch, use_sgemm ? 2 * kGemmTileColumns : kGemmTileColumns,
                      TS_SIMD_CALL(gemm_column_multiple, p.dtype, isa));
  const int64_t tiles = tiling.row_tiles * tiling.column_tiles;
  int64_t panel_bytes =
      use_sgemm ? 0 : TS_SIMD_CALL(gemm_scratch_bytes, tiling.rows, tiling.columns);
#if defined(TESSERA_WITH_ONEDNN)
  const bool gathers_a =
      use_sgemm && view_a.transposed == 'T' && gathers_tile(tiling.rows, view_a.leading, p.k);
  const bool gathers_b =
      use_sgemm && view_b.transposed == 'N' && gathers_tile(tiling.columns, view_b.leading, p.k);
  const int64_t gathered_a_bytes = gathers_a ? tiling.rows * p.k * size_of(kF32) : 0;
  if (use_sgemm) {
    panel_bytes = gathered_a_bytes + (gathers_b ? tiling.columns * p.k * size_of(kF32) : 0);
  }
#endif
  const int64_t sum_bytes = in_place ? 0 : tiling.rows * tiling.columns * size_of(sum_dtype);
  Scratch scratch(tiles * p.batch, panel_bytes + sum_bytes);
  std::optional<BlockSignalsGuard> held;  // workers hold theirs always
  if (use_sgemm) held.emplace();

  parallel_for(tiles * p.batch, 1, [&](int64_t begin, int64_t end) {
    char* const slice = scratch.take();
    for (int64_t task = begin; task < end; ++task) {
      const int64_t batch = task / tiles, index = task % tiles;
      const int64_t row = index / tiling.column_tiles * tiling.rows;
      const int64_t column = index % tiling.column_tiles * tiling.columns;
      const int64_t m = std::min(tiling.rows, p.m - row);
      const int64_t n = std::min(tiling.columns, p.n - column);
      const int64_t a_offset = (p.a_offsets ? p.a_offsets[batch] : 0) + row * p.a.row_stride;
      const int64_t b_offset = (p.b_offsets ? p.b_offsets[batch] : 0) + column * p.b.column_stride;
      const int64_t c_offset =
          (p.c_offsets ? p.c_offsets[batch] : 0) + row * p.c_row_stride + column;
      char* const c = at(p.c, c_offset, p.result_dtype);
      const char* const a = at(p.a.data, a_offset, p.dtype);
      const char* const b = at(p.b.data, b_offset, p.dtype);
      void* const sums = in_place ? c : slice + panel_bytes;
      const int64_t sums_row_stride = in_place ? p.c_row_stride : n;
      const bool accumulate = in_place && p.beta == 1;
      const int64_t bias_offset = p.bias_kind == GemmBias::kColumn ? column : row;
      const GemmFinish finish{
          m,
          n,
          sums,
          sums_row_stride,
          c,
          p.c_row_stride,
          p.result_dtype,
          p.alpha,
          in_place ? 0 : p.beta,
          p.bias_kind == GemmBias::kNone ? nullptr : at(p.bias, bias_offset, p.result_dtype),
          p.bias_kind,
          rounds_bf16()};
      const bool finishes = !in_place || p.bias_kind != GemmBias::kNone;
      if (use_sgemm) {
#if defined(TESSERA_WITH_ONEDNN)
        SgemmView tile_a = view_a, tile_b = view_b;
        const void *left = a, *right = b;
        if (gathers_a) {
          left = gather_tile(a, p.k, m, view_a.leading, slice);
          tile_a.leading = m;
        }
        if (gathers_b) {
          right = gather_tile(b, p.k, n, view_b.leading, slice + gathered_a_bytes);
          tile_b.leading = n;
        }
        sgemm_on_this_thread(tile_a, tile_b, m, n, p.k, left, right, accumulate, sums,
                             sums_row_stride);
        if (finishes) TS_SIMD_CALL(gemm_finish, finish);
#endif
      } else {
        const GemmTile tile{m,
                            n,
                            p.k,
                            p.dtype,
                            a,
                            p.a.row_stride,
                            p.a.column_stride,
                            b,
                            p.b.row_stride,
                            p.b.column_stride,
                            sums,
                            sums_row_stride,
                            accumulate,
                            !in_place,
                            isa,
                            slice,
                            finishes ? &finish : nullptr};
        TS_SIMD_CALL(gemm_tile, tile);
      }
    }
  });
#if defined(TESSERA_WITH_ONEDNN)
  if (use_sgemm) tell_end_of_sgemm();
#endif
}

// Cut along K into parts whose sums are then added, in order: of a product with a small C and a
// long K, tiles of a cut C would pack as much as they multiply.
constexpr int64_t kDepthParts = 4;
constexpr int64_t kLeastPartDepth = 4096;

bool cuts_depth(const Gemm& p) {
  return p.dtype == kBF16 && p.batch == 1 && p.m <= kGemmTileRows && p.n <= kGemmTileColumns &&
         std::min(p.m, p.n) >= 128 && p.k >= kDepthParts * kLeastPartDepth;
}

void gemm_by_depth(const Gemm& p) {
  const int64_t depth = p.k / kDepthParts, last = p.k - (kDepthParts - 1) * depth;
  const int64_t sums = p.m * p.n, bytes = kDepthParts * sums * size_of(kF32);
  Scratch scratch(1, bytes);
  auto* const parts = reinterpret_cast<float*>(scratch.take());
  int64_t a_offsets[kDepthParts], b_offsets[kDepthParts], c_offsets[kDepthParts];
  for (int64_t i = 0; i < kDepthParts; ++i) {
    a_offsets[i] = (p.a_offsets ? p.a_offsets[0] : 0) + i * depth * p.a.column_stride;
    b_offsets[i] = (p.b_offsets ? p.b_offsets[0] : 0) + i * depth * p.b.row_stride;
    c_offsets[i] = i * sums;
  }
  // What K leaves over is the last part's.
  const int64_t equal = last == depth ? kDepthParts : kDepthParts - 1;
  const auto multiply = [&](int64_t first, int64_t count, int64_t k) {
    gemm_floating({.m = p.m,
                   .n = p.n,
                   .k = k,
                   .dtype = p.dtype,
                   .result_dtype = kF32,
                   .a = p.a,
                   .b = p.b,
                   .c = parts,
                   .c_row_stride = p.n,
                   .batch = count,
                   .a_offsets = a_offsets + first,
                   .b_offsets = b_offsets + first,
                   .c_offsets = c_offsets + first});
  };
  multiply(0, equal, depth);
  if (equal < kDepthParts) multiply(equal, 1, last);
  parallel_for(p.m, 16, [&](int64_t begin, int64_t end) {
    float* const total = parts + begin * p.n;
    for (int64_t part = 1; part < kDepthParts; ++part) {
      const float* const more = total + part * sums;
      for (int64_t i = 0; i < (end - begin) * p.n; ++i) total[i] += more[i];
    }
    const int64_t row = (p.c_offsets ? p.c_offsets[0] : 0) + begin * p.c_row_stride;
    const int64_t bias = p.bias_kind == GemmBias::kRow ? begin : 0;
    const GemmFinish finish{
        end - begin,
        p.n,
        total,
        p.n,
        at(p.c, row, p.result_dtype),
        p.c_row_stride,
        p.result_dtype,
        p.alpha,
        p.beta,
        p.bias_kind == GemmBias::kNone ? nullptr : at(p.bias, bias, p.result_dtype),
        p.bias_kind,
        rounds_bf16()};
    TS_SIMD_CALL(gemm_finish, finish);
  });
}

// Few rows of C, or one column, whose problem is transposed to one row: C = a B.
struct RowsProblem {
  int64_t m, n;
  GemmOperand a, b;
  const int64_t *a_offsets, *b_offsets;
  int64_t c_column_stride;
  bool transposed;

  explicit RowsProblem(const Gemm& p) : transposed(p.n == 1 && p.m > 1) {
    m = transposed ? 1 : p.m;
    n = transposed ? p.m : p.n;
    a = transposed ? GemmOperand{p.b.data, p.b.column_stride, p.b.row_stride} : p.a;
    b = transposed ? GemmOperand{p.a.data, p.a.column_stride, p.a.row_stride} : p.b;
    a_offsets = transposed ? p.b_offsets : p.a_offsets;
    b_offsets = transposed ? p.a_offsets : p.b_offsets;
    c_column_stride = transposed ? p.c_row_stride : 1;
  }

  // Up to the number of rows from which tiles of C are as fast: with a short K dot products are
  // mostly the adding of lanes, and few columns of a matrix in rows would leave registers empty. (64
  // rows of 384: 7% slower than tiles with weights in L2, 15% faster in L3; Zen 5, f32.)
  bool are_few(const Gemm& p) const {
    constexpr int64_t kMost = 64, kMostBesideAmx = 16;
    const bool in_amx = cpu_isa() == Isa::kAmx && p.dtype != kF64;
    const int64_t most = !in_amx ? kMost : p.dtype == kBF16 ? kMostBesideAmx : kLeastSplit - 1;
    if (m > most) return false;
    return b.row_stride == 1 ? m == 1 || m <= p.k / 6 : b.column_stride == 1 && n >= 32;
  }
};

// The rows of a in the type that is multiplied, `stride` elements apart.
void convert_rows(const Gemm& p, const RowsProblem& rows, DType dtype, int64_t stride,
                  char* target) {
  dispatch_floating(p.dtype, "gemm", [&]<class T>() {
    dispatch_floating(dtype, "gemm", [&]<class Left>() {
      for (int64_t row = 0; row < p.batch * rows.m; ++row) {
        const T* const from = static_cast<const T*>(rows.a.data) +
                              (rows.a_offsets ? rows.a_offsets[row / rows.m] : 0) +
                              row % rows.m * rows.a.row_stride;
        Left* const to = reinterpret_cast<Left*>(target) + row * stride;
        const auto convert = [](T x) { return store<Left>(load<Compute<Left>>(x)); };
        const int64_t step = rows.a.column_stride;
        if constexpr (std::is_same_v<T, Left>) {
          if (step == 1) {
            std::memcpy(to, from, static_cast<size_t>(p.k) * sizeof(T));
            continue;
          }
        }
        if (step == 1) {
          for (int64_t k = 0; k < p.k; ++k) to[k] = convert(from[k]);
        } else {
          for (int64_t k = 0; k < p.k; ++k) to[k] = convert(from[k * step]);
        }
      }
    });
  });
}

void gemm_by_rows(const Gemm& p, const RowsProblem& rows) {
  constexpr int64_t kMostSums = 16384;  // at a time: they stay in L2
  constexpr int64_t kLeastWork = 32768;
  // Rows at multiples of this many bytes fall into the same sets of a cache.
  constexpr int64_t kSets = 2048, kPadding = 16;
  const DType sum_dtype = p.dtype == kF64 ? kF64 : kF32;
  const bool in_pairs = p.dtype == kBF16 && rounds_bf16();
  const DType left_dtype = in_pairs ? kBF16 : sum_dtype;
  const bool converts = p.dtype != left_dtype || rows.a.column_stride != 1 ||
                        (rows.m > 1 && rows.a.row_stride * size_of(p.dtype) % kSets == 0);
  const int64_t a_row_stride = converts ? (p.k + 63) / 64 * 64 + 64 : rows.a.row_stride;
  Scratch left(1, converts ? p.batch * rows.m * a_row_stride * size_of(left_dtype) : 0);
  char* const converted = converts ? left.take() : nullptr;
  if (converts) convert_rows(p, rows, left_dtype, a_row_stride, converted);
  const int64_t most_columns = kMostSums / rows.m / 64 * 64;
  const int64_t grain = (kLeastWork / (p.k * rows.m) + 64) / 64 * 64;
  Scratch scratch(p.batch * ((rows.n + 63) / 64),
                  (kMostSums + rows.m * kPadding) * size_of(sum_dtype));
  parallel_for(p.batch * rows.n, grain, [&](int64_t begin, int64_t end) {
    char* const sums = scratch.take();
    for (int64_t first = begin; first < end;) {
      const int64_t batch = first / rows.n, column = first % rows.n;
      const int64_t count = std::min({most_columns, rows.n - column, end - first});
      const int64_t sums_row_stride = (count + 31) / 32 * 32 + kPadding;
      const int64_t b_offset =
          (rows.b_offsets ? rows.b_offsets[batch] : 0) + column * rows.b.column_stride;
      const int64_t c_offset =
          (p.c_offsets ? p.c_offsets[batch] : 0) + column * rows.c_column_stride;
      const void* const a =
          converts
              ? at(static_cast<const void*>(converted), batch * rows.m * a_row_stride, left_dtype)
              : at(rows.a.data, rows.a_offsets ? rows.a_offsets[batch] : 0, p.dtype);
      TS_SIMD_CALL(gemm_rows, GemmRows{rows.m, count, p.k, p.dtype, in_pairs, a, a_row_stride,
                                       at(rows.b.data, b_offset, p.dtype), rows.b.row_stride,
                                       rows.b.column_stride, sums, sums_row_stride});
      const bool bias_by_column =
          p.bias_kind == (rows.transposed ? GemmBias::kRow : GemmBias::kColumn);
      const void* bias = p.bias_kind == GemmBias::kNone
                             ? nullptr
                             : at(p.bias, bias_by_column ? column : 0, p.result_dtype);
      TS_SIMD_CALL(gemm_finish,
                   GemmFinish{rows.transposed ? count : rows.m, rows.transposed ? 1 : count, sums,
                              rows.transposed ? 1 : sums_row_stride,
                              at(p.c, c_offset, p.result_dtype), p.c_row_stride, p.result_dtype,
                              p.alpha, p.beta, bias, p.bias_kind, rounds_bf16()});
      first += count;
    }
  });
}

// beta * C + bias, and the whole product of integers: loops for any numeric type.
template <class T>
void gemm_by_loops(const Gemm& p) {
  using C = Compute<T>;
  const C alpha = static_cast<C>(p.alpha), beta = static_cast<C>(p.beta);
  parallel_for(
      p.batch * p.m, std::max<int64_t>(1, 32768 / std::max<int64_t>(1, p.n * (p.k + 1))),
      [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          const int64_t batch = row / p.m, i = row % p.m;
          const T* a = static_cast<const T*>(p.a.data) + (p.a_offsets ? p.a_offsets[batch] : 0) +
                       i * p.a.row_stride;
          const T* b = static_cast<const T*>(p.b.data) + (p.b_offsets ? p.b_offsets[batch] : 0);
          T* c = static_cast<T*>(p.c) + (p.c_offsets ? p.c_offsets[batch] : 0) + i * p.c_row_stride;
          const T* bias = static_cast<const T*>(p.bias);
          for (int64_t j = 0; j < p.n; ++j) {
            C sum = 0;
            for (int64_t k = 0; k < p.k; ++k) {
              sum += load<C>(a[k * p.a.column_stride]) *
                     load<C>(b[k * p.b.row_stride + j * p.b.column_stride]);
            }
            C value = alpha * sum;
            if (p.beta != 0) value += beta * load<C>(c[j]);
            if (p.bias_kind != GemmBias::kNone) {
              value += load<C>(bias[p.bias_kind == GemmBias::kColumn ? j : i]);
            }
            c[j] = store<T>(value);
          }
        }
      });
}

}  // namespace

void gemm(const Gemm& p) {
  TS_CHECK_DTYPE(p.result_dtype == p.dtype || (p.result_dtype == kF32 && is_low_precision(p.dtype)),
                 "gemm", "the result's dtype must be the operands' or f32 for f16 and bf16; got ",
                 p.dtype, " to ", p.result_dtype);
  if (p.m <= 0 || p.n <= 0 || p.batch <= 0) return;
  if (p.k <= 0) {
    return dispatch_numeric(p.result_dtype, "gemm", [&]<class T>() { gemm_by_loops<T>(p); });
  }
  if (is_integral(p.dtype)) {
    return dispatch_integral(p.dtype, "gemm", [&]<class T>() { gemm_by_loops<T>(p); });
  }
  TS_CHECK_DTYPE(is_floating(p.dtype) && !is_fp8(p.dtype), "gemm",
                 "expects f64, f32, f16, bf16 or integers; got ", p.dtype);
  if (const RowsProblem rows(p); rows.are_few(p)) return gemm_by_rows(p, rows);
  cuts_depth(p) ? gemm_by_depth(p) : gemm_floating(p);
}

}  // namespace tessera::kernels
