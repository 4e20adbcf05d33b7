// MPI's own reductions, for networks whose hardware reduces. Their order of additions is MPI's:
// results may differ from those of the deterministic mode in the last bits.
//
// MPI knows no 16-bit floats: they travel as pairs of bytes, and operations of ours add them in
// f32, rounding at each hop.
//
// Private to the mpi backend: not installed.
#pragma once

#include <memory>

#include <tessera/distributed/transport/mpi/collectives.h>

namespace tessera::distributed::mpi {

// Whether MPI's non-blocking form serves this reduction well: the pieces lie one after the other,
// are equal where they stay with their owners, and more than exchange_ranks take part. With fewer
// the exchange of reduce_in_rank_order is faster: Open MPI 4.1's MPI_Iallreduce has 0.2 to 0.6 of
// MPI_Allreduce's speed at n = 2, where it sends whole buffers through one rank, and 0.6 to 1.0 at
// n = 4 (docs/measurements/collectives.md).
bool reduces_well(const Ranks& ranks, const Reduction& reduction);

// The same contract as reduce_in_rank_order, but for the order.
Task reduce_natively(std::shared_ptr<Ranks> ranks, Reduction reduction);

}  // namespace tessera::distributed::mpi
