// Two values for what is one parameter: how they differ, for those who have to choose one.
#pragma once

#include <optional>
#include <string>

#include <tessera/core/tensor/tensor.h>

namespace tessera::nn {

// "at [3, 1]: 0.5 and 0.25", where two tensors of one shape first differ when both are of `dtype`;
// nothing where they have the same bits. From any device.
std::optional<std::string> first_difference(const Tensor& a, const Tensor& b, DType dtype);

}  // namespace tessera::nn
