// Turns functors into loops; included by elementwise*_simd.cpp only.
#pragma once

#include <type_traits>

#include <tessera/core/functors.h>
#include <tessera/core/kernels/elementwise/elementwise_loops.h>

namespace tessera::kernels::TS_SIMD {

using detail::Loops;

// Output and inputs are the same memory or disjoint, never shifted: iterations are independent.
#define TS_ELEMENTWISE_LOOP _Pragma("GCC ivdep") for (int64_t i = 0; i < count; ++i)

// Functors with a common form: a block for all of which it holds takes it. Bits are the same.
constexpr int64_t kCommonBlock = 512;
template <class F, class C>
inline constexpr bool has_common = std::is_same_v<C, float>&& requires {
  &F::is_common;
};
template <class F, class... Inputs>
TS_HD bool all_common(int64_t count, const Inputs*... x) {
  uint32_t others = 0;
  for (int64_t i = 0; i < count; ++i) others |= static_cast<uint32_t>(!F::is_common(x[i]...));
  return others == 0;
}

template <class F, class C>
void unary_loop(const void* functor, const void* const* inputs, void* output, int64_t count) {
  using R = std::invoke_result_t<const F&, C>;
  const F f = *static_cast<const F*>(functor);
  const C* x = static_cast<const C*>(inputs[0]);
  R* y = static_cast<R*>(output);
  if constexpr (has_common<F, C>) {
    for (int64_t left = count; left > 0; left -= kCommonBlock) {
      count = left < kCommonBlock ? left : kCommonBlock;
      if (all_common<F>(count, x)) {
        TS_ELEMENTWISE_LOOP y[i] = F::common(x[i]);
      } else {
        TS_ELEMENTWISE_LOOP y[i] = f(x[i]);
      }
      x += count, y += count;
    }
  } else {
    TS_ELEMENTWISE_LOOP y[i] = f(x[i]);
  }
}

template <class F, class C>
void binary_loop(const void* functor, const void* const* inputs, void* output, int64_t count) {
  using R = std::invoke_result_t<const F&, C, C>;
  const F f = *static_cast<const F*>(functor);
  const C* a = static_cast<const C*>(inputs[0]);
  const C* b = static_cast<const C*>(inputs[1]);
  R* y = static_cast<R*>(output);
  if constexpr (has_common<F, C>) {
    for (int64_t left = count; left > 0; left -= kCommonBlock) {
      count = left < kCommonBlock ? left : kCommonBlock;
      if (all_common<F>(count, a, b)) {
        TS_ELEMENTWISE_LOOP y[i] = F::common(a[i], b[i]);
      } else {
        TS_ELEMENTWISE_LOOP y[i] = f(a[i], b[i]);
      }
      a += count, b += count, y += count;
    }
  } else {
    TS_ELEMENTWISE_LOOP y[i] = f(a[i], b[i]);
  }
}

template <class F, class C, class A>
void ternary_loop(const void* functor, const void* const* inputs, void* output, int64_t count) {
  using R = std::invoke_result_t<const F&, A, C, C>;
  const F f = *static_cast<const F*>(functor);
  const A* a = static_cast<const A*>(inputs[0]);
  const C* b = static_cast<const C*>(inputs[1]);
  const C* c = static_cast<const C*>(inputs[2]);
  R* y = static_cast<R*>(output);
  TS_ELEMENTWISE_LOOP y[i] = f(a[i], b[i], c[i]);
}

#undef TS_ELEMENTWISE_LOOP

template <class F>
inline constexpr bool has_integers = requires {
  requires F::kIntegers;
};
template <class F>
inline constexpr bool has_condition = requires {
  requires F::kCondition;
};

template <class F>
Loops make_unary_loops() {
  Loops loops{unary_loop<F, float>, unary_loop<F, double>};
  if constexpr (has_integers<F>) loops.of_int64 = unary_loop<F, int64_t>;
  loops.predicate = std::is_same_v<std::invoke_result_t<const F&, float>, bool>;
  return loops;
}

template <class F>
Loops make_binary_loops() {
  Loops loops{binary_loop<F, float>, binary_loop<F, double>};
  if constexpr (has_integers<F>) loops.of_int64 = binary_loop<F, int64_t>;
  loops.predicate = std::is_same_v<std::invoke_result_t<const F&, float, float>, bool>;
  return loops;
}

template <class F>
Loops make_ternary_loops() {
  Loops loops;
  if constexpr (has_condition<F>) {
    loops = {ternary_loop<F, float, uint8_t>, ternary_loop<F, double, uint8_t>,
             ternary_loop<F, int64_t, uint8_t>};
    loops.condition = true;
  } else {
    loops = {ternary_loop<F, float, float>, ternary_loop<F, double, double>};
    if constexpr (has_integers<F>) loops.of_int64 = ternary_loop<F, int64_t, int64_t>;
  }
  return loops;
}

}  // namespace tessera::kernels::TS_SIMD

// Defines the tables of a list of functors: TS_BINARY_FUNCTORS(TS_DEFINE_BINARY).
#define TS_DEFINE_LOOPS(F, make)             \
  template <>                                \
  detail::Loops elementwise_loops<fn::F>() { \
    return make<fn::F>();                    \
  }
#define TS_DEFINE_UNARY(F) TS_DEFINE_LOOPS(F, make_unary_loops)
#define TS_DEFINE_BINARY(F) TS_DEFINE_LOOPS(F, make_binary_loops)
#define TS_DEFINE_TERNARY(F) TS_DEFINE_LOOPS(F, make_ternary_loops)
