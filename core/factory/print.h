// The text of a tensor's values, as Python prints a torch.Tensor.
#pragma once

#include <string>

#include <tessera/core/tensor/tensor.h>

namespace tessera {

// "tensor([[1., 2.],\n        [3., 4.]])": torch's repr with its default options. Four digits after
// the point; scientific where magnitudes differ by more than 1000 or leave [1e-4, 1e8]; over 1000
// elements only the first and last three of each dimension; lines of 80 characters. The dtype is
// named unless it is f32, i64 or bool, the device unless it is the CPU; meta tensors, and those
// whose storage was freed, show "..." and their size. Gradients are not mentioned. Cost: reads the
// elements that it shows; of a tensor on a GPU all, after the work queued there. Errors use
// Tensor::describe() instead.
std::string repr(const Tensor& x);

}  // namespace tessera
