// The command line that starts one agent for each rank: mpirun's, or srun's inside a Slurm
// allocation. Pure functions of the options and the machine.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <tessera/accelerate/launch/options.h>

namespace tessera::launch {

// The machine's properties that the command line depends on.
struct Machine {
  std::string executable;  // this `tessera` command, which is the agent too
  std::string mpirun;      // empty: not installed
  bool root = false;
  int cores = 1;
  int64_t shared_memory = 0;          // bytes free under /dev/shm
  bool reads_other_processes = true;  // process_vm_readv between siblings: containers forbid it
  std::string temporary = "/tmp";
  std::string segments = {};  // folder for what ranks share; empty: MPI's own place
  bool in_slurm = false;      // inside an allocation, from which srun can start steps
};
Machine this_machine(const Environment& environment);

// Where to put a folder for shared memory; empty: MPI chooses, as on several hosts.
std::string segments_parent(const LaunchOptions& options, const Machine& machine, int ranks);

// ConfigError if no starter works: several ranks without MPI.
Manager choose_manager(const LaunchOptions& options, const Machine& machine, int ranks);

struct ManagerCommand {
  std::vector<std::string> command;
  Environment environment;
};

// `job`: variables that every agent needs (TESSERA_STORE...). `host_file`: what mpirun reads, empty
// for this machine.
ManagerCommand manager_command(Manager manager, const LaunchOptions& options,
                               const Machine& machine, int ranks, const std::string& host_file,
                               const Environment& environment, const Environment& job);

// The environment without variables of an outer launcher: a launch inside a launch is a separate
// job.
Environment without_launchers(Environment environment);

std::string printable(const std::vector<std::string>& command);  // quoted for a shell

}  // namespace tessera::launch
