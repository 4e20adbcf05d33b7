#include <tessera/core/cuda/contexts.h>

#include <array>
#include <atomic>

#include <tessera/core/cuda/hooks.h>

namespace tessera::gpu {
namespace {

constexpr int kMaxDevices = 64;

// Contexts stay: what was found once needs no further call.
bool has_context(int device) noexcept {
  static std::array<std::atomic<bool>, kMaxDevices> found{};
  if (device >= kMaxDevices) return hook_has_context(device);
  std::atomic<bool>& known = found[static_cast<size_t>(device)];
  if (known.load(std::memory_order_relaxed)) return true;
  if (!hook_has_context(device)) return false;
  known.store(true, std::memory_order_relaxed);
  return true;
}

constexpr int kStay = -1;

}  // namespace

cudaError_t enter_device(int index, int& previous) noexcept {
  previous = kStay;
  int now = 0;
  const cudaError_t error = cudaGetDevice(&now);
  if (error != cudaSuccess || now == index) return error;
  if (has_context(now)) previous = now;  // see [Note: contexts]
  return cudaSetDevice(index);
}

void leave_device(int previous) noexcept {
  if (previous != kStay) cudaSetDevice(previous);
}

bool enter_some_device() noexcept {
  int now = 0, count = 0;
  if (cudaGetDevice(&now) != cudaSuccess || has_context(now)) return true;
  if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
  for (int other = 0; other < count; ++other) {
    if (has_context(other)) return cudaSetDevice(other) == cudaSuccess;
  }
  return false;
}

}  // namespace tessera::gpu
