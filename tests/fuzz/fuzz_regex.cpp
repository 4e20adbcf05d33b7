// A pattern of a stranger and a name that it meets: either ends soon, and in bounded memory.
#include <tessera/core/regex.h>

#include "driver.h"

using namespace tessera;

FUZZ(text) {
  const std::string_view pattern = fuzz::take_part(text);
  fuzz::feed([&] {
    const Regex regex(pattern, "input");
    fuzz::feed([&] { regex.matches(text); });
    fuzz::feed([&] { regex.group(text, "idx"); });
  });
}
