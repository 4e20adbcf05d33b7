#include <tessera/core/kernels/gemm/gemm_block.h>
#include <tessera/core/kernels/gemm/gemm_tile.h>

namespace tessera::kernels::TS_SIMD {
namespace {

// A register of T's, widened.
TS_HD Vec<float> load_wide(const float* x) { return Vec<float>::load(x); }
TS_HD Vec<double> load_wide(const double* x) { return Vec<double>::load(x); }
#if defined(__AVX512F__)
template <class T>
TS_HD Vec<float> load_wide(const T* x) {
  return {_mm512_castsi512_ps(load_16_as_f32(x))};
}
#elif defined(__AVX2__)
template <class T>
TS_HD Vec<float> load_wide(const T* x) {
  return {load_8_as_f32(x)};
}
#elif defined(__aarch64__)
template <class T>
TS_HD Vec<float> load_wide(const T* x) {
  return {load_4_as_f32(x), load_4_as_f32(x + 4)};
}
#else
template <class T>
TS_HD Vec<float> load_wide(const T* x) {
  float wide[Vec<float>::kWidth];
  for (int i = 0; i < Vec<float>::kWidth; ++i) wide[i] = load<float>(x[i]);
  return Vec<float>::load(wide);
}
#endif

// As Vec::fma: a column gives the same bits in a register and in the rest after the last one.
template <class C>
TS_HD C multiply_add(C a, C b, C c) {
#if defined(__AVX2__) || defined(__aarch64__)
  if constexpr (sizeof(C) == 4) {
    return __builtin_fmaf(a, b, c);
  } else {
    return __builtin_fma(a, b, c);
  }
#else
  return a * b + c;
#endif
}

// Columns of B that lie in one piece: a dot product each, kColumns at a time.
template <int kColumns, class C, class T>
TS_HD void dot_columns(const C* a, const T* b, int64_t column_stride, int64_t k, C* sums) {
  using V = Vec<C>;
  constexpr int kWidth = V::kWidth;
  V low[kColumns], high[kColumns];  // two chains a column hide the latency of an addition
  for (int j = 0; j < kColumns; ++j) low[j] = high[j] = V::zero();
  int64_t i = 0;
  for (; i + 2 * kWidth <= k; i += 2 * kWidth) {
    const V a_low = V::load(a + i), a_high = V::load(a + i + kWidth);
#pragma GCC unroll 4
    for (int j = 0; j < kColumns; ++j) {
      const T* column = b + j * column_stride + i;
      // The same place of the next columns: the processor follows one stream a page by itself, and
      // here are kColumns: bf16 from 14 to 33 GB/s, f32 from 18 to 20 (bench_gemm head/decode).
      const T* next = column + kColumns * column_stride;
      __builtin_prefetch(next);
      if constexpr (2 * kWidth * sizeof(T) > 64) __builtin_prefetch(next + kWidth);
      low[j] = V::fma(a_low, load_wide(column), low[j]);
      high[j] = V::fma(a_high, load_wide(column + kWidth), high[j]);
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < kColumns; ++j) {
    C lanes[kWidth];
    V::add(low[j], high[j]).store(lanes);
    for (int width = kWidth / 2; width > 0; width /= 2) {
      for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
    }
    C sum = lanes[0];
    const T* column = b + j * column_stride;
    for (int64_t rest = i; rest < k; ++rest) {
      sum = multiply_add(a[rest], load<C>(column[rest]), sum);
    }
    sums[j] = sum;
  }
}

// kRows rows of B, times their elements of a, onto the sums.
template <int kRows, class C, class T>
TS_HD void add_rows(const C* a, const T* b, int64_t row_stride, int64_t n, C* sums) {
  using V = Vec<C>;
  int64_t j = 0;
  for (; j + V::kWidth <= n; j += V::kWidth) {
    V sum = V::load(sums + j);
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) {
      sum = V::fma(V::broadcast(a[row]), load_wide(b + row * row_stride + j), sum);
    }
    sum.store(sums + j);
  }
  for (; j < n; ++j) {
    for (int row = 0; row < kRows; ++row) {
      sums[j] = multiply_add(a[row], load<C>(b[row * row_stride + j]), sums[j]);
    }
  }
}

template <class C, class T>
void multiply_row(const GemmRow& row) {
  const auto* a = static_cast<const C*>(row.a);
  const auto* b = static_cast<const T*>(row.b);
  auto* sums = static_cast<C*>(row.sums);
  if (row.b_row_stride == 1) {
    int64_t j = 0;
    for (; j + 4 <= row.n; j += 4) {
      dot_columns<4>(a, b + j * row.b_column_stride, row.b_column_stride, row.k, sums + j);
    }
    for (; j < row.n; ++j) {
      dot_columns<1>(a, b + j * row.b_column_stride, row.b_column_stride, row.k, sums + j);
    }
    return;
  }
  for (int64_t j = 0; j < row.n; ++j) sums[j] = 0;
  int64_t i = 0;
  for (; i + 4 <= row.k; i += 4) {
    add_rows<4>(a + i, b + i * row.b_row_stride, row.b_row_stride, row.n, sums);
  }
  for (; i < row.k; ++i) {
    add_rows<1>(a + i, b + i * row.b_row_stride, row.b_row_stride, row.n, sums);
  }
}

}  // namespace

void gemm_row(const GemmRow& row) {
  switch (row.dtype) {
    case kF64:
      return multiply_row<double, double>(row);
    case kF32:
      return multiply_row<float, float>(row);
    case kF16:
      return multiply_row<float, f16>(row);
    default:
      return multiply_row<float, bf16>(row);
  }
}

}  // namespace tessera::kernels::TS_SIMD
