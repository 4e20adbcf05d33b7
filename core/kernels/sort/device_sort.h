// Sorting on a GPU as a building block of other kernels. Internal; in sort.cu.
#pragma once

#include <tessera/core/tensor/tensor.h>

namespace tessera::kernels {

// Places in [0, size) in their order: what writes to one place lies side by side, and in the order
// in which it was given. So sums over equal indices are made by one thread each, without atomics.
struct SortedPlaces {
  Tensor places;  // i32 [n]
  Tensor order;   // i32 [n]: position of each in the list that was given
};
// places: contiguous i64 [n] of a GPU; n and size below 2^31. Cost: a pass of 24 bytes an element
// for each 8 bits of `size`; one block for up to 2048 places.
SortedPlaces sort_places(const Tensor& places, int64_t size);

}  // namespace tessera::kernels
