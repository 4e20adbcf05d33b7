#include <tessera/core/cuda/hooks.h>

#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <tessera/core/cuda/emulation/arena.h>
#include <tessera/core/cuda/emulation/peers.h>
#include <tessera/core/cuda/emulation/report.h>
#include <tessera/core/gpu/transfers.h>

namespace tessera::gpu {

namespace emulation {
namespace {
std::mutex ranges_mutex;
std::vector<std::string> ranges;
thread_local int open_ranges = 0;
}  // namespace

std::vector<std::string> take_ranges() {
  const std::lock_guard lock(ranges_mutex);
  return std::exchange(ranges, {});
}
}  // namespace emulation

void push_range(const char* name) {
  const std::lock_guard lock(emulation::ranges_mutex);
  emulation::ranges.push_back(std::string(static_cast<size_t>(emulation::open_ranges++), '>') +
                              name);
}
void pop_range() { --emulation::open_ranges; }

cudaError_t hook_copy_between(void* target, int to, const void* source, int from, size_t bytes,
                              cudaStream_t stream) {
  return cudaMemcpyPeerAsync(target, to, source, from, bytes, stream);
}

bool hook_has_context(int device) noexcept { return emulation::has_context(device); }

const char* hook_architectures() { return "90a"; }
BackendKind hook_kind() { return BackendKind::kEmulated; }
std::string hook_failure_details() { return emulation::take_report(); }
void hook_segment(void* pointer, size_t bytes) {
  emulation::arena::set_accessible(pointer, bytes, false);
}

void hook_accessible(void* pointer, size_t bytes, bool accessible, cudaStream_t stream,
                     bool fills) noexcept {
  emulation::enqueue_always(stream, [pointer, bytes, accessible, fills] {
    emulation::arena::set_accessible(pointer, bytes, accessible, fills);
  });
}

}  // namespace tessera::gpu
