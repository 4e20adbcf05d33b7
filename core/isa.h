// Kernels for several instruction sets in one binary.
//
// A file named `*_simd.cpp` is compiled once for each instruction set, with TS_SIMD naming the
// namespace that its functions live in (v3: AVX2 + FMA, v4: AVX-512; neon on aarch64; generic,
// plain C++, on other machines). The ordinary `*_cpu.cpp` beside it picks one at run time:
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

// What kernels are chosen by. From kV4 on the files of v4 run; kBf16 and kAmx add instructions that
// these files write as assembly, for products of matrices alone (core/kernels/gemm/gemm.h): sums of
// such products differ in their last bits from set to set, the other kernels' bits do not change.
enum class Isa {
  kGeneric,  // whatever the compiler makes of plain C++
  kNeon,     // aarch64: its 128-bit registers, two of them where v3 has one, so that bits are v3's
  kV3,       // AVX2 and FMA
  kV4,       // AVX-512 F, BW, DQ and VL
  kBf16,     // v4 and AVX-512 BF16: pairs of bf16 are multiplied and added to an f32
  kAmx,      // v4 and AMX with bf16: tiles of 16 x 32, given to this process by the kernel
};

// As TESSERA_ISA has it: generic, neon, v3, v4, bf16, amx.
const char* name_of(Isa isa);

// Whether this processor has the set and this binary its kernels.
bool has_isa(Isa isa);

// The best set that this processor has and this binary contains, or the one that the environment
// variable TESSERA_ISA names; read once. ConfigError where that is no name, UnsupportedError where
// has_isa() is false for it, or for v3 and v4 alike.
Isa cpu_isa();

// Whether TESSERA_ISA names it: libraries that are called for products then keep to it too.
bool isa_is_asked_for();

}  // namespace tessera::kernels

// The namespace of the set that every machine of a kind has.
#if defined(__x86_64__) || defined(_M_X64)
#define TS_SIMD_BASE v3
#elif defined(__aarch64__)
#define TS_SIMD_BASE neon
#else
#define TS_SIMD_BASE generic
#endif

#if defined(TESSERA_ONLY_V4)  // a build for machines like its own (TESSERA_SIMD=native)
#define TS_SIMD_CALL(function, ...) ::tessera::kernels::v4::function(__VA_ARGS__)
#elif defined(TESSERA_WITH_V4)
#define TS_SIMD_CALL(function, ...)                              \
  (::tessera::kernels::cpu_isa() >= ::tessera::kernels::Isa::kV4 \
       ? ::tessera::kernels::v4::function(__VA_ARGS__)           \
       : ::tessera::kernels::v3::function(__VA_ARGS__))
#else
#define TS_SIMD_CALL(function, ...) ::tessera::kernels::TS_SIMD_BASE::function(__VA_ARGS__)
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
  namespace TS_SIMD_BASE {   \
  __VA_ARGS__;               \
  }
#endif
