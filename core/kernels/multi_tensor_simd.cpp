#include <cmath>

#include <tessera/core/kernels/lanes.h>
#include <tessera/core/kernels/multi_tensor_blocks.h>

namespace tessera::kernels::TS_SIMD {
namespace {

template <bool kL2, bool kAmsgrad, class C>
TS_HD void adam_loop(const AdamStep<C> step, int64_t n, C* TS_RESTRICT param,
                     const C* TS_RESTRICT grad, C* TS_RESTRICT exp_avg, C* TS_RESTRICT exp_avg_sq,
                     C* TS_RESTRICT max_exp_avg_sq) {
  for (int64_t i = 0; i < n; ++i) {
    C g = grad[i] * step.gradient_scale;
    if constexpr (kL2) g = g + step.l2 * param[i];
    const C p = param[i] * step.decay;
    const C m = exp_avg[i] + step.one_minus_beta1 * (g - exp_avg[i]);
    const C v = exp_avg_sq[i] * step.beta2 + step.one_minus_beta2 * g * g;
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    C second = v;
    if constexpr (kAmsgrad) {
      const C largest = max_exp_avg_sq[i];
      second = v > largest || v != v ? v : largest;
      max_exp_avg_sq[i] = second;
    }
    const C denominator = square_root(second) / step.correction2_root + step.eps;
    param[i] = p - step.step_size * m / denominator;
  }
}

}  // namespace

template <class C>
void adam_block(const AdamStep<C>& step, int64_t n, C* param, const C* grad, C* exp_avg,
                C* exp_avg_sq, C* max_exp_avg_sq) {
  if (step.l2 != 0) {
    if (max_exp_avg_sq != nullptr) {
      adam_loop<true, true>(step, n, param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq);
    } else {
      adam_loop<true, false>(step, n, param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq);
    }
  } else if (max_exp_avg_sq != nullptr) {
    adam_loop<false, true>(step, n, param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq);
  } else {
    adam_loop<false, false>(step, n, param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq);
  }
}

template <class C>
void sgd_block(const SgdStep<C>& given, int64_t n, C* TS_RESTRICT param, const C* TS_RESTRICT grad,
               C* TS_RESTRICT momentum_buffer) {
  const SgdStep<C> step = given;
  // g + l2 * p only where asked for: an infinite parameter times 0 would be NaN.
  const bool has_l2 = step.l2 != 0;
  if (!step.has_momentum) {
    for (int64_t i = 0; i < n; ++i) {
      C g = grad[i] * step.gradient_scale;
      if (has_l2) g = g + step.l2 * param[i];
      param[i] = param[i] - step.lr * g;
    }
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    C g = grad[i] * step.gradient_scale;
    if (has_l2) g = g + step.l2 * param[i];
    C buffer = g;
    if (!step.first) buffer = step.momentum * momentum_buffer[i] + step.one_minus_dampening * g;
    momentum_buffer[i] = buffer;
    const C update = step.nesterov ? g + step.momentum * buffer : buffer;
    param[i] = param[i] - step.lr * update;
  }
}

template <class C>
void lion_block(const LionStep<C>& given, int64_t n, C* TS_RESTRICT param,
                const C* TS_RESTRICT grad, C* TS_RESTRICT exp_avg) {
  const LionStep<C> step = given;
  for (int64_t i = 0; i < n; ++i) {
    const C g = grad[i] * step.gradient_scale, m = exp_avg[i];
    const C direction = step.beta1 * m + step.one_minus_beta1 * g;
    // NaN stays NaN: a bad gradient shows in the parameter.
    const C sign = direction > 0 ? C(1) : direction < 0 ? C(-1) : direction;
    param[i] = param[i] * step.decay - step.lr * sign;
    exp_avg[i] = step.beta2 * m + step.one_minus_beta2 * g;
  }
}

template <class C>
void adagrad_block(const AdagradStep<C>& given, int64_t n, C* TS_RESTRICT param,
                   const C* TS_RESTRICT grad, C* TS_RESTRICT state_sum) {
  const AdagradStep<C> step = given;
  const bool has_l2 = step.l2 != 0;
  for (int64_t i = 0; i < n; ++i) {
    C g = grad[i] * step.gradient_scale;
    if (has_l2) g = g + step.l2 * param[i];
    const C sum = state_sum[i] + g * g;
    state_sum[i] = sum;
    param[i] = param[i] - step.lr * g / (square_root(sum) + step.eps);
  }
}

template <class C>
void rmsprop_block(const RmspropStep<C>& given, int64_t n, C* TS_RESTRICT param,
                   const C* TS_RESTRICT grad, C* TS_RESTRICT square_avg, C* TS_RESTRICT grad_avg,
                   C* TS_RESTRICT momentum_buffer) {
  const RmspropStep<C> step = given;
  const bool has_l2 = step.l2 != 0, centered = grad_avg != nullptr;
  const bool has_momentum = momentum_buffer != nullptr;
  for (int64_t i = 0; i < n; ++i) {
    C g = grad[i] * step.gradient_scale;
    if (has_l2) g = g + step.l2 * param[i];
    C average = step.alpha * square_avg[i] + step.one_minus_alpha * g * g;
    square_avg[i] = average;
    if (centered) {
      const C mean = grad_avg[i] + step.one_minus_alpha * (g - grad_avg[i]);
      grad_avg[i] = mean;
      average = average - mean * mean;
    }
    const C denominator = square_root(average) + step.eps;
    if (has_momentum) {
      const C buffer = step.momentum * momentum_buffer[i] + g / denominator;
      momentum_buffer[i] = buffer;
      param[i] = param[i] - step.lr * buffer;
    } else {
      param[i] = param[i] - step.lr * g / denominator;
    }
  }
}

template <class C>
void lerp_block(int64_t n, C* TS_RESTRICT average, const C* TS_RESTRICT x, C weight) {
  // torch's lerp: from the nearer end, so that weight 1 gives x exactly.
  if (weight < C(0.5)) {
    for (int64_t i = 0; i < n; ++i) average[i] = average[i] + weight * (x[i] - average[i]);
  } else {
    const C rest = C(1) - weight;
    for (int64_t i = 0; i < n; ++i) average[i] = x[i] - (x[i] - average[i]) * rest;
  }
}

template <class C>
void scale_block(int64_t n, C* x, C factor) {
  for (int64_t i = 0; i < n; ++i) x[i] *= factor;
}

template <class C>
void clamp_block(int64_t n, C* x, C limit) {
  for (int64_t i = 0; i < n; ++i) {
    const C low = x[i] < -limit ? -limit : x[i];
    x[i] = low > limit ? limit : low;
  }
}

double power_sum_block(DType dtype, const void* data, int64_t n, double p) {
  return visit_floating(dtype, [&]<class T>() -> double {
    using C = Compute<T>;
    const T* x = static_cast<const T*>(data);
    const auto add = [](auto a, auto b) TS_LANES { return a + b; };
    const auto largest = [](auto a, auto b) TS_LANES { return (b > a) | (b != b) ? b : a; };
    double result = 0;
    C buffer[kBlock];
    double powers[kBlock];
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      const int64_t count = n - begin < kBlock ? n - begin : kBlock;
      const C* block = stage_in<C>(x + begin, count, buffer);
      if (p == 2) {
        result += fold_lanes(
            block, count, 0.0, [](auto a, auto v) TS_LANES { return a + v * v; }, add);
      } else if (p == 1) {
        result += fold_lanes(
            block, count, 0.0, [](auto a, auto v) TS_LANES { return a + (v < 0 ? -v : v); }, add);
      } else if (__builtin_isinf(p)) {
        const double block_largest = fold_lanes(
            block, count, 0.0, [&](auto a, auto v) TS_LANES { return largest(a, v < 0 ? -v : v); },
            largest);
        result = largest(result, block_largest);
      } else {
        for (int64_t i = 0; i < count; ++i) {
          powers[i] = __builtin_pow(absolute(static_cast<double>(block[i])), p);
        }
        result += fold_lanes(powers, count, 0.0, add, add);
      }
    }
    return result;
  });
}

#define TS_INSTANTIATE(C)                                                                   \
  template void adam_block<C>(const AdamStep<C>&, int64_t, C*, const C*, C*, C*, C*);       \
  template void sgd_block<C>(const SgdStep<C>&, int64_t, C*, const C*, C*);                 \
  template void lion_block<C>(const LionStep<C>&, int64_t, C*, const C*, C*);               \
  template void adagrad_block<C>(const AdagradStep<C>&, int64_t, C*, const C*, C*);         \
  template void rmsprop_block<C>(const RmspropStep<C>&, int64_t, C*, const C*, C*, C*, C*); \
  template void lerp_block<C>(int64_t, C*, const C*, C);                                    \
  template void scale_block<C>(int64_t, C*, C);                                             \
  template void clamp_block<C>(int64_t, C*, C);
TS_INSTANTIATE(float)
TS_INSTANTIATE(double)
#undef TS_INSTANTIATE

}  // namespace tessera::kernels::TS_SIMD
