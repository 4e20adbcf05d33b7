// Tensors in page-locked host memory, which a GPU reads and writes while the host continues.
//
//     const Tensor host = raw::empty_pinned({64, 1024}, kI64);
//     fill(host);
//     const Tensor there = raw::copy_to_device(host, cuda(0));  // returns at once
//
// Bytes are counted under the given category. The memory is reused when the tensor is destroyed and
// the copies that were queued with it are over, so it may be destroyed while they run.
#pragma once

#include <tessera/core/factory/factory.h>
#include <tessera/core/memory/allocator.h>

namespace tessera {

bool is_pinned(const Tensor& x);

namespace raw {

// Uninitialized, contiguous. DeviceError if there is no GPU, OutOfMemory.
Tensor empty_pinned(const Shape& shape, DType dtype,
                    MemoryCategory category = MemoryCategory::kStaging);
// The elements of a CPU tensor in page-locked memory, contiguous; x itself if it is so already.
Tensor pin(const Tensor& x);

// A contiguous copy on a GPU, on the current stream of this context; memory of the result belongs
// to that stream. Returns at once for pinned tensors: until the copy is over the host must not
// write to x. Others are read before it returns.
Tensor copy_to_device(const Tensor& x, const Device& device);

}  // namespace raw
}  // namespace tessera
