// The storage of meta tensors: a size, no bytes, and a slot for what upper units know of the
// elements that are not there (initial_values.h).
//
// [Note: where the slot is] In the deleter of the storage's pointer: storages of bytes have no need
// of it. It goes when the last tensor does.
#pragma once

#include <memory>

#include <tessera/core/tensor/tensor.h>

namespace tessera {

StoragePtr meta_storage(int64_t bytes);
// The slot, empty at first; nullptr for a storage that meta_storage() has not made.
std::shared_ptr<TensorSlot>* meta_slot(const StoragePtr& storage);

}  // namespace tessera
