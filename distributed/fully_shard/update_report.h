// What a step of an optimizer sends that needs parameters whole of which ranks hold parts (Muon):
// calculated from shapes and placements, so that tests can hold the trace of a run against it.
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
  // Parameters that the same ranks hold parts of.
  struct Exchange {
    std::string group;
    int64_t tensors = 0, cut = 0;  // cut: held by more than one rank
    std::vector<int64_t> owned;    // elements that a rank has whole, by rank in the group
    Traffic gather, scatter;       // all_to_alls of a step, and what this rank sends in them
  };
  int64_t tensors = 0;  // that a step needs whole
  DType dtype = kF32;   // in which they travel
  std::vector<Exchange> exchanges;

  Traffic traffic() const;  // of a step in which all parameters have gradients; this rank's bytes
  std::string describe() const;
};

// Collective where holders of several axes are asked for the first time, see
// TensorPlacement::holders. UnsupportedError for a summand.
UpdateReport report_update(const optim::Optimizer& optimizer);

}  // namespace tessera::distributed
