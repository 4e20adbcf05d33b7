// Files that appear whole or not at all.
//
//     AtomicFile file("model.safetensors");
//     file.write(header.data(), header.size());
//     file.write(tensor_bytes.data(), tensor_bytes.size());
//     file.commit();
//
// Bytes go to a temporary file in the same folder; commit() forces them to the disk (fsync),
// renames the file to its final name and forces the folder's entry to the disk too. Until commit()
// returns, an older file of that name stays as it was; without commit() the destructor removes the
// temporary file. A symbolic link is followed: its target is replaced, the link stays. A file that
// is replaced keeps its permission bits.
//
// Errors: IoError names the path, the operating system's reason and what to do (full disk, folder
// missing or unwritable, target not a regular file). After an error nothing stands under the final
// name that was not there before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

class AtomicFile {
 public:
  explicit AtomicFile(const std::string& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  // Appends. Small pieces are gathered in a buffer of 64 KiB.
  void write(const void* data, size_t bytes);
  void write(std::string_view text) { write(text.data(), text.size()); }

  // Overwrites bytes that were written before: [position, position + bytes) must lie within size().
  // For headers whose counts and checksums are known last.
  void overwrite(uint64_t position, const void* data, size_t bytes);

  // Makes the file visible under its name. Call once, last.
  void commit();

  uint64_t size() const { return flushed_ + buffer_.size(); }  // bytes written so far
  const std::string& path() const { return path_; }

 private:
  void flush();
  void write_fully(const void* data, size_t bytes, uint64_t position);
  [[noreturn]] void fail(std::string_view what, int error);

  std::string path_;       // as the caller named it, for errors
  std::string target_;     // with symbolic links resolved
  std::string temporary_;  // empty when there is nothing to remove
  int descriptor_ = -1;
  uint64_t flushed_ = 0;
  std::vector<char> buffer_;
};

// Writes `text` to `path` in one go, atomically.
void write_file_atomically(const std::string& path, std::string_view text);

// Forces the names in a folder to the disk: what was made, renamed or removed there. IoError.
void sync_folder(const std::string& folder);
// Makes a folder and those above it that are missing, and forces their names to the disk. IoError.
void make_folders(const std::string& folder);

}  // namespace tessera
