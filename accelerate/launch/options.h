// The options of `tessera launch`, and the origin of each.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <tessera/accelerate/launch/hostfile.h>
#include <tessera/distributed/rendezvous/detect.h>

namespace tessera::launch {

using distributed::Environment;
using distributed::Milliseconds;

enum class Manager {
  kNone,    // one rank on this machine: its agent is started directly
  kMpirun,  // OpenMPI's
  kSrun,    // inside a Slurm allocation
};

// How ranks exchange bytes. kAuto leaves it to MPI: shared memory on a node, the fastest network
// that it finds between nodes.
enum class Transport { kAuto, kShared, kTcp };

struct LaunchOptions {
  std::vector<std::string> command;  // the program and its arguments

  int ranks = 1;
  std::vector<int>
      restart_ranks;  // of each restart, the last for all further ones; empty: as before
  int nodes = 0;      // 0: as many as needed
  std::string host_file;
  std::vector<Host> hosts;  // read from host_file, again at each restart; empty: this machine
  bool oversubscribe = false;

  int threads = 0;  // a rank; 0: cores / local ranks
  int restarts = 0;
  Milliseconds collective_timeout{600000};
  // If longer than collective_timeout: until the first gradients are reduced, and in checkpoints.
  std::optional<Milliseconds> first_step_timeout, save_timeout;
  Milliseconds init_timeout{600000};        // of a rank's ProcessGroup
  std::optional<Milliseconds> job_timeout;  // of each attempt
  Milliseconds start_timeout{60000};        // until every agent has reported
  Milliseconds wait_warning{30000};         // until the launcher says where waiting ranks are
  Milliseconds grace{30000};  // between the first failure and the killing of ranks that still run

  Transport transport = Transport::kAuto;
  std::string interface;     // network interface for TCP
  std::string store_host;    // address of this machine that the other nodes reach; empty: found
  int store_port = 0;        // of the store; 0: a free one
  std::string dump_dir;      // where ranks write what they communicated when a collective fails
  std::string remote_agent;  // of mpirun, instead of ssh
  std::vector<std::string> exported;  // variables that remote ranks get beside TESSERA_*
  bool prefix_output = true;
  bool dry_run = false;

  // The source of its ranks' own settings.
  std::vector<std::pair<std::string, std::string>> flags;
  std::string config_file;  // empty: none

  // The origin of each setting: "ranks" -> "--ranks", "TESSERA_RANKS", "file job.json",
  // "default".
  std::map<std::string, std::string> provenance;
  std::string given;  // settings that were given, as accelerate::describe() lists them
};

// A value as text from the command line, for a setting that was given there.
using Flags = std::map<std::string, std::string>;

// Every setting of the launcher and of its ranks, see accelerate/settings/config.h: the same table,
// sources and errors. `file`: --config; empty: the others. ConfigError, UnsupportedError, IoError,
// FormatError.
LaunchOptions resolve_options(const Flags& flags, const Environment& environment,
                              const std::string& file, std::vector<std::string> command);

// Variables that tell the ranks which of `job`, the launcher's own variables for them, are settings
// that it has written there itself, which flags were given, and which file.
Environment settings_for_ranks(const LaunchOptions& options, const Environment& job);

// Ranks of attempt 0, 1, ...
int ranks_of_attempt(const LaunchOptions& options, int attempt);

}  // namespace tessera::launch
