// The unigram language model (T. Kudo, 2018): of all ways to cut a piece into tokens the one with
// the greatest sum of scores, by Viterbi's algorithm, in f64 as the tokenizers package adds them.
#include <algorithm>
#include <array>
#include <cstdio>
#include <limits>

#include <tessera/core/error.h>
#include <tessera/data/text/text.h>
#include <tessera/data/tokenizer_json/token_model.h>

namespace tessera::data {
namespace {

constexpr double kUnknownPenalty = 10;

// Tokens by their bytes: a node's children stand together, sorted.
class Trie {
 public:
  void build(std::vector<std::pair<std::string_view, TokenId>> tokens) {
    std::sort(tokens.begin(), tokens.end());
    nodes_.assign(1, Node{});
    struct Range {
      size_t node, begin, end, depth;
    };
    std::vector<Range> open = {{0, 0, tokens.size(), 0}};
    for (size_t i = 0; i < open.size(); ++i) {
      auto [node, begin, end, depth] = open[i];
      if (begin < end && tokens[begin].first.size() == depth) {
        nodes_[node].id = tokens[begin].second;
        ++begin;
      }
      nodes_[node].first = static_cast<uint32_t>(nodes_.size());
      while (begin < end) {
        const char byte = tokens[begin].first[depth];
        size_t next = begin;
        while (next < end && tokens[next].first[depth] == byte) ++next;
        open.push_back({nodes_.size(), begin, next, depth + 1});
        nodes_.push_back(Node{.byte = static_cast<unsigned char>(byte)});
        begin = next;
      }
      nodes_[node].count = static_cast<uint32_t>(nodes_.size()) - nodes_[node].first;
    }
    root_.fill(0);
    for (uint32_t i = 0; i < nodes_[0].count; ++i) {
      root_[nodes_[nodes_[0].first + i].byte] = nodes_[0].first + i;
    }
  }

  // Calls visit(length, id) for each token that the text begins with, the shortest first.
  template <class Visit>
  void for_each_prefix(std::string_view text, Visit&& visit) const {
    uint32_t node = text.empty() ? 0 : root_[static_cast<unsigned char>(text[0])];
    for (size_t length = 1; node != 0; ++length) {
      if (nodes_[node].id >= 0) visit(length, nodes_[node].id);
      if (length == text.size()) return;
      const auto byte = static_cast<unsigned char>(text[length]);
      const auto first = nodes_.begin() + nodes_[node].first;
      const auto last = first + nodes_[node].count;
      const auto found = std::lower_bound(
          first, last, byte, [](const Node& child, unsigned char b) { return child.byte < b; });
      node =
          found != last && found->byte == byte ? static_cast<uint32_t>(found - nodes_.begin()) : 0;
    }
  }

 private:
  struct Node {
    uint32_t first = 0, count = 0;
    TokenId id = -1;
    unsigned char byte = 0;
  };
  std::vector<Node> nodes_;
  std::array<uint32_t, 256> root_{};
};

class UnigramModel : public TokenModel {
 public:
  explicit UnigramModel(JsonFields& fields) {
    const Json& list = fields.array("vocab");
    const std::string place = fields.place() + ".vocab";
    TS_CHECK_AS(FormatError, list.size() < (size_t{1} << 21), kPretrained, place,
                " has more than 2^21 tokens; get the file again.");
    double least = std::numeric_limits<double>::infinity();
    for (const Json& entry : list) {
      TS_CHECK_AS(
          FormatError,
          entry.is_array() && entry.size() == 2 && entry[0].is_string() && entry[1].is_number(),
          kPretrained, place, "[", scores_.size(),
          "] must be a token and its score; it is not; get the file again.");
      vocabulary_.add(entry[0].get<std::string>(), static_cast<TokenId>(scores_.size()));
      scores_.push_back(entry[1].get<double>());
      least = std::min(least, scores_.back());
    }
    unknown_score_ = least - kUnknownPenalty;
    if (fields.find("unk_id") != nullptr) {
      unknown_ = static_cast<TokenId>(fields.number("unk_id"));
      TS_CHECK_AS(FormatError, static_cast<size_t>(*unknown_) < scores_.size(), kPretrained,
                  fields.place(), " has unk_id ", *unknown_, ", and ", scores_.size(),
                  " tokens; get the file again.");
    }
    byte_fallback_ = fields.flag("byte_fallback", false);
    for (int byte = 0; byte < 256; ++byte) {
      char name[8];
      std::snprintf(name, sizeof name, "<0x%02X>", static_cast<unsigned>(byte));
      fallbacks_[static_cast<size_t>(byte)] = vocabulary_.find(name).value_or(-1);
    }
    std::vector<std::pair<std::string_view, TokenId>> tokens;
    for (TokenId id = 0; id < vocabulary_.end(); ++id) {
      const std::string& token = *vocabulary_.token(id);
      // Of a token that stands twice the last one counts.
      if (!token.empty() && vocabulary_.find(token) == id) tokens.emplace_back(token, id);
    }
    trie_.build(std::move(tokens));
  }

  void encode(std::string_view piece, std::vector<TokenId>& ids,
              std::vector<ByteSpan>* places) const override {
    struct Best {  // of the ways that end there
      double score = 0;
      size_t start = std::string_view::npos;
      TokenId id = 0;
    };
    std::vector<Best> best(piece.size() + 1);
    for (size_t start = 0; start < piece.size();) {
      const size_t character = decode_utf8(piece, start).length;
      const double here = best[start].score;
      bool covered = false;
      const auto offer = [&](size_t length, TokenId id, double score) {
        Best& end = best[start + length];
        if (end.start == std::string_view::npos || score > end.score) end = {score, start, id};
      };
      trie_.for_each_prefix(piece.substr(start), [&](size_t length, TokenId id) {
        offer(length, id, scores_[static_cast<size_t>(id)] + here);
        covered |= length == character;
      });
      if (!covered) {
        require_unknown();
        offer(character, *unknown_, unknown_score_ + here);
      }
      start += character;
    }
    // From the end: neighbours that are unknown are one.
    std::vector<std::pair<size_t, size_t>> parts;
    bool fusing = false;
    for (size_t end = piece.size(); end > 0;) {
      const Best& node = best[end];
      const bool unknown = node.id == unknown_;
      if (unknown && fusing) {
        parts.back().first = node.start;
      } else {
        parts.emplace_back(node.start, end);
      }
      fusing = unknown;
      end = node.start;
    }
    for (size_t i = parts.size(); i-- > 0;) {
      add_part(piece, parts[i].first, parts[i].second, ids, places);
    }
  }

 private:
  void require_unknown() const {
    TS_CHECK_AS(FormatError, unknown_.has_value(), kPretrained,
                "the vocabulary has no token for what is unknown (unk_id), and a text has such "
                "characters; get the file again.");
  }

  void add_part(std::string_view piece, size_t begin, size_t end, std::vector<TokenId>& ids,
                std::vector<ByteSpan>* places) const {
    const auto add = [&](TokenId id) {
      ids.push_back(id);
      if (places == nullptr) return;
      places->push_back({static_cast<uint32_t>(begin), static_cast<uint32_t>(end)});
    };
    const std::string_view part = piece.substr(begin, end - begin);
    if (const std::optional<TokenId> id = vocabulary_.find(part)) return add(*id);
    const auto id_of = [&](char byte) { return fallbacks_[static_cast<unsigned char>(byte)]; };
    if (byte_fallback_ &&
        std::all_of(part.begin(), part.end(), [&](char byte) { return id_of(byte) >= 0; })) {
      for (const char byte : part) add(id_of(byte));
      return;
    }
    require_unknown();
    add(*unknown_);
  }

  std::vector<double> scores_;
  double unknown_score_ = 0;
  std::optional<TokenId> unknown_;
  bool byte_fallback_ = false;
  std::array<TokenId, 256> fallbacks_{};
  Trie trie_;
};

}  // namespace

std::unique_ptr<TokenModel> read_unigram(JsonFields& fields) {
  return std::make_unique<UnigramModel>(fields);
}

}  // namespace tessera::data
