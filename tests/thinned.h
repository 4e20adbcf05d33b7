#pragma once
// Loops over all combinations prove bits, which builds without a sanitizer do. A sanitizer looks
// for other mistakes and takes five to forty times as long: to it some of the combinations are
// shown.
#include <cstddef>
#include <initializer_list>
#include <span>
#include <vector>

extern "C" __attribute__((weak)) void __asan_init();

namespace tessera::tests {

// True in a program with a sanitizer. AddressSanitizer is asked for when the program runs: its tests may be
// compiled without it (TESSERA_TESTS_OF).
inline bool sanitized() {
#if defined(__SANITIZE_THREAD__)
  return true;
#else
  return __asan_init != nullptr;
#endif
}

// ALL; under a sanitizer the last of every STEP of them.
template <typename T>
std::vector<T> thinned(std::span<const T> all, size_t step) {
  std::vector<T> some;
  const size_t stride = sanitized() ? step : 1;
  for (size_t i = stride - 1; i < all.size(); i += stride) some.push_back(all[i]);
  return some;
}
template <typename T>
std::vector<T> thinned(std::initializer_list<T> all, size_t step) {
  return thinned(std::span<const T>(all.begin(), all.size()), step);
}
template <typename T>
std::vector<T> thinned(const std::vector<T>& all, size_t step) {
  return thinned(std::span<const T>(all), step);
}

}  // namespace tessera::tests
