// Kernels for several instruction sets in one binary.
//
// A file named `*_simd.cpp` is compiled once for each instruction set, with TS_SIMD naming the
// namespace that its functions live in (v3: AVX2 + FMA, v4: AVX-512; `generic` on other machines).
// The ordinary `*_cpu.cpp` beside it picks one at run time:
//
//     // softmax_simd.cpp
//     namespace tessera::kernels::TS_SIMD { void softmax_rows(...) {...} }
//     // softmax_cpu.cpp
//     TS_SIMD_CALL(softmax_rows, x, y, rows, columns);
//
// Such a file keeps its helpers in an anonymous namespace or marks them TS_HD (always inlined) and
// uses nothing of the standard library that may be emitted out of line: the linker merges inline
// functions by name, and one compiled for v4 must not run on a v3 machine.
#pragma once

namespace tessera::kernels {

enum class Isa { kV3, kV4 };

// The best set that this processor has and this binary contains. The environment variable
// TESSERA_ISA=v3 lowers it; read once. UnsupportedError where the binary contains none that serves.
Isa cpu_isa();

}  // namespace tessera::kernels

#if defined(TESSERA_ONLY_V4)  // a build for machines like its own (TESSERA_SIMD=native)
#define TS_SIMD_CALL(function, ...) ::tessera::kernels::v4::function(__VA_ARGS__)
#elif defined(TESSERA_WITH_V4)
#define TS_SIMD_CALL(function, ...)                              \
  (::tessera::kernels::cpu_isa() == ::tessera::kernels::Isa::kV4 \
       ? ::tessera::kernels::v4::function(__VA_ARGS__)           \
       : ::tessera::kernels::v3::function(__VA_ARGS__))
#else
#define TS_SIMD_CALL(function, ...) ::tessera::kernels::v3::function(__VA_ARGS__)
#endif

// Declares the variants of a function of a `*_simd.cpp` file:
//     TS_SIMD_DECLARE(void softmax_rows(const float* x, float* y, int64_t rows, int64_t columns));
#if defined(TS_SIMD)  // inside such a file only its own variant exists
#define TS_SIMD_DECLARE(...) \
  namespace TS_SIMD {        \
  __VA_ARGS__;               \
  }
#elif defined(TESSERA_ONLY_V4)
#define TS_SIMD_DECLARE(...) \
  namespace v4 {             \
  __VA_ARGS__;               \
  }
#elif defined(TESSERA_WITH_V4)
#define TS_SIMD_DECLARE(...) \
  namespace v3 {             \
  __VA_ARGS__;               \
  }                          \
  namespace v4 {             \
  __VA_ARGS__;               \
  }
#else
#define TS_SIMD_DECLARE(...) \
  namespace v3 {             \
  __VA_ARGS__;               \
  }
#endif
