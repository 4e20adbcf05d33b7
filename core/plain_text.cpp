#include <tessera/core/plain_text.h>

#include <cstdarg>
#include <cstdio>

#include <locale.h>

namespace tessera {

int plain_snprintf(char* text, size_t size, const char* format, ...) {
  static const locale_t classic = ::newlocale(LC_ALL_MASK, "C", nullptr);
  const locale_t before = ::uselocale(classic);  // of this thread
  std::va_list values;
  va_start(values, format);
  const int length = std::vsnprintf(text, size, format, values);
  va_end(values);
  ::uselocale(before);
  return length;
}

}  // namespace tessera
