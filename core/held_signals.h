// Signals that must not interrupt code which a handler's frame would damage. Internal.
#pragma once

#include <csignal>
#include <initializer_list>

namespace tessera {

// Holds the calling thread's signals back while it lives: they are handled afterwards, or by
// another thread that takes them. Those that say of the instruction at hand that it failed are not
// held. Two system calls, about 0.2 us together.
class HeldSignals {
 public:
  HeldSignals() { hold(&before_); }
  ~HeldSignals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  HeldSignals(const HeldSignals&) = delete;
  HeldSignals& operator=(const HeldSignals&) = delete;

  // For the rest of the thread's life.
  static void for_good() { hold(nullptr); }

 private:
  static void hold(sigset_t* before) {
    sigset_t set;
    ::sigfillset(&set);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT}) {
      ::sigdelset(&set, fault);
    }
    ::pthread_sigmask(SIG_BLOCK, &set, before);
  }

  sigset_t before_;
};

}  // namespace tessera
