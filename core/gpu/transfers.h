// Further GPU functions of core, besides backend.h: for copies and tools.
#pragma once

#include <cstdint>
#include <memory>

#include <tessera/core/gpu/backend.h>

namespace tessera::gpu {

// Whether devices access these host bytes directly. Blocks of pinned_allocator() are reused when
// the copies that were queued with them are over.
bool is_pinned(const void* host);
// Bytes of pinned_allocator() in live blocks; 0 if there is no GPU.
int64_t pinned_bytes_in_use();

// Makes `index` the calling thread's device. A rank does so at its start: what needs a device and
// names none (page-locked memory, an event) then goes there, from any thread, and the rank opens no
// context on cuda:0, which costs about half a gigabyte there. Throws DeviceError.
void use_device(int index);

// The stream for copies beside the calculation: all share it, it never ends, and so memory may
// belong to it.
std::shared_ptr<StreamHandle> copy_stream(int device);

// Begins and ends a range of this thread on the timeline of NVIDIA's tools (core/profile/nvtx.h).
void push_range(const char* name);
void pop_range();

}  // namespace tessera::gpu
