#include <tessera/nn/describe.h>

#include <charconv>
#include <cmath>

#include <tessera/core/factory/factory.h>
#include <tessera/nn/module.h>

namespace tessera::nn::detail {

std::string describe_number(double value) {
  // Shortest digits that read back as the same number, as Python prints floats.
  char digits[32];
  const bool scientific = value != 0 && (std::abs(value) < 1e-4 || std::abs(value) >= 1e16);
  const auto end =
      std::to_chars(digits, digits + sizeof digits, value,
                    scientific ? std::chars_format::scientific : std::chars_format::fixed);
  std::string text(digits, end.ptr);
  if (!scientific && text.find_first_of(".in") == std::string::npos) text += ".0";
  return text;
}

std::string describe_shape(const Shape& shape) {
  std::string text = "(";
  for (int i = 0; i < shape.size(); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  }
  return text + (shape.size() == 1 ? ",)" : ")");
}

std::string describe_sizes(const Shape& sizes) {
  return sizes.size() == 1 ? std::to_string(sizes[0]) : describe_shape(sizes);
}

Tensor make_buffer(const Shape& shape, std::optional<DType> dtype) {
  const ParameterDefaults& defaults = ParameterDefaultsGuard::current();
  const MemoryCategoryGuard category(MemoryCategory::kParameter);
  return raw::empty(shape, dtype.value_or(defaults.dtype), defaults.device);
}

}  // namespace tessera::nn::detail
