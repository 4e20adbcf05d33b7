// A model of cuDNN on the emulated device: it evaluates a LibraryGraph operation by operation, with
// plain loops, from and to the memory that it is handed. Tests switch it on to see whether graph,
// strides, scalars and workspace give what the op promises; else the emulation has no library.
//
// Its random mask is drawn as the library draws: from a seed and an offset into sequences of which
// each thread has one.
#pragma once

#include <string>
#include <vector>

namespace tessera::gpu::emulation {

struct GraphModel {  // a slot of the context
  bool enabled = false;
  int version = 91900;           // that it claims to be
  std::vector<std::string> ran;  // keys of the graphs it was asked to run, in their order
};

}  // namespace tessera::gpu::emulation
