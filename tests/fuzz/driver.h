// What the fuzz drivers share. A driver feeds bytes to a parser; a typed error is a good answer,
// any other exception, a crash, a leak or a hang is a finding.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>
#include <string_view>

#include <tessera/core/error.h>

namespace tessera::fuzz {

// Stops the fuzzer where a property does not hold.
inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "fuzz: %s\n", what);
  std::abort();
}

template <class Parse>
void feed(Parse parse) {
  try {
    parse();
  } catch (const Error& error) {
    require(error.what()[0] != 0, "an error says something");
  }
}

// For readers that take a path: a file in memory has one. It holds the text until the next call.
inline const std::string& path_of(std::string_view text) {
  static const int descriptor = ::memfd_create("input", 0);
  static const std::string path = "/proc/self/fd/" + std::to_string(descriptor);
  require(::ftruncate(descriptor, 0) == 0, "the file can be emptied");
  require(::pwrite(descriptor, text.data(), text.size(), 0) == static_cast<ssize_t>(text.size()),
          "the file can be written");
  return path;
}

// Cuts the first part off, up to a byte 0xFF: for parsers that take two files.
inline std::string_view take_part(std::string_view& text) {
  const size_t end = text.find('\xFF');
  const std::string_view part = text.substr(0, end);
  text = end == text.npos ? std::string_view() : text.substr(end + 1);
  return part;
}

}  // namespace tessera::fuzz

// FUZZ(text) { ... } defines the driver's entry; `text` is the input as std::string_view.
#define FUZZ(text)                                                          \
  static void fuzz_one(std::string_view text);                              \
  extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) { \
    fuzz_one({reinterpret_cast<const char*>(data), size});                  \
    return 0;                                                               \
  }                                                                         \
  static void fuzz_one(std::string_view text)
