#include <tessera/distributed/transport/deterministic.h>

#include <algorithm>
#include <array>
#include <utility>

#include <tessera/core/dispatch.h>

namespace tessera::distributed {
namespace {

// Accumulators of a block stay in the first cache while the inputs stream by.
constexpr int64_t kSumBlock = 2048;
// Inputs that one pass takes: their sum is then in registers, and no accumulator is stored. Ops
// that gradients do not use go one by one: each number of inputs is a loop for each dtype.
template <ReduceOp op>
constexpr size_t kTogether = op == ReduceOp::kSum ? 4 : 1;

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

// out[i] = finish(begin(i) op inputs[0][i] op ... op inputs[count - 1][i])
template <ReduceOp op, size_t count, class T, class Begin, class Finish, class Out>
void pass(const std::array<const T*, kTogether<op>>& inputs, Out* out, int64_t length, Begin begin,
          Finish finish) {
  using C = Compute<T>;
  // Written out, not as a loop over the inputs: that one would keep the outer loop from becoming
  // vector code at -O2.
  const auto run = [&]<size_t... r>(std::index_sequence<r...>) {
    [[maybe_unused]] const std::array<const T*, kTogether<op>> input = inputs;
#pragma omp simd
    for (int64_t i = 0; i < length; ++i) {
      C sum = begin(i);
      ((sum = combine<op>(sum, load<C>(input[r][i]))), ...);
      out[i] = finish(sum);
    }
  };
  run(std::make_index_sequence<count>());
}

template <ReduceOp op, class T, class... Arguments>
void last_pass(size_t count, Arguments... arguments) {
  if (count == 0) return pass<op, 0, T>(arguments...);  // one rank
  if constexpr (op == ReduceOp::kSum) {
    switch (count) {
      case 1:
        return pass<op, 1, T>(arguments...);
      case 2:
        return pass<op, 2, T>(arguments...);
      case 3:
        return pass<op, 3, T>(arguments...);
      default:
        break;
    }
  }
  pass<op, kTogether<op>, T>(arguments...);
}

// factor: of the results of kSum; 1, or what makes a mean of floating numbers.
template <ReduceOp op, class T>
void reduce_blocks(std::span<const void* const> inputs, T* out, int64_t count,
                   Compute<T> factor = 1) {
  using C = Compute<T>;
  const auto finish = [=](C sum) {
    if constexpr (op == ReduceOp::kSum && std::is_floating_point_v<C>) {
      return store<T>(sum * factor);
    } else {
      return store<T>(sum);
    }
  };
  const auto keep = [](C sum) { return sum; };
  C sums[kSumBlock];
  for (int64_t begin = 0; begin < count; begin += kSumBlock) {
    const int64_t length = std::min(kSumBlock, count - begin);
    const T* const first = static_cast<const T*>(inputs[0]) + begin;
    size_t r = 1;
    // The first pass begins with input 0, the last writes the result; those before it are full.
    do {
      const size_t together = std::min(kTogether<op>, inputs.size() - r);
      std::array<const T*, kTogether<op>> next{};
      for (size_t i = 0; i < together; ++i) {
        next[i] = static_cast<const T*>(inputs[r + i]) + begin;
      }
      const auto from_first = [first](int64_t i) { return load<C>(first[i]); };
      const auto from_sums = [&sums](int64_t i) { return sums[i]; };
      const bool is_first = r == 1, is_last = r + together == inputs.size();
      if (is_first && is_last) {
        last_pass<op, T>(together, next, out + begin, length, from_first, finish);
      } else if (is_first) {
        pass<op, kTogether<op>, T>(next, sums, length, from_first, keep);
      } else if (is_last) {
        last_pass<op, T>(together, next, out + begin, length, from_sums, finish);
      } else {
        pass<op, kTogether<op>, T>(next, sums, length, from_sums, keep);
      }
      r += together;
    } while (r < inputs.size());
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
        return reduce_blocks<ReduceOp::kSum>(
            inputs, result, count,
            static_cast<Compute<T>>(1.0 / static_cast<double>(inputs.size())));
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
