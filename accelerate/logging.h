// Log lines that name the rank and the place in the program.
//
//     Logger log("train", accelerator);
//     log.info("epoch begins");                             // the main rank alone
//     log.info("my share", {.main_process_only = false});   // every rank, with its number
//     log.info("one by one", {.in_order = true});           // rank by rank: collective
//     log.warning_once("labels are missing");
//
//     INFO train (train.cpp:42): epoch begins
//     [rank 1] INFO train (train.cpp:43): my share
#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include <tessera/accelerate/process/process_control.h>
#include <tessera/accelerate/settings/config.h>
#include <tessera/core/source_location.h>

namespace tessera {

class Accelerator;

// "debug", "info", "warning", "error", "off", in any case; ConfigError for others.
LogLevel parse_log_level(std::string_view text);

struct LogOptions {
  bool main_process_only = true;
  // Every rank logs, one after the other, with a barrier for each. All ranks make the call; the
  // level decides what is written, not who waits.
  bool in_order = false;
  // The place that the line names; a function that logs for its caller passes the caller's.
  SourceLocation where = SourceLocation::current();
};

class Logger {
 public:
  using Sink = std::function<void(const std::string& line)>;

  // `accelerator` must outlive it. The level is `level`, else the accelerator's setting log_level.
  Logger(std::string name, const Accelerator& accelerator, std::string_view level = {});
  // `ranks` must outlive it. The level is `level`, else the setting log_level of flags, environment
  // and file (accelerate/settings/config.h).
  Logger(std::string name, const ProcessControl& ranks, std::string_view level = {});

  void debug(std::string_view text, const LogOptions& options = {}) {
    log(LogLevel::kDebug, text, options);
  }
  void info(std::string_view text, const LogOptions& options = {}) {
    log(LogLevel::kInfo, text, options);
  }
  void warning(std::string_view text, const LogOptions& options = {}) {
    log(LogLevel::kWarning, text, options);
  }
  void error(std::string_view text, const LogOptions& options = {}) {
    log(LogLevel::kError, text, options);
  }
  // Logs each text once in the lifetime of this logger.
  void warning_once(std::string_view text, const LogOptions& options = {});
  void log(LogLevel level, std::string_view text, const LogOptions& options = {});

  LogLevel level() const { return level_; }
  void set_level(LogLevel level) { level_ = level; }
  // Receives lines without their end; stderr by default.
  void set_sink(Sink sink) { sink_ = std::move(sink); }

 private:
  std::string name_;
  const ProcessControl& ranks_;
  LogLevel level_;
  Sink sink_;
  std::set<std::string, std::less<>> said_;
};

}  // namespace tessera
