// What PretrainedTokenizer makes of a text, and how it is truncated and padded.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include <tessera/data/text/tokenizer.h>
#include <tessera/data/text/wordpiece.h>

namespace tessera::data {

// Characters (code points) [begin, end) of the text, where bytes that are not UTF-8 are a U+FFFD.
struct TokenOffset {
  int64_t begin = 0, end = 0;
  bool operator==(const TokenOffset&) const = default;
};

// One sequence for a model, with special tokens and padding.
struct PretrainedEncoding : Encoding {
  std::vector<TokenId> special_tokens_mask;  // 1 for what the post-processor and padding added
  std::vector<TokenOffset> offsets;          // [0, 0) for those
};

struct Truncation {
  enum class Strategy {
    kLongestFirst,  // of a pair the longer text loses first, until both are equally long
    kOnlyFirst,
    kOnlySecond,
  };
  int64_t max_length = 512;  // of ids, special tokens included
  Strategy strategy = Strategy::kLongestFirst;
  bool left = false;  // loses ids at the beginning
  // encode_overflowing() only: how many ids of a stretch the next one repeats.
  int64_t stride = 0;
};

struct Padding {
  std::optional<int64_t> length = {};  // absent: to the longest of the batch
  int64_t to_multiple_of = 0;          // 0: of any
  bool left = false;
  TokenId id = 0, type_id = 0;
};

struct PretrainedEncodeOptions {
  bool add_special_tokens = true;
  // In place of what the file says, which truncates and pads where it has them.
  std::optional<Truncation> truncation = {};
  std::optional<Padding> padding = {};

  // Neither truncated nor padded, whatever the file says.
  static PretrainedEncodeOptions whole(bool add_special_tokens) {
    return {.add_special_tokens = add_special_tokens,
            .truncation = Truncation{.max_length = std::numeric_limits<int64_t>::max()},
            .padding = Padding{}};
  }
};

}  // namespace tessera::data
