// A text that is normalized and cut into pieces, and where each of its bytes comes from. Included
// by this folder's .cpp files only.
//
// The rules are those of the tokenizers package's NormalizedString: a character that replaces
// another one has its place in the original, a new one has the place of what stands before it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/data/text/tokenizer.h>

namespace tessera::data {

// Bytes [begin, end).
struct ByteSpan {
  uint32_t begin = 0, end = 0;
};

struct AlignedText {
  std::string text;             // valid UTF-8
  std::vector<ByteSpan> spans;  // of the original, for each byte of text; empty where not tracked
  bool tracked = false;
  size_t most_bytes = SIZE_MAX;  // that it may grow to

  // Without text, and otherwise like another one.
  static AlignedText like(const AlignedText& other);
  // FormatError where it has grown beyond that: a file may ask for "a" to become "aa" many times.
  void check_growth() const;
  // Appends a part of the original, which starts there at `origin`.
  void append_original(std::string_view part, uint32_t origin);
  // Appends bytes [begin, end) of another one that is tracked if this one is.
  void append_part(const AlignedText& source, size_t begin, size_t end);
};

// Writes bytes [begin, end) of a text anew, character by character, at the end of another text.
class Rewrite {
 public:
  // `origin`: where the part begins in the original, for new characters before all others.
  Rewrite(const AlignedText& source, size_t begin, size_t end, uint32_t origin, AlignedText& out)
      : source_(source), begin_(begin), place_(begin), end_(end), origin_(origin), out_(out) {}

  void skip(size_t characters);  // of the source
  // change 0: it replaces the next character; 1: it is new; -n: it replaces the next one, and the n
  // after that go.
  void put(char32_t character, int64_t change);

 private:
  const AlignedText& source_;
  size_t begin_, place_, end_;
  uint32_t origin_;
  AlignedText& out_;
};

// One stretch of AlignedText::text.
struct Piece {
  uint32_t begin = 0, end = 0;
  uint32_t origin = 0;  // where it begins in the original
  TokenId id = -1;      // of the added token that it is; -1: it is text
};

struct PreTokenized {
  AlignedText text;
  std::vector<Piece> pieces;

  std::string_view view(const Piece& piece) const {
    return std::string_view(text.text).substr(piece.begin, piece.end - piece.begin);
  }
};

// What to do with matches of a pattern, on "the-final--countdown" and "-":
enum class SplitBehavior : uint8_t {
  kRemoved,             // the final countdown
  kIsolated,            // the - final - - countdown
  kMergedWithPrevious,  // the- final- - countdown
  kMergedWithNext,      // the -final - -countdown
  kContiguous,          // the - final -- countdown
};

// A stretch that a pattern found, or what lies between two.
struct Cut {
  uint32_t begin, end;
  bool is_match;
};
// Appends to cuts, in order, what covers the text.
using FindCuts = std::function<void(std::string_view, std::vector<Cut>&)>;

// Cuts every piece that is text. Empty ones are left out.
void split_pieces(PreTokenized& work, SplitBehavior behavior, const FindCuts& find);

}  // namespace tessera::data
