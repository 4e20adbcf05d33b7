// Batches made ahead of their consumer by worker threads, handed out in order. The part of a loader
// that knows nothing of types.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <vector>

#include <tessera/data/device_copy.h>

namespace tessera::data {

// A batch of a type that only maker and consumer know.
struct BatchShare {
  std::shared_ptr<void> batch;  // null: there is none
  int64_t rows = 0;             // examples in it
  // The first `samples` rows count; those behind them are there a second time, to fill up.
  int64_t samples = 0;
  bool last = false;  // known to be this rank's last of the epoch
  // On their way to a device: the consumer calls DeviceCopier::finish(). Null: they are there.
  std::shared_ptr<gpu::EventHandle> copy = {};
};

struct MadeBatch : BatchShare {    // no batch: the epoch is over
  int64_t end_position = 0;        // the cursor after this batch
  std::vector<BatchShare> others;  // of ranks 1, 2...: a BatchRelay sends them
};

// Stands between the makers of batches and the loops where several ranks share one loader: its
// exchange() is called by the consumer of every rank in each turn, until it hands out nothing.
class BatchRelay {
 public:
  virtual ~BatchRelay() = default;
  // Whether this rank makes batches. The others have what exchange() returns.
  virtual bool makes_batches() const = 0;
  virtual void begin_epoch() = 0;
  // `made`: what this rank made, nothing at its end of the epoch, where it makes none and after
  // `error`, which it throws on. Returns this rank's batch.
  virtual MadeBatch exchange(MadeBatch made, std::exception_ptr error) = 0;
};

// Makes the batches of one epoch.
class BatchMaker {
 public:
  virtual ~BatchMaker() = default;
  // Where the batch after the one at `position` starts; nothing where there is none at `position`.
  // Called in order, by one thread at a time.
  virtual std::optional<int64_t> next_position(int64_t position) const = 0;
  // Called by several workers at once, each for another position; by one worker in order.
  virtual MadeBatch make(int64_t position, int64_t next_position) = 0;
};

// One epoch from a position on.
//
// `workers` threads each make whole batches; at most `workers * prefetch` are made or waiting at
// any time. Their order is that of positions, whoever finishes first. A worker runs in a Context of
// its own that shares the memory statistics of the Context which made this object, and calculates
// with one thread. With workers = 0 the consumer makes each batch itself when it asks.
class Prefetcher {
 public:
  Prefetcher(std::unique_ptr<BatchMaker> maker, int64_t position, int workers, int64_t prefetch);
  // Stops the workers after the example that they are at, and waits for them.
  ~Prefetcher();
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;

  // The next batch; a null one at the end. Rethrows what the worker of this batch threw, after all
  // batches before it were handed out; then the epoch is over.
  MadeBatch next();

 private:
  struct Shared;
  std::unique_ptr<Shared> shared_;
};

// True in a worker whose Prefetcher is being destroyed: work that nobody waits for may stop.
bool prefetch_is_stopping();

}  // namespace tessera::data
