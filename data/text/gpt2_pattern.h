// The pattern by which GPT-2 cuts a text into pieces:
//     's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
// Included by tokenizers' .cpp files only.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include <tessera/data/text/text.h>
#include <tessera/data/text/unicode.h>

namespace tessera::data {

inline constexpr std::array<CharClass, 128> kAsciiClass = [] {
  std::array<CharClass, 128> table{};
  for (int c = 'a'; c <= 'z'; ++c) table[c] = table[c - 'a' + 'A'] = CharClass::kLetter;
  for (int c = '0'; c <= '9'; ++c) table[c] = CharClass::kNumber;
  for (int c : {'\t', '\n', '\v', '\f', '\r', ' '}) table[c] = CharClass::kSpace;
  return table;
}();

struct ClassedChar {
  CharClass char_class;
  uint32_t length;
};

inline ClassedChar classed_char_at(std::string_view text, size_t position) {
  const auto byte = static_cast<unsigned char>(text[position]);
  if (byte < 0x80) [[likely]]
    return {kAsciiClass[byte], 1};
  const CodePoint c = decode_utf8(text, position);
  return {char_class(c.value), c.length};
}

// First position from `position` on whose character is of another class.
inline size_t end_of_run(std::string_view text, size_t position, CharClass char_class) {
  while (position < text.size()) {
    const ClassedChar c = classed_char_at(text, position);
    if (c.char_class != char_class) break;
    position += c.length;
  }
  return position;
}

// Length of 's 't 're 've 'm 'll 'd at `position`, 0 if none stands there.
inline size_t contraction_length(std::string_view text, size_t position) {
  const std::string_view rest = text.substr(position + 1, 2);
  if (rest.empty()) return 0;
  switch (rest[0]) {
    case 's':
    case 't':
    case 'm':
    case 'd':
      return 2;
    default:
      return rest == "re" || rest == "ve" || rest == "ll" ? 3 : 0;
  }
}

// End of the piece that starts at `start`: the pattern's alternatives, first match wins.
inline size_t end_of_gpt2_piece(std::string_view text, size_t start) {
  if (text[start] == '\'') {
    if (const size_t length = contraction_length(text, start)) return start + length;
  }
  ClassedChar c = classed_char_at(text, start);
  size_t position = start + c.length;
  if (text[start] == ' ' && position < text.size()) {  // " ?" before a run of another class
    const ClassedChar next = classed_char_at(text, position);
    if (next.char_class != CharClass::kSpace) {
      return end_of_run(text, position + next.length, next.char_class);
    }
  }
  if (c.char_class != CharClass::kSpace) return end_of_run(text, position, c.char_class);
  // \s+(?!\S): all the white space at the end of the text; before a word, all but the last
  // character, which the word's " ?" may take. A single one is \s+.
  size_t last = start;
  while (position < text.size()) {
    c = classed_char_at(text, position);
    if (c.char_class != CharClass::kSpace) return last == start ? position : last;
    last = position;
    position += c.length;
  }
  return position;
}

}  // namespace tessera::data
