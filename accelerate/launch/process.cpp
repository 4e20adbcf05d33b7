#include <tessera/accelerate/launch/process.h>

#include <cerrno>
#include <csignal>
#include <cstring>

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <tessera/core/error.h>

namespace tessera::launch {
namespace {

sigset_t handled_signals() {
  sigset_t set;
  ::sigemptyset(&set);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGCHLD}) {
    ::sigaddset(&set, signal);
  }
  return set;
}

bool is_executable(const std::string& path) {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode) &&
         ::access(path.c_str(), X_OK) == 0;
}

std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (std::string& text : strings) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

}  // namespace

void make_pipe(FileDescriptor& read_end, FileDescriptor& write_end) {
  int ends[2];
  TS_CHECK_AS(IoError, ::pipe2(ends, O_CLOEXEC) == 0, "launch", "the system gives no pipe (",
              std::strerror(errno), ")");
  read_end = FileDescriptor(ends[0]);
  write_end = FileDescriptor(ends[1]);
}

std::string ExitStatus::describe() const {
  if (signal == 0) return "exited with code " + std::to_string(code);
  const char* name = ::strsignal(signal);
  return "was killed by signal " + std::to_string(signal) + " (" + (name ? name : "?") + ")";
}

ExitStatus ExitStatus::from_wait(int status) {
  ExitStatus result;
  if (WIFSIGNALED(status)) {
    result.signal = WTERMSIG(status);
  } else {
    result.code = WEXITSTATUS(status);
  }
  return result;
}

std::string find_program(const std::string& name, const Environment& environment) {
  if (name.empty()) return "";
  if (name.find('/') != std::string::npos) return is_executable(name) ? name : "";
  const auto at = environment.find("PATH");
  std::string path = at == environment.end() ? "/usr/local/bin:/usr/bin:/bin" : at->second;
  for (size_t begin = 0; begin <= path.size();) {
    size_t end = path.find(':', begin);
    if (end == std::string::npos) end = path.size();
    std::string folder = path.substr(begin, end - begin);
    if (folder.empty()) folder = ".";
    const std::string candidate = folder + "/" + name;
    if (is_executable(candidate)) return candidate;
    begin = end + 1;
  }
  return "";
}

Child spawn(const SpawnOptions& options) {
  TS_CHECK(!options.command.empty(), "launch", "there is no program to start");
  const std::string program = find_program(options.command[0], options.environment);
  TS_CHECK_AS(IoError, !program.empty(), "launch", "the program ", options.command[0],
              " was not found or cannot be executed; check the path and PATH");

  // Between fork and exec only calls that are safe in a program with threads: all memory is ready.
  std::vector<std::string> command = options.command;
  std::vector<std::string> variables;
  for (const auto& [name, value] : options.environment) variables.push_back(name + "=" + value);
  const std::vector<char*> arguments = pointers(command);
  const std::vector<char*> environment = pointers(variables);

  Child child;
  FileDescriptor output;
  FileDescriptor error;
  if (options.capture) make_pipe(child.output, output);
  if (options.capture || options.capture_error) make_pipe(child.error, error);
  FileDescriptor no_input;
  if (::isatty(STDIN_FILENO)) no_input = FileDescriptor(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  FileDescriptor problem_read;
  FileDescriptor problem_write;  // closed by a successful exec
  make_pipe(problem_read, problem_write);

  const pid_t parent = ::getpid();
  child.pid = ::fork();
  TS_CHECK_AS(IoError, child.pid >= 0, "launch", "the system starts no process (",
              std::strerror(errno), ")");
  if (child.pid == 0) {
    ::setpgid(0, 0);
    if (options.death_signal != 0) {
      ::prctl(PR_SET_PDEATHSIG, options.death_signal);
      if (::getppid() != parent) ::_exit(1);  // it died before
    }
    if (no_input) ::dup2(no_input.get(), STDIN_FILENO);
    if (output) ::dup2(output.get(), STDOUT_FILENO);
    if (error) ::dup2(error.get(), STDERR_FILENO);
    sigset_t none;
    ::sigemptyset(&none);
    ::sigprocmask(SIG_SETMASK, &none, nullptr);
    ::execve(program.c_str(), arguments.data(), environment.data());
    const int problem = errno;
    [[maybe_unused]] const ssize_t size = ::write(problem_write.get(), &problem, sizeof problem);
    ::_exit(127);
  }
  ::setpgid(child.pid, child.pid);  // both sides do, so that it holds for whoever goes on first
  problem_write.reset();
  int problem = 0;
  if (::read(problem_read.get(), &problem, sizeof problem) == sizeof problem) {
    ::waitpid(child.pid, nullptr, 0);
    TS_THROW(IoError, "launch", "the program ", program, " cannot be executed (",
             std::strerror(problem), ")");
  }
  for (const FileDescriptor* pipe : {&child.output, &child.error}) {
    if (*pipe) ::fcntl(pipe->get(), F_SETFL, O_NONBLOCK);
  }
  return child;
}

void block_signals() {
  const sigset_t set = handled_signals();
  ::pthread_sigmask(SIG_BLOCK, &set, nullptr);
}

FileDescriptor signal_descriptor() {
  const sigset_t set = handled_signals();
  FileDescriptor result(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  TS_CHECK_AS(IoError, static_cast<bool>(result), "launch",
              "the system gives no signal descriptor (", std::strerror(errno), ")");
  return result;
}

void write_all(int target, std::string_view text) {
  while (!text.empty()) {
    const ssize_t size = ::write(target, text.data(), text.size());
    if (size > 0) {
      text.remove_prefix(static_cast<size_t>(size));
    } else if (errno != EINTR && errno != EAGAIN) {
      return;
    }
  }
}

void LinePrefixer::pump() {
  char buffer[65536];
  while (source_) {
    const ssize_t size = ::read(source_.get(), buffer, sizeof buffer);
    if (size > 0) {
      pending_.append(buffer, static_cast<size_t>(size));
      write_lines(false);
    } else if (size == 0 || (errno != EAGAIN && errno != EINTR)) {
      close();
    } else if (errno == EAGAIN) {
      return;
    }
  }
}

void LinePrefixer::close() {
  write_lines(true);
  source_.reset();
}

void LinePrefixer::write_lines(bool all) {
  std::string lines;
  size_t begin = 0;
  for (size_t end = pending_.find('\n'); end != std::string::npos;
       end = pending_.find('\n', begin)) {
    if (drop_ == nullptr || !drop_(std::string_view(pending_).substr(begin, end - begin))) {
      lines += prefix_;
      lines.append(pending_, begin, end + 1 - begin);
    }
    begin = end + 1;
  }
  if (all && begin < pending_.size()) {
    lines += prefix_ + pending_.substr(begin) + "\n";
    begin = pending_.size();
  }
  pending_.erase(0, begin);
  if (!lines.empty()) write_(lines);
}

}  // namespace tessera::launch
