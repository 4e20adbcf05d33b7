#include <tessera/accelerate/logging.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdio>
#include <iterator>

#include <tessera/accelerate/accelerator.h>
#include <tessera/core/error.h>

namespace tessera {
namespace {

constexpr std::array<std::string_view, 5> kNames = {"DEBUG", "INFO", "WARNING", "ERROR", "OFF"};

std::string_view file_of(std::string_view path) {
  const size_t slash = path.rfind('/');
  return slash == std::string_view::npos ? path : path.substr(slash + 1);
}

}  // namespace

LogLevel parse_log_level(std::string_view text) {
  std::string upper;
  std::ranges::transform(text, std::back_inserter(upper),
                         [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  const auto found = std::ranges::find(kNames, upper);
  TS_CHECK_AS(ConfigError, found != kNames.end(), "log level",
              "must be debug, info, warning, error or off; got '", text, "'");
  return static_cast<LogLevel>(found - kNames.begin());
}

Logger::Logger(std::string name, const Accelerator& accelerator, std::string_view level)
    : name_(std::move(name)),
      ranks_(accelerator),
      level_(level.empty() ? accelerator.settings().log_level.value : parse_log_level(level)) {}

Logger::Logger(std::string name, const ProcessControl& ranks, std::string_view level)
    : name_(std::move(name)),
      ranks_(ranks),
      level_(level.empty() ? accelerate::resolve().log_level.value : parse_log_level(level)) {}

void Logger::warning_once(std::string_view text, const LogOptions& options) {
  if (said_.emplace(text).second) warning(text, options);
}

void Logger::log(LogLevel level, std::string_view text, const LogOptions& options) {
  const auto write = [&] {
    if (level < level_ || level_ == LogLevel::kOff) return;
    const bool names_rank = options.in_order || !options.main_process_only;
    const std::string line = tessera::detail::concatenate(
        names_rank ? tessera::detail::concatenate("[rank ", ranks_.process_index(), "] ")
                   : std::string(),
        kNames[static_cast<size_t>(level)], ' ', name_, " (", file_of(options.where.file_name()),
        ':', options.where.line(), "): ", text);
    if (sink_) return sink_(line);
    const std::string whole = line + "\n";
    std::fwrite(whole.data(), 1, whole.size(), stderr);
  };
  if (options.in_order) {
    for (int rank = 0; rank < ranks_.num_processes(); ++rank) {
      if (rank == ranks_.process_index()) write();
      ranks_.wait_for_everyone();
    }
  } else if (!options.main_process_only || ranks_.is_main_process()) {
    write();
  }
}

}  // namespace tessera
