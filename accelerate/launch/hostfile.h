// Host files: one machine a line, with the number of ranks that it takes, as mpirun reads them:
//
//     node1 slots=4       # 4 ranks
//     node2:2             # 2 ranks
//     node3               # 1 rank
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera::launch {

struct Host {
  std::string name;
  int slots = 1;
  friend bool operator==(const Host&, const Host&) = default;
};

// Errors call the text `name`. FormatError with the line's number: unknown words, slots
// below 1, a host named twice, no host at all.
std::vector<Host> parse_hosts(std::string_view text, std::string_view name);
std::vector<Host> read_host_file(const std::string& path);  // and IoError
std::string format_hosts(const std::vector<Host>& hosts);

// ConfigError if `ranks` ranks do not fit into the slots.
void check_slots(const std::vector<Host>& hosts, int ranks, bool oversubscribe);

}  // namespace tessera::launch
