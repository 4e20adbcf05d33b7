#include <tessera/core/cuda/dry/record.h>

#include <chrono>

#include <tessera/core/cuda/ranges.h>

namespace tessera::gpu::dry {

void sign(Launch& launch) {
  RangeNames names = current_ranges();
  launch.op = std::move(names.op);
  launch.layer = std::move(names.layer);
}

Recording record(const std::function<void()>& work) {
  const NamedRanges ranges;
  take_launches();
  const auto begin = std::chrono::steady_clock::now();
  work();
  const std::chrono::duration<double> time = std::chrono::steady_clock::now() - begin;
  return {take_launches(), time.count()};
}

}  // namespace tessera::gpu::dry
