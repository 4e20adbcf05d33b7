// What a column product reads under sequence parallelism: the tokens of all ranks, of which backward
// needs them once more. A rank keeps its own tokens and gathers again (Korthikanti et al. 2022), so
// that it has 1 / ranks of a block's activations; that costs an all-gather more in backward for each
// one in forward. Internal.
#pragma once

#include <memory>
#include <string>

#include <tessera/core/tensor/tensor.h>

namespace tessera::distributed {

// While the result lives, ops of this context that save what note_gathered() was told save the part.
// Other tensors are saved as they are, with their checks. For a call of the model.
std::shared_ptr<void> keep_parts_of_gathered();

// `whole`: gathered from `part` along the axis, both in their marks. Without effect outside of such
// a scope, or if nothing is recorded. Readers of `whole` share one gather in a backward.
void note_gathered(const Tensor& whole, const Tensor& part, const std::string& axis);

}  // namespace tessera::distributed
