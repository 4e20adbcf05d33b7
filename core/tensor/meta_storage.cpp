#include <tessera/core/tensor/meta_storage.h>

namespace tessera {
namespace {

struct MetaDeleter {
  std::shared_ptr<TensorSlot> slot;
  void operator()(Storage* storage) const { delete storage; }
};

}  // namespace

StoragePtr meta_storage(int64_t bytes) {
  return StoragePtr(new Storage(bytes, kMeta), MetaDeleter{});
}

std::shared_ptr<TensorSlot>* meta_slot(const StoragePtr& storage) {
  auto* const deleter = std::get_deleter<MetaDeleter>(storage);
  return deleter == nullptr ? nullptr : &deleter->slot;
}

}  // namespace tessera
