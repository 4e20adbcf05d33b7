// Whole numbers of the reports that ranks, agents and launcher send each other. Included by .cpp
// files only.
#pragma once

#include <concepts>
#include <cstdint>
#include <utility>

namespace tessera::distributed {

// A whole number in [least, most]; anything else is as unreadable as a missing field:
// nlohmann::json::exception.
template <std::integral Number, class Json>
Number json_number(const Json& value, Number least, Number most) {
  // The library's own conversions and comparisons take numbers from 2^63 on for negative ones.
  const bool fits =
      value.is_number_unsigned()
          ? std::in_range<Number>(value.template get<uint64_t>())
          : value.is_number_integer() && std::in_range<Number>(value.template get<int64_t>());
  const Number number = fits ? value.template get<Number>() : Number();
  if (!fits || number < least || number > most) {
    throw Json::other_error::create(500, "a number out of range", &value);
  }
  return number;
}

}  // namespace tessera::distributed
