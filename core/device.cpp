#include <tessera/core/device.h>

#include <charconv>
#include <ostream>

#include <tessera/core/error.h>

namespace tessera {

Device parse_device(std::string_view name) {
  if (name == "cpu") return kCpu;
  if (name == "meta") return kMeta;
  if (name == "cuda") return cuda(0);
  if (name.starts_with("cuda:")) {
    const std::string_view digits = name.substr(5);
    int index = -1;
    const auto [end, status] = std::from_chars(digits.data(), digits.data() + digits.size(), index);
    if (status == std::errc() && end == digits.data() + digits.size() && index >= 0) {
      return cuda(index);
    }
  }
  TS_THROW(ValueError, "device", "expects cpu, meta, cuda or cuda:N; got '", name, "'");
}

std::ostream& operator<<(std::ostream& out, const Device& device) {
  switch (device.type) {
    case Device::Type::kCpu:
      return out << "cpu";
    case Device::Type::kMeta:
      return out << "meta";
    case Device::Type::kCuda:
      return out << "cuda:" << device.index;
  }
  return out;
}

}  // namespace tessera
