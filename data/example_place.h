// Which example is being made, and the random numbers that are its own.
//
// [Note: random numbers of examples] Under a loader what Dataset::get(), the next() of a stream and
// Collate draw (rand, dropout, next_random_stream...) is a function of the loader's seed, the epoch
// and the example's place in the epoch's order: the same for any number of workers, 0 included, for
// any number of ranks, after any restart, and other numbers in every epoch. Of a stream that ranks
// read by parts the place is that in a rank's own parts: there the numbers are those of the number
// of ranks. The numbers of the thread that runs the loop are left alone, also without workers.
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

// Of the example that the current context makes; of a batch's first one in Collate. Nothing where
// no loader asks: a data set that changes with the epoch says what it does then.
std::optional<ExamplePlace> example_place();

// For a scope: the current context makes the example at `place` of a loader with this seed.
class ExampleScope {
 public:
  // Parts draw apart: examples, their collation, the opening of a stream.
  enum class Part : uint8_t { kExample, kCollate, kOpen };
  ExampleScope(uint64_t seed, const ExamplePlace& place, Part part = Part::kExample);

 private:
  ScopedValue<std::optional<ExamplePlace>> place_;
  ScopedValue<RandomState> random_;
};

}  // namespace tessera::data
