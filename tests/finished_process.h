// Runs a program and keeps what it printed: for tests of commands.
#pragma once

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <tessera/accelerate/launch/process.h>

namespace tessera {

struct FinishedProcess {
  launch::ExitStatus status;
  std::string output;  // stdout
  std::string error;   // stderr

  int code() const { return status.shell_code(); }
  bool printed(const std::string& text) const { return output.find(text) != std::string::npos; }
  bool complained(const std::string& text) const { return error.find(text) != std::string::npos; }
};

inline std::ostream& operator<<(std::ostream& out, const FinishedProcess& process) {
  return out << "code " << process.code() << "\nstdout:\n"
             << process.output << "stderr:\n"
             << process.error;
}

inline void drain(launch::FileDescriptor& source, std::string& text) {
  char buffer[4096];
  while (source) {
    const ssize_t size = ::read(source.get(), buffer, sizeof buffer);
    if (size > 0) {
      text.append(buffer, static_cast<size_t>(size));
    } else if (size == 0) {
      source.reset();
    } else {
      return;
    }
  }
}

#if defined(TESSERA_TEST_HAS_MPI)
// Why `tessera launch` cannot start several ranks here; empty where it can.
inline std::string why_no_mpi() {
  if (!TESSERA_TEST_HAS_MPI) return "built without MPI";
  const bool found = !launch::find_program("mpirun", distributed::process_environment()).empty();
  return found ? "" : "mpirun is not installed";
}
#define SKIP_WITHOUT_MPI() \
  if (const std::string reason = why_no_mpi(); !reason.empty()) GTEST_SKIP() << reason
#endif

// `meanwhile(pid, output so far)` is called again and again while it runs. A program that does not
// end within a minute is killed, and the test fails.
inline FinishedProcess run_process(
    const std::vector<std::string>& command, const launch::Environment& changes = {},
    const std::function<void(pid_t, const std::string&)>& meanwhile = {}) {
  launch::SpawnOptions options;
  options.command = command;
  options.environment = launch::Environment(changes);
  for (const auto& [name, value] : distributed::process_environment()) {
    options.environment.emplace(name, value);
  }
  options.capture = true;
  options.death_signal = SIGKILL;
  launch::Child child = launch::spawn(options);
  FinishedProcess result;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  bool ended = false;
  while (!ended || child.output || child.error) {
    pollfd entries[2] = {{child.output.get(), POLLIN, 0}, {child.error.get(), POLLIN, 0}};
    ::poll(entries, 2, 5);
    drain(child.output, result.output);
    drain(child.error, result.error);
    int status = 0;
    if (!ended && ::waitpid(child.pid, &status, WNOHANG) == child.pid) {
      ended = true;
      result.status = launch::ExitStatus::from_wait(status);
    }
    if (std::chrono::steady_clock::now() > deadline) {
      ADD_FAILURE() << command[0] << " did not end within a minute";
      ::kill(-child.pid, SIGKILL);
      if (ended) return result;
    }
    if (meanwhile && !ended) meanwhile(child.pid, result.output);
  }
  return result;
}

// A folder that the test writes to, removed at its end.
class TestFolder {
 public:
  TestFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "tessera-XXXXXX").string();
    path_ = ::mkdtemp(pattern.data());
  }
  ~TestFolder() { std::filesystem::remove_all(path_); }
  TestFolder(const TestFolder&) = delete;
  TestFolder& operator=(const TestFolder&) = delete;

  std::string path(const std::string& name) const { return (path_ / name).string(); }
  std::string write(const std::string& name, const std::string& text, bool executable = false) {
    std::ofstream(path_ / name) << text;
    if (executable) {
      std::filesystem::permissions(path_ / name, std::filesystem::perms::owner_all);
    }
    return path(name);
  }
  std::string read(const std::string& name) const {
    std::ifstream file(path_ / name);
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
  }

 private:
  std::filesystem::path path_;
};

}  // namespace tessera
