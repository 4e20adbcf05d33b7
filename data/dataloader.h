// Batches of a data set, made ahead by worker threads, in an order that can be resumed anywhere.
//
//     data::DataLoader loader(dataset, {.batch_size = 8, .shuffle = true, .workers = 2});
//     for (auto& batch : loader) train(batch.inputs, batch.targets);   // one epoch
//
// The order is a pure function of (seed, epoch, position), whatever the number of workers. cursor()
// counts samples of whole epochs over all ranks and includes the current batch: a run that stops
// after an optimizer step and resumes from cursor() sees exactly the batches that it would have
// seen. The same holds for the random numbers that examples draw: see example_place.h.
//
// A loop runs to the end of the epoch; the next loop is the next epoch. Leaving a loop early
// abandons the rest of its epoch. The first loop after set_cursor() or load_state_dict() starts at
// the cursor. next() needs no loop and crosses epochs. There is one loop over a loader at a time: a
// second one inside of it is an error.
//
// load_state_dict() restores the loader's place, so nothing has to be skipped. A state saved at an
// epoch's last batch is the next epoch's start.
//
// With options.device, or set_device(), the tensors of a batch are on that GPU. The workers copy
// them through page-locked memory and on a separate stream, so that workers * prefetch batches are
// ready there; the consumer's stream waits for a copy, the consumer does not. Without workers a
// batch is copied when it is requested, and so is one that a relay brings.
//
// An exception of a worker is rethrown when the consumer reaches that batch, with the index of the
// example before its message (an exception that is not a tessera::Error becomes one, with the
// original nested). The cursor stays before the failed batch; next() tries it again.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <iterator>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <tessera/core/state/state_dict.h>
#include <tessera/data/collate.h>
#include <tessera/data/dataset.h>
#include <tessera/data/device_copy.h>
#include <tessera/data/distributed_source.h>
#include <tessera/data/example_place.h>
#include <tessera/data/prefetch.h>
#include <tessera/data/sampler.h>

namespace tessera::data {

// Instead of a batch size: the data set's examples are complete batches, torch's batch_size=None.
// They are returned unchanged, or one by one through the loader's own collate function; each counts
// as many rows as the first dimension of its first tensor. Positions, sizes and shuffling then
// count batches.
inline constexpr int64_t kNoBatching = std::numeric_limits<int64_t>::min();

struct DataLoaderOptions {
  int64_t batch_size = 1;  // or kNoBatching
  bool shuffle = false;    // RandomSampler, else SequentialSampler
  // The seed of shuffling and of what examples draw. Without one the Context's seed when the loader
  // is made, that of manual_seed(). Ranks that share the loader then take rank 0's.
  std::optional<uint64_t> seed = {};
  bool drop_last = false;  // skips a last batch of fewer examples
  // Threads that make batches. 0: the consumer makes them on request. At most one is started for
  // each batch. Each computes with one thread.
  int workers = 0;
  int64_t prefetch = 2;  // batches being made or waiting, for each worker
  // The device of the batches' tensors. DeviceError if there is no such GPU.
  Device device = kCpu;
  // Batches that stay on the CPU are in page-locked memory, for your own copies
  // (core/factory/pinned.h). DeviceError if there is no GPU.
  bool pin_memory = false;
};

struct LoaderCursor {
  int64_t epoch = 0;
  int64_t position = 0;  // samples of this epoch returned so far, over all ranks
  friend bool operator==(const LoaderCursor&, const LoaderCursor&) = default;
};

class LoaderBase;

// Observes the loops over loaders: which loader is active, and its current batch.
class LoaderObserver {
 public:
  virtual ~LoaderObserver() = default;
  virtual void batch_began(LoaderBase& loader) = 0;  // the consumer gets a batch
  // At the end, by break or by an exception.
  virtual void loop_ended(LoaderBase& loader) noexcept = 0;
  virtual void loader_gone(LoaderBase& loader) noexcept = 0;
};

// The part that all loaders share: cursor, epochs, workers.
class LoaderBase {
 public:
  virtual ~LoaderBase();
  LoaderBase(const LoaderBase&) = delete;
  LoaderBase& operator=(const LoaderBase&) = delete;

  const LoaderCursor& cursor() const { return cursor_; }
  // ValueError for a negative field or a position beyond the epoch.
  void set_cursor(const LoaderCursor& cursor);

  // The next loop is that of `epoch`, from its start; or from the loaded position, if a state of
  // this epoch was loaded and not used yet, so that a loop over epochs may call it after a load.
  void set_epoch(int64_t epoch);
  // Only the next loop skips its first `batches` batches. An index source does it in O(1), a stream
  // reads over them. ConfigError after a load into the middle of an epoch, where it would skip
  // twice.
  void skip_batches(int64_t batches);

  // epoch, position, and their context: the number of examples and the seed.
  StateDict state_dict() const;
  // ConfigError if the data set's size, the seed or (for a stream read by parts) the number of
  // ranks differ, since the order would be another.
  void load_state_dict(const StateDict& state);

  const DataLoaderOptions& options() const { return options_; }
  uint64_t seed() const { return seed_; }  // options().seed, or its replacement
  // The seed of what examples draw, from the cursor on. An IndexedLoader's set_shuffle_seed() sets
  // both.
  void set_seed(uint64_t seed);

  // ---- Sizes, over all ranks
  virtual int64_t dataset_size() const = 0;  // examples; -1 for a stream
  // Samples in one batch of all ranks; 0 if that varies (a batch sampler).
  virtual int64_t total_batch_size() const = 0;
  // Samples of the last batch of all ranks if it is not full; 0 if it is full or dropped, or if
  // sizes are not known.
  int64_t remainder() const;

  // ---- The batch in hand
  int64_t batch_rows() const { return current_rows_; }  // examples in it; 0 without a batch
  // The number of leading rows that count. The others were read before in this epoch and fill the
  // batch up, so that all ranks have equal numbers of rows.
  int64_t batch_samples() const { return current_samples_; }
  // The number of ranks that have a batch at this position: the first ones of those that share the
  // loader. A larger number means all. A stream does not know, and returns all.
  virtual int64_t ranks_in_turn() const { return IndexSource::kAllRanks; }
  // Whether it is this rank's last of its epoch. A stream knows only if it looks ahead.
  bool batch_is_last() const { return current_ != nullptr && (known_last_ || is_last_by_index()); }
  // A stream returns a batch when it has read enough to know whether another follows.
  void set_look_ahead(bool value) { look_ahead_ = value; }

  bool in_loop() const { return in_loop_; }  // between begin() and the end of its iterator

  // The loader does not own observers. set_observer() replaces its own one (null: none) and keeps
  // those that were added.
  void set_observer(const std::shared_ptr<LoaderObserver>& observer) { observer_ = observer; }
  std::shared_ptr<LoaderObserver> observer() const { return observer_.lock(); }
  void add_observer(const std::shared_ptr<LoaderObserver>& observer);
  void remove_observer(const LoaderObserver& observer);
  std::vector<std::shared_ptr<LoaderObserver>> observers() const;

  // Puts the tensors of batches on `device`, from the cursor on: batches made ahead are discarded.
  // UnsupportedError, at the batch, for batches whose tensors are unknown (data/batch_tensors.h).
  void set_device(const Device& device);

  // From the cursor on, batches come through the relay. Null: from this loader.
  void set_relay(std::shared_ptr<BatchRelay> relay);
  const std::shared_ptr<BatchRelay>& relay() const { return relay_; }

 protected:
  // ValueError: batch size, workers or prefetch out of range.
  explicit LoaderBase(const DataLoaderOptions& options);

  virtual int64_t epoch_size() const = 0;  // in units of positions, -1 if unknown
  virtual int64_t position_after(int64_t position, int64_t batches) const = 0;
  virtual std::unique_ptr<BatchMaker> make_epoch(const LoaderCursor& from) const = 0;
  virtual int workers_for(int64_t position) const = 0;
  virtual bool is_last_by_index() const { return false; }
  // Whether a state at `position` belongs to an epoch that is over on all ranks that share it.
  virtual bool is_epoch_end(int64_t /*position*/) const { return false; }
  // Whether this rank's end of an epoch is that of all ranks.
  virtual bool ends_with_all_ranks() const { return true; }
  // The number of ranks that positions depend on; 0: any.
  virtual int64_t cursor_ranks() const { return 0; }
  virtual FindBatchTensors find_tensors() const = 0;

  void begin_loop();
  bool advance();   // false at the end of the epoch, which is then the next one's start
  void end_loop();  // when its iterator is destroyed
  void restart();   // discards batches made ahead; current batch and cursor stay
  int64_t turn_position() const { return turn_position_; }  // where the current batch began
  void* current() const { return current_.get(); }
  bool looks_ahead() const { return look_ahead_; }

 private:
  // The cursor, or the next epoch's start if this epoch is over.
  LoaderCursor resume_point() const;
  void start();
  void stop();
  void notify(void (LoaderObserver::*what)(LoaderBase&));

  DataLoaderOptions options_;
  uint64_t seed_;
  LoaderCursor cursor_;
  bool at_start_ = true;  // the next loop begins at the cursor, not with the next epoch
  bool loaded_ = false;   // the cursor is that of a state, and no loop has begun there
  // The loop begins at a loaded place: a stream that finds the end there makes it the next epoch's
  // loop.
  bool may_be_over_ = false;
  bool running_ = false;
  bool in_loop_ = false;
  std::shared_ptr<const DeviceCopier> copier_;
  std::unique_ptr<Prefetcher> prefetcher_;  // null where another rank makes the batches
  std::shared_ptr<void> current_;
  int64_t current_rows_ = 0, current_samples_ = 0;
  int64_t turn_position_ = 0;
  bool known_last_ = false;
  bool look_ahead_ = false;
  std::weak_ptr<LoaderObserver> observer_;
  std::vector<std::weak_ptr<LoaderObserver>> added_observers_;
  std::shared_ptr<BatchRelay> relay_;
};

// Loaders that read by index.
class IndexedLoader : public LoaderBase {
 public:
  int64_t size() const { return source_->batches_after(0); }  // batches in an epoch
  // Batches from the cursor to the end of its epoch.
  int64_t remaining_batches() const { return source_->batches_after(cursor().position); }
  int64_t dataset_size() const override { return dataset_size_; }
  int64_t total_batch_size() const override { return source_->global_batch_size(); }
  int64_t ranks_in_turn() const override {
    return batch_rows() == 0 ? IndexSource::kAllRanks : source_->ranks_at(turn_position());
  }

  const std::shared_ptr<const IndexSource>& source() const { return source_; }
  // Takes effect from the cursor on: batches made ahead are discarded. `others`: the sources of
  // ranks 1, 2..., whose batches this loader makes too, for a relay. ValueError without a source.
  void set_source(std::shared_ptr<const IndexSource> source,
                  std::vector<std::shared_ptr<const IndexSource>> others = {});
  // set_seed(), also for shuffling. False, without a change, if the order is not that of a
  // RandomSampler, or is a rank's share of one.
  bool set_shuffle_seed(uint64_t seed);

 protected:
  IndexedLoader(const DataLoaderOptions& options, int64_t dataset_size,
                std::shared_ptr<const IndexSource> source)
      : LoaderBase(options), dataset_size_(dataset_size), source_(std::move(source)) {}

  int64_t epoch_size() const override { return source_->size(); }
  int64_t position_after(int64_t position, int64_t batches) const override {
    return source_->position_after(position, batches);
  }
  int workers_for(int64_t position) const override;
  bool is_last_by_index() const override { return source_->batches_after(cursor().position) == 0; }
  bool is_epoch_end(int64_t position) const override;
  const std::vector<std::shared_ptr<const IndexSource>>& others() const { return others_; }

 private:
  int64_t dataset_size_;
  std::shared_ptr<const IndexSource> source_;
  std::vector<std::shared_ptr<const IndexSource>> others_;
};

// Makes a batch of a loader's examples, which it may move from. Workers call it at the same time.
template <class Example, class Batch>
using Collator = std::function<Batch(std::span<Example> examples)>;

namespace detail {
// Inside a catch block: rethrows the exception with the example's index in front.
[[noreturn]] void rethrow_with_example(int64_t index, int64_t epoch);

// Sets the number of rows that count in a batch that has a field `int64_t valid`.
template <class Batch>
void set_valid(Batch& batch, int64_t samples) {
  if constexpr (requires {
                  { (batch.valid) } -> std::same_as<int64_t&>;
                }) {
    batch.valid = samples;
  }
}

// Examples in a batch.
inline int64_t batched_examples(const DataLoaderOptions& options) {
  return options.batch_size == kNoBatching ? 1 : options.batch_size;
}
// The function that makes batches. ConfigError if examples are batches already and have another
// type.
template <class Example, class Batch>
Collator<Example, Batch> collator_for(const DataLoaderOptions& options,
                                      Collator<Example, Batch> given) {
  using Rule = Batch (*)(std::span<Example>);
  const Rule* const rule = given.template target<Rule>();
  if (options.batch_size != kNoBatching || rule == nullptr) return given;
  if constexpr (std::is_same_v<Example, Batch>) {
    if (*rule != &data::collate<Example>) return given;
    return [](std::span<Example> examples) -> Batch { return std::move(examples[0]); };
  } else {
    TS_THROW(ConfigError, "DataLoader",
             "kNoBatching hands out the examples, and collating makes batches of another type of "
             "these; give a function that makes a batch of one example, or a batch size.");
  }
}
template <class Batch>
int64_t rows_of(Batch& batch) {
  BatchTensors found;
  found(batch);
  for (const Tensor* tensor : found.tensors) {
    if (tensor->dim() > 0) return tensor->size(0);
  }
  return 1;
}

// A batch of examples, of which the first `samples` count and the first one stands at `place`.
template <class Example, class Batch>
BatchShare collate_share(const Collator<Example, Batch>& collate, std::vector<Example>& examples,
                         int64_t samples, bool is_batch, uint64_t seed, const ExamplePlace& place) {
  const ExampleScope scope(seed, place, ExampleScope::Part::kCollate);
  auto rows = static_cast<int64_t>(examples.size());
  auto batch = std::make_shared<Batch>(collate(std::span<Example>(examples)));
  if (is_batch) {
    rows = rows_of(*batch);
    if (samples > 0) samples = rows;
  }
  samples = std::min(rows, samples);
  set_valid(*batch, samples);
  return {std::move(batch), rows, samples, false};
}

// The loop over batches of type Batch: begin() and end() of a loader. It ends with its iterator.
template <class Batch, class Loader>
class BatchIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = Batch;
  using difference_type = std::ptrdiff_t;
  explicit BatchIterator(Loader* loader) : loader_(loader) {}
  BatchIterator(BatchIterator&& other) noexcept : loader_(std::exchange(other.loader_, nullptr)) {}
  BatchIterator& operator=(BatchIterator&& other) noexcept {
    std::swap(loader_, other.loader_);
    return *this;
  }
  ~BatchIterator() {
    if (loader_ != nullptr) loader_->leave();
  }
  Batch& operator*() const { return *loader_->batch(); }
  Batch* operator->() const { return loader_->batch(); }
  BatchIterator& operator++() {
    if (!loader_->step()) loader_ = nullptr;
    return *this;
  }
  void operator++(int) { ++*this; }
  friend bool operator==(const BatchIterator& iterator, std::default_sentinel_t) {
    return iterator.loader_ == nullptr;
  }

 private:
  Loader* loader_;
};
}  // namespace detail

// Loader of a Dataset, with one loop at a time. `collate`, the last argument, makes the batches
// instead of the rules of data/collate.h:
//
//     const auto with_size = [](std::span<data::TokenExample> examples) {
//       const int64_t size = std::ssize(examples);
//       return std::pair(size, data::collate(examples));
//     };
//     data::DataLoader loader(dataset, {.batch_size = 16}, with_size);
template <class Example, class BatchType = BatchOf<Example>>
class DataLoader : public IndexedLoader {
 public:
  using Batch = BatchType;
  using Collate = Collator<Example, Batch>;

  // `dataset` must outlive the loader; the other form shares it.
  DataLoader(const Dataset<Example>& dataset, const DataLoaderOptions& options = {},
             Collate collate = data::collate<Example>)
      : DataLoader(DatasetPtr<Example>(DatasetPtr<Example>(), &dataset), options,
                   std::move(collate)) {}
  DataLoader(const Dataset<Example>&& temporary, const DataLoaderOptions& options = {},
             Collate collate = data::collate<Example>) = delete;
  DataLoader(DatasetPtr<Example> dataset, const DataLoaderOptions& options = {},
             Collate collate = data::collate<Example>)
      : DataLoader(dataset, default_sampler(dataset->size(), options), options,
                   std::move(collate)) {}
  // Another order: options.shuffle is ignored. The sampler may be shorter or longer than the data
  // set.
  DataLoader(DatasetPtr<Example> dataset, std::shared_ptr<const Sampler> sampler,
             const DataLoaderOptions& options = {}, Collate collate = data::collate<Example>)
      : IndexedLoader(
            options, dataset->size(),
            std::make_shared<BatchSource>(std::move(sampler), detail::batched_examples(options),
                                          options.drop_last)),
        dataset_(std::move(dataset)),
        collate_(detail::collator_for<Example, Batch>(options, std::move(collate))) {}
  // Batches of any sizes: options.shuffle and batch_size are ignored, and drop_last matters only if
  // ranks share the loader: it drops the last batches if not every rank has one.
  DataLoader(DatasetPtr<Example> dataset, std::shared_ptr<const BatchSampler> sampler,
             const DataLoaderOptions& options = {}, Collate collate = data::collate<Example>)
      : IndexedLoader(options, dataset->size(),
                      std::make_shared<BatchSamplerSource>(std::move(sampler))),
        dataset_(std::move(dataset)),
        collate_(std::move(collate)) {
    TS_CHECK_AS(ConfigError, options.batch_size != kNoBatching, "DataLoader",
                "a batch sampler makes batches of examples, and kNoBatching says that these are "
                "batches; give one of them.");
  }

  using Iterator = detail::BatchIterator<Batch, DataLoader>;
  Iterator begin() {
    begin_loop();
    Iterator first(this);  // before the batch: whatever it throws, the loop ends
    ++first;
    return first;
  }
  std::default_sentinel_t end() const { return {}; }

  // Returns the next batch; nothing at the end of an epoch, after which the next call starts
  // another.
  std::optional<Batch> next() {
    if (!advance()) return std::nullopt;
    return std::move(*batch());
  }

 private:
  friend Iterator;
  using Source = std::shared_ptr<const IndexSource>;

  class Maker : public BatchMaker {
   public:
    Maker(DatasetPtr<Example> dataset, Collate collate, bool is_batch, Source source,
          std::vector<Source> others, uint64_t seed, int64_t epoch)
        : dataset_(std::move(dataset)),
          collate_(std::move(collate)),
          is_batch_(is_batch),
          source_(std::move(source)),
          others_(std::move(others)),
          seed_(seed),
          epoch_(epoch) {}
    std::optional<int64_t> next_position(int64_t position) const override {
      return source_->next_position(position);
    }
    MadeBatch make(int64_t position, int64_t next_position) override {
      MadeBatch made{share(*source_, position), next_position, {}};
      for (const Source& other : others_) {
        const bool has_batch = other->next_position(position).has_value();
        made.others.push_back(has_batch ? share(*other, position) : BatchShare());
      }
      return prefetch_is_stopping() ? MadeBatch() : made;
    }

   private:
    BatchShare share(const IndexSource& source, int64_t position) const {
      const std::vector<int64_t> indices = source.batch(epoch_, position);
      std::vector<Example> examples;
      examples.reserve(indices.size());
      for (const int64_t index : indices) {
        if (prefetch_is_stopping()) return {};
        const ExampleScope scope(seed_,
                                 {epoch_, source.order_position(position, std::ssize(examples))});
        try {
          examples.push_back(dataset_->get(index));
        } catch (...) {
          detail::rethrow_with_example(index, epoch_);
        }
      }
      return detail::collate_share(collate_, examples, source.valid(position), is_batch_, seed_,
                                   {epoch_, source.order_position(position, 0)});
    }

    DatasetPtr<Example> dataset_;
    Collate collate_;
    bool is_batch_;  // each example
    Source source_;
    std::vector<Source> others_;
    uint64_t seed_;
    int64_t epoch_;
  };

  static std::shared_ptr<const Sampler> default_sampler(int64_t size,
                                                        const DataLoaderOptions& options) {
    if (options.shuffle) {
      return std::make_shared<RandomSampler>(size, options.seed.value_or(random_state().seed));
    }
    return std::make_shared<SequentialSampler>(size);
  }
  std::unique_ptr<BatchMaker> make_epoch(const LoaderCursor& from) const override {
    return std::make_unique<Maker>(dataset_, collate_, options().batch_size == kNoBatching,
                                   source(), others(), seed(), from.epoch);
  }
  FindBatchTensors find_tensors() const override { return find_batch_tensors<Batch>; }
  Batch* batch() const { return static_cast<Batch*>(current()); }
  bool step() { return advance(); }
  void leave() {
    if (in_loop()) end_loop();
  }

  DatasetPtr<Example> dataset_;
  Collate collate_;
};
namespace detail {
// The batch that a loader's function makes from examples of D.
template <class D, class F>
struct CollateResult {
  static_assert(std::is_invocable_v<F&, std::span<typename D::Example>>,
                "a loader's function to collate takes a std::span of the data set's examples");
  using type = std::invoke_result_t<F&, std::span<typename D::Example>>;
};
template <class D, class F>
using CollatedBatch = typename CollateResult<D, F>::type;
}  // namespace detail
template <class D>
DataLoader(const D&, const DataLoaderOptions& = {}) -> DataLoader<typename D::Example>;
template <class D, class F>
DataLoader(const D&, const DataLoaderOptions&, F)
    -> DataLoader<typename D::Example, detail::CollatedBatch<D, F>>;
template <class D>
DataLoader(std::shared_ptr<D>, const DataLoaderOptions& = {}) -> DataLoader<typename D::Example>;
template <class D, class F>
DataLoader(std::shared_ptr<D>, const DataLoaderOptions&, F)
    -> DataLoader<typename D::Example, detail::CollatedBatch<D, F>>;
template <class D, class S>
DataLoader(std::shared_ptr<D>, std::shared_ptr<S>, const DataLoaderOptions& = {})
    -> DataLoader<typename D::Example>;
template <class D, class S, class F>
DataLoader(std::shared_ptr<D>, std::shared_ptr<S>, const DataLoaderOptions&, F)
    -> DataLoader<typename D::Example, detail::CollatedBatch<D, F>>;

// A rank's share of a stream. For each batch all ranks together read world_size * batch_size
// examples of it: rank r has the r-th batch_size of them.
struct StreamShare {
  int rank = 0;
  int world_size = 1;
  int64_t batch_size = 1;  // of one rank
  // For the last batches of all ranks if they are not full. kWrapAround fills them up with the
  // stream's first examples.
  Tail tail = Tail::kUneven;
  bool for_all = false;  // also makes the batches of the other ranks, for a relay
  // Reads only the parts rank, rank + world_size... of the stream, which may have any lengths; all
  // their examples are this rank's. The cursor moves by world_size * batch_size for each batch, so
  // a run must resume on as many ranks. kWrapAround continues without end with the part's first
  // examples, which do not count: a relay knows when all ranks are done.
  bool by_parts = false;
};

// Loaders that read a stream.
class StreamLoaderBase : public LoaderBase {
 public:
  int64_t dataset_size() const override { return -1; }
  int64_t total_batch_size() const override { return share_.batch_size * share_.world_size; }

  const StreamShare& share() const { return share_; }
  // Takes effect from the cursor on. ValueError for a rank outside the world, no batch size, or
  // fewer parts than ranks.
  void set_share(const StreamShare& share);
  virtual int64_t num_parts() const = 0;  // of the stream

 protected:
  explicit StreamLoaderBase(const DataLoaderOptions& options);

  int64_t epoch_size() const override { return -1; }
  int64_t position_after(int64_t position, int64_t batches) const override {
    return position + batches * total_batch_size();
  }
  int workers_for(int64_t) const override { return std::min(options().workers, 1); }
  int64_t cursor_ranks() const override { return share_.by_parts ? share_.world_size : 0; }
  bool ends_with_all_ranks() const override {
    return share_.world_size == 1 || share_.tail != Tail::kUneven;
  }

 private:
  StreamShare share_;
};

// Loader of an IterableDataset. At most one worker reads ahead, in the stream's order.
// options.shuffle is refused. Resuming reads the stream again up to the cursor.
template <class Example, class BatchType = BatchOf<Example>>
class StreamLoader : public StreamLoaderBase {
 public:
  using Batch = BatchType;
  using Collate = Collator<Example, Batch>;  // as DataLoader's
  using DatasetPointer = std::shared_ptr<const IterableDataset<Example>>;

  // `dataset` must outlive the loader.
  StreamLoader(const IterableDataset<Example>& dataset, const DataLoaderOptions& options = {},
               Collate collate = data::collate<Example>)
      : StreamLoader(DatasetPointer(DatasetPointer(), &dataset), options, std::move(collate)) {}
  StreamLoader(const IterableDataset<Example>&& temporary, const DataLoaderOptions& options = {},
               Collate collate = data::collate<Example>) = delete;
  StreamLoader(DatasetPointer dataset, const DataLoaderOptions& options = {},
               Collate collate = data::collate<Example>)
      : StreamLoaderBase(options),
        dataset_(std::move(dataset)),
        collate_(detail::collator_for<Example, Batch>(options, std::move(collate))) {}

  using Iterator = detail::BatchIterator<Batch, StreamLoader>;
  Iterator begin() {
    begin_loop();
    Iterator first(this);  // before the batch: whatever it throws, the loop ends
    ++first;
    return first;
  }
  std::default_sentinel_t end() const { return {}; }
  std::optional<Batch> next() {
    if (!advance()) return std::nullopt;
    return std::move(*batch());
  }

 private:
  friend Iterator;

  class Maker : public BatchMaker {
   public:
    Maker(DatasetPointer dataset, Collate collate, bool is_batch, const StreamShare& share,
          bool looks_ahead, uint64_t seed, const LoaderCursor& from)
        : dataset_(std::move(dataset)),
          collate_(std::move(collate)),
          is_batch_(is_batch),
          share_(share),
          looks_ahead_(looks_ahead),
          seed_(seed),
          from_(from) {
      if (share.by_parts) {  // alone with its parts
        part_ = first_part_ = share.rank;
        ranks_ = share.world_size;
        share_.rank = 0, share_.world_size = 1;
      }
    }
    std::optional<int64_t> next_position(int64_t position) const override {
      return position + ranks_ * turn();
    }
    MadeBatch make(int64_t position, int64_t next_position) override {
      std::vector<std::optional<Example>> examples;  // at this position; nothing for other ranks'
      try {
        while (reached_ < next_position / ranks_ && !prefetch_is_stopping()) {
          std::optional<Example> example = take();
          if (!example) break;
          if (fills_up() && std::ssize(first_) < turn()) keep(*example);
          const int64_t at = reached_++ - position / ranks_;
          if (at >= 0) examples.push_back(own(at) ? std::move(example) : std::nullopt);
        }
      } catch (...) {
        detail::rethrow_with_example(reached_, from_.epoch);
      }
      const auto there = std::ssize(examples);
      if (there == 0 && !(share_.by_parts && fills_up() && !first_.empty())) return {};
      if (share_.tail == Tail::kDrop && there < turn()) return {};
      if (looks_ahead_) look_ahead();
      MadeBatch made{share_of(share_.rank, position, examples),
                     share_.by_parts ? next_position : reached_,
                     {}};
      if (share_.for_all) {
        for (int rank = 1; rank < share_.world_size; ++rank) {
          made.others.push_back(share_of(rank, position, examples));
        }
      }
      return made;
    }

   private:
    int64_t turn() const { return share_.batch_size * share_.world_size; }
    bool fills_up() const { return share_.tail == Tail::kWrapAround; }
    // The place of an example: parts are read by any number of ranks, so each has its own count.
    static int64_t in_part(int64_t part, int64_t position) { return (part << 40) + position; }
    // Whether this rank needs the example at `at` within the batch of all ranks.
    bool own(int64_t at) const { return share_.for_all || at / share_.batch_size == share_.rank; }

    std::optional<Example> take() {
      if (!ahead_.empty()) {
        std::optional<Example> example(std::move(ahead_.front()));
        ahead_.pop_front();
        return example;
      }
      if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
      return read();
    }
    std::optional<Example> read() {
      while (!ended_) {
        if (!stream_) {
          const ExampleScope scope(seed_, {from_.epoch, in_part(part_, 0)},
                                   ExampleScope::Part::kOpen);
          stream_ = share_.by_parts ? dataset_->open_part(from_.epoch, part_)
                                    : dataset_->open(from_.epoch);
          read_ = 0;
        }
        const ExampleScope scope(seed_, {from_.epoch, in_part(part_, read_++)});
        if (std::optional<Example> example = stream_->next()) return example;
        part_ += ranks_;
        ended_ = !share_.by_parts || part_ >= dataset_->num_parts();
        stream_.reset();
      }
      return std::nullopt;
    }
    // Reads enough to know which ranks have a next batch. Errors here belong to that batch.
    void look_ahead() {
      const int last_rank = share_.for_all ? share_.world_size - 1 : share_.rank;
      const int64_t needed = share_.tail == Tail::kDrop     ? turn()
                             : share_.tail == Tail::kUneven ? last_rank * share_.batch_size + 1
                                                            : 1;
      try {
        while (!error_ && std::ssize(ahead_) < needed) {
          std::optional<Example> example = read();
          if (!example) return;
          ahead_.push_back(*std::move(example));
        }
      } catch (...) {
        error_ = std::current_exception();
      }
    }
    // After look_ahead().
    bool is_last_of(int rank) const {
      if (!looks_ahead_ || error_) return false;
      const auto there = std::ssize(ahead_);
      if (share_.tail == Tail::kDrop) return there < turn();
      return there <= (share_.tail == Tail::kUneven ? rank * share_.batch_size : 0);
    }
    void keep(const Example& example) {
      if constexpr (std::is_copy_constructible_v<Example>) {
        first_.push_back(example);
      } else {
        TS_THROW(UnsupportedError, "StreamLoader",
                 "fills the last batches up with copies of the first examples, and these cannot be "
                 "copied; let them be uneven or drop them.");
      }
    }
    BatchShare share_of(int rank, int64_t position,
                        std::vector<std::optional<Example>>& turn_examples) {
      const auto there = std::ssize(turn_examples);
      const int64_t begin = rank * share_.batch_size;
      const int64_t samples = std::clamp<int64_t>(there - begin, 0, share_.batch_size);
      std::vector<Example> examples;
      for (int64_t i = 0; i < samples; ++i) {
        examples.push_back(*std::move(turn_examples[static_cast<size_t>(begin + i)]));
      }
      if constexpr (std::is_copy_constructible_v<Example>) {
        if (fills_up()) {
          for (int64_t at = begin + samples - there; std::ssize(examples) < share_.batch_size; ++at)
            examples.push_back(first_[static_cast<size_t>(at % std::ssize(first_))]);
        }
      }
      if (examples.empty()) return {};
      // By parts each rank has its own batch at this position.
      const int64_t first = in_part(share_.by_parts ? first_part_ : 0, position + begin);
      BatchShare share = detail::collate_share(collate_, examples, samples, is_batch_, seed_,
                                               {from_.epoch, first});
      share.last = is_last_of(rank);
      return share;
    }

    DatasetPointer dataset_;
    Collate collate_;
    bool is_batch_;  // each example
    StreamShare share_;
    bool looks_ahead_;
    uint64_t seed_;
    LoaderCursor from_;
    int64_t part_ = 0, ranks_ = 1;  // the part that is being read, and the step to the next
    int64_t first_part_ = 0;
    int64_t read_ = 0;     // examples read of the open stream
    int64_t reached_ = 0;  // examples read, of this rank's parts
    std::unique_ptr<ExampleStream<Example>> stream_;
    std::vector<Example> first_;  // of the epoch, for filling up
    std::deque<Example> ahead_;
    std::exception_ptr error_;  // of what comes after ahead_
    bool ended_ = false;
  };

  int64_t num_parts() const override { return dataset_->num_parts(); }
  std::unique_ptr<BatchMaker> make_epoch(const LoaderCursor& from) const override {
    return std::make_unique<Maker>(dataset_, collate_, options().batch_size == kNoBatching, share(),
                                   looks_ahead(), seed(), from);
  }
  FindBatchTensors find_tensors() const override { return find_batch_tensors<Batch>; }
  Batch* batch() const { return static_cast<Batch*>(current()); }
  bool step() { return advance(); }
  void leave() {
    if (in_loop()) end_loop();
  }

  DatasetPointer dataset_;
  Collate collate_;
};
template <class D>
StreamLoader(const D&, const DataLoaderOptions& = {}) -> StreamLoader<typename D::Example>;
template <class D, class F>
StreamLoader(const D&, const DataLoaderOptions&, F)
    -> StreamLoader<typename D::Example, detail::CollatedBatch<D, F>>;

}  // namespace tessera::data
