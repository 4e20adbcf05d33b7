// Counts meta tensors as if they had memory, to predict the memory of a training.
#pragma once

#include <tessera/core/context.h>

namespace tessera {

// In the scope meta tensors count as allocated: new storages are counted in the statistics, code
// that requires memory accepts them, and optimizers bump the versions of what they would write.
// Storages are counted until they are destroyed.
class MetaMemoryGuard {
 public:
  MetaMemoryGuard();
  static bool holds();

 private:
  ScopedValue<bool> scoped_;
};

}  // namespace tessera
