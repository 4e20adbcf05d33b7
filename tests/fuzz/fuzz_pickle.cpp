#include <tessera/core/state/pickle_reader.h>

#include "driver.h"

using namespace tessera;

FUZZ(text) {
  fuzz::feed([&] {
    const Pickle pickle = read_pickle(text, "input");
    fuzz::require(pickle.root != nullptr, "there is a value");
    for (const PickleValue& value : pickle.values) {
      if (value.kind != PickleValue::Kind::kTensor) continue;
      fuzz::require(value.sizes().size() == value.strides().size(), "a stride for each size");
    }
  });
}
