#include <tessera/data/tokenizer_json/package_categories.h>

#include <tessera/data/text/unicode.h>

namespace tessera::data {
namespace {

bool in_unicode_8(char32_t c) { return assigned_in(c) <= 800; }

}  // namespace

bool is_package_control(char32_t c) { return is_control(c) && in_unicode_8(c); }

bool is_package_punctuation(char32_t c) {
  if (c == 0x166D || c == 0x111C9) return true;
  return is_punctuation(c) && in_unicode_8(c);
}

bool is_package_nonspacing_mark(char32_t c) {
  if (c == 0x1734) return true;
  const bool other_then = c == 0x1885 || c == 0x1886 || c == 0xA9BD || c == 0x111C9;
  return is_nonspacing_mark(c) && !other_then && in_unicode_8(c);
}

bool is_package_mark(char32_t c) {
  if (c == 0x1CF2 || c == 0x1CF3) return true;
  return is_mark(c) && c != 0x111C9 && is_package_normalized(c);
}

bool is_package_normalized(char32_t c) { return assigned_in(c) <= 900; }

}  // namespace tessera::data
