// Every mode in which ranks train together, for tests that walk them.
#pragma once

#include <tessera/accelerate/settings/settings.h>

namespace tessera {

inline constexpr accelerate::Sharding kModes[] = {
    accelerate::Sharding::kDdp, accelerate::Sharding::kZero1, accelerate::Sharding::kZero2,
    accelerate::Sharding::kZero3, accelerate::Sharding::kFsdp};
inline const char* name_of(accelerate::Sharding sharding) {
  constexpr const char* kNames[] = {"ddp", "zero1", "zero2", "zero3", "fsdp"};
  return kNames[static_cast<int>(sharding)];
}

}  // namespace tessera
