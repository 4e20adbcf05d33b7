// Ranks as processes: makes world() from the launcher's environment.
//
//     int main() {
//       distributed::ProcessGroup processes;   // under `tessera launch -n 4` or mpirun
//       train(distributed::world());
//     }
//
// A single process does nothing, at no cost: it is rank 0 of 1, and MPI is not started.
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
  // At the end ranks compare their calls, channel by channel, and raise if they differ; until then
  // every record is kept. For tests. TESSERA_COMPARE_TRACES=1 turns it on for a whole job.
  bool compare_traces = false;
  bool set_threads = true;  // this rank's share of the cores, for this Context
  // cuda:N: tensors of this rank's GPU are sent too, over NCCL. DeviceError if the GPU does not
  // exist.
  Device device = kCpu;
  BackendOptions backend = {};
};

// During its lifetime the current Context is that of this process's rank. Every process makes one;
// MPI can be started once in a process, so a second one in a process fails.
//
// Throws ConfigError if the environment contradicts itself, UnsupportedError without MPI,
// DistributedError if a rank is missing after the timeout, or fails meanwhile. From then on the
// failure of a rank makes every collective of the others raise DistributedError, running ones
// within two seconds.
class ProcessGroup {
 public:
  explicit ProcessGroup(const ProcessGroupOptions& options = {});
  // Does what shutdown() does, if it was not called, and publishes failures. After an error it only
  // releases; an exception that passes is published as this rank's failure, by tessera::run with
  // its text.
  ~ProcessGroup();
  ProcessGroup(const ProcessGroup&) = delete;
  ProcessGroup& operator=(const ProcessGroup&) = delete;

  // Waits for the other ranks and leaves the job: afterwards the end of this process is not a
  // failure. DistributedError if a rank does not reach its end.
  void shutdown();

  const LaunchInfo& info() const;

 private:
  void leave();
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera::distributed
