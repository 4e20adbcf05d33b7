#include <tessera/core/memory/storage.h>

#include <tessera/core/error.h>
#include <tessera/core/gpu/backend.h>
#include <tessera/core/memory/meta_memory.h>

namespace tessera {

Storage::Storage(int64_t bytes, const Device& device)
    : bytes_(bytes),
      device_(device),
      category_(MemoryCategoryGuard::current()),
      stats_(device.is_meta() && !MetaMemoryGuard::holds() ? nullptr : memory_stats()) {
  allocate();
}

Storage::Storage(void* data, int64_t bytes, const Device& device, std::function<void()> release)
    : data_(data),
      bytes_(bytes),
      device_(device),
      category_(MemoryCategoryGuard::current()),
      release_(release ? std::move(release) : [] {}) {}

Storage::~Storage() {
  if (release_) {
    release_();
  } else {
    free_bytes();
  }
}

void Storage::allocate() {
  // Also where there is nothing to hold: ops on an empty tensor need the device and its kernels.
  if (device_.is_cuda()) gpu::require_device(device_.index, "tensor");
  if (bytes_ == 0) return;
  if (device_.is_meta()) {
    if (stats_) stats_->allocated(category_, bytes_);
    return;
  }
  data_ = allocator_for(device_).allocate(static_cast<size_t>(bytes_));
  stats_->allocated(category_, bytes_);
}

void Storage::free_bytes() noexcept {
  if (device_.is_meta() && stats_) stats_->freed(category_, bytes_);
  if (data_ == nullptr) return;
  allocator_for(device_).deallocate(data_, static_cast<size_t>(bytes_));
  stats_->freed(category_, bytes_);
  data_ = nullptr;
}

void Storage::resize(int64_t bytes) {
  TS_CHECK(!release_, "storage resize", "the bytes belong to someone else; copy the tensor first");
  TS_CHECK(bytes >= 0, "storage resize", "expects a size of at least 0; got ", bytes);
  if (bytes == bytes_) return;
  free_bytes();
  bytes_ = bytes;
  allocate();
}

void Storage::set_category(MemoryCategory category) {
  const bool counted = device_.is_meta() ? stats_ != nullptr : data_ != nullptr;
  if (counted && !release_) {
    stats_->freed(category_, bytes_);
    stats_->allocated(category, bytes_);
  }
  category_ = category;
}

}  // namespace tessera
