// Compiled for x86-64-v4, with a namespace of its own for the kernels; see split_tiles.h.
#include "core/split_tiles.h"

#include <cmath>
#include <cstring>
#include <vector>

#include <tessera/core/kernels/attention/attention_simd.cpp>

namespace tessera::kernels::TS_SIMD {
namespace {

#if defined(TESSERA_AMX_KERNEL)

float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

struct ReferenceTiles {
  static constexpr int kRowBytes = 64;
  static inline char registers[8][16][kRowBytes];
  static inline int64_t products = 0;

  static void begin() { products = 0; }
  static void end() {}
  template <int kRegister>
  static void clear() {
    std::memset(registers[kRegister], 0, sizeof registers[kRegister]);
  }
  template <int kRegister, int kOffset = 0>
  static void load(const void* base, int64_t stride) {
    for (int row = 0; row < 16; ++row) {
      std::memcpy(registers[kRegister][row],
                  static_cast<const char*>(base) + kOffset + row * stride, kRowBytes);
    }
  }
  template <int kRegister, int kOffset = 0>
  static void store(void* base, int64_t stride) {
    for (int row = 0; row < 16; ++row) {
      std::memcpy(static_cast<char*>(base) + kOffset + row * stride, registers[kRegister][row],
                  kRowBytes);
    }
  }
  // As Intel's manual has TDPBF16PS.
  template <int kC, int kA, int kB>
  static void multiply() {
    ++products;
    float a[16][32], b[16][32];
    for (int row = 0; row < 16; ++row) {
      widen(registers[kA][row], a[row]);
      widen(registers[kB][row], b[row]);
    }
    for (int m = 0; m < 16; ++m) {
      float sums[32] = {};
      for (int pair = 0; pair < 16; ++pair) {
        for (int n = 0; n < 32; ++n) {
          sums[n] = flushed(std::fma(a[m][2 * pair + n % 2], b[pair][n], sums[n]));
        }
      }
      float c[16];
      std::memcpy(c, registers[kC][m], sizeof c);
      for (int n = 0; n < 16; ++n) {
        c[n] = flushed(flushed(c[n]) + flushed(sums[2 * n] + sums[2 * n + 1]));
      }
      std::memcpy(registers[kC][m], c, sizeof c);
    }
  }

 private:
  static void widen(const char* from, float* to) {
    for (int i = 0; i < 32; ++i) {
      uint16_t bits = 0;
      std::memcpy(&bits, from + 2 * i, 2);
      const uint32_t wide = uint32_t{bits} << 16;
      std::memcpy(to + i, &wide, 4);
      to[i] = flushed(to[i]);
    }
  }
};

#endif

}  // namespace
}  // namespace tessera::kernels::TS_SIMD

namespace tessera::tests {

#if defined(TESSERA_AMX_KERNEL)

using namespace kernels::TS_SIMD;

bool has_avx512() { return __builtin_cpu_supports("x86-64-v4"); }
int64_t multiply_on_reference_tiles(const kernels::GemmTile& tile) {
  run_split_tile<ReferenceTiles, float>(tile);
  return ReferenceTiles::products;
}
void multiply_in_registers(const kernels::GemmTile& tile) {
  run_tile<FmaKernel<float>, float>(tile);
}
int64_t scratch_bytes(int64_t m, int64_t n) {
  return (round_up(m, 32) + 32 + round_up(n, 32) + 32) * 2048;
}
int64_t attend(const kernels::AttentionProblem& p, bool backward) {
  std::vector<char> scratch(static_cast<size_t>(attention_scratch_bytes(p, backward)) + 64);
  void* const aligned =
      reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(scratch.data()) + 63) / 64 * 64);
  using OnTiles = SplitKernel<ReferenceTiles>;
  using InRegisters = FmaKernel<float>;
  ReferenceTiles::products = 0;
  if (backward) {
    splits_backward(p, 0, 0) ? kernels::TS_SIMD::backward<OnTiles, float>(p, 0, 0, aligned)
                             : kernels::TS_SIMD::backward<InRegisters, float>(p, 0, 0, aligned);
  } else {
    splits_forward(p, 0, 0) ? forward<OnTiles, float>(p, 0, 0, aligned)
                            : forward<InRegisters, float>(p, 0, 0, aligned);
  }
  return ReferenceTiles::products;
}

#else

bool has_avx512() { return false; }
int64_t multiply_on_reference_tiles(const kernels::GemmTile&) { return 0; }
void multiply_in_registers(const kernels::GemmTile&) {}
int64_t scratch_bytes(int64_t, int64_t) { return 0; }
int64_t attend(const kernels::AttentionProblem&, bool) { return 0; }

#endif

}  // namespace tessera::tests
