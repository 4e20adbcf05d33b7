// Turns functors into GPU kernels: one for each functor and lane, which serves all dtypes, strides
// and broadcasts.
//
// A thread calculates kGroup neighbouring elements. The dtype of an operand is looked at once a
// group: a few instructions beside the 16 to 32 bytes that a group moves, so that no kernel is made
// for each pair of dtypes. Operands in order are read and written 16 bytes at a time.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include <tessera/core/approximate.h>
#include <tessera/core/cuda/launch.h>
#include <tessera/core/dispatch.h>
#include <tessera/core/functors.h>
#include <tessera/core/kernels/elementwise/elementwise_loops.h>
#include <tessera/core/kernels/common/strided.cuh>
#include <tessera/core/kernels/common/vector_lanes.cuh>

namespace tessera::kernels {

inline constexpr int kGroup = 8;
inline constexpr int kElementwiseBlock = 256;

template <class C>
struct DevicePort {
  const void* data;  // null: a number
  C number;
  DType dtype;
  bool linear;   // elements lie in the order of the walk
  bool vectors;  // and whole groups are aligned
};

// Where elements of operand k from `position` on lie, of which `count` are asked for. Only an
// operand out of order asks the walk, for as many as the registers of f64 kernels hold beside its
// numbers.
inline constexpr int kFound = 4;
template <class C, int kOperands>
TS_DEVICE void find_some(const DevicePort<C>& port, const DeviceWalk<kOperands>& walk, int k,
                         int64_t position, int count, int64_t (&at)[kFound]) {
  if (!port.linear) return walk.group_offsets(k, position, count, at);
  TS_UNROLL
  for (int i = 0; i < kFound; ++i) at[i] = position + (i < count ? i : 0);
}

template <class C, int kOperands>
TS_DEVICE void load_group(const DevicePort<C>& port, const DeviceWalk<kOperands>& walk, int k,
                          int64_t position, int count, C (&values)[kGroup]) {
  if (port.data == nullptr) {
    TS_UNROLL
    for (int i = 0; i < kGroup; ++i) values[i] = port.number;
    return;
  }
  if (port.vectors && count == kGroup) {
    with_lane_dtype<C>(port.dtype, [&]<class T>() {
      unpack(gpu::load_vector<kGroup>(static_cast<const T*>(port.data) + position), values);
    });
    return;
  }
  TS_UNROLL
  for (int first = 0; first < kGroup; first += kFound) {
    const int left = count - first;
    int64_t at[kFound];
    find_some(port, walk, k, position + (left > 0 ? first : 0), left, at);
    with_lane_dtype<C>(port.dtype, [&]<class T>() {
      TS_UNROLL
      for (int i = 0; i < kFound; ++i) {
        values[first + i] = load<C>(static_cast<const T*>(port.data)[at[i]]);
      }
    });
  }
}

template <class R, int kOperands>
TS_DEVICE void store_group(const DevicePort<R>& port, const DeviceWalk<kOperands>& walk, int k,
                           int64_t position, int count, const R (&values)[kGroup]) {
  void* const data = const_cast<void*>(port.data);
  if (port.vectors && count == kGroup) {
    with_lane_dtype<R>(port.dtype, [&]<class T>() {
      gpu::store_vector(static_cast<T*>(data) + position, pack<T>(values));
    });
    return;
  }
  TS_UNROLL
  for (int first = 0; first < kGroup; first += kFound) {
    const int left = count - first;
    if (left <= 0) return;
    int64_t at[kFound];
    find_some(port, walk, k, position + first, left, at);
    with_lane_dtype<R>(port.dtype, [&]<class T>() {
      TS_UNROLL
      for (int i = 0; i < kFound; ++i) {
        if (i < left) static_cast<T*>(data)[at[i]] = store<T>(values[first + i]);
      }
    });
  }
}

// A: the type of the first argument (uint8_t for a condition), C: of the others, Number: in which
// they are calculated, C or math::Approximate.
template <int kInputs, class F, class A, class C, class R, class Number>
__global__ void __launch_bounds__(kElementwiseBlock)
    elementwise_kernel(const F f, const DeviceWalk<kInputs + 1> walk, const DevicePort<R> output,
                       const DevicePort<A> first, const DevicePort<C> second,
                       const DevicePort<C> third) {
  const int64_t position = gpu::first_index() * kGroup;
  if (position >= walk.numel) return;
  const int count =
      static_cast<int>(walk.numel - position < kGroup ? walk.numel - position : kGroup);
  A a[kGroup];
  C b[kGroup], c[kGroup];
  R y[kGroup];
  load_group(first, walk, 1, position, count, a);
  if constexpr (kInputs > 1) load_group(second, walk, 2, position, count, b);
  if constexpr (kInputs > 2) load_group(third, walk, 3, position, count, c);
  TS_UNROLL
  for (int i = 0; i < kGroup; ++i) {
    if constexpr (!std::is_same_v<Number, C>) {
      if constexpr (kInputs == 1) {
        y[i] = f(Number(a[i])).value;
      } else {
        y[i] = f(Number(a[i]), Number(b[i])).value;
      }
    } else if constexpr (kInputs == 1) {
      y[i] = f(a[i]);
    } else if constexpr (kInputs == 2) {
      y[i] = f(a[i], b[i]);
    } else {
      y[i] = f(a[i], b[i], c[i]);
    }
  }
  store_group(output, walk, 0, position, count, y);
}

template <class C>
DevicePort<C> port_of(const detail::DeviceCall& call, int input) {
  const detail::DeviceInput& in = call.inputs[input];
  const C number =
      std::is_floating_point_v<C> ? static_cast<C>(in.number) : static_cast<C>(in.integer);
  const bool linear = in.data != nullptr && call.walk.is_linear(input + 1);
  return {in.data, number, in.dtype, linear, linear && is_aligned(in.data)};
}

// Formulas that take longer than their bytes: results of 16 bits are made by the GPU's own
// exponentials and divisions (approximate.h).
template <class F>
inline constexpr bool kIsLong = false;
template <>
inline constexpr bool kIsLong<fn::GeluTanh> = true;
template <>
inline constexpr bool kIsLong<fn::GeluTanhGrad> = true;
template <>
inline constexpr bool kIsLong<fn::Gelu> = true;
template <>
inline constexpr bool kIsLong<fn::GeluGrad> = true;
template <>
inline constexpr bool kIsLong<fn::Silu> = true;
template <>
inline constexpr bool kIsLong<fn::SiluGrad> = true;

// Whether two inputs are views of one memory that begin apart: some of what they have is one and
// the same.
inline bool share_memory(const detail::DeviceCall& call, int a, int b) {
  const auto bytes = [&](int i) {
    auto begin = reinterpret_cast<uintptr_t>(call.inputs[i].data), end = begin;
    for (int d = 0; d < call.walk.dims; ++d) {
      const int64_t far =
          (call.walk.sizes[d] - 1) * call.walk.strides[i + 1][d] * size_of(call.inputs[i].dtype);
      (far < 0 ? begin : end) += static_cast<uintptr_t>(far);
    }
    return std::pair(begin, end + static_cast<uintptr_t>(size_of(call.inputs[i].dtype)));
  };
  const void *const first = call.inputs[a].data, *const second = call.inputs[b].data;
  if (first == nullptr || second == nullptr || first == second) return false;
  const auto [a_begin, a_end] = bytes(a);
  const auto [b_begin, b_end] = bytes(b);
  return a_begin < b_end && b_begin < a_end;
}

template <int kInputs, class F, class A, class C, class Number = C>
void launch_elementwise(const detail::DeviceCall& call) {
  using R = typename std::conditional_t<
      kInputs == 1, std::invoke_result<const F&, A>,
      std::conditional_t<kInputs == 2, std::invoke_result<const F&, A, C>,
                         std::invoke_result<const F&, A, C, C>>>::type;
  const F& f = *static_cast<const F*>(call.functor);
  const bool linear = call.walk.is_linear(0);
  const DevicePort<R> output{call.output, R{}, call.output_dtype, linear,
                             linear && is_aligned(call.output)};
  const DevicePort<A> first = port_of<A>(call, 0);
  const DevicePort<C> second = port_of<C>(call, 1), third = port_of<C>(call, 2);
  gpu::Traffic traffic{0, call.walk.distinct(0) * size_of(call.output_dtype)};
  for (int i = 0; i < kInputs; ++i) {
    const void* const data = call.inputs[i].data;
    bool again = data == nullptr;  // a number, or (x * x) an input that comes twice
    for (int j = 0; j < i; ++j) {
      again = again || data == call.inputs[j].data;
      traffic.at_most = traffic.at_most || share_memory(call, i, j);
    }
    if (again) continue;
    traffic.reads += call.walk.distinct(i + 1) * size_of(call.inputs[i].dtype);
  }
  gpu::launch({.name = "elementwise",
               .grid = gpu::blocks(call.walk.numel, kElementwiseBlock, kGroup),
               .block = kElementwiseBlock,
               .traffic = traffic},
              elementwise_kernel<kInputs, F, A, C, R, Number>, f,
              DeviceWalk<kInputs + 1>(call.walk), output, first, second, third);
}

template <class F>
inline constexpr bool takes_integers = requires {
  requires F::kIntegers;
};
template <class F>
inline constexpr bool takes_condition = requires {
  requires F::kCondition;
};

template <int kInputs, class F>
void run_elementwise(const detail::DeviceCall& call) {
  if constexpr (takes_condition<F>) {
    if (call.lane == Lane::kFloat) return launch_elementwise<kInputs, F, uint8_t, float>(call);
    if (call.lane == Lane::kDouble) return launch_elementwise<kInputs, F, uint8_t, double>(call);
    launch_elementwise<kInputs, F, uint8_t, int64_t>(call);
  } else {
    if constexpr (kIsLong<F>) {
      if (call.lane == Lane::kFloat && size_of(call.output_dtype) == 2) {
        return launch_elementwise<kInputs, F, float, float, math::Approximate>(call);
      }
    }
    if (call.lane == Lane::kFloat) return launch_elementwise<kInputs, F, float, float>(call);
    if (call.lane == Lane::kDouble) return launch_elementwise<kInputs, F, double, double>(call);
    if constexpr (takes_integers<F>) launch_elementwise<kInputs, F, int64_t, int64_t>(call);
  }
}

}  // namespace tessera::kernels

// Registers the kernels of a list: TS_UNARY_FUNCTORS(TS_REGISTER_UNARY).
#define TS_REGISTER_UNARY(F) detail::cuda_loop<fn::F> = run_elementwise<1, fn::F>;
#define TS_REGISTER_BINARY(F) detail::cuda_loop<fn::F> = run_elementwise<2, fn::F>;
#define TS_REGISTER_TERNARY(F) detail::cuda_loop<fn::F> = run_elementwise<3, fn::F>;
