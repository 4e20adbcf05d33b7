// How gradients are grouped into buckets, each of which is one collective.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <tessera/core/device.h>
#include <tessera/core/dtype.h>

namespace tessera::distributed {

inline constexpr int64_t kFirstBucketBytes = int64_t{1} << 20;
inline constexpr int64_t kBucketBytes = int64_t{25} << 20;

struct BucketItem {
  int64_t bytes = 0;
  DType dtype = kF32;
  Device device = kCpu;
};
using BucketList = std::vector<std::vector<size_t>>;  // positions of the items of each bucket

// Walks over the items in the order in which their gradients are expected. A bucket holds one dtype
// and device; it is closed as soon as it has `caps[k]` bytes or more, k being the number of buckets
// of that dtype and device closed before (the last cap goes on). So a cap closes a bucket and does
// not limit it: an item is never split, and one larger than the cap ends its bucket. A small first
// cap lets the first collective start early. Buckets come in the order of their first items.
// Throws ValueError for no cap, or one below 1.
BucketList assign_buckets(std::span<const BucketItem> items, std::span<const int64_t> caps);

}  // namespace tessera::distributed
