// The nccl backend: groups of ranks that have a GPU each.
//
// A group forms over its store: rank 0 puts a unique id there. Every channel has a communicator,
// split off at its first call, which therefore waits for the other ranks; program order is the same
// on all ranks, so that is the same call everywhere. Unlike on mpi nothing compares the ranks'
// calls before data moves: a mismatch shows as a timeout.
//
// Private: not installed. Compiled where nccl.h is found.
#pragma once

#include <functional>
#include <memory>

#include <tessera/distributed/backend.h>
#include <tessera/distributed/nccl/communicator.h>
#include <tessera/distributed/store.h>

namespace tessera::distributed::nccl {

// What a CUDA backend gives: a stream for each channel, and news of its progress.
class DeviceQueues {
 public:
  virtual ~DeviceQueues() = default;
  virtual Device device() const = 0;
  virtual cudaStream_t stream(Channel channel) = 0;
  // `done` is called, from any thread, when everything queued so far on the stream has run.
  virtual void when_done(Channel channel, std::function<void(std::exception_ptr)> done) = 0;
};

std::unique_ptr<Backend> make_backend(LibraryPtr library, std::shared_ptr<Store> store,
                                      const std::string& name, int rank, int size,
                                      std::shared_ptr<DeviceQueues> queues,
                                      const BackendOptions& options);

}  // namespace tessera::distributed::nccl
