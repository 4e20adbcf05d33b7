#include <tessera/distributed/transport/run_ranks.h>

#include <exception>
#include <mutex>
#include <optional>

#include <tessera/core/gpu/backend.h>
#include <tessera/core/gpu/transfers.h>
#include <tessera/core/parallel.h>
#include <tessera/core/thread.h>
#include <tessera/distributed/rendezvous/store.h>
#include <tessera/distributed/transport/backend_thread.h>

namespace tessera::distributed {

void run_ranks(int size, const std::function<void(int rank)>& fn, const RunRanksOptions& options) {
  TS_CHECK(size >= 1, "run_ranks", "needs at least one rank; given ", size);
  ThreadJob job(size, options.device);
  const auto store = std::make_shared<MemoryStore>();
  std::mutex mutex;
  std::exception_ptr first;
  int first_rank = 0;

  const auto body = [&](int rank) {
    Context own;
    const ContextGuard guard(own);
    set_num_threads(options.threads);
    std::optional<gpu::CurrentStream> own_stream;
    if (options.device.is_cuda()) {
      gpu::use_device(options.device.index);
      own_stream.emplace(gpu::make_stream(options.device.index));
    }
    RankContext& context = rank_context();
    context.rank = context.local_rank = rank;
    context.world_size = context.local_world_size = size;
    context.store = store;
    context.timeouts = {options.timeout_seconds, options.timeout_seconds};
    std::vector<int> ranks;
    for (int r = 0; r < size; ++r) ranks.push_back(r);
    if (size > 1) {
      std::shared_ptr<Backend> backend = job.backend(rank);
      if (options.decorate) backend = options.decorate(std::move(backend));
      context.world = std::make_shared<Group>("world", std::move(backend), ranks);
    }
    std::string end = "ended";
    bool failed = false;
    try {
      fn(rank);
    } catch (...) {
      failed = true;
      {
        const std::lock_guard lock(mutex);
        if (!first) {
          first = std::current_exception();
          first_rank = rank;
        }
      }
      try {
        throw;
      } catch (const std::exception& error) {
        end = std::string("failed: ") + error.what();
      } catch (...) {
        end = "failed";
      }
    }
    job.leave(rank, "rank " + std::to_string(rank) + " " + end, failed);
  };
  std::vector<Thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    try {
      threads.push_back(Thread([&body, rank] { body(rank); }));
    } catch (...) {  // those that began end as where a rank failed
      const std::lock_guard lock(mutex);
      if (!first) {
        first = std::current_exception();
        first_rank = rank;
      }
      job.leave(rank, "rank " + std::to_string(rank) + " did not begin", true);
    }
  }
  for (Thread& thread : threads) thread.join();
  if (!first) return;
  try {
    std::rethrow_exception(first);
  } catch (Error& error) {
    error.add_context("rank " + std::to_string(first_rank));
    throw;
  }
}

}  // namespace tessera::distributed
