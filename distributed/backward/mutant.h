// Deliberate bugs, for tests that prove that tests would see them. Nothing but a second compile of
// these sources (tests/mutants) knows them: in the library TS_MUTANT is false.
#pragma once

#ifdef TESSERA_MUTANTS

#include <cstdint>

namespace tessera::distributed {

enum class Mutant : uint8_t {
  kNone,
  kWrongDivide,       // the mean is taken over a rank too many
  kLaunchOutOfOrder,  // buckets are launched as they fill up
  kOwnBucketOrder,    // buckets are made anew in this rank's order, not rank 0's
  kStaleBucket,       // the place of an unused gradient keeps what lay there
  kOwnUsedMap,        // what other ranks used counts for nothing
  kReduceAlways,      // no_sync is forgotten
  kSkipInitSync,      // every rank keeps the parameters that it began with
  kSkipBuffers,       // buffers are not broadcast
  // Of sharded parameters:
  kSkipWait,        // a gather is read before it is there
  kPrefetchWrong,   // another unit than the next is asked for
  kStaleGather,     // a gather of new values passes for one of the old
  kFreeEarly,       // a unit is released when the first of its gradients has come
  kWrongOwner,      // a rank takes another's part of the sums
  kPaddingCounted,  // padding counts as rows
  kForgetSums,      // a reduction begins anew where it should add
  kSkipReduceWait,  // sums are used before they are there
  // Of weights that travel in fp8:
  kStaleBytes,  // bytes of a weight's values before the step pass for those behind it
  kOwnMaxima,   // a weight's largest magnitude is that of this rank's part
};

// Of this thread, which is a rank.
inline thread_local Mutant mutant = Mutant::kNone;

}  // namespace tessera::distributed

#define TS_MUTANT(kind) (::tessera::distributed::mutant == ::tessera::distributed::Mutant::kind)

#else

#define TS_MUTANT(kind) false

#endif
