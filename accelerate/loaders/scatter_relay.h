// Batches that rank 0 makes for all, each sent to the rank that it is for: two scatters a turn, of
// 64 bytes and of what the ranks need, not n times that. Rank 0's own batch is not copied.
#pragma once

#include <string>
#include <vector>

#include <tessera/accelerate/loaders/batch_codec.h>
#include <tessera/data/prefetch.h>
#include <tessera/distributed/transport/group.h>

namespace tessera::accelerate {

class ScatterRelay : public data::BatchRelay {
 public:
  // `ranks` outlives the loops.
  ScatterRelay(distributed::Group& ranks, const BatchCodec& codec) : ranks_(ranks), codec_(codec) {}

  bool makes_batches() const override { return ranks_.rank() == 0; }
  void begin_epoch() override { finished_ = false; }
  // What rank 0 could not make is its error there and a DistributedError with its text elsewhere.
  data::MadeBatch exchange(data::MadeBatch made, std::exception_ptr error) override;

 private:
  data::MadeBatch send(data::MadeBatch made, std::exception_ptr error);
  data::MadeBatch receive();

  distributed::Group& ranks_;
  const BatchCodec& codec_;
  bool finished_ = false;  // some rank has had no batch: the epoch is over on all
};

}  // namespace tessera::accelerate
