#include <algorithm>

#include <tessera/core/dispatch.h>
#include <tessera/core/kernels/common/scratch.h>
#include <tessera/core/kernels/gemm/int8_rows.h>
#include <tessera/core/parallel.h>

namespace tessera::kernels {
namespace {

template <class T>
void multiply_int8(const Int8Rows& p) {
  const auto* const x = static_cast<const T*>(p.x);
  const auto* const bias = static_cast<const T*>(p.bias);
  auto* const y = static_cast<T*>(p.y);
  // Rows at multiples of 2 KiB would fall into the same sets of a cache.
  const int64_t stride = (p.k + 63) / 64 * 64 + 32;
  Scratch wide(1, p.m * stride * size_of(kF32));
  auto* const rows = reinterpret_cast<float*>(wide.take());
  for (int64_t i = 0; i < p.m; ++i) {
    for (int64_t j = 0; j < p.k; ++j) {
      rows[i * stride + j] = load<float>(x[i * p.x_row_stride + j]);
    }
  }
  constexpr int64_t kMostSums = 16384;   // of a thread at a time: they stay in L2
  constexpr int64_t kLeastWork = 32768;  // pays for waking another core
  const int64_t grain = (kLeastWork / std::max<int64_t>(1, p.k * p.m) + 64) / 64 * 64;
  const int64_t most = std::max<int64_t>(64, kMostSums / p.m / 64 * 64);
  Scratch scratch((p.n + 63) / 64, p.m * most * size_of(kF32));
  parallel_for(p.n, grain, [&](int64_t begin, int64_t end) {
    auto* const sums = reinterpret_cast<float*>(scratch.take());
    for (int64_t first = begin; first < end; first += most) {
      const int64_t count = std::min(most, end - first);
      if (p.k == 0) {
        std::fill_n(sums, p.m * most, 0.0f);
      } else {
        TS_SIMD_CALL(int8_sums,
                     Int8Sums{p.m, count, p.k, rows, stride, p.weight + first * p.weight_row_stride,
                              p.weight_row_stride, sums, most});
      }
      for (int64_t i = 0; i < p.m; ++i) {
        for (int64_t j = 0; j < count; ++j) {
          float sum = sums[i * most + j] * int8_scale(p.absmax[first + j]);
          if (bias != nullptr) sum += load<float>(bias[first + j]);
          y[i * p.y_row_stride + first + j] = store<T>(sum);
        }
      }
    }
  });
}

}  // namespace

void int8_rows(const Int8Rows& p) {
  TS_CHECK(p.m <= kMostInt8Rows, "int8_rows", "multiplies up to ", kMostInt8Rows, " rows; got ",
           p.m, "; unpack the weight in tiles and call gemm");
  TS_CHECK_DTYPE(p.dtype == kF32 || p.dtype == kF16 || p.dtype == kBF16, "int8_rows",
                 "expects rows of f32, f16 or bf16; got ", p.dtype);
  if (p.m == 0 || p.n == 0) return;
  dispatch_floating(p.dtype, "int8_rows", [&]<class T>() {
    if constexpr (sizeof(T) <= sizeof(float)) multiply_int8<T>(p);
  });
}

}  // namespace tessera::kernels
