// What errors say, for tests that read it.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <string_view>

#include <tessera/core/error.h>

namespace tessera {

// The message of the E that `call` throws. It fails the test to throw nothing; errors of other
// classes pass through.
template <class E = Error>
std::string message_of(const auto& call) {
  try {
    call();
  } catch (const E& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

inline bool mentions(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

}  // namespace tessera
