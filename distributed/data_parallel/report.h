// The parts of a distributed model and the cost of a step, calculated from shapes alone, so that
// tests can compare them with the trace of a run.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <tessera/distributed/data_parallel/bucket_schedule.h>

namespace tessera::distributed {

struct ShardReport {
  struct Bucket {
    int index = 0;
    DType dtype = kF32;
    std::vector<std::string> parameters;  // in the order of the buffer
    int64_t elements = 0;
    int64_t bytes = 0;
    Traffic traffic;
  };
  int ranks = 1;
  std::string hook;
  std::vector<Bucket> buckets;
  int64_t parameters = 0;       // that require grad
  int64_t gradient_bytes = 0;   // of all buckets
  Traffic gradients;            // of one synchronizing backward, on Channel::kGradient
  Traffic used_map;             // of the same, on Channel::kControl
  Traffic window_weight;        // of the same, with GradientAverage::kWeight
  Traffic buffers_per_forward;  // on Channel::kParameter
  int rebuilds = 0;

  // A readable table.
  std::string describe() const;
};

ShardReport make_report(const BucketSchedule& schedule);

}  // namespace tessera::distributed
