#include <tessera/data/chat_template/texts.h>

#include <algorithm>
#include <cstring>

#include <tessera/data/chat_template/value.h>
#include <tessera/data/text/text.h>
#include <tessera/data/text/unicode.h>

namespace tessera::data::jinja {
namespace {

size_t start_of_last(std::string_view text) {
  size_t last = text.size() - 1;
  while (last > 0 && (text[last] & 0xC0) == 0x80) --last;
  return last;
}

bool ends_line(char32_t c) {
  return (c >= 0x0A && c <= 0x0D) || (c >= 0x1C && c <= 0x1E) || c == 0x85 || c == 0x2028 ||
         c == 0x2029;
}

}  // namespace

size_t find_part(std::string_view text, std::string_view part, size_t from) {
  if (from > text.size()) return text.npos;
  if (part.empty()) return from;
  const void* const found =
      ::memmem(text.data() + from, text.size() - from, part.data(), part.size());
  if (found == nullptr) return text.npos;
  return static_cast<size_t>(static_cast<const char*>(found) - text.data());
}

size_t find_last_part(std::string_view text, std::string_view part) {
  const std::string back(text.rbegin(), text.rend()), end(part.rbegin(), part.rend());
  const size_t found = find_part(back, end);
  return found == back.npos ? text.npos : text.size() - found - part.size();
}

std::string replaced(std::string_view text, std::string_view old, std::string_view with,
                     int64_t most) {
  std::string out;
  size_t place = 0;
  if (old.empty()) {
    for (int64_t count = 0; most < 0 || count < most; ++count) {
      out += with;
      if (place >= text.size()) return out;
      const uint32_t size = decode_utf8(text, place).length;
      out += text.substr(place, size);
      place += size;
    }
    return out.append(text.substr(place));
  }
  for (int64_t count = 0; most < 0 || count < most; ++count) {
    const size_t next = find_part(text, old, place);
    if (next == text.npos) break;
    out += text.substr(place, next - place);
    out += with;
    place = next + old.size();
  }
  return out.append(text.substr(place));
}

std::vector<std::string_view> split(std::string_view text,
                                    std::optional<std::string_view> separator, int64_t most) {
  std::vector<std::string_view> parts;
  const auto full = [&] { return most >= 0 && static_cast<int64_t>(parts.size()) >= most; };
  if (separator) {
    size_t place = 0;
    while (!full()) {
      const size_t next = find_part(text, *separator, place);
      if (next == text.npos) break;
      parts.push_back(text.substr(place, next - place));
      place = next + separator->size();
    }
    parts.push_back(text.substr(place));
    return parts;
  }
  for (text = strip_spaces(text, true, false); !text.empty();
       text = strip_spaces(text, true, false)) {
    if (full()) {
      parts.push_back(text);
      return parts;
    }
    size_t end = 0;
    while (end < text.size()) {
      const CodePoint c = decode_utf8(text, end);
      if (is_python_space(c.value)) break;
      end += c.length;
    }
    parts.push_back(text.substr(0, end));
    text.remove_prefix(end);
  }
  return parts;
}

std::vector<std::string_view> split_from_right(std::string_view text,
                                               std::optional<std::string_view> separator,
                                               int64_t most) {
  if (most < 0 && !separator) return split(text, separator, most);
  std::vector<std::string_view> parts;
  const auto full = [&] { return most >= 0 && static_cast<int64_t>(parts.size()) >= most; };
  if (separator) {
    const std::string back(text.rbegin(), text.rend());
    const std::string end(separator->rbegin(), separator->rend());
    size_t place = 0;
    while (!full()) {
      const size_t next = find_part(back, end, place);
      if (next == back.npos) break;
      parts.push_back(text.substr(text.size() - next, next - place));
      place = next + end.size();
    }
    parts.push_back(text.substr(0, text.size() - place));
  } else {
    for (text = strip_spaces(text, false, true); !text.empty();
         text = strip_spaces(text, false, true)) {
      if (full()) {
        parts.push_back(text);
        break;
      }
      size_t begin = text.size();
      while (begin > 0) {
        const size_t last = start_of_last(text.substr(0, begin));
        if (is_python_space(decode_utf8(text, last).value)) break;
        begin = last;
      }
      parts.push_back(text.substr(begin));
      text = text.substr(0, begin);
    }
  }
  std::reverse(parts.begin(), parts.end());
  return parts;
}

std::vector<std::string_view> python_lines(std::string_view text, bool keep_ends) {
  std::vector<std::string_view> lines;
  size_t begin = 0;
  for (size_t place = 0; place < text.size();) {
    const CodePoint c = decode_utf8(text, place);
    const size_t end = place;
    place += c.length;
    if (!ends_line(c.value)) continue;
    if (c.value == '\r' && place < text.size() && text[place] == '\n') ++place;
    lines.push_back(text.substr(begin, (keep_ends ? place : end) - begin));
    begin = place;
  }
  if (begin < text.size()) lines.push_back(text.substr(begin));
  return lines;
}

std::string_view strip(std::string_view text, std::optional<std::string_view> set, bool left,
                       bool right) {
  if (!set) return strip_spaces(text, left, right);
  std::vector<char32_t> characters;
  for (size_t i = 0; i < set->size();) {
    const CodePoint c = decode_utf8(*set, i);
    characters.push_back(c.value);
    i += c.length;
  }
  std::sort(characters.begin(), characters.end());
  const auto is_in = [&](size_t place) {
    return std::binary_search(characters.begin(), characters.end(), decode_utf8(text, place).value);
  };
  while (left && !text.empty() && is_in(0)) text.remove_prefix(decode_utf8(text, 0).length);
  while (right && !text.empty() && is_in(start_of_last(text)))
    text = text.substr(0, start_of_last(text));
  return text;
}

std::string capitalized(std::string_view text) {
  if (text.empty()) return {};
  const uint32_t first = decode_utf8(text, 0).length;
  return title_case(text.substr(0, first)) + lower_case(text.substr(first));
}

std::string title_of_filter(std::string_view text) {
  std::string out;
  size_t begin = 0;
  const auto word = [&](size_t end) {
    if (begin == end) return;
    const uint32_t first = decode_utf8(text, begin).length;
    out += upper_case(text.substr(begin, first)) +
           lower_case(text.substr(begin + first, end - begin - first));
    begin = end;
  };
  for (size_t place = 0; place < text.size();) {
    const CodePoint c = decode_utf8(text, place);
    const bool cuts = is_python_space(c.value) || c.value == '-' || c.value == '(' ||
                      c.value == '{' || c.value == '[' || c.value == '<';
    if (cuts) {
      word(place);
      out += text.substr(place, c.length);
      begin = place + c.length;
    }
    place += c.length;
  }
  word(text.size());
  return out;
}

std::string title_of_method(std::string_view text) {
  std::string out;
  bool inside = false;
  for (size_t place = 0; place < text.size();) {
    const CodePoint c = decode_utf8(text, place);
    const std::string_view character = text.substr(place, c.length);
    out += inside ? lower_case(character) : title_case(character);
    inside = is_cased(c.value);
    place += c.length;
  }
  return out;
}

}  // namespace tessera::data::jinja
