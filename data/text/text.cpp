#include <tessera/data/text/text.h>

#include <algorithm>
#include <cstring>

#include <tessera/core/error.h>
#include <tessera/core/io/mapped_file.h>

namespace tessera::data {
namespace {

// Continuation bytes are 80..BF, but the second byte of some leads has a narrower range.
struct SecondByte {
  unsigned char low, high;
};
constexpr SecondByte second_byte_range(unsigned char lead) {
  switch (lead) {
    case 0xE0:
      return {0xA0, 0xBF};
    case 0xED:
      return {0x80, 0x9F};
    case 0xF0:
      return {0x90, 0xBF};
    case 0xF4:
      return {0x80, 0x8F};
    default:
      return {0x80, 0xBF};
  }
}

}  // namespace

CodePoint decode_utf8(std::string_view text, size_t position) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[position + i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  if (lead < 0xC2 || lead > 0xF4) return {kInvalidCodePoint, 1};
  const uint32_t length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  char32_t value = lead & (0x7F >> length);
  const size_t available = text.size() - position;
  for (uint32_t i = 1; i < length; ++i) {
    if (i >= available) return {kInvalidCodePoint, i};
    const SecondByte range = i == 1 ? second_byte_range(lead) : SecondByte{0x80, 0xBF};
    if (byte(i) < range.low || byte(i) > range.high) return {kInvalidCodePoint, i};
    value = value << 6 | (byte(i) & 0x3F);
  }
  return {value, length};
}

void append_utf8(char32_t c, std::string& out) {
  if (c < 0x80) {
    out += static_cast<char>(c);
  } else if (c < 0x800) {
    out += static_cast<char>(0xC0 | c >> 6);
    out += static_cast<char>(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    out += static_cast<char>(0xE0 | c >> 12);
    out += static_cast<char>(0x80 | (c >> 6 & 0x3F));
    out += static_cast<char>(0x80 | (c & 0x3F));
  } else {
    out += static_cast<char>(0xF0 | c >> 18);
    out += static_cast<char>(0x80 | (c >> 12 & 0x3F));
    out += static_cast<char>(0x80 | (c >> 6 & 0x3F));
    out += static_cast<char>(0x80 | (c & 0x3F));
  }
}

std::optional<size_t> find_invalid_utf8(std::string_view text) {
  size_t position = 0;
  while (position < text.size()) {
    uint64_t word;
    while (text.size() - position >= sizeof(word)) {
      std::memcpy(&word, text.data() + position, sizeof(word));
      if (word & 0x8080808080808080) break;
      position += sizeof(word);
    }
    if (position == text.size()) break;
    const CodePoint c = decode_utf8(text, position);
    if (c.value == kInvalidCodePoint) return position;
    position += c.length;
  }
  return std::nullopt;
}

void check_utf8(std::string_view text, std::string_view where, std::string_view file) {
  const std::optional<size_t> invalid = find_invalid_utf8(text);
  if (!invalid) return;
  const std::string_view before = text.substr(0, *invalid);
  const size_t line_start = before.rfind('\n') == before.npos ? 0 : before.rfind('\n') + 1;
  const auto line = std::count(before.begin(), before.end(), '\n') + 1;
  const auto column = std::count_if(before.begin() + static_cast<ptrdiff_t>(line_start),
                                    before.end(), [](char c) { return (c & 0xC0) != 0x80; }) +
                      1;
  TS_THROW(FormatError, where, "text must be UTF-8; '", file, "' line ", line, " column ", column,
           " (byte offset ", *invalid, ") has byte ",
           static_cast<int>(static_cast<unsigned char>(text[*invalid])),
           "; convert the file, e.g. with iconv -t UTF-8.");
}

std::string replace_invalid_utf8(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const size_t valid = find_invalid_utf8(text).value_or(text.size());
    out.append(text.substr(0, valid));
    text.remove_prefix(valid);
    if (text.empty()) break;
    append_utf8(0xFFFD, out);
    text.remove_prefix(decode_utf8(text, 0).length);
  }
  return out;
}

std::string_view strip_byte_order_mark(std::string_view text) {
  if (text.starts_with("\xEF\xBB\xBF")) text.remove_prefix(3);
  return text;
}

std::vector<std::string_view> split_lines(std::string_view text) {
  std::vector<std::string_view> lines;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    if (end < text.size() && line.ends_with('\r')) line.remove_suffix(1);
    lines.push_back(line);
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return lines;
}

std::string read_text(const std::string& path) {
  const MappedFile file(path, FileAccess::kSequential);
  check_utf8(file.text(), "read_text", path);
  return std::string(file.text());
}

}  // namespace tessera::data
