// What collectives carry, as reports count it.
#pragma once

#include <cstdint>

namespace tessera::distributed {

// Collectives and payload bytes of one rank. Bytes are those of the tensor that is reduced.
struct Traffic {
  int64_t collectives = 0;
  int64_t bytes = 0;
  Traffic& operator+=(const Traffic& other) {
    collectives += other.collectives;
    bytes += other.bytes;
    return *this;
  }
  friend bool operator==(const Traffic&, const Traffic&) = default;
};

}  // namespace tessera::distributed
