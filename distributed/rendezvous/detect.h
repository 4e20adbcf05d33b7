// Reads the launcher's environment: this process's rank, world size, node, number of threads, and
// the address of the store.
//
// The first of these sources wins: OpenMPI or PMIx (mpirun, `tessera launch`), a step of Slurm's
// srun with PMI, torchrun's full set of variables, none (one process). `tessera launch` exports
// TESSERA_* in addition to the source that started its agents. Two sources of one level that
// disagree are a ConfigError that shows both.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>

#include <tessera/distributed/rendezvous/store.h>

namespace tessera::distributed {

using Environment = std::map<std::string, std::string, std::less<>>;
Environment process_environment();

inline constexpr int kMostRanks = 1 << 20;  // more than any job has

enum class Launcher {
  kSingle,    // one process, no launcher
  kMpi,       // mpirun, or any other that speaks OpenMPI or PMIx
  kSlurm,     // a step of srun
  kTorchrun,  // NCCL only: it has no process manager that MPI could use
};
std::string_view launcher_name(Launcher launcher);

struct LaunchInfo {
  Launcher launcher = Launcher::kSingle;
  bool under_tessera = false;  // `tessera launch` watches this process
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;        // among the ranks of this node
  int local_world_size = 1;  // ranks of this node
  int node = 0;              // index of the node; 0 where the launcher does not say
  int nodes = 1;             // 0 where the launcher does not say: ranks exchange host names
  int restart_count = 0;     // how often `tessera launch --restarts` started the job again
  int threads = 1;           // for compute: asked for, or cores / local ranks
  std::optional<StoreAddress> store;               // of the launcher
  std::optional<Milliseconds> collective_timeout;  // --collective-timeout
  std::optional<Milliseconds> init_timeout;        // --init-timeout
  std::optional<Milliseconds> first_step_timeout;  // --first-step-timeout
  std::optional<Milliseconds> save_timeout;        // --save-timeout
  std::optional<Milliseconds> grace;               // --grace
  std::optional<Milliseconds> wait_warning;        // --wait-warning
  std::string transport;                           // --transport; empty: chosen by device
  std::string node_groups;  // node of each rank, "0,0,1,1"; empty where the launcher does not say
};

struct Cores {
  int allowed = 1;  // usable by this process, by affinity masks and control groups
  int node = 1;     // of the machine, or of the container
};

// Threads are TESSERA_NUM_THREADS, else SLURM_CPUS_PER_TASK, else this rank's share of the cores.
// ConfigError: contradictions, invalid numbers, ranks outside their world, a step of srun without
// PMI (every process would run alone).
LaunchInfo detect(const Environment& environment, Cores cores);
LaunchInfo detect();
Cores available_cores();

// Timeouts in settings: seconds, with decimals. ConfigError for other text.
Milliseconds parse_seconds(std::string_view name, std::string_view text);

}  // namespace tessera::distributed
