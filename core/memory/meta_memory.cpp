#include <tessera/core/memory/meta_memory.h>

namespace tessera {
namespace {

struct MetaMemory {
  bool counted = false;
};

}  // namespace

MetaMemoryGuard::MetaMemoryGuard() : scoped_(Context::current().slot<MetaMemory>().counted, true) {}
bool MetaMemoryGuard::holds() { return Context::current().slot<MetaMemory>().counted; }

}  // namespace tessera
