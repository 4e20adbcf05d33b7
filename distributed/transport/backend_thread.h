// Ranks as threads: their arguments meet in memory, and the last rank to come does the work.
//
// No thread of its own: a collective is done when the last rank has issued it, so what ranks
// overlap is real, and order is that of the calls. Private to run_ranks and the tests.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <tessera/distributed/transport/backend.h>

namespace tessera::distributed {

class ThreadHub;

// All groups of one set of rank threads.
class ThreadJob {
 public:
  // `device`: a GPU whose tensors travel too, if it is one; the ranks share it.
  explicit ThreadJob(int size, const Device& device = kCpu);
  ~ThreadJob();

  std::unique_ptr<Backend> backend(int rank);  // of the world group
  // The rank is gone. Where it failed every call of its groups raises `message`; where it ended,
  // those that it had not joined.
  void leave(int rank, const std::string& message, bool failed);

 private:
  friend class ThreadBackend;
  struct State;
  std::shared_ptr<State> state_;
  std::shared_ptr<ThreadHub> world_;
};

}  // namespace tessera::distributed
