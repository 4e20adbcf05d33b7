// The files here run on the emulation and, as gpu_suite, gpu_ops and gpu_bad_input (tests/gpu), on
// a GPU: what a test may expect of each.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>

#include <tessera/core/cuda/emulation/report.h>
#include <tessera/core/gpu/backend.h>

namespace tessera::gpu::emulation {
void set_seed(uint64_t seed);  // of the orders that it draws (simt.h)
}

namespace tessera::gpu {

// It counts waits of the host, launches and bytes, draws the orders of streams and blocks, looks at
// each access, and has a library of products or graphs where a test installs a model of one. A GPU
// has the libraries themselves, and nothing of the rest (tests/gpu/emulation_on_gpu.cpp).
inline bool on_emulation() { return backend_kind() == BackendKind::kEmulated; }

inline Device last_device() { return cuda(device_count() - 1); }

// How often the host has waited since this was made. Nobody counts that on a GPU, where it is 0: a
// test of nothing else needs the emulation.
class HostWaits {
 public:
  int64_t count() const { return so_far() - before_; }

 private:
  static int64_t so_far() { return on_emulation() ? emulation::host_waits() : 0; }
  int64_t before_ = so_far();
};

}  // namespace tessera::gpu

// In the body of a test: it, or what is left of it, is skipped elsewhere, and says why.
#define TS_NEEDS_EMULATION(why)         \
  GTEST_AMBIGUOUS_ELSE_BLOCKER_         \
  if (::tessera::gpu::on_emulation()) { \
  } else /* NOLINT */                   \
    GTEST_SKIP() << "needs the emulation, which " << (why)
#define TS_NEEDS_DEVICES(count)                    \
  GTEST_AMBIGUOUS_ELSE_BLOCKER_                    \
  if (::tessera::gpu::device_count() >= (count)) { \
  } else /* NOLINT */                              \
    GTEST_SKIP() << "needs " << (count) << " GPUs; there is " << ::tessera::gpu::device_count()
