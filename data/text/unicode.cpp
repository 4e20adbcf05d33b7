#include <tessera/data/text/unicode.h>

#include <unicode/brkiter.h>
#include <unicode/bytestream.h>
#include <unicode/locid.h>
#include <unicode/normalizer2.h>
#include <unicode/uchar.h>
#include <unicode/unistr.h>
#include <unicode/utext.h>

#include <limits>
#include <memory>

#include <tessera/core/error.h>
#include <tessera/data/text/text.h>

namespace tessera::data {
namespace {

bool in_category(char32_t c, uint32_t mask) {
  return (U_MASK(u_charType(static_cast<UChar32>(c))) & mask) != 0;
}

void check_icu(UErrorCode status, std::string_view where) {
  TS_CHECK_AS(Error, U_SUCCESS(status), where, "ICU failed: ", u_errorName(status),
              "; is its data installed?");
}

const icu::Normalizer2& normalizer(NormalForm form) {
  UErrorCode status = U_ZERO_ERROR;
  const icu::Normalizer2* found = nullptr;
  switch (form) {
    case NormalForm::kNfc:
      found = icu::Normalizer2::getNFCInstance(status);
      break;
    case NormalForm::kNfd:
      found = icu::Normalizer2::getNFDInstance(status);
      break;
    case NormalForm::kNfkc:
      found = icu::Normalizer2::getNFKCInstance(status);
      break;
    case NormalForm::kNfkd:
      found = icu::Normalizer2::getNFKDInstance(status);
      break;
  }
  check_icu(status, "normalizer");
  return *found;
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

bool is_white_space(char32_t c) { return u_isUWhiteSpace(static_cast<UChar32>(c)); }
bool is_mark(char32_t c) { return in_category(c, U_GC_M_MASK); }
bool is_word_character(char32_t c) {
  const auto code = static_cast<UChar32>(c);
  return u_isUAlphabetic(code) || in_category(c, U_GC_M_MASK | U_GC_ND_MASK | U_GC_PC_MASK) ||
         u_hasBinaryProperty(code, UCHAR_JOIN_CONTROL);
}
int assigned_in(char32_t c) {
  UVersionInfo version = {};
  u_charAge(static_cast<UChar32>(c), version);
  return version[0] * 100 + version[1];
}

std::string decompose(std::string_view text) {
  UErrorCode status = U_ZERO_ERROR;
  std::string out;
  icu::StringByteSink<std::string> sink(&out, static_cast<int32_t>(text.size()));
  normalizer(NormalForm::kNfd)
      .normalizeUTF8(0, icu::StringPiece(text.data(), static_cast<int32_t>(text.size())), sink,
                     nullptr, status);
  check_icu(status, "decompose");
  return out;
}

bool is_normal(std::string_view text, NormalForm form) {
  // ICU counts in 32 bits.
  if (text.size() > size_t{std::numeric_limits<int32_t>::max()}) return false;
  UErrorCode status = U_ZERO_ERROR;
  const icu::StringPiece piece(text.data(), static_cast<int32_t>(text.size()));
  const bool normal = normalizer(form).isNormalizedUTF8(piece, status);
  check_icu(status, "is_normal");
  return normal;
}

uint8_t combining_class(char32_t c) { return u_getCombiningClass(static_cast<UChar32>(c)); }

void decompose(char32_t c, bool compatible, const std::function<void(char32_t)>& visit) {
  icu::UnicodeString parts;
  const NormalForm form = compatible ? NormalForm::kNfkd : NormalForm::kNfd;
  if (!normalizer(form).getDecomposition(static_cast<UChar32>(c), parts)) return visit(c);
  for (int32_t i = 0; i < parts.length(); i = parts.moveIndex32(i, 1)) {
    visit(static_cast<char32_t>(parts.char32At(i)));
  }
}

std::optional<char32_t> compose(char32_t first, char32_t second) {
  const UChar32 both = normalizer(NormalForm::kNfc)
                           .composePair(static_cast<UChar32>(first), static_cast<UChar32>(second));
  if (both < 0) return std::nullopt;
  return static_cast<char32_t>(both);
}

std::vector<size_t> grapheme_ends(std::string_view text) {
  UErrorCode status = U_ZERO_ERROR;
  const std::unique_ptr<icu::BreakIterator> breaks(
      icu::BreakIterator::createCharacterInstance(icu::Locale::getRoot(), status));
  check_icu(status, "grapheme_ends");
  UText utf8 = UTEXT_INITIALIZER;
  utext_openUTF8(&utf8, text.data(), static_cast<int64_t>(text.size()), &status);
  breaks->setText(&utf8, status);
  std::vector<size_t> ends;
  breaks->first();
  for (int32_t end = breaks->next(); end != icu::BreakIterator::DONE; end = breaks->next()) {
    ends.push_back(static_cast<size_t>(end));
  }
  utext_close(&utf8);
  check_icu(status, "grapheme_ends");
  return ends;
}

void append_lower_case(char32_t c, std::string& out) {
  // The only code point whose lower case, taken alone, is two.
  if (c == 0x130) {
    out += "i\xCC\x87";
    return;
  }
  append_utf8(static_cast<char32_t>(u_tolower(static_cast<UChar32>(c))), out);
}

namespace {

std::string changed(std::string_view text,
                    icu::UnicodeString& (icu::UnicodeString::*change)(const icu::Locale&)) {
  icu::UnicodeString string = icu::UnicodeString::fromUTF8(
      icu::StringPiece(text.data(), static_cast<int32_t>(text.size())));
  std::string out;
  (string.*change)(icu::Locale::getRoot()).toUTF8String(out);
  return out;
}

int numeric_type(char32_t c) {
  return u_getIntPropertyValue(static_cast<UChar32>(c), UCHAR_NUMERIC_TYPE);
}

}  // namespace

std::string upper_case(std::string_view text) {
  return changed(text, &icu::UnicodeString::toUpper);
}
std::string lower_case(std::string_view text) {
  return changed(text, &icu::UnicodeString::toLower);
}

std::string title_case(std::string_view character) {
  if (character.empty()) return {};
  const auto c = static_cast<UChar32>(decode_utf8(character, 0).value);
  const UChar32 title = u_totitle(c);
  if (title == c)
    return upper_case(character) == character ? std::string(character) : [&] {
      // Several characters: the first is upper case, ß becomes Ss.
      const std::string upper = upper_case(character);
      const uint32_t first = decode_utf8(upper, 0).length;
      return upper.substr(0, first) + lower_case(std::string_view(upper).substr(first));
    }();
  std::string out;
  append_utf8(static_cast<char32_t>(title), out);
  return out;
}

bool is_cased(char32_t c) { return u_hasBinaryProperty(static_cast<UChar32>(c), UCHAR_CASED) != 0; }
bool is_upper(char32_t c) {
  return u_hasBinaryProperty(static_cast<UChar32>(c), UCHAR_UPPERCASE) != 0;
}
bool is_alphabetic(char32_t c) { return in_category(c, U_GC_L_MASK); }
bool is_digit(char32_t c) {
  return numeric_type(c) == U_NT_DECIMAL || numeric_type(c) == U_NT_DIGIT;
}
bool is_numeric(char32_t c) { return numeric_type(c) != U_NT_NONE; }
bool is_printable(char32_t c) {
  return c == ' ' || !in_category(c, U_GC_C_MASK | U_GC_Z_MASK | U_GC_CN_MASK);
}

}  // namespace tessera::data
