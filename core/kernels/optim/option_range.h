// What numbers an option of an optimizer takes; checked when the optimizer is made.
#pragma once

namespace tessera {

enum class OptionRange {
  kAny,
  kNotNegative,
  kBelowOne,  // [0, 1): what a bias correction divides by is not 0
  kUpToOne,   // [0, 1]
  kBits,      // of a state's elements: saved where it is not 32, and 32 where nothing is saved
};

}  // namespace tessera
