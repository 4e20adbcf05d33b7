// Ref-counted bytes that tensors share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include <tessera/core/device.h>
#include <tessera/core/memory/allocator.h>

namespace tessera {

// A Storage can be resized to zero and refilled under live tensors: its bytes go away, the object
// stays, and views saved for backward stay valid for when the bytes come back. This is how sharded
// training frees parameters between their uses.
class Storage {
 public:
  // `bytes` uninitialized bytes on `device`, counted for the current context and category.
  // A meta storage has a size and no bytes.
  Storage(int64_t bytes, const Device& device);
  // Bytes that someone else owns: `release` is called when the last holder goes.
  Storage(void* data, int64_t bytes, const Device& device, std::function<void()> release);
  ~Storage();
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;

  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  const Device& device() const { return device_; }
  MemoryCategory category() const { return category_; }
  bool is_foreign() const { return static_cast<bool>(release_); }

  // Frees (0) or allocates; contents are not kept. Throws ValueError for foreign bytes.
  void resize(int64_t bytes);
  // Moves the bytes to another line of the statistics.
  void set_category(MemoryCategory category);

 private:
  void allocate();
  void free_bytes() noexcept;

  void* data_ = nullptr;
  int64_t bytes_ = 0;
  Device device_;
  MemoryCategory category_;
  std::shared_ptr<MemoryStats> stats_;  // of the owner's context
  std::function<void()> release_;
};
using StoragePtr = std::shared_ptr<Storage>;

}  // namespace tessera
