// Regular expressions of settings and of files that come from elsewhere, which cannot run away: the
// pattern, the steps of a match and its memory are bounded. The syntax is Perl's, by PCRE2, of
// which the one of Python's re is a part but for rare escapes.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace tessera {

class Regex {
 public:
  // A name says where the pattern comes from, in errors. ConfigError: no regular expression, or one
  // of more than 4096 bytes, 64 levels of parentheses or 64 KiB when it is compiled.
  Regex(std::string_view pattern, std::string name);
  ~Regex();
  Regex(Regex&&) noexcept;
  Regex& operator=(Regex&&) noexcept;

  // Whether it matches the whole text, as Python's fullmatch. ConfigError where that takes more than
  // a hundred thousand steps. Threads may share it.
  bool matches(std::string_view text) const;
  // What the group of this name, which the pattern has, matches where the pattern matches a
  // beginning of the text (Python's match); nothing where it does not.
  std::optional<std::string> group(std::string_view text, const char* name) const;

 private:
  struct Compiled;
  std::unique_ptr<Compiled> compiled_;
};

}  // namespace tessera
