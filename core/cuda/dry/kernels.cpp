// What kernels are made of, which do not run here.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>

namespace tessera::gpu::emulation {

constinit thread_local Thread* current_thread = nullptr;
constinit thread_local Grid current_grid{};

namespace {
[[noreturn]] void not_here(const char* what) {
  std::fprintf(stderr, "dry device: a kernel runs (%s)\n", what);
  std::abort();
}
}  // namespace

void fail(const std::string& what) { not_here(what.c_str()); }
void sync_threads() { not_here("__syncthreads"); }
void warp_collective(unsigned, const char* name, void*, Combine, bool) { not_here(name); }
void* dynamic_shared(size_t) { not_here("dynamic_shared"); }
void* static_shared(const void*, size_t, size_t) { not_here("static_shared"); }
void check_alignment(const void*, size_t) {}
void check_space(const void*, bool) {}
void check_tile(const char* name, const void*, unsigned, size_t) { not_here(name); }
void check_operands(bool) {}
void multiply_tiles(const float*, const float*, float*) { not_here("multiply_tiles"); }

namespace race {
void atomic_access(const void*, size_t) {}
}  // namespace race

}  // namespace tessera::gpu::emulation
