// Anomaly mode, seen from the engine.
#pragma once

#include <tessera/autograd/node.h>

namespace tessera {

bool anomaly_enabled();
// Throws AutogradError where a gradient that `node` calculated holds NaN.
void check_anomaly(const Node& node, const TensorList& gradients);

}  // namespace tessera
