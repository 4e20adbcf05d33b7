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
  // Of one match: some milliseconds; names of modules take some hundred.
  uint32_t most_steps = 100'000;
  // For for_each_match() in long texts: machine code where PCRE2 makes it, texts are not checked.
  bool many_matches = false;
};

class Regex {
 public:
  // A name says where the pattern comes from, in errors. ConfigError: no regular expression, or one
  // of more than 4096 bytes, 64 levels of parentheses or 64 KiB when it is compiled.
  Regex(std::string_view pattern, std::string name, const RegexOptions& options = {});
  ~Regex();
  Regex(Regex&&) noexcept;
  Regex& operator=(Regex&&) noexcept;

  // Whether it matches the whole text, as Python's fullmatch. ConfigError if that takes more than
  // most_steps. Threads may share it.
  bool matches(std::string_view text) const;
  // What the group of this name, which the pattern has, matches where the pattern matches a
  // beginning of the text (Python's match); nothing where it does not.
  std::optional<std::string> group(std::string_view text, const char* name) const;
  // Calls visit(begin, end) for each match in the text, from the left; they do not overlap. An empty
  // match where the last one ended is passed over. The text must be valid UTF-8. ConfigError as above.
  void for_each_match(std::string_view text,
                      const std::function<void(size_t, size_t)>& visit) const;

 private:
  struct Compiled;
  std::unique_ptr<Compiled> compiled_;
};

}  // namespace tessera
