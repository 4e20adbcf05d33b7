// Which op and layer the calling thread is in, as timelines hear of it: who asks for a launch.
#pragma once

#include <memory>
#include <string>

namespace tessera::gpu {

struct RangeNames {
  // The op ("gelu", "gelu backward"; not those that it is made of), and the innermost call of a
  // module, by its dotted name ("transformer.h.0.mlp"), also for the op's backward; or another
  // range of a timeline, such as "optimizer step". Empty: outside of all.
  std::string op, layer;
};

// Within a NamedRanges of this thread; empty outside of it, and in other threads.
RangeNames current_ranges();

// Listens to the ranges of the current context in the place of who does, for a scope.
class NamedRanges {
 public:
  NamedRanges();
  ~NamedRanges();
  NamedRanges(const NamedRanges&) = delete;
  NamedRanges& operator=(const NamedRanges&) = delete;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::gpu
