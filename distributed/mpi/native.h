// MPI's own reductions, for networks whose hardware reduces. Their order of additions is MPI's:
// results may differ from those of the deterministic mode in the last bits.
//
// MPI knows no 16-bit floats: they travel as pairs of bytes, and operations of ours add them in
// f32, rounding at each hop.
//
// Private to the mpi backend: not installed.
#pragma once

#include <memory>

#include <tessera/distributed/mpi/collectives.h>

namespace tessera::distributed::mpi {

// Whether MPI's non-blocking form serves this reduction well: the pieces lie one after the other,
// are equal where they stay with their owners, and enough ranks take part. With two or three, Open
// MPI sends whole buffers through one rank (0.2 to 0.6 of MPI_Allreduce's speed), and
// reduce_in_rank_order is the better choice.
bool reduces_well(const Ranks& ranks, const Reduction& reduction);

// The same contract as reduce_in_rank_order, but for the order.
Task reduce_natively(std::shared_ptr<Ranks> ranks, Reduction reduction);

}  // namespace tessera::distributed::mpi
