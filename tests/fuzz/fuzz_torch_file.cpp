// The whole file: container, structure and tensors.
#include <tessera/core/state/torch_file.h>

#include "driver.h"

using namespace tessera;

FUZZ(text) {
  fuzz::feed([&] {
    const TorchFile file(fuzz::path_of(text));
    for (const TorchFileEntry& entry : file.entries()) {
      if (numel_of(entry.shape) > 1 << 16) continue;  // strides of 0
      fuzz::feed([&] { file.load(entry.name).to_vector<double>(); });
    }
  });
}
