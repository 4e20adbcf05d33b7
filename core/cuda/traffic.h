// What a launch moves between its kernel and the memory of the device, as its host code says.
#pragma once

#include <cstdint>

namespace tessera::gpu {

// Bytes of memory that a kernel reads and writes, each address once; kernels that come by again
// count on caches, which is the business of who puts a price on it. The emulation counts them, and
// tests hold one against the other (test_cuda_traffic).
struct Traffic {
  static constexpr int64_t kUnknown = -1;
  int64_t reads = kUnknown, writes = kUnknown;
  // What is moved depends on values that the device holds (indices): never more than this, which is
  // reached, or nearly, where all of them differ.
  bool at_most = false;
  bool is_known() const { return reads >= 0 && writes >= 0; }
};

}  // namespace tessera::gpu
