// A record of the log: u32 body size, u32 checksum, body. The body is an operation (set, remove),
// the key and the value, as store_wire.h writes strings.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <thread>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <tessera/distributed/rendezvous/socket.h>
#include <tessera/distributed/rendezvous/store.h>
#include <tessera/distributed/rendezvous/store_table.h>
#include <tessera/distributed/rendezvous/store_wire.h>

namespace tessera::distributed {
namespace {

enum class Change : uint8_t { kSet, kRemove };

uint32_t checksum(std::string_view bytes) {  // FNV-1a
  uint32_t hash = 2166136261u;
  for (const char byte : bytes) hash = (hash ^ static_cast<unsigned char>(byte)) * 16777619u;
  return hash;
}

// Holds the lock of the file for a scope.
class FileLock {
 public:
  FileLock(int fd, const std::string& path) : fd_(fd) {
    while (::flock(fd_, LOCK_EX) != 0) {
      TS_CHECK_AS(IoError, errno == EINTR, "FileStore", "cannot lock ", path, " (",
                  std::strerror(errno), "); the file system has to support locks");
    }
  }
  ~FileLock() { ::flock(fd_, LOCK_UN); }
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  int fd_;
};

}  // namespace

struct FileStore::State {
  std::string path;
  FileDescriptor file;
  std::mutex mutex;  // a file lock does not keep threads of one process apart
  StoreTable table;
  off_t end = 0;  // of the last whole record

  // What f() returns, with the file locked and read to its end.
  template <class F>
  auto locked(F f) {
    const std::lock_guard threads(mutex);
    const FileLock processes(file.get(), path);
    catch_up();
    return f();
  }

  // With mutex and file lock held: applies what others appended; cuts off what a writer that died
  // left of a record.
  void catch_up() {
    struct stat status {};
    TS_CHECK_AS(IoError, ::fstat(file.get(), &status) == 0, "FileStore", "cannot look at ", path,
                " (", std::strerror(errno), ")");
    if (status.st_size <= end) return;
    std::string bytes(static_cast<size_t>(status.st_size - end), '\0');
    size_t size = 0;
    while (size < bytes.size()) {
      const ssize_t count = ::pread(file.get(), bytes.data() + size, bytes.size() - size,
                                    end + static_cast<off_t>(size));
      if (count < 0 && errno == EINTR) continue;
      TS_CHECK_AS(IoError, count > 0, "FileStore", "cannot read ", path, " (", std::strerror(errno),
                  ")");
      size += static_cast<size_t>(count);
    }
    wire::Reader reader{bytes};
    while (!reader.rest.empty()) {
      const auto body_size = reader.number<uint32_t>();
      const auto sum = reader.number<uint32_t>();
      if (!reader.good || reader.rest.size() < body_size) break;
      const std::string_view body = reader.rest.substr(0, body_size);
      if (checksum(body) != sum) break;
      reader.rest.remove_prefix(body_size);
      end += static_cast<off_t>(body_size + 8);
      apply(body);
    }
    if (end < status.st_size) {
      TS_CHECK_AS(IoError, ::ftruncate(file.get(), end) == 0, "FileStore", "cannot repair ", path,
                  " (", std::strerror(errno), ")");
    }
  }

  void apply(std::string_view body) {
    wire::Reader reader{body};
    const auto change = static_cast<Change>(reader.number<uint8_t>());
    const std::string_view key = reader.string();
    if (change == Change::kRemove) {
      table.erase(key);
    } else {
      table.set(key, reader.string());
    }
  }

  void append(Change change, std::string_view key, std::string_view value) {
    std::string body(1, static_cast<char>(change));
    wire::put_string(body, key);
    wire::put_string(body, value);
    std::string record;
    wire::put_number(record, static_cast<uint32_t>(body.size()));
    wire::put_number(record, checksum(body));
    record += body;
    size_t size = 0;
    while (size < record.size()) {
      const ssize_t count = ::pwrite(file.get(), record.data() + size, record.size() - size,
                                     end + static_cast<off_t>(size));
      if (count < 0 && errno == EINTR) continue;
      TS_CHECK_AS(IoError, count > 0, "FileStore", "cannot write ", path, " (",
                  std::strerror(errno), ")");
      size += static_cast<size_t>(count);
    }
    end += static_cast<off_t>(record.size());
    apply(body);
  }
};

namespace {

// Calls look() with growing pauses until it returns true or time is up.
template <class Look>
bool look_until(Milliseconds timeout, Look look) {
  const Clock::time_point start = Clock::now();
  Milliseconds pause{1};
  while (true) {
    if (look()) return true;
    const auto spent = std::chrono::duration_cast<Milliseconds>(Clock::now() - start);
    if (spent >= timeout) return false;
    std::this_thread::sleep_for(std::min(pause, timeout - spent));
    pause = std::min(pause * 2, Milliseconds(20));
  }
}

}  // namespace

FileStore::FileStore(std::string path) : state_(std::make_unique<State>()) {
  state_->path = std::move(path);
  state_->file = FileDescriptor(::open(state_->path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  TS_CHECK_AS(IoError, static_cast<bool>(state_->file), "FileStore", "cannot open ", state_->path,
              " (", std::strerror(errno), "); its folder has to exist and be writable");
}
FileStore::~FileStore() = default;

void FileStore::set(std::string_view key, std::string_view value) {
  state_->locked([&] { state_->append(Change::kSet, key, value); });
}

std::optional<std::string> FileStore::get(std::string_view key) {
  return state_->locked([&] {
    const std::string* value = state_->table.find(key);
    return value == nullptr ? std::nullopt : std::optional(*value);
  });
}

std::string FileStore::wait(std::string_view key, Milliseconds timeout) {
  std::optional<std::string> value;
  if (!look_until(timeout, [&] { return (value = get(key)).has_value(); })) {
    throw_not_set(key, timeout);
  }
  return *value;
}

int64_t FileStore::add(std::string_view key, int64_t amount) {
  return state_->locked([&] {
    const int64_t sum = state_->table.sum(key, amount);
    state_->append(Change::kSet, key, std::to_string(sum));
    return sum;
  });
}

bool FileStore::compare_set(std::string_view key, std::optional<std::string_view> expected,
                            std::string_view desired) {
  return state_->locked([&] {
    const bool equal = state_->table.equals(key, expected);
    if (equal) state_->append(Change::kSet, key, desired);
    return equal;
  });
}

bool FileStore::check(std::span<const std::string> keys) {
  return state_->locked([&] { return state_->table.contains(keys); });
}

bool FileStore::remove(std::string_view key) {
  return state_->locked([&] {
    const bool there = state_->table.find(key) != nullptr;
    if (there) state_->append(Change::kRemove, key, "");
    return there;
  });
}

std::vector<std::string> FileStore::list(std::string_view prefix) {
  return state_->locked([&] { return state_->table.list(prefix); });
}

StoreChanges FileStore::watch(std::string_view prefix, int64_t after, Milliseconds timeout) {
  StoreChanges changes;
  look_until(timeout, [&] {
    changes = state_->locked([&] { return state_->table.changes(prefix, after); });
    return !changes.entries.empty();
  });
  return changes;
}

}  // namespace tessera::distributed
