// Batches that rank 0 makes for all ranks and sends to each by two scatters, of 64 bytes and of the
// rank's data, instead of broadcasting all. Rank 0's own batch is not copied.
#pragma once

#include <string>
#include <vector>

#include <tessera/accelerate/loaders/batch_codec.h>
#include <tessera/data/prefetch.h>
#include <tessera/distributed/transport/group.h>

namespace tessera::accelerate {

class ScatterRelay : public data::BatchRelay {
 public:
  // `ranks` must outlive the loops.
  ScatterRelay(distributed::Group& ranks, const BatchCodec& codec) : ranks_(ranks), codec_(codec) {}

  bool makes_batches() const override { return ranks_.rank() == 0; }
  void begin_epoch() override { finished_ = false; }
  // An error of rank 0 is its own error there and a DistributedError with its text elsewhere.
  data::MadeBatch exchange(data::MadeBatch made, std::exception_ptr error) override;

 private:
  data::MadeBatch send(data::MadeBatch made, std::exception_ptr error);
  data::MadeBatch receive();

  distributed::Group& ranks_;
  const BatchCodec& codec_;
  bool finished_ = false;  // some rank has had no batch: the epoch is over on all
};

}  // namespace tessera::accelerate
