#include <tessera/core/io/crc32c.h>

#include <array>
#include <cstring>
#if defined(__SSE4_2__)
#include <nmmintrin.h>
#endif

namespace tessera {
#if defined(__SSE4_2__)

uint32_t crc32c(const void* data, size_t bytes, uint32_t before) {
  const auto* at = static_cast<const unsigned char*>(data);
  uint64_t state = ~before;
  for (; bytes >= 8; at += 8, bytes -= 8) {
    uint64_t word;
    std::memcpy(&word, at, 8);
    state = _mm_crc32_u64(state, word);
  }
  auto last = static_cast<uint32_t>(state);
  for (; bytes > 0; ++at, --bytes) last = _mm_crc32_u8(last, *at);
  return ~last;
}

#else
namespace {

constexpr std::array<uint32_t, 256> make_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ (value & 1 ? 0x82F63B78u : 0u);
    table[i] = value;
  }
  return table;
}
constexpr auto kTable = make_table();

}  // namespace

uint32_t crc32c(const void* data, size_t bytes, uint32_t before) {
  const auto* at = static_cast<const unsigned char*>(data);
  uint32_t state = ~before;
  for (; bytes > 0; ++at, --bytes) state = kTable[(state ^ *at) & 0xff] ^ (state >> 8);
  return ~state;
}

#endif
}  // namespace tessera
