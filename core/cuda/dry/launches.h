// What a dry device was asked for.
//
// A dry device is a third library beside NVIDIA's runtime and the emulation: all host code runs as
// on a GPU (allocator, streams, requests of cuBLASLt and cuDNN, graphs), memory is reserved and not
// touched, and kernels do not run. A step of a model of any size then takes the host's own time,
// and says what a GPU would have been asked for. What would read values of the device (item(),
// to(kCpu), shapes that depend on values) is an UnsupportedError.
//
//     dry::take_launches();           // forget what came before
//     step();
//     for (const dry::Launch& launch : dry::take_launches()) ...
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <tessera/core/cuda/gemm.h>
#include <tessera/core/cuda/traffic.h>
#include <tessera/core/dtype.h>

namespace tessera::gpu::dry {

enum class LaunchKind : uint8_t {
  kKernel,   // of the library's own
  kProduct,  // of cuBLASLt
  kGraph,    // of cuDNN
  kCopy,     // within or to the device
  kFill,     // a memset
};

struct Launch {
  LaunchKind kind = LaunchKind::kKernel;
  int device = 0;
  std::string name = {};  // of the op
  // Of a kernel: its address, and its shape. Grid and block as x, y, z.
  const void* function = nullptr;
  unsigned grid[3] = {1, 1, 1}, block[3] = {1, 1, 1};
  int64_t shared_bytes = 0;               // asked for beside arrays of fixed size
  std::string request = {};               // of a library: gemm.h's describe(), or the graph's key
  Traffic traffic = {};                   // as its host code says, where it does
  int64_t bytes = 0;                      // of a copy or fill
  DType dtype = kF32;                     // of a product's first operand
  bool causal = false, backward = false;  // of attention
  // Of a product and of the products in a graph: multiplications and additions of numbers, as if
  // nothing were masked.
  double flops = 0;
  bool replayed = false;  // as a node of a CUDA graph, which is one launch of the host
};

// All devices', in the order of the calls, since the last call of this. Thread-safe.
std::vector<Launch> take_launches();

// Whether cuBLASLt and cuDNN are there, as they are at first. False: everything runs on own
// kernels.
void set_libraries(bool serve);

// Of each device from now on: a request beyond it fails as on a GPU. At first 80 GiB.
void set_device_bytes(int64_t bytes);
// Most bytes that were reserved on a device at a time, since the last reset.
int64_t peak_reserved_bytes(int device);
void reset_peak_reserved_bytes(int device);

}  // namespace tessera::gpu::dry
