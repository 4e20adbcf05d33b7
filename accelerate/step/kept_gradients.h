// Gradients from before a window, which are added to its mean: accelerator.h, [Note: adding up].
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
  // Replaces the current gradients.
  void restore();
  void clear() { entries_.clear(); }
  void scale(double factor);
  // Called before and after each backward, to notice gradients that the program has cleared
  // meanwhile: these are forgotten. After a backward zeros are its result, for a parameter that is
  // frozen since, or that the losses do not reach.
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
