#include <tessera/core/kernels/gemm/gemm_block.h>
#include <tessera/core/kernels/gemm/gemm_dot.h>
#include <tessera/core/kernels/gemm/gemm_split.h>
#include <tessera/core/kernels/gemm/gemm_tile.h>

namespace tessera::kernels::TS_SIMD {
namespace {

template <class Sum, class T>
void finish_rows(const GemmFinish& finish) {
  const auto* bias = static_cast<const T*>(finish.bias);
  const Sum alpha = static_cast<Sum>(finish.alpha), beta = static_cast<Sum>(finish.beta);
  for (int64_t i = 0; i < finish.m; ++i) {
    const Sum* sums = static_cast<const Sum*>(finish.sums) + i * finish.sums_row_stride;
    T* c = static_cast<T*>(finish.c) + i * finish.c_row_stride;
    const Sum row_bias = finish.bias_kind == GemmBias::kRow ? load<Sum>(bias[i]) : Sum(0);
    if (finish.beta != 0) {
      for (int64_t j = 0; j < finish.n; ++j) {
        const Sum column_bias =
            finish.bias_kind == GemmBias::kColumn ? load<Sum>(bias[j]) : row_bias;
        c[j] = store<T>(alpha * sums[j] + beta * load<Sum>(c[j]) + column_bias);
      }
    } else if (finish.bias_kind == GemmBias::kColumn) {
      for (int64_t j = 0; j < finish.n; ++j) {
        c[j] = store<T>(alpha * sums[j] + load<Sum>(bias[j]));
      }
    } else {
      for (int64_t j = 0; j < finish.n; ++j) c[j] = store<T>(alpha * sums[j] + row_bias);
    }
  }
}

#if defined(TESSERA_DOT_KERNEL)
// The bits of store<bf16>. The instruction would take subnormal numbers, which are rare, for zeros.
TS_HD void store_16(bf16* target, __m512 values) {
  constexpr int kSubnormal = 0x20;
  if (__builtin_expect(_mm512_fpclass_ps_mask(values, kSubnormal) != 0, 0)) {
    alignas(64) float numbers[16];
    _mm512_store_ps(numbers, values);
    for (int j = 0; j < 16; ++j) target[j] = store<bf16>(numbers[j]);
    return;
  }
  __m256i rounded;
  __asm__("vcvtneps2bf16 %1, %0" : "=v"(rounded) : "v"(values));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), rounded);
}

// finish_rows on a processor with AVX-512 BF16, where C is set.
void set_rows_of_bf16(const GemmFinish& finish) {
  const auto* bias = static_cast<const bf16*>(finish.bias);
  const float alpha = static_cast<float>(finish.alpha);
  const bool of_columns = finish.bias_kind == GemmBias::kColumn;
  const int64_t whole = finish.n / 16 * 16;
  for (int64_t i = 0; i < finish.m; ++i) {
    const float* sums = static_cast<const float*>(finish.sums) + i * finish.sums_row_stride;
    bf16* c = static_cast<bf16*>(finish.c) + i * finish.c_row_stride;
    const float row_bias = finish.bias_kind == GemmBias::kRow ? load<float>(bias[i]) : 0.0f;
    const __m512 factor = _mm512_set1_ps(alpha), added = _mm512_set1_ps(row_bias);
    for (int64_t j = 0; j < whole; j += 16) {
      __m512 column_bias = added;
      if (of_columns) {
        const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bias + j));
        column_bias = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
      }
      const __m512 scaled = _mm512_mul_ps(factor, _mm512_loadu_ps(sums + j));
      store_16(c + j, _mm512_add_ps(scaled, column_bias));
    }
    for (int64_t j = whole; j < finish.n; ++j) {
      c[j] = store<bf16>(alpha * sums[j] + (of_columns ? load<float>(bias[j]) : row_bias));
    }
  }
}
#endif

void finish_all(const GemmFinish& finish) {
#if defined(TESSERA_DOT_KERNEL)
  if (finish.rounds_bf16 && finish.dtype == kBF16 && finish.beta == 0) {
    return set_rows_of_bf16(finish);
  }
#endif
  switch (finish.dtype) {
    case kF64:
      return finish_rows<double, double>(finish);
    case kF32:
      return finish_rows<float, float>(finish);
    case kF16:
      return finish_rows<float, f16>(finish);
    default:
      return finish_rows<float, bf16>(finish);
  }
}

// `rows` of a tile from `row` on.
void finish_part(const GemmFinish& whole, int64_t row, int64_t rows, const void* sums) {
  GemmFinish part = whole;
  const int64_t size = whole.dtype == kF64 ? 8 : whole.dtype == kF32 ? 4 : 2;
  part.m = rows;
  part.sums = sums;
  part.c = static_cast<char*>(whole.c) + row * whole.c_row_stride * size;
  if (whole.bias_kind == GemmBias::kRow) {
    part.bias = static_cast<const char*>(whole.bias) + row * size;
  }
  finish_all(part);
}

template <class Kernel, class Source>
void multiply_and_finish(const GemmTile& tile) {
  run_tile<Kernel, Source>(tile, [&](int64_t row, int64_t rows, const void* sums) {
    if (tile.finish != nullptr) finish_part(*tile.finish, row, rows, sums);
  });
}

#if defined(TESSERA_AMX_KERNEL)
template <class Source>
void multiply_split_and_finish(const GemmTile& tile) {
  run_split_tile<AmxTiles, Source>(tile);
  if (tile.finish != nullptr) finish_all(*tile.finish);
}
#endif

}  // namespace

int64_t gemm_scratch_bytes(int64_t m, int64_t n) {
  // Each engine packs at most 2 KiB for a row or column of a block, in panels of at most 32.
  static_assert(FmaKernel<float>::kBlockDepth * 4 <= 2048 &&
                FmaKernel<double>::kBlockDepth * 8 <= 2048);
#if defined(TESSERA_AMX_KERNEL)
  static_assert(SplitAmxKernel::kBlockDepth * SplitAmxKernel::kParts * 2 <= 2048);
#endif
  return (round_up(m, 32) + 32 + round_up(n, 32) + 32) * 2048;
}

int64_t gemm_column_multiple([[maybe_unused]] DType dtype, [[maybe_unused]] Isa isa) {
#if defined(TESSERA_DOT_KERNEL)
  if (isa == Isa::kBf16 && dtype == kBF16) return GemmDotKernel::kColumns;
#endif
  return 32;
}

void gemm_tile(const GemmTile& tile) {
#if defined(TESSERA_AMX_KERNEL)
  if (tile.isa == Isa::kAmx && tile.dtype == kF32) return multiply_split_and_finish<float>(tile);
  if (tile.isa == Isa::kAmx && tile.dtype == kF16) return multiply_split_and_finish<f16>(tile);
  if (tile.isa == Isa::kAmx && tile.dtype == kBF16) {
    return multiply_and_finish<AmxKernel, bf16>(tile);
  }
#endif
#if defined(TESSERA_DOT_KERNEL)
  if (tile.isa == Isa::kBf16 && tile.dtype == kBF16) {
    return multiply_and_finish<GemmDotKernel, bf16>(tile);
  }
#endif
  switch (tile.dtype) {
    case kF64:
      return multiply_and_finish<FmaKernel<double>, double>(tile);
    case kF32:
      return multiply_and_finish<FmaKernel<float>, float>(tile);
    case kF16:
      return multiply_and_finish<FmaKernel<float>, f16>(tile);
    default:
      return multiply_and_finish<FmaKernel<float>, bf16>(tile);
  }
}

void gemm_finish(const GemmFinish& finish) { finish_all(finish); }

}  // namespace tessera::kernels::TS_SIMD
