// What a chat template makes of a conversation, and how much it may take.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace tessera::data {

struct ChatTemplateLimits {
  // Values made and visited, and bytes of texts by sixteen. A conversation of a thousand messages
  // takes some hundred thousand.
  size_t steps = 8'000'000;
  int depth = 500;  // of nested expressions, blocks and macros
  size_t output_bytes = size_t{32} << 20;
};

// Characters (code points) [begin, end) of a text.
struct CharacterSpan {
  int64_t begin = 0, end = 0;
  bool operator==(const CharacterSpan&) const = default;
};

struct RenderedChat {
  std::string text;
  // What stood in {% generation %} blocks, in the order in which they ended.
  std::vector<CharacterSpan> generated;
};

}  // namespace tessera::data
