#include <tessera/data/tokenizer_json/normalizers.h>

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include <tessera/core/error.h>
#include <tessera/data/text/byte_chars.h>
#include <tessera/data/text/text.h>
#include <tessera/data/text/unicode.h>
#include <tessera/data/tokenizer_json/charsmap.h>
#include <tessera/data/tokenizer_json/package_categories.h>
#include <tessera/data/tokenizer_json/patterns.h>

namespace tessera::data {
namespace {

bool is_ascii(std::string_view text) {
  return std::none_of(text.begin(), text.end(),
                      [](char c) { return static_cast<unsigned char>(c) >= 0x80; });
}

// A text written anew by write(rewrite, characters of it).
template <class Write>
void rewrite_all(AlignedText& text, uint32_t origin, Write&& write) {
  AlignedText out = AlignedText::like(text);
  out.text.reserve(text.text.size());
  if (text.tracked) out.spans.reserve(text.spans.size());
  Rewrite rewrite(text, 0, text.text.size(), origin, out);
  write(rewrite);
  text = std::move(out);
}

template <class Visit>
void for_each_character(std::string_view text, Visit&& visit) {
  for (size_t place = 0; place < text.size();) {
    const CodePoint c = decode_utf8(text, place);
    visit(c.value);
    place += c.length;
  }
}

// Characters that do not stay take their places with them: of the one before, or of the beginning.
template <class Keep>
void filter(AlignedText& text, uint32_t origin, Keep&& keep) {
  rewrite_all(text, origin, [&](Rewrite& rewrite) {
    int64_t removed = 0;
    char32_t last = kInvalidCodePoint;
    for_each_character(text.text, [&](char32_t c) {
      if (!keep(c)) {
        ++removed;
        return;
      }
      if (last == kInvalidCodePoint) {
        rewrite.skip(static_cast<size_t>(removed));
      } else {
        rewrite.put(last, -removed);
      }
      last = c;
      removed = 0;
    });
    if (last != kInvalidCodePoint) rewrite.put(last, -removed);
  });
}

template <class Map>
void map_characters(AlignedText& text, uint32_t origin, Map&& map) {
  rewrite_all(text, origin, [&](Rewrite& rewrite) {
    for_each_character(text.text, [&](char32_t c) { rewrite.put(map(c), 0); });
  });
}

void lower(AlignedText& text, uint32_t origin) {
  if (is_ascii(text.text)) {
    for (char& c : text.text) {
      if (c >= 'A' && c <= 'Z') c = static_cast<char>(c + 32);
    }
    return;
  }
  std::string lowered;
  rewrite_all(text, origin, [&](Rewrite& rewrite) {
    for_each_character(text.text, [&](char32_t c) {
      lowered.clear();
      append_lower_case(c, lowered);
      int64_t change = 0;
      for_each_character(lowered,
                         [&](char32_t part) { rewrite.put(part, std::exchange(change, 1)); });
    });
  });
}

// ---- Unicode's normal forms ---------------------------------------------------------------------

struct ChangedChar {
  char32_t value;
  int64_t change;
  uint8_t combining_class;
};

class Decomposition {
 public:
  explicit Decomposition(bool compatible) : compatible_(compatible) {}

  std::vector<ChangedChar> run(std::string_view text) {
    for_each_character(text, [this](char32_t c) {
      if (c < 0x80) return push({c, 0, 0});
      if (!is_package_normalized(c)) return push({c, 0, 0});
      int64_t change = 0;
      decompose(c, compatible_, [&](char32_t part) {
        push({part, std::exchange(change, 1), combining_class(part)});
      });
    });
    sort_pending();
    return std::move(out_);
  }

 private:
  void push(const ChangedChar& c) {
    if (c.combining_class == 0) sort_pending();
    out_.push_back(c);
    if (c.combining_class == 0) pending_ = out_.size();
  }
  void sort_pending() {
    std::stable_sort(out_.begin() + static_cast<ptrdiff_t>(pending_), out_.end(),
                     [](const ChangedChar& a, const ChangedChar& b) {
                       return a.combining_class < b.combining_class;
                     });
    pending_ = out_.size();
  }

  bool compatible_;
  std::vector<ChangedChar> out_;
  size_t pending_ = 0;
};

// Unicode's composition algorithm; a composed character adds up the changes of its parts.
void put_composed(const std::vector<ChangedChar>& parts, Rewrite& rewrite) {
  for (size_t i = 0; i < parts.size();) {
    ChangedChar starter = parts[i++];
    if (starter.combining_class != 0) {
      rewrite.put(starter.value, starter.change);
      continue;
    }
    std::vector<ChangedChar> marks;
    for (; i < parts.size(); ++i) {
      const ChangedChar& next = parts[i];
      const bool blocked = !marks.empty() && marks.back().combining_class >= next.combining_class;
      if (!blocked) {
        if (const std::optional<char32_t> both = compose(starter.value, next.value);
            both && is_package_normalized(*both)) {
          starter.value = *both;
          starter.change += next.change - 1;
          continue;
        }
      }
      if (next.combining_class == 0) break;
      marks.push_back(next);
    }
    rewrite.put(starter.value, starter.change);
    for (const ChangedChar& mark : marks) rewrite.put(mark.value, mark.change);
  }
}

void normalize(AlignedText& text, uint32_t origin, NormalForm form) {
  if (is_ascii(text.text) || is_normal(text.text, form)) return;
  const bool compatible = form == NormalForm::kNfkc || form == NormalForm::kNfkd;
  const std::vector<ChangedChar> parts = Decomposition(compatible).run(text.text);
  rewrite_all(text, origin, [&](Rewrite& rewrite) {
    if (form == NormalForm::kNfc || form == NormalForm::kNfkc) return put_composed(parts, rewrite);
    for (const ChangedChar& part : parts) rewrite.put(part.value, part.change);
  });
}

// ---- Kinds --------------------------------------------------------------------------------------

class FunctionNormalizer : public Normalizer {
 public:
  using Function = std::function<void(AlignedText&, uint32_t)>;
  explicit FunctionNormalizer(Function function) : function_(std::move(function)) {}
  void run(AlignedText& text, uint32_t origin) const override {
    function_(text, origin);
    text.check_growth();
  }

 private:
  Function function_;
};

void strip(AlignedText& text, uint32_t origin, bool left, bool right) {
  std::vector<char32_t> characters;
  for_each_character(text.text, [&](char32_t c) { characters.push_back(c); });
  size_t begin = 0, end = characters.size();
  while (left && begin < end && is_white_space(characters[begin])) ++begin;
  // A text of white space alone goes from the left.
  while (right && end > begin && is_white_space(characters[end - 1])) --end;
  if (begin == 0 && end == characters.size()) return;
  rewrite_all(text, origin, [&](Rewrite& rewrite) {
    rewrite.skip(begin);
    for (size_t i = begin; i < end; ++i) rewrite.put(characters[i], 0);
  });
}

void prepend(AlignedText& text, uint32_t origin, std::string_view prefix) {
  if (text.text.empty()) return;
  rewrite_all(text, origin, [&](Rewrite& rewrite) {
    int64_t change = 0;
    for_each_character(prefix, [&](char32_t c) { rewrite.put(c, std::exchange(change, 1)); });
    // The first character has its own place still, as the last of what took its place.
    bool first = true;
    for_each_character(text.text, [&](char32_t c) {
      rewrite.put(c, std::exchange(first, false) && change == 1 ? 1 : 0);
    });
  });
}

void replace(AlignedText& text, uint32_t origin, const Pattern& pattern, std::string_view content) {
  std::vector<Cut> cuts;
  pattern.find(text.text, cuts);
  if (std::none_of(cuts.begin(), cuts.end(), [](const Cut& cut) { return cut.is_match; })) return;
  AlignedText out = AlignedText::like(text);
  out.text.reserve(text.text.size());
  for (const Cut& cut : cuts) {
    if (!cut.is_match) {
      out.append_part(text, cut.begin, cut.end);
      continue;
    }
    // New characters have the place of the last one that went.
    out.text += content;
    out.check_growth();
    if (!text.tracked) continue;
    const ByteSpan span = cut.end > 0 ? text.spans[cut.end - 1] : ByteSpan{origin, origin};
    out.spans.insert(out.spans.end(), content.size(), span);
  }
  text = std::move(out);
}

struct BertOptions {
  bool clean = true, ideographs = true, strip_accents = true, lowercase = true;
};

bool is_bert_control(char32_t c) {
  if (c == '\t' || c == '\n' || c == '\r') return false;
  return is_package_control(c);
}
// The package's range begins with U+2B920, where BERT's own begins with U+2B820.
bool is_bert_ideograph(char32_t c) {
  return is_cjk_ideograph(c) && !(c >= 0x2B820 && c <= 0x2B91F);
}

void run_bert(AlignedText& text, uint32_t origin, const BertOptions& options) {
  if (is_ascii(text.text)) {  // as below, and nothing to decompose
    if (options.clean) {
      const auto dropped = [](char c) {
        return (c >= 0 && c < 32 && c != '\t' && c != '\n' && c != '\r') || c == 127;
      };
      if (std::any_of(text.text.begin(), text.text.end(), dropped)) {
        filter(text, origin, [&](char32_t c) { return !dropped(static_cast<char>(c)); });
      }
      for (char& c : text.text) {
        if (c == '\t' || c == '\n' || c == '\r') c = ' ';
      }
    }
    if (options.lowercase) lower(text, origin);
    return;
  }
  if (options.clean) {
    filter(text, origin, [](char32_t c) { return c != 0 && c != 0xFFFD && !is_bert_control(c); });
    map_characters(text, origin, [](char32_t c) { return is_white_space(c) ? U' ' : c; });
  }
  if (options.ideographs) {
    rewrite_all(text, origin, [&](Rewrite& rewrite) {
      for_each_character(text.text, [&](char32_t c) {
        if (!is_bert_ideograph(c)) return rewrite.put(c, 0);
        rewrite.put(' ', 0);
        rewrite.put(c, 1);
        rewrite.put(' ', 1);
      });
    });
  }
  if (options.strip_accents) {
    normalize(text, origin, NormalForm::kNfd);
    filter(text, origin, [](char32_t c) { return !is_package_nonspacing_mark(c); });
  }
  if (options.lowercase) lower(text, origin);
}

void run_nmt(AlignedText& text, uint32_t origin) {
  filter(text, origin, [](char32_t c) {
    return !((c >= 1 && c <= 8) || c == 0xB || (c >= 0xE && c <= 0x1F) || c == 0x7F || c == 0x8F ||
             c == 0x9F);
  });
  map_characters(text, origin, [](char32_t c) {
    const bool space = c == 9 || c == 0xA || c == 0xC || c == 0xD || c == 0x1680 ||
                       (c >= 0x200B && c <= 0x200F) || c == 0x2028 || c == 0x2029 || c == 0x2581 ||
                       c == 0xFEFF || c == 0xFFFD;
    return space ? U' ' : c;
  });
}

FunctionNormalizer::Function read_function(JsonFields& fields, const std::string& type) {
  constexpr std::pair<std::string_view, NormalForm> kForms[] = {{"NFC", NormalForm::kNfc},
                                                                {"NFD", NormalForm::kNfd},
                                                                {"NFKC", NormalForm::kNfkc},
                                                                {"NFKD", NormalForm::kNfkd}};
  for (const auto& [name, form] : kForms) {
    if (type != name) continue;
    return [form = form](AlignedText& text, uint32_t origin) { normalize(text, origin, form); };
  }
  if (type == "Lowercase") return lower;
  if (type == "Nmt") return run_nmt;
  if (type == "StripAccents") {
    return [](AlignedText& text, uint32_t origin) {
      if (is_ascii(text.text)) return;
      filter(text, origin, [](char32_t c) { return !is_package_mark(c); });
    };
  }
  if (type == "Strip") {
    const bool left = fields.flag("strip_left"), right = fields.flag("strip_right");
    return [=](AlignedText& text, uint32_t origin) { strip(text, origin, left, right); };
  }
  if (type == "Prepend") {
    return [prefix = fields.text("prepend")](AlignedText& text, uint32_t origin) {
      prepend(text, origin, prefix);
    };
  }
  if (type == "Replace") {
    auto pattern = std::make_shared<Pattern>(fields.at("pattern"), fields.place() + ".pattern");
    return [pattern, content = fields.text("content")](AlignedText& text, uint32_t origin) {
      replace(text, origin, *pattern, content);
    };
  }
  if (type == "ByteLevel") {
    return [](AlignedText& text, uint32_t origin) {
      AlignedText out = AlignedText::like(text);
      write_byte_chars(text, 0, text.text.size(), origin, out);
      text = std::move(out);
    };
  }
  if (type == "BertNormalizer") {
    BertOptions options;
    options.clean = fields.flag("clean_text");
    options.ideographs = fields.flag("handle_chinese_chars");
    options.lowercase = fields.flag("lowercase");
    options.strip_accents = fields.flag("strip_accents", options.lowercase);
    return [=](AlignedText& text, uint32_t origin) { run_bert(text, origin, options); };
  }
  if (type == "Precompiled") {
    auto charsmap = std::make_shared<Charsmap>(fields.text("precompiled_charsmap"), fields.place());
    return [charsmap](AlignedText& text, uint32_t origin) {
      std::vector<CharChange> changes;
      if (!charsmap->run(text.text, text.most_bytes, changes)) return;
      rewrite_all(text, origin, [&](Rewrite& rewrite) {
        for (const CharChange& c : changes) rewrite.put(c.value, c.change);
      });
    };
  }
  if (type == "Sequence") {
    std::vector<std::shared_ptr<const Normalizer>> steps;
    for (const Json& step : fields.array("normalizers")) {
      steps.push_back(read_normalizer(
          step, fields.place() + ".normalizers[" + std::to_string(steps.size()) + "]"));
    }
    return [steps = std::move(steps)](AlignedText& text, uint32_t origin) {
      for (const auto& step : steps) step->run(text, origin);
    };
  }
  fields.refuse("the type '" + type + "'");
}

}  // namespace

std::unique_ptr<Normalizer> read_normalizer(const Json& value, const std::string& place) {
  JsonFields fields(value, place);
  const std::string type = fields.text("type");
  auto function = read_function(fields, type);
  fields.finish();
  return std::make_unique<FunctionNormalizer>(std::move(function));
}

void write_byte_chars(const AlignedText& source, size_t begin, size_t end, uint32_t origin,
                      AlignedText& out) {
  Rewrite rewrite(source, begin, end, origin, out);
  for (size_t place = begin; place < end;) {
    const uint32_t length = decode_utf8(source.text, place).length;
    for (uint32_t i = 0; i < length; ++i) {
      const auto byte = static_cast<unsigned char>(source.text[place + i]);
      rewrite.put(kCharOfByte[byte], i == 0 ? 0 : 1);
    }
    place += length;
  }
}

}  // namespace tessera::data
