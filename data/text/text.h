// UTF-8 text: reading, checking, walking code points, splitting lines.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::data {

inline constexpr char32_t kInvalidCodePoint = 0xFFFFFFFF;

struct CodePoint {
  char32_t value;   // kInvalidCodePoint where the bytes are not UTF-8
  uint32_t length;  // bytes: 1 to 4; for invalid ones the longest prefix that could have been valid
};

// The code point that starts at text[position]; position < text.size(). Overlong forms, surrogates
// and values above U+10FFFF are invalid (Unicode 15, table 3-7).
CodePoint decode_utf8(std::string_view text, size_t position);
void append_utf8(char32_t code_point, std::string& out);

// Byte offset of the first byte that is not UTF-8. ASCII goes by in words of 8 bytes.
std::optional<size_t> find_invalid_utf8(std::string_view text);

// FormatError naming `file`, line, column (code points, from 1) and byte offset if `text` is not
// UTF-8. `where` is the operation that asks.
void check_utf8(std::string_view text, std::string_view where, std::string_view file);

// Each invalid sequence becomes U+FFFD, as Python's errors="replace" does it.
std::string replace_invalid_utf8(std::string_view text);

// Without a leading U+FEFF.
std::string_view strip_byte_order_mark(std::string_view text);

// Lines without their ends (LF or CRLF). A final line end starts no further line. Views into text.
std::vector<std::string_view> split_lines(std::string_view text);

// A whole file as stored (byte order mark and line ends stay). IoError, FormatError as above.
std::string read_text(const std::string& path);

}  // namespace tessera::data
