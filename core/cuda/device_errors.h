// Checks of device data. A kernel that finds an index outside its range writes what it found into
// one word of pinned host memory and goes on with a harmless index; the next call that waits for
// the device throws it as an IndexError. So a training step reads nothing back to be safe.
#pragma once

#include <cstdint>

namespace tessera::gpu {

// The first finding since the last wait stays.
struct DeviceErrorWord {
  int found;  // 0 or 1
  const char* op;
  int64_t position, value, low, high;  // value is outside of [low, high)
};

// The error word of the current device, for kernels: `op` must live as long as the program.
DeviceErrorWord* device_error_word();
// Throws the recorded error and clears it. Called after the host has waited for the device.
void raise_device_errors(int device);

}  // namespace tessera::gpu
