// What launches cost on a machine of stated rates: arithmetic, and no measurement.
//
//     const dry::Machine machine = dry::Machine::read("h100.json");
//     step();                                          // what comes once: the optimizer's state
//     const dry::Recording recording = dry::record([&] { step(); });
//     const dry::Bill bill = dry::price(recording.launches, machine);
//     std::cout << dry::table(bill);                   // bill.seconds, and by layer and kernel
//
// A launch costs the longest of what it needs, and a gap:
//
//   kernel       the bytes that it says it moves (traffic.h) over the bandwidth
//   product      its operands' bytes over the bandwidth, or its operations over the rate of its
//                dtype; and behind them GELU, where its epilogue has it
//   attention    the operations that its mask leaves over the rates of the library
//   convolution  its tensors' bytes, or its operations over the rate of its dtype
//   copy, fill   its bytes in the memory of the device
//
// The floor of a launch is what its bytes and operations take at the rates of the file, without the
// gap and the epilogue. A kernel that says nothing of its bytes costs the gap and is listed under
// Bill::unpriced. Not in it: instructions, waves of tiles, bytes that caches spare or that come by
// again, several streams at a time.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include <tessera/core/cuda/dry/launches.h>
#include <tessera/core/cuda/dry/machine.h>

namespace tessera::gpu::dry {

enum class Bound : uint8_t { kMemory, kProduct, kAttention, kGap, kUnknown };
const char* name_of(Bound bound);  // "memory"

struct Price {
  double seconds = 0;  // with the gap
  double floor_seconds = 0;
  Bound bound = Bound::kGap;  // what takes longest
};
// Throws UnsupportedError for a product in a dtype of which the machine has no rate.
Price price(const Launch& launch, const Machine& machine);

// Operations that are counted: of products, and of attention those that its mask leaves.
double counted_flops(const Launch& launch);
// That a launch moves, as far as it says.
int64_t moved_bytes(const Launch& launch);

// Launches of one kernel for one op of a layer. Layers that differ in numbers alone share a row:
// "transformer.h.*.mlp".
struct BillRow {
  std::string name, op, layer;
  int64_t calls = 0;
  double seconds = 0, floor_seconds = 0;  // of all calls, and so the rest
  int64_t bytes = 0;
  double flops = 0;
  Bound bound = Bound::kGap;  // where most of its time is
};

struct Bill {
  double seconds = 0, floor_seconds = 0;
  double flops = 0;
  int64_t launches = 0;
  std::vector<BillRow> rows;                // the longest first
  std::map<Bound, double> by_bound;         // seconds, and so the next
  std::map<std::string, double> by_name;    // of the kernel
  std::map<std::string, int64_t> unpriced;  // launches that say nothing, by name
};
Bill price(std::span<const Launch> launches, const Machine& machine);

// A table for people: rows from 0.1% of the step on, or all.
std::string table(const Bill& bill, bool all = false);

// What else there is to say of a step.
struct StepFacts {
  int64_t tokens = 0;
  int64_t peak_bytes = 0;   // of device memory
  double host_seconds = 0;  // the driver's share left out
};
// {"machine", "ms", "floor_ms", "tokens_per_s", "flops", "peak_bytes", "host_ms", "launches":
// [{"name", "op", "layer", "calls", "ms", "bytes", "flops", "bound", "floor_ms"}]}: rows as in
// Bill.
std::string to_json(const Bill& bill, const Machine& machine, const StepFacts& facts);

// The launches one after the other, as they are priced, with the layers that asked for them: JSON
// that Perfetto and chrome://tracing read. Those of the row "kernels" have as "args" what
// launch_times.h measures launches under ("op", "layer", "request"), and "bound", "floor_us",
// "bytes", "flops".
std::string chrome_trace(std::span<const Launch> launches, const Machine& machine);

}  // namespace tessera::gpu::dry
