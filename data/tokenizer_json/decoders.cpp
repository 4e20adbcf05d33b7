#include <tessera/data/tokenizer_json/decoders.h>

#include <memory>
#include <optional>
#include <utility>

#include <tessera/core/error.h>
#include <tessera/data/text/byte_chars.h>
#include <tessera/data/text/text.h>
#include <tessera/data/tokenizer_json/patterns.h>

namespace tessera::data {
namespace {

// A text may become so many times as long, and by so many bytes more.
constexpr size_t kMostDecodedGrowth = 16, kMostDecodedBytes = size_t{1} << 20;

void check_decoded(size_t bytes, size_t from) {
  TS_CHECK_AS(FormatError, bytes <= kMostDecodedGrowth * from + kMostDecodedBytes, kPretrained,
              "what the file's decoder makes of ", from, " bytes of tokens has more than ",
              kMostDecodedGrowth * from + kMostDecodedBytes,
              " bytes; the file is damaged or hostile: get it again.");
}

using Tokens = std::vector<std::string>;

std::string replace_all(std::string_view text, std::string_view from, std::string_view to) {
  if (from.empty()) return std::string(text);
  std::string out;
  for (;;) {
    const size_t at = text.find(from);
    out += text.substr(0, at);
    if (at == text.npos) return out;
    out += to;
    text.remove_prefix(at + from.size());
  }
}

void join(Tokens& tokens) {
  std::string all;
  for (const std::string& token : tokens) all += token;
  tokens.assign(1, std::move(all));
}

void decode_byte_level(Tokens& tokens) {
  for (std::string& token : tokens) {
    if (std::optional<std::string> bytes = bytes_of(token)) token = std::move(*bytes);
  }
  join(tokens);
  tokens[0] = replace_invalid_utf8(tokens[0]);
}

int hexadecimal(char c) {
  return c >= '0' && c <= '9'   ? c - '0'
         : c >= 'A' && c <= 'F' ? c - 'A' + 10
         : c >= 'a' && c <= 'f' ? c - 'a' + 10
                                : -1;
}

// <0x0A> to its byte. Runs of them that are not UTF-8 are a U+FFFD for each byte.
void decode_byte_fallback(Tokens& tokens) {
  Tokens out;
  std::string bytes;
  const auto flush = [&] {
    if (bytes.empty()) return;
    if (find_invalid_utf8(bytes)) {
      for (size_t i = 0; i < bytes.size(); ++i) out.push_back("\xEF\xBF\xBD");
    } else {
      out.push_back(bytes);
    }
    bytes.clear();
  };
  for (std::string& token : tokens) {
    if (token.size() == 6 && token.starts_with("<0x") && token[5] == '>') {
      const int high = hexadecimal(token[3]), low = hexadecimal(token[4]);
      // The package reads a sign there, too.
      const int value = token[3] == '+' ? low : high < 0 || low < 0 ? -1 : 16 * high + low;
      if (value >= 0) {
        bytes += static_cast<char>(value);
        continue;
      }
    }
    flush();
    out.push_back(std::move(token));
  }
  flush();
  tokens = std::move(out);
}

std::string clean_word_piece(std::string text) {
  constexpr std::pair<std::string_view, std::string_view> kRules[] = {
      {" .", "."},   {" ?", "?"},     {" !", "!"},    {" ,", ","},
      {" ' ", "'"},  {" n't", "n't"}, {" 'm", "'m"},  {" do not", " don't"},
      {" 's", "'s"}, {" 've", "'ve"}, {" 're", "'re"}};
  for (const auto& [from, to] : kRules) text = replace_all(text, from, to);
  return text;
}

Decoder read_metaspace(JsonFields& fields) {
  std::string replacement;
  append_utf8(fields.character("replacement"), replacement);
  const std::string scheme = fields.optional_text("prepend_scheme").value_or("always");
  if (scheme != "always" && scheme != "first" && scheme != "never") {
    fields.refuse("the prepend_scheme '" + scheme + "'");
  }
  const bool prefix = fields.flag("add_prefix_space", true) && scheme != "never";
  fields.ignore({"split", "str_rep"});
  return [=](Tokens& tokens) {
    for (size_t i = 0; i < tokens.size(); ++i) {
      tokens[i] = replace_all(tokens[i], replacement, i == 0 && prefix ? "" : " ");
    }
  };
}

Decoder read_strip(JsonFields& fields) {
  std::string content;
  append_utf8(fields.character("content"), content);
  const int64_t start = fields.number("start"), stop = fields.number("stop");
  return [=](Tokens& tokens) {
    for (std::string& token : tokens) {
      std::string_view rest = token;
      for (int64_t i = 0; i < start && rest.starts_with(content); ++i) {
        rest.remove_prefix(content.size());
      }
      for (int64_t i = 0; i < stop && rest.ends_with(content); ++i) {
        rest.remove_suffix(content.size());
      }
      token = std::string(rest);
    }
  };
}

Decoder read_decoder_kind(JsonFields& fields) {
  const std::string type = fields.text("type");
  if (type == "ByteLevel") {
    fields.ignore({"add_prefix_space", "trim_offsets", "use_regex"});
    return decode_byte_level;
  }
  if (type == "ByteFallback") return decode_byte_fallback;
  if (type == "Fuse") return join;
  if (type == "Metaspace") return read_metaspace(fields);
  if (type == "Strip") return read_strip(fields);
  if (type == "Replace") {
    auto pattern = std::make_shared<Pattern>(fields.at("pattern"), fields.place() + ".pattern");
    return [pattern, content = fields.text("content")](Tokens& tokens) {
      std::vector<Cut> cuts;
      for (std::string& token : tokens) {
        cuts.clear();
        pattern->find(token, cuts);
        std::string out;
        for (const Cut& cut : cuts) {
          out += cut.is_match ? content : token.substr(cut.begin, cut.end - cut.begin);
          check_decoded(out.size(), token.size());
        }
        token = std::move(out);
      }
    };
  }
  if (type == "WordPiece") {
    return [prefix = fields.text("prefix"), clean = fields.flag("cleanup")](Tokens& tokens) {
      for (size_t i = 0; i < tokens.size(); ++i) {
        if (i > 0) {
          tokens[i] =
              tokens[i].starts_with(prefix) ? tokens[i].substr(prefix.size()) : " " + tokens[i];
        }
        if (clean) tokens[i] = clean_word_piece(std::move(tokens[i]));
      }
    };
  }
  if (type == "BPEDecoder") {
    return [suffix = fields.text("suffix")](Tokens& tokens) {
      for (size_t i = 0; i < tokens.size(); ++i) {
        tokens[i] = replace_all(tokens[i], suffix, i + 1 == tokens.size() ? "" : " ");
      }
    };
  }
  if (type == "Sequence") {
    std::vector<Decoder> steps;
    for (const Json& step : fields.array("decoders")) {
      steps.push_back(
          read_decoder(step, fields.place() + ".decoders[" + std::to_string(steps.size()) + "]"));
    }
    return [steps = std::move(steps)](Tokens& tokens) {
      const auto bytes = [&] {
        size_t sum = 0;
        for (const std::string& token : tokens) sum += token.size();
        return sum;
      };
      const size_t before = bytes();
      for (const Decoder& step : steps) {
        step(tokens);
        check_decoded(bytes(), before);
      }
    };
  }
  fields.refuse("the type '" + type + "'");
}

}  // namespace

Decoder read_decoder(const Json& value, const std::string& place) {
  JsonFields fields(value, place);
  Decoder decoder = read_decoder_kind(fields);
  fields.finish();
  return decoder;
}

}  // namespace tessera::data
