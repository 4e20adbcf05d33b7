// Tensors in page-locked memory of the host: a GPU reads and writes them while the host goes on.
//
//     const Tensor host = raw::empty_pinned({64, 1024}, kI64);
//     fill(host);
//     const Tensor there = raw::copy_to_device(host, cuda(0));  // returns at once
//
// Bytes are counted under the given category. They are used again when the tensor is gone and the
// copies that were queued with it are over, so it may go while they are under way.
#pragma once

#include <tessera/core/factory/factory.h>
#include <tessera/core/memory/allocator.h>

namespace tessera {

bool is_pinned(const Tensor& x);

namespace raw {

// Uninitialised, contiguous. DeviceError where there is no GPU, OutOfMemory.
Tensor empty_pinned(const Shape& shape, DType dtype,
                    MemoryCategory category = MemoryCategory::kStaging);
// The elements of a CPU tensor in page-locked memory, contiguous; x itself where it is that.
Tensor pin(const Tensor& x);

// A contiguous copy on a GPU, on the current stream of this context; memory of the result belongs
// to that stream. Returns at once for pinned tensors: until the copy is over the host must not
// write to x. Others are read before it returns.
Tensor copy_to_device(const Tensor& x, const Device& device);

}  // namespace raw
}  // namespace tessera
