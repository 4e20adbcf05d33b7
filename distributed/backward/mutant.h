// Deliberate bugs, for tests that prove that tests notice them. Only a second compilation of these
// sources (tests/mutants) has them: in the library TS_MUTANT is false.
#pragma once

#ifdef TESSERA_MUTANTS

#include <cstdint>

namespace tessera::distributed {

enum class Mutant : uint8_t {
  kNone,
  kWrongDivide,       // the mean is taken over a rank too many
  kLaunchOutOfOrder,  // buckets are launched as they fill up
  kOwnBucketOrder,    // buckets are rebuilt in this rank's order, not rank 0's
  kStaleBucket,       // the place of an unused gradient keeps its old bytes
  kOwnUsedMap,        // what other ranks used is ignored
  kReduceAlways,      // no_sync is forgotten
  kSkipInitSync,      // every rank keeps the parameters that it began with
  kSkipBuffers,       // buffers are not broadcast
  // For sharded parameters:
  kSkipWait,        // an all-gather is read before it has ended
  kPrefetchWrong,   // another unit than the next is prefetched
  kStaleGather,     // an old all-gather is taken for one of new values
  kFreeEarly,       // a unit is resharded when its first gradient has come
  kWrongOwner,      // a rank takes another's part of the sums
  kPaddingCounted,  // padding counts as rows
  kForgetSums,      // a reduction begins anew where it should add
  kSkipReduceWait,  // sums are used before they are there
  // For models whose layers ranks calculate together:
  kOneBlock,        // columns that lie side by side in several blocks are cut as one
  kNoSummands,      // gradients of copies are not said to be summands
  kCopiesTwice,     // and are added up twice
  kStridedAsShard,  // a chunk of each of tp's chunks is taken for one of the whole
  kFlatOfWhole,     // places in a run of parts are counted in elements of the whole tensors
  // For weights that are gathered in fp8:
  kStaleBytes,  // bytes of a weight's old values are taken for those after the step
  kOwnMaxima,   // a weight's largest magnitude is that of this rank's shard
};

// The active bug of this thread, which is a rank.
inline thread_local Mutant mutant = Mutant::kNone;

}  // namespace tessera::distributed

#define TS_MUTANT(kind) (::tessera::distributed::mutant == ::tessera::distributed::Mutant::kind)

#else

#define TS_MUTANT(kind) false

#endif
