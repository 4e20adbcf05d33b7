#include <tessera/core/io/atomic_file.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>

#include <tessera/core/error.h>

namespace tessera {
namespace {

constexpr size_t kBufferBytes = 64 << 10;

std::string folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

std::string_view remedy_of_writing(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      return "free some space or choose a folder on another disk";
    case EFBIG:
      return "raise the file size limit (ulimit -f) or choose another file system";
    case EACCES:
    case EPERM:
      return "choose a folder that this user may write, or change its permissions";
    case EROFS:
      return "choose a folder on a file system that is mounted for writing";
    case ENOENT:
    case ENOTDIR:
      return "create the folder first";
    case EMFILE:
    case ENFILE:
      return "raise the limit of open files (ulimit -n)";
    case ENAMETOOLONG:
      return "choose a shorter name";
    default:
      return "check the disk and the path";
  }
}

[[noreturn]] void fail_folder(const char* op, std::string_view what, const std::string& folder,
                              int error) {
  throw IoError(detail::concatenate(op, ": cannot ", what, " '", folder,
                                    "': ", std::generic_category().message(error), "; ",
                                    remedy_of_writing(error), "."));
}

// Distinct within the process by the counter, between processes by the pid; O_EXCL settles the
// rest.
std::string temporary_name(const std::string& target) {
  static std::atomic<uint64_t> counter{0};
  return target + ".tmp-" + std::to_string(::getpid()) + "-" +
         std::to_string(counter.fetch_add(1, std::memory_order_relaxed));
}

}  // namespace

AtomicFile::AtomicFile(const std::string& path) : path_(path), target_(path) {
  TS_CHECK_AS(IoError, !path.empty() && path.back() != '/', "AtomicFile",
              "needs the name of a file; got '", path, "'; give a path that ends in a file name.");
  struct stat existing = {};
  bool exists = ::lstat(path.c_str(), &existing) == 0;
  if (exists && S_ISLNK(existing.st_mode)) {
    char* resolved = ::realpath(path.c_str(), nullptr);
    if (resolved == nullptr) fail("cannot resolve the symbolic link", errno);
    target_ = resolved;
    std::free(resolved);
    exists = ::stat(target_.c_str(), &existing) == 0;
  }
  TS_CHECK_AS(IoError, !exists || S_ISREG(existing.st_mode), "AtomicFile", "'", path,
              "' exists and is not a regular file; choose another name.");
  const mode_t mode = exists ? existing.st_mode & 07777 : 0666;
  for (int attempt = 0; attempt < 100 && descriptor_ < 0; ++attempt) {
    std::string name = temporary_name(target_);
    descriptor_ = ::open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, mode);
    if (descriptor_ >= 0) {
      temporary_ = std::move(name);
    } else if (errno != EEXIST && errno != EINTR) {
      fail("cannot create a file beside it", errno);
    }
  }
  if (descriptor_ < 0) fail("cannot create a file beside it", EEXIST);
  // The umask has been taken off `mode`; a file that is replaced keeps its bits as they were. Bits
  // that cannot be kept (another owner's set-id) are no reason to refuse the write.
  if (exists) static_cast<void>(::fchmod(descriptor_, mode) == 0);
  buffer_.reserve(kBufferBytes);
}

AtomicFile::~AtomicFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void AtomicFile::fail(std::string_view what, int error) {
  throw IoError(detail::concatenate("AtomicFile: '", path_, "': ", what, ": ",
                                    std::generic_category().message(error), "; ",
                                    remedy_of_writing(error), "."));
}

void AtomicFile::write_fully(const void* data, size_t bytes, uint64_t position) {
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::pwrite(descriptor_, next, bytes, static_cast<off_t>(position));
    if (written < 0) {
      if (errno == EINTR) continue;
      fail(detail::concatenate("cannot write ", bytes, " bytes at byte ", position), errno);
    }
    // A regular file takes at least a byte or reports why not; no progress means a full disk.
    if (written == 0) fail("cannot write", ENOSPC);
    next += written;
    position += static_cast<uint64_t>(written);
    bytes -= static_cast<size_t>(written);
  }
}

void AtomicFile::flush() {
  if (buffer_.empty()) return;
  write_fully(buffer_.data(), buffer_.size(), flushed_);
  flushed_ += buffer_.size();
  buffer_.clear();
}

void AtomicFile::write(const void* data, size_t bytes) {
  TS_CHECK_AS(IoError, descriptor_ >= 0, "AtomicFile", "'", path_,
              "' is committed; write before commit().");
  if (bytes == 0) return;
  if (buffer_.size() + bytes > kBufferBytes) flush();
  if (bytes >= kBufferBytes) {
    write_fully(data, bytes, flushed_);
    flushed_ += bytes;
    return;
  }
  const char* first = static_cast<const char*>(data);
  buffer_.insert(buffer_.end(), first, first + bytes);
}

void AtomicFile::overwrite(uint64_t position, const void* data, size_t bytes) {
  TS_CHECK_AS(IoError, descriptor_ >= 0, "AtomicFile", "'", path_,
              "' is committed; write before commit().");
  TS_CHECK(position <= size() && bytes <= size() - position, "AtomicFile", "overwrite [", position,
           ", +", bytes, ") reaches past the ", size(), " bytes written to '", path_,
           "'; append with write().");
  flush();
  write_fully(data, bytes, position);
}

void AtomicFile::commit() {
  TS_CHECK_AS(IoError, descriptor_ >= 0, "AtomicFile", "'", path_,
              "' is committed already; commit once.");
  flush();
  if (::fsync(descriptor_) != 0) fail("cannot force the bytes to the disk (fsync)", errno);
  const int closing = descriptor_;
  descriptor_ = -1;
  if (::close(closing) != 0) fail("cannot close", errno);
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) fail("cannot rename to it", errno);
  temporary_.clear();
  sync_folder(folder_of(target_));
}

void sync_folder(const std::string& folder) {
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) fail_folder("sync_folder", "open", folder, errno);
  // File systems that cannot sync a folder (some network ones) say EINVAL: a rename is all they
  // have.
  const int error = ::fsync(descriptor) == 0 || errno == EINVAL ? 0 : errno;
  ::close(descriptor);
  if (error != 0) fail_folder("sync_folder", "force to the disk (fsync)", folder, error);
}

void make_folders(const std::string& folder) {
  namespace fs = std::filesystem;
  std::error_code error;
  std::vector<std::string> missing;
  for (fs::path path = fs::absolute(folder); !fs::exists(path, error) && path != path.parent_path();
       path = path.parent_path()) {
    missing.push_back(path.parent_path().string());
  }
  fs::create_directories(folder, error);
  if (error) fail_folder("make_folders", "make the folder", folder, error.value());
  for (const std::string& parent : missing) sync_folder(parent);
}

void write_file_atomically(const std::string& path, std::string_view text) {
  AtomicFile file(path);
  file.write(text);
  file.commit();
}

}  // namespace tessera
