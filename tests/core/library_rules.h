// What test_cublaslt and test_cudnn share: a library that has to be there, and rules that are held
// against what it serves.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include <tessera/core/environment.h>
#include <tessera/core/gpu/backend.h>

namespace tessera::gpu {

// A program for GPUs to which TESSERA_REQUIRE_LIBRARIES=1 was said fails where it has to do without
// one. (Others have no library to require.)
inline bool libraries_are_required() {
  return backend_kind() == BackendKind::kCuda && environment_flag("TESSERA_REQUIRE_LIBRARIES");
}

// Where the rules (validate) and the library disagree: all of it, in one table. Rules may be stricter than a
// library's heuristics, which also name algorithms for scales and epilogues of f64 that no document has; what they
// allow has to be served.
class Disagreements {
 public:
  // `refused`: the rules' reason, or empty; `serves`: what the library does, which says `words`.
  void compare(const std::string& problem, const std::string& refused, bool serves,
               const std::string& words = "no algorithm") {
    ++compared_;
    if (refused.empty() == serves) return;
    if (!serves) ++not_served_;
    rows_.push_back((serves ? "served, refused by the rules: " + refused
                            : "allowed by the rules, not served: " + words) +
                    " | " + problem);
  }
  size_t not_served() const { return not_served_; }
  size_t compared() const { return compared_; }
  std::string table() const {
    std::string result = std::to_string(rows_.size()) + " of " + std::to_string(compared_) +
                         " problems: what the library does | problem\n";
    for (const std::string& row : rows_) result += row + "\n";
    return result;
  }

 private:
  std::vector<std::string> rows_;
  size_t compared_ = 0, not_served_ = 0;
};

}  // namespace tessera::gpu

// In the body of a test, or SetUp(). `missing`: why the library is not there; empty where it is.
#define TS_NEEDS_LIBRARY(missing)                                        \
  if (const std::string why_missing = (missing); !why_missing.empty()) { \
    if (::tessera::gpu::libraries_are_required()) {                      \
      FAIL() << "TESSERA_REQUIRE_LIBRARIES is set, and " << why_missing; \
    } else {                                                             \
      GTEST_SKIP() << why_missing;                                       \
    }                                                                    \
  }                                                                      \
  static_assert(true)
