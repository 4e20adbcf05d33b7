#include <tessera/core/factory/pinned.h>

#include <tessera/core/error.h>
#include <tessera/core/gpu/transfers.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/memory/allocator.h>

namespace tessera {

bool is_pinned(const Tensor& x) {
  return x.device().is_cpu() && x.numel() > 0 && gpu::is_pinned(x.data());
}

namespace raw {

Tensor empty_pinned(const Shape& shape, DType dtype, MemoryCategory category) {
  const int64_t bytes = checked_numel(shape, "empty_pinned") * size_of(dtype);
  const MemoryCategoryGuard guard(category);
  if (bytes == 0) return empty(shape, dtype);
  Allocator& allocator = gpu::pinned_allocator();
  void* const data = allocator.allocate(static_cast<size_t>(bytes));
  const auto stats = memory_stats();
  stats->allocated(category, bytes);
  return from_blob(data, shape, dtype, [&allocator, stats, category, data, bytes] {
    stats->freed(category, bytes);
    allocator.deallocate(data, static_cast<size_t>(bytes));
  });
}

Tensor pin(const Tensor& x) {
  TS_CHECK_DEVICE(x.device().is_cpu(), "pin", "page-locked memory is the host's; got ", x,
                  "; copy it with to(cpu) first");
  if (x.is_contiguous() && is_pinned(x)) return x;
  const Tensor pinned = empty_pinned(x.shape(), x.dtype());
  kernels::copy_into(pinned, x);
  return pinned;
}

Tensor copy_to_device(const Tensor& x, const Device& device) {
  TS_CHECK_DEVICE(x.device().is_cpu() && device.is_cuda(), "copy_to_device",
                  "copies from the host to a GPU; got ", x, " for ", device, "; use to(device)");
  const Tensor source = kernels::contiguous(x);
  const Tensor copy = empty(x.shape(), x.dtype(), device);
  gpu::copy_bytes(copy.data(), device, source.data(), kCpu, static_cast<size_t>(source.nbytes()),
                  /*non_blocking=*/true);
  return copy;
}

}  // namespace raw
}  // namespace tessera
