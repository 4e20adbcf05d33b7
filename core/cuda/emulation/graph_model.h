// A model of cuDNN on the emulated device: it evaluates a LibraryGraph operation by operation, with
// plain loops, from and to the memory that it is handed. Tests switch it on to see whether graph,
// strides, scalars and workspace give what the op promises; else the emulation has no library.
//
// Its random mask draws the numbers of the CPU's dropout, which the real library does not.
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
