// Ranks as threads, for tests. Every distributed test ends by comparing what its ranks called:
// test_layering refuses run_ranks in tests/, these two take its place.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <functional>

#include <tessera/distributed/transport/collectives.h>
#include <tessera/distributed/transport/run_ranks.h>

namespace tessera::distributed {

// All ranks must have issued the same collectives in the same order, within each channel of each
// group. For tests whose ranks do not fail.
inline void compared_ranks(int size, const std::function<void(int rank)>& body,
                           const RunRanksOptions& options = {}) {
  run_ranks(
      size,
      [&](int rank) {
        const CommTrace::Scope scope(*rank_context().trace);
        body(rank);
        if (size > 1) check_equal_traces(scope);
      },
      options);
}

// For tests whose ranks fail: some call of one of them must not have ended well, or there is
// something to compare. `reason` tells the reader why the ranks' calls differ.
inline void failing_ranks(const char* reason, int size, const std::function<void(int rank)>& body,
                          const RunRanksOptions& options = {}) {
  std::atomic<bool> failed{false};
  const auto look = [&](const CommTrace::Scope& scope) {
    for (const CommRecord& record : scope.records()) {
      const bool done = record.state == CommRecord::State::kDone;
      if (!done || record.operation == Operation::kInvalid) failed = true;
    }
  };
  // Where a rank throws, run_ranks does.
  run_ranks(
      size,
      [&](int rank) {
        const CommTrace::Scope scope(*rank_context().trace);
        body(rank);
        look(scope);
      },
      options);
  EXPECT_TRUE(failed || size == 1)
      << "all calls of these ranks ended well (" << reason << "): compared_ranks is for them";
}

}  // namespace tessera::distributed
