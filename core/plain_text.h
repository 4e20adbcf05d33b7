// Text that knows no locale. Internal.
//
// A program may set a locale of its own (std::setlocale, std::locale::global). C's functions and
// each stream made afterwards then write 0,5 for 0.5 and 1.000 for 1000, which no reader takes.
#pragma once

#include <cstddef>
#include <locale>
#include <utility>

namespace tessera {

// A stream in the "C" locale: PlainText<std::ostringstream> out.
template <class Stream>
class PlainText : public Stream {
 public:
  template <class... Args>
  explicit PlainText(Args&&... args) : Stream(std::forward<Args>(args)...) {
    this->imbue(std::locale::classic());
  }
};

// std::snprintf in the "C" locale.
[[gnu::format(printf, 3, 4)]] int plain_snprintf(char* text, size_t size, const char* format, ...);

}  // namespace tessera
