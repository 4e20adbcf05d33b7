// Random numbers: Philox4x32-10, a pure function of (seed, stream, element index).
//
// key = seed; counter = (64-bit element index / 4, 64-bit stream); lane = index % 4. A fill of a
// tensor takes one stream, so element i has the same bits on CPU and GPU, for any number of threads
// and for any sharding of the tensor. Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers:
// as easy as 1, 2, 3" (2011).
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include <tessera/core/macros.h>

namespace tessera {

// One block of four 32-bit numbers.
TS_HD std::array<uint32_t, 4> philox4x32(uint64_t seed, uint64_t stream, uint64_t block) {
  uint32_t c0 = static_cast<uint32_t>(block), c1 = static_cast<uint32_t>(block >> 32);
  uint32_t c2 = static_cast<uint32_t>(stream), c3 = static_cast<uint32_t>(stream >> 32);
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0;
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * c2;
    const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    const uint32_t n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {c0, c1, c2, c3};
}

// [0, 1) with 24 bits, as float; (0, 1] with 32 bits for logarithms.
TS_HD float uniform_from_bits(uint32_t bits) { return static_cast<float>(bits >> 8) * 0x1p-24f; }
TS_HD double uniform_from_bits64(uint32_t high, uint32_t low) {
  return static_cast<double>(((uint64_t{high} << 32) | low) >> 11) * 0x1p-53;
}

// The numbers of one fill, one dropout mask, one parameter.
struct RandomStream {
  uint64_t seed = 0;
  uint64_t stream = 0;
};

// The generator of a context: a seed, and the stream that is taken next. This is all its state. It
// begins at seed 0 and stream 0; in the context that a std::thread gets of itself at stream
// n * 2^40, where n is 1 for the first such thread, 2 for the second: unseeded threads draw
// different numbers, and the values of named streams stay the same on all.
struct RandomState {
  uint64_t seed = 0;
  uint64_t next_stream = 0;
};
RandomState& random_state();        // of the current context
void manual_seed(uint64_t seed);    // and starts again at stream 0
RandomStream next_random_stream();  // the next stream of the current context
// The stream of a name: initialization draws one for each parameter, so that its values depend on
// seed and name alone, not on what was made before it. Never equal to a numbered stream.
RandomStream named_random_stream(std::string_view name);

}  // namespace tessera
