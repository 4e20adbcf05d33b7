// Inspects the recorded graph without running it.
#pragma once

#include <tessera/core/state/state_dict.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera {

// Whether a backward of `output` would reach one of `leaves`; backward_reaches() answers the same
// during a backward. Costs a walk over the graph up to the first of them.
bool leads_to_any(const Tensor& output, const NamedTensors& leaves);

}  // namespace tessera
