// run_ranks with the end that every distributed test has.
#pragma once

#include <functional>

#include <tessera/distributed/collectives.h>
#include <tessera/distributed/run_ranks.h>

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

}  // namespace tessera::distributed
