// The merges of byte pair encoding, and their application to the tokens of a word. Included by
// tokenizers' .cpp files only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include <tessera/data/text/tokenizer.h>

namespace tessera::data {

struct Merge {
  uint32_t rank;
  TokenId id;
};
inline constexpr uint32_t kNoRank = std::numeric_limits<uint32_t>::max();

// From a pair of tokens to its merge; open addressing at half load.
class MergeTable {
 public:
  void reserve(size_t merges) {
    int bits = 4;
    while ((size_t{1} << bits) < 2 * merges) ++bits;
    shift_ = 64 - bits;
    slots_.assign(size_t{1} << bits, Slot{});
  }
  // At most as many pairs as were reserved. False, and nothing is changed, if the pair is there.
  bool insert(TokenId left, TokenId right, Merge merge) {
    Slot& slot = slots_[find_slot(key_of(left, right))];
    if (slot.key != kEmpty) return false;
    slot = {key_of(left, right), merge};
    return true;
  }
  // The same, but the new merge takes the place of one that is there.
  void insert_or_assign(TokenId left, TokenId right, Merge merge) {
    slots_[find_slot(key_of(left, right))] = {key_of(left, right), merge};
  }
  Merge find(TokenId left, TokenId right) const {
    return slots_[find_slot(key_of(left, right))].merge;
  }

 private:
  static constexpr uint64_t kEmpty = ~uint64_t{0};
  struct Slot {
    uint64_t key = kEmpty;
    Merge merge = {kNoRank, 0};
  };
  static uint64_t key_of(TokenId left, TokenId right) {
    return static_cast<uint64_t>(left) << 32 | static_cast<uint32_t>(right);
  }
  size_t find_slot(uint64_t key) const {
    size_t slot = (key * 0x9E3779B97F4A7C15) >> shift_;
    while (slots_[slot].key != key && slots_[slot].key != kEmpty) {
      slot = (slot + 1) & (slots_.size() - 1);
    }
    return slot;
  }

  std::vector<Slot> slots_ = std::vector<Slot>(16);
  int shift_ = 60;
};

// Merges neighbours in place, the lowest rank first and of equal ones the leftmost; what is left
// stands at the front, and its number is returned. `lengths`, where there are any, are added up
// where tokens merge. n tokens cost O(n log n).
size_t merge_tokens(const MergeTable& merges, TokenId* tokens, uint32_t* lengths, size_t count);

}  // namespace tessera::data
