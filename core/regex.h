// Regular expressions of settings and of files that come from elsewhere, which cannot run away: the
// pattern, the steps of a match and its memory are bounded. The syntax is Perl's, by PCRE2, of
// which the one of Python's re is a part but for rare escapes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace tessera {

struct RegexOptions {
  bool unicode = false;  // \d and caseless letters by Unicode's properties
  // The limit for one match takes some milliseconds; names of modules need some hundred steps.
  uint32_t most_steps = 100'000;
  // For for_each_match() in long texts: uses machine code if PCRE2 can, and does not check UTF-8.
  bool many_matches = false;
};

class Regex {
 public:
  // Errors name the pattern by `name`. ConfigError if it is not a regular expression, or has more
  // than 4096 bytes, 64 levels of parentheses or 64 KiB when compiled.
  Regex(std::string_view pattern, std::string name, const RegexOptions& options = {});
  ~Regex();
  Regex(Regex&&) noexcept;
  Regex& operator=(Regex&&) noexcept;

  // Whether it matches the whole text, as Python's fullmatch. ConfigError if that takes more than
  // most_steps. Threads may share it.
  bool matches(std::string_view text) const;
  // The text of the named group, which must exist, if the pattern matches a beginning of the text
  // (Python's match); otherwise nothing.
  std::optional<std::string> group(std::string_view text, const char* name) const;
  // Calls visit(begin, end) for each match from the left, without overlap. An empty match at the
  // end of the previous one is skipped. The text must be valid UTF-8. ConfigError as above.
  void for_each_match(std::string_view text,
                      const std::function<void(size_t, size_t)>& visit) const;

 private:
  struct Compiled;
  std::unique_ptr<Compiled> compiled_;
};

}  // namespace tessera
