// Which device a thread's calls go to. Internal: CurrentDevice (backend.h) is the scope for users.
//
// [Note: contexts] A device gets a context with the first call that works on it or names it
// (cudaSetDevice, as of CUDA 12), and a context takes about half a gigabyte. Every thread starts on
// cuda:0. So that a rank on cuda:3 has one context, a scope goes back only to a device that is in
// use, and calls that need some device, whichever, leave one that nobody uses.
#pragma once

#include <cuda_runtime.h>

namespace tessera::gpu {

// Makes `index` the thread's device. `previous`: for leave_device.
cudaError_t enter_device(int index, int& previous) noexcept;
void leave_device(int previous) noexcept;

// Before calls on page-locked memory, events and pointers, which need some device: where the
// thread's has no context and another one has, that one is made the thread's. False where no device
// has a context: then nothing is page-locked either.
bool enter_some_device() noexcept;

}  // namespace tessera::gpu
