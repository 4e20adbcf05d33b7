#include <tessera/core/io/mapped_file.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>
#include <system_error>
#include <utility>

#include <tessera/core/error.h>
#include <tessera/core/plain_text.h>

namespace tessera {
namespace {

std::string_view remedy_of_reading(int error) {
  switch (error) {
    case ENOENT:
    case ENOTDIR:
      return "check the path";
    case EACCES:
    case EPERM:
      return "check the file's permissions";
    case EMFILE:
    case ENFILE:
      return "raise the limit of open files (ulimit -n)";
    case ENOMEM:
      return "raise the limit of address space (ulimit -v)";
    default:
      return "check the disk and the path";
  }
}

// The pages that hold the bytes.
std::pair<void*, size_t> pages_of(std::span<const std::byte> bytes) {
  static const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(bytes.data());
  const uintptr_t first = begin / page * page;
  const uintptr_t end = (begin + bytes.size() + page - 1) / page * page;
  return {reinterpret_cast<void*>(first), end - first};
}

[[noreturn]] void fail(const std::string& path, std::string_view what, int error) {
  throw IoError(detail::concatenate("MappedFile: cannot ", what, " '", path,
                                    "': ", std::generic_category().message(error), "; ",
                                    remedy_of_reading(error), "."));
}

}  // namespace

MappedFile::MappedFile(const std::string& path, FileAccess access) : path_(path) {
  int descriptor = -1;
  do {  // O_NONBLOCK: a named pipe must not hang the open; it is refused below
    descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  } while (descriptor < 0 && errno == EINTR);
  if (descriptor < 0) fail(path, "open", errno);
  struct stat status = {};
  if (::fstat(descriptor, &status) != 0) {
    const int error = errno;
    ::close(descriptor);
    fail(path, "examine", error);
  }
  if (!S_ISREG(status.st_mode)) {
    ::close(descriptor);
    TS_THROW(IoError, "MappedFile", "'", path, "' is ",
             S_ISDIR(status.st_mode) ? "a folder" : "not a regular file",
             "; give the path of a regular file.");
  }
  size_ = static_cast<size_t>(status.st_size);
  if (size_ > 0) {  // mmap refuses empty ranges
    const int protection = access == FileAccess::kCopyOnWrite ? PROT_READ | PROT_WRITE : PROT_READ;
    // Pages that could be written count as if they all were, unless MAP_NORESERVE: a file larger
    // than the memory could not be opened.
    void* mapped = ::mmap(nullptr, size_, protection, MAP_PRIVATE | MAP_NORESERVE, descriptor, 0);
    const int error = errno;
    if (mapped == MAP_FAILED) {
      ::close(descriptor);
      size_ = 0;
      fail(path, "map", error);
    }
    data_ = static_cast<const std::byte*>(mapped);
    if (access == FileAccess::kSequential ||
        access == FileAccess::kRandom) {  // a hint: whether it is taken changes speed only
      ::madvise(mapped, size_, access == FileAccess::kRandom ? MADV_RANDOM : MADV_SEQUENTIAL);
    }
  }
  ::close(descriptor);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

bool are_file_pages(std::span<const std::byte> bytes) {
  if (bytes.empty()) return false;
  uintptr_t begin = reinterpret_cast<uintptr_t>(bytes.data());
  const uintptr_t end = begin + bytes.size();
  PlainText<std::ifstream> maps("/proc/self/maps");
  for (std::string line; begin < end && std::getline(maps, line);) {
    // "7f00-7f10 rw-p OFFSET DEVICE INODE PATH", in ascending order.
    unsigned long from = 0, to = 0, inode = 0;
    char rights[5] = {};
    if (std::sscanf(line.c_str(), "%lx-%lx %4s %*s %*s %lu", &from, &to, rights, &inode) != 4) {
      return false;
    }
    if (to <= begin) continue;
    if (from > begin || inode == 0 || rights[3] != 'p') return false;
    begin = to;
  }
  return begin >= end;
}

void read_pages_ahead(std::span<const std::byte> bytes) {
  if (bytes.empty()) return;
  const auto [first, size] = pages_of(bytes);
  ::madvise(first, size, MADV_WILLNEED);
}

void drop_file_pages(std::span<const std::byte> bytes) {
  if (bytes.empty()) return;
  const auto [first, size] = pages_of(bytes);
  ::madvise(first, size, MADV_DONTNEED);
}

}  // namespace tessera
