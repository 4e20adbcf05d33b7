#include <tessera/accelerate/loaders/parts_relay.h>

#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/distributed/transport/collectives.h>

namespace tessera::accelerate {

data::MadeBatch PartsRelay::exchange(data::MadeBatch made, std::exception_ptr error) {
  enum State : int64_t { kNone, kBatch, kFailed };
  const Tensor own = raw::empty({3}, kI64);
  int64_t* numbers = own.data_as<int64_t>();
  numbers[0] = error ? kFailed : made.batch ? kBatch : kNone;
  numbers[1] = made.samples;
  numbers[2] = made.last;
  const Tensor all = distributed::all_gather(own, ranks_, {.tag = "loader: turn"});
  int64_t none = 0, samples = 0, last = 0;
  for (int rank = 0; rank < ranks_.size(); ++rank) {
    const int64_t* row = all.data_as<int64_t>() + 3 * rank;
    if (row[0] == kFailed && !error) {
      TS_THROW(DistributedError, "loader", "rank ", rank,
               " could not read its parts of the stream; see its error.");
    }
    none += row[0] == kNone;
    samples += row[1];
    last += row[2];
  }
  if (error) std::rethrow_exception(error);
  if (drop_last_ ? none > 0 : samples == 0) return {};
  TS_CHECK_AS(DistributedError, none == 0, "loader", none,
              " of the ranks have no example in their parts of the stream, and nothing to fill "
              "their batches up with; give every rank a part with examples, dispatch the stream, "
              "or turn even_batches off.");
  made.last = drop_last_ ? last > 0 : last == ranks_.size();
  return made;
}

}  // namespace tessera::accelerate
