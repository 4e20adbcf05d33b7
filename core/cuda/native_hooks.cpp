#include <tessera/core/cuda/hooks.h>

namespace tessera::gpu {

BackendKind hook_kind() { return BackendKind::kCuda; }
std::string hook_failure_details() { return {}; }
void hook_segment(void*, size_t) {}
void hook_accessible(void*, size_t, bool, cudaStream_t) noexcept {}

}  // namespace tessera::gpu
