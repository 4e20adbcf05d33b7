// The table of loops that a functor is compiled to. elementwise*_simd.cpp make it for each
// instruction set, and elementwise_cpu.cpp reads it.
#pragma once

#include <cstdint>

#include <tessera/core/isa.h>
#include <tessera/core/kernels/common/strided.h>

namespace tessera::kernels {

namespace detail {

// inputs[i] and output: lanes of `count` elements. Output and an input may be the same memory.
using Loop = void (*)(const void* functor, const void* const* inputs, void* output, int64_t count);

// The GPU's operands. They are read in place, in dtypes that the lane reads directly (is_direct);
// the walk has the output's strides first.
struct DeviceInput {
  const void* data = nullptr;  // null: a number for all elements
  DType dtype = kF32;
  double number = 0;
  int64_t integer = 0;
};
struct DeviceCall {
  const Walk& walk;
  const void* functor;
  Lane lane;
  void* output;
  DType output_dtype;
  DeviceInput inputs[kMaxOperands - 1];
};
using DeviceLoop = void (*)(const DeviceCall& call);
constexpr bool is_direct(Lane lane, DType dtype) {
  switch (lane) {
    case Lane::kFloat:
      return dtype == kF32 || dtype == kBF16 || dtype == kF16;
    case Lane::kDouble:
      return dtype == kF64;
    case Lane::kInt64:
      return is_integral(dtype) || dtype == kBool;
    case Lane::kBool:
      return dtype == kBool;
  }
  return false;
}
// Filled in programs with a GPU (elementwise.cuh).
template <class F>
inline constinit DeviceLoop cuda_loop = nullptr;

struct Loops {
  Loop of_float = nullptr, of_double = nullptr, of_int64 = nullptr;  // null: no such form
  bool predicate = false;                                            // the output is bool
  bool condition = false;                                            // input 0 is bool
  const DeviceLoop* cuda = nullptr;
};

}  // namespace detail

TS_SIMD_DECLARE(template <class F> detail::Loops elementwise_loops())

}  // namespace tessera::kernels
