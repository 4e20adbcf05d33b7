#include <tessera/data/dataloader.h>

#include <exception>

#include <tessera/core/error.h>
#include <tessera/core/factory.h>

namespace tessera::data {
namespace {

constexpr std::string_view kWhere = "DataLoader";

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

LoaderBase::LoaderBase(const DataLoaderOptions& options) : options_(options) {
  TS_CHECK(options.batch_size >= 1, kWhere, "the batch size must be at least 1; got ",
           options.batch_size, ".");
  TS_CHECK(options.workers >= 0 && options.workers <= 1024, kWhere,
           "the number of workers must be 0 to 1024; got ", options.workers, ".");
  TS_CHECK(options.prefetch >= 1 && options.prefetch <= 1'000'000, kWhere,
           "prefetch must be 1 to 1000000 batches a worker; got ", options.prefetch, ".");
}

void LoaderBase::set_cursor(const LoaderCursor& cursor) {
  TS_CHECK(cursor.epoch >= 0 && cursor.position >= 0 &&
               (epoch_size() < 0 || cursor.position <= epoch_size()),
           kWhere, "a cursor must lie in an epoch of ", epoch_size(), " samples; got epoch ",
           cursor.epoch, " position ", cursor.position, ".");
  stop();
  cursor_ = cursor;
  at_start_ = true;
}

StateDict LoaderBase::state_dict() const {
  StateDict state;
  state.set("epoch", scalar_tensor(cursor_.epoch, kI64));
  state.set("position", scalar_tensor(cursor_.position, kI64));
  state.set("size", scalar_tensor(epoch_size(), kI64));
  state.set("seed", scalar_tensor(static_cast<int64_t>(options_.seed), kI64));
  return state;
}

void LoaderBase::load_state_dict(const StateDict& state) {
  const auto read = [&](std::string_view name) { return state.at(name).item<int64_t>(); };
  TS_CHECK_AS(ConfigError, read("size") == epoch_size(), kWhere,
              "the state belongs to a data set of ", read("size"), " samples; this one has ",
              epoch_size(), "; resume with the same data.");
  TS_CHECK_AS(ConfigError, read("seed") == static_cast<int64_t>(options_.seed), kWhere,
              "the state belongs to seed ", static_cast<uint64_t>(read("seed")),
              "; this loader has ", options_.seed, "; resume with the same seed.");
  set_cursor({read("epoch"), read("position")});
}

void LoaderBase::start() {
  prefetcher_ = std::make_unique<Prefetcher>(make_epoch(cursor_), cursor_.position,
                                             workers_for(cursor_.position), options_.prefetch);
  at_start_ = false;
}

void LoaderBase::begin_loop() {
  stop();
  if (!at_start_) cursor_ = {cursor_.epoch + 1, 0};
  start();
}

LoaderBase::~LoaderBase() {
  if (const auto observer = observer_.lock()) observer->loader_gone(*this);
}

bool LoaderBase::advance() {
  current_.reset();  // before waiting: the consumer is done with it, its memory may be used again
  current_samples_ = 0;
  if (!prefetcher_) start();
  MadeBatch made;
  try {
    made = std::exchange(ahead_known_, false) ? std::exchange(ahead_, {}) : prefetcher_->next();
    if (look_ahead_ && made.batch != nullptr) {
      ahead_ = prefetcher_->next();
      ahead_known_ = true;
    }
  } catch (...) {
    stop();
    end_loop();
    throw;
  }
  if (made.batch == nullptr) {
    stop();
    cursor_ = {cursor_.epoch + 1, 0};
    at_start_ = true;
    end_loop();
    return false;
  }
  current_ = std::move(made.batch);
  current_samples_ = made.samples;
  cursor_.position = made.end_position;
  if (const auto observer = observer_.lock()) observer->batch_began(*this);
  return true;
}

void LoaderBase::end_loop() {
  if (const auto observer = observer_.lock()) observer->loop_ended(*this);
}

void LoaderBase::stop() {
  prefetcher_.reset();
  current_.reset();
  current_samples_ = 0;
  ahead_ = {};
  ahead_known_ = false;
}

}  // namespace tessera::data
