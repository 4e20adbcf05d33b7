#include <tessera/core/cuda/hooks.h>

#include <mutex>
#include <set>
#include <utility>

#if __has_include(<nvtx3/nvToolsExt.h>)  // a part of the toolkit that may be left out
#include <nvtx3/nvToolsExt.h>
#endif

#include <tessera/core/cuda/check.h>
#include <tessera/core/gpu/transfers.h>

namespace tessera::gpu {
namespace {

// Lets `device` read the memory of `peer` by itself where the hardware can. Where it cannot, the
// runtime carries the bytes over the host.
void enable_peer_access(int device, int peer) {
  static std::mutex* const mutex = new std::mutex;
  static auto* const asked = new std::set<std::pair<int, int>>;
  const std::lock_guard lock(*mutex);
  if (!asked->insert({device, peer}).second) return;
  int can = 0;
  TS_CUDA(cudaDeviceCanAccessPeer(&can, device, peer));
  if (can == 0) return;
  const CurrentDevice scope(device);
  const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();
  } else {
    TS_CUDA(error);
  }
}

}  // namespace

cudaError_t hook_copy_between(void* target, int to, const void* source, int from, size_t bytes,
                              cudaStream_t stream) {
  enable_peer_access(to, from);
  return cudaMemcpyPeerAsync(target, to, source, from, bytes, stream);
}

// The runtime has no such question; the driver, whose library it has loaded, has.
bool hook_has_context(int device) noexcept {
  using GetState = int (*)(int device, unsigned* flags, int* active);
  static const GetState get_state = []() -> GetState {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion(
        "cuDevicePrimaryCtxGetState", &function, 7000, cudaEnableDefault, &found);
#else
    const cudaError_t error =
        cudaGetDriverEntryPoint("cuDevicePrimaryCtxGetState", &function, cudaEnableDefault, &found);
#endif
    if (error == cudaSuccess && found == cudaDriverEntryPointSuccess) {
      return reinterpret_cast<GetState>(function);
    }
    cudaGetLastError();
    return nullptr;
  }();
  if (get_state == nullptr) return true;  // not known: a context too many is no error
  unsigned flags = 0;
  int active = 0;
  return get_state(device, &flags, &active) == 0 && active != 0;
}

const char* hook_architectures() { return TESSERA_CUDA_ARCHITECTURES; }
BackendKind hook_kind() { return BackendKind::kCuda; }
std::string hook_failure_details() { return {}; }
// Headers alone: they find the tool that listens, or do nothing.
#if __has_include(<nvtx3/nvToolsExt.h>)
void push_range(const char* name) { nvtxRangePushA(name); }
void pop_range() { nvtxRangePop(); }
#else
void push_range(const char*) {}
void pop_range() {}
#endif
void hook_segment(void*, size_t) {}
void hook_accessible(void*, size_t, bool, cudaStream_t, bool) noexcept {}

}  // namespace tessera::gpu
