// The collectives of GPUs that a CUDA graph carries out again at each replay. A Scope is open while
// it captures; repeat() follows each replay but the first, whose calls the capture has counted.
//
// A replay calls nothing, and other ranks may call the same one by one. So after each replay a rank
// counts the calls as its own: in the sequence of each channel, in the trace, and in what the ranks
// compare (Backend::fingerprint). A call in a capture without a scope is an UnsupportedError.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include <tessera/core/context.h>
#include <tessera/distributed/transport/backend.h>
#include <tessera/distributed/transport/trace.h>

namespace tessera::distributed {

class Group;

class CapturedCalls {
 public:
  // For this thread's Context, as long as it lives.
  class Scope {
   public:
    explicit Scope(CapturedCalls& calls);

   private:
    ScopedValue<CapturedCalls*> scope_;
  };
  static CapturedCalls* current();

  // Once the replay is queued, with the stream that it is on as the current one: a transfer that
  // does not end within the calls' timeout ends the group, as it does where it was called.
  void repeat() const;
  size_t size() const { return calls_.size(); }

 private:
  friend class Group;
  struct One {
    std::shared_ptr<Group> group;
    CommRecord record;
    CallPtr call;
  };
  std::vector<One> calls_;
};

}  // namespace tessera::distributed
