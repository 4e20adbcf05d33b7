// Meta tensors that are counted: what a training takes is seen without taking it.
#pragma once

#include <tessera/core/context.h>

namespace tessera {

// In the scope meta tensors stand for such with bytes: storages that are made are counted in the
// statistics as if they had them, what asks for memory takes them, and what an optimizer writes
// gets a new version. Storages stay counted until they go.
class MetaMemoryGuard {
 public:
  MetaMemoryGuard();
  static bool holds();

 private:
  ScopedValue<bool> scoped_;
};

}  // namespace tessera
