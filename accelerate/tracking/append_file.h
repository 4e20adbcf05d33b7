// A file that records are appended to, each whole. IoError names the path and the reason.
#pragma once

#include <string>
#include <string_view>

namespace tessera {

class AppendFile {
 public:
  // Creates a missing folder. `fresh`: the file must not exist yet.
  explicit AppendFile(std::string path, bool fresh = false);
  ~AppendFile();
  AppendFile(const AppendFile&) = delete;
  AppendFile& operator=(const AppendFile&) = delete;

  // Writes in one system call, so that a killed run loses at most its last record.
  void write(std::string_view record);
  void sync();  // onto the disk
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  int descriptor_ = -1;
};

double unix_seconds();  // since 1970, as records carry them

}  // namespace tessera
