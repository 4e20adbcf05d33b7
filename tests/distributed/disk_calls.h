// What a crash between any two calls to the file system would leave, for tests of durability.
//
// The calls that make files durable and visible (fsync, rename, mkdir, unlink...) are defined here
// and forward to libc: a program that includes this file calls these instead, from its libraries
// too. While a DiskCalls lives they are noted, and before each one `look` may read what a reader
// would find:
//
// [Note: three crashes] `killed()` is what stands when the process alone dies: every call that was
// made has happened. After a loss of power a disk may hold less, and in another order: `eager()`
// has every name and of each file only the bytes of its last fsync; `lazy()` has of each folder
// only the names of its last fsync, and of those only what nobody has removed since. A program that
// is right finds a whole old or a whole new file in all three, at every moment; what was promised
// to be durable is in all three.
//
// Include it in one file of a program. Calls of other threads are noted too, one at a time.
#pragma once

#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <tessera/distributed/rendezvous/socket.h>

#include "finished_process.h"

namespace tessera {

class DiskCalls {
 public:
  // Calls under `root` are noted. What is there already counts as durable.
  explicit DiskCalls(std::string root) : root_(std::filesystem::canonical(root).string()) {
    for (const auto& entry : std::filesystem::recursive_directory_iterator(root_)) {
      if (entry.is_directory()) note_folder(entry.path().string());
      if (entry.is_regular_file()) note_file(entry.path().string());
    }
    note_folder(root_);
    const std::lock_guard lock(mutex());
    current() = this;
  }
  ~DiskCalls() {
    const std::lock_guard lock(mutex());
    current() = nullptr;
  }
  DiskCalls(const DiskCalls&) = delete;
  DiskCalls& operator=(const DiskCalls&) = delete;

  // Called before each call, until it is replaced; its own calls are not noted.
  std::function<void()> look;
  // Errors to give instead of making the call, by the beginning of its text ("fsync a").
  std::map<std::string, int> failing;

  // Every second write is interrupted, the others write at most so many bytes; 0: as they are.
  size_t short_writes = 0;
  int64_t writes() const { return writes_; }  // while they were short

  // "fsync a.tmp", "rename a.tmp a", "fsync ." in their order, paths from the root. What makes
  // temporary names distinct (".tmp-PID-N") is left out.
  const std::vector<std::string>& calls() const { return calls_; }
  void forget() { calls_.clear(); }

  // The three images, made anew; folders that hold what a reader would find under the root.
  std::string killed() const {
    return image([&](const std::string& to) { copy(root_, to, false); });
  }
  std::string eager() const {
    return image([&](const std::string& to) { copy(root_, to, true); });
  }
  std::string lazy() const {
    return image([&](const std::string& to) { copy_durable(inode_of(root_), to); });
  }

  // For the calls below.
  static int note(const std::string& name, const std::vector<std::string>& paths,
                  const std::function<int()>& call) {
    std::unique_lock lock(mutex());
    DiskCalls* own = current();
    thread_local bool looking = false;
    if (looking || own == nullptr || !own->within(paths[0])) {
      lock.unlock();
      return call();
    }
    looking = true;
    if (own->look) own->look();
    looking = false;
    std::string text = name;
    for (const std::string& path : paths) text += " " + own->shown(path);
    own->calls_.push_back(text);
    for (const auto& [begin, error] : own->failing) {
      if (!text.starts_with(begin)) continue;
      errno = error;
      return -1;
    }
    const ino_t removed = name == "unlink" || name == "rmdir" ? inode_of(paths[0]) : 0;
    const int result = call(), error = errno;
    if (result == 0 && name == "fsync") {
      std::filesystem::is_directory(paths[0]) ? own->note_folder(paths[0])
                                              : own->note_file(paths[0]);
    }
    if (result == 0 && removed != 0) own->removed_.insert(removed);
    errno = error;
    return result;
  }
  static ssize_t write(int descriptor, size_t bytes,
                       const std::function<ssize_t(size_t bytes)>& call) {
    std::unique_lock lock(mutex());
    DiskCalls* own = current();
    if (own == nullptr || own->short_writes == 0 || !own->within(path_of(descriptor))) {
      lock.unlock();
      return call(bytes);
    }
    if ((own->writes_ += 1) % 2 == 1) {
      errno = EINTR;
      return -1;
    }
    return call(std::min(bytes, own->short_writes));
  }
  static std::string path_of(int descriptor) {
    std::error_code error;
    return std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(descriptor), error)
        .string();
  }
  static std::string path_of(int folder, const char* name) {
    if (name[0] == '/') return name;
    if (folder == AT_FDCWD) return std::filesystem::absolute(name).string();
    return path_of(folder) + "/" + name;
  }

 private:
  static std::recursive_mutex& mutex() {
    static std::recursive_mutex mutex;
    return mutex;
  }
  static DiskCalls*& current() {
    static DiskCalls* current = nullptr;
    return current;
  }
  static ino_t inode_of(const std::string& path) {
    struct stat status = {};
    return ::lstat(path.c_str(), &status) == 0 ? status.st_ino : 0;
  }
  static std::string read(const std::string& path) {
    std::ostringstream text;
    text << std::ifstream(path, std::ios::binary).rdbuf();
    return text.str();
  }

  bool within(const std::string& path) const {
    return path == root_ || path.starts_with(root_ + "/");
  }
  std::string shown(const std::string& path) const {
    static const std::regex distinct("\\.tmp-[0-9]+-[0-9]+");
    return path == root_ ? "."
                         : std::regex_replace(path.substr(root_.size() + 1), distinct, ".tmp");
  }
  // A file that is open keeps its number to itself after it was removed.
  ino_t hold(const std::string& path) {
    const ino_t inode = inode_of(path);
    distributed::FileDescriptor& held = held_[inode];
    if (!held) {
      held = distributed::FileDescriptor(::open(path.c_str(), O_PATH | O_NOFOLLOW | O_CLOEXEC));
    }
    return inode;
  }
  void note_file(const std::string& path) { durable_bytes_[hold(path)] = read(path); }
  void note_folder(const std::string& path) {
    auto& names = durable_names_[hold(path)];
    names.clear();
    for (const auto& entry : std::filesystem::directory_iterator(path)) {
      names[entry.path().filename().string()] = {hold(entry.path().string()), entry.is_directory()};
    }
  }

  std::string image(const std::function<void(const std::string&)>& fill) const {
    const std::string to = images_.path("image");
    std::filesystem::remove_all(to);
    fill(to);
    return to;
  }
  void copy(const std::string& from, const std::string& to, bool durable_bytes) const {
    std::filesystem::create_directory(to);
    for (const auto& entry : std::filesystem::directory_iterator(from)) {
      const std::string path = entry.path().string();
      const std::string target = to + "/" + entry.path().filename().string();
      if (entry.is_directory()) {
        copy(path, target, durable_bytes);
      } else {
        put(target, durable_bytes ? bytes_of(inode_of(path)) : read(path));
      }
    }
  }
  void copy_durable(ino_t folder, const std::string& to) const {
    std::filesystem::create_directory(to);
    const auto names = durable_names_.find(folder);
    if (names == durable_names_.end()) return;
    for (const auto& [name, entry] : names->second) {
      if (removed_.contains(entry.inode)) continue;
      if (entry.is_folder) {
        copy_durable(entry.inode, to + "/" + name);
      } else {
        put(to + "/" + name, bytes_of(entry.inode));
      }
    }
  }
  std::string bytes_of(ino_t inode) const {
    const auto found = durable_bytes_.find(inode);
    return found == durable_bytes_.end() ? "" : found->second;
  }
  static void put(const std::string& path, const std::string& bytes) {
    std::ofstream(path, std::ios::binary) << bytes;
  }

  struct Entry {
    ino_t inode = 0;
    bool is_folder = false;
  };

  std::string root_;
  std::vector<std::string> calls_;
  std::map<ino_t, distributed::FileDescriptor> held_;
  std::map<ino_t, std::string> durable_bytes_;                   // of each file's last fsync
  std::map<ino_t, std::map<std::string, Entry>> durable_names_;  // of each folder's
  std::set<ino_t> removed_;
  int64_t writes_ = 0;
  TestFolder images_;
};

template <class Function>
Function* next_function(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

}  // namespace tessera

// ---- The calls ---------------------------------------------------------------------------------

#define TESSERA_INTERCEPTED extern "C" __attribute__((visibility("default")))

TESSERA_INTERCEPTED int fsync(int descriptor) {
  static auto* const next = tessera::next_function<int(int)>("fsync");
  using tessera::DiskCalls;
  return DiskCalls::note("fsync", {DiskCalls::path_of(descriptor)},
                         [&] { return next(descriptor); });
}
TESSERA_INTERCEPTED ssize_t pwrite(int descriptor, const void* data, size_t bytes, off_t offset) {
  static auto* const next =
      tessera::next_function<ssize_t(int, const void*, size_t, off_t)>("pwrite");
  return tessera::DiskCalls::write(
      descriptor, bytes, [&](size_t count) { return next(descriptor, data, count, offset); });
}
TESSERA_INTERCEPTED int fchmod(int descriptor, mode_t mode) noexcept {
  static auto* const next = tessera::next_function<int(int, mode_t)>("fchmod");
  using tessera::DiskCalls;
  return DiskCalls::note("fchmod", {DiskCalls::path_of(descriptor)},
                         [&] { return next(descriptor, mode); });
}
TESSERA_INTERCEPTED int rename(const char* from, const char* to) noexcept {
  static auto* const next = tessera::next_function<int(const char*, const char*)>("rename");
  using tessera::DiskCalls;
  return DiskCalls::note("rename",
                         {DiskCalls::path_of(AT_FDCWD, from), DiskCalls::path_of(AT_FDCWD, to)},
                         [&] { return next(from, to); });
}
TESSERA_INTERCEPTED int renameat2(int from_folder, const char* from, int to_folder, const char* to,
                                  unsigned flags) noexcept {
  static auto* const next =
      tessera::next_function<int(int, const char*, int, const char*, unsigned)>("renameat2");
  using tessera::DiskCalls;
  return DiskCalls::note(flags == RENAME_EXCHANGE ? "exchange" : "rename",
                         {DiskCalls::path_of(from_folder, from), DiskCalls::path_of(to_folder, to)},
                         [&] { return next(from_folder, from, to_folder, to, flags); });
}
TESSERA_INTERCEPTED int mkdir(const char* path, mode_t mode) noexcept {
  static auto* const next = tessera::next_function<int(const char*, mode_t)>("mkdir");
  using tessera::DiskCalls;
  return DiskCalls::note("mkdir", {DiskCalls::path_of(AT_FDCWD, path)},
                         [&] { return next(path, mode); });
}
TESSERA_INTERCEPTED int unlink(const char* path) noexcept {
  static auto* const next = tessera::next_function<int(const char*)>("unlink");
  using tessera::DiskCalls;
  return DiskCalls::note("unlink", {DiskCalls::path_of(AT_FDCWD, path)},
                         [&] { return next(path); });
}
TESSERA_INTERCEPTED int unlinkat(int folder, const char* path, int flags) noexcept {
  static auto* const next = tessera::next_function<int(int, const char*, int)>("unlinkat");
  using tessera::DiskCalls;
  return DiskCalls::note((flags & AT_REMOVEDIR) != 0 ? "rmdir" : "unlink",
                         {DiskCalls::path_of(folder, path)},
                         [&] { return next(folder, path, flags); });
}

#undef TESSERA_INTERCEPTED
