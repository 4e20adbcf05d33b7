#include <tessera/distributed/backward/buckets.h>

#include <algorithm>

#include <tessera/core/error.h>

namespace tessera::distributed {

BucketList assign_buckets(std::span<const BucketItem> items, std::span<const int64_t> caps) {
  TS_CHECK(!caps.empty(), "assign_buckets", "needs a cap; got none");
  for (const int64_t cap : caps) {
    TS_CHECK(cap >= 1, "assign_buckets", "a cap must be at least 1 byte; got ", cap);
  }
  struct Open {  // the bucket that a dtype and device are filling
    DType dtype;
    Device device;
    size_t closed = 0;
    int64_t bytes = 0;
    std::vector<size_t> items;
  };
  std::vector<Open> open;
  BucketList buckets;
  for (size_t i = 0; i < items.size(); ++i) {
    const BucketItem& item = items[i];
    auto found = std::ranges::find_if(open, [&](const Open& other) {
      return other.dtype == item.dtype && other.device == item.device;
    });
    if (found == open.end()) {
      open.push_back({.dtype = item.dtype, .device = item.device, .items = {}});
      found = open.end() - 1;
    }
    found->items.push_back(i);
    found->bytes += item.bytes;
    if (found->bytes < caps[std::min(found->closed, caps.size() - 1)]) continue;
    buckets.push_back(std::move(found->items));
    found->items.clear();
    found->bytes = 0;
    ++found->closed;
  }
  for (Open& rest : open) {
    if (!rest.items.empty()) buckets.push_back(std::move(rest.items));
  }
  std::ranges::sort(buckets, {}, [](const auto& bucket) { return bucket.front(); });
  return buckets;
}

}  // namespace tessera::distributed
