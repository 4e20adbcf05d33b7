// The recorded graph, seen without running it.
#pragma once

#include <tessera/core/state/state_dict.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera {

// Whether a backward of `output` would lead to one of `leaves`; what backward_reaches() knows while
// it runs. Costs a walk over the graph as far as the first of them.
bool leads_to_any(const Tensor& output, const NamedTensors& leaves);

}  // namespace tessera
