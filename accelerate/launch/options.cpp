#include <tessera/accelerate/launch/options.h>

#include <algorithm>
#include <charconv>
#include <fstream>

#include <nlohmann/json.hpp>

#include <tessera/core/error.h>

namespace tessera::launch {
namespace {

constexpr std::string_view kWhere = "tessera launch";

const std::vector<std::string>& setting_names() {
  static const std::vector<std::string> kNames = {
      "ranks",         "nodes",        "hostfile",           "threads",     "restarts",
      "restart_ranks", "grace",        "collective_timeout", "job_timeout", "start_timeout",
      "init_timeout",  "dump_dir",     "transport",          "interface",   "store_host",
      "remote_agent",  "oversubscribe"};
  return kNames;
}

// Names under which Accelerate's launcher exports the same settings.
const std::map<std::string, std::string>& accelerate_names() {
  static const std::map<std::string, std::string> kNames = {
      {"ranks", "ACCELERATE_NUM_PROCESSES"},
      {"nodes", "ACCELERATE_NUM_MACHINES"},
      {"threads", "ACCELERATE_NUM_CPU_THREADS_PER_PROCESS"},
      {"restarts", "ACCELERATE_MAX_RESTARTS"},
  };
  return kNames;
}

std::string upper(std::string text) {
  for (char& letter : text) {
    if (letter >= 'a' && letter <= 'z') letter = static_cast<char>(letter - 'a' + 'A');
  }
  return text;
}

std::map<std::string, std::string> read_file(const std::string& path) {
  std::map<std::string, std::string> values;
  if (path.empty()) return values;
  std::ifstream file(path);
  TS_CHECK_AS(IoError, file.is_open(), kWhere, "cannot read the settings in ", path);
  nlohmann::json json;
  try {
    json = nlohmann::json::parse(file);
  } catch (const nlohmann::json::exception& error) {
    TS_THROW(FormatError, kWhere, path, " is no JSON: ", error.what());
  }
  TS_CHECK_AS(FormatError, json.is_object(), kWhere, path, " has to hold one JSON object");
  for (const auto& [name, value] : json.items()) {
    const auto& names = setting_names();
    TS_CHECK_AS(ConfigError, std::find(names.begin(), names.end(), name) != names.end(), kWhere,
                path, " has the setting \"", name,
                "\", which is unknown; see tessera launch --help");
    values[name] = value.is_string() ? value.get<std::string>() : value.dump();
  }
  return values;
}

int whole_number(const std::string& source, std::string_view text, int least, int most) {
  int number = 0;
  const char* const last = text.data() + text.size();
  const auto [end, problem] = std::from_chars(text.data(), last, number);
  TS_CHECK_AS(ConfigError,
              problem == std::errc() && end == last && number >= least && number <= most, kWhere,
              source, " has to be a whole number from ", least, " to ", most, "; got \"", text,
              "\"");
  return number;
}

constexpr int kMostRanks = 1 << 20;

}  // namespace

LaunchOptions resolve_options(const Flags& flags, const Environment& environment,
                              const std::string& file, std::vector<std::string> command) {
  LaunchOptions options;
  options.command = std::move(command);
  TS_CHECK_AS(ConfigError, !options.command.empty(), kWhere,
              "there is no program to start; write: tessera launch -n 2 PROGRAM ARGUMENTS");
  const std::map<std::string, std::string> in_file = read_file(file);

  // Calls apply(source, text) with the first source that gives the setting.
  const auto setting = [&](const std::string& name, auto apply) {
    const auto accelerate = accelerate_names().find(name);
    std::string source = "--" + name;
    std::replace(source.begin(), source.end(), '_', '-');
    const std::string* text = nullptr;
    const auto look = [&](const auto& map, const std::string& key, const std::string& as) {
      const auto at = text == nullptr ? map.find(key) : map.end();
      if (at == map.end() || at->second.empty()) return;
      text = &at->second;
      source = as;
    };
    look(flags, name, source);
    look(environment, "TESSERA_" + upper(name), "TESSERA_" + upper(name));
    if (accelerate != accelerate_names().end()) {
      look(environment, accelerate->second, accelerate->second);
    }
    look(in_file, name, "file " + file);
    if (text != nullptr) apply(source, *text);
    options.provenance[name] = text != nullptr ? source : "default";
  };
  const auto number = [&](const std::string& name, int& target, int least, int most) {
    setting(name, [&](const std::string& source, const std::string& text) {
      target = whole_number(source, text, least, most);
    });
  };
  const auto text = [&](const std::string& name, std::string& target) {
    setting(name, [&](const std::string&, const std::string& value) { target = value; });
  };
  const auto seconds = [&](const std::string& name, auto& target) {
    setting(name, [&](const std::string& source, const std::string& value) {
      target = distributed::parse_seconds(source, value);
    });
  };

  text("hostfile", options.host_file);
  if (!options.host_file.empty()) options.hosts = read_host_file(options.host_file);
  // Without a number: a rank for each slot.
  for (const Host& host : options.hosts) {
    options.ranks = host.slots + (&host == options.hosts.data() ? 0 : options.ranks);
  }
  number("ranks", options.ranks, 1, kMostRanks);
  number("nodes", options.nodes, 1, kMostRanks);
  number("threads", options.threads, 1, 4096);
  number("restarts", options.restarts, 0, 1000000);
  setting("restart_ranks", [&](const std::string& source, const std::string& list) {
    for (size_t begin = 0; begin <= list.size();) {
      const size_t end = std::min(list.find(',', begin), list.size());
      options.restart_ranks.push_back(
          whole_number(source, std::string_view(list).substr(begin, end - begin), 1, kMostRanks));
      begin = end + 1;
    }
  });
  seconds("collective_timeout", options.collective_timeout);
  seconds("init_timeout", options.init_timeout);
  seconds("job_timeout", options.job_timeout);
  seconds("start_timeout", options.start_timeout);
  seconds("grace", options.grace);
  setting("transport", [&](const std::string& source, const std::string& value) {
    TS_CHECK_AS(ConfigError, value == "auto" || value == "shared" || value == "tcp", kWhere, source,
                " has to be auto, shared or tcp; got \"", value, "\"");
    options.transport = value == "auto"     ? Transport::kAuto
                        : value == "shared" ? Transport::kShared
                                            : Transport::kTcp;
  });
  text("interface", options.interface);
  text("store_host", options.store_host);
  text("dump_dir", options.dump_dir);
  text("remote_agent", options.remote_agent);
  setting("oversubscribe", [&](const std::string& source, const std::string& value) {
    TS_CHECK_AS(ConfigError, value == "true" || value == "false" || value == "1" || value == "0",
                kWhere, source, " has to be true or false; got \"", value, "\"");
    options.oversubscribe = value == "true" || value == "1";
  });

  TS_CHECK_AS(ConfigError, options.transport != Transport::kShared || options.hosts.size() <= 1,
              kWhere, "shared memory does not reach the ", options.hosts.size(), " hosts of ",
              options.host_file, "; use --transport auto or tcp");
  TS_CHECK_AS(ConfigError, options.restart_ranks.empty() || options.restarts > 0, kWhere,
              "--restart-ranks needs --restarts K");
  for (int attempt = 0; attempt <= static_cast<int>(options.restart_ranks.size()); ++attempt) {
    if (options.hosts.empty()) break;
    check_slots(options.hosts, ranks_of_attempt(options, attempt), options.oversubscribe);
  }
  return options;
}

std::string describe_settings(const LaunchOptions& options) {
  std::string text;
  for (const auto& [name, source] : options.provenance) {
    if (source != "default") text += "  " + name + " from " + source + "\n";
  }
  return text;
}

int ranks_of_attempt(const LaunchOptions& options, int attempt) {
  if (attempt == 0 || options.restart_ranks.empty()) return options.ranks;
  const size_t last = options.restart_ranks.size() - 1;
  return options.restart_ranks[std::min(static_cast<size_t>(attempt - 1), last)];
}

}  // namespace tessera::launch
