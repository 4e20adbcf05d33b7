// Lines of ranks on their way to the launcher through the job's store, where agents do not share a
// machine with it: mpirun and srun pass on pieces of any length, in which lines of several ranks mix.
//
//     lines/RANK/STREAM   whole lines, which the launcher removes when it has written them   (agent)
//     taken/RANK/STREAM   so the next ones may come                                       (launcher)
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include <tessera/core/thread.h>
#include <tessera/distributed/rendezvous/store.h>

namespace tessera::launch {

// The agent's side of one stream of a rank. The store holds one message of it at a time: who prints
// faster than the launcher writes waits, as with a pipe. Without a launcher nobody reads, and nothing
// is sent.
class LineSender {
 public:
  LineSender(std::shared_ptr<distributed::TcpStore> store, int rank, std::string_view stream);
  void send(std::string_view lines);

 private:
  void wait_until_taken();
  std::shared_ptr<distributed::TcpStore> store_;
  std::string lines_, taken_;  // keys
  bool sent_ = false;          // and not taken yet
  bool lost_ = false;          // the launcher
};

// The launcher's side: writes what comes to two descriptors, on a thread of its own, until it is
// destroyed, and what was sent before that. Of the streams "out" and "error".
class LineReceiver {
 public:
  LineReceiver(std::shared_ptr<distributed::Store> store, int output, int error);
  ~LineReceiver();

 private:
  void run();
  std::shared_ptr<distributed::Store> store_;
  int output_, error_;
  Thread thread_;
};

}  // namespace tessera::launch
