#include <tessera/data/tokenizer_json/charsmap.h>

#include <cstring>

#include <tessera/core/error.h>
#include <tessera/data/text/text.h>
#include <tessera/data/text/unicode.h>
#include <tessera/data/tokenizer_json/json_fields.h>

namespace tessera::data {
namespace {

std::string decode_base64(std::string_view text, const std::string& place) {
  while (text.ends_with('=')) text.remove_suffix(1);
  std::string bytes;
  uint32_t bits = 0;
  int count = 0;
  for (const char c : text) {
    const int value = c >= 'A' && c <= 'Z'   ? c - 'A'
                      : c >= 'a' && c <= 'z' ? c - 'a' + 26
                      : c >= '0' && c <= '9' ? c - '0' + 52
                      : c == '+'             ? 62
                      : c == '/'             ? 63
                                             : -1;
    TS_CHECK_AS(FormatError, value >= 0, kPretrained, "the charsmap of ", place,
                " must be base64; it has other characters; get the file again.");
    bits = (bits << 6 | static_cast<uint32_t>(value)) & 0xFFFFFF;
    count += 6;
    if (count >= 8) {
      count -= 8;
      bytes += static_cast<char>(bits >> count & 0xFF);
    }
  }
  return bytes;
}

// A unit of the double array, as Darts-clone has it.
bool has_leaf(uint32_t unit) { return (unit >> 8 & 1) != 0; }
uint32_t value_of(uint32_t unit) { return unit & 0x7FFFFFFF; }
uint32_t label_of(uint32_t unit) { return unit & 0x800000FF; }
uint32_t offset_of(uint32_t unit) { return unit >> 10 << ((unit & 0x200) >> 6); }

// Fewer bytes than these as a cluster are mapped as one.
constexpr size_t kClusterBytes = 6;

}  // namespace

Charsmap::Charsmap(std::string_view base64, const std::string& place) {
  const std::string bytes = decode_base64(base64, place);
  uint32_t size = 0;
  if (bytes.size() >= 4) std::memcpy(&size, bytes.data(), 4);
  TS_CHECK_AS(FormatError, size >= 4 && bytes.size() >= 4 && size <= bytes.size() - 4, kPretrained,
              "the charsmap of ", place, " must hold the double array that it announces; it has ",
              bytes.size(), " bytes, and ", size, " are announced; get the file again.");
  units_.resize(size / 4);
  std::memcpy(units_.data(), bytes.data() + 4, units_.size() * 4);
  texts_ = bytes.substr(4 + units_.size() * 4);
  TS_CHECK_AS(FormatError, !find_invalid_utf8(texts_), kPretrained, "the texts of the charsmap of ",
              place, " must be UTF-8; get the file again.");
}

std::optional<std::string_view> Charsmap::find(std::string_view chunk) const {
  uint32_t node = offset_of(units_[0]);
  for (const char c : chunk) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte == 0) return std::nullopt;
    node ^= byte;
    if (node >= units_.size() || label_of(units_[node]) != byte) return std::nullopt;
    const uint32_t unit = units_[node];
    node ^= offset_of(unit);
    if (!has_leaf(unit)) continue;
    if (node >= units_.size()) return std::nullopt;
    const uint32_t at = value_of(units_[node]);
    if (at >= texts_.size()) return std::nullopt;
    const std::string_view found = std::string_view(texts_).substr(at, texts_.find('\0', at) - at);
    // A place inside of a character is no text.
    if (find_invalid_utf8(found)) return std::nullopt;
    return found;
  }
  return std::nullopt;
}

bool Charsmap::run(std::string_view text, size_t most, std::vector<CharChange>& changes) const {
  bool modified = false;
  const auto keep = [&](std::string_view part) {
    for (size_t place = 0; place < part.size();) {
      const CodePoint c = decode_utf8(part, place);
      changes.push_back({c.value, 0});
      place += c.length;
    }
  };
  const auto count = [](std::string_view part) {
    int64_t characters = 0;
    for (const char c : part) characters += (c & 0xC0) != 0x80 ? 1 : 0;
    return characters;
  };
  const auto map = [&](std::string_view part) {
    const std::optional<std::string_view> becomes = find(part);
    if (!becomes) return false;
    modified = true;
    keep(*becomes);
    TS_CHECK_AS(FormatError, changes.size() <= most, kPretrained,
                "what a charsmap makes of a text has more than ", most,
                " characters; the file is damaged or hostile: get it again.");
    const int64_t more = count(*becomes) - count(part);
    for (int64_t i = 0; i < more; ++i)
      changes[changes.size() - 1 - static_cast<size_t>(i)].change = 1;
    // What goes belongs to the character before, if there is one.
    if (more < 0 && !changes.empty()) changes.back().change += more;
    return true;
  };
  const auto map_cluster = [&](std::string_view cluster) {
    if (cluster.size() < kClusterBytes && map(cluster)) return;
    for (size_t place = 0; place < cluster.size();) {
      const std::string_view part = cluster.substr(place, decode_utf8(cluster, place).length);
      if (!map(part)) keep(part);
      place += part.size();
    }
  };
  for (size_t place = 0; place < text.size();) {
    // ASCII is clusters of one byte, but for CR LF and what a mark may follow.
    const auto is_plain = [&](size_t at) {
      return static_cast<unsigned char>(text[at]) < 0x80 && text[at] != '\r' &&
             (at + 1 == text.size() || static_cast<unsigned char>(text[at + 1]) < 0x80);
    };
    if (is_plain(place)) {
      map_cluster(text.substr(place, 1));
      ++place;
      continue;
    }
    size_t end = place + 1;
    while (end < text.size() && !(static_cast<unsigned char>(text[end - 1]) < 0x80 &&
                                  is_plain(end) && text[end - 1] != '\r')) {
      ++end;
    }
    const std::string_view stretch = text.substr(place, end - place);
    size_t begin = 0;
    for (const size_t cluster_end : grapheme_ends(stretch)) {
      map_cluster(stretch.substr(begin, cluster_end - begin));
      begin = cluster_end;
    }
    place = end;
  }
  return modified;
}

}  // namespace tessera::data
