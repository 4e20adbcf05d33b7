// Ranks as processes: from what the launcher left in the environment to world().
//
//     int main() {
//       distributed::ProcessGroup processes;   // under `tessera launch -n 4` or mpirun
//       train(distributed::world());
//     }
//
// Alone it does nothing, at no cost: rank 0 of 1, and MPI is not started.
#pragma once

#include <memory>

#include <tessera/distributed/backend.h>
#include <tessera/distributed/detect.h>
#include <tessera/distributed/group.h>

namespace tessera::distributed {

struct ProcessGroupOptions {
  double init_timeout_seconds = 600;
  double collective_timeout_seconds = 0;  // 0: the launcher's --collective-timeout, else 600
  bool set_threads = true;                // this rank's share of the cores, for this Context
  BackendOptions backend = {};
};

// Makes the current Context that of this process's rank, for its life. Every process makes one;
// MPI can be started once in a process, so the second one in a process fails.
//
// Throws ConfigError where the environment contradicts itself, UnsupportedError without MPI,
// DistributedError where a rank does not come in time. From then on the failure of a rank makes
// every collective of the others raise DistributedError, those under way within two seconds.
class ProcessGroup {
 public:
  explicit ProcessGroup(const ProcessGroupOptions& options = {});
  // Meets the other ranks and ends in order; after an error it only lets go, and publishes an
  // exception that passes as this rank's failure.
  ~ProcessGroup();
  ProcessGroup(const ProcessGroup&) = delete;
  ProcessGroup& operator=(const ProcessGroup&) = delete;

  const LaunchInfo& info() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera::distributed
