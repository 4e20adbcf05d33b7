// Unicode properties of code points, from ICU. Included by .cpp files only: callers keep a table
// for ASCII and come here for the rest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

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

bool is_mark(char32_t code_point);         // general category M
bool is_white_space(char32_t code_point);  // property White_Space
// What a word is made of in regular expressions: letters, marks, decimal digits, connectors.
bool is_word_character(char32_t code_point);
// The version of Unicode, times a hundred, that assigned it; 0: none.
int assigned_in(char32_t code_point);

// Canonical decomposition (NFD) of valid UTF-8.
std::string decompose(std::string_view text);

enum class NormalForm : uint8_t { kNfc, kNfd, kNfkc, kNfkd };
// Whether a quick look shows that valid UTF-8 has the form.
bool is_normal(std::string_view text, NormalForm form);
uint8_t combining_class(char32_t code_point);
// Calls visit for each code point of the full decomposition, which is itself where it has none.
void decompose(char32_t code_point, bool compatible, const std::function<void(char32_t)>& visit);
// The code point that two compose to, if there is one.
std::optional<char32_t> compose(char32_t first, char32_t second);

// Where the extended grapheme clusters of valid UTF-8 end, in bytes.
std::vector<size_t> grapheme_ends(std::string_view text);

// Cases of valid UTF-8 as Python's str makes them (Unicode's full mappings).
std::string upper_case(std::string_view text);
std::string lower_case(std::string_view text);
std::string title_case(std::string_view character);  // of one code point
bool is_cased(char32_t code_point);
bool is_upper(char32_t code_point);
// Python's isalpha(), isdigit(), isnumeric() and isprintable() of one code point.
bool is_alphabetic(char32_t code_point);
bool is_digit(char32_t code_point);
bool is_numeric(char32_t code_point);
bool is_printable(char32_t code_point);

// Appends the lower case of one code point, in UTF-8 (Unicode's full mapping without context).
void append_lower_case(char32_t code_point, std::string& out);

}  // namespace tessera::data
