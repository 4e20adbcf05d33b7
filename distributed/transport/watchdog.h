// Answers, for a process that may be computing or stuck itself, the question where it stands.
//
// A rank whose wait ran out asks through the store; a thread of every rank answers with the last
// call that it issued on each channel, so that the message can name the late ones.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <tessera/distributed/rendezvous/store.h>
#include <tessera/distributed/transport/backend.h>
#include <tessera/distributed/transport/trace.h>

namespace tessera::distributed {

class Watchdog {
 public:
  Watchdog(std::shared_ptr<Store> store, int rank, std::shared_ptr<CommTrace> trace);
  ~Watchdog();  // at most a fifth of a second
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  // Where the ranks (of the world) stand on a channel of a group; nullopt for those that did not
  // answer in time. Never throws: without the store nobody answers.
  std::vector<std::optional<Position>> ask(const std::string& group, Channel channel,
                                           std::span<const int> ranks,
                                           Milliseconds timeout) noexcept;

 private:
  void answer();
  const std::shared_ptr<Store> store_;
  const int rank_;
  const std::shared_ptr<CommTrace> trace_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace tessera::distributed
