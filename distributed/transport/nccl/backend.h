// The nccl backend: groups of ranks that have a GPU each.
//
// A group forms over its store: rank 0 puts a unique id there. Every channel has a communicator,
// split off at its first call, which therefore waits for the other ranks; program order is the same
// on all ranks, so that is the same call everywhere. Nothing here compares the ranks' calls before
// data moves: a mismatch shows as a timeout (see BackendOptions::compare_calls).
//
// Private: not installed.
#pragma once

#include <memory>

#include <tessera/distributed/rendezvous/store.h>
#include <tessera/distributed/transport/backend.h>
#include <tessera/distributed/transport/nccl/communicator.h>
#include <tessera/distributed/transport/nccl/queues.h>

namespace tessera::distributed::nccl {

// `name` begins the group's keys in the store; a rank may form a group of one name several times.
std::unique_ptr<Backend> make_backend(LibraryPtr library, std::shared_ptr<Store> store,
                                      const std::string& name, int rank, int size,
                                      std::shared_ptr<DeviceQueues> queues,
                                      const BackendOptions& options);

}  // namespace tessera::distributed::nccl
