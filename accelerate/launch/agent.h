// The agent: `tessera agent` runs once beside each rank, started by mpirun or srun. It starts the
// program, waits for it, reports to the launcher how it ended, forwards signals and output, and
// ends when either of them dies.
#pragma once

#include <string>
#include <vector>

namespace tessera::launch {

struct AgentOptions {
  std::vector<std::string> command;
  bool prefix_output = true;  // "[3] " before each line of rank 3, where there are several ranks
};

// Returns 0 when the launcher knows how the program ended (mpirun would only complain about another
// code); 1 if the agent itself failed.
int run_agent(const AgentOptions& options);

}  // namespace tessera::launch
