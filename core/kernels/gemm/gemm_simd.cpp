#include <tessera/core/kernels/gemm/gemm_block.h>
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

void gemm_tile(const GemmTile& tile) {
#if defined(TESSERA_AMX_KERNEL)
  if (tile.use_amx && tile.dtype == kF32) return run_split_tile<AmxTiles, float>(tile);
  if (tile.use_amx && tile.dtype == kF16) return run_split_tile<AmxTiles, f16>(tile);
  if (tile.use_amx) return run_tile<AmxKernel, bf16>(tile);
#endif
  switch (tile.dtype) {
    case kF64:
      return run_tile<FmaKernel<double>, double>(tile);
    case kF32:
      return run_tile<FmaKernel<float>, float>(tile);
    case kF16:
      return run_tile<FmaKernel<float>, f16>(tile);
    default:
      return run_tile<FmaKernel<float>, bf16>(tile);
  }
}

void gemm_finish(const GemmFinish& finish) {
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

}  // namespace tessera::kernels::TS_SIMD
