#include <tessera/distributed/checkpoint/checksum.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace tessera::distributed {

struct Checksum::State {
  XXH64_state_t stream;
};

Checksum::Checksum() : state_(std::make_unique<State>()) { XXH64_reset(&state_->stream, 0); }
Checksum::~Checksum() = default;

void Checksum::update(const void* data, size_t bytes) {
  if (bytes > 0) XXH64_update(&state_->stream, data, bytes);
}
uint64_t Checksum::value() const { return XXH64_digest(&state_->stream); }

uint64_t checksum_of(const void* data, size_t bytes) { return XXH64(data, bytes, 0); }

std::string checksum_text(uint64_t value) {
  std::string text(16, '0');
  for (size_t i = 16; i-- > 0; value >>= 4) text[i] = "0123456789abcdef"[value & 15];
  return text;
}

std::optional<uint64_t> parse_checksum(std::string_view text) {
  if (text.size() != 16) return std::nullopt;
  uint64_t value = 0;
  for (const char c : text) {
    const bool digit = c >= '0' && c <= '9';
    if (!digit && (c < 'a' || c > 'f')) return std::nullopt;
    value = value * 16 + static_cast<uint64_t>(digit ? c - '0' : c - 'a' + 10);
  }
  return value;
}

}  // namespace tessera::distributed
