// Philox streams in kernels that a graph may replay. A stream that was taken inside of a capture
// moves along with the replays; one that was given from outside stays.
//
//     kernel<<<...>>>(movable(stream));
//     const RandomStream own = stream.now();   // in the kernel
#pragma once

#include <cstdint>

#include <tessera/core/macros.h>
#include <tessera/core/random.h>

namespace tessera::kernels {

struct MovableStream {
  uint64_t seed, stream;
  const uint64_t* state;  // of a replay: {seed, how far streams moved since the capture}; or null

  TS_HD RandomStream now() const {
    return state == nullptr ? RandomStream{seed, stream}
                            : RandomStream{state[0], stream + state[1]};
  }
};
MovableStream movable(RandomStream stream);

}  // namespace tessera::kernels
