// Text made of parts, for errors and reports.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iosfwd>
#include <string>
#include <string_view>
#include <type_traits>

namespace tessera::detail {

template <class T>
concept Describes = requires(const T& value) {
  { value.describe() } -> std::convertible_to<std::string_view>;
};

// One part of a message, whatever its type: where the value is, and the function that writes it. It
// must not outlive the value. Each check of the library makes a message: that its parts have one
// type spares the compiler a function for each combination, and the program their code.
//
// What can describe() itself stands in a message by that: a tensor as `dtype[shape] device`, not
// with its values, which may lie on a GPU or be many. Numbers are written as `std::cout` would.
class MessagePart {
 public:
  MessagePart(std::string_view text) : write_(write_text), size_(text.size()) {
    value_.pointer = text.data();
  }
  MessagePart(const char* text) : MessagePart(std::string_view(text)) {}
  MessagePart(const std::string& text) : MessagePart(std::string_view(text)) {}
  MessagePart(char letter) : write_(write_letter) { value_.letter = letter; }
  MessagePart(double number) : write_(write_number) { value_.number = number; }
  MessagePart(float number) : MessagePart(static_cast<double>(number)) {}

  MessagePart(const void* address) : write_(write_address) { value_.pointer = address; }

  template <class T>
  requires std::is_integral_v<T> &&(sizeof(T) > 1 || std::is_same_v<T, bool>)MessagePart(T integer)
      : write_(std::is_signed_v<T> ? write_signed : write_unsigned) {
    value_.bits = static_cast<uint64_t>(integer);
  }

  template <class T>
  requires std::is_class_v<T> || std::is_enum_v<T> MessagePart(const T& value)
      : write_(write_value<T>) {
    value_.pointer = &value;
  }

  void append_to(std::string& out) const { write_(out, *this); }

 private:
  using Write = void (*)(std::string& out, const MessagePart& part);

  static void write_text(std::string& out, const MessagePart& part);
  static void write_letter(std::string& out, const MessagePart& part);
  static void write_number(std::string& out, const MessagePart& part);
  static void write_address(std::string& out, const MessagePart& part);
  static void write_signed(std::string& out, const MessagePart& part);
  static void write_unsigned(std::string& out, const MessagePart& part);
  static void write_streamed(std::string& out, const void* value,
                             void (*stream)(std::ostream& out, const void* value));

  template <class T>
  static void write_value(std::string& out, const MessagePart& part) {
    const void* pointer = part.value_.pointer;
    if constexpr (Describes<T>) {
      out += static_cast<const T*>(pointer)->describe();
    } else {
      write_streamed(out, pointer, [](std::ostream& stream, const void* value) {
        stream << *static_cast<const T*>(value);
      });
    }
  }

  Write write_;
  union {
    const void* pointer;
    uint64_t bits;
    double number;
    char letter;
  } value_;
  size_t size_ = 0;  // of a text
};

std::string message_of(std::initializer_list<MessagePart> parts);

template <class... Args>
std::string concatenate(const Args&... args) {
  return message_of({MessagePart(args)...});
}

}  // namespace tessera::detail
