#include <tessera/data/tokenizer_json/pre_tokenizers.h>

#include <algorithm>
#include <utility>

#include <tessera/core/error.h>
#include <tessera/data/text/gpt2_pattern.h>
#include <tessera/data/text/text.h>
#include <tessera/data/text/unicode.h>
#include <tessera/data/tokenizer_json/normalizers.h>
#include <tessera/data/tokenizer_json/package_categories.h>
#include <tessera/data/tokenizer_json/patterns.h>

namespace tessera::data {
namespace {

bool is_number(char32_t c) {
  return c < 0x80 ? kAsciiClass[c] == CharClass::kNumber : char_class(c) == CharClass::kNumber;
}
bool is_word(char32_t c) {
  return c < 0x80 ? kAsciiClass[c] == CharClass::kLetter || kAsciiClass[c] == CharClass::kNumber ||
                        c == '_'
                  : is_word_character(c);
}
// All of ASCII's counts, symbols too.
bool is_punctuation_mark(char32_t c) {
  if (c < 0x80) return c > ' ' && c != 0x7F && kAsciiClass[c] == CharClass::kOther;
  return is_package_punctuation(c);
}

// Writes every piece that is text anew: write(out, piece) appends what it becomes.
template <class Write>
void rewrite_pieces(PreTokenized& work, Write&& write) {
  AlignedText out = AlignedText::like(work.text);
  out.text.reserve(work.text.text.size() + work.pieces.size());
  for (Piece& piece : work.pieces) {
    const auto begin = static_cast<uint32_t>(out.text.size());
    if (piece.id >= 0) {
      out.append_part(work.text, piece.begin, piece.end);
    } else {
      write(out, piece);
    }
    piece.begin = begin;
    piece.end = static_cast<uint32_t>(out.text.size());
  }
  out.check_growth();
  work.text = std::move(out);
}

// The piece with a character before it, which has the place of the piece's first one.
void append_prefixed(const AlignedText& source, const Piece& piece, std::string_view prefix,
                     AlignedText& out) {
  out.text += prefix;
  if (source.tracked) {
    out.spans.insert(out.spans.end(), prefix.size(), source.spans[piece.begin]);
  }
  out.append_part(source, piece.begin, piece.end);
}

class Characters : public PreTokenizer {  // cuts at single characters
 public:
  Characters(bool (*fits)(char32_t), SplitBehavior behavior) : fits_(fits), behavior_(behavior) {}
  void run(PreTokenized& work) const override {
    split_pieces(work, behavior_, [this](std::string_view text, std::vector<Cut>& cuts) {
      find_characters(text, cuts, fits_);
    });
  }

 private:
  bool (*fits_)(char32_t);
  SplitBehavior behavior_;
};

class Bert : public PreTokenizer {
 public:
  void run(PreTokenized& work) const override {
    Characters(is_white_space, SplitBehavior::kRemoved).run(work);
    Characters(is_punctuation_mark, SplitBehavior::kIsolated).run(work);
  }
};

// \w+|[^\w\s]+
class Whitespace : public PreTokenizer {
 public:
  void run(PreTokenized& work) const override {
    split_pieces(work, SplitBehavior::kRemoved, [](std::string_view text, std::vector<Cut>& cuts) {
      const auto kind_of = [](char32_t c) { return is_word(c) ? 0 : is_white_space(c) ? 1 : 2; };
      for (uint32_t place = 0, begin = 0; place < text.size(); begin = place) {
        CodePoint c = decode_utf8(text, place);
        const int kind = kind_of(c.value);
        for (;;) {
          place += c.length;
          if (place == text.size()) break;
          c = decode_utf8(text, place);
          if (kind_of(c.value) != kind) break;
        }
        cuts.push_back({begin, place, kind == 1});
      }
    });
  }
};

class Split : public PreTokenizer {
 public:
  explicit Split(JsonFields& fields)
      : pattern_(fields.at("pattern"), fields.place() + ".pattern"),
        behavior_(behavior_of(fields)),
        invert_(fields.flag("invert")) {}

  void run(PreTokenized& work) const override {
    split_pieces(work, behavior_, [this](std::string_view text, std::vector<Cut>& cuts) {
      pattern_.find(text, cuts);
      if (!invert_) return;
      for (Cut& cut : cuts) cut.is_match = !cut.is_match;
    });
  }

  static SplitBehavior behavior_of(JsonFields& fields) {
    constexpr std::pair<std::string_view, SplitBehavior> kNames[] = {
        {"Removed", SplitBehavior::kRemoved},
        {"Isolated", SplitBehavior::kIsolated},
        {"MergedWithPrevious", SplitBehavior::kMergedWithPrevious},
        {"MergedWithNext", SplitBehavior::kMergedWithNext},
        {"Contiguous", SplitBehavior::kContiguous}};
    const std::string wanted = fields.text("behavior");
    for (const auto& [name, behavior] : kNames) {
      if (wanted == name) return behavior;
    }
    fields.refuse("the behavior '" + wanted + "'");
  }

 private:
  Pattern pattern_;
  SplitBehavior behavior_;
  bool invert_;
};

class ByteLevel : public PreTokenizer {
 public:
  ByteLevel(JsonFields& fields, bool leave_bytes)
      : add_prefix_space_(fields.flag("add_prefix_space")),
        use_regex_(fields.flag("use_regex", true)),
        leave_bytes_(leave_bytes) {
    fields.ignore({"trim_offsets"});  // the post-processor's
  }

  void run(PreTokenized& work) const override {
    if (add_prefix_space_) {
      rewrite_pieces(work, [&](AlignedText& out, const Piece& piece) {
        const bool has_space = work.view(piece).starts_with(' ');
        append_prefixed(work.text, piece, has_space ? "" : " ", out);
      });
    }
    if (use_regex_) {
      split_pieces(
          work, SplitBehavior::kIsolated, [](std::string_view text, std::vector<Cut>& cuts) {
            for (size_t start = 0; start < text.size();) {
              const size_t end = end_of_gpt2_piece(text, start);
              cuts.push_back({static_cast<uint32_t>(start), static_cast<uint32_t>(end), true});
              start = end;
            }
          });
    }
    if (leave_bytes_) return;
    rewrite_pieces(work, [&](AlignedText& out, const Piece& piece) {
      write_byte_chars(work.text, piece.begin, piece.end, piece.origin, out);
    });
  }

 private:
  bool add_prefix_space_, use_regex_, leave_bytes_;
};

class Metaspace : public PreTokenizer {
 public:
  explicit Metaspace(JsonFields& fields) {
    append_utf8(fields.character("replacement"), replacement_);
    const std::string scheme = fields.optional_text("prepend_scheme").value_or("always");
    if (scheme != "always" && scheme != "first" && scheme != "never") {
      fields.refuse("the prepend_scheme '" + scheme + "'");
    }
    // Of files before prepend_scheme.
    const bool prefix = fields.flag("add_prefix_space", true);
    TS_CHECK_AS(FormatError, prefix || scheme == "never", kPretrained, fields.place(),
                " has add_prefix_space false and prepend_scheme '", scheme,
                "', which do not go together; get the file again.");
    always_ = scheme == "always";
    first_ = scheme == "first";
    split_ = fields.flag("split", true);
    fields.ignore({"str_rep"});
  }

  void run(PreTokenized& work) const override {
    rewrite_pieces(work, [&](AlignedText& out, const Piece& piece) {
      const std::string_view text = work.view(piece);
      const bool prefix = (always_ || (first_ && piece.origin == 0)) && !text.starts_with(' ') &&
                          !text.starts_with(replacement_);
      if (prefix) append_prefixed(work.text, {piece.begin, piece.begin}, replacement_, out);
      for (uint32_t place = piece.begin; place < piece.end;) {
        const uint32_t space =
            static_cast<uint32_t>(std::min<size_t>(work.text.text.find(' ', place), piece.end));
        out.append_part(work.text, place, space);
        place = space;
        if (place == piece.end) break;
        out.text += replacement_;
        if (out.tracked) {
          out.spans.insert(out.spans.end(), replacement_.size(), work.text.spans[place]);
        }
        ++place;
      }
    });
    if (!split_) return;
    split_pieces(work, SplitBehavior::kMergedWithNext,
                 [this](std::string_view text, std::vector<Cut>& cuts) {
                   uint32_t last = 0;
                   for (size_t at = text.find(replacement_); at != text.npos;
                        at = text.find(replacement_, last)) {
                     const auto begin = static_cast<uint32_t>(at);
                     if (last < begin) cuts.push_back({last, begin, false});
                     last = begin + static_cast<uint32_t>(replacement_.size());
                     cuts.push_back({begin, last, true});
                   }
                   const auto size = static_cast<uint32_t>(text.size());
                   if (last < size) cuts.push_back({last, size, false});
                 });
  }

  bool asks_for_origin() const { return first_; }

 private:
  std::string replacement_;
  bool always_ = false, first_ = false, split_ = true;
};

void read_into(PreTokenizers& result, const Json& value, const std::string& place,
               bool leave_bytes) {
  JsonFields fields(value, place);
  const std::string type = fields.text("type");
  auto& steps = result.steps;
  if (type == "Sequence") {
    const Json& parts = fields.array("pretokenizers");
    for (size_t i = 0; i < parts.size(); ++i) {
      read_into(result, parts[i], place + ".pretokenizers[" + std::to_string(i) + "]",
                leave_bytes && i + 1 == parts.size());
    }
  } else if (type == "ByteLevel") {
    steps.push_back(std::make_unique<ByteLevel>(fields, leave_bytes));
    result.bytes = leave_bytes;
  } else if (type == "Metaspace") {
    auto step = std::make_unique<Metaspace>(fields);
    result.needs_spans |= step->asks_for_origin() && !steps.empty();
    steps.push_back(std::move(step));
  } else if (type == "Split") {
    steps.push_back(std::make_unique<Split>(fields));
  } else if (type == "Whitespace") {
    steps.push_back(std::make_unique<Whitespace>());
  } else if (type == "WhitespaceSplit") {
    steps.push_back(std::make_unique<Characters>(is_white_space, SplitBehavior::kRemoved));
  } else if (type == "BertPreTokenizer") {
    steps.push_back(std::make_unique<Bert>());
  } else if (type == "Digits") {
    steps.push_back(std::make_unique<Characters>(is_number, fields.flag("individual_digits")
                                                                ? SplitBehavior::kIsolated
                                                                : SplitBehavior::kContiguous));
  } else if (type == "Punctuation") {
    const bool says = fields.find("behavior") != nullptr;
    steps.push_back(std::make_unique<Characters>(
        is_punctuation_mark, says ? Split::behavior_of(fields) : SplitBehavior::kIsolated));
  } else {
    fields.refuse("the type '" + type + "'");
  }
  fields.finish();
}

}  // namespace

PreTokenizers read_pre_tokenizers(const Json& value, const std::string& place, bool bytes_allowed) {
  PreTokenizers result;
  read_into(result, value, place, bytes_allowed);
  return result;
}

}  // namespace tessera::data
