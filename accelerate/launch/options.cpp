#include <tessera/accelerate/launch/options.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>

#include <tessera/accelerate/settings/config.h>
#include <tessera/accelerate/settings/deepspeed_config.h>
#include <tessera/core/error.h>

namespace tessera::launch {
namespace {

constexpr std::string_view kLaunchOptions = "tessera launch";

int whole_number(const std::string& source, std::string_view text, int least, int most) {
  int number = 0;
  const char* const last = text.data() + text.size();
  const auto [end, problem] = std::from_chars(text.data(), last, number);
  TS_CHECK_AS(ConfigError,
              problem == std::errc() && end == last && number >= least && number <= most,
              kLaunchOptions, source, " has to be a whole number from ", least, " to ", most,
              "; got \"", text, "\"");
  return number;
}

}  // namespace

LaunchOptions resolve_options(const Flags& flags, const Environment& environment,
                              const std::string& file, std::vector<std::string> command) {
  LaunchOptions options;
  options.command = std::move(command);
  TS_CHECK_AS(ConfigError, !options.command.empty(), kLaunchOptions,
              "there is no program to start; write: tessera launch -n 2 PROGRAM ARGUMENTS");
  accelerate::ResolveOptions sources;
  sources.environment = environment;
  sources.environment.erase(std::string(accelerate::kLaunchSettings));  // an outer launcher's
  if (!file.empty()) sources.file = std::filesystem::absolute(file).string();
  sources.flags.assign(flags.begin(), flags.end());
  sources.code_follows = true;
  const accelerate::Settings settings = accelerate::resolve(sources);
  for (const accelerate::Setting& setting : accelerate::schema()) {
    options.provenance[std::string(setting.key)] = accelerate::origin(setting, settings).describe();
  }
  options.given = accelerate::describe(settings, false);
  options.flags = sources.flags;
  options.config_file = accelerate::config_file(sources);

  const auto milliseconds = [](double seconds) {
    return Milliseconds(static_cast<int64_t>(std::ceil(seconds * 1000)));
  };
  options.host_file = settings.hostfile;
  if (!options.host_file.empty()) options.hosts = read_host_file(options.host_file);
  // Without a number: a rank for each slot.
  for (const Host& host : options.hosts) {
    options.ranks = host.slots + (&host == options.hosts.data() ? 0 : options.ranks);
  }
  if (settings.ranks.value) options.ranks = static_cast<int>(*settings.ranks.value);
  // Said here, before any rank starts; restarts on other numbers of ranks say it themselves.
  if (settings.deepspeed) accelerate::batch_sizes(*settings.deepspeed, settings, options.ranks);
  options.nodes = static_cast<int>(settings.nodes.value.value_or(0));
  options.threads = static_cast<int>(settings.threads.value.value_or(0));
  options.restarts = static_cast<int>(settings.restarts.value);
  for (const std::string& count : settings.restart_ranks.value) {
    options.restart_ranks.push_back(
        whole_number(settings.restart_ranks.origin.describe(), count, 1, distributed::kMostRanks));
  }
  options.collective_timeout = milliseconds(settings.collective_timeout);
  options.init_timeout = milliseconds(settings.init_timeout);
  const auto optional_milliseconds = [&](const std::optional<double>& seconds) {
    return seconds ? std::optional(milliseconds(*seconds)) : std::nullopt;
  };
  options.first_step_timeout = optional_milliseconds(settings.first_step_timeout.value);
  options.save_timeout = optional_milliseconds(settings.save_timeout.value);
  options.job_timeout = optional_milliseconds(settings.job_timeout.value);
  options.start_timeout = milliseconds(settings.start_timeout);
  options.grace = milliseconds(settings.grace);
  options.wait_warning = milliseconds(settings.wait_warning);
  options.transport = static_cast<Transport>(settings.transport.value);
  options.interface = settings.interface;
  options.store_host = settings.store_host;
  options.store_port = static_cast<int>(settings.store_port.value);
  options.dump_dir = settings.dump_dir;
  options.remote_agent = settings.remote_agent;
  options.oversubscribe = settings.oversubscribe;

  TS_CHECK_AS(ConfigError, options.transport != Transport::kShared || options.hosts.size() <= 1,
              kLaunchOptions, "shared memory does not reach the ", options.hosts.size(),
              " hosts of ", options.host_file, "; use --transport auto or tcp");
  for (int attempt = 0; attempt <= static_cast<int>(options.restart_ranks.size()); ++attempt) {
    if (options.hosts.empty()) break;
    check_slots(options.hosts, ranks_of_attempt(options, attempt), options.oversubscribe);
  }
  return options;
}

Environment settings_for_ranks(const LaunchOptions& options, const Environment& job) {
  Environment result;
  std::vector<std::string> written;
  for (const auto& [name, value] : job) {
    const accelerate::Setting* setting =
        name.starts_with("TESSERA_") ? accelerate::find_setting(std::string_view(name).substr(8))
                                     : nullptr;
    if (setting == nullptr) continue;
    const auto origin = options.provenance.find(std::string(setting->key));
    if (origin == options.provenance.end() || origin->second != name) written.push_back(name);
  }
  // Agents share out the cores where nobody says how many threads a rank has.
  constexpr const char* kThreads = "TESSERA_NUM_THREADS";
  const auto threads = options.provenance.find("threads");
  const bool by_user = threads != options.provenance.end() && threads->second == kThreads;
  if (!by_user && job.find(kThreads) == job.end()) written.push_back(kThreads);
  result[std::string(accelerate::kLaunchSettings)] =
      accelerate::launch_settings_text(options.flags, written);
  if (!options.config_file.empty()) result["TESSERA_CONFIG_FILE"] = options.config_file;
  return result;
}

int ranks_of_attempt(const LaunchOptions& options, int attempt) {
  if (attempt == 0 || options.restart_ranks.empty()) return options.ranks;
  const size_t last = options.restart_ranks.size() - 1;
  return options.restart_ranks[std::min(static_cast<size_t>(attempt - 1), last)];
}

}  // namespace tessera::launch
