#include <tessera/core/parallel.h>

#include <omp.h>

#include <tessera/core/context.h>
#include <tessera/core/error.h>

namespace tessera {
namespace {

struct Threads {
  int count = omp_get_max_threads();
};

}  // namespace

int num_threads() { return Context::current().slot<Threads>().count; }

void set_num_threads(int count) {
  TS_CHECK(count >= 1, "set_num_threads", "expects at least 1; got ", count);
  Context::current().slot<Threads>().count = count;
}

bool in_parallel_region() { return omp_in_parallel() != 0; }

namespace detail {

void parallel_run(int64_t size, int64_t grain, ParallelBody body, void* function) {
  const int64_t blocks = (size + grain - 1) / grain;
  const int64_t threads = std::min<int64_t>(omp_in_parallel() ? 1 : num_threads(), blocks);
  if (threads <= 1) {
    body(function, 0, size);
    return;
  }
#pragma omp parallel num_threads(static_cast <int>(threads))
  {
    // Static partition in whole blocks: the same elements on the same core in every call, so that
    // a core finds in its cache what it wrote before.
    const int64_t team = omp_get_num_threads();
    const int64_t self = omp_get_thread_num();
    const int64_t begin = std::min(size, blocks * self / team * grain);
    const int64_t end = std::min(size, blocks * (self + 1) / team * grain);
    if (begin < end) body(function, begin, end);
  }
}

}  // namespace detail
}  // namespace tessera
