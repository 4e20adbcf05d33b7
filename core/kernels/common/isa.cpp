#include <tessera/core/kernels/common/isa.h>

#include <cstdlib>
#include <string_view>

#include <tessera/core/error.h>

namespace tessera::kernels {

Isa cpu_isa() {
  static const Isa isa = [] {
#if defined(TESSERA_WITH_V4)
    const char* wanted = std::getenv("TESSERA_ISA");
    const bool lowered = wanted != nullptr && std::string_view(wanted) == "v3";
    if (!lowered && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      return Isa::kV4;
    }
#endif
#if defined(TESSERA_ONLY_V4)
    TS_THROW(UnsupportedError, "kernels",
             "this build has kernels for x86-64-v4 (AVX-512) only, and ",
             lowered ? "TESSERA_ISA asks for v3" : "this processor has none of it",
             "; configure with -DTESSERA_SIMD=\"v3;v4\"");
#endif
    return Isa::kV3;
  }();
  return isa;
}

}  // namespace tessera::kernels
