// SentencePiece's precompiled map of characters. Included by this folder's .cpp files only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::data {

struct CharChange {
  char32_t value;
  int64_t change;  // as Rewrite::put() takes it
};

class Charsmap {
 public:
  // In base64: the bytes of a double array, those, and the texts that it leads to, each with a zero
  // at its end. FormatError.
  Charsmap(std::string_view base64, const std::string& place);

  // False: the text stays. Else the characters of the new one; FormatError where they are more than
  // `most`.
  bool run(std::string_view text, size_t most, std::vector<CharChange>& changes) const;

 private:
  // What a beginning of the chunk becomes, the shortest that is mapped, if one is.
  std::optional<std::string_view> find(std::string_view chunk) const;

  std::vector<uint32_t> units_;
  std::string texts_;
};

}  // namespace tessera::data
