// How byte-level vocabularies write bytes: as printable characters. Those of Latin-1 stand for
// themselves, the other 68 bytes are U+0100 and on, in their order (GPT-2). Included by tokenizers'
// .cpp files only.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <tessera/data/text/text.h>

namespace tessera::data {

inline constexpr int kByteChars = 256 + 68;

// From a character to its byte; -1: it stands for none.
inline constexpr std::array<int16_t, kByteChars> kByteOfChar = [] {
  std::array<int16_t, kByteChars> table{};
  for (auto& entry : table) entry = -1;
  int next = 256;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte != 0xAD);
    table[printable ? byte : next++] = static_cast<int16_t>(byte);
  }
  return table;
}();

inline constexpr std::array<char32_t, 256> kCharOfByte = [] {
  std::array<char32_t, 256> table{};
  for (int c = 0; c < kByteChars; ++c) {
    if (kByteOfChar[c] >= 0) table[kByteOfChar[c]] = static_cast<char32_t>(c);
  }
  return table;
}();

// The bytes that a written token stands for; nothing if a character stands for no byte.
inline std::optional<std::string> bytes_of(std::string_view written) {
  std::string bytes;
  for (size_t position = 0; position < written.size();) {
    const CodePoint c = decode_utf8(written, position);
    if (c.value >= kByteChars || kByteOfChar[c.value] < 0) return std::nullopt;
    bytes += static_cast<char>(kByteOfChar[c.value]);
    position += c.length;
  }
  return bytes;
}

}  // namespace tessera::data
