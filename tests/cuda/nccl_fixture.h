// Groups of GPUs for tests: the nccl backend on emulated devices, with the mock of the library.
// Ranks are threads with a device each; CPU tensors travel over the thread backend. Collectives run
// when their streams are waited for, in a drawn order, so that an event that is missing shows.
#pragma once

#include <gtest/gtest.h>

#include <dlfcn.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <cuda_runtime.h>

#include <tessera/core/context.h>
#include <tessera/core/gpu/backend.h>
#include <tessera/core/parallel.h>
#include <tessera/distributed/rendezvous/store.h>
#include <tessera/distributed/transport/backend_thread.h>
#include <tessera/distributed/transport/collectives.h>

#include "../distributed/compared_ranks.h"
#include "../mock_nccl/mock_nccl.h"

namespace tessera::distributed {

class CudaNccl : public testing::Test {
 public:
  // Before the emulation counts its devices and the backend loads its library.
  static void SetUpTestSuite() {
    ::setenv("TESSERA_EMULATED_DEVICES", "4", 1);
    ::setenv("TESSERA_NCCL", TESSERA_MOCK_NCCL, 1);
    ASSERT_EQ(gpu::device_count(), 4) << "a test before this one has looked for devices";
  }

 protected:
  void SetUp() override {
    find<decltype(mock_nccl_reset)>("mock_nccl_reset")();
    find<decltype(mock_nccl_use_streams)>("mock_nccl_use_streams")(
        [](void* stream, std::function<bool()> ready, std::function<void()> work) {
          gpu::emulation::enqueue_when(static_cast<cudaStream_t>(stream), std::move(ready),
                                       std::move(work));
        });
  }
  void TearDown() override {
    // A watcher may be the last to let go of a group.
    const auto alive = find<decltype(mock_nccl_alive)>("mock_nccl_alive");
    for (int i = 0; i < 30000 && alive() > 0; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_EQ(alive(), 0);
  }
  int calls(const char* function) const {
    return find<decltype(mock_nccl_calls)>("mock_nccl_calls")(function);
  }

 private:
  template <class Function>
  Function* find(const char* name) const {
    return reinterpret_cast<Function*>(dlsym(handle_, name));
  }
  void* handle_ = dlopen(TESSERA_MOCK_NCCL, RTLD_NOW | RTLD_LOCAL);
};

struct GpuRanks {
  BackendOptions backend = {};
  bool fails = false;  // the group is broken at the end
  std::function<std::shared_ptr<Backend>(std::shared_ptr<Backend>)> decorate = {};
};

// Ranks with a device each, and the end of every distributed test: all ranks called the same.
inline void on_gpus(int size, const std::function<void(int rank)>& body,
                    const GpuRanks& options = {}) {
  ThreadJob job(size);
  const auto store = std::make_shared<MemoryStore>();
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      Context own;
      const ContextGuard guard(own);
      const gpu::CurrentDevice device(rank);
      set_num_threads(1);
      RankContext& context = rank_context();
      context.rank = context.local_rank = rank;
      context.world_size = context.local_world_size = size;
      context.store = store;
      std::vector<int> ranks;
      for (int r = 0; r < size; ++r) ranks.push_back(r);
      std::string end = "ended";
      bool failed = false;
      try {
        std::shared_ptr<Backend> backend = make_paired_backend(
            job.backend(rank), make_nccl_backend(store, rank, size, cuda(rank), options.backend),
            options.backend);
        if (options.decorate) backend = options.decorate(std::move(backend));
        context.world = std::make_shared<Group>("world", std::move(backend), ranks);
        const CommTrace::Scope scope(*context.trace);
        body(rank);
        if (!options.fails) {
          check_equal_traces(scope);
          context.world->shutdown();
        }
      } catch (const std::exception& error) {
        failed = true;
        end = std::string("failed: ") + error.what();
        if (context.world) context.world->abort(end);
        try {
          gpu::synchronize(rank);  // what is aborted goes by
        } catch (const std::exception& after) {
          end += std::string("; ") + after.what();
        }
        const std::lock_guard lock(mutex);
        if (!first) first = std::current_exception();
      }
      job.leave(rank, "rank " + std::to_string(rank) + " " + end, failed);
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

inline Tensor on_gpu(const Tensor& x) { return x.to(cuda(rank())); }
inline std::vector<float> values(const Tensor& x) { return x.to(kCpu).to_vector<float>(); }

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace tessera::distributed
