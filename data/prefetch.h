// Batches made ahead of their consumer by worker threads and returned in order: the
// type-independent part of a loader.
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
  std::shared_ptr<void> batch;  // null: no batch
  int64_t rows = 0;             // examples in it
  // The first `samples` rows count; the others are repetitions that fill it up.
  int64_t samples = 0;
  bool last = false;  // known to be this rank's last of the epoch
  // For a batch being copied to a device: the consumer calls DeviceCopier::finish(). Null: it is
  // there.
  std::shared_ptr<gpu::EventHandle> copy = {};
};

struct MadeBatch : BatchShare {    // no batch: the epoch is over
  int64_t end_position = 0;        // the cursor after this batch
  std::vector<BatchShare> others;  // of ranks 1, 2...: a BatchRelay sends them
};

// Connects the makers of batches with the loops if several ranks share one loader: the consumer of
// every rank calls its exchange() for each batch, until it returns none.
class BatchRelay {
 public:
  virtual ~BatchRelay() = default;
  // Whether this rank makes batches. The others get them from exchange().
  virtual bool makes_batches() const = 0;
  virtual void begin_epoch() = 0;
  // `made`: what this rank made; nothing at its end of the epoch, on a rank that makes none, and
  // after `error`, which exchange() rethrows. Returns this rank's batch.
  virtual MadeBatch exchange(MadeBatch made, std::exception_ptr error) = 0;
};

// Makes the batches of one epoch.
class BatchMaker {
 public:
  virtual ~BatchMaker() = default;
  // The start of the batch after the one at `position`; nothing if there is none at `position`.
  // Called in order, by one thread at a time.
  virtual std::optional<int64_t> next_position(int64_t position) const = 0;
  // Called by several workers at once, each for another position; by one worker in order.
  virtual MadeBatch make(int64_t position, int64_t next_position) = 0;
};

// One epoch from a position on.
//
// `workers` threads each make whole batches; at most `workers * prefetch` are being made or waiting
// at any time. They are returned by position, whichever finishes first. A worker runs in its own
// Context, which shares the memory statistics of the Context that made this object, and computes
// with one thread. With workers = 0 the consumer makes each batch itself on request.
class Prefetcher {
 public:
  Prefetcher(std::unique_ptr<BatchMaker> maker, int64_t position, int workers, int64_t prefetch);
  // Stops the workers after their current example, and waits for them.
  ~Prefetcher();
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;

  // Returns the next batch; a null one at the end. Rethrows an error of this batch's worker after
  // all earlier batches were returned; then the epoch is over.
  MadeBatch next();

 private:
  struct Shared;
  std::unique_ptr<Shared> shared_;
};

// True in a worker whose Prefetcher is being destroyed: its work may stop.
bool prefetch_is_stopping();

}  // namespace tessera::data
