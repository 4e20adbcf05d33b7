// How one backward of an optimizer step communicates.
#pragma once

#include <cstdint>

namespace tessera::distributed {

struct StepPlan {
  int64_t micro_index = 0;     // of the micro-batch in its step
  bool is_last = true;         // the step's last micro-batch
  bool sync_gradients = true;  // reduce gradients in this backward; otherwise they add up locally
  // With GradientAverage::kWeight, in a backward that synchronizes: the total weight of this rank's
  // micro-batches of the step, in units of the nominal weight that their losses were divided by.
  double weight = 1;
  // The batch it was computed from, if the ranks share the batches of a loader: they reach the same
  // ones in turn, which the reduction of the weights compares. -1: not known.
  int64_t epoch = -1, position = -1;
  // Sharded modes with a replicated axis: also reduce along that axis.
  bool all_reduce = true;
  // Sharded parameters: reshard them after their backward.
  bool reshard_after_backward = true;

  // The plan of micro-batch `index` of `count`: gradients are reduced in the last one.
  static StepPlan of(int64_t index, int64_t count) {
    const bool last = index + 1 == count;
    return {.micro_index = index, .is_last = last, .sync_gradients = last, .all_reduce = last};
  }
};

}  // namespace tessera::distributed
