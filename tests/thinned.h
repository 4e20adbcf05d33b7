#pragma once
// Loops over all combinations prove bits, which builds without a sanitizer do. A sanitizer looks
// for other mistakes and takes five to forty times as long: to it some of the combinations are
// shown.
#include <cstddef>
#include <initializer_list>
#include <span>
#include <vector>

namespace tessera::tests {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitizer = true;
#else
inline constexpr bool kSanitizer = false;
#endif

// ALL; under a sanitizer the last of every STEP of them.
template <typename T>
std::vector<T> thinned(std::span<const T> all, size_t step) {
  std::vector<T> some;
  const size_t stride = kSanitizer ? step : 1;
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
