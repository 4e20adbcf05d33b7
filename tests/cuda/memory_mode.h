// How device memory is handed out, in a test of it.
#pragma once

#include <gtest/gtest.h>

#include <tessera/core/cuda/device_memory.h>

namespace tessera::gpu {

// Device memory in another way until the end of the scope.
template <bool (*kIsOn)(), void (*kSet)(bool)>
class MemoryMode {
 public:
  explicit MemoryMode(bool on) : before_(kIsOn()) { kSet(on); }
  ~MemoryMode() { kSet(before_); }
  MemoryMode(const MemoryMode&) = delete;
  MemoryMode& operator=(const MemoryMode&) = delete;

 private:
  bool before_;
};
using PlainMemory = MemoryMode<uses_plain_memory, set_uses_plain_memory>;
using PoisonedMemory = MemoryMode<poisons_memory, set_poisons_memory>;

}  // namespace tessera::gpu

// In the body of a test: it, or what is left of it, is skipped where TESSERA_PLAIN_MEMORY is set.
#define TS_NEEDS_KEPT_MEMORY()                \
  GTEST_AMBIGUOUS_ELSE_BLOCKER_               \
  if (!::tessera::gpu::uses_plain_memory()) { \
  } else /* NOLINT */                         \
    GTEST_SKIP() << "needs memory that is used again"
