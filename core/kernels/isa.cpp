#include <tessera/core/kernels/isa.h>

#include <cstdlib>
#include <string_view>

namespace tessera::kernels {

Isa cpu_isa() {
  static const Isa isa = [] {
#if defined(TESSERA_WITH_V4)
    const char* wanted = std::getenv("TESSERA_ISA");
    if (wanted != nullptr && std::string_view(wanted) == "v3") return Isa::kV3;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      return Isa::kV4;
    }
#endif
    return Isa::kV3;
  }();
  return isa;
}

}  // namespace tessera::kernels
