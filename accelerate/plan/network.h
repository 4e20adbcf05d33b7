// The network between ranks, and the time of their calls on it.
//
//     {"bandwidth_bytes_per_second": 50e9, "latency_seconds": 5e-6,
//      "dp_replicate": {"bandwidth_bytes_per_second": 12e9}, "flops_per_second": 4e14}
//
// [Note: seconds of a call] The bytes that a rank sends in a bandwidth-optimal algorithm
// (CommRecord::wire_bytes) over the bandwidth of its link, plus a latency for every message that
// waits for the one before: log2(N), rounded up, for all-gathers, reduce-scatters and broadcasts
// among N ranks, by halving and doubling; twice that for an all-reduce. Links that several ranks
// share are not modeled: give the bandwidth that each rank has when all send.
#pragma once

#include <map>
#include <optional>
#include <string>

#include <tessera/distributed/transport/trace.h>

namespace tessera::accelerate {

struct Link {
  double bandwidth = 0;  // bytes per second that a rank sends
  double latency = 0;    // seconds of a message without bytes
};

struct Network {
  Link link;
  std::map<std::string, Link> axes = {};  // of a mesh, that have links of their own
  double flops = 0;                       // per second of a rank's device, sustained; 0: not known

  // IoError, FormatError; ConfigError names a key that is unknown, missing or not a positive
  // number.
  static Network read(const std::string& path);
  static Network parse(const std::string& text, const std::string& path);
  double seconds(const distributed::CommRecord& record, const std::string& axis) const;
};

}  // namespace tessera::accelerate
