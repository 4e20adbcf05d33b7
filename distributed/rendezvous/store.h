// Stores: small key-value stores through which ranks find each other, exchange ids and report
// failures. Keys are text, values any bytes.
//
//     auto store = distributed::TcpStore::connect({"10.0.0.1", 29500, token}, 30s);
//     store->set("nccl/id", id);                       // rank 0
//     std::string id = store->wait("nccl/id", 60s);    // the others
//
// Kinds: MemoryStore (rank threads of a process), FileStore (a path that all ranks see),
// TcpStore (clients of a TcpStoreServer, hosted by the launcher or by rank 0), PrefixStore (a
// part of another store). All functions may be called from several threads at once; a waiting
// call does not hold up others.
//
// Errors: StoreTimeout if a wait timed out, else DistributedError: host lost, refused, closed.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/core/error.h>

namespace tessera::distributed {

using Milliseconds = std::chrono::milliseconds;

// A wait on the store, or for the store's host, timed out.
class StoreTimeout : public DistributedError {
 public:
  using DistributedError::DistributedError;
};

struct StoreEntry {
  std::string key;
  std::string value;
  friend bool operator==(const StoreEntry&, const StoreEntry&) = default;
};

// Changes under a prefix since a revision; entries in the order in which they were written.
struct StoreChanges {
  int64_t revision = 0;  // pass it to the next watch
  std::vector<StoreEntry> entries;
};

class Store {
 public:
  virtual ~Store() = default;

  virtual void set(std::string_view key, std::string_view value) = 0;
  // The current value; nullopt if the key is absent.
  virtual std::optional<std::string> get(std::string_view key) = 0;
  // Waits for the key and returns its value. StoreTimeout after `timeout`.
  virtual std::string wait(std::string_view key, Milliseconds timeout) = 0;
  // Adds to a whole number kept as decimal text, absent counting as 0, atomically for all clients;
  // returns the sum. DistributedError if the value is something else.
  virtual int64_t add(std::string_view key, int64_t amount) = 0;
  // Writes `desired` if the value equals `expected` (nullopt: if the key is absent), atomically for
  // all clients; returns whether it did.
  virtual bool compare_set(std::string_view key, std::optional<std::string_view> expected,
                           std::string_view desired) = 0;
  // Whether all keys exist.
  virtual bool check(std::span<const std::string> keys) = 0;
  // Removes the key; returns whether it existed.
  virtual bool remove(std::string_view key) = 0;
  // Keys that begin with `prefix`, sorted.
  virtual std::vector<std::string> list(std::string_view prefix) = 0;
  // Entries under `prefix` that were written after revision `after` (0: all); waits up to `timeout`
  // for the first one, and is empty if nothing was written. A key written twice is reported once,
  // with its last value; removals are not reported.
  virtual StoreChanges watch(std::string_view prefix, int64_t after, Milliseconds timeout) = 0;
};

// For threads of one process.
class MemoryStore : public Store {
 public:
  MemoryStore();
  ~MemoryStore() override;
  void set(std::string_view key, std::string_view value) override;
  std::optional<std::string> get(std::string_view key) override;
  std::string wait(std::string_view key, Milliseconds timeout) override;
  int64_t add(std::string_view key, int64_t amount) override;
  bool compare_set(std::string_view key, std::optional<std::string_view> expected,
                   std::string_view desired) override;
  bool check(std::span<const std::string> keys) override;
  bool remove(std::string_view key) override;
  std::vector<std::string> list(std::string_view prefix) override;
  StoreChanges watch(std::string_view prefix, int64_t after, Milliseconds timeout) override;

 private:
  friend class TcpStoreServer;
  struct State;
  std::unique_ptr<State> state_;
};

// A file that all ranks see, as an append-only log under a file lock. It is created if missing and
// never removed; a new job needs a new path. A writer that died in the middle of a record leaves
// nothing behind. Waits check the file every 1 to 20 ms.
class FileStore : public Store {
 public:
  explicit FileStore(std::string path);  // IoError where it cannot be opened
  ~FileStore() override;
  void set(std::string_view key, std::string_view value) override;
  std::optional<std::string> get(std::string_view key) override;
  std::string wait(std::string_view key, Milliseconds timeout) override;
  int64_t add(std::string_view key, int64_t amount) override;
  bool compare_set(std::string_view key, std::optional<std::string_view> expected,
                   std::string_view desired) override;
  bool check(std::span<const std::string> keys) override;
  bool remove(std::string_view key) override;
  std::vector<std::string> list(std::string_view prefix) override;
  StoreChanges watch(std::string_view prefix, int64_t after, Milliseconds timeout) override;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Keys of `store` that begin with `prefix`, without the prefix.
class PrefixStore : public Store {
 public:
  PrefixStore(std::string prefix, std::shared_ptr<Store> store);
  void set(std::string_view key, std::string_view value) override;
  std::optional<std::string> get(std::string_view key) override;
  std::string wait(std::string_view key, Milliseconds timeout) override;
  int64_t add(std::string_view key, int64_t amount) override;
  bool compare_set(std::string_view key, std::optional<std::string_view> expected,
                   std::string_view desired) override;
  bool check(std::span<const std::string> keys) override;
  bool remove(std::string_view key) override;
  std::vector<std::string> list(std::string_view prefix) override;
  StoreChanges watch(std::string_view prefix, int64_t after, Milliseconds timeout) override;

 private:
  std::string full(std::string_view key) const;
  std::string prefix_;
  std::shared_ptr<Store> store_;
};

// Where a TcpStoreServer listens. Clients that do not know the token are refused.
struct StoreAddress {
  std::string host = "127.0.0.1";
  int port = 0;
  std::string token;
};

// Serves a store to TcpStore clients, from one thread of any process. The destructor closes every
// connection, which clients notice as the loss of the host.
class TcpStoreServer {
 public:
  // Listens on `address.port` (0: any free one) of `address.host` ("0.0.0.0": all interfaces).
  explicit TcpStoreServer(StoreAddress address);
  ~TcpStoreServer();
  TcpStoreServer(const TcpStoreServer&) = delete;
  TcpStoreServer& operator=(const TcpStoreServer&) = delete;

  int port() const { return port_; }
  // The same store for the hosting process, without a socket.
  const std::shared_ptr<MemoryStore>& store() const { return store_; }

 private:
  struct Loop;
  std::shared_ptr<MemoryStore> store_;
  std::unique_ptr<Loop> loop_;
  int port_ = 0;
};

// A client. Concurrent calls use separate connections.
class TcpStore : public Store {
 public:
  // Retries until the host answers; StoreTimeout after `timeout`, DistributedError if it refuses
  // (another program, a wrong token).
  static std::shared_ptr<TcpStore> connect(StoreAddress address, Milliseconds timeout);
  ~TcpStore() override;

  void set(std::string_view key, std::string_view value) override;
  std::optional<std::string> get(std::string_view key) override;
  std::string wait(std::string_view key, Milliseconds timeout) override;
  int64_t add(std::string_view key, int64_t amount) override;
  bool compare_set(std::string_view key, std::optional<std::string_view> expected,
                   std::string_view desired) override;
  bool check(std::span<const std::string> keys) override;
  bool remove(std::string_view key) override;
  std::vector<std::string> list(std::string_view prefix) override;
  StoreChanges watch(std::string_view prefix, int64_t after, Milliseconds timeout) override;

  // A last will: the server writes key = value as soon as this process has ended without
  // withdrawing it, however it ended: the kernel closes the socket of a killed process within
  // milliseconds. A second call replaces the first.
  void leave_will(std::string_view key, std::string_view value);
  void withdraw_will();
  // Makes every waiting and later call throw DistributedError, to stop a watching thread.
  void interrupt();

  const StoreAddress& address() const { return address_; }

 private:
  explicit TcpStore(StoreAddress address);
  std::string call(const std::string& request, Milliseconds timeout, std::string_view what);
  struct Connections;
  StoreAddress address_;
  std::unique_ptr<Connections> connections_;
};

}  // namespace tessera::distributed
