#include <tessera/core/dispatch.h>
#include <tessera/core/kernels/linear_cross_entropy_rows.h>
#include <tessera/core/math.h>

namespace tessera::kernels::TS_SIMD {
namespace {

constexpr int kLanes = 32;

// A row of logits fits the L2 cache: three passes over it cost one trip to memory.
template <class A, class T>
void run(const CrossEntropyRows& p) {
  for (int64_t row = 0; row < p.rows; ++row) {
    A* TS_RESTRICT logits = static_cast<A*>(p.logits) + row * p.classes;
    const int64_t target = p.targets[row];
    T* gradient = p.gradients == nullptr ? nullptr : static_cast<T*>(p.gradients) + row * p.classes;
    if (target < 0) {
      p.losses[row] = 0;
      if (gradient != nullptr) {
        for (int64_t c = 0; c < p.classes; ++c) gradient[c] = store<T>(A(0));
      }
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
    if (gradient == nullptr) continue;
    const A scale = static_cast<A>(p.scale), factor = scale / sum;
    const A at_target = logits[target] * factor - scale;
    for (int64_t c = 0; c < p.classes; ++c) gradient[c] = store<T>(logits[c] * factor);
    gradient[target] = store<T>(at_target);
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
