// Whether modules still hold what they held.
#pragma once

#include <cstdint>

namespace tessera::nn {

// How often, in this process, a module that stood has got a parameter or a child, or given one
// back. While the number stands, so do the parameter_places() of every module. One load, for who
// must know it in each forward.
uint64_t structure_changes();

}  // namespace tessera::nn
