#include <tessera/accelerate/tracking/append_file.h>

#include <fcntl.h>
#include <unistd.h>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>

#include <tessera/core/error.h>

namespace tessera {
namespace {

[[noreturn]] void fail(const std::string& path, const char* what, int error) {
  TS_THROW(IoError, path, "cannot ", what, ": ", std::strerror(error),
           error == ENOSPC   ? "; free some space or choose another folder."
           : error == EACCES ? "; choose a folder that this user may write to."
                             : "; choose another folder.");
}

}  // namespace

AppendFile::AppendFile(std::string path, bool fresh) : path_(std::move(path)) {
  const auto folder = std::filesystem::path(path_).parent_path();
  std::error_code error;
  if (!folder.empty()) std::filesystem::create_directories(folder, error);
  if (error) fail(path_, "make its folder", error.value());
  descriptor_ =
      ::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | (fresh ? O_EXCL : 0), 0666);
  if (descriptor_ < 0) fail(path_, "open for appending", errno);
}

AppendFile::~AppendFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void AppendFile::write(std::string_view record) {
  while (!record.empty()) {
    const ssize_t written = ::write(descriptor_, record.data(), record.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail(path_, "append", errno);
    record.remove_prefix(static_cast<size_t>(written));
  }
}

void AppendFile::sync() {
  // Pipes and special files have nothing to force.
  if (::fsync(descriptor_) != 0 && errno != EINVAL && errno != EROFS) {
    fail(path_, "force to the disk", errno);
  }
}

double unix_seconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace tessera
