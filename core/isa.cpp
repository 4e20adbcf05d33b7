#include <tessera/core/isa.h>

#include <cstdlib>
#include <optional>
#include <string_view>

#if defined(__linux__) && defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <tessera/core/error.h>

namespace tessera::kernels {
namespace {

constexpr Isa kAllIsas[] = {Isa::kGeneric, Isa::kNeon, Isa::kV3, Isa::kV4, Isa::kBf16, Isa::kAmx};

// What the processor has and the system lets programs use.
bool processor_has(Isa isa) {
#if defined(__x86_64__)
  if (isa < Isa::kV3) return false;
  if (isa == Isa::kV3) return true;  // every file of the library is compiled for it
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl")) {
    return false;
  }
  if (isa == Isa::kBf16) return __builtin_cpu_supports("avx512bf16");
#if defined(__linux__)
  if (isa == Isa::kAmx) {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
    const bool bf16_tiles = (edx >> 22) & 1, tiles = (edx >> 24) & 1;
    if (!bf16_tiles || !tiles) return false;
    // Linux hands out the tile registers on request (ARCH_REQ_XCOMP_PERM, feature XTILEDATA).
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }
#endif
  return isa == Isa::kV4;
#elif defined(__aarch64__)
  return isa == Isa::kNeon;  // of every such processor
#else
  return isa == Isa::kGeneric;
#endif
}

constexpr bool binary_has(Isa isa) {
#if defined(TESSERA_ONLY_V4)
  return isa >= Isa::kV4;
#elif defined(TESSERA_WITH_V4)
  return isa >= Isa::kV3;
#elif defined(__x86_64__)
  return isa == Isa::kV3;
#elif defined(__aarch64__)
  return isa == Isa::kNeon;
#else
  return isa == Isa::kGeneric;
#endif
}

std::string_view asked_for() {
  const char* const text = std::getenv("TESSERA_ISA");
  return text == nullptr ? std::string_view() : std::string_view(text);
}

}  // namespace

const char* name_of(Isa isa) {
  switch (isa) {
    case Isa::kGeneric:
      return "generic";
    case Isa::kNeon:
      return "neon";
    case Isa::kV3:
      return "v3";
    case Isa::kV4:
      return "v4";
    case Isa::kBf16:
      return "bf16";
    default:
      return "amx";
  }
}

bool has_isa(Isa isa) {
  static const auto has = [] {
    unsigned sets = 0;
    for (const Isa one : kAllIsas) {
      if (binary_has(one) && processor_has(one)) sets |= 1u << static_cast<unsigned>(one);
    }
    return sets;
  }();
  return (has >> static_cast<unsigned>(isa)) & 1;
}

bool isa_is_asked_for() {
  static const bool asked = !asked_for().empty();
  return asked;
}

Isa cpu_isa() {
  static const Isa isa = [] {
    std::optional<Isa> best, wanted;
    for (const Isa one : kAllIsas) {
      if (has_isa(one)) best = one;
      if (asked_for() == name_of(one)) wanted = one;
    }
    if (isa_is_asked_for()) {
      TS_CHECK_AS(ConfigError, wanted.has_value(), "kernels", "TESSERA_ISA is '", asked_for(),
                  "'; it must be v3, v4, bf16 or amx, of another machine neon or generic");
      TS_CHECK_AS(UnsupportedError, binary_has(*wanted), "kernels", "TESSERA_ISA asks for ",
                  name_of(*wanted), ", for which this build has no kernels; configure with ",
                  "-DTESSERA_SIMD=\"v3;v4\"");
      TS_CHECK_AS(UnsupportedError, has_isa(*wanted), "kernels", "TESSERA_ISA asks for ",
                  name_of(*wanted), ", which this processor does not have; its best is ",
                  best ? name_of(*best) : "none of this build's");
      return *wanted;
    }
    TS_CHECK_AS(UnsupportedError, best.has_value(), "kernels",
                "this build has kernels for x86-64-v4 (AVX-512) only, and this processor has none "
                "of it; configure with -DTESSERA_SIMD=\"v3;v4\"");
    return *best;
  }();
  return isa;
}

}  // namespace tessera::kernels
