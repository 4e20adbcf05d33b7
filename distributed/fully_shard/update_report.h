// The traffic of a step of an optimizer that needs whole parameters of sharded ones (Muon),
// calculated from shapes and placements, so that tests can compare it with the trace of a run.
//
//     const distributed::UpdateReport report = distributed::report_update(optimizer);
//     std::cout << report.describe();
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <tessera/distributed/transport/traffic.h>
#include <tessera/optim/optimizer.h>

namespace tessera::distributed {

struct UpdateReport {
  // Parameters whose shards are on the same ranks.
  struct Exchange {
    std::string group;
    int64_t tensors = 0, cut = 0;  // cut: held by more than one rank
    std::vector<int64_t> owned;    // elements that a rank owns whole, by rank in the group
    Traffic gather, scatter;       // all_to_alls of a step, and what this rank sends in them
  };
  int64_t tensors = 0;  // that a step needs whole
  DType dtype = kF32;   // in which they are sent
  std::vector<Exchange> exchanges;

  Traffic traffic() const;  // of a step in which all parameters have gradients; this rank's bytes
  std::string describe() const;
};

// Collective if the holders along several axes are requested for the first time, see
// TensorPlacement::holders. UnsupportedError for a Partial.
UpdateReport report_update(const optim::Optimizer& optimizer);

}  // namespace tessera::distributed
