// Detects changes of modules' parameters and children.
#pragma once

#include <cstdint>

namespace tessera::nn {

// How often, in this process, an existing module has got or lost a parameter or a child. While the
// number is unchanged, so are the parameter_places() of every module. Costs one load, for callers
// that check in each forward.
uint64_t structure_changes();

}  // namespace tessera::nn
