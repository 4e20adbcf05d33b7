#include <tessera/core/dispatch.h>
#include <tessera/core/kernels/linear_cross_entropy_rows.h>
#include <tessera/core/math.h>

namespace tessera::kernels::TS_SIMD {
namespace {

constexpr int kLanes = 32;
constexpr int64_t kBlock = 512;

// A row of logits fits the L2 cache: three passes over it cost one trip to memory.
template <class A, class T>
void run(const CrossEntropyRows& p) {
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
        logits[c + l] = math::exp(logits[c + l] - maximum);
        sums[l] += logits[c + l];
      }
    }
    for (int64_t c = even; c < p.classes; ++c) {
      logits[c] = math::exp(logits[c] - maximum);
      sums[c - even] += logits[c];
    }
    A sum = 0;
    for (A lane : sums) sum += lane;
    p.losses[row] = static_cast<double>(math::log(sum) + (maximum - target_logit));
    if (!p.want_gradients) continue;
    const A scale = static_cast<A>(p.scale), factor = scale / sum;
    const T at_target = store<T>(logits[target] * factor - scale);
    // By way of a buffer: a narrow gradient is shorter than the logits it replaces, so that what is
    // written was read before.
    T* gradient = reinterpret_cast<T*>(logits);
    for (int64_t c = 0; c < p.classes; c += kBlock) {
      const int64_t count = p.classes - c < kBlock ? p.classes - c : kBlock;
      T block[kBlock];
      for (int64_t i = 0; i < count; ++i) block[i] = store<T>(logits[c + i] * factor);
      __builtin_memcpy(static_cast<void*>(gradient + c), block,
                       static_cast<size_t>(count) * sizeof(T));
    }
    __builtin_memcpy(static_cast<void*>(gradient + target), &at_target, sizeof(T));
  }
}

}  // namespace

void cross_entropy_rows(const CrossEntropyRows& p) {
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
