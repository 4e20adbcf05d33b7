// The largest element of a row and the sum of exponentials relative to it, in one pass; shared by
// softmax_simd.cpp and cross_entropy_simd.cpp.
#pragma once

#include <tessera/core/kernels/common/lanes.h>
#include <tessera/core/math.h>

namespace tessera::kernels::TS_SIMD {
namespace {

template <class C>
struct RowExponentials {
  C largest;   // -infinity where all are
  double sum;  // of exp(x - largest)
};

struct AddStep {
  TS_HD auto operator()(auto a, auto v) const { return a + v; }
};
struct LargerStep {  // NaN stays
  TS_HD auto operator()(auto a, auto v) const { return (v > a) | (v != v) ? v : a; }
};

// exp(x) for x <= 0 (or NaN), 0 below the smallest normal result: a third cheaper than math::exp,
// whose results may be subnormal or infinite.
TS_HD float exp_of_nonpositive(float x) {
  const float result = math::detail::exp_normal(x < -87.0f ? -87.0f : x);
  return x < -87.0f ? 0.0f : result;
}
TS_HD double exp_of_nonpositive(double x) { return math::exp(x); }

// Online over blocks: the sum so far is rescaled where a block has a larger element. `exponentials`
// (kBlock) holds exp(x - largest) of the last block, that is of the row where it has one block.
template <class C, class T>
TS_HD RowExponentials<C> row_exponentials(const T* x, int64_t n, C* TS_RESTRICT buffer,
                                          C* TS_RESTRICT exponentials) {
  const C lowest = static_cast<C>(-__builtin_inf());
  C largest = lowest;
  double sum = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t count = n - begin < kBlock ? n - begin : kBlock;
    const C* block = stage_in<C>(x + begin, count, buffer);
    const C block_largest = fold_lanes(block, count, lowest, LargerStep{}, LargerStep{});
    const C next = LargerStep{}(largest, block_largest);
    if (next == lowest) continue;  // nothing but -infinity yet
    if (next != largest) sum *= static_cast<double>(math::exp(largest - next));
    largest = next;
    for (int64_t i = 0; i < count; ++i) exponentials[i] = exp_of_nonpositive(block[i] - largest);
    sum += static_cast<double>(
        fold_lanes(static_cast<const C*>(exponentials), count, C(0), AddStep{}, AddStep{}));
  }
  return {largest, sum};
}

}  // namespace
}  // namespace tessera::kernels::TS_SIMD
