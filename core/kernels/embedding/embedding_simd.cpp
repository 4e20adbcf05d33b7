#include <tessera/core/dispatch.h>
#include <tessera/core/kernels/embedding/embedding.h>

namespace tessera::kernels::TS_SIMD {
namespace {

template <class T>
void rotary_row_any(const T* TS_RESTRICT x, const Compute<T>* TS_RESTRICT cos,
                    const Compute<T>* TS_RESTRICT sin, T* TS_RESTRICT y, int64_t half,
                    bool interleaved, bool inverse) {
  using C = Compute<T>;
  const C sign = inverse ? C(-1) : C(1);
  if (interleaved) {
    for (int64_t i = 0; i < half; ++i) {
      const C a = load<C>(x[2 * i]), b = load<C>(x[2 * i + 1]), s = sign * sin[i];
      y[2 * i] = store<T>(a * cos[i] - b * s);
      y[2 * i + 1] = store<T>(a * s + b * cos[i]);
    }
  } else {
    for (int64_t i = 0; i < half; ++i) {
      const C a = load<C>(x[i]), b = load<C>(x[i + half]), s = sign * sin[i];
      y[i] = store<T>(a * cos[i] - b * s);
      y[i + half] = store<T>(a * s + b * cos[i]);
    }
  }
}

// Sums stay in an array of this length, in the first-level cache, while the rows go by.
constexpr int64_t kColumns = 1024;

template <class T>
void sum_rows_any(const T* rows, int64_t stride, const int64_t* order, int64_t count, T* result,
                  int64_t n, bool adds) {
  using C = Compute<T>;
  if (count == 1 && !adds) {  // most rows of a large vocabulary
    __builtin_memcpy(result, rows + order[0] * stride, static_cast<size_t>(n) * sizeof(T));
    return;
  }
  alignas(64) C sums[kColumns];
  for (int64_t first = 0; first < n; first += kColumns) {
    const int64_t width = n - first < kColumns ? n - first : kColumns;
    const T* row = adds ? result + first : rows + order[0] * stride + first;
    for (int64_t j = 0; j < width; ++j) sums[j] = load<C>(row[j]);
    for (int64_t i = adds ? 0 : 1; i < count; ++i) {
      row = rows + order[i] * stride + first;
      for (int64_t j = 0; j < width; ++j) sums[j] += load<C>(row[j]);
    }
    for (int64_t j = 0; j < width; ++j) result[first + j] = store<T>(sums[j]);
  }
}

}  // namespace

#define TS_EMBEDDING_DEFINE(T, A)                                                               \
  void rotary_row(const T* x, const A* cos, const A* sin, T* y, int64_t half, bool interleaved, \
                  bool inverse) {                                                               \
    rotary_row_any(x, cos, sin, y, half, interleaved, inverse);                                 \
  }                                                                                             \
  void sum_rows(const T* rows, int64_t stride, const int64_t* order, int64_t count, T* result,  \
                int64_t n, bool adds) {                                                         \
    sum_rows_any(rows, stride, order, count, result, n, adds);                                  \
  }
TS_EMBEDDING_DEFINE(double, double)
TS_EMBEDDING_DEFINE(float, float)
TS_EMBEDDING_DEFINE(f16, float)
TS_EMBEDDING_DEFINE(bf16, float)
#undef TS_EMBEDDING_DEFINE

}  // namespace tessera::kernels::TS_SIMD
