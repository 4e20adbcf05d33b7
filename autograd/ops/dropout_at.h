// Dropout of what lies at a place of a whole, for ops that drop themselves and for their backward.
#pragma once

#include <tessera/core/kernels/random/draw_place.h>
#include <tessera/core/random.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera {

// x: floating; p in (0, 1). x and its gradients of any order draw the same numbers.
Tensor dropout_at(const Tensor& x, double p, RandomStream stream, const kernels::DrawPlace& place);

}  // namespace tessera
