#include <tessera/core/kernels/gemm/gemm_block.h>
#include <tessera/core/kernels/gemm/gemm_split.h>
#include <tessera/core/kernels/gemm/gemm_tile.h>

namespace tessera::kernels::TS_SIMD {
namespace {

template <class Kernel, class Source>
void run_tile(const GemmTile& tile) {
  using Value = typename Kernel::Value;
  const auto* a = static_cast<const Source*>(tile.a);
  const auto* b = static_cast<const Source*>(tile.b);
  auto* sums = static_cast<typename Kernel::Accumulator*>(tile.sums);
  // Equal stretches of K, not a full one and a rest.
  const int64_t blocks = (tile.k + Kernel::kBlockDepth - 1) / Kernel::kBlockDepth;
  const int64_t step = round_up((tile.k + blocks - 1) / blocks, 32);
  auto* packed_a = static_cast<Value*>(tile.scratch);
  auto* packed_b = packed_a + round_up(tile.m, Kernel::kRows) * round_up(Kernel::kBlockDepth, 32);
  Kernel::begin();
  for (int64_t k = 0; k < tile.k; k += step) {
    const int64_t depth = tile.k - k < step ? tile.k - k : step;
    pack_rows<Kernel>(a + k * tile.a_column_stride, tile.a_row_stride, tile.a_column_stride, tile.m,
                      depth, packed_a);
    pack_columns<Kernel>(b + k * tile.b_row_stride, tile.b_row_stride, tile.b_column_stride, tile.n,
                         depth, packed_b);
    multiply_panels<Kernel>(tile.m, tile.n, depth, packed_a, packed_b, sums, tile.sums_row_stride,
                            tile.accumulate || k > 0);
  }
  Kernel::end();
}

#if defined(TESSERA_AMX_KERNEL)
// f32, or f16 widened, in three parts. A stretch of K that holds a number that cannot be split goes
// through f32 registers instead.
template <class Source>
void run_split_tile(const GemmTile& tile) {
  using Kernel = SplitAmxKernel;
  const auto* a = static_cast<const Source*>(tile.a);
  const auto* b = static_cast<const Source*>(tile.b);
  auto* sums = static_cast<float*>(tile.sums);
  const int64_t blocks = (tile.k + Kernel::kBlockDepth - 1) / Kernel::kBlockDepth;
  const int64_t step = round_up((tile.k + blocks - 1) / blocks, 32);
  auto* packed_a = static_cast<bf16*>(tile.scratch);
  auto* packed_b = packed_a + round_up(tile.m, Kernel::kRows) * Kernel::padded_depth(step);
  Kernel::begin();
  for (int64_t k = 0; k < tile.k; k += step) {
    const int64_t depth = tile.k - k < step ? tile.k - k : step;
    const Source* a_block = a + k * tile.a_column_stride;
    const Source* b_block = b + k * tile.b_row_stride;
    const bool accumulate = tile.accumulate || k > 0;
    const uint32_t largest_a = Kernel::pack<false>(a_block, tile.a_row_stride, tile.a_column_stride,
                                                   tile.m, depth, packed_a);
    const uint32_t largest_b = Kernel::pack<true>(b_block, tile.b_column_stride, tile.b_row_stride,
                                                  tile.n, depth, packed_b);
    if (largest_a < Kernel::kLargestSplit && largest_b < Kernel::kLargestSplit) {
      multiply_panels<Kernel>(tile.m, tile.n, depth, packed_a, packed_b, sums, tile.sums_row_stride,
                              accumulate);
      continue;
    }
    GemmTile block = tile;
    block.k = depth;
    block.a = a_block;
    block.b = b_block;
    block.accumulate = accumulate;
    run_tile<FmaKernel<float>, Source>(block);
  }
  Kernel::end();
}
#endif

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
  if (tile.use_amx && tile.dtype == kF32) return run_split_tile<float>(tile);
  if (tile.use_amx && tile.dtype == kF16) return run_split_tile<f16>(tile);
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
