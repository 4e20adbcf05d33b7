#include <tessera/data/chat_template/lexer.h>

#include <algorithm>
#include <array>
#include <cctype>

#include <tessera/data/chat_template/value.h>
#include <tessera/data/text/text.h>
#include <tessera/data/text/unicode.h>

namespace tessera::data::jinja {
namespace {

// With \n at the ends of lines, and without the last of them.
std::string with_plain_lines(std::string_view source) {
  std::string text;
  text.reserve(source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] != '\r') {
      text += source[i];
      continue;
    }
    text += '\n';
    if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
  }
  if (text.ends_with('\n')) text.pop_back();
  return text;
}

bool is_decimal(char c) { return c >= '0' && c <= '9'; }

class Lexer {
 public:
  Lexer(std::string_view source, const std::string& name)
      : source_(with_plain_lines(source)), rest_(source_), name_(name) {}

  std::vector<LexerToken> run() {
    while (!rest_.empty()) read_data();
    tokens_.push_back({TokenKind::kEnd, line_, ""});
    return std::move(tokens_);
  }

 private:
  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    syntax_error(name_, line_, parts...);
  }

  // Goes on behind the next bytes.
  std::string_view take(size_t bytes) {
    const std::string_view taken = rest_.substr(0, bytes);
    line_ += static_cast<int>(std::count(taken.begin(), taken.end(), '\n'));
    if (!taken.empty()) line_starts_ = taken.back() == '\n';
    rest_.remove_prefix(bytes);
    return taken;
  }
  void skip_spaces() { take(rest_.size() - strip_spaces(rest_, true, false).size()); }
  void push(TokenKind kind, std::string_view text) {
    tokens_.push_back({kind, line_, std::string(text)});
  }

  // Text up to the next construct, and that.
  void read_data() {
    size_t begin = 0;
    do {
      begin = rest_.find('{', begin);
      if (begin == rest_.npos || begin + 1 == rest_.size()) {
        begin = rest_.npos;
        break;
      }
      const char next = rest_[begin + 1];
      if (next == '%' || next == '{' || next == '#') break;
      ++begin;
    } while (true);
    if (begin == rest_.npos) {
      push(TokenKind::kData, rest_);
      take(rest_.size());
      return;
    }
    const char kind = rest_[begin + 1];
    const char sign = begin + 2 < rest_.size() ? rest_[begin + 2] : ' ';
    const bool has_sign = sign == '-' || sign == '+';
    push_data(rest_.substr(0, begin), has_sign ? sign : ' ', kind != '{');
    take(begin + 2 + (has_sign ? 1 : 0));
    if (kind == '#') return read_comment();
    if (kind == '%' && read_raw()) return;
    push(kind == '%' ? TokenKind::kBlockBegin : TokenKind::kVariableBegin, "");
    read_code(kind == '%');
  }

  // What a sign or lstrip_blocks takes from a text before a construct.
  void push_data(std::string_view text, char sign, bool is_block) {
    if (sign == '-') {
      text = strip_spaces(text, false, true);
    } else if (sign != '+' && is_block) {
      const size_t newline = text.rfind('\n');
      const size_t line = newline == text.npos ? 0 : newline + 1;
      if ((line > 0 || line_starts_) && strip_spaces(text.substr(line), true, false).empty()) {
        text = text.substr(0, line);
      }
    }
    if (!text.empty()) push(TokenKind::kData, text);
  }

  // Goes behind the end of a construct, which begins the rest, with the white space that it takes.
  bool take_end(std::string_view end, bool trims) {
    if (rest_.starts_with('-') && rest_.substr(1).starts_with(end)) {
      take(1 + end.size());
      skip_spaces();
      return true;
    }
    if (trims && rest_.starts_with('+') && rest_.substr(1).starts_with(end)) {
      take(1 + end.size());
      return true;
    }
    if (!rest_.starts_with(end)) return false;
    take(end.size());
    if (trims && rest_.starts_with('\n')) take(1);
    return true;
  }

  void read_comment() {
    const size_t end = rest_.find("#}");
    if (end == rest_.npos) fail("a comment {# has no end; add #}.");
    const bool has_sign = end > 0 && (rest_[end - 1] == '-' || rest_[end - 1] == '+');
    take(has_sign ? end - 1 : end);
    take_end("#}", true);
  }

  // {% raw %}...{% endraw %}; false, and nothing is taken, for another block.
  bool read_raw() {
    std::string_view block = strip_spaces(rest_, true, false);
    if (!block.starts_with("raw")) return false;
    block = strip_spaces(block.substr(3), true, false);
    const bool strips = block.starts_with("-%}");
    if (!strips && !block.starts_with("%}")) return false;
    take(rest_.size() - block.size());
    take_end("%}", strips);
    size_t begin = 0;
    for (;; ++begin) {
      begin = rest_.find("{%", begin);
      if (begin == rest_.npos) fail("a block {% raw %} has no end; add {% endraw %}.");
      std::string_view end = rest_.substr(begin + 2);
      const char sign = !end.empty() && (end[0] == '-' || end[0] == '+') ? end[0] : ' ';
      if (sign != ' ') end.remove_prefix(1);
      end = strip_spaces(end, true, false);
      if (!end.starts_with("endraw")) continue;
      end = strip_spaces(end.substr(6), true, false);
      const bool ends = end.starts_with("%}") || end.starts_with("-%}") || end.starts_with("+%}");
      if (!ends) continue;
      push_data(rest_.substr(0, begin), sign, true);
      take(rest_.size() - end.size());
      take_end("%}", true);
      return true;
    }
  }

  void read_code(bool block) {
    const std::string_view end = block ? "%}" : "}}";
    std::string open;  // brackets
    for (;;) {
      if (open.empty() && take_end(end, block)) {
        push(block ? TokenKind::kBlockEnd : TokenKind::kVariableEnd, end);
        return;
      }
      const size_t before = rest_.size();
      skip_spaces();
      if (rest_.size() != before) continue;
      if (rest_.empty()) fail("a construct has no end; add ", end, ".");
      if (read_number() || read_name() || read_string()) continue;
      read_operator(open);
    }
  }

  bool read_number() {
    if (!is_decimal(rest_[0])) return false;
    const auto digits = [&](size_t place, auto&& fits) {  // with single _ between them
      size_t end = place;
      while (end < rest_.size() &&
             (fits(rest_[end]) || (rest_[end] == '_' && end > place && end + 1 < rest_.size() &&
                                   fits(rest_[end + 1])))) {
        ++end;
      }
      return end;
    };
    const bool after_dot = !tokens_.empty() && tokens_.back().text == "." &&
                           tokens_.back().kind == TokenKind::kOperator;
    size_t end = digits(0, is_decimal);
    bool is_float = false;
    if (!after_dot) {
      if (end + 1 < rest_.size() && rest_[end] == '.' && is_decimal(rest_[end + 1])) {
        end = digits(end + 1, is_decimal);
        is_float = true;
      }
      if (end < rest_.size() && (rest_[end] == 'e' || rest_[end] == 'E')) {
        size_t power = end + 1;
        if (power < rest_.size() && (rest_[power] == '+' || rest_[power] == '-')) ++power;
        if (power < rest_.size() && is_decimal(rest_[power])) {
          end = digits(power, is_decimal);
          is_float = true;
        }
      }
    }
    if (!is_float && rest_.size() > 1 && rest_[0] == '0' &&
        std::string_view("xXoObB").find(rest_[1]) != rest_.npos) {
      fail("numbers are decimal here; write '", rest_.substr(0, 8), "' so.");
    }
    if (!is_float && end > 1 && rest_[0] == '0' &&
        rest_.substr(0, end).find_first_not_of("0_") != rest_.npos) {
      fail("a number begins with 0; write it without.");
    }
    std::string text(rest_.substr(0, end));
    std::erase(text, '_');
    push(is_float ? TokenKind::kFloat : TokenKind::kInteger, text);
    take(end);
    return true;
  }

  bool read_name() {
    size_t end = 0;
    while (end < rest_.size()) {
      const CodePoint c = decode_utf8(rest_, end);
      const bool fits = c.value < 0x80 ? c.value == '_' || std::isalnum(static_cast<int>(c.value))
                                       : is_word_character(c.value);
      if (!fits) break;
      end += c.length;
    }
    if (end == 0) return false;
    push(TokenKind::kName, rest_.substr(0, end));
    take(end);
    return true;
  }

  bool read_string() {
    const char quote = rest_[0];
    if (quote != '\'' && quote != '"') return false;
    size_t end = 1;
    while (end < rest_.size() && rest_[end] != quote) end += rest_[end] == '\\' ? 2 : 1;
    if (end >= rest_.size()) fail("a text in quotes has no end; add ", quote, ".");
    push(TokenKind::kString, unescaped(rest_.substr(1, end - 1)));
    take(end + 1);
    return true;
  }

  std::string unescaped(std::string_view text) const {
    std::string out;
    for (size_t i = 0; i < text.size(); ++i) {
      if (text[i] != '\\' || i + 1 == text.size()) {
        out += text[i];
        continue;
      }
      constexpr std::string_view kLetters = "abfnrtv\\'\"", kValues = "\a\b\f\n\r\t\v\\'\"";
      const char c = text[++i];
      if (const size_t known = kLetters.find(c); known != kLetters.npos) {
        out += kValues[known];
        continue;
      }
      if (c == '\n') continue;
      if (c == 'N') fail("\\N{...} is not known in texts; write the character itself.");
      const size_t digits = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
      uint32_t value = 0;
      if (digits > 0) {
        size_t read = 0;
        for (; read < digits && i + 1 < text.size() &&
               std::isxdigit(static_cast<unsigned char>(text[i + 1]));
             ++read) {
          const char digit = text[++i];
          value = value * 16 +
                  static_cast<uint32_t>(is_decimal(digit) ? digit - '0' : (digit | 32) - 'a' + 10);
        }
        if (read < digits)
          fail("\\", c, " is followed by ", digits, " hexadecimal digits; it is not.");
      } else if (c >= '0' && c <= '7') {
        value = static_cast<uint32_t>(c - '0');
        for (int more = 0;
             more < 2 && i + 1 < text.size() && text[i + 1] >= '0' && text[i + 1] <= '7'; ++more) {
          value = value * 8 + static_cast<uint32_t>(text[++i] - '0');
        }
      } else {
        out += '\\';
        out += c;
        continue;
      }
      if (value > 0x10FFFF || (value >= 0xD800 && value < 0xE000)) {
        fail("a text has an escape that is no character; write another one.");
      }
      append_utf8(value, out);
    }
    return out;
  }

  void read_operator(std::string& open) {
    constexpr std::array<std::string_view, 26> kOperators = {
        "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[",
        "]",  "(",  ")",  "{",  "}",  ">",  "<", "=", ".", ":", "|", ",", ";"};
    const auto found = std::find_if(kOperators.begin(), kOperators.end(),
                                    [&](std::string_view op) { return rest_.starts_with(op); });
    if (found == kOperators.end()) {
      fail("'", rest_.substr(0, decode_utf8(rest_, 0).length), "' stands for nothing here.");
    }
    const char c = (*found)[0];
    if (c == '(' || c == '[' || c == '{') {
      open += c == '(' ? ')' : c == '[' ? ']' : '}';
    } else if (c == ')' || c == ']' || c == '}') {
      if (open.empty() || open.back() != c) fail("'", c, "' closes nothing.");
      open.pop_back();
    }
    push(TokenKind::kOperator, *found);
    take(found->size());
  }

  std::string source_;
  std::string_view rest_;
  const std::string& name_;
  std::vector<LexerToken> tokens_;
  int line_ = 1;
  bool line_starts_ = true;
};

}  // namespace

std::vector<LexerToken> read_tokens(std::string_view source, const std::string& name) {
  return Lexer(source, name).run();
}

}  // namespace tessera::data::jinja
