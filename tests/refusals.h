// Tables of what a room refuses: a row for each check, with a part of what its error says.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <initializer_list>
#include <string>

#include "message_of.h"

namespace tessera {

struct Refusal {
  const char* says;
  std::function<void()> call;
};

// Each call throws an error that says so.
inline void expect_refusals(std::initializer_list<Refusal> rows) {
  for (const Refusal& row : rows) {
    SCOPED_TRACE(row.says);
    try {
      row.call();
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_TRUE(mentions(error.what(), row.says)) << error.what();
    }
  }
}

}  // namespace tessera
