// Resident memory of this process in bytes, as the kernel counts it: what tensors, pools and code
// occupy. 0 where /proc does not tell.
#pragma once

#include <unistd.h>
#include <cstdint>
#include <fstream>
#include <string>

namespace bench {

inline int64_t resident_bytes() {
  int64_t pages = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> pages >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

inline int64_t peak_resident_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word == "VmHWM:") {
      int64_t kilobytes = 0;
      status >> kilobytes;
      return kilobytes * 1024;
    }
  }
  return 0;
}

}  // namespace bench
