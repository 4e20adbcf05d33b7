#include <tessera/data/example_place.h>

namespace tessera::data {
namespace {

struct CurrentPlace {
  std::optional<ExamplePlace> place;
};

std::optional<ExamplePlace>& current_place() {
  return Context::current().slot<CurrentPlace>().place;
}

// A seed of the example's own, so that its streams begin at 0 like anybody's. The high bits keep
// them apart from those by which orders are drawn, which count epochs from 0.
RandomState random_of(uint64_t seed, const ExamplePlace& place, ExampleScope::Part part) {
  const uint64_t tag = static_cast<uint64_t>(part) + 1;  // at most 3: two bits
  const auto bits = philox4x32(seed, static_cast<uint64_t>(place.epoch) | tag << 62,
                               static_cast<uint64_t>(place.position));
  return {.seed = uint64_t{bits[0]} << 32 | bits[1], .next_stream = 0};
}

}  // namespace

std::optional<ExamplePlace> example_place() { return current_place(); }

ExampleScope::ExampleScope(uint64_t seed, const ExamplePlace& place, Part part)
    : place_(current_place(), place), random_(random_state(), random_of(seed, place, part)) {}

}  // namespace tessera::data
