#include <tessera/data/idx.h>

#include "driver.h"

using namespace tessera;

FUZZ(text) {
  fuzz::feed([&] {
    const Tensor tensor =
        data::parse_idx(std::as_bytes(std::span(text.data(), text.size())), "input");
    // Reads every element.
    if (tensor.numel() <= 1 << 16) tensor.to_vector<double>();
  });
}
