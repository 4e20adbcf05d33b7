// Switches of the environment: TESSERA_SYNC=1.
#pragma once

#include <cstdlib>
#include <string_view>

namespace tessera {

// Whether a variable is set to anything but 0 and nothing.
inline bool environment_flag(const char* name) {
  const char* const text = std::getenv(name);
  return text != nullptr && *text != '\0' && std::string_view(text) != "0";
}

}  // namespace tessera
