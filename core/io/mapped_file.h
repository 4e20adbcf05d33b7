// A file's bytes in memory, read-only and on demand (mmap).
//
// Opening costs no reading: pages come in when they are touched and are shared between processes.
// The mapping ends with the object; views into it must not outlive it. A file that another process
// shortens while it is mapped raises SIGBUS on access, as everywhere with mmap: replace files by
// renaming (AtomicFile does), never by writing over them.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace tessera {

// How the bytes will be used. All but the last are hints for the kernel's read-ahead.
enum class FileAccess {
  kNormal,
  kSequential,
  kRandom,
  kCopyOnWrite,  // the bytes may be written; the file and other mappings never see it
};

class MappedFile {
 public:
  MappedFile() = default;  // no file, no bytes
  // IoError if the file cannot be opened, is a folder or another thing than a regular file.
  explicit MappedFile(const std::string& path, FileAccess access = FileAccess::kNormal);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;

  std::span<const std::byte> bytes() const { return {data_, size_}; }
  std::string_view text() const { return {reinterpret_cast<const char*>(data_), size_}; }
  size_t size() const { return size_; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  const std::byte* data_ = nullptr;  // page aligned; null for an empty file
  size_t size_ = 0;
};

// ---- Pages of any mapping, for who reads more than memory holds
// Whether all bytes are pages of a file that nobody else sees written: those of a MappedFile. Such
// pages can be dropped and come back with the file's contents. Reads /proc/self/maps.
bool are_file_pages(std::span<const std::byte> bytes);
// The kernel begins to read them; returns at once. A hint.
void read_pages_ahead(std::span<const std::byte> bytes);
// Takes pages out of this process's memory; the next access maps or reads them again. Only where
// are_file_pages(): what was written to them is lost.
void drop_file_pages(std::span<const std::byte> bytes);

}  // namespace tessera
