#include <tessera/accelerate/launch/protocol.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <map>

#include <unistd.h>

#include <nlohmann/json.hpp>

#include <tessera/core/error.h>
#include <tessera/core/plain_text.h>
#include <tessera/distributed/rendezvous/json_number.h>

namespace tessera::launch {
namespace {

using distributed::json_number;
using distributed::kMostRanks;
using Json = nlohmann::json;

constexpr int64_t kClockTolerance = 5000;  // ms; a report itself takes far less

Json parse(std::string_view text, std::string_view what) {
  try {
    return Json::parse(text);
  } catch (const Json::exception&) {
    TS_THROW(DistributedError, "tessera launch", what, " cannot be read: \"", text,
             "\"; launcher and agents have to be of one version");
  }
}

// Calls read(json); a field that is missing or of another type is an error as unreadable text is.
template <class Read>
auto fields(std::string_view text, std::string_view what, Read read) {
  const Json json = parse(text, what);
  try {
    return read(json);
  } catch (const Json::exception&) {
    TS_THROW(DistributedError, "tessera launch", what, " lacks fields: \"", text,
             "\"; launcher and agents have to be of one version");
  }
}

constexpr int kMostCores = 1 << 20;

std::string dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

// 0 for a file that cannot be read.
uint64_t hash_file(const std::string& path) {
  PlainText<std::ifstream> file(path, std::ios::binary);
  std::vector<char> buffer(1u << 20);
  uint64_t hash = 14695981039346656037u;  // FNV-1a, eight bytes at a time
  uint64_t size = 0;
  while (file.read(buffer.data(), static_cast<std::streamsize>(buffer.size())), file.gcount() > 0) {
    const auto count = static_cast<size_t>(file.gcount());
    std::fill(buffer.begin() + static_cast<std::ptrdiff_t>(count), buffer.end(), '\0');
    for (size_t at = 0; at < count; at += 8) {
      uint64_t word = 0;
      std::copy_n(buffer.data() + at, 8, reinterpret_cast<char*>(&word));
      hash = (hash ^ word) * 1099511628211u;
    }
    size += count;
  }
  return size == 0 ? 0 : (hash ^ size) * 1099511628211u;
}

std::string ranks_text(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (i == 8) return text + ", ... (" + std::to_string(ranks.size()) + " in all)";
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  return text;
}

// "1.0 on ranks 0, 1; 1.1 on rank 2" where the ranks' values differ, else empty.
template <class Value>
std::string differences(const std::vector<AgentFacts>& facts, Value value) {
  std::map<std::string, std::vector<int>> groups;
  for (const AgentFacts& fact : facts) groups[value(fact)].push_back(fact.rank);
  if (groups.size() < 2) return "";
  std::string text;
  for (const auto& [name, ranks] : groups) {
    text += (text.empty() ? "" : "; ") + name + " on " + ranks_text(ranks);
  }
  return text;
}

}  // namespace

std::string AgentFacts::to_text() const {
  return dump({{"rank", rank},
               {"world_size", world_size},
               {"host", host},
               {"version", version},
               {"program", program},
               {"program_hash", program_hash},
               {"clock", clock},
               {"cores", cores}});
}

AgentFacts AgentFacts::from_text(std::string_view text) {
  return fields(text, "an agent's report", [](const Json& json) {
    AgentFacts facts;
    facts.rank = json_number(json.at("rank"), 0, kMostRanks);
    facts.world_size = json_number(json.at("world_size"), 1, kMostRanks);
    facts.host = json.at("host").get<std::string>();
    facts.version = json.at("version").get<std::string>();
    facts.program = json.at("program").get<std::string>();
    facts.program_hash = json_number<uint64_t>(json.at("program_hash"), 0, UINT64_MAX);
    facts.clock = json_number<int64_t>(json.at("clock"), -(int64_t{1} << 53), int64_t{1} << 53);
    facts.cores = json_number(json.at("cores"), 1, kMostCores);
    return facts;
  });
}

int Layout::local_rank(int rank) const {
  const int node = node_of_rank.at(static_cast<size_t>(rank));
  return static_cast<int>(std::count(node_of_rank.begin(), node_of_rank.begin() + rank, node));
}

int Layout::local_world_size(int rank) const {
  const int node = node_of_rank.at(static_cast<size_t>(rank));
  return static_cast<int>(std::count(node_of_rank.begin(), node_of_rank.end(), node));
}

std::string Layout::text() const {
  std::string result;
  for (const int node : node_of_rank) {
    result += (result.empty() ? "" : ",") + std::to_string(node);
  }
  return result;
}

Layout Layout::from_text(std::string_view text) {
  return fields("[" + std::string(text) + "]", "the layout of ranks", [](const Json& json) {
    Layout layout;
    const auto ranks = static_cast<int>(std::min<size_t>(json.size(), kMostRanks));
    for (const Json& node : json) {
      layout.node_of_rank.push_back(json_number(node, 0, ranks - 1));
      layout.nodes = std::max(layout.nodes, layout.node_of_rank.back() + 1);
    }
    return layout;
  });
}

std::string ExitReport::to_text() const {
  return dump({{"code", status.code}, {"signal", status.signal}, {"host", host}});
}

ExitReport ExitReport::from_text(std::string_view text) {
  return fields(text, "an agent's report", [](const Json& json) {
    ExitReport report;
    report.status.code = json_number(json.at("code"), 0, 255);
    report.status.signal = json_number(json.at("signal"), 0, 127);
    report.host = json.at("host").get<std::string>();
    return report;
  });
}

int64_t wall_clock() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

std::string tessera_version() { return TESSERA_VERSION; }

AgentFacts gather_facts(int rank, int world_size, const std::string& program,
                        const Environment& environment, distributed::Cores cores) {
  AgentFacts facts;
  facts.rank = rank;
  facts.world_size = world_size;
  char name[256] = "";
  ::gethostname(name, sizeof name - 1);
  facts.host = name;
  const auto alias = environment.find("TESSERA_NODE_NAME");
  if (alias != environment.end() && !alias->second.empty()) facts.host = alias->second;
  facts.version = tessera_version();
  facts.program = find_program(program, environment);
  if (!facts.program.empty()) facts.program_hash = hash_file(facts.program);
  facts.cores = cores.node;
  facts.clock = wall_clock();
  return facts;
}

Layout lay_out(const std::vector<AgentFacts>& facts) {
  Layout layout;
  std::map<std::string, int> nodes;
  for (const AgentFacts& fact : facts) {
    layout.node_of_rank.push_back(
        nodes.emplace(fact.host, static_cast<int>(nodes.size())).first->second);
  }
  layout.nodes = static_cast<int>(nodes.size());
  return layout;
}

PreflightResult preflight(const std::vector<AgentFacts>& facts) {
  PreflightResult result;
  std::vector<int> missing;
  std::string hosts;
  for (const AgentFacts& fact : facts) {
    if (!fact.program.empty()) continue;
    missing.push_back(fact.rank);
    if (hosts.find(fact.host) == std::string::npos)
      hosts += (hosts.empty() ? "" : ", ") + fact.host;
  }
  if (!missing.empty()) {
    result.errors.push_back("the program was not found, or cannot be executed, on " + hosts + " (" +
                            ranks_text(missing) + "); give a path that every node has");
  } else {
    const std::string programs = differences(facts, [](const AgentFacts& fact) {
      char text[20];
      std::snprintf(text, sizeof text, "%016llx",
                    static_cast<unsigned long long>(fact.program_hash));
      return std::string(text);
    });
    if (!programs.empty()) {
      result.errors.push_back("the program's bytes differ: hash " + programs +
                              "; copy one build to every node");
    }
  }
  const std::string versions =
      differences(facts, [](const AgentFacts& fact) { return "tessera " + fact.version; });
  if (!versions.empty()) {
    result.errors.push_back("versions differ: " + versions + "; install one on every node");
  }
  for (const AgentFacts& fact : facts) {
    const int64_t ahead = fact.clock - fact.received;
    if (std::abs(ahead) > kClockTolerance) {
      result.warnings.push_back("the clock of " + fact.host + " is " +
                                std::to_string(std::abs(ahead) / 1000) + " s " +
                                (ahead > 0 ? "ahead of" : "behind") +
                                " the launcher's; logs and file times will not line up");
    }
  }
  return result;
}

}  // namespace tessera::launch
