// The engine's side of anomaly mode.
#pragma once

#include <tessera/autograd/node.h>

namespace tessera {

bool anomaly_enabled();
// Throws AutogradError if a gradient that `node` calculated holds NaN.
void check_anomaly(const Node& node, const TensorList& gradients);

}  // namespace tessera
