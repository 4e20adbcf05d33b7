// Keeps ranks that read a stream by parts of any lengths in step: before each batch they agree, by
// one all_gather of 24 bytes, whether the epoch goes on. It goes on while any rank has samples
// (Tail kWrapAround; ranks that are done have batches whose rows do not count), or while every rank
// has a full batch (kDrop).
#pragma once

#include <tessera/data/prefetch.h>
#include <tessera/distributed/transport/group.h>

namespace tessera::accelerate {

class PartsRelay : public data::BatchRelay {
 public:
  // `ranks` must outlive the loops.
  PartsRelay(distributed::Group& ranks, bool drop_last) : ranks_(ranks), drop_last_(drop_last) {}

  bool makes_batches() const override { return true; }
  void begin_epoch() override {}
  // Throws on every rank if one could not read (its own error there, DistributedError elsewhere),
  // or if one has no example at all to fill up with.
  data::MadeBatch exchange(data::MadeBatch made, std::exception_ptr error) override;

 private:
  distributed::Group& ranks_;
  bool drop_last_;
};

}  // namespace tessera::accelerate
