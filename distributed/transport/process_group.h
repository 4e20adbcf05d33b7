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

#include <tessera/distributed/rendezvous/detect.h>
#include <tessera/distributed/transport/backend.h>
#include <tessera/distributed/transport/group.h>

namespace tessera::distributed {

struct ProcessGroupOptions {
  double init_timeout_seconds = 0;        // 0: the launcher's --init-timeout, else 600
  double collective_timeout_seconds = 0;  // 0: the launcher's --collective-timeout, else 600
  double first_step_timeout_seconds = 0;  // 0: --first-step-timeout, else as above
  double save_timeout_seconds = 0;        // 0: --save-timeout, else as above
  // At the end ranks compare what they have called, channel by channel, and raise where it differs;
  // until then every record is kept. For tests. TESSERA_COMPARE_TRACES=1 says so for a whole job.
  bool compare_traces = false;
  bool set_threads = true;  // this rank's share of the cores, for this Context
  // cuda:N: tensors of this rank's GPU travel too, over NCCL. DeviceError where it is not there.
  Device device = kCpu;
  BackendOptions backend = {};
};

// Makes the current Context that of this process's rank, for its life. Every process makes one;
// MPI can be started once in a process, so the second one in a process fails.
//
// Throws ConfigError where the environment contradicts itself, UnsupportedError without MPI,
// DistributedError where a rank does not come in time, or fails meanwhile. From then on the failure
// of a rank makes every collective of the others raise DistributedError, those under way within two
// seconds.
class ProcessGroup {
 public:
  explicit ProcessGroup(const ProcessGroupOptions& options = {});
  // Does what shutdown() does, where nobody called it, and publishes what fails. After an error it
  // only lets go; an exception that passes is published as this rank's failure, by tessera::run
  // with its text.
  ~ProcessGroup();
  ProcessGroup(const ProcessGroup&) = delete;
  ProcessGroup& operator=(const ProcessGroup&) = delete;

  // Meets the other ranks and leaves the job: from here on the end of this process is no failure.
  // DistributedError where a rank does not come to its end.
  void shutdown();

  const LaunchInfo& info() const;

 private:
  void leave();
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera::distributed
