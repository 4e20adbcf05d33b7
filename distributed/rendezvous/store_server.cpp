#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <list>

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <tessera/core/thread.h>
#include <tessera/distributed/rendezvous/socket.h>
#include <tessera/distributed/rendezvous/store.h>
#include <tessera/distributed/rendezvous/store_table.h>
#include <tessera/distributed/rendezvous/store_wire.h>

namespace tessera::distributed {
namespace {

using wire::Command;
using wire::Status;

// A client's socket, what came of a message, what waits to be sent, and a wait in progress.
struct Connection {
  FileDescriptor socket;
  std::string in;
  std::string out;
  bool greeted = false;
  Clock::time_point since = Clock::now();
  bool broken = false;
  std::optional<StoreEntry> will;
  std::string waiting;  // a kWait or kWatch request without an answer yet
  Clock::time_point deadline;
};

std::string status_body(Status status) { return std::string(1, static_cast<char>(status)); }

std::string error_body(std::string_view message) {
  std::string body = status_body(Status::kError);
  wire::put_string(body, message);
  return body;
}

}  // namespace

struct TcpStoreServer::Loop {
  MemoryStore& store;
  std::string token;
  FileDescriptor listener;
  FileDescriptor wake;
  std::list<Connection> connections;
  std::atomic<bool> stop{false};
  Clock::time_point accept_after{};
  Thread thread;

  Loop(MemoryStore& memory, std::string secret) : store(memory), token(std::move(secret)) {}

  void run() {
    while (!stop) {
      wait_for_events();
      for (Connection& connection : connections) {
        if (!connection.waiting.empty()) answer_wait(connection);
        flush(connection);
      }
      drop_broken();
    }
  }

  // Sleeps until something happened and reads what came.
  void wait_for_events() {
    const Clock::time_point now = Clock::now();
    Clock::time_point next = now + std::chrono::hours(1);
    std::vector<pollfd> entries;
    entries.push_back({wake.get(), POLLIN, 0});
    const bool crowded = strangers() >= wire::kMostStrangers;
    const bool accepting = now >= accept_after && !crowded;
    entries.push_back({accepting ? listener.get() : -1, POLLIN, 0});
    if (now < accept_after) next = std::min(next, accept_after);
    for (const Connection& connection : connections) {
      const short write = connection.out.empty() ? 0 : POLLOUT;
      entries.push_back({connection.socket.get(), static_cast<short>(POLLIN | write), 0});
      if (!connection.waiting.empty()) next = std::min(next, connection.deadline);
      if (!connection.greeted) {
        next = std::min(next, connection.since + (crowded ? wire::kHaste : wire::kGreetingTime));
      }
    }
    const auto left = std::chrono::ceil<Milliseconds>(next - now).count();
    ::poll(entries.data(), entries.size(), static_cast<int>(std::max<int64_t>(left, 0)));

    if (entries[0].revents != 0) {
      uint64_t count = 0;
      [[maybe_unused]] const ssize_t size = ::read(wake.get(), &count, sizeof count);
    }
    size_t at = 2;
    for (Connection& connection : connections) {
      if (entries[at++].revents != 0) receive(connection);
    }
    dismiss_strangers();
    if (entries[1].revents != 0) accept_all();
  }

  size_t strangers() const {
    return static_cast<size_t>(std::ranges::count(connections, false, &Connection::greeted));
  }
  void dismiss_strangers() {
    const Clock::time_point now = Clock::now();
    const bool crowded = strangers() >= wire::kMostStrangers;
    for (Connection& connection : connections) {
      const auto time = crowded ? wire::kHaste : wire::kGreetingTime;
      if (!connection.greeted && now >= connection.since + time) connection.broken = true;
    }
  }

  void accept_all() {
    for (size_t known = strangers(); known < wire::kMostStrangers; ++known) {
      const int fd = ::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
      if (fd < 0) {
        // Out of descriptors the listener stays readable: look again a little later.
        if (errno == EMFILE || errno == ENFILE) accept_after = Clock::now() + Milliseconds(100);
        return;
      }
      prepare_stream(fd);
      connections.emplace_back().socket = FileDescriptor(fd);
    }
  }

  void receive(Connection& connection) {
    char buffer[65536];
    while (!connection.broken) {
      const ssize_t size = ::recv(connection.socket.get(), buffer, sizeof buffer, 0);
      if (size > 0) {
        connection.in.append(buffer, static_cast<size_t>(size));
        take_messages(connection);
      } else if (size == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) {
        connection.broken = true;
      } else if (errno != EINTR) {
        return;
      }
    }
  }

  void take_messages(Connection& connection) {
    while (!connection.broken && connection.in.size() >= 4) {
      wire::Reader reader{connection.in};
      const auto size = reader.number<uint32_t>();
      if (size > (connection.greeted ? wire::kMessageLimit : wire::kGreetingLimit)) {
        connection.broken = true;  // not a client of ours
        return;
      }
      if (reader.rest.size() < size) return;
      const std::string body(reader.rest.substr(0, size));
      connection.in.erase(0, size + 4);
      take_message(connection, body);
    }
  }

  void take_message(Connection& connection, const std::string& body) {
    wire::Reader reader{body};
    const auto operation = static_cast<Command>(reader.number<uint8_t>());
    if (!connection.greeted) {
      const bool known = operation == Command::kHello && reader.string() == wire::kMagic;
      if (!known) {
        connection.broken = true;
        return;
      }
      connection.greeted = reader.string() == token && reader.good;
      reply(connection, connection.greeted
                            ? status_body(Status::kOk)
                            : error_body("the token is not this job's; the address belongs to "
                                         "another job"));
      if (!connection.greeted) {
        flush(connection);
        connection.broken = true;
      }
      return;
    }
    if (operation == Command::kWait || operation == Command::kWatch) {
      const auto milliseconds = reader.number<int64_t>();
      connection.deadline =
          Clock::now() + Milliseconds(std::clamp<int64_t>(milliseconds, 0, int64_t{1} << 40));
      connection.waiting = body;
      return;  // answered with all other waits
    }
    std::string answer;
    try {
      answer = serve(connection, operation, reader);
    } catch (const std::exception& error) {
      answer = error_body(error.what());
    }
    reply(connection, reader.good ? answer : error_body("store: a request ends too early"));
  }

  std::string serve(Connection& connection, Command operation, wire::Reader& reader) {
    std::string body = status_body(Status::kOk);
    switch (operation) {
      case Command::kSet: {
        const std::string_view key = reader.string();
        const std::string_view value = reader.string();
        if (reader.good) store.set(key, value);
        return body;
      }
      case Command::kGet: {
        const auto value = store.get(reader.string());
        wire::put_number<uint8_t>(body, value.has_value());
        wire::put_string(body, value.value_or(""));
        return body;
      }
      case Command::kAdd: {
        const std::string_view key = reader.string();
        const auto amount = reader.number<int64_t>();
        if (reader.good) wire::put_number(body, store.add(key, amount));
        return body;
      }
      case Command::kCompareSet: {
        const std::string_view key = reader.string();
        const bool expects = reader.number<uint8_t>() != 0;
        const std::string_view expected = reader.string();
        const std::string_view desired = reader.string();
        if (!reader.good) return body;
        const bool done = store.compare_set(
            key, expects ? std::optional<std::string_view>(expected) : std::nullopt, desired);
        wire::put_number<uint8_t>(body, done);
        return body;
      }
      case Command::kCheck: {
        std::vector<std::string> keys;
        while (!reader.rest.empty() && reader.good) keys.emplace_back(reader.string());
        wire::put_number<uint8_t>(body, store.check(keys));
        return body;
      }
      case Command::kRemove:
        wire::put_number<uint8_t>(body, store.remove(reader.string()));
        return body;
      case Command::kList:
        for (const std::string& key : store.list(reader.string())) wire::put_string(body, key);
        return body;
      case Command::kWill: {
        StoreEntry will;
        will.key = reader.string();
        will.value = reader.string();
        if (reader.good) connection.will = std::move(will);
        return body;
      }
      case Command::kWithdrawWill:
        connection.will.reset();
        return body;
      default:
        return error_body("store: the request is unknown to this version of the server");
    }
  }

  // Replies to a wait that can be answered or has run out.
  void answer_wait(Connection& connection) {
    wire::Reader reader{connection.waiting};
    const auto operation = static_cast<Command>(reader.number<uint8_t>());
    reader.number<int64_t>();  // the timeout
    const std::string_view key = reader.string();
    const bool late = Clock::now() >= connection.deadline;
    std::string body = status_body(Status::kOk);
    if (operation == Command::kWait) {
      if (const auto value = store.get(key)) {
        wire::put_string(body, *value);
      } else if (late) {
        body = status_body(Status::kTimeout);
      } else {
        return;
      }
    } else {
      const auto after = reader.number<int64_t>();
      const StoreChanges changes = store.watch(key, after, Milliseconds(0));
      if (changes.entries.empty() && !late) return;
      wire::put_number(body, changes.revision);
      for (const StoreEntry& entry : changes.entries) {
        wire::put_string(body, entry.key);
        wire::put_string(body, entry.value);
      }
    }
    reply(connection, reader.good ? body : error_body("store: a request ends too early"));
    connection.waiting.clear();
  }

  void reply(Connection& connection, const std::string& body) {
    wire::put_string(connection.out, body);
  }

  void flush(Connection& connection) {
    size_t sent = 0;
    while (sent < connection.out.size() && !connection.broken) {
      const ssize_t size = ::send(connection.socket.get(), connection.out.data() + sent,
                                  connection.out.size() - sent, MSG_NOSIGNAL);
      if (size > 0) {
        sent += static_cast<size_t>(size);
      } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
        break;
      } else if (errno != EINTR) {
        connection.broken = true;
      }
    }
    connection.out.erase(0, sent);
  }

  // A will is a write, which wakes the loop again for those who wait for it.
  void drop_broken() {
    for (auto at = connections.begin(); at != connections.end();) {
      if (!at->broken) {
        ++at;
        continue;
      }
      if (at->will) store.set(at->will->key, at->will->value);
      at = connections.erase(at);
    }
  }
};

TcpStoreServer::TcpStoreServer(StoreAddress address) : store_(std::make_shared<MemoryStore>()) {
  TS_CHECK_AS(DistributedError, address.port >= 0 && address.port < 65536, "store",
              "a port is a number from 0 to 65535; got ", address.port);
  loop_ = std::make_unique<Loop>(*store_, address.token);
  loop_->listener = listen_on(address.host, address.port);
  port_ = local_port(loop_->listener);
  loop_->wake = FileDescriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  TS_CHECK_AS(DistributedError, static_cast<bool>(loop_->wake), "store",
              "the system gives no event descriptor (", std::strerror(errno), ")");
  store_->state_->wake = loop_->wake.get();
  loop_->thread = Thread([loop = loop_.get()] { loop->run(); });
}

TcpStoreServer::~TcpStoreServer() {
  loop_->stop = true;
  {
    const std::lock_guard lock(store_->state_->mutex);
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(loop_->wake.get(), &one, sizeof one);
    store_->state_->wake = -1;
  }
  loop_->thread.join();
}

}  // namespace tessera::distributed
