#include <tessera/core/message.h>

#include <charconv>
#include <sstream>

#include <tessera/core/plain_text.h>

namespace tessera::detail {
namespace {

template <class Number, class... Format>
void append_number(std::string& out, Number number, Format... format) {
  char digits[32];
  out.append(digits, std::to_chars(digits, digits + sizeof digits, number, format...).ptr);
}

}  // namespace

void MessagePart::write_text(std::string& out, const MessagePart& part) {
  out.append(static_cast<const char*>(part.value_.pointer), part.size_);
}

void MessagePart::write_letter(std::string& out, const MessagePart& part) {
  out += part.value_.letter;
}

void MessagePart::write_number(std::string& out, const MessagePart& part) {
  constexpr int kDigits = 6;
  append_number(out, part.value_.number, std::chars_format::general, kDigits);
}

void MessagePart::write_address(std::string& out, const MessagePart& part) {
  constexpr int kBase = 16;
  out += "0x";
  append_number(out, reinterpret_cast<uintptr_t>(part.value_.pointer), kBase);
}

void MessagePart::write_signed(std::string& out, const MessagePart& part) {
  append_number(out, static_cast<int64_t>(part.value_.bits));
}

void MessagePart::write_unsigned(std::string& out, const MessagePart& part) {
  append_number(out, part.value_.bits);
}

void MessagePart::write_streamed(std::string& out, const void* value,
                                 void (*stream)(std::ostream& out, const void* value)) {
  PlainText<std::ostringstream> text;
  stream(text, value);
  out += text.view();
}

std::string message_of(std::initializer_list<MessagePart> parts) {
  std::string text;
  for (const MessagePart& part : parts) part.append_to(text);
  return text;
}

}  // namespace tessera::detail
