// Finds the form of a CPU kernel for another device.
//
// A kernel is named by its function. The form for GPUs is in the `.cu` file of the same name, has
// the same signature and is registered before the first tensor of a GPU exists:
//
//     // softmax_cpu.cpp
//     Tensor softmax(const Tensor& x, int dim, bool log) {
//       if (x.device().is_cuda()) return on_cuda<softmax>("softmax", x.device(), x, dim, log);
//     // softmax.cu
//     void register_softmax() { cuda_kernel<softmax> = softmax_cuda; }
//
// A kernel without a form throws an UnsupportedError that names it and the device.
#pragma once

#include <utility>

#include <tessera/core/device.h>
#include <tessera/core/error.h>
#include <tessera/core/gpu/backend.h>

namespace tessera::kernels {

template <auto Kernel>
inline constinit decltype(Kernel) cuda_kernel = nullptr;

[[noreturn]] inline void fail_without_kernel(const char* where, const Device& device) {
  TS_THROW(UnsupportedError, where, "has no kernel for ", device,
           "; move its operands with to(kCpu)");
}

// Runs with the device as the thread's current one.
template <auto Kernel, class... Arguments>
decltype(auto) on_cuda(const char* where, const Device& device, Arguments&&... arguments) {
  if (cuda_kernel<Kernel> == nullptr) fail_without_kernel(where, device);
  const gpu::CurrentDevice scope(device.index);
  return cuda_kernel<Kernel>(std::forward<Arguments>(arguments)...);
}

}  // namespace tessera::kernels
