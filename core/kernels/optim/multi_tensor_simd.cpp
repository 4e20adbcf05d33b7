#include <cmath>

#include <tessera/core/kernels/common/lanes.h>
#include <tessera/core/kernels/optim/multi_tensor_blocks.h>
#include <tessera/core/kernels/optim/state_rounding.h>

namespace tessera::kernels::TS_SIMD {
namespace {

// No model copy: what is written to it goes nowhere.
struct NoModelCopy {};

template <class S>
TS_HD void write_model_copy(S* TS_RESTRICT model_copy, int64_t i, float value) {
  if constexpr (!std::is_same_v<S, NoModelCopy>) model_copy[i] = store<S>(value);
}
TS_HD void write_model_copy(NoModelCopy*, int64_t, double) {}

// loop(param, grad, model_copy) with the pointers of a block in their types; see
// updates_directly().
template <class C, class Loop>
TS_HD void with_types(const UpdateBlock& block, Loop&& loop) {
  NoModelCopy* const none = nullptr;
  if constexpr (std::is_same_v<C, double>) {
    loop(static_cast<double*>(block.param), static_cast<const double*>(block.grad), none);
  } else if (block.param_dtype == DType::kBFloat16) {
    loop(static_cast<bf16*>(block.param), static_cast<const bf16*>(block.grad), none);
  } else if (block.grad_dtype == DType::kBFloat16) {
    loop(static_cast<float*>(block.param), static_cast<const bf16*>(block.grad),
         static_cast<bf16*>(block.model_copy));
  } else if (block.model_copy != nullptr) {
    loop(static_cast<float*>(block.param), static_cast<const float*>(block.grad),
         static_cast<bf16*>(block.model_copy));
  } else {
    loop(static_cast<float*>(block.param), static_cast<const float*>(block.grad), none);
  }
}

// run<kHas>() with the states that there are: a loop for each case, without the question inside.
template <class Rule, int kState = 0, unsigned kHas = 0>
TS_HD void with_states(unsigned has, auto&& run) {
  constexpr unsigned kBit = 1u << kState;
  if constexpr (kState == rules::kNumStates<Rule>) {
    run.template operator()<kHas>();
  } else if constexpr ((rules::optional_states<Rule>() & kBit) == 0) {
    with_states<Rule, kState + 1, kHas | kBit>(has, run);
  } else {
    if ((has & kBit) != 0) {
      with_states<Rule, kState + 1, kHas | kBit>(has, run);
    } else {
      with_states<Rule, kState + 1, kHas>(has, run);
    }
  }
}

// What a rule leaves alone is `none`.
template <class Rule, unsigned kHas, class C, class P, class G, class S>
TS_HD void update_loop(const typename Rule::template Step<C> step, int64_t n, P* TS_RESTRICT param,
                       const G* TS_RESTRICT grad, S* TS_RESTRICT model_copy, C* TS_RESTRICT first,
                       C* TS_RESTRICT second, C* TS_RESTRICT third) {
  constexpr rules::HasStates<kHas> has;
  for (int64_t i = 0; i < n; ++i) {
    C none = 0;
    const C value = rules::update<Rule>(
        step, has, load<C>(param[i]), load<C>(grad[i]), (kHas & 1) != 0 ? first[i] : none,
        (kHas & 2) != 0 ? second[i] : none, (kHas & 4) != 0 ? third[i] : none);
    param[i] = store<P>(value);
    write_model_copy(model_copy, i, value);
  }
}

}  // namespace

template <class Rule, class C>
void update_block(Rule, const typename Rule::template Step<C>& step, const UpdateBlock& block,
                  C* first, C* second, C* third) {
  const unsigned has =
      (first != nullptr ? 1u : 0u) | (second != nullptr ? 2u : 0u) | (third != nullptr ? 4u : 0u);
  with_states<Rule>(has, [&]<unsigned kHas>() TS_LANES {
    if constexpr (rules::in_registers<Rule>()) {
      with_types<C>(block, [&](auto* param, const auto* grad, auto* model_copy) TS_LANES {
        update_loop<Rule, kHas>(step, block.n, param, grad, model_copy, first, second, third);
      });
    } else {
      NoModelCopy* const none = nullptr;
      update_loop<Rule, kHas>(step, block.n, static_cast<C*>(block.param),
                              static_cast<const C*>(block.grad), none, first, second, third);
    }
  });
}

void round_state_block(int64_t n, const float* TS_RESTRICT values,
                       const uint32_t* TS_RESTRICT noise, int state, bf16* TS_RESTRICT states) {
  for (int64_t i = 0; i < n; ++i) states[i] = round_by_noise(values[i], noise[i], state);
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

#define TS_INSTANTIATE(name)                                                                    \
  template void update_block(rules::name, const rules::name::Step<float>&, const UpdateBlock&,  \
                             float*, float*, float*);                                           \
  template void update_block(rules::name, const rules::name::Step<double>&, const UpdateBlock&, \
                             double*, double*, double*);
TS_UPDATE_RULES(TS_INSTANTIATE)
TS_UPDATE_PARTS(TS_INSTANTIATE)
TS_INSTANTIATE(Lerp)
#undef TS_INSTANTIATE
template void scale_block(int64_t, float*, float);
template void scale_block(int64_t, double*, double);
template void clamp_block(int64_t, float*, float);
template void clamp_block(int64_t, double*, double);

}  // namespace tessera::kernels::TS_SIMD
