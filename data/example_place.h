// The place of the current example, from which its random numbers follow.
//
// [Note: random numbers of examples] Under a loader the random numbers of Dataset::get(), the
// next() of a stream and Collate (rand, dropout, next_random_stream...) are a function of the
// loader's seed, the epoch and the example's place in the epoch's order: the same for any number of
// workers, 0 included, for any world size, after any restart, and different in every epoch. For a
// stream that ranks read by parts the place is that within a rank's own parts, so there the numbers
// depend on the world size. The random state of the thread that runs the loop does not change, also
// without workers.
#pragma once

#include <cstdint>
#include <optional>

#include <tessera/core/context.h>
#include <tessera/core/random.h>

namespace tessera::data {

struct ExamplePlace {
  int64_t epoch = 0;
  int64_t position = 0;  // in the epoch's order (IndexSource::order_position), or in the stream
};

// The place of the example that the current context makes; in Collate that of the batch's first
// one. Nothing outside of a loader: a data set that depends on the epoch must handle that.
std::optional<ExamplePlace> example_place();

// For a scope: the current context makes the example at `place` of a loader with this seed.
class ExampleScope {
 public:
  // Parts draw separately: examples, their collation, the opening of a stream.
  enum class Part : uint8_t { kExample, kCollate, kOpen };
  ExampleScope(uint64_t seed, const ExamplePlace& place, Part part = Part::kExample);

 private:
  ScopedValue<std::optional<ExamplePlace>> place_;
  ScopedValue<RandomState> random_;
};

}  // namespace tessera::data
