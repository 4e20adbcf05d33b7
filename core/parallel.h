// Loops over several cores, on a team of threads that each calling thread keeps.
//
// The thread count belongs to the context (set_num_threads), so that two trainings in one process
// can have different ones. Results never depend on it: a reduction cuts its work into pieces that
// are a function of the shape, and combines them in their order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace tessera {

int num_threads();
void set_num_threads(int count);  // throws ValueError where count < 1
bool in_parallel_region();

namespace detail {
using ParallelBody = void (*)(void* function, int64_t begin, int64_t end);
void parallel_run(int64_t size, int64_t grain, ParallelBody body, void* function);
}  // namespace detail

// Calls f(begin, end) on disjoint ranges that cover [0, size), each but the last a multiple of
// `grain` long; one call on this thread where size <= grain or inside another parallel loop.
// Inside f: no allocation of tensors, no exception, no context.
template <class F>
void parallel_for(int64_t size, int64_t grain, F&& f) {
  if (size <= 0) return;
  if (size <= grain) {
    f(int64_t{0}, size);
    return;
  }
  using Function = std::remove_reference_t<F>;
  detail::parallel_run(
      size, std::max<int64_t>(grain, 1),
      [](void* function, int64_t begin, int64_t end) {
        (*static_cast<Function*>(function))(begin, end);
      },
      const_cast<void*>(static_cast<const void*>(&f)));
}

}  // namespace tessera
