// One rank of many that are not there.
#pragma once

#include <functional>
#include <memory>
#include <numeric>
#include <vector>

#include <tessera/core/context.h>
#include <tessera/distributed/transport/backend.h>
#include <tessera/distributed/transport/group.h>

namespace tessera::distributed {

// The current context's world has `size` ranks on the fake backend from here on.
inline void become_fake_rank(int rank, int size) {
  RankContext& context = rank_context();
  context.rank = rank;
  context.world_size = size;
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  context.world = std::make_shared<Group>("world", make_fake_backend(rank, size), std::move(ranks));
}

// body() in a Context of its own.
inline void on_fake_rank(int rank, int size, const std::function<void()>& body) {
  Context own;
  const ContextGuard guard(own);
  become_fake_rank(rank, size);
  body();
}

}  // namespace tessera::distributed
