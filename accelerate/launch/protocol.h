// The messages between agents and the launcher, through the job's store:
//
//     job/ready/RANK    an agent has come; AgentFacts          (agent)
//     job/go            all have come: Layout, or kStop        (launcher)
//     job/exit/RANK     how the process ended; ExitReport      (agent)
//     job/agent/RANK    the agent's will: it is gone           (server, or one beside it)
//     job/alone/RANK    an agent of its machine never came     (agent: siblings.h)
//     job/command/N     a signal for every process             (launcher)
//     job/waiting/RANK  how long a collective waits, and which (rank: watchdog.h)
// and job/failure/RANK, job/joined/RANK, job/left/RANK of <tessera/distributed/rendezvous/job.h>.
#pragma once

#include <string>
#include <vector>

#include <tessera/accelerate/launch/process.h>

namespace tessera::launch {

constexpr std::string_view kStop = "stop";  // as job/go: the job does not start
// As TESSERA_RANK_OUTPUT, which else is the path of a pipe: see store_lines.h.
constexpr std::string_view kThroughStore = "store";

// An agent's report about its machine.
struct AgentFacts {
  int rank = 0;
  int world_size = 1;
  std::string host;           // TESSERA_NODE_NAME, else the machine's name
  std::string version;        // of tessera
  std::string program;        // as found in PATH; empty: not there
  uint64_t program_hash = 0;  // of its bytes
  int64_t clock = 0;          // milliseconds since 1970, there
  int64_t received = 0;       // the same of the launcher, when the report came
  int cores = 1;

  std::string to_text() const;
  static AgentFacts from_text(std::string_view text);
};

// The node of each rank.
struct Layout {
  std::vector<int> node_of_rank;
  int nodes = 1;

  int local_rank(int rank) const;
  int local_world_size(int rank) const;
  std::string text() const;  // "0,0,1,1"
  static Layout from_text(std::string_view text);
};

struct ExitReport {
  ExitStatus status;
  std::string host;
  std::string to_text() const;
  static ExitReport from_text(std::string_view text);
};

std::string tessera_version();
AgentFacts gather_facts(int rank, int world_size, const std::string& program,
                        const Environment& environment, distributed::Cores cores);

// Nodes in the order of their first rank.
Layout lay_out(const std::vector<AgentFacts>& facts);

struct PreflightResult {
  std::vector<std::string> errors;    // the job must not start
  std::vector<std::string> warnings;  // it may
};
// Compares the agents' reports: one program and one library everywhere, clocks within 5 s.
PreflightResult preflight(const std::vector<AgentFacts>& facts);

int64_t wall_clock();  // milliseconds since 1970

}  // namespace tessera::launch
