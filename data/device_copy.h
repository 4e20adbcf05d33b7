// Copies of batches to a device.
//
//     data::DeviceCopier copier(cuda(0));
//     auto copy = copier.start(batch);   // a worker: the tensors are now those of the GPU
//     copier.finish(copy, batch);        // the consumer: its stream waits for the copy,
//                                        // and it does not
//
// Copies go through page-locked memory on a separate stream, while the GPU computes. A DataLoader
// with a device does this in its workers, so that batches are ready on the GPU.
//
// [Note: batches across streams] Memory of a batch belongs to the copy stream, on which it is
// allocated, written and reused. finish() makes the consumer's current stream wait for the event
// after the copies, and tells the allocator that this stream reads the memory: when the batch is
// destroyed, its memory is reused only after that stream has reached this point. A batch that is
// never finished is only used by the copy stream. That stream belongs to the device and never ends,
// so a batch may outlive the copier and the loader that it came from.
#pragma once

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <tessera/core/device.h>
#include <tessera/core/tensor/tensor.h>
#include <tessera/data/batch_tensors.h>

namespace tessera::gpu {
struct EventHandle;
struct StreamHandle;
}  // namespace tessera::gpu

namespace tessera::data {

// UnsupportedError if a part of the batch does not list its tensors.
void check_seen(const BatchTensors& found);

template <class Batch>
std::vector<Tensor*> tensors_of(Batch& batch) {
  BatchTensors found;
  found(batch);
  check_seen(found);
  return std::move(found.tensors);
}

class DeviceCopier {
 public:
  // kCpu: batches are not copied. DeviceError for a missing GPU, and for meta.
  explicit DeviceCopier(const Device& device);

  const Device& device() const { return device_; }

  // Recorded after all copies of a start; null if there were none.
  using Copy = std::shared_ptr<gpu::EventHandle>;

  // Replaces host tensors by copies on the device; tensors on the device stay. Returns at once.
  // From any thread. DeviceError for a tensor of another device, OutOfMemory.
  [[nodiscard]] Copy start_tensors(std::span<Tensor* const> tensors) const;
  // Later work on the current stream of this context sees the copies.
  void finish_tensors(const Copy& copy, std::span<Tensor* const> tensors) const;

  // The same for all tensors of a batch, as tensors_of().
  template <class Batch>
  [[nodiscard]] Copy start(Batch& batch) const {
    return stream_ == nullptr ? nullptr : start_tensors(tensors_of(batch));
  }
  template <class Batch>
  void finish(const Copy& copy, Batch& batch) const {
    if (copy != nullptr) finish_tensors(copy, tensors_of(batch));
  }

 private:
  Device device_;
  std::shared_ptr<gpu::StreamHandle> stream_;  // null on the CPU
};

}  // namespace tessera::data
