#include <tessera/data/dataloader.h>

#include <exception>
#include <typeinfo>
#include <utility>

#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/factory/pinned.h>
#include <tessera/core/gpu/backend.h>
#include <tessera/core/profile/profiler.h>
#include <tessera/core/random.h>

namespace tessera::data {
namespace {

constexpr std::string_view kDataLoader = "DataLoader";

// What its workers do with a batch that is made: bring it where it is wanted.
class Staging {
 public:
  Staging(FindBatchTensors find, std::shared_ptr<const DeviceCopier> copier)
      : find_(find), copier_(std::move(copier)) {}

  void start(BatchShare& made) const {
    if (made.batch == nullptr) return;
    const std::vector<Tensor*> tensors = of(made);
    if (copier_->device().is_cuda()) {
      made.copy = copier_->start_tensors(tensors);
    } else {
      for (Tensor* const tensor : tensors) *tensor = raw::pin(*tensor);
    }
  }
  void finish(BatchShare& made) const {
    if (made.copy == nullptr) return;
    copier_->finish_tensors(made.copy, of(made));
    made.copy = nullptr;
  }

 private:
  std::vector<Tensor*> of(const BatchShare& made) const {
    BatchTensors found;
    find_(made.batch.get(), found);
    check_seen(found);
    return std::move(found.tensors);
  }

  FindBatchTensors find_;
  std::shared_ptr<const DeviceCopier> copier_;
};

class StagingMaker : public BatchMaker {
 public:
  StagingMaker(std::unique_ptr<BatchMaker> maker, const Staging& staging)
      : maker_(std::move(maker)), staging_(staging) {}
  std::optional<int64_t> next_position(int64_t position) const override {
    return maker_->next_position(position);
  }
  MadeBatch make(int64_t position, int64_t next_position) override {
    MadeBatch made = maker_->make(position, next_position);
    const TimelineRange range("copy batch");
    if (!prefetch_is_stopping()) staging_.start(made);
    return made;
  }

 private:
  std::unique_ptr<BatchMaker> maker_;
  Staging staging_;
};

}  // namespace

namespace detail {

void rethrow_with_example(int64_t index, int64_t epoch) {
  const std::string where =
      tessera::detail::concatenate("DataLoader: example ", index, " of epoch ", epoch);
  try {
    throw;
  } catch (Error& error) {
    error.add_context(where);
    throw;
  } catch (const std::exception& error) {
    std::throw_with_nested(Error(where + ": " + error.what()));
  } catch (...) {
    std::throw_with_nested(Error(where + ": an exception that is no std::exception"));
  }
}

}  // namespace detail

LoaderBase::LoaderBase(const DataLoaderOptions& options)
    : options_(options), seed_(options.seed.value_or(random_state().seed)) {
  TS_CHECK(options.batch_size >= 1 || options.batch_size == kNoBatching, kDataLoader,
           "the batch size must be at least 1, or kNoBatching; got ", options.batch_size, ".");
  TS_CHECK(options.workers >= 0 && options.workers <= 1024, kDataLoader,
           "the number of workers must be 0 to 1024; got ", options.workers, ".");
  TS_CHECK(options.prefetch >= 1 && options.prefetch <= 1'000'000, kDataLoader,
           "prefetch must be 1 to 1000000 batches a worker; got ", options.prefetch, ".");
  set_device(options.device);
}

void LoaderBase::set_device(const Device& device) {
  const bool stages = device.is_cuda() || options_.pin_memory;
  if (options_.pin_memory) gpu::pinned_allocator();  // throws where there is no GPU
  std::shared_ptr<const DeviceCopier> copier;
  if (stages || device.is_meta()) copier = std::make_shared<DeviceCopier>(device);
  restart();
  copier_ = std::move(copier);
  options_.device = device;
}

void LoaderBase::set_cursor(const LoaderCursor& cursor) {
  TS_CHECK(cursor.epoch >= 0 && cursor.position >= 0 &&
               (epoch_size() < 0 || cursor.position <= epoch_size()),
           kDataLoader, "a cursor must lie in an epoch of ", epoch_size(), " samples; got epoch ",
           cursor.epoch, " position ", cursor.position, ".");
  stop();
  cursor_ = cursor;
  at_start_ = true;
  loaded_ = false;
}

void LoaderBase::set_epoch(int64_t epoch) {
  if (loaded_ && epoch == cursor_.epoch) return;
  set_cursor({epoch, 0});
}

void LoaderBase::set_seed(uint64_t seed) {
  restart();
  seed_ = seed;
}

LoaderCursor LoaderBase::resume_point() const {
  // A stream's length is not known where the state is loaded.
  const bool is_last_of_stream =
      epoch_size() < 0 && current_ != nullptr && known_last_ && ends_with_all_ranks();
  const bool over = is_last_of_stream || (cursor_.position > 0 && is_epoch_end(cursor_.position));
  return over ? LoaderCursor{cursor_.epoch + 1, 0} : cursor_;
}

StateDict LoaderBase::state_dict() const {
  const LoaderCursor at = resume_point();
  StateDict state;
  state.set("epoch", scalar_tensor(at.epoch, kI64));
  state.set("position", scalar_tensor(at.position, kI64));
  state.set("size", scalar_tensor(epoch_size(), kI64));
  state.set("seed", scalar_tensor(static_cast<int64_t>(seed_), kI64));
  if (cursor_ranks() > 0) state.set("ranks", scalar_tensor(cursor_ranks(), kI64));
  return state;
}

void LoaderBase::load_state_dict(const StateDict& state) {
  const auto read = [&](std::string_view name) { return state.at(name).item<int64_t>(); };
  TS_CHECK_AS(ConfigError, read("size") == epoch_size(), kDataLoader,
              "the state belongs to a data set of ", read("size"), " samples; this one has ",
              epoch_size(), "; resume with the same data.");
  const auto saved = static_cast<uint64_t>(read("seed"));
  TS_CHECK_AS(ConfigError, saved == seed_, kDataLoader, "the state belongs to seed ", saved,
              "; this loader has ", seed_,
              options_.seed ? "; resume with the same seed."
                            : ", that of manual_seed() when it was made; resume with the same "
                              "seed, here or as DataLoaderOptions::seed.");
  const int64_t ranks = state.contains("ranks") ? read("ranks") : 0;
  TS_CHECK_AS(ConfigError, ranks == cursor_ranks() || read("position") == 0, kDataLoader,
              "the state is that of ", ranks, " ranks that each read parts of a stream (0: any); ",
              "here are ", cursor_ranks(), "; resume with as many, or at the start of an epoch.");
  set_cursor({read("epoch"), read("position")});
  cursor_ = resume_point();
  loaded_ = true;
}

void LoaderBase::skip_batches(int64_t batches) {
  TS_CHECK(batches >= 0, kDataLoader, "skips 0 batches or more; asked for ", batches, ".");
  if (batches == 0) return;
  TS_CHECK_AS(ConfigError, !loaded_ || cursor_.position == 0, kDataLoader, "skipping ", batches,
              " batches would leave out batches that were never read: the loaded state has put the "
              "loader to position ",
              cursor_.position, " of epoch ", cursor_.epoch,
              " already; leave the skipping out, or say set_cursor({", cursor_.epoch,
              ", 0}) before it.");
  const LoaderCursor from = at_start_ ? cursor_ : LoaderCursor{cursor_.epoch + 1, 0};
  set_cursor({from.epoch, position_after(from.position, batches)});
}

int64_t LoaderBase::remainder() const {
  if (dataset_size() < 0 || total_batch_size() == 0 || options_.drop_last) return 0;
  return epoch_size() % total_batch_size();
}

void LoaderBase::set_relay(std::shared_ptr<BatchRelay> relay) {
  restart();
  relay_ = std::move(relay);
}

void LoaderBase::start() {
  if (relay_) relay_->begin_epoch();
  if (!relay_ || relay_->makes_batches()) {
    std::unique_ptr<BatchMaker> maker = make_epoch(cursor_);
    // What a relay takes along travels from the CPU.
    if (copier_ && !relay_) {
      maker = std::make_unique<StagingMaker>(std::move(maker), Staging(find_tensors(), copier_));
    }
    prefetcher_ = std::make_unique<Prefetcher>(std::move(maker), cursor_.position,
                                               workers_for(cursor_.position), options_.prefetch);
  }
  running_ = true;
  at_start_ = false;
  loaded_ = false;
}

void LoaderBase::begin_loop() {
  TS_CHECK_AS(ConfigError, !in_loop_, kDataLoader,
              "there is one loop over a loader at a time, and one is running (at position ",
              cursor_.position, " of epoch ", cursor_.epoch,
              "), which the new one would take the batches of; make a second loader of the same "
              "data for the inner loop.");
  stop();
  if (!at_start_) cursor_ = {cursor_.epoch + 1, 0};
  const bool resumes = loaded_ && cursor_.position > 0;
  start();
  in_loop_ = true;
  may_be_over_ = resumes && epoch_size() < 0 && ends_with_all_ranks();
}

LoaderBase::~LoaderBase() { notify(&LoaderObserver::loader_gone); }

void LoaderBase::add_observer(const std::shared_ptr<LoaderObserver>& observer) {
  added_observers_.push_back(observer);
}

void LoaderBase::remove_observer(const LoaderObserver& observer) {
  std::erase_if(added_observers_, [&](const auto& added) {
    const auto kept = added.lock();
    return kept == nullptr || kept.get() == &observer;
  });
}

std::vector<std::shared_ptr<LoaderObserver>> LoaderBase::observers() const {
  std::vector<std::shared_ptr<LoaderObserver>> alive;
  for (const auto& added : added_observers_) {
    if (auto observer = added.lock()) alive.push_back(std::move(observer));
  }
  if (auto observer = observer_.lock()) alive.push_back(std::move(observer));
  return alive;
}

void LoaderBase::notify(void (LoaderObserver::*what)(LoaderBase&)) {
  // Copies: an observer may add and remove.
  if (added_observers_.empty()) {
    if (const auto observer = observer_.lock()) (observer.get()->*what)(*this);
    return;
  }
  for (const auto& observer : observers()) (observer.get()->*what)(*this);
}

bool LoaderBase::advance() {
  const TimelineRange range("next batch");
  current_.reset();  // before waiting: the consumer is done with it, its memory may be used again
  current_rows_ = current_samples_ = 0;
  if (!running_) start();
  const bool may_be_over = std::exchange(may_be_over_, false);
  MadeBatch made;
  try {
    std::exception_ptr error;
    try {
      if (prefetcher_) made = prefetcher_->next();
    } catch (...) {
      if (!relay_) throw;
      error = std::current_exception();
    }
    if (relay_) made = relay_->exchange(std::move(made), error);
    if (copier_) {
      const Staging staging(find_tensors(), copier_);
      if (relay_) staging.start(made);
      staging.finish(made);
    }
  } catch (...) {
    stop();
    end_loop();
    throw;
  }
  if (made.batch == nullptr) {
    stop();
    cursor_ = {cursor_.epoch + 1, 0};
    if (may_be_over) {
      start();
      return advance();
    }
    at_start_ = true;
    end_loop();
    return false;
  }
  current_ = std::move(made.batch);
  current_rows_ = made.rows;
  current_samples_ = made.samples;
  known_last_ = made.last;
  turn_position_ = cursor_.position;
  cursor_.position = made.end_position;
  notify(&LoaderObserver::batch_began);
  return true;
}

void LoaderBase::end_loop() {
  in_loop_ = false;
  notify(&LoaderObserver::loop_ended);
}

void LoaderBase::restart() {
  prefetcher_.reset();
  running_ = false;
}

void LoaderBase::stop() {
  restart();
  current_.reset();
  current_rows_ = current_samples_ = 0;
  known_last_ = false;
}

void IndexedLoader::set_source(std::shared_ptr<const IndexSource> source,
                               std::vector<std::shared_ptr<const IndexSource>> others) {
  TS_CHECK(source != nullptr, kDataLoader, "needs an index source; got none.");
  restart();
  source_ = std::move(source);
  others_ = std::move(others);
}

bool IndexedLoader::set_shuffle_seed(uint64_t seed) {
  const auto* const batches = dynamic_cast<const BatchSource*>(source_.get());
  if (batches == nullptr) return false;
  const Sampler& sampler = *batches->sampler();
  if (typeid(sampler) != typeid(RandomSampler)) return false;
  set_source(std::make_shared<BatchSource>(std::make_shared<RandomSampler>(sampler.size(), seed),
                                           batches->batch_size(), batches->drop_last()));
  set_seed(seed);
  return true;
}

bool IndexedLoader::is_epoch_end(int64_t position) const {
  // Where ranks end unevenly one may have no batch in a turn in which others do.
  const int64_t ranks = source_->ranks_at(position);
  return source_->batches_after(position) == 0 && (ranks == IndexSource::kAllRanks || ranks == 0);
}

int IndexedLoader::workers_for(int64_t position) const {
  return static_cast<int>(std::min<int64_t>(options().workers, source_->batches_after(position)));
}

StreamLoaderBase::StreamLoaderBase(const DataLoaderOptions& options)
    : LoaderBase(options),
      share_{.batch_size = detail::batched_examples(options),
             .tail = options.drop_last ? Tail::kDrop : Tail::kUneven} {
  TS_CHECK(!options.shuffle, "StreamLoader",
           "a stream has its own order; shuffle is asked for; shuffle in the data set.");
}

void StreamLoaderBase::set_share(const StreamShare& share) {
  TS_CHECK(share.world_size >= 1 && share.rank >= 0 && share.rank < share.world_size,
           "StreamLoader", "the rank must lie in [0, world size); got rank ", share.rank, " of ",
           share.world_size, ".");
  TS_CHECK(share.batch_size >= 1, "StreamLoader",
           "the batch size of a rank must be at least 1; got ", share.batch_size, ".");
  TS_CHECK(!share.by_parts || num_parts() >= share.world_size, "StreamLoader", "the stream has ",
           num_parts(), " parts, too few for ", share.world_size, " ranks; dispatch it.");
  restart();
  share_ = share;
}

}  // namespace tessera::data
