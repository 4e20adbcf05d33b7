// Describes how two values of one tied parameter differ.
#pragma once

#include <optional>
#include <string>

#include <tessera/core/tensor/tensor.h>

namespace tessera::nn {

// "at [3, 1]: 0.5 and 0.25", the first difference between two tensors of one shape after conversion
// to `dtype`; nothing if they have the same bits. Works on any device.
std::optional<std::string> first_difference(const Tensor& a, const Tensor& b, DType dtype);

}  // namespace tessera::nn
