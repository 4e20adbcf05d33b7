// Child processes: their output goes to pipes, their signals are restored, and they die with their
// parent.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <sys/types.h>

#include <tessera/distributed/rendezvous/detect.h>
#include <tessera/distributed/rendezvous/socket.h>

namespace tessera::launch {

using distributed::Environment;
using distributed::FileDescriptor;
using distributed::Milliseconds;

// How a process ended.
struct ExitStatus {
  int code = 0;    // where it exited
  int signal = 0;  // that killed it; 0: it exited

  bool success() const { return code == 0 && signal == 0; }
  int shell_code() const { return signal != 0 ? 128 + signal : code; }
  std::string describe() const;  // "was killed by signal 9 (Killed)", "exited with code 3"
  static ExitStatus from_wait(int status);
};

struct SpawnOptions {
  std::vector<std::string> command;  // a program, looked up in PATH, and its arguments
  Environment environment;           // all of it
  bool capture = false;              // stdout and stderr into pipes
  bool capture_error = false;        // stderr alone
  int death_signal = 0;              // sent to it when the calling thread dies
};

// Both ends close with an exec. IoError.
void make_pipe(FileDescriptor& read_end, FileDescriptor& write_end);

struct Child {
  pid_t pid = -1;  // also of its process group
  FileDescriptor output;
  FileDescriptor error;
};

// Starts a process, in a process group of its own, which may not read from a terminal: its input is
// then empty, else this process's. IoError where the program cannot be executed.
Child spawn(const SpawnOptions& options);

// The file that PATH gives for a program; empty if there is no executable one.
std::string find_program(const std::string& name, const Environment& environment);

// Blocks the signals that launcher and agents handle themselves, for this thread and those that it
// starts later. `spawn` gives its children an empty mask again.
void block_signals();
// A descriptor from which the blocked signals are read (signalfd_siginfo).
FileDescriptor signal_descriptor();

// Writes all of it, waiting where the target is full; not what nobody reads any more.
void write_all(int target, std::string_view text);

// Copies lines from a descriptor to `write`, whole ones in each call, with a prefix each; a last line
// without an end is kept until it ends or the source closes. Lines for which `drop` is true are left
// out.
class LinePrefixer {
 public:
  using Write = std::function<void(std::string_view lines)>;
  using Drop = bool (*)(std::string_view line);
  LinePrefixer(FileDescriptor source, Write write, std::string prefix, Drop drop = nullptr)
      : source_(std::move(source)),
        write_(std::move(write)),
        prefix_(std::move(prefix)),
        drop_(drop) {}
  int descriptor() const { return source_.get(); }
  bool open() const { return static_cast<bool>(source_); }
  // Reads what is there. Where the source is at its end, it closes.
  void pump();
  void close();  // writes the rest

 private:
  void write_lines(bool all);
  FileDescriptor source_;
  Write write_;
  std::string prefix_;
  Drop drop_;
  std::string pending_;
};

}  // namespace tessera::launch
