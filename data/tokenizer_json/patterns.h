// The patterns of a tokenizer.json: texts, and regular expressions as Oniguruma reads them, which
// the tokenizers package uses. Included by this folder's .cpp files only.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/core/regex.h>
#include <tessera/data/tokenizer_json/aligned_text.h>
#include <tessera/data/tokenizer_json/json_fields.h>

namespace tessera::data {

// An expression in PCRE2's syntax that matches what Oniguruma's (of Ruby) matches: \s, \w, \h and
// scripts mean other characters there. UnsupportedError naming what is not translated: anchors, \b,
// classes in classes, references, named groups.
std::string translate_pattern(std::string_view oniguruma, const std::string& place);

class Pattern {
 public:
  // {"String": "..."} or {"Regex": "..."}.
  Pattern(const Json& value, const std::string& place);

  // Appends what covers the text: matches and what lies between them. ConfigError where one match
  // takes more than ten million steps.
  void find(std::string_view text, std::vector<Cut>& cuts) const;

 private:
  std::string literal_;
  std::unique_ptr<Regex> regex_;
  bool is_gpt2_ = false;  // the published one, for which there is a loop
};

// The same for characters: each one that fits is a match.
template <class Fits>
void find_characters(std::string_view text, std::vector<Cut>& cuts, Fits&& fits);

}  // namespace tessera::data

#include <tessera/data/text/text.h>

namespace tessera::data {

template <class Fits>
void find_characters(std::string_view text, std::vector<Cut>& cuts, Fits&& fits) {
  uint32_t last = 0;
  const auto size = static_cast<uint32_t>(text.size());
  for (uint32_t place = 0; place < size;) {
    const CodePoint c = decode_utf8(text, place);
    if (fits(c.value)) {
      if (last < place) cuts.push_back({last, place, false});
      last = place + c.length;
      cuts.push_back({place, last, true});
    }
    place += c.length;
  }
  if (last < size) cuts.push_back({last, size, false});
}

}  // namespace tessera::data
