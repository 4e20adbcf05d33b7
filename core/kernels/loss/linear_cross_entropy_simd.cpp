#include <tessera/core/dispatch.h>
#include <tessera/core/kernels/loss/linear_cross_entropy_rows.h>
#include <tessera/core/math.h>

namespace tessera::kernels::TS_SIMD {
namespace {

constexpr int kLanes = 32;
constexpr int64_t kBlock = 512;

// Gradients below kLeastGradient are set to zero: they, and their products with weights and inputs,
// would be denormal numbers, which take the processor a hundred times longer. No exponential is
// taken below kLeastExponent for the same reason; beside the largest, 1, it vanishes in the sum.
template <class A>
constexpr A kLeastGradient = sizeof(A) == 8 ? A(0x1p-1000) : A(0x1p-100f);
template <class A>
constexpr A kLeastExponent = sizeof(A) == 8 ? A(-700) : A(-80);

template <class A>
TS_HD A bounded_exp(A x) {
  return math::exp(x < kLeastExponent<A> ? kLeastExponent<A> : x);  // not a NaN
}

// A row of logits fits the L2 cache: three passes over it cost one trip to memory.
template <class A, class T>
void run(const LogitRows& p) {
  for (int64_t row = 0; row < p.rows; ++row) {
    A* logits = static_cast<A*>(p.logits) + row * p.classes;
    const int64_t target = p.targets[row];
    if (target < 0) {
      p.losses[row] = 0;
      __builtin_memset(static_cast<void*>(logits), 0, static_cast<size_t>(p.classes) * sizeof(T));
      continue;
    }
    const A target_logit = logits[target];
    A maxima[kLanes], sums[kLanes] = {};
    for (A& lane : maxima) lane = logits[0];
    const int64_t even = p.classes / kLanes * kLanes;
    for (int64_t c = 0; c < even; c += kLanes) {
      for (int l = 0; l < kLanes; ++l) {
        maxima[l] = logits[c + l] > maxima[l] ? logits[c + l] : maxima[l];
      }
    }
    for (int64_t c = even; c < p.classes; ++c) {
      maxima[c - even] = logits[c] > maxima[c - even] ? logits[c] : maxima[c - even];
    }
    A maximum = maxima[0];
    for (A lane : maxima) maximum = lane > maximum ? lane : maximum;
    for (int64_t c = 0; c < even; c += kLanes) {
      for (int l = 0; l < kLanes; ++l) {
        logits[c + l] = bounded_exp(logits[c + l] - maximum);
        sums[l] += logits[c + l];
      }
    }
    for (int64_t c = even; c < p.classes; ++c) {
      logits[c] = bounded_exp(logits[c] - maximum);
      sums[c - even] += logits[c];
    }
    A sum = 0;
    for (A lane : sums) sum += lane;
    p.losses[row] = static_cast<double>(math::log(sum) + (maximum - target_logit));
    if (!p.want_gradients) continue;
    const A scale = static_cast<A>(p.scale), factor = scale / sum;
    const A least = kLeastGradient<A> / factor;
    const T at_target = store<T>(logits[target] * factor - scale);
    // By way of a buffer: a narrow gradient is shorter than the logits it replaces, so that what is
    // written was read before.
    T* gradient = reinterpret_cast<T*>(logits);
    for (int64_t c = 0; c < p.classes; c += kBlock) {
      const int64_t count = p.classes - c < kBlock ? p.classes - c : kBlock;
      T block[kBlock];
      for (int64_t i = 0; i < count; ++i) {
        const A exponential = logits[c + i] < least ? A(0) : logits[c + i];
        block[i] = store<T>(exponential * factor);
      }
      __builtin_memcpy(static_cast<void*>(gradient + c), block,
                       static_cast<size_t>(count) * sizeof(T));
    }
    __builtin_memcpy(static_cast<void*>(gradient + target), &at_target, sizeof(T));
  }
}

}  // namespace

void cross_entropy_rows(const LogitRows& p) {
  switch (p.dtype) {
    case kF64:
      return run<double, double>(p);
    case kF16:
      return run<float, f16>(p);
    case kBF16:
      return run<float, bf16>(p);
    default:
      return run<float, float>(p);
  }
}

}  // namespace tessera::kernels::TS_SIMD
