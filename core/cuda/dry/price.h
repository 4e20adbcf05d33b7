// What launches cost on a machine of stated rates: arithmetic, and no measurement.
//
//     const dry::Machine machine = dry::Machine::read("machine.json");
//     dry::take_launches();
//     step();
//     const dry::Bill bill = dry::price(dry::take_launches(), machine);   // bill.seconds
//
// A kernel costs the bytes that it says it moves (traffic.h) over the bandwidth, a product its
// operations over the rate of its dtype or its operands' bytes, whichever is longer, attention the
// operations that its mask leaves over the rates of the library, a copy or fill its bytes. Each
// launch costs a gap besides, those of a CUDA graph too. Kernels that say nothing are counted
// apart, at the gap alone. Not in it: instructions that take longer than the memory, waves of
// tiles, caches.
#pragma once

#include <functional>
#include <map>
#include <span>
#include <string>

#include <tessera/core/cuda/dry/launches.h>

namespace tessera::gpu::dry {

struct Machine {
  std::string name;
  double bandwidth = 0;  // bytes a second
  std::map<std::string, double, std::less<>> gemm =
      {};  // operations a second, by the dtype's name: "bf16"
  double attention_forward = 0, attention_backward = 0;  // the same, of 16-bit operands
  double launch_gap = 0;                                 // seconds

  // {"name": ..., "bandwidth": ..., "gemm": {"bf16": ..., "f32": ...}, "attention": {"forward":
  // ..., "backward": ...}, "launch_gap": ...}; other keys are let be. FormatError names a field
  // that is missing or no positive number, IoError the file.
  static Machine read(const std::string& path);
};

enum class Bound : uint8_t { kMemory, kProduct, kAttention, kGap, kUnknown };

struct Price {
  double seconds = 0;  // with the gap
  Bound bound = Bound::kGap;
};
// Throws UnsupportedError for a product in a dtype of which the machine has no rate.
Price price(const Launch& launch, const Machine& machine);

struct Bill {
  double seconds = 0;
  std::map<Bound, double> by_bound;         // the same, apart
  std::map<std::string, double> by_name;    // of the op
  std::map<std::string, int64_t> unpriced;  // launches that say nothing, by name
};
Bill price(std::span<const Launch> launches, const Machine& machine);

}  // namespace tessera::gpu::dry
