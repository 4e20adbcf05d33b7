// The device of a tensor's memory.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string_view>

namespace tessera {

struct Device {
  enum class Type : uint8_t {
    kCpu,
    kCuda,
    kMeta,  // shapes and dtypes without bytes
  };
  Type type = Type::kCpu;
  int index = 0;

  constexpr bool is_cpu() const { return type == Type::kCpu; }
  constexpr bool is_cuda() const { return type == Type::kCuda; }
  constexpr bool is_meta() const { return type == Type::kMeta; }
  friend constexpr bool operator==(const Device&, const Device&) = default;
};
inline constexpr Device kCpu{Device::Type::kCpu, 0};
inline constexpr Device kMeta{Device::Type::kMeta, 0};
constexpr Device cuda(int index = 0) { return {Device::Type::kCuda, index}; }

// "cpu", "meta", "cuda", "cuda:1". Throws ValueError.
Device parse_device(std::string_view name);
std::ostream& operator<<(std::ostream& out, const Device& device);

}  // namespace tessera
