// The whole file: container, structure and tensors.
#include <sys/mman.h>
#include <unistd.h>

#include <string>

#include <tessera/core/torch_file.h>

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
    const TorchFile file(path);
    for (const TorchFileEntry& entry : file.entries()) {
      if (numel_of(entry.shape) > 1 << 16) continue;  // strides of 0
      fuzz::feed([&] { file.load(entry.name).to_vector<double>(); });
    }
  });
}
