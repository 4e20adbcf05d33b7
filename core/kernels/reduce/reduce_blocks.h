// What reduce_cpu.cpp and reduce_simd.cpp share: the kinds of reductions and the loops over blocks
// of the compute type C (float, double, int64_t).
#pragma once

#include <cstdint>
#include <type_traits>

#include <tessera/core/isa.h>
#include <tessera/core/macros.h>

namespace tessera::kernels {

enum class Fold : uint8_t {
  kSum,
  kProd,
  kMax,
  kMin,
  kCountNonzero,
  kSumAbs,
  kSumSquares,
  kSumPowers,  // |x|^p
  kMaxAbs,
  kMinAbs,
  kSumSquaredDeviations,  // (x - shift)^2
  kSumExp,                // exp(x - shift)
};

// Results of blocks are combined in f64 and i64.
template <class C>
using Wide = std::conditional_t<std::is_floating_point_v<C>, double, int64_t>;

// What a fold of nothing gives.
template <class L>
TS_HD L neutral_of(Fold fold) {
  constexpr bool kFloat = std::is_floating_point_v<L>;
  switch (fold) {
    case Fold::kProd:
      return L(1);
    case Fold::kMax:
      return kFloat ? static_cast<L>(-__builtin_inf()) : static_cast<L>(INT64_MIN);
    case Fold::kMin:
    case Fold::kMinAbs:
      return kFloat ? static_cast<L>(__builtin_inf()) : static_cast<L>(INT64_MAX);
    default:  // sums, and the largest of no absolute values
      return L(0);
  }
}

inline constexpr int64_t kColumnTile = 512;  // columns that fold_columns takes at most

// out[r] = fold of x[r * row_stride, ... + n) for r < rows. shift[r] serves the folds that have
// one.
TS_SIMD_DECLARE(template <class C> void fold_rows(Fold fold, double p, const C* x, int64_t rows,
                                                  int64_t row_stride, int64_t n,
                                                  const Wide<C>* shift, Wide<C>* out));
// out[c] joins x[r * row_stride + c] over r < rows, for c < columns.
TS_SIMD_DECLARE(template <class C> void fold_columns(Fold fold, double p, const C* x, int64_t rows,
                                                     int64_t row_stride, int64_t columns,
                                                     const Wide<C>* shift, Wide<C>* out));
// a[i] joins b[i].
TS_SIMD_DECLARE(template <class W> void join_wide(Fold fold, W* a, const W* b, int64_t n));

// The extremum of x[0, n) and its first position; `value` and `index` go on from an earlier block,
// index < 0 where there was none. `base` is the position of x[0].
TS_SIMD_DECLARE(template <class C> void extremum_row(bool largest, const C* x, int64_t n,
                                                     int64_t base, C& value, int64_t& index));
TS_SIMD_DECLARE(template <class C> void extremum_columns(bool largest, const C* x, int64_t n,
                                                         int64_t position, C* values,
                                                         int64_t* indices));

// y[i] = running sum (product) of x, from `carry`, which is updated.
TS_SIMD_DECLARE(template <class C> void scan_row(bool product, bool reverse, const C* x, int64_t n,
                                                 Wide<C>& carry, C* y));
TS_SIMD_DECLARE(template <class C>
                void scan_columns(bool product, const C* x, int64_t n, Wide<C>* carry, C* y));

}  // namespace tessera::kernels
