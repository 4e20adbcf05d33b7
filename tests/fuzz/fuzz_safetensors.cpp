#include <sys/mman.h>
#include <unistd.h>

#include <string>

#include <tessera/core/safetensors.h>

#include "driver.h"

using namespace tessera;

FUZZ(text) {
  // The reader takes a path: a file in memory has one.
  static const int descriptor = ::memfd_create("input", 0);
  static const std::string path = "/proc/self/fd/" + std::to_string(descriptor);
  fuzz::require(::ftruncate(descriptor, 0) == 0, "the file can be emptied");
  fuzz::require(
      ::pwrite(descriptor, text.data(), text.size(), 0) == static_cast<ssize_t>(text.size()),
      "the file can be written");
  fuzz::feed([&] {
    const SafeTensorsFile file(path);
    for (const SafeTensorsEntry& entry : file.entries()) {
      fuzz::feed([&] {
        const Tensor tensor = file.load(entry.name);
        fuzz::require(tensor.nbytes() <= static_cast<int64_t>(text.size()),
                      "no more than there is");
      });
    }
  });
}
