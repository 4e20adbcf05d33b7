// The end of sums over rows: blocks of a kernel have summed some rows each, in the compute type,
// and one launch sums those sums, of up to three matrices of one size, and rounds them.
//
//     ColumnFold<T> fold{.rows = blocks, .columns = C};
//     fold.add(partials, result);     // [blocks, C] of Compute<T>; [C] of T or Compute<T>
//     launch_column_fold("norm_fold", fold);
#pragma once

#include <cstdint>
#include <type_traits>

#include <tessera/core/cuda/launch.h>
#include <tessera/core/dispatch.h>
#include <tessera/core/error.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera::kernels {

template <class T>
struct ColumnFold {
  using A = Compute<T>;
  struct One {
    const A* partials;
    A* wide;  // the result, or
    T* narrow;
  };
  int64_t rows = 0, columns = 0;
  One all[3] = {};
  int count = 0;

  void add(const Tensor& partials, const Tensor& result) {
    const bool narrow = !std::is_same_v<T, A> && result.dtype() == dtype_of<T>;
    TS_CHECK_DTYPE(narrow || result.dtype() == dtype_of<A>, "sums of columns", "are ", dtype_of<T>,
                   " or ", dtype_of<A>, "; got ", result);
    all[count++] = {partials.data_as<A>(), narrow ? nullptr : result.data_as<A>(),
                    narrow ? result.data_as<T>() : nullptr};
  }
};

// A block has 32 columns of a matrix, each of kFoldLines warps every kFoldLines-th row; their sums
// are joined in the order of the warps, in f64.
inline constexpr int kFoldLines = 16;
template <class T>
__global__ void __launch_bounds__(gpu::kWarp* kFoldLines)
    column_fold_kernel(const ColumnFold<T> p) {
  TS_SHARED(double, sums, kFoldLines* gpu::kWarp);
  const int lane = static_cast<int>(threadIdx.x), line = static_cast<int>(threadIdx.y);
  const int64_t tiles = (p.columns + gpu::kWarp - 1) / gpu::kWarp;
  // By comparisons, as an index would take the list to local memory.
  const int64_t which = blockIdx.x / tiles;
  typename ColumnFold<T>::One one = p.all[0];
  if (which == 1) one = p.all[1];
  if (which == 2) one = p.all[2];
  const int64_t c = blockIdx.x % tiles * gpu::kWarp + lane;
  double total = 0;
  if (c < p.columns) {
    for (int64_t row = line; row < p.rows; row += kFoldLines) {
      total += static_cast<double>(one.partials[row * p.columns + c]);
    }
  }
  sums[line * gpu::kWarp + lane] = total;
  __syncthreads();
  if (line > 0 || c >= p.columns) return;
  for (int l = 1; l < kFoldLines; ++l) total += sums[l * gpu::kWarp + lane];
  const auto value = static_cast<Compute<T>>(total);
  if (one.narrow != nullptr) {
    one.narrow[c] = store<T>(value);
  } else {
    one.wide[c] = value;
  }
}

template <class T>
void launch_column_fold(const char* name, const ColumnFold<T>& fold) {
  if (fold.count == 0 || fold.columns == 0) return;
  using A = Compute<T>;
  gpu::Traffic traffic{fold.count * fold.rows * fold.columns * static_cast<int64_t>(sizeof(A)), 0};
  for (int i = 0; i < fold.count; ++i) {
    const size_t size = fold.all[i].narrow != nullptr ? sizeof(T) : sizeof(A);
    traffic.writes += fold.columns * static_cast<int64_t>(size);
  }
  gpu::launch({.name = name,
               .grid = static_cast<unsigned>(fold.count) * gpu::blocks(fold.columns, gpu::kWarp),
               .block = dim3(gpu::kWarp, kFoldLines),
               .traffic = traffic},
              column_fold_kernel<T>, fold);
}

}  // namespace tessera::kernels
