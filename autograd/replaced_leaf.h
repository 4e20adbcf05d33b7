// Leaves whose places other tensors take in graphs: parameters that ranks hold in parts, while ops
// read the wholes. Their gradients come from whoever replaces them, and so do the calls of hooks.
#pragma once

#include <tessera/core/tensor/tensor.h>

namespace tessera {

// grad() refuses a replaced leaf, which no graph leads to.
void set_replaced(const Tensor& leaf, bool replaced);
bool is_replaced(const Tensor& leaf);
// Where `.grad` has come otherwise than by the engine: the hooks of register_hook(), with a plain
// tensor of its elements, into which a defined result is copied, then those of
// register_post_accumulate_hook(). False where there are none.
bool run_leaf_hooks(const Tensor& leaf);

}  // namespace tessera
