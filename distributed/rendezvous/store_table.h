// The dictionary behind every kind of store, and the state of MemoryStore, which TcpStoreServer
// shares. A table has no lock of its own.
#pragma once

#include <condition_variable>
#include <map>
#include <mutex>

#include <tessera/distributed/rendezvous/store.h>

namespace tessera::distributed {

[[noreturn]] void throw_not_set(std::string_view key, Milliseconds timeout);

struct StoreTable {
  struct Entry {
    std::string value;
    int64_t revision = 0;
  };
  std::map<std::string, Entry, std::less<>> entries;
  int64_t revision = 0;  // of the last write

  const std::string* find(std::string_view key) const;
  void set(std::string_view key, std::string_view value);
  bool erase(std::string_view key);
  // What `add` would write; DistributedError where the value is no whole number or leaves 64 bits.
  int64_t sum(std::string_view key, int64_t amount) const;
  bool equals(std::string_view key, std::optional<std::string_view> expected) const;
  bool contains(std::span<const std::string> keys) const;
  std::vector<std::string> list(std::string_view prefix) const;
  StoreChanges changes(std::string_view prefix, int64_t after) const;
};

struct MemoryStore::State {
  std::mutex mutex;
  std::condition_variable changed;
  StoreTable table;
  int wake = -1;  // eventfd of the server that answers clients' waits from this table

  void set(std::string_view key, std::string_view value);  // with the mutex held
};

}  // namespace tessera::distributed
