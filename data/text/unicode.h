// Unicode properties of code points, from ICU. Included by .cpp files only: callers keep a table
// for ASCII and come here for the rest.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::data {

enum class CharClass : uint8_t {
  kOther,   // punctuation, symbols, controls, unassigned code points, bytes that are not UTF-8
  kLetter,  // general category L
  kNumber,  // general category N
  kSpace,   // property White_Space
};
CharClass char_class(char32_t code_point);

bool is_control(char32_t code_point);          // general category Cc, Cf, Co or Cs
bool is_punctuation(char32_t code_point);      // general category P
bool is_nonspacing_mark(char32_t code_point);  // general category Mn

// The ideographs that BERT writes as words of their own: the CJK Unified blocks, not Hangul, Kana.
bool is_cjk_ideograph(char32_t code_point);

// Canonical decomposition (NFD) of valid UTF-8.
std::string decompose(std::string_view text);

// Appends the lower case of one code point, in UTF-8 (Unicode's full mapping without context).
void append_lower_case(char32_t code_point, std::string& out);

}  // namespace tessera::data
