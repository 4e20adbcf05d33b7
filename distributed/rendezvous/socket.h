// TCP sockets with deadlines, for the store. All of them close on exec and never raise SIGPIPE.
#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <utility>

namespace tessera::distributed {

using Clock = std::chrono::steady_clock;

// Owns a file descriptor.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  ~FileDescriptor() { reset(); }
  void reset();
  int release() { return std::exchange(fd_, -1); }
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// A socket that listens on host:port (port 0: any free one), not blocking. DistributedError.
FileDescriptor listen_on(const std::string& host, int port);
int local_port(const FileDescriptor& socket);
// A connection to host:port; empty where nobody listens there (yet). DistributedError where the
// host's name is unknown.
FileDescriptor try_connect(const std::string& host, int port, Clock::time_point deadline);

// No delay for small messages; probes that notice a machine without power.
void prepare_stream(int socket);

enum class Transfer {
  kDone,
  kClosed,    // the other side is gone
  kDeadline,  // not all bytes came or went in time
};
Transfer send_all(int socket, std::string_view bytes, Clock::time_point deadline);
Transfer receive_exact(int socket, char* bytes, size_t size, Clock::time_point deadline);

}  // namespace tessera::distributed
