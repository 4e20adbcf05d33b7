#include <tessera/core/cuda/device_errors.h>

#include <array>
#include <cstring>
#include <mutex>

#include <tessera/core/cuda/check.h>
#include <tessera/core/error.h>

namespace tessera::gpu {
namespace {

constexpr int kMaxDevices = 64;

struct Words {
  std::mutex mutex;
  std::array<DeviceErrorWord*, kMaxDevices> of_device{};
};
Words& words() {
  static Words* const the_words = new Words;
  return *the_words;
}

}  // namespace

DeviceErrorWord* device_error_word() {
  int device = 0;
  TS_CUDA(cudaGetDevice(&device));
  std::lock_guard lock(words().mutex);
  DeviceErrorWord*& word = words().of_device[static_cast<size_t>(device) % kMaxDevices];
  if (word == nullptr) {
    void* memory = nullptr;
    TS_CUDA(cudaMallocHost(&memory, sizeof(DeviceErrorWord)));
    std::memset(memory, 0, sizeof(DeviceErrorWord));
    word = static_cast<DeviceErrorWord*>(memory);
  }
  return word;
}

void raise_device_errors(int device) {
  DeviceErrorWord found;
  {
    std::lock_guard lock(words().mutex);
    DeviceErrorWord* const word = words().of_device[static_cast<size_t>(device) % kMaxDevices];
    if (word == nullptr || word->found == 0) return;
    found = *word;
    word->found = 0;
  }
  TS_THROW(IndexError, found.op, "index ", found.value, " at element ", found.position,
           " is outside [", found.low, ", ", found.high,
           "); check where the indices come from (found on cuda:", device, ")");
}

}  // namespace tessera::gpu
