#include <cmath>

#include <tessera/core/kernels/lanes.h>
#include <tessera/core/kernels/multi_tensor_blocks.h>

namespace tessera::kernels::TS_SIMD {
namespace {

// a + v * v for a v that came from T. In double the square of a narrower number is exact, so that a
// fused product gives the bits of two operations and takes one.
template <class T>
TS_HD double add_square(double a, double v) {
  return sizeof(T) < sizeof(double) ? __builtin_fma(v, v, a) : a + v * v;
}
#if defined(__FMA__)
template <class T>
TS_HD Pack<double> add_square(Pack<double> a, Pack<double> v) {
  if constexpr (sizeof(T) < sizeof(double)) {
#if defined(__AVX512F__)
    return reinterpret_cast<Pack<double>>(_mm512_fmadd_pd(
        reinterpret_cast<__m512d>(v), reinterpret_cast<__m512d>(v), reinterpret_cast<__m512d>(a)));
#else
    return reinterpret_cast<Pack<double>>(_mm256_fmadd_pd(
        reinterpret_cast<__m256d>(v), reinterpret_cast<__m256d>(v), reinterpret_cast<__m256d>(a)));
#endif
  } else {
    return a + v * v;
  }
}
#else
template <class T>
TS_HD Pack<double> add_square(Pack<double> a, Pack<double> v) {
  return a + v * v;
}
#endif

// No shadow: what is written to it goes nowhere.
struct NoShadow {};

template <class S>
TS_HD void write_shadow(S* TS_RESTRICT shadow, int64_t i, float value) {
  if constexpr (!std::is_same_v<S, NoShadow>) shadow[i] = store<S>(value);
}
TS_HD void write_shadow(NoShadow*, int64_t, double) {}

// loop(param, grad, shadow) with the pointers of a block in their types; see updates_directly().
template <class C, class Loop>
TS_HD void with_types(const UpdateBlock& block, Loop&& loop) {
  NoShadow* const none = nullptr;
  if constexpr (std::is_same_v<C, double>) {
    loop(static_cast<double*>(block.param), static_cast<const double*>(block.grad), none);
  } else if (block.param_dtype == DType::kBFloat16) {
    loop(static_cast<bf16*>(block.param), static_cast<const bf16*>(block.grad), none);
  } else if (block.grad_dtype == DType::kBFloat16) {
    loop(static_cast<float*>(block.param), static_cast<const bf16*>(block.grad),
         static_cast<bf16*>(block.shadow));
  } else if (block.shadow != nullptr) {
    loop(static_cast<float*>(block.param), static_cast<const float*>(block.grad),
         static_cast<bf16*>(block.shadow));
  } else {
    loop(static_cast<float*>(block.param), static_cast<const float*>(block.grad), none);
  }
}

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

template <class C, class P, class G, class S>
TS_HD void sgd_loop(const SgdStep<C> step, int64_t n, P* TS_RESTRICT param,
                    const G* TS_RESTRICT grad, S* TS_RESTRICT shadow,
                    C* TS_RESTRICT momentum_buffer) {
  // g + l2 * p only where asked for: an infinite parameter times 0 would be NaN.
  const bool has_l2 = step.l2 != 0;
  if (!step.has_momentum) {
    for (int64_t i = 0; i < n; ++i) {
      const C old = load<C>(param[i]);
      C g = load<C>(grad[i]) * step.gradient_scale;
      if (has_l2) g = g + step.l2 * old;
      const C value = old - step.lr * g;
      param[i] = store<P>(value);
      write_shadow(shadow, i, value);
    }
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    const C old = load<C>(param[i]);
    C g = load<C>(grad[i]) * step.gradient_scale;
    if (has_l2) g = g + step.l2 * old;
    C buffer = g;
    if (!step.first) buffer = step.momentum * momentum_buffer[i] + step.one_minus_dampening * g;
    momentum_buffer[i] = buffer;
    const C update = step.nesterov ? g + step.momentum * buffer : buffer;
    const C value = old - step.lr * update;
    param[i] = store<P>(value);
    write_shadow(shadow, i, value);
  }
}

template <class C, class P, class G, class S>
TS_HD void lion_loop(const LionStep<C> step, int64_t n, P* TS_RESTRICT param,
                     const G* TS_RESTRICT grad, S* TS_RESTRICT shadow, C* TS_RESTRICT exp_avg) {
  for (int64_t i = 0; i < n; ++i) {
    const C g = load<C>(grad[i]) * step.gradient_scale, m = exp_avg[i];
    const C direction = step.beta1 * m + step.one_minus_beta1 * g;
    // NaN stays NaN: a bad gradient shows in the parameter.
    const C sign = direction > 0 ? C(1) : direction < 0 ? C(-1) : direction;
    const C value = load<C>(param[i]) * step.decay - step.lr * sign;
    param[i] = store<P>(value);
    write_shadow(shadow, i, value);
    exp_avg[i] = step.beta2 * m + step.one_minus_beta2 * g;
  }
}

template <class C, class P, class G, class S>
TS_HD void adagrad_loop(const AdagradStep<C> step, int64_t n, P* TS_RESTRICT param,
                        const G* TS_RESTRICT grad, S* TS_RESTRICT shadow,
                        C* TS_RESTRICT state_sum) {
  const bool has_l2 = step.l2 != 0;
  for (int64_t i = 0; i < n; ++i) {
    const C old = load<C>(param[i]);
    C g = load<C>(grad[i]) * step.gradient_scale;
    if (has_l2) g = g + step.l2 * old;
    const C sum = state_sum[i] + g * g;
    state_sum[i] = sum;
    const C value = old - step.lr * g / (square_root(sum) + step.eps);
    param[i] = store<P>(value);
    write_shadow(shadow, i, value);
  }
}

template <class C, class P, class G, class S>
TS_HD void rmsprop_loop(const RmspropStep<C> step, int64_t n, P* TS_RESTRICT param,
                        const G* TS_RESTRICT grad, S* TS_RESTRICT shadow, C* TS_RESTRICT square_avg,
                        C* TS_RESTRICT grad_avg, C* TS_RESTRICT momentum_buffer) {
  const bool has_l2 = step.l2 != 0, centered = grad_avg != nullptr;
  const bool has_momentum = momentum_buffer != nullptr;
  for (int64_t i = 0; i < n; ++i) {
    const C old = load<C>(param[i]);
    C g = load<C>(grad[i]) * step.gradient_scale;
    if (has_l2) g = g + step.l2 * old;
    C average = step.alpha * square_avg[i] + step.one_minus_alpha * g * g;
    square_avg[i] = average;
    if (centered) {
      const C mean = grad_avg[i] + step.one_minus_alpha * (g - grad_avg[i]);
      grad_avg[i] = mean;
      average = average - mean * mean;
    }
    const C denominator = square_root(average) + step.eps;
    C value;
    if (has_momentum) {
      const C buffer = step.momentum * momentum_buffer[i] + g / denominator;
      momentum_buffer[i] = buffer;
      value = old - step.lr * buffer;
    } else {
      value = old - step.lr * g / denominator;
    }
    param[i] = store<P>(value);
    write_shadow(shadow, i, value);
  }
}

template <class C, class P, class G, class S>
TS_HD void lerp_loop(int64_t n, P* TS_RESTRICT average, const G* TS_RESTRICT x,
                     S* TS_RESTRICT shadow, C weight) {
  // torch's lerp: from the nearer end, so that weight 1 gives x exactly.
  const bool near_average = weight < C(0.5);
  const C rest = C(1) - weight;
  for (int64_t i = 0; i < n; ++i) {
    const C old = load<C>(average[i]), end = load<C>(x[i]);
    const C value = near_average ? old + weight * (end - old) : end - (end - old) * rest;
    average[i] = store<P>(value);
    write_shadow(shadow, i, value);
  }
}

}  // namespace

template <class C>
void adam_block(const AdamStep<C>& step, const UpdateBlock& block, C* exp_avg, C* exp_avg_sq,
                C* max_exp_avg_sq) {
  const int64_t n = block.n;
  C* const param = static_cast<C*>(block.param);
  const C* const grad = static_cast<const C*>(block.grad);
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
void sgd_block(const SgdStep<C>& step, const UpdateBlock& block, C* momentum_buffer) {
  with_types<C>(block, [&](auto* param, const auto* grad, auto* shadow) TS_LANES {
    sgd_loop(step, block.n, param, grad, shadow, momentum_buffer);
  });
}

template <class C>
void lion_block(const LionStep<C>& step, const UpdateBlock& block, C* exp_avg) {
  with_types<C>(block, [&](auto* param, const auto* grad, auto* shadow)
                           TS_LANES { lion_loop(step, block.n, param, grad, shadow, exp_avg); });
}

template <class C>
void adagrad_block(const AdagradStep<C>& step, const UpdateBlock& block, C* state_sum) {
  with_types<C>(block, [&](auto* param, const auto* grad, auto* shadow) TS_LANES {
    adagrad_loop(step, block.n, param, grad, shadow, state_sum);
  });
}

template <class C>
void rmsprop_block(const RmspropStep<C>& step, const UpdateBlock& block, C* square_avg, C* grad_avg,
                   C* momentum_buffer) {
  with_types<C>(block, [&](auto* param, const auto* grad, auto* shadow) TS_LANES {
    rmsprop_loop(step, block.n, param, grad, shadow, square_avg, grad_avg, momentum_buffer);
  });
}

template <class C>
void lerp_block(const UpdateBlock& block, C weight) {
  with_types<C>(block, [&](auto* average, const auto* x, auto* shadow)
                           TS_LANES { lerp_loop(block.n, average, x, shadow, weight); });
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
  if (p == 2) {
    return visit_floating(dtype, [&]<class T>() -> double {
      return fold_lanes(
          static_cast<const T*>(data), n, 0.0,
          [](auto a, auto v) TS_LANES { return add_square<T>(a, v); },
          [](auto a, auto b) TS_LANES { return a + b; });
    });
  }
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
      if (p == 1) {
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

#define TS_INSTANTIATE(C)                                                                \
  template void adam_block<C>(const AdamStep<C>&, const UpdateBlock&, C*, C*, C*);       \
  template void sgd_block<C>(const SgdStep<C>&, const UpdateBlock&, C*);                 \
  template void lion_block<C>(const LionStep<C>&, const UpdateBlock&, C*);               \
  template void adagrad_block<C>(const AdagradStep<C>&, const UpdateBlock&, C*);         \
  template void rmsprop_block<C>(const RmspropStep<C>&, const UpdateBlock&, C*, C*, C*); \
  template void lerp_block<C>(const UpdateBlock&, C);                                    \
  template void scale_block<C>(int64_t, C*, C);                                          \
  template void clamp_block<C>(int64_t, C*, C);
TS_INSTANTIATE(float)
TS_INSTANTIATE(double)
#undef TS_INSTANTIATE

}  // namespace tessera::kernels::TS_SIMD
