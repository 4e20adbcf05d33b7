// The other agents of a machine, as one of them sees them. An agent that is killed before it has
// connected to the store leaves no word there, and mpirun lives on when one of its processes dies:
// the others would wait for it until --start-timeout. But they have one parent (mpirun, its daemon
// or Slurm's), whose children the system shows.
#pragma once

#include <map>
#include <vector>

#include <sys/types.h>

#include <tessera/accelerate/launch/process.h>

namespace tessera::launch {

class Siblings {
 public:
  // Time in which a parent has begun all of its agents.
  static constexpr Milliseconds kForkTime{2000};

  explicit Siblings(const distributed::LaunchInfo& info);

  // Two agents of a machine look, so that either may be killed; none where it is alone.
  bool looks() const { return looks_; }
  // Ranks whose agents were there and are gone, each told once.
  std::vector<int> lost();
  // Whether there have been fewer agents than ranks of this machine for kForkTime: one was gone
  // before it could be seen.
  bool lacks() const;

 private:
  bool looks_;
  int size_;
  std::map<pid_t, int> ranks_;  // as their environments have them
  distributed::Clock::time_point complete_ = distributed::Clock::now();
};

}  // namespace tessera::launch
