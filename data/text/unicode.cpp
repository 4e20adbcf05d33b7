#include <tessera/data/text/unicode.h>

#include <unicode/bytestream.h>
#include <unicode/normalizer2.h>
#include <unicode/uchar.h>

#include <tessera/core/error.h>
#include <tessera/data/text/text.h>

namespace tessera::data {
namespace {

bool in_category(char32_t c, uint32_t mask) {
  return (U_MASK(u_charType(static_cast<UChar32>(c))) & mask) != 0;
}

}  // namespace

CharClass char_class(char32_t c) {
  if (c == kInvalidCodePoint) return CharClass::kOther;
  if (in_category(c, U_GC_L_MASK)) return CharClass::kLetter;
  if (in_category(c, U_GC_N_MASK)) return CharClass::kNumber;
  return u_isUWhiteSpace(static_cast<UChar32>(c)) ? CharClass::kSpace : CharClass::kOther;
}

bool is_control(char32_t c) {
  return in_category(c, U_GC_CC_MASK | U_GC_CF_MASK | U_GC_CO_MASK | U_GC_CS_MASK);
}
bool is_punctuation(char32_t c) { return in_category(c, U_GC_P_MASK); }
bool is_nonspacing_mark(char32_t c) { return in_category(c, U_GC_MN_MASK); }

bool is_cjk_ideograph(char32_t c) {
  const auto in = [c](char32_t first, char32_t last) { return c >= first && c <= last; };
  return in(0x4E00, 0x9FFF) || in(0x3400, 0x4DBF) || in(0x20000, 0x2A6DF) || in(0x2A700, 0x2B73F) ||
         in(0x2B740, 0x2B81F) || in(0x2B820, 0x2CEAF) || in(0xF900, 0xFAFF) || in(0x2F800, 0x2FA1F);
}

std::string decompose(std::string_view text) {
  UErrorCode status = U_ZERO_ERROR;
  const icu::Normalizer2* normalizer = icu::Normalizer2::getNFDInstance(status);
  std::string out;
  if (U_SUCCESS(status)) {
    icu::StringByteSink<std::string> sink(&out, static_cast<int32_t>(text.size()));
    normalizer->normalizeUTF8(0, icu::StringPiece(text.data(), static_cast<int32_t>(text.size())),
                              sink, nullptr, status);
  }
  TS_CHECK_AS(Error, U_SUCCESS(status), "decompose", "ICU failed: ", u_errorName(status),
              "; is its data installed?");
  return out;
}

void append_lower_case(char32_t c, std::string& out) {
  // The only code point whose lower case, taken alone, is two.
  if (c == 0x130) {
    out += "i\xCC\x87";
    return;
  }
  append_utf8(static_cast<char32_t>(u_tolower(static_cast<UChar32>(c))), out);
}

}  // namespace tessera::data
