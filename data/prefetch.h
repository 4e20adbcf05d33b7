// Batches made ahead of their consumer by worker threads, handed out in order. The part of a loader
// that knows nothing of types.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

namespace tessera::data {

// A batch of a type that only maker and consumer know.
struct MadeBatch {
  std::shared_ptr<void> batch;  // null: the epoch is over
  int64_t end_position = 0;     // the cursor after this batch
  int64_t samples = 0;          // in this batch
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
