#include <tessera/core/random.h>

#include <tessera/core/context.h>

namespace tessera {

namespace {

// Threads that were given no seed take their streams from ranges of their own: two of them never
// draw the same numbers. A range is 12 days of a stream each microsecond; the top bit stays free
// for the streams of names.
constexpr int kStreamsOfThreadBits = 40;

struct Generator {
  explicit Generator(const Context& context)
      : state{.next_stream =
                  (context.thread_number() << kStreamsOfThreadBits) & ~(uint64_t{1} << 63)} {}
  RandomState state;
};

}  // namespace

RandomState& random_state() { return Context::current().slot<Generator>().state; }

void manual_seed(uint64_t seed) { random_state() = {seed, 0}; }

RandomStream next_random_stream() {
  RandomState& state = random_state();
  return {state.seed, state.next_stream++};
}

RandomStream named_random_stream(std::string_view name) {
  uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return {random_state().seed, hash | (uint64_t{1} << 63)};
}

}  // namespace tessera
