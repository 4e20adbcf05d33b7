#include <algorithm>
#include <mutex>
#include <set>
#include <thread>

#include <sys/socket.h>

#include <tessera/distributed/rendezvous/socket.h>
#include <tessera/distributed/rendezvous/store.h>
#include <tessera/distributed/rendezvous/store_table.h>
#include <tessera/distributed/rendezvous/store_wire.h>

namespace tessera::distributed {
namespace {

using wire::Command;
using wire::Status;

// Beyond its own timeout a host that lives answers at once, even on a loaded machine.
constexpr Milliseconds kAnswerTime{10000};

std::string name_of(const StoreAddress& address) {
  return address.host + ":" + std::to_string(address.port);
}

[[noreturn]] void throw_lost(const StoreAddress& address) {
  TS_THROW(DistributedError, "store", "the host at ", name_of(address),
           " is gone (the launcher, or rank 0 where it hosts the store); see its output for why");
}

std::string request(Command operation) { return std::string(1, static_cast<char>(operation)); }

std::string request(Command operation, std::string_view key) {
  std::string body = request(operation);
  wire::put_string(body, key);
  return body;
}

Clock::time_point deadline_in(Milliseconds timeout) {
  return Clock::now() + std::min(timeout, Milliseconds(std::chrono::hours(24 * 365)));
}

}  // namespace

// Sockets that are open: in use, or kept for the next call.
struct TcpStore::Connections {
  std::mutex mutex;
  std::vector<FileDescriptor> idle;
  std::set<int> in_use;
  FileDescriptor will;
  bool interrupted = false;

  void check_open(const StoreAddress& address) const {
    TS_CHECK_AS(DistributedError, !interrupted, "store", "this client of ", name_of(address),
                " was closed");
  }
};

TcpStore::TcpStore(StoreAddress address)
    : address_(std::move(address)), connections_(std::make_unique<Connections>()) {}
TcpStore::~TcpStore() = default;

namespace {

// Sends a message and reads its reply's body.
Transfer exchange(int socket, const std::string& body, Clock::time_point deadline,
                  std::string& answer) {
  Transfer done = send_all(socket, wire::framed(body), deadline);
  if (done != Transfer::kDone) return done;
  char head[4];
  done = receive_exact(socket, head, sizeof head, deadline);
  if (done != Transfer::kDone) return done;
  wire::Reader reader{std::string_view(head, sizeof head)};
  const auto size = reader.number<uint32_t>();
  if (size == 0 || size > wire::kMessageLimit) return Transfer::kClosed;
  answer.resize(size);
  return receive_exact(socket, answer.data(), size, deadline);
}

// A connection that has shown the token; empty where nobody listens.
FileDescriptor open_connection(const StoreAddress& address, Clock::time_point deadline) {
  FileDescriptor socket = try_connect(address.host, address.port, deadline);
  if (!socket) return {};
  std::string hello = request(Command::kHello, wire::kMagic);
  wire::put_string(hello, address.token);
  std::string answer;
  const Transfer done =
      exchange(socket.get(), hello, std::max(deadline, Clock::now() + kAnswerTime), answer);
  TS_CHECK_AS(distributed::StoreTimeout, done != Transfer::kDeadline, "store", "the program at ",
              name_of(address), " does not answer; check the address");
  TS_CHECK_AS(DistributedError, done == Transfer::kDone, "store", "the program at ",
              name_of(address), " closed the connection: it is no store, or is ending");
  wire::Reader reader{answer};
  if (static_cast<Status>(reader.number<uint8_t>()) != Status::kOk) {
    TS_THROW(DistributedError, "store", name_of(address), " refuses: ", reader.string());
  }
  return socket;
}

}  // namespace

std::shared_ptr<TcpStore> TcpStore::connect(StoreAddress address, Milliseconds timeout) {
  TS_CHECK_AS(DistributedError, address.port > 0 && address.port < 65536, "store",
              "a port is a number from 1 to 65535; got ", address.port);
  std::shared_ptr<TcpStore> store(new TcpStore(std::move(address)));
  const Clock::time_point deadline = deadline_in(timeout);
  Milliseconds pause{2};
  while (true) {
    FileDescriptor socket = open_connection(store->address_, deadline);
    if (socket) {
      store->connections_->idle.push_back(std::move(socket));
      return store;
    }
    TS_CHECK_AS(distributed::StoreTimeout, Clock::now() + pause < deadline, "store",
                "nobody listens at ", name_of(store->address_), " after ", timeout.count() / 1000.0,
                " s; check that the launcher or rank 0 lives and that the port is reachable");
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, Milliseconds(100));
  }
}

std::string TcpStore::call(const std::string& body, Milliseconds timeout, std::string_view what) {
  TS_CHECK_AS(DistributedError, body.size() <= wire::kMessageLimit, "store",
              "a value has at most 256 MiB; got ", body.size(), " bytes; send it in pieces");
  const Clock::time_point deadline = deadline_in(timeout) + kAnswerTime;
  Connections& connections = *connections_;
  FileDescriptor socket;
  {
    const std::lock_guard lock(connections.mutex);
    connections.check_open(address_);
    if (!connections.idle.empty()) {
      socket = std::move(connections.idle.back());
      connections.idle.pop_back();
      connections.in_use.insert(socket.get());
    }
  }
  if (!socket) {
    socket = open_connection(address_, Clock::now() + kAnswerTime);
    if (!socket) throw_lost(address_);
    const std::lock_guard lock(connections.mutex);
    connections.check_open(address_);
    connections.in_use.insert(socket.get());
  }
  std::string answer;
  const Transfer done = exchange(socket.get(), body, deadline, answer);
  {
    const std::lock_guard lock(connections.mutex);
    connections.in_use.erase(socket.get());
    connections.check_open(address_);
    if (done == Transfer::kDone) connections.idle.push_back(std::move(socket));
  }
  if (done == Transfer::kClosed) throw_lost(address_);
  TS_CHECK_AS(distributed::StoreTimeout, done == Transfer::kDone, "store", "the host at ",
              name_of(address_), " did not answer (", what, "); it hangs or the network is cut");
  wire::Reader reader{answer};
  const auto status = static_cast<Status>(reader.number<uint8_t>());
  if (status == Status::kTimeout) throw_not_set(what, timeout);
  if (status == Status::kError) throw DistributedError(std::string(reader.string()));
  return answer.substr(1);
}

void TcpStore::set(std::string_view key, std::string_view value) {
  std::string body = request(Command::kSet, key);
  wire::put_string(body, value);
  call(body, Milliseconds(0), key);
}

std::optional<std::string> TcpStore::get(std::string_view key) {
  const std::string answer = call(request(Command::kGet, key), Milliseconds(0), key);
  wire::Reader reader{answer};
  if (reader.number<uint8_t>() == 0) return std::nullopt;
  return std::string(reader.string());
}

std::string TcpStore::wait(std::string_view key, Milliseconds timeout) {
  std::string body = request(Command::kWait);
  wire::put_number<int64_t>(body, timeout.count());
  wire::put_string(body, key);
  const std::string answer = call(body, timeout, key);
  wire::Reader reader{answer};
  return std::string(reader.string());
}

int64_t TcpStore::add(std::string_view key, int64_t amount) {
  std::string body = request(Command::kAdd, key);
  wire::put_number(body, amount);
  const std::string answer = call(body, Milliseconds(0), key);
  return wire::Reader{answer}.number<int64_t>();
}

bool TcpStore::compare_set(std::string_view key, std::optional<std::string_view> expected,
                           std::string_view desired) {
  std::string body = request(Command::kCompareSet, key);
  wire::put_number<uint8_t>(body, expected.has_value());
  wire::put_string(body, expected.value_or(""));
  wire::put_string(body, desired);
  return call(body, Milliseconds(0), key)[0] != 0;
}

bool TcpStore::check(std::span<const std::string> keys) {
  std::string body = request(Command::kCheck);
  for (const std::string& key : keys) wire::put_string(body, key);
  return call(body, Milliseconds(0), "check")[0] != 0;
}

bool TcpStore::remove(std::string_view key) {
  return call(request(Command::kRemove, key), Milliseconds(0), key)[0] != 0;
}

std::vector<std::string> TcpStore::list(std::string_view prefix) {
  const std::string answer = call(request(Command::kList, prefix), Milliseconds(0), prefix);
  wire::Reader reader{answer};
  std::vector<std::string> keys;
  while (!reader.rest.empty() && reader.good) keys.emplace_back(reader.string());
  return keys;
}

StoreChanges TcpStore::watch(std::string_view prefix, int64_t after, Milliseconds timeout) {
  std::string body = request(Command::kWatch);
  wire::put_number<int64_t>(body, timeout.count());
  wire::put_string(body, prefix);
  wire::put_number(body, after);
  const std::string answer = call(body, timeout, prefix);
  wire::Reader reader{answer};
  StoreChanges changes;
  changes.revision = reader.number<int64_t>();
  while (!reader.rest.empty() && reader.good) {
    StoreEntry entry;
    entry.key = reader.string();
    entry.value = reader.string();
    changes.entries.push_back(std::move(entry));
  }
  return changes;
}

void TcpStore::leave_will(std::string_view key, std::string_view value) {
  std::string body = request(Command::kWill, key);
  wire::put_string(body, value);
  FileDescriptor fresh;
  if (!connections_->will) fresh = open_connection(address_, Clock::now() + kAnswerTime);
  const std::lock_guard lock(connections_->mutex);
  connections_->check_open(address_);
  if (!connections_->will) connections_->will = std::move(fresh);
  std::string answer;
  if (!connections_->will || exchange(connections_->will.get(), body, Clock::now() + kAnswerTime,
                                      answer) != Transfer::kDone) {
    throw_lost(address_);
  }
}

void TcpStore::withdraw_will() {
  const std::lock_guard lock(connections_->mutex);
  if (!connections_->will) return;
  std::string answer;
  // Where the host is gone there is nobody left who could read the will.
  exchange(connections_->will.get(), request(Command::kWithdrawWill), Clock::now() + kAnswerTime,
           answer);
  connections_->will.reset();
}

void TcpStore::interrupt() {
  const std::lock_guard lock(connections_->mutex);
  connections_->interrupted = true;
  for (const int socket : connections_->in_use) ::shutdown(socket, SHUT_RDWR);
}

}  // namespace tessera::distributed
