#include <tessera/distributed/rendezvous/socket.h>

#include <cerrno>
#include <cstring>

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <tessera/core/error.h>

namespace tessera::distributed {
namespace {

struct AddressList {
  addrinfo* first = nullptr;
  ~AddressList() {
    if (first != nullptr) ::freeaddrinfo(first);
  }
};

void resolve(const std::string& host, int port, bool passive, AddressList& list) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | (passive ? AI_PASSIVE : 0);
  const int status = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list.first);
  TS_CHECK_AS(DistributedError, status == 0, "store", "the host name ", host, " is unknown (",
              ::gai_strerror(status), "); check it, or give an address");
}

// Milliseconds for poll(), rounded up so that a wait never spins.
int poll_timeout(Clock::time_point deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return left <= 0 ? 0 : static_cast<int>(std::min<int64_t>(left, 3600 * 1000));
}

// Whether `events` (or a close) came before the deadline.
bool wait_for(int socket, short events, Clock::time_point deadline) {
  while (true) {
    pollfd entry{socket, events, 0};
    const int ready = ::poll(&entry, 1, poll_timeout(deadline));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return true;  // the transfer reports it
    if (Clock::now() >= deadline) return false;
  }
}

// While a port has no listener yet, TCP can connect a socket to itself.
bool connected_to_itself(int socket) {
  sockaddr_storage own{};
  sockaddr_storage peer{};
  socklen_t own_size = sizeof own;
  socklen_t peer_size = sizeof peer;
  ::getsockname(socket, reinterpret_cast<sockaddr*>(&own), &own_size);
  ::getpeername(socket, reinterpret_cast<sockaddr*>(&peer), &peer_size);
  return own_size == peer_size && std::memcmp(&own, &peer, own_size) == 0;
}

}  // namespace

void FileDescriptor::reset() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

void prepare_stream(int socket) {
  const int yes = 1;
  ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  // A machine that lost power closes nothing: probes find it after 10 + 3 * 5 seconds.
  const int idle = 10;
  const int interval = 5;
  const int probes = 3;
  ::setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &yes, sizeof yes);
  ::setsockopt(socket, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
  ::setsockopt(socket, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
  ::setsockopt(socket, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
}

FileDescriptor listen_on(const std::string& host, int port) {
  AddressList list;
  resolve(host, port, true, list);
  int problem = 0;
  for (const addrinfo* at = list.first; at != nullptr; at = at->ai_next) {
    FileDescriptor socket(::socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const int yes = 1;
    if (socket) ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (socket && ::bind(socket.get(), at->ai_addr, at->ai_addrlen) == 0 &&
        ::listen(socket.get(), 1024) == 0) {
      return socket;
    }
    problem = errno;
  }
  TS_THROW(DistributedError, "store", "cannot listen on ", host, ":", port, " (",
           std::strerror(problem), "); choose another address or a free port");
}

int local_port(const FileDescriptor& socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<sockaddr_in&>(address).sin_port);
}

FileDescriptor try_connect(const std::string& host, int port, Clock::time_point deadline) {
  AddressList list;
  resolve(host, port, false, list);
  for (const addrinfo* at = list.first; at != nullptr; at = at->ai_next) {
    FileDescriptor socket(::socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket) continue;
    prepare_stream(socket.get());
    if (::connect(socket.get(), at->ai_addr, at->ai_addrlen) != 0) {
      if (errno != EINPROGRESS || !wait_for(socket.get(), POLLOUT, deadline)) continue;
      int problem = 0;
      socklen_t size = sizeof problem;
      ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &problem, &size);
      if (problem != 0) continue;
    }
    if (!connected_to_itself(socket.get())) return socket;
  }
  return {};
}

Transfer send_all(int socket, std::string_view bytes, Clock::time_point deadline) {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
      bytes.remove_prefix(static_cast<size_t>(sent));
    } else if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      if (!wait_for(socket, POLLOUT, deadline)) return Transfer::kDeadline;
    } else if (sent == 0 || errno != EINTR) {
      return Transfer::kClosed;
    }
  }
  return Transfer::kDone;
}

Transfer receive_exact(int socket, char* bytes, size_t size, Clock::time_point deadline) {
  while (size > 0) {
    const ssize_t received = ::recv(socket, bytes, size, MSG_DONTWAIT);
    if (received > 0) {
      bytes += received;
      size -= static_cast<size_t>(received);
    } else if (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      if (!wait_for(socket, POLLIN, deadline)) return Transfer::kDeadline;
    } else if (received == 0 || errno != EINTR) {
      return Transfer::kClosed;
    }
  }
  return Transfer::kDone;
}

}  // namespace tessera::distributed
