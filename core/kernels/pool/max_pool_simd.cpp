#include <tessera/core/dispatch.h>
#include <tessera/core/kernels/pool/max_pool.h>
#include <tessera/core/macros.h>

namespace tessera::kernels::TS_SIMD {
namespace {

// Outputs that are worked on together: rows of them are often shorter than a vector.
constexpr int64_t kOutputs = 256;

// What lies inside of a row of x beside one element of `count` windows, the first of which has it
// at `w`, and -inf for what does not, which is never larger.
template <int kStride, class T, class C>
TS_HD void stage_row(const T* TS_RESTRICT x, int64_t W, int64_t w, int64_t stride, int64_t count,
                     C* TS_RESTRICT row) {
  if constexpr (kStride != 0) stride = kStride;
  const C nothing = -static_cast<C>(__builtin_inf());
  int64_t begin = w < 0 ? (-w + stride - 1) / stride : 0;
  int64_t end = w >= W ? 0 : (W - 1 - w) / stride + 1;
  if (end > count) end = count;
  if (begin > end) begin = end;
  for (int64_t j = 0; j < begin; ++j) row[j] = nothing;
  const T* first = x + w;
  for (int64_t j = begin; j < end; ++j) row[j] = load<C>(first[j * stride]);
  for (int64_t j = end; j < count; ++j) row[j] = nothing;
}

// Without branches: which one is the largest cannot be foretold.
template <class C, class I>
TS_HD void take_larger(const C* TS_RESTRICT values, I place, int64_t count, C* TS_RESTRICT largest,
                       I* TS_RESTRICT places) {
  for (int64_t j = 0; j < count; ++j) {
    const bool better = (values[j] > largest[j]) | (values[j] != values[j]);
    largest[j] = better ? values[j] : largest[j];
    places[j] = better ? place : places[j];
  }
}

// From a window's first element to the first of its elements that is inside.
TS_HD int64_t first_inside(int64_t start, int64_t dilation) {
  return start >= 0 ? 0 : (-start + dilation - 1) / dilation * dilation;
}

// Places of elements are counted from a window's first. I: of the size of C, where they fit into
// it.
template <class I, class T>
void max_pool_any(const PoolWindows& n, const T* x, T* values, int64_t* indices) {
  using C = Compute<T>;
  alignas(64) C largest[kOutputs], staged[kOutputs];
  alignas(64) I places[kOutputs];
  const int64_t columns = n.OW < kOutputs ? n.OW : kOutputs, rows = kOutputs / columns;
  const auto stage = n.geometry.stride[1] == 1   ? stage_row<1, T, C>
                     : n.geometry.stride[1] == 2 ? stage_row<2, T, C>
                                                 : stage_row<0, T, C>;
  const auto h_of = [&](int64_t i) { return i * n.geometry.stride[0] - n.geometry.padding[0]; };
  const auto w_of = [&](int64_t j) { return j * n.geometry.stride[1] - n.geometry.padding[1]; };
  for (int64_t i0 = 0; i0 < n.OH; i0 += rows) {
    const int64_t i1 = i0 + rows < n.OH ? i0 + rows : n.OH;
    for (int64_t j0 = 0; j0 < n.OW; j0 += columns) {
      const int64_t width = j0 + columns < n.OW ? columns : n.OW - j0, count = (i1 - i0) * width;
      for (int64_t j = 0; j < count; ++j) largest[j] = -static_cast<C>(__builtin_inf());
      for (int64_t i = i0; i < i1; ++i) {
        const int64_t row = first_inside(h_of(i), n.geometry.dilation[0]) * n.W;
        for (int64_t j = 0; j < width; ++j) {
          places[(i - i0) * width + j] =
              static_cast<I>(row + first_inside(w_of(j0 + j), n.geometry.dilation[1]));
        }
      }
      for (int64_t kh = 0; kh < n.KH; ++kh) {
        for (int64_t kw = 0; kw < n.KW; ++kw) {
          for (int64_t i = i0; i < i1; ++i) {
            const int64_t h = h_of(i) + kh * n.geometry.dilation[0];
            const bool is_inside = h >= 0 && h < n.H;
            stage(is_inside ? x + h * n.W : x, is_inside ? n.W : 0,
                  w_of(j0) + kw * n.geometry.dilation[1], n.geometry.stride[1], width,
                  staged + (i - i0) * width);
          }
          take_larger(
              staged,
              static_cast<I>(kh * n.geometry.dilation[0] * n.W + kw * n.geometry.dilation[1]),
              count, largest, places);
        }
      }
      for (int64_t i = i0; i < i1; ++i) {
        const int64_t origin = h_of(i) * n.W - n.geometry.padding[1], at = (i - i0) * width;
        for (int64_t j = 0; j < width; ++j) {
          values[i * n.OW + j0 + j] = store<T>(largest[at + j]);
          indices[i * n.OW + j0 + j] = origin + (j0 + j) * n.geometry.stride[1] + places[at + j];
        }
        if (n.geometry.dilation[0] == 1 && n.geometry.dilation[1] == 1) continue;
        const auto is_past = [](int64_t start, int64_t dilation, int64_t size) {
          return start + first_inside(start, dilation) >= size;
        };
        const bool row_is_past = is_past(h_of(i), n.geometry.dilation[0], n.H);
        for (int64_t j = 0; j < width; ++j) {
          if (row_is_past || is_past(w_of(j0 + j), n.geometry.dilation[1], n.W)) {
            indices[i * n.OW + j0 + j] = n.H * n.W;
          }
        }
      }
    }
  }
}

template <class T>
void max_pool_of(const PoolWindows& n, const T* x, T* values, int64_t* indices) {
  // Windows reach over the plane's edges by the padding.
  constexpr int64_t kMost = int64_t{1} << 31;
  if (sizeof(Compute<T>) == 4 &&
      (n.H + 2 * n.geometry.padding[0]) * n.W + n.geometry.padding[1] < kMost) {
    max_pool_any<int32_t>(n, x, values, indices);
  } else {
    max_pool_any<int64_t>(n, x, values, indices);
  }
}

}  // namespace

#define TS_MAX_POOL_DEFINE(T)                                                          \
  void max_pool_plane(const PoolWindows& n, const T* x, T* values, int64_t* indices) { \
    max_pool_of(n, x, values, indices);                                                \
  }
TS_MAX_POOL_DEFINE(double)
TS_MAX_POOL_DEFINE(float)
TS_MAX_POOL_DEFINE(f16)
TS_MAX_POOL_DEFINE(bf16)
#undef TS_MAX_POOL_DEFINE

}  // namespace tessera::kernels::TS_SIMD
