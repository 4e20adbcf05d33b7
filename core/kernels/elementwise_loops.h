// The table of loops that a functor is compiled to; made in elementwise*_simd.cpp for each
// instruction set, read by elementwise_cpu.cpp.
#pragma once

#include <cstdint>

#include <tessera/core/kernels/isa.h>
#include <tessera/core/kernels/strided.h>

namespace tessera::kernels {

namespace detail {

// inputs[i] and output: lanes of `count` elements. Output and an input may be the same memory.
using Loop = void (*)(const void* functor, const void* const* inputs, void* output, int64_t count);

struct Loops {
  Loop of_float = nullptr, of_double = nullptr, of_int64 = nullptr;  // null: no such form
  bool predicate = false;                                            // the output is bool
  bool condition = false;                                            // input 0 is bool
};

}  // namespace detail

TS_SIMD_DECLARE(template <class F> detail::Loops elementwise_loops())

}  // namespace tessera::kernels
