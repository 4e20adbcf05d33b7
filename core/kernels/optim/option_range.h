// What numbers an option of an optimizer takes; checked when the optimizer is made.
#pragma once

namespace tessera {

enum class OptionRange {
  kAny,
  kNotNegative,
  kBelowOne,  // [0, 1): what a bias correction divides by is not 0
  kUpToOne,   // [0, 1]
};

}  // namespace tessera
