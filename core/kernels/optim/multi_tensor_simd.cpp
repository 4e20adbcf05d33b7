#include <cmath>

#include <tessera/core/kernels/common/lanes.h>
#include <tessera/core/kernels/optim/multi_tensor_blocks.h>

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

// run<first, second>(): a loop for each case, without the question inside.
TS_HD void with_flags(bool first, bool second, auto&& run) {
  if (first) {
    second ? run.template operator()<true, true>() : run.template operator()<true, false>();
  } else {
    second ? run.template operator()<false, true>() : run.template operator()<false, false>();
  }
}

// Loops over the rules. What a rule leaves alone is `none`.

template <bool kL2, bool kAmsgrad, class C>
TS_HD void adam_loop(const AdamStep<C> step, int64_t n, C* TS_RESTRICT param,
                     const C* TS_RESTRICT grad, C* TS_RESTRICT exp_avg, C* TS_RESTRICT exp_avg_sq,
                     C* TS_RESTRICT max_exp_avg_sq) {
  for (int64_t i = 0; i < n; ++i) {
    C none = 0;
    param[i] = adam_rule(step, kL2, kAmsgrad, param[i], grad[i], exp_avg[i], exp_avg_sq[i],
                         kAmsgrad ? max_exp_avg_sq[i] : none);
  }
}

template <class C, class P, class G, class S>
TS_HD void sgd_loop(const SgdStep<C> step, int64_t n, P* TS_RESTRICT param,
                    const G* TS_RESTRICT grad, S* TS_RESTRICT shadow,
                    C* TS_RESTRICT momentum_buffer) {
  if (!step.has_momentum) {
    for (int64_t i = 0; i < n; ++i) {
      C none = 0;
      const C value = sgd_rule(step, load<C>(param[i]), load<C>(grad[i]), none);
      param[i] = store<P>(value);
      write_shadow(shadow, i, value);
    }
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    const C value = sgd_rule(step, load<C>(param[i]), load<C>(grad[i]), momentum_buffer[i]);
    param[i] = store<P>(value);
    write_shadow(shadow, i, value);
  }
}

template <class C, class P, class G, class S>
TS_HD void lion_loop(const LionStep<C> step, int64_t n, P* TS_RESTRICT param,
                     const G* TS_RESTRICT grad, S* TS_RESTRICT shadow, C* TS_RESTRICT exp_avg) {
  for (int64_t i = 0; i < n; ++i) {
    const C value = lion_rule(step, load<C>(param[i]), load<C>(grad[i]), exp_avg[i]);
    param[i] = store<P>(value);
    write_shadow(shadow, i, value);
  }
}

template <class C, class P, class G, class S>
TS_HD void adagrad_loop(const AdagradStep<C> step, int64_t n, P* TS_RESTRICT param,
                        const G* TS_RESTRICT grad, S* TS_RESTRICT shadow,
                        C* TS_RESTRICT state_sum) {
  for (int64_t i = 0; i < n; ++i) {
    const C value = adagrad_rule(step, load<C>(param[i]), load<C>(grad[i]), state_sum[i]);
    param[i] = store<P>(value);
    write_shadow(shadow, i, value);
  }
}

template <bool kCentered, bool kMomentum, class C, class P, class G, class S>
TS_HD void rmsprop_loop(const RmspropStep<C> step, int64_t n, P* TS_RESTRICT param,
                        const G* TS_RESTRICT grad, S* TS_RESTRICT shadow, C* TS_RESTRICT square_avg,
                        C* TS_RESTRICT grad_avg, C* TS_RESTRICT momentum_buffer) {
  for (int64_t i = 0; i < n; ++i) {
    C none = 0;
    const C value =
        rmsprop_rule(step, kCentered, kMomentum, load<C>(param[i]), load<C>(grad[i]), square_avg[i],
                     kCentered ? grad_avg[i] : none, kMomentum ? momentum_buffer[i] : none);
    param[i] = store<P>(value);
    write_shadow(shadow, i, value);
  }
}

template <class C, class P, class G, class S>
TS_HD void lerp_loop(int64_t n, P* TS_RESTRICT average, const G* TS_RESTRICT x,
                     S* TS_RESTRICT shadow, C weight) {
  for (int64_t i = 0; i < n; ++i) {
    const C value = lerp_rule(weight, load<C>(average[i]), load<C>(x[i]));
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
  with_flags(step.l2 != 0, max_exp_avg_sq != nullptr, [&]<bool kL2, bool kAmsgrad>() TS_LANES {
    adam_loop<kL2, kAmsgrad>(step, n, param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq);
  });
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
    const auto run = [&]<bool kCentered, bool kMomentum>() TS_LANES {
      rmsprop_loop<kCentered, kMomentum>(step, block.n, param, grad, shadow, square_avg, grad_avg,
                                         momentum_buffer);
    };
    with_flags(grad_avg != nullptr, momentum_buffer != nullptr, run);
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
  for (int64_t i = 0; i < n; ++i) x[i] = clamp_rule(limit, x[i]);
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
