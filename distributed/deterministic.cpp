#include <tessera/distributed/deterministic.h>

#include <algorithm>

#include <tessera/core/dispatch.h>

namespace tessera::distributed {
namespace {

// Accumulators of a block stay in the first cache while the inputs stream by.
constexpr int64_t kBlock = 2048;

template <ReduceOp op, class C>
C combine(C a, C b) {
  if constexpr (op == ReduceOp::kMax) {
    return b > a || b != b ? b : a;  // NaN wins, as in maximum
  } else if constexpr (op == ReduceOp::kMin) {
    return b < a || b != b ? b : a;
  } else if constexpr (std::is_integral_v<C>) {  // integers wrap
    using U = std::make_unsigned_t<C>;
    const U x = static_cast<U>(a), y = static_cast<U>(b);
    return static_cast<C>(op == ReduceOp::kProduct ? x * y : x + y);
  } else {
    return op == ReduceOp::kProduct ? a * b : a + b;
  }
}

template <ReduceOp op, class T>
void reduce_blocks(std::span<const void* const> inputs, T* out, int64_t count) {
  using C = Compute<T>;
  const auto input = [&](size_t r) { return static_cast<const T*>(inputs[r]); };
  const double factor = 1.0 / static_cast<double>(inputs.size());
  C sums[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t length = std::min(kBlock, count - begin);
    const T* first = input(0) + begin;
#pragma omp simd
    for (int64_t i = 0; i < length; ++i) sums[i] = load<C>(first[i]);
    for (size_t r = 1; r < inputs.size(); ++r) {
      const T* next = input(r) + begin;
#pragma omp simd
      for (int64_t i = 0; i < length; ++i) sums[i] = combine<op>(sums[i], load<C>(next[i]));
    }
    T* result = out + begin;
#pragma omp simd
    for (int64_t i = 0; i < length; ++i) {
      if constexpr (op == ReduceOp::kMean && std::is_floating_point_v<C>) {
        result[i] = store<T>(sums[i] * static_cast<C>(factor));
      } else {
        result[i] = store<T>(sums[i]);
      }
    }
  }
}

}  // namespace

void reduce_contributions(std::span<const void* const> inputs, void* out, int64_t count,
                          DType dtype, ReduceOp op) {
  dispatch_numeric(dtype, "reduce_contributions", [&]<class T>() {
    T* result = static_cast<T*>(out);
    switch (op) {
      case ReduceOp::kSum:
        return reduce_blocks<ReduceOp::kSum>(inputs, result, count);
      case ReduceOp::kMean:
        return reduce_blocks<ReduceOp::kMean>(inputs, result, count);
      case ReduceOp::kMax:
        return reduce_blocks<ReduceOp::kMax>(inputs, result, count);
      case ReduceOp::kMin:
        return reduce_blocks<ReduceOp::kMin>(inputs, result, count);
      case ReduceOp::kProduct:
        return reduce_blocks<ReduceOp::kProduct>(inputs, result, count);
    }
  });
}

void scale_contribution(void* data, int64_t count, DType dtype, double factor) {
  dispatch_floating(dtype, "scale_contribution", [&]<class T>() {
    using C = Compute<T>;
    T* values = static_cast<T*>(data);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      values[i] = store<T>(load<C>(values[i]) * static_cast<C>(factor));
    }
  });
}

void check_reduction(DType dtype, ReduceOp op, std::string_view where) {
  TS_CHECK_DTYPE(dtype != kBool && dtype != kF8E4M3 && dtype != kF8E5M2, where, "a reduction of ",
                 dtype, " has no meaning; convert it, or reduce the dtype it stands for");
  TS_CHECK_DTYPE(op != ReduceOp::kMean || is_floating(dtype), where, "the mean of ", dtype,
                 " is no ", dtype, "; reduce the sum and divide, or convert");
}

}  // namespace tessera::distributed
