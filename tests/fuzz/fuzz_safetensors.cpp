#include <tessera/core/state/safetensors.h>

#include "driver.h"

using namespace tessera;

FUZZ(text) {
  fuzz::feed([&] {
    const SafeTensorsFile file(fuzz::path_of(text));
    for (const SafeTensorsEntry& entry : file.entries()) {
      fuzz::feed([&] {
        const Tensor tensor = file.load(entry.name);
        fuzz::require(tensor.nbytes() <= static_cast<int64_t>(text.size()),
                      "no more than there is");
      });
    }
  });
}
