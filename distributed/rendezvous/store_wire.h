// The bytes between TcpStore and TcpStoreServer. A message is a u32 size and a body; a request's
// body is an operation and its fields, a reply's a status and its fields. Numbers are
// little-endian, strings are a u32 size and bytes.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::distributed::wire {

constexpr std::string_view kMagic = "tessera store 1";
constexpr size_t kGreetingLimit = 4096;  // of a client that did not show the token yet
// So many clients may be without a greeting at a time. Ours greet at once: who has not after
// kHaste makes room where others wait, and after kGreetingTime goes in any case.
constexpr size_t kMostStrangers = 128;
constexpr std::chrono::milliseconds kHaste{1000}, kGreetingTime{10000};
constexpr size_t kMessageLimit = 1u << 28;  // 256 MiB

enum class Command : uint8_t {
  kHello,  // magic, token
  kSet,
  kGet,
  kWait,
  kAdd,
  kCompareSet,
  kCheck,
  kRemove,
  kList,
  kWatch,
  kWill,          // key, value
  kWithdrawWill,  // and the server does nothing when this connection closes
};

enum class Status : uint8_t { kOk, kTimeout, kError };

template <class Number>
void put_number(std::string& out, Number number) {
  for (size_t i = 0; i < sizeof(Number); ++i) {
    out.push_back(static_cast<char>(static_cast<uint64_t>(number) >> (8 * i)));
  }
}
inline void put_string(std::string& out, std::string_view text) {
  put_number(out, static_cast<uint32_t>(text.size()));
  out.append(text);
}

// Reads fields; `good` turns false, and fields empty, where the message ends too early.
struct Reader {
  std::string_view rest;
  bool good = true;

  template <class Number>
  Number number() {
    if (rest.size() < sizeof(Number)) {
      good = false;
      return Number{};
    }
    uint64_t value = 0;
    for (size_t i = 0; i < sizeof(Number); ++i) {
      value |= static_cast<uint64_t>(static_cast<unsigned char>(rest[i])) << (8 * i);
    }
    rest.remove_prefix(sizeof(Number));
    return static_cast<Number>(value);
  }
  std::string_view string() {
    const auto size = number<uint32_t>();
    if (rest.size() < size) {
      good = false;
      return {};
    }
    const std::string_view text = rest.substr(0, size);
    rest.remove_prefix(size);
    return text;
  }
};

// The message with its size in front.
inline std::string framed(std::string_view body) {
  std::string message;
  message.reserve(body.size() + 4);
  put_string(message, body);
  return message;
}

}  // namespace tessera::distributed::wire
