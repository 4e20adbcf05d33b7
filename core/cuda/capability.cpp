#include <tessera/core/cuda/capability.h>

#include <charconv>

namespace tessera::gpu {

bool runs_on(std::string_view architectures, int major, int minor) {
  while (!architectures.empty()) {
    const size_t end = architectures.find(';');
    const std::string_view one = architectures.substr(0, end);
    architectures.remove_prefix(end == std::string_view::npos ? architectures.size() : end + 1);
    int number = 0;
    const auto parsed = std::from_chars(one.data(), one.data() + one.size(), number);
    const bool exact = parsed.ptr != one.data() + one.size() && *parsed.ptr == 'a';
    if (number / 10 != major) continue;
    if (exact ? number % 10 == minor : number % 10 <= minor) return true;
  }
  return false;
}

}  // namespace tessera::gpu
