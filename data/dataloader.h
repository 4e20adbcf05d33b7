// Batches of a data set, made ahead by worker threads, in an order that can be resumed anywhere.
//
//     data::DataLoader loader(dataset, {.batch_size = 8, .shuffle = true, .workers = 2});
//     for (auto& batch : loader) train(batch.inputs, batch.targets);   // one epoch
//
// The order is a pure function of (seed, epoch, position), whatever the number of workers. cursor()
// counts samples of whole epochs over all ranks and includes the batch in hand: a run that stops
// after an optimizer step and resumes from cursor() sees exactly the batches that it would have
// seen.
//
// Loops and epochs: a loop runs to the end of the epoch; the next loop is the next epoch. A loop
// that is left early gives up the rest of its epoch. The first loop after set_cursor() or
// load_state_dict() starts at the cursor. next() needs no loop and crosses epochs.
//
// Errors: what a worker throws is rethrown in the consumer's turn for that batch, with the index of
// the example before its message (an exception that is no tessera::Error becomes one, with the
// original nested). The cursor stays before the failed batch; next() tries it again.
#pragma once

#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <tessera/core/state_dict.h>
#include <tessera/data/collate.h>
#include <tessera/data/dataset.h>
#include <tessera/data/prefetch.h>
#include <tessera/data/sampler.h>

namespace tessera::data {

struct DataLoaderOptions {
  int64_t batch_size = 1;
  bool shuffle = false;    // RandomSampler, else SequentialSampler
  uint64_t seed = 0;       // of the shuffling
  bool drop_last = false;  // leave out a last batch of fewer examples
  // Threads that make batches. 0: the consumer makes them when it asks. More than there are batches
  // are not started. Each calculates with one thread.
  int workers = 0;
  int64_t prefetch = 2;  // batches made or waiting for each worker
};

struct LoaderCursor {
  int64_t epoch = 0;
  int64_t position = 0;  // samples of this epoch that were handed out, over all ranks
  friend bool operator==(const LoaderCursor&, const LoaderCursor&) = default;
};

class LoaderBase;

// Follows the loops over a loader: which of several is being read, and which batch is in hand.
class LoaderObserver {
 public:
  virtual ~LoaderObserver() = default;
  virtual void batch_began(LoaderBase& loader) = 0;  // the consumer gets a batch
  virtual void loop_ended(LoaderBase& loader) noexcept = 0;   // at the end, by break or by an exception
  virtual void loader_gone(LoaderBase& loader) noexcept = 0;
};

// What all loaders share: cursor, epochs, workers.
class LoaderBase {
 public:
  virtual ~LoaderBase();
  LoaderBase(const LoaderBase&) = delete;
  LoaderBase& operator=(const LoaderBase&) = delete;

  const LoaderCursor& cursor() const { return cursor_; }
  // ValueError for a negative field or a position beyond the epoch.
  void set_cursor(const LoaderCursor& cursor);

  // epoch, position, and what they rely on: the number of examples and the seed.
  StateDict state_dict() const;
  // ConfigError where the data set's size or the seed differ: the order would be another.
  void load_state_dict(const StateDict& state);

  const DataLoaderOptions& options() const { return options_; }

  // ---- The batch in hand
  int64_t batch_samples() const { return current_samples_; }  // 0 where there is none
  // Whether it is the last of its epoch. A stream knows only when it is read one batch ahead.
  bool batch_is_last() const { return ahead_known_ ? ahead_.batch == nullptr : is_last_by_index(); }
  // From the next batch on, a batch is handed out when the one after it is there.
  void set_look_ahead(bool value) { look_ahead_ = value; }

  // One at a time; null: nobody. The loader does not keep it alive.
  void set_observer(const std::shared_ptr<LoaderObserver>& observer) { observer_ = observer; }
  std::shared_ptr<LoaderObserver> observer() const { return observer_.lock(); }

 protected:
  // ValueError: batch size, workers or prefetch out of range.
  explicit LoaderBase(const DataLoaderOptions& options);

  virtual int64_t epoch_size() const = 0;  // samples, -1 if unknown
  virtual std::unique_ptr<BatchMaker> make_epoch(const LoaderCursor& from) const = 0;
  virtual int workers_for(int64_t position) const = 0;
  virtual bool is_last_by_index() const { return false; }

  void begin_loop();
  bool advance();   // false at the end of the epoch, which is then the next one's start
  void end_loop();  // of an iterator that goes
  void stop();      // gives up what was made ahead; the cursor stays
  void* current() const { return current_.get(); }

 private:
  void start();

  DataLoaderOptions options_;
  LoaderCursor cursor_;
  bool at_start_ = true;  // the next loop begins at the cursor, not with the next epoch
  std::unique_ptr<Prefetcher> prefetcher_;
  std::shared_ptr<void> current_;
  int64_t current_samples_ = 0;
  bool look_ahead_ = false;
  bool ahead_known_ = false;
  MadeBatch ahead_;  // the batch after the one in hand, where ahead_known_
  std::weak_ptr<LoaderObserver> observer_;
};

namespace detail {
// Inside a catch block: throws the exception on with the example's index in front.
[[noreturn]] void rethrow_with_example(int64_t index, int64_t epoch);

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

// Loader of a Dataset. Of one loader there is one loop at a time.
template <class Example>
class DataLoader : public LoaderBase {
 public:
  using Batch = BatchOf<Example>;

  // `dataset` must outlive the loader; the other form shares it.
  DataLoader(const Dataset<Example>& dataset, const DataLoaderOptions& options = {})
      : DataLoader(DatasetPtr<Example>(DatasetPtr<Example>(), &dataset), options) {}
  DataLoader(const Dataset<Example>&& temporary, const DataLoaderOptions& options = {}) = delete;
  DataLoader(DatasetPtr<Example> dataset, const DataLoaderOptions& options = {})
      : DataLoader(dataset, default_sampler(dataset->size(), options), options) {}
  // Another order: options.shuffle is not looked at. The sampler may be shorter or longer than the
  // data set.
  DataLoader(DatasetPtr<Example> dataset, std::shared_ptr<const Sampler> sampler,
             const DataLoaderOptions& options = {})
      : LoaderBase(options),
        dataset_(std::move(dataset)),
        source_(std::make_shared<BatchSource>(std::move(sampler), options.batch_size,
                                              options.drop_last)) {}

  int64_t size() const { return source_->batches_after(0); }  // batches in an epoch

  const std::shared_ptr<const IndexSource>& source() const { return source_; }
  // Takes effect from the cursor on: batches made ahead are given up.
  void set_source(std::shared_ptr<const IndexSource> source) {
    TS_CHECK(source != nullptr, "DataLoader", "needs an index source; got none.");
    stop();
    source_ = std::move(source);
  }

  using Iterator = detail::BatchIterator<Batch, DataLoader>;
  Iterator begin() {
    begin_loop();
    return Iterator(advance() ? this : nullptr);
  }
  std::default_sentinel_t end() const { return {}; }

  // The next batch; nothing at the end of an epoch, after which the next call starts another.
  std::optional<Batch> next() {
    if (!advance()) return std::nullopt;
    return std::move(*batch());
  }

 private:
  friend Iterator;

  class Maker : public BatchMaker {
   public:
    Maker(DatasetPtr<Example> dataset, std::shared_ptr<const IndexSource> source, int64_t epoch)
        : dataset_(std::move(dataset)), source_(std::move(source)), epoch_(epoch) {}
    std::optional<int64_t> next_position(int64_t position) const override {
      return source_->next_position(position);
    }
    MadeBatch make(int64_t position, int64_t next_position) override {
      const std::vector<int64_t> indices = source_->batch(epoch_, position);
      std::vector<Example> examples;
      examples.reserve(indices.size());
      for (const int64_t index : indices) {
        if (prefetch_is_stopping()) return {};
        try {
          examples.push_back(dataset_->get(index));
        } catch (...) {
          detail::rethrow_with_example(index, epoch_);
        }
      }
      const auto samples = static_cast<int64_t>(examples.size());
      return {std::make_shared<Batch>(collate(std::span<Example>(examples))), next_position,
              samples};
    }

   private:
    DatasetPtr<Example> dataset_;
    std::shared_ptr<const IndexSource> source_;
    int64_t epoch_;
  };

  static std::shared_ptr<const Sampler> default_sampler(int64_t size,
                                                        const DataLoaderOptions& options) {
    if (options.shuffle) return std::make_shared<RandomSampler>(size, options.seed);
    return std::make_shared<SequentialSampler>(size);
  }
  int64_t epoch_size() const override { return source_->size(); }
  std::unique_ptr<BatchMaker> make_epoch(const LoaderCursor& from) const override {
    return std::make_unique<Maker>(dataset_, source_, from.epoch);
  }
  int workers_for(int64_t position) const override {
    return static_cast<int>(std::min<int64_t>(options().workers, source_->batches_after(position)));
  }
  bool is_last_by_index() const override { return source_->batches_after(cursor().position) == 0; }
  Batch* batch() const { return static_cast<Batch*>(current()); }
  bool step() { return advance(); }
  void leave() { end_loop(); }

  DatasetPtr<Example> dataset_;
  std::shared_ptr<const IndexSource> source_;
};
template <class D>
DataLoader(const D&, const DataLoaderOptions& = {}) -> DataLoader<typename D::Example>;
template <class D>
DataLoader(std::shared_ptr<D>, const DataLoaderOptions& = {}) -> DataLoader<typename D::Example>;
template <class D, class S>
DataLoader(std::shared_ptr<D>, std::shared_ptr<S>, const DataLoaderOptions& = {})
    -> DataLoader<typename D::Example>;

// Loader of an IterableDataset. One worker at most reads ahead: the stream's order is the order.
// options.shuffle is refused. Resuming reads the stream again up to the cursor.
template <class Example>
class StreamLoader : public LoaderBase {
 public:
  using Batch = BatchOf<Example>;

  // `dataset` must outlive the loader.
  StreamLoader(const IterableDataset<Example>& dataset, const DataLoaderOptions& options = {})
      : StreamLoader(std::shared_ptr<const IterableDataset<Example>>(
                         std::shared_ptr<const IterableDataset<Example>>(), &dataset),
                     options) {}
  StreamLoader(const IterableDataset<Example>&& temporary,
               const DataLoaderOptions& options = {}) = delete;
  StreamLoader(std::shared_ptr<const IterableDataset<Example>> dataset,
               const DataLoaderOptions& options = {})
      : LoaderBase(options), dataset_(std::move(dataset)) {
    TS_CHECK(!options.shuffle, "StreamLoader",
             "a stream has its own order; shuffle is asked for; shuffle in the data set.");
  }

  using Iterator = detail::BatchIterator<Batch, StreamLoader>;
  Iterator begin() {
    begin_loop();
    return Iterator(advance() ? this : nullptr);
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
    Maker(std::shared_ptr<const IterableDataset<Example>> dataset, const DataLoaderOptions& options,
          const LoaderCursor& from)
        : dataset_(std::move(dataset)), options_(options), from_(from), reached_(0) {}
    std::optional<int64_t> next_position(int64_t position) const override {
      return position + options_.batch_size;
    }
    MadeBatch make(int64_t position, int64_t next_position) override {
      std::vector<Example> examples;
      try {
        if (!stream_) stream_ = dataset_->open(from_.epoch);
        while (reached_ < next_position && !prefetch_is_stopping()) {
          std::optional<Example> example = stream_->next();
          if (!example) break;
          if (reached_++ >= position) examples.push_back(std::move(*example));
        }
      } catch (...) {
        detail::rethrow_with_example(reached_, from_.epoch);
      }
      if (examples.empty() || (options_.drop_last && reached_ < next_position)) return {};
      const auto samples = static_cast<int64_t>(examples.size());
      return {std::make_shared<Batch>(collate(std::span<Example>(examples))), reached_, samples};
    }

   private:
    std::shared_ptr<const IterableDataset<Example>> dataset_;
    DataLoaderOptions options_;
    LoaderCursor from_;
    int64_t reached_;
    std::unique_ptr<ExampleStream<Example>> stream_;
  };

  int64_t epoch_size() const override { return -1; }
  std::unique_ptr<BatchMaker> make_epoch(const LoaderCursor& from) const override {
    return std::make_unique<Maker>(dataset_, options(), from);
  }
  int workers_for(int64_t) const override { return std::min(options().workers, 1); }
  Batch* batch() const { return static_cast<Batch*>(current()); }
  bool step() { return advance(); }
  void leave() { end_loop(); }

  std::shared_ptr<const IterableDataset<Example>> dataset_;
};
template <class D>
StreamLoader(const D&, const DataLoaderOptions& = {}) -> StreamLoader<typename D::Example>;

}  // namespace tessera::data
