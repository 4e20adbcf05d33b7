// How ranks share the loaders of a training, and which loader is active.
//
//     LoaderPlan loaders(world(), {.even_batches = true});
//     loaders.prepare(loader);            // in place: the same object, now this rank's batches
//     for (auto& batch : loader) {
//       if (loaders.end_of_loader()) ...  // the last batch of the innermost loop
//     }
//
// prepare() gives the loader another index source (a stream another share) and observes its loops.
// Nothing is wrapped and no type changes. Shuffling needs no exchange of random numbers: an order
// is a pure function of (seed, epoch, position), and prepare() compares the loaders of the ranks.
// With one rank only loops are observed.
//
// mode          who reads                      rank r of n has, with batches of B
// sharded       every rank its own batches     batches r, r + n, r + 2n... of B
// split         every rank its own batches     rows [r B/n, (r+1) B/n) of every batch of B
// dispatched    rank 0 all, then a scatter     what sharded or split would give it
// by parts      every rank its own parts       parts r, r + n... of a stream
//
// The end of an epoch, where it has no full turn (B n samples, split: B):
//   even_batches  filled up with the epoch's first samples: all ranks have equally many batches,
//                 and full ones. batch_samples() says how many rows of a batch count, and
//                 gather_for_metrics() leaves out the others.
//   uneven        everything once: the last batches are short, some ranks have one batch less. Then
//                 collectives in the loop need join().
//   drop_last     (an option of the loader) left out on all ranks.
//
// A loader with a BatchSampler distributes whole batches; even_batches completes the last ones with
// copies of the epoch's first batches, whose rows do not count.
//
// If a stream has parts, at least one for each rank (IterableDataset::num_parts()), each rank reads
// its own, and one small collective for each batch keeps the ranks in step, for parts of any
// lengths (uneven: none). Other streams are read and dispatched by rank 0. With dispatch_batches =
// false every rank opens such a stream and skips the other ranks' examples: n times the reading
// without communication, for streams that cost nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/accelerate/loaders/batch_codec.h>
#include <tessera/data/dataloader.h>
#include <tessera/distributed/transport/group.h>

namespace tessera::accelerate {

struct LoaderPlanOptions {
  bool split_batches = false;
  // Unset: only streams without parts are dispatched.
  std::optional<bool> dispatch_batches = {};
  bool even_batches = true;
  // Compares what the ranks pass to prepare(): kind, sizes, seeds, first batches, by one collective
  // for each loader. DistributedError (OperationMismatch) shows differences by rank.
  bool verify = true;
  // All ranks whose loaders must agree, seeds and orders: `ranks`, and those that calculate one
  // micro-batch together, which read it each. Null: `ranks`. It must outlive the plan.
  distributed::Group* readers = nullptr;
};

enum class LoaderMode : uint8_t {
  kWhole,       // one rank: unchanged
  kSharded,     // whole batches in turn
  kSplit,       // a part of every batch
  kDispatched,  // rank 0 makes all, as kSharded
  kDispatchedSplit,
  kParts,  // each rank its own parts of a stream
};

class LoaderPlan {
 public:
  // `ranks`: the ranks that share batches, an axis of a mesh rather than the world. It must outlive
  // the plan and the loops over its loaders.
  explicit LoaderPlan(distributed::Group& ranks = distributed::world(),
                      const LoaderPlanOptions& options = {});
  // Restores every loader to reading alone.
  ~LoaderPlan();
  LoaderPlan(const LoaderPlan&) = delete;
  LoaderPlan& operator=(const LoaderPlan&) = delete;

  // Collective: all ranks prepare the same loaders in the same order. Preparing again changes
  // nothing. Takes effect from the cursor on. ConfigError: split batches whose size is not
  // divisible by the number of ranks or not known, a loader that another plan has prepared, one
  // that has a rank's share already. UnsupportedError: dispatching batches that cannot be sent (see
  // batch_codec.h).
  template <class Example, class Batch>
  void prepare(data::DataLoader<Example, Batch>& loader) {
    prepare_indexed(loader, codec_of<Batch>());
  }
  template <class Example, class Batch>
  void prepare(data::StreamLoader<Example, Batch>& loader) {
    prepare_stream(loader, codec_of<Batch>());
  }
  // Restores a loader to reading alone, from the cursor on. No effect on a loader that was not
  // prepared.
  void release(data::LoaderBase& loader);
  void release_all();

  bool is_prepared(const data::LoaderBase& loader) const;
  // The prepared loaders that still exist, in the order of preparation.
  std::vector<data::LoaderBase*> loaders() const;
  LoaderMode mode(const data::LoaderBase& loader) const;  // ValueError if not prepared
  // "sharded, 4 ranks x 8 samples, even batches, 12 batches a rank"
  std::string describe(const data::LoaderBase& loader) const;

  bool even_batches() const;
  // Sets even_batches for all prepared and later loaders, from the cursor on; the current batch
  // does not change. Not collective, but all ranks must call it between the same batches.
  void set_even_batches(bool value);

  // The loader of the innermost running loop over a prepared loader, however inner loops ended (by
  // break or an exception too). Outside of loops the one whose next() was called last, until its
  // epoch is over. Null: none.
  data::LoaderBase* active() const;
  // How many loops over the loader ended before their epoch did, by break or an exception; -1 for
  // one that is not prepared, or was destroyed.
  int64_t loops_left(const data::LoaderBase* loader) const;
  // Whether the current batch of active() is this rank's last of the epoch.
  bool end_of_loader() const;

  distributed::Group& ranks() const { return ranks_; }
  const LoaderPlanOptions& options() const { return options_; }

 private:
  class State;
  void check_free(const data::LoaderBase& loader) const;
  void check_splits(const data::LoaderBase& loader) const;
  LoaderMode mode_for(bool dispatch, const BatchCodec* codec) const;
  std::shared_ptr<data::BatchRelay> relay_for(LoaderMode mode, const data::LoaderBase& loader,
                                              const BatchCodec* codec) const;
  void prepare_indexed(data::IndexedLoader& loader, const BatchCodec* codec);
  void prepare_stream(data::StreamLoaderBase& loader, const BatchCodec* codec);

  distributed::Group& ranks_;
  distributed::Group& readers_;
  LoaderPlanOptions options_;
  std::shared_ptr<State> state_;
};

// Sets even_batches for a scope, and restores it also when an exception passes.
class EvenBatchesScope {
 public:
  EvenBatchesScope(LoaderPlan& plan, bool value);
  ~EvenBatchesScope();
  EvenBatchesScope(const EvenBatchesScope&) = delete;
  EvenBatchesScope& operator=(const EvenBatchesScope&) = delete;

 private:
  LoaderPlan& plan_;
  bool previous_;
};

}  // namespace tessera::accelerate
