#include <tessera/data/text/bpe_merges.h>

#include <queue>

namespace tessera::data {
namespace {

// Few tokens: look through all ranks for the lowest. Quadratic, and faster than a heap.
constexpr size_t kFewTokens = 48;

template <bool kLengths>
size_t merge_few(const MergeTable& merges, TokenId* tokens, uint32_t* lengths, size_t count) {
  Merge next[kFewTokens];  // the merge of tokens[i] and tokens[i + 1]
  for (size_t i = 0; i + 1 < count; ++i) next[i] = merges.find(tokens[i], tokens[i + 1]);
  while (count > 1) {
    size_t best = 0;
    for (size_t i = 1; i + 1 < count; ++i) {
      if (next[i].rank < next[best].rank) best = i;
    }
    if (next[best].rank == kNoRank) break;
    tokens[best] = next[best].id;
    if constexpr (kLengths) lengths[best] += lengths[best + 1];
    for (size_t i = best + 1; i + 1 < count; ++i) {
      tokens[i] = tokens[i + 1];
      next[i] = next[i + 1];
      if constexpr (kLengths) lengths[i] = lengths[i + 1];
    }
    --count;
    if (best + 1 < count) next[best] = merges.find(tokens[best], tokens[best + 1]);
    if (best > 0) next[best - 1] = merges.find(tokens[best - 1], tokens[best]);
  }
  return count;
}

// Many tokens: a linked list and a heap of candidate merges. A candidate whose tokens have changed
// since is skipped when it comes up.
size_t merge_many(const MergeTable& merges, TokenId* tokens, uint32_t* lengths, size_t size) {
  struct Links {
    int64_t previous, next;
  };
  struct Candidate {
    uint32_t rank;
    TokenId merged, left_token, right_token;
    int64_t left;
    // std::priority_queue gives its greatest: the lowest rank, then the leftmost.
    bool operator<(const Candidate& other) const {
      return rank != other.rank ? rank > other.rank : left > other.left;
    }
  };
  const auto count = static_cast<int64_t>(size);
  std::vector<Links> links(size);
  for (int64_t i = 0; i < count; ++i) links[i] = {i - 1, i + 1};
  std::vector<Candidate> storage;
  storage.reserve(size);
  std::priority_queue<Candidate> candidates({}, std::move(storage));
  const auto consider = [&](int64_t left) {
    if (left < 0 || links[left].next >= count) return;
    const TokenId a = tokens[left], b = tokens[links[left].next];
    const Merge merge = merges.find(a, b);
    if (merge.rank != kNoRank) candidates.push({merge.rank, merge.id, a, b, left});
  };
  for (int64_t i = 0; i + 1 < count; ++i) consider(i);
  while (!candidates.empty()) {
    const Candidate best = candidates.top();
    candidates.pop();
    Links& left = links[best.left];
    if (tokens[best.left] != best.left_token || left.next >= count ||
        tokens[left.next] != best.right_token) {
      continue;
    }
    const int64_t right = left.next;
    tokens[best.left] = best.merged;
    tokens[right] = -1;  // merged into its left neighbour
    if (lengths != nullptr) lengths[best.left] += lengths[right];
    left.next = links[right].next;
    if (left.next < count) links[left.next].previous = best.left;
    consider(left.previous);
    consider(best.left);
  }
  size_t kept = 0;
  for (int64_t i = 0; i < count; i = links[i].next) {
    tokens[kept] = tokens[i];
    if (lengths != nullptr) lengths[kept] = lengths[i];
    ++kept;
  }
  return kept;
}

}  // namespace

size_t merge_tokens(const MergeTable& merges, TokenId* tokens, uint32_t* lengths, size_t count) {
  if (count > kFewTokens) return merge_many(merges, tokens, lengths, count);
  return lengths == nullptr ? merge_few<false>(merges, tokens, nullptr, count)
                            : merge_few<true>(merges, tokens, lengths, count);
}

}  // namespace tessera::data
