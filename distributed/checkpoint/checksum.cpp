#include <tessera/distributed/checkpoint/checksum.h>

#include <algorithm>
#include <bit>
#include <cstring>

namespace tessera::distributed {
namespace {

static_assert(std::endian::native == std::endian::little, "words are read as they lie");

constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87u;
constexpr uint64_t kPrime2 = 0xC2B2AE3D27D4EB4Fu;
constexpr uint64_t kPrime3 = 0x165667B19E3779F9u;
constexpr uint64_t kPrime4 = 0x85EBCA77C2B2AE63u;
constexpr uint64_t kPrime5 = 0x27D4EB2F165667C5u;

template <class Word>
uint64_t read(const unsigned char* from) {
  Word word;
  std::memcpy(&word, from, sizeof word);
  return word;
}

uint64_t mix(uint64_t lane, uint64_t word) {
  return std::rotl(lane + word * kPrime2, 31) * kPrime1;
}

uint64_t merge(uint64_t value, uint64_t lane) { return (value ^ mix(0, lane)) * kPrime1 + kPrime4; }

void mix_stripe(std::array<uint64_t, 4>& lanes, const unsigned char* stripe) {
  for (size_t i = 0; i < 4; ++i) lanes[i] = mix(lanes[i], read<uint64_t>(stripe + 8 * i));
}

}  // namespace

void Checksum::update(const void* data, size_t bytes) {
  if (bytes == 0) return;
  const auto* next = static_cast<const unsigned char*>(data);
  const size_t held = total_ % kStripe;
  total_ += bytes;
  if (held > 0) {
    const size_t taken = std::min(bytes, kStripe - held);
    std::memcpy(rest_.data() + held, next, taken);
    if (held + taken < kStripe) return;
    mix_stripe(lanes_, rest_.data());
    next += taken;
    bytes -= taken;
  }
  std::array<uint64_t, 4> lanes = lanes_;  // in registers
  for (; bytes >= kStripe; bytes -= kStripe, next += kStripe) mix_stripe(lanes, next);
  lanes_ = lanes;
  if (bytes > 0) std::memcpy(rest_.data(), next, bytes);
}

uint64_t Checksum::value() const {
  uint64_t value = kPrime5;
  if (total_ >= kStripe) {
    value = std::rotl(lanes_[0], 1) + std::rotl(lanes_[1], 7) + std::rotl(lanes_[2], 12) +
            std::rotl(lanes_[3], 18);
    for (const uint64_t lane : lanes_) value = merge(value, lane);
  }
  value += total_;
  size_t left = total_ % kStripe;
  const unsigned char* next = rest_.data();
  for (; left >= 8; left -= 8, next += 8) {
    value = std::rotl(value ^ mix(0, read<uint64_t>(next)), 27) * kPrime1 + kPrime4;
  }
  if (left >= 4) {
    value = std::rotl(value ^ (read<uint32_t>(next) * kPrime1), 23) * kPrime2 + kPrime3;
    left -= 4, next += 4;
  }
  for (; left > 0; --left, ++next) value = std::rotl(value ^ (*next * kPrime5), 11) * kPrime1;
  value = (value ^ (value >> 33)) * kPrime2;
  value = (value ^ (value >> 29)) * kPrime3;
  return value ^ (value >> 32);
}

uint64_t checksum_of(const void* data, size_t bytes) {
  Checksum checksum;
  checksum.update(data, bytes);
  return checksum.value();
}

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
