// Reports the position of a process that may be computing or stuck itself.
//
// A rank whose wait times out asks through the store; a thread of every rank answers with the last
// call that it issued on each channel, so that the message can name the late ones. A rank that
// waits for long reports it long before the timeout, with the positions of all: `tessera launch`
// prints what it finds under job/waiting/RANK; without a launcher one rank prints it for all.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <tessera/core/thread.h>
#include <tessera/distributed/rendezvous/store.h>
#include <tessera/distributed/transport/backend.h>
#include <tessera/distributed/transport/trace.h>

namespace tessera::distributed {

class Watchdog {
 public:
  struct WaitWarning {
    Milliseconds after{0};   // of a call that waits; 0: never
    int ranks_to_print = 0;  // of the job where this rank prints it; 0: the launcher does
  };
  Watchdog(std::shared_ptr<Store> store, int rank, std::shared_ptr<CommTrace> trace,
           const WaitWarning& wait_warning);
  ~Watchdog();  // at most a fifth of a second, while a warning is printed one more
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  // The positions of the ranks (of the world) on a channel of a group; nullopt for those that did
  // not answer in time. Never throws: without the store no rank answers.
  std::vector<std::optional<Position>> ask(const std::string& group, Channel channel,
                                           std::span<const int> ranks,
                                           Milliseconds timeout) noexcept;

 private:
  void answer();
  void tell_wait();
  void print_wait(const std::string& text);
  const std::shared_ptr<Store> store_;
  const int rank_;
  const std::shared_ptr<CommTrace> trace_;
  const WaitWarning wait_warning_;
  int64_t unfinished_ = 0;  // calls before this number have ended
  double told_ = -1;        // when the call was issued that was told last
  std::atomic<bool> stopping_{false};
  Thread printer_;  // of a warning, as this rank's own answer is part of it
  Thread thread_;
};

// The positions of the ranks of a store on all channels, one line each: "rank 2: user barrier #3;
// gradient all_reduce #12 ..." (for other groups than the world with their name), or that the rank
// does not answer in time. Throws what the store throws.
std::vector<std::string> describe_positions(Store& store, std::span<const int> ranks,
                                            Milliseconds timeout);

}  // namespace tessera::distributed
