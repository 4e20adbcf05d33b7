#include <cstring>
#include <string>

#include <zlib.h>

#include <tessera/data/text/token_file.h>

#include "driver.h"

using namespace tessera;
using namespace tessera::data;

FUZZ(text) {
  std::string bytes(text);
  // Half of the inputs get correct checksums: a fuzzer does not guess them, a hostile writer does.
  if (bytes.size() >= 64 && bytes[63] & 1) {
    const auto crc = [](const char* data, size_t size) {
      return static_cast<uint32_t>(crc32_z(0, reinterpret_cast<const Bytef*>(data), size));
    };
    const uint32_t ids = crc(bytes.data() + 64, bytes.size() - 64);
    std::memcpy(&bytes[32], &ids, 4);
    const uint32_t header = crc(bytes.data(), 60);
    std::memcpy(&bytes[60], &header, 4);
  }
  fuzz::feed([&] {
    const TokenArray tokens =
        TokenArray::parse(std::as_bytes(std::span(bytes.data(), bytes.size())), "input", true);
    int64_t sum = 0;
    for (int64_t i = 0; i < tokens.size(); ++i) sum += tokens[i];
    int64_t window[4];
    fuzz::feed([&] { tokens.copy(sum, 4, window); });
    if (tokens.size() > 0)
      fuzz::require(tokens.slice(1, tokens.size()).size() + 1 == tokens.size(), "slice");
  });
}
