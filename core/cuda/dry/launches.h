// What a dry device was asked for.
//
// A dry device is a third library beside NVIDIA's runtime and the emulation: all host code runs as
// on a GPU (allocator, streams, requests of cuBLASLt and cuDNN, graphs), memory is reserved and not
// touched, and kernels do not run. A step of a model of any size then takes the host's own time,
// and says what a GPU would have been asked for. What would read values of the device (item(),
// to(kCpu), shapes that depend on values) is an UnsupportedError.
//
//     step();  // what comes once: the optimizer's state
//     const dry::Recording recording = dry::record([&] { step(); });
//     for (const dry::Launch& launch : recording.launches) ...
//
// A program gets a dry device by its link: the target property TESSERA_GPU is `dry`, in a build
// tree as with an installed tessera.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <tessera/core/cuda/traffic.h>
#include <tessera/core/dtype.h>

namespace tessera::gpu::dry {

enum class LaunchKind : uint8_t {
  kKernel,             // of the library's own
  kProduct,            // of cuBLASLt
  kAttention,          // of cuDNN, and so the next three
  kAttentionGradient,  //
  kConvolution,        // or one of its gradients
  kGraph,              // what else it calculates
  kCopy,               // within or to the device
  kFill,               // a memset
};

// [batch, m, k] times [batch, k, n], or of one [k, n].
struct ProductShape {
  int64_t batch = 0, m = 0, n = 0, k = 0;
};

struct Launch {
  LaunchKind kind = LaunchKind::kKernel;
  int device = 0;
  std::string name = {};  // of the kernel
  // Within record(): who asked for it. The op ("gelu", "gelu backward"; not those that it is made
  // of), and the innermost call of a module, by its dotted name ("transformer.h.0.mlp"), also for
  // the op's backward; or another range of a timeline, such as "optimizer step". Empty: outside of
  // all.
  std::string op = {}, layer = {};
  // For a kernel: its address, and its shape. Grid and block as x, y, z.
  const void* function = nullptr;
  unsigned grid[3] = {1, 1, 1}, block[3] = {1, 1, 1};
  int64_t shared_bytes = 0;  // asked for beside arrays of fixed size
  std::string request = {};  // of a library: gemm.h's describe(), or the graph's key
  Traffic traffic = {};      // as its host code says, where it does
  double gelu_results = 0;   // of a product: those that GELU's epilogue makes
  DType dtype = kF32;        // of the first operand of a product, attention or convolution
  bool tf32 = false;         // a product of f32 operands that are cut to 10 bits of mantissa
  ProductShape product = {};
  bool causal = false;  // of attention
  // For a product and the products in a graph: multiplications and additions of numbers, as if
  // nothing were masked.
  double flops = 0;
  bool replayed = false;  // as a node of a CUDA graph, which is one launch of the host
};

// Launches of all devices, in the order of the calls, since the last call of this. Thread-safe.
std::vector<Launch> take_launches();

struct Recording {
  std::vector<Launch> launches;
  // The wall time of the calling thread: the host's work without the driver's share and the
  // recording of launches.
  double host_seconds = 0;
};
// The launches of `work`, with the ops and layers that request them. Earlier records are discarded.
// On other threads than this one ops and layers are not known; replays of a CUDA graph have those
// of its capture, if that was recorded.
Recording record(const std::function<void()>& work);

// Whether cuBLASLt and cuDNN are available, as by default. False: everything runs on own kernels.
void set_libraries(bool serve);

// The memory of each device from now on: a request beyond it fails as on a GPU. Default: 80 GiB.
void set_device_bytes(int64_t bytes);
// The largest number of bytes reserved on a device at a time, since the last reset.
int64_t peak_reserved_bytes(int device);
void reset_peak_reserved_bytes(int device);

}  // namespace tessera::gpu::dry
