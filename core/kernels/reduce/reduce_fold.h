// What the reductions of reduce.h are made of, on any device: one fold, one extremum. Internal.
#pragma once

#include <cmath>
#include <cstdint>

#include <tessera/core/kernels/reduce/reduce.h>
#include <tessera/core/kernels/reduce/reduce_blocks.h>
#include <tessera/core/macros.h>

namespace tessera::kernels {

// What is done with the result of a fold.
struct Finish {
  enum Kind : uint8_t {
    kAsIs,
    kDivide,
    kDivideRoot,
    kRoot,
    kAll,
    kFiniteOrZero,
    kLogPlusShift,
    kZeroIsPositive,  // of extrema: which of -0 and 0 came first is not to be seen
  };
  Kind kind = kAsIs;
  double number = 0;  // divisor, exponent or count
};

template <class W>
TS_HD W finished(const Finish& finish, W value, double shift) {
  const double v = static_cast<double>(value);
  switch (finish.kind) {
    case Finish::kDivide:
      return static_cast<W>(v / finish.number);
    case Finish::kDivideRoot:
      return static_cast<W>(::sqrt(v / finish.number));
    case Finish::kRoot:
      return static_cast<W>(finish.number == 2 ? ::sqrt(v) : ::pow(v, 1 / finish.number));
    case Finish::kAll:
      return v == finish.number ? W(1) : W(0);
    case Finish::kFiniteOrZero:
      return ::fabs(v) == static_cast<double>(INFINITY) ? W(0) : value;
    case Finish::kLogPlusShift:
      return static_cast<W>(::log(v) + shift);
    case Finish::kZeroIsPositive:
      return value + W(0);
    default:
      return value;
  }
}

// Folds x over `dims`, calculated in the compute type of `compute`, to a tensor of `dtype`. p: the
// exponent of Fold::kSumPowers. shift: f64, one for each result, or undefined.
Tensor reduce(const char* where, Fold fold, double p, const Tensor& x, const Shape& dims,
              bool keepdim, DType compute, DType dtype, const Tensor& shift, const Finish& finish);

// x seen as (outer, n, inner) around one dimension.
struct Around {
  int64_t outer = 1, n = 1, inner = 1;
  Around(const Tensor& x, int dim) {
    for (int d = 0; d < dim; ++d) outer *= x.shape()[d];
    for (int d = dim + 1; d < x.dim(); ++d) inner *= x.shape()[d];
    if (x.dim() > 0) n = x.shape()[dim];
  }
};
// x: contiguous, with elements; result: contiguous.
void find_extremum(const char* where, const Tensor& x, const Around& a, bool largest,
                   const Extremum& result);

}  // namespace tessera::kernels
