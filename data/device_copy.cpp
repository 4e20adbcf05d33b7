#include <tessera/data/device_copy.h>

#include <tessera/core/error.h>
#include <tessera/core/factory/pinned.h>
#include <tessera/core/gpu/transfers.h>
#include <tessera/core/memory/storage.h>

namespace tessera::data {

void check_seen(const BatchTensors& found) {
  TS_CHECK_AS(UnsupportedError, found.opaque == nullptr, "DataLoader", "batches hold a ",
              found.opaque->name(),
              ", in which no tensor can be seen; give it a member visit_tensors, empty if it holds "
              "none, or leave the batches where they are made");
}

DeviceCopier::DeviceCopier(const Device& device) : device_(device) {
  TS_CHECK_DEVICE(!device.is_meta(), "DataLoader", "batches have values, which meta has not");
  if (device.is_cuda()) stream_ = gpu::copy_stream(device.index);
}

DeviceCopier::Copy DeviceCopier::start_tensors(std::span<Tensor* const> tensors) const {
  if (stream_ == nullptr) return nullptr;
  const gpu::CurrentDevice device(device_.index);
  const gpu::CurrentStream stream(stream_);
  bool copied = false;
  for (Tensor* const tensor : tensors) {
    if (tensor->device() == device_) continue;
    TS_CHECK_DEVICE(tensor->device().is_cpu(), "DataLoader", "a batch holds ", *tensor,
                    " and is to come on ", device_, "; make batches on the cpu");
    *tensor = raw::copy_to_device(raw::pin(*tensor), device_);
    copied = true;
  }
  return copied ? gpu::record_event(*stream_) : nullptr;
}

void DeviceCopier::finish_tensors(const Copy& copy, std::span<Tensor* const> tensors) const {
  if (copy == nullptr) return;
  gpu::wait_event(*gpu::current_stream_handle(device_.index), *copy);
  for (const Tensor* const tensor : tensors) {
    if (tensor->numel() > 0) gpu::record_use(device_.index, tensor->storage()->data());
  }
}

}  // namespace tessera::data
