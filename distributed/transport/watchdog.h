// Answers, for a process that may be computing or stuck itself, the question where it stands.
//
// A rank whose wait ran out asks through the store; a thread of every rank answers with the last
// call that it issued on each channel, so that the message can name the late ones. A rank that
// waits for long says so under job/waiting/RANK, long before its wait runs out: `tessera launch`
// prints it with the positions of all.
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
  // `wait_warning`: after which a call that waits is told; 0: never.
  Watchdog(std::shared_ptr<Store> store, int rank, std::shared_ptr<CommTrace> trace,
           Milliseconds wait_warning = Milliseconds(0));
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
  void tell_wait();
  const std::shared_ptr<Store> store_;
  const int rank_;
  const std::shared_ptr<CommTrace> trace_;
  const Milliseconds wait_warning_;
  int64_t unfinished_ = 0;  // calls before this number have ended
  double told_ = -1;        // when the call was issued that was told last
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

// Where the ranks of a store stand, on all channels: "user barrier #3; gradient all_reduce #12 ..."
// (of other groups than the world with their name); nothing for those that did not answer in time.
// What the store throws.
std::vector<std::optional<std::string>> ask_all_positions(Store& store, std::span<const int> ranks,
                                                          Milliseconds timeout);

}  // namespace tessera::distributed
