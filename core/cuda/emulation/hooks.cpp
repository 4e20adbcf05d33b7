#include <tessera/core/cuda/hooks.h>

#include <memory>

#include <tessera/core/cuda/emulation/arena.h>
#include <tessera/core/cuda/emulation/report.h>

namespace tessera::gpu {

BackendKind hook_kind() { return BackendKind::kEmulated; }
std::string hook_failure_details() { return emulation::take_report(); }
void hook_segment(void* pointer, size_t bytes) {
  emulation::arena::set_accessible(pointer, bytes, false);
}

void hook_accessible(void* pointer, size_t bytes, bool accessible, cudaStream_t stream) noexcept {
  struct Change {
    void* pointer;
    size_t bytes;
    bool accessible;
  };
  cudaLaunchHostFunc(
      stream,
      [](void* data) {
        const std::unique_ptr<Change> change(static_cast<Change*>(data));
        emulation::arena::set_accessible(change->pointer, change->bytes, change->accessible);
      },
      new Change{pointer, bytes, accessible});
}

}  // namespace tessera::gpu
