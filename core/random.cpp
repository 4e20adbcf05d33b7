#include <tessera/core/random.h>

#include <tessera/core/context.h>

namespace tessera {

RandomState& random_state() { return Context::current().slot<RandomState>(); }

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
