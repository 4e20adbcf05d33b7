#include <tessera/accelerate/launch/segment_folder.h>

#include <filesystem>
#include <vector>

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

namespace tessera::launch {
namespace {

namespace fs = std::filesystem;
using distributed::FileDescriptor;

constexpr const char* kPrefix = "tessera-segments-";

std::string lock_of(const std::string& folder) { return folder + "/lock"; }

void remove_quietly(const std::string& folder) {
  std::error_code error;
  fs::remove_all(folder, error);
}

}  // namespace

SegmentFolder::SegmentFolder(const std::string& parent) {
  if (parent.empty()) return;
  path_ = parent + "/" + kPrefix + "XXXXXX";
  if (::mkdtemp(path_.data()) == nullptr) {
    path_.clear();
    return;
  }
  // Locked under another name, so that nobody finds it without its owner.
  const std::string fresh = path_ + "/fresh";
  lock_ = FileDescriptor(::open(fresh.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600));
  if (!lock_ || ::flock(lock_.get(), LOCK_EX) != 0 ||
      ::rename(fresh.c_str(), lock_of(path_).c_str()) != 0) {
    remove_quietly(path_);
    path_.clear();
  }
}

SegmentFolder::~SegmentFolder() {
  if (!path_.empty()) remove_quietly(path_);
}

void remove_left_segments(const std::string& parent) {
  if (parent.empty()) return;
  std::error_code error;
  std::vector<std::string> left;
  for (fs::directory_iterator at(parent, error), end; !error && at != end; at.increment(error)) {
    const std::string folder = at->path().string();
    if (!at->path().filename().string().starts_with(kPrefix)) continue;
    const FileDescriptor lock(::open(lock_of(folder).c_str(), O_RDWR | O_CLOEXEC));
    if (lock && ::flock(lock.get(), LOCK_EX | LOCK_NB) == 0) left.push_back(folder);
  }
  for (const std::string& folder : left) remove_quietly(folder);
}

}  // namespace tessera::launch
