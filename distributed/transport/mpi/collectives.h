// Collectives on bytes as coroutines of the progress thread.
//
// Everything but native reductions and broadcast stands on one exchange: each rank posts an Isend
// to and an Irecv from every peer. Against MPI_Ialltoallv and MPI_Iallgatherv (which do the same
// inside, linearly) it needs no common buffer and no int displacements, so counts over 2^31 and
// lists of separate tensors need no staging; measured it is as fast (docs/measurements/
// collectives.md).
//
// Private to the mpi backend: not installed.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <tessera/core/dtype.h>
#include <tessera/distributed/transport/backend.h>
#include <tessera/distributed/transport/mpi/progress.h>

namespace tessera::distributed::mpi {

// The ranks of a lane and how their messages are cut.
struct Ranks {
  MPI_Comm communicator = MPI_COMM_NULL;
  int rank = 0;
  int size = 1;
  int64_t message_limit = 0;  // bytes of a message; longer ones travel as several (MPI counts int)
  int64_t chunk_bytes = 0;    // of a reduction: so much travels while as much is summed
  int exchange_ranks = 0;     // see BackendOptions
  // Scratch of the running reduction; kept, since new pages cost more than the sum.
  std::array<std::vector<char>, 2> scratch;
};

// Messages match tag by tag; those of a reduction's two directions are not posted in the order in
// which they are awaited. Tags of send and recv come after these, three for each of the user's.
enum Tag : int { kHeaderTag, kPayloadTag, kResultTag, kFirstPeerTag };

void start_send(const Ranks& ranks, int peer, int tag, Part part, Requests* requests);
void start_receive(const Ranks& ranks, int peer, int tag, Part part, Requests* requests);
// Every other rank, beginning with the neighbor, so that no rank is everyone's first. Empty parts
// are not sent.
void start_receives(const Ranks& ranks, int tag, std::span<const Part> receives,
                    Requests* requests);
void start_sends(const Ranks& ranks, int tag, std::span<const Part> sends, Requests* requests);
// Sends sends[r] to and receives receives[r] from each rank r; a rank copies its own part itself,
// unless it is there already.
void start_exchange(const Ranks& ranks, int tag, std::span<const Part> sends,
                    std::span<const Part> receives, Requests* requests);
void start_broadcast(const Ranks& ranks, int root, Part part, Requests* requests);

struct Reduction {
  std::vector<Part> pieces;  // this rank's contributions; rank r sums pieces[r]
  char* output = nullptr;    // kOwner: where this rank's sum goes; else results replace the pieces
  bool onto = false;         // kOwner: the sum goes on from what the output holds
  DType dtype = kF32;
  ReduceOp op = ReduceOp::kSum;
  Delivery delivery = Delivery::kAll;
  int root = 0;
  bool begun = false;  // by begin_reduction(): `sent` is what is under way
  Requests sent;
};

// Sends the first contributions before anyone has said that he takes them, and tells in bytes[r]
// how many go to rank r. Who takes part posts its receives in reduce_in_rank_order; who does not
// has to receive so many bytes of kPayloadTag all the same.
void begin_reduction(const Ranks& ranks, Reduction* reduction, std::span<int64_t> bytes);

// The owner of a piece adds the contributions in rank order (deterministic.h): every rank gets the
// same bits, which depend neither on chunks nor on messages.
Task reduce_in_rank_order(std::shared_ptr<Ranks> ranks, Reduction reduction);

}  // namespace tessera::distributed::mpi
