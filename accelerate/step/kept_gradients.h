// Gradients that were there before a window and are added to its mean: accelerator.h, [Note: adding
// up].
#pragma once

#include <cstdint>
#include <vector>

#include <tessera/core/state/state_dict.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera {

class KeptGradients {
 public:
  bool empty() const { return entries_.empty(); }
  // Copies them, and leaves zeros.
  void take(const NamedTensors& parameters);
  void add();       // to what is there now
  void subtract();  // before more is added to the mean
  // In place of what is there now.
  void restore();
  void clear() { entries_.clear(); }
  void scale(double factor);
  // Before and after each backward, to see what somebody else has cleared meanwhile: that is
  // forgotten. In a backward zeros are what came of it: of a parameter that is frozen since, or
  // that the losses do not reach.
  void forget_cleared();
  void note_versions();

 private:
  struct Entry {
    Tensor parameter, value;
    uint32_t version;  // of `.grad`
  };
  void apply(double factor);
  std::vector<Entry> entries_;
};

}  // namespace tessera
