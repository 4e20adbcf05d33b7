#include <tessera/data/tokenizer_json/patterns.h>

#include <algorithm>
#include <array>
#include <cctype>

#include <tessera/core/error.h>
#include <tessera/data/text/gpt2_pattern.h>
#include <tessera/data/text/text.h>

namespace tessera::data {
namespace {

// A text of a million characters that a class has to give back one by one takes so many.
constexpr uint32_t kMostSteps = 10'000'000;

constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// Inside of a class: Unicode's White_Space, without U+180E, which PCRE2 counts; Alphabetic, marks,
// decimal digits and connectors.
constexpr std::string_view kSpaces =
    R"(\x{9}-\x{d}\x{20}\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";
constexpr std::string_view kWordCharacters = R"(\p{Alphabetic}\p{M}\p{Nd}\p{Pc})";

constexpr std::array<std::string_view, 38> kCategories = {
    "L",  "Lu", "Ll", "Lt", "Lm", "Lo", "M",  "Mn", "Mc", "Me", "N",  "Nd", "Nl",
    "No", "P",  "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "S",  "Sm", "Sc", "Sk",
    "So", "Z",  "Zs", "Zl", "Zp", "C",  "Cc", "Cf", "Cs", "Co", "Cn", "L&"};

class Translator {
 public:
  Translator(std::string_view pattern, const std::string& place)
      : pattern_(pattern), place_(place) {}

  std::string run() {
    while (at_ < pattern_.size()) {
      const char c = pattern_[at_];
      if (c == '\\') {
        escape(false);
      } else if (c == '[') {
        character_class();
      } else if (c == '(') {
        group();
      } else if (c == '{') {
        repetition();
      } else if (c == '^' || c == '$') {
        refuse("the anchor '" + std::string(1, c) + "'");
      } else if (c == '.') {
        out_ += "[^\\n]";
        ++at_;
      } else {
        out_ += c;
        ++at_;
      }
    }
    return std::move(out_);
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    TS_THROW(UnsupportedError, kPretrained, place_, " is '", pattern_.substr(0, 200), "', and ",
             replace_invalid_utf8(what), " of expressions is not known here; ids could be others.");
  }

  void escape(bool in_class) {
    if (at_ + 1 >= pattern_.size()) refuse("a backslash at the end");
    const char c = pattern_[at_ + 1];
    at_ += 2;
    switch (c) {
      case 's':
        out_ += in_class ? std::string(kSpaces) : "[" + std::string(kSpaces) + "]";
        return;
      case 'w':
        out_ += in_class ? std::string(kWordCharacters) : "[" + std::string(kWordCharacters) + "]";
        return;
      case 'h':
        out_ += in_class ? "0-9a-fA-F" : "[0-9a-fA-F]";
        return;
      case 'S':
      case 'W':
      case 'H':
        if (in_class) refuse(std::string("\\") + c + " in a class");
        out_ += c == 'S'   ? "[^" + std::string(kSpaces) + "]"
                : c == 'W' ? "[^" + std::string(kWordCharacters) + "]"
                           : "[^0-9a-fA-F]";
        return;
      case 'p':
      case 'P':
        property(c);
        return;
      case 'x':
        code_point();
        return;
      case 'd':
      case 'D':
      case 'n':
      case 'r':
      case 't':
      case 'f':
        out_ += '\\';
        out_ += c;
        return;
      case 'v':
        out_ += "\\x{b}";
        return;
      default:
        if ((c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
            static_cast<unsigned char>(c) >= 0x80) {
          refuse(std::string("\\") + c);
        }
        out_ += '\\';
        out_ += c;
    }
  }

  void property(char kind) {
    const size_t end = pattern_.find('}', at_);
    if (at_ >= pattern_.size() || pattern_[at_] != '{' || end == pattern_.npos) {
      refuse("a property without braces");
    }
    std::string_view name = pattern_.substr(at_ + 1, end - at_ - 1);
    at_ = end + 1;
    const bool inverted = name.starts_with('^');
    if (inverted) name.remove_prefix(1);
    const bool category =
        std::find(kCategories.begin(), kCategories.end(), name) != kCategories.end();
    const bool letters = !name.empty() && std::all_of(name.begin(), name.end(), [](char c) {
      return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
    });
    if (!category && !letters) refuse("the property '" + std::string(name) + "'");
    out_ += '\\';
    out_ += inverted ? (kind == 'p' ? 'P' : 'p') : kind;
    // A name by itself would take PCRE2 to the characters that other scripts use, too.
    out_ += category ? "{" + std::string(name) + "}" : "{sc:" + std::string(name) + "}";
  }

  void code_point() {
    size_t end = at_;
    if (at_ < pattern_.size() && pattern_[at_] == '{') {
      end = pattern_.find('}', at_);
      if (end == pattern_.npos) refuse("\\x without an end");
      out_ += "\\x" + std::string(pattern_.substr(at_, end + 1 - at_));
      at_ = end + 1;
      return;
    }
    while (end < pattern_.size() && end < at_ + 2 &&
           std::isxdigit(static_cast<unsigned char>(pattern_[end])) != 0)
      ++end;
    const std::string digits(pattern_.substr(at_, end - at_));
    if (digits.empty() || std::stoi(digits, nullptr, 16) >= 0x80) refuse("\\x of a byte");
    out_ += "\\x{" + digits + "}";
    at_ = end;
  }

  void character_class() {
    out_ += '[';
    ++at_;
    if (at_ < pattern_.size() && pattern_[at_] == '^') {
      out_ += '^';
      ++at_;
    }
    if (at_ < pattern_.size() && pattern_[at_] == ']') refuse("a class that begins with ']'");
    for (; at_ < pattern_.size() && pattern_[at_] != ']';) {
      const char c = pattern_[at_];
      if (c == '\\') {
        escape(true);
      } else if (c == '[') {
        refuse("a class in a class");
      } else if (c == '&' && at_ + 1 < pattern_.size() && pattern_[at_ + 1] == '&') {
        refuse("an intersection of classes");
      } else {
        out_ += c;
        ++at_;
      }
    }
    if (at_ >= pattern_.size()) refuse("a class without an end");
    out_ += ']';
    ++at_;
  }

  void group() {
    constexpr std::array<std::string_view, 7> kKnown = {
        "(?:", "(?=", "(?!", "(?<=", "(?<!", "(?i:", "(?>"};
    for (const std::string_view known : kKnown) {
      if (!pattern_.substr(at_).starts_with(known)) continue;
      out_ += known;
      at_ += known.size();
      return;
    }
    if (pattern_.substr(at_).starts_with("(?")) {
      refuse("the group '" + std::string(pattern_.substr(at_, 4)) + "'");
    }
    if (pattern_.substr(at_).starts_with("(*")) refuse("'(*'");
    out_ += "(?:";  // what a group holds is not asked for
    ++at_;
  }

  // {n}, {n,}, {n,m}, and no more: {,m} and a + behind it are other things to PCRE2.
  void repetition() {
    const size_t end = pattern_.find('}', at_);
    const std::string_view inside =
        end == pattern_.npos ? std::string_view() : pattern_.substr(at_ + 1, end - at_ - 1);
    const bool numbers = !inside.empty() && inside[0] >= '0' && inside[0] <= '9' &&
                         std::all_of(inside.begin(), inside.end(),
                                     [](char c) { return (c >= '0' && c <= '9') || c == ','; }) &&
                         std::count(inside.begin(), inside.end(), ',') <= 1;
    if (!numbers) refuse("'{' that begins no number of times");
    if (end + 1 < pattern_.size() && (pattern_[end + 1] == '+' || pattern_[end + 1] == '?')) {
      refuse(std::string("'}") + pattern_[end + 1] + "'");
    }
    out_ += pattern_.substr(at_, end + 1 - at_);
    at_ = end + 1;
  }

  std::string_view pattern_;
  const std::string& place_;
  size_t at_ = 0;
  std::string out_;
};

}  // namespace

std::string translate_pattern(std::string_view oniguruma, const std::string& place) {
  return Translator(oniguruma, place).run();
}

Pattern::Pattern(const Json& value, const std::string& place) {
  JsonFields fields(value, place);
  if (const std::optional<std::string> text = fields.optional_text("String")) {
    literal_ = *text;
    TS_CHECK_AS(UnsupportedError, !literal_.empty(), kPretrained, place,
                " is an empty text, which matches everywhere and is not known here.");
  } else {
    const std::string pattern = fields.text("Regex");
    is_gpt2_ = pattern == kGpt2Pattern;
    if (!is_gpt2_) {
      regex_ = std::make_unique<Regex>(
          translate_pattern(pattern, place), std::string(kPretrained) + ": " + place,
          RegexOptions{.unicode = true, .most_steps = kMostSteps, .many_matches = true});
    }
  }
  fields.finish();
}

void Pattern::find(std::string_view text, std::vector<Cut>& cuts) const {
  const auto size = static_cast<uint32_t>(text.size());
  uint32_t last = 0;
  const auto match = [&](size_t begin, size_t end) {
    if (last < begin) cuts.push_back({last, static_cast<uint32_t>(begin), false});
    last = static_cast<uint32_t>(end);
    cuts.push_back({static_cast<uint32_t>(begin), last, true});
  };
  if (text.empty()) return;
  if (is_gpt2_) {
    for (size_t start = 0; start < size;) {
      const size_t end = end_of_gpt2_piece(text, start);
      match(start, end);
      start = end;
    }
  } else if (regex_ != nullptr) {
    regex_->for_each_match(text, match);
  } else {
    for (size_t at = text.find(literal_); at != text.npos; at = text.find(literal_, last)) {
      match(at, at + literal_.size());
    }
  }
  if (last < size) cuts.push_back({last, size, false});
}

}  // namespace tessera::data
