// NCCL communicators: made without blocking, so that they can be aborted at any moment.
//
// The library is loaded when it is first asked for (libnccl.so.2, or the path that TESSERA_NCCL
// gives), so that one program runs with and without it. Each call may answer "in progress"; it is
// then followed until NCCL says success or the deadline has passed. Errors of arguments and usage
// leave the communicator whole; all others abort it, and what is called on it later says so.
//
// Private to the nccl backend: not installed.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include <tessera/core/dtype.h>
#include <tessera/distributed/transport/backend.h>
#include <tessera/distributed/transport/nccl/api.h>

namespace tessera::distributed::nccl {

// The entry points of a libnccl. Throws UnsupportedError where it is missing or older than 2.18
// (ncclCommSplit with a configuration).
struct Library {
  explicit Library(const std::string& path);
  ~Library();
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  // The process's library: TESSERA_NCCL or libnccl.so.2, loaded once.
  static std::shared_ptr<const Library> load();

  std::string path;
  int version = 0;  // 22809 is 2.28.9

#define TS_NCCL_MEMBER(result, name, parameters) result(*name) parameters = nullptr;
  TS_NCCL_FUNCTIONS(TS_NCCL_MEMBER)
#undef TS_NCCL_MEMBER

 private:
  void* handle_ = nullptr;
};
using LibraryPtr = std::shared_ptr<const Library>;

// Throws DTypeError for dtypes and pairs that NCCL has no reduction for (bool, fp8).
ncclDataType_t data_type(DType dtype);
ncclRedOp_t reduction(ReduceOp op, DType dtype);

// 128 bytes that rank 0 makes and hands to the others through the store.
std::string make_unique_id(const Library& library);

// One communicator. The calls of a rank come from one thread, in the same order on all ranks;
// abort() may come from any thread, also while another is inside a call.
// Pointers are device memory of the rank's device; counts are elements; work is queued on `stream`.
class Communicator {
 public:
  using Seconds = std::chrono::duration<double>;

  // All ranks call it with the same id and their device current. Throws DistributedError where
  // NCCL fails or a rank does not come in time.
  Communicator(LibraryPtr library, const std::string& unique_id, int rank, int size,
               const std::string& name, Seconds timeout);
  ~Communicator();  // aborts what has not been shut down
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  // A part of this communicator; collective over all its ranks. color < 0: takes part and gets
  // null. Ranks are ordered by (key, rank).
  std::unique_ptr<Communicator> split(int color, int key, int new_rank, int new_size,
                                      const std::string& name, Seconds timeout);

  void all_reduce(const void* send, void* receive, size_t count, DType dtype, ReduceOp op,
                  CudaStream stream);
  void reduce(const void* send, void* receive, size_t count, DType dtype, ReduceOp op, int root,
              CudaStream stream);
  void broadcast(void* data, size_t bytes, int root, CudaStream stream);
  void all_gather(const void* send, void* receive, size_t bytes, CudaStream stream);
  void reduce_scatter(const void* send, void* receive, size_t receive_count, DType dtype,
                      ReduceOp op, CudaStream stream);
  // Sends sends[r] to and receives receives[r] from each rank r, in one group: uneven all_to_all,
  // ragged all_gather, gather, scatter, send and recv. Empty parts send nothing, nor does what this
  // rank has where it takes it from itself.
  void exchange(std::span<const Part> sends, std::span<const Part> receives, CudaStream stream);
  // Any messages, in one group. Those between two ranks match in their order.
  struct Message {
    int peer;
    bool is_sent;
    Part part;
  };
  void exchange(std::span<const Message> messages, CudaStream stream);

  // Throws DistributedError where NCCL has found a failure since the last call, and aborts then.
  void check_async();
  // Kernels end, calls in other threads return; idempotent.
  void abort(const std::string& reason) noexcept;
  // Waits for what is queued and frees the communicator; collective. Aborts where that fails.
  void shutdown();

 private:
  Communicator(LibraryPtr library, int rank, int size, std::string name, Seconds timeout);
  void call(const char* name, const std::function<ncclResult_t()>& function);
  void settle(const char* name, ncclResult_t result);
  [[noreturn]] void fail(const char* name, ncclResult_t result);
  std::string reason() const;

  const LibraryPtr library_;
  const int rank_, size_;
  const std::string name_;
  const Seconds timeout_;
  ncclComm_t communicator_ = nullptr;
  std::atomic<bool> aborted_{false};
  mutable std::mutex mutex_;  // held in NCCL's calls and by the end of communicator_
  std::string reason_;
};

}  // namespace tessera::distributed::nccl
