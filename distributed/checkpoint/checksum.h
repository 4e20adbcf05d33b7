// XXH64 with seed 0, the checksum of checkpoints: 64 bits over a stream of bytes, by the xxHash
// library (https://xxhash.com). It detects damage, not forgery.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::distributed {

class Checksum {
 public:
  Checksum();
  ~Checksum();
  Checksum(const Checksum&) = delete;
  Checksum& operator=(const Checksum&) = delete;
  void update(const void* data, size_t bytes);
  uint64_t value() const;  // of all bytes so far

 private:
  struct State;
  std::unique_ptr<State> state_;
};

uint64_t checksum_of(const void* data, size_t bytes);
inline uint64_t checksum_of(std::string_view text) { return checksum_of(text.data(), text.size()); }

// As in files: 16 lower-case hexadecimal digits.
std::string checksum_text(uint64_t value);
std::optional<uint64_t> parse_checksum(std::string_view text);  // nothing where it is none

}  // namespace tessera::distributed
