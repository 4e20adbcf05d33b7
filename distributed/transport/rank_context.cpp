#include <tessera/distributed/transport/rank_context.h>

#include <algorithm>

#include <tessera/core/context.h>
#include <tessera/core/error.h>
#include <tessera/distributed/rendezvous/store.h>
#include <tessera/distributed/transport/backend.h>
#include <tessera/distributed/transport/watchdog.h>

namespace tessera::distributed {

RankContext::RankContext() : trace(std::make_shared<CommTrace>()) {}
RankContext::~RankContext() = default;

void RankContext::watch(const std::shared_ptr<Backend>& backend) {
  std::exception_ptr failure;
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(backends_, [](const auto& known) { return known.expired(); });
    backends_.push_back(backend);
    failure = failure_;
  }
  if (failure) backend->fail(failure);
}

void RankContext::fail(std::exception_ptr error) {
  std::vector<std::shared_ptr<Backend>> backends;
  {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = error;
    for (const auto& known : backends_) {
      if (auto backend = known.lock()) backends.push_back(std::move(backend));
    }
  }
  for (const auto& backend : backends) backend->fail(error);
}

std::exception_ptr RankContext::failure() {
  const std::lock_guard lock(mutex_);
  return failure_;
}

PhaseScope::PhaseScope(std::string phase) : previous_(std::move(rank_context().phase)) {
  rank_context().phase = std::move(phase);
}
PhaseScope::~PhaseScope() { rank_context().phase = std::move(previous_); }

TimeoutScope::TimeoutScope(double seconds) : previous_(rank_context().timeouts.collective) {
  TS_CHECK(seconds > 0, "TimeoutScope", "a timeout is positive; given ", seconds, " s");
  rank_context().timeouts.collective = seconds;
}
TimeoutScope::TimeoutScope(double Timeouts::*timeout)
    : previous_(rank_context().timeouts.collective) {
  Timeouts& timeouts = rank_context().timeouts;
  timeouts.collective = std::max(timeouts.collective, timeouts.*timeout);
}
TimeoutScope::~TimeoutScope() { rank_context().timeouts.collective = previous_; }

}  // namespace tessera::distributed
