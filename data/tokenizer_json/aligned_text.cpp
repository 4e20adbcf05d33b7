#include <tessera/data/tokenizer_json/aligned_text.h>

#include <algorithm>

#include <tessera/core/error.h>
#include <tessera/data/text/text.h>
#include <tessera/data/tokenizer_json/json_fields.h>

namespace tessera::data {

AlignedText AlignedText::like(const AlignedText& other) {
  AlignedText made;
  made.tracked = other.tracked;
  made.most_bytes = other.most_bytes;
  return made;
}

void AlignedText::check_growth() const {
  TS_CHECK_AS(FormatError, text.size() <= most_bytes, kPretrained,
              "what the file makes of a text has more than ", most_bytes,
              " bytes; the file is damaged or hostile: get it again.");
}

void AlignedText::append_original(std::string_view part, uint32_t origin) {
  text += part;
  if (!tracked) return;
  for (size_t place = 0; place < part.size();) {
    const uint32_t length = decode_utf8(part, place).length;
    const uint32_t begin = origin + static_cast<uint32_t>(place);
    spans.insert(spans.end(), length, {begin, begin + length});
    place += length;
  }
}

void AlignedText::append_part(const AlignedText& source, size_t begin, size_t end) {
  text.append(source.text, begin, end - begin);
  if (!tracked) return;
  spans.insert(spans.end(), source.spans.begin() + static_cast<ptrdiff_t>(begin),
               source.spans.begin() + static_cast<ptrdiff_t>(end));
}

void Rewrite::skip(size_t characters) {
  if (!source_.tracked) return;
  for (; characters > 0 && place_ < end_; --characters) {
    place_ += decode_utf8(source_.text, place_).length;
  }
}

void Rewrite::put(char32_t character, int64_t change) {
  const size_t before = out_.text.size();
  append_utf8(character, out_.text);
  if (!source_.tracked) return;
  ByteSpan span{origin_, origin_};
  if (change > 0) {
    if (place_ > begin_) span = source_.spans[place_ - 1];
  } else {
    if (place_ < end_) span = source_.spans[place_];
    skip(1 + static_cast<size_t>(-change));
  }
  out_.spans.insert(out_.spans.end(), out_.text.size() - before, span);
}

void split_pieces(PreTokenized& work, SplitBehavior behavior, const FindCuts& find) {
  std::vector<Piece> pieces;
  pieces.reserve(work.pieces.size());
  std::vector<Cut> cuts;
  for (const Piece& piece : work.pieces) {
    if (piece.id >= 0) {
      pieces.push_back(piece);
      continue;
    }
    cuts.clear();
    find(work.view(piece), cuts);
    const auto push = [&](uint32_t begin, uint32_t end) {
      if (begin == end) return;
      begin += piece.begin;
      const uint32_t origin = work.text.tracked     ? work.text.spans[begin].begin
                              : begin > piece.begin ? piece.origin + 1  // behind it
                                                    : piece.origin;
      pieces.push_back({begin, end + piece.begin, origin, -1});
    };
    switch (behavior) {
      case SplitBehavior::kRemoved:
        for (const Cut& cut : cuts) {
          if (!cut.is_match) push(cut.begin, cut.end);
        }
        break;
      case SplitBehavior::kIsolated:
        for (const Cut& cut : cuts) push(cut.begin, cut.end);
        break;
      case SplitBehavior::kContiguous:
        for (size_t i = 0; i < cuts.size();) {
          size_t last = i;
          while (last + 1 < cuts.size() && cuts[last + 1].is_match == cuts[i].is_match) ++last;
          push(cuts[i].begin, cuts[last].end);
          i = last + 1;
        }
        break;
      case SplitBehavior::kMergedWithPrevious:
        // A match joins what stands before it, unless that is a match, too.
        for (size_t i = 0; i < cuts.size(); ++i) {
          const bool takes_next = !cuts[i].is_match && i + 1 < cuts.size() && cuts[i + 1].is_match;
          push(cuts[i].begin, cuts[takes_next ? i + 1 : i].end);
          if (takes_next) ++i;
        }
        break;
      case SplitBehavior::kMergedWithNext:
        for (size_t i = 0; i < cuts.size(); ++i) {
          const bool takes_next = cuts[i].is_match && i + 1 < cuts.size() && !cuts[i + 1].is_match;
          push(cuts[i].begin, cuts[takes_next ? i + 1 : i].end);
          if (takes_next) ++i;
        }
        break;
    }
  }
  work.pieces = std::move(pieces);
}

}  // namespace tessera::data
