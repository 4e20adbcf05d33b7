// How layers print their options: describe("eps", 1e-5, "bias", true) is "eps=1e-05, bias=True", as
// torch's repr has it. Internal to nn.
#pragma once

#include <optional>
#include <string>
#include <type_traits>

#include <tessera/core/shape.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera::nn::detail {

std::string describe_number(double value);       // 1e-05, 0.1, 2.0
std::string describe_shape(const Shape& shape);  // (3,), (2, 2)
std::string describe_sizes(const Shape& sizes);  // 3 where there is one size, (3, 2)

template <class T>
std::string describe_value(const T& value) {
  if constexpr (std::is_same_v<T, bool>) {
    return value ? "True" : "False";
  } else if constexpr (std::is_integral_v<T>) {
    return std::to_string(value);
  } else if constexpr (std::is_floating_point_v<T>) {
    return describe_number(value);
  } else if constexpr (std::is_same_v<T, Shape>) {
    return describe_sizes(value);
  } else if constexpr (requires { value.has_value(); }) {
    return value ? describe_value(*value) : "None";
  } else {
    return std::string(value);
  }
}

inline std::string describe() { return {}; }
template <class T, class... Rest>
std::string describe(const char* name, const T& value, const Rest&... rest) {
  std::string text = std::string(name) + "=" + describe_value(value);
  if constexpr (sizeof...(rest) > 0) text += ", " + describe(rest...);
  return text;
}

// A buffer with the device, and unless one is given the dtype, of the ParameterDefaults.
Tensor make_buffer(const Shape& shape, std::optional<DType> dtype = {});

}  // namespace tessera::nn::detail
