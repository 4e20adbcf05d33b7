// Keeps ranks in step that read a stream by parts of any lengths: they agree in each turn, by one
// all_gather of 24 bytes, whether the epoch goes on. It goes on while any rank has samples (Tail
// kWrapAround, where ranks that are done have batches of which no row counts), or while every rank
// has a full batch (kDrop).
#pragma once

#include <tessera/data/prefetch.h>
#include <tessera/distributed/transport/group.h>

namespace tessera::accelerate {

class PartsRelay : public data::BatchRelay {
 public:
  // `ranks` outlives the loops.
  PartsRelay(distributed::Group& ranks, bool drop_last) : ranks_(ranks), drop_last_(drop_last) {}

  bool makes_batches() const override { return true; }
  void begin_epoch() override {}
  // Throws on every rank: where one could not read (its own error there, DistributedError
  // elsewhere), and where one has no example at all to fill up with.
  data::MadeBatch exchange(data::MadeBatch made, std::exception_ptr error) override;

 private:
  distributed::Group& ranks_;
  bool drop_last_;
};

}  // namespace tessera::accelerate
