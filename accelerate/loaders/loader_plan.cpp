#include <tessera/accelerate/loaders/loader_plan.h>

#include <algorithm>
#include <sstream>
#include <vector>

#include <nlohmann/json.hpp>

#include <tessera/accelerate/loaders/parts_relay.h>
#include <tessera/accelerate/loaders/scatter_relay.h>
#include <tessera/accelerate/process/operations.h>
#include <tessera/core/error.h>
#include <tessera/core/plain_text.h>
#include <tessera/data/distributed_source.h>
#include <tessera/distributed/transport/collectives.h>

namespace tessera::accelerate {
namespace {

using data::Tail;
using Indices = std::shared_ptr<const data::IndexSource>;

constexpr std::string_view kPrepareLoader = "prepare";

bool splits(LoaderMode mode) {
  return mode == LoaderMode::kSplit || mode == LoaderMode::kDispatchedSplit;
}
bool dispatches(LoaderMode mode) {
  return mode == LoaderMode::kDispatched || mode == LoaderMode::kDispatchedSplit;
}

Tail tail_of(bool drop_last, bool even_batches) {
  return drop_last ? Tail::kDrop : even_batches ? Tail::kWrapAround : Tail::kUneven;
}

int64_t split_size(int64_t batch_size, int ranks) {
  TS_CHECK_AS(ConfigError, batch_size % ranks == 0, kPrepareLoader,
              "split_batches cuts every batch into ", ranks, " equal parts; the batch size is ",
              batch_size, "; make it a round multiple of the number of ranks.");
  return batch_size / ranks;
}

// What rank `rank` of `ranks` reads of a source for one.
Indices share_of(const Indices& whole, LoaderMode mode, Tail tail, int rank, int ranks) {
  const data::RankShare share{.rank = rank, .world_size = ranks, .tail = tail};
  if (const auto* fixed = dynamic_cast<const data::BatchSource*>(whole.get())) {
    const int64_t size =
        splits(mode) ? split_size(fixed->batch_size(), ranks) : fixed->batch_size();
    return std::make_shared<data::DistributedBatchSource>(fixed->sampler(), size, share);
  }
  TS_CHECK_AS(ConfigError, !splits(mode), kPrepareLoader,
              "split_batches needs to know the batch size; this loader's batches come from a batch "
              "sampler; let it make batches for one rank and leave split_batches off.");
  return std::make_shared<data::RoundRobinSource>(whole, share);
}

bool is_share(const data::IndexSource& source) {
  return dynamic_cast<const data::DistributedBatchSource*>(&source) != nullptr ||
         dynamic_cast<const data::RoundRobinSource*>(&source) != nullptr;
}

// What must be the same on all ranks for their batches to be parts of one order.
std::string fingerprint(const data::IndexedLoader& loader) {
  const data::IndexSource& source = *loader.source();
  uint64_t hash = 0xcbf29ce484222325ull;  // FNV-1a
  for (const int64_t epoch : {0, 1}) {
    if (!source.next_position(0)) break;
    for (const int64_t index : source.batch(epoch, 0)) {
      hash = (hash ^ static_cast<uint64_t>(index)) * 0x100000001b3ull;
    }
  }
  PlainText<std::ostringstream> out;
  out << "loader of " << loader.dataset_size() << " examples, " << loader.size()
      << " batches, total batch size " << loader.total_batch_size() << ", drop_last "
      << loader.options().drop_last << ", seed " << loader.seed() << ", cursor "
      << loader.cursor().epoch << ':' << loader.cursor().position << ", first batches #" << std::hex
      << hash;
  return out.str();
}

// The seed that a loader took from its thread is that of a rank, and may differ between ranks.
uint64_t common_seed(const data::LoaderBase& loader, distributed::Group& ranks) {
  return distributed::broadcast_object(loader.seed(), 0, ranks, {.tag = "loader: seed"})
      .get<uint64_t>();
}

std::string fingerprint(const data::StreamLoaderBase& loader) {
  PlainText<std::ostringstream> out;
  out << "loader of a stream, batch size " << loader.options().batch_size << ", drop_last "
      << loader.options().drop_last << ", cursor " << loader.cursor().epoch << ':'
      << loader.cursor().position;
  return out.str();
}

}  // namespace

// Follows the loops over the loaders that it keeps records of.
class LoaderPlan::State : public data::LoaderObserver {
 public:
  struct Record {
    data::LoaderBase* loader;
    data::IndexedLoader* indexed;    // or
    data::StreamLoaderBase* stream;  // this
    LoaderMode mode;
    Indices whole;            // what one rank would read
    data::StreamShare alone;  // the same of a stream
    std::shared_ptr<data::BatchRelay> relay;
    int64_t loops_left = 0;
  };

  State(int rank, int ranks, bool split, bool even_batches)
      : rank_(rank), size_(ranks), split_(split), even_batches_(even_batches) {}

  void batch_began(data::LoaderBase& loader) override {
    const auto found = std::ranges::find(running_, &loader);
    if (found == running_.end()) {
      running_.push_back(&loader);
    } else if (!loader.in_loop()) {
      std::rotate(found, found + 1, running_.end());
    }
  }
  void loop_ended(data::LoaderBase& loader) noexcept override {
    std::erase(running_, &loader);
    // At the epoch's end the cursor is the next one's start.
    const bool left = loader.batch_rows() > 0 || loader.cursor().position > 0;
    const auto found = std::ranges::find(records_, &loader, &Record::loader);
    if (left && found != records_.end()) ++found->loops_left;
  }
  void loader_gone(data::LoaderBase& loader) noexcept override {
    std::erase(running_, &loader);
    std::erase_if(records_, [&](const Record& record) { return record.loader == &loader; });
  }

  data::LoaderBase* active() const {
    const auto loop = std::ranges::find_if(running_.rbegin(), running_.rend(),
                                           [](const auto* loader) { return loader->in_loop(); });
    if (loop != running_.rend()) return *loop;
    return running_.empty() ? nullptr : running_.back();
  }

  std::vector<data::LoaderBase*> loaders() const {
    std::vector<data::LoaderBase*> loaders;
    for (const Record& record : records_) loaders.push_back(record.loader);
    return loaders;
  }

  const Record* find(const data::LoaderBase& loader) const {
    const auto found = std::ranges::find(records_, &loader, &Record::loader);
    return found == records_.end() ? nullptr : &*found;
  }

  void add(Record record) {
    if (record.mode != LoaderMode::kWhole) set_share(record);
    if (record.stream) record.stream->set_look_ahead(true);
    records_.push_back(std::move(record));
  }

  void remove(data::LoaderBase& loader) {
    const Record* record = find(loader);
    if (record == nullptr) return;
    if (record->mode != LoaderMode::kWhole) {
      loader.set_relay(nullptr);
      if (record->indexed) record->indexed->set_source(record->whole);
      if (record->stream) record->stream->set_share(record->alone);
    }
    if (record->stream) loader.set_look_ahead(false);
    loader.remove_observer(*this);
    loader_gone(loader);
  }
  void remove_all() {
    while (!records_.empty()) remove(*records_.back().loader);
  }

  bool even_batches() const { return even_batches_; }
  void set_even_batches(bool value) {
    if (value == even_batches_) return;
    even_batches_ = value;
    for (const Record& record : records_) {
      if (record.mode != LoaderMode::kWhole) set_share(record);
    }
  }

 private:
  void set_share(const Record& record) {
    const Tail tail = tail_of(record.loader->options().drop_last, even_batches_);
    const bool makes_all = dispatches(record.mode) && rank_ == 0;
    if (record.stream) {
      const int64_t batch_size = record.alone.batch_size;
      record.stream->set_share({.rank = rank_,
                                .world_size = size_,
                                .batch_size = split_ ? split_size(batch_size, size_) : batch_size,
                                .tail = tail,
                                .for_all = makes_all,
                                .by_parts = record.mode == LoaderMode::kParts});
      // Each rank ends alone.
      const bool alone = record.mode == LoaderMode::kParts && tail == Tail::kUneven;
      record.loader->set_relay(alone ? nullptr : record.relay);
      return;
    }
    std::vector<Indices> others;
    for (int other = 1; makes_all && other < size_; ++other) {
      others.push_back(share_of(record.whole, record.mode, tail, other, size_));
    }
    record.loader->set_relay(record.relay);
    record.indexed->set_source(share_of(record.whole, record.mode, tail, rank_, size_),
                               std::move(others));
  }

  int rank_, size_;
  bool split_, even_batches_;
  std::vector<Record> records_;
  std::vector<data::LoaderBase*> running_;  // the innermost last
};

LoaderPlan::LoaderPlan(distributed::Group& ranks, const LoaderPlanOptions& options)
    : ranks_(ranks),
      readers_(options.readers == nullptr ? ranks : *options.readers),
      options_(options),
      state_(std::make_shared<State>(ranks.rank(), ranks.size(), options.split_batches,
                                     options.even_batches)) {}

LoaderPlan::~LoaderPlan() { state_->remove_all(); }

void LoaderPlan::prepare_indexed(data::IndexedLoader& loader, const BatchCodec* codec) {
  if (is_prepared(loader)) return;
  check_free(loader);
  check_splits(loader);
  const LoaderMode mode = mode_for(options_.dispatch_batches.value_or(false), codec);
  if (mode != LoaderMode::kWhole) {
    TS_CHECK_AS(ConfigError, !is_share(*loader.source()), kPrepareLoader,
                "deals batches among the ranks itself; the loader's source is a rank's share "
                "already; give the loader the source that one rank would have.");
    // Errors before any rank is changed.
    share_of(loader.source(), mode, Tail::kDrop, 0, ranks_.size());
  }
  if (readers_.size() > 1) {
    if (!loader.options().seed) {
      const uint64_t seed = common_seed(loader, readers_);
      if (seed != loader.seed() && !loader.set_shuffle_seed(seed)) loader.set_seed(seed);
    }
    if (options_.verify) {
      detail::check_equal_on_all_ranks(kPrepareLoader, fingerprint(loader),
                                       "make the same loader on every rank", readers_, {});
    }
  }
  state_->add(
      {&loader, &loader, nullptr, mode, loader.source(), {}, relay_for(mode, loader, codec)});
  loader.add_observer(state_);
}

void LoaderPlan::prepare_stream(data::StreamLoaderBase& loader, const BatchCodec* codec) {
  if (is_prepared(loader)) return;
  check_free(loader);
  check_splits(loader);
  const bool by_parts = ranks_.size() > 1 && loader.num_parts() >= ranks_.size() &&
                        !options_.dispatch_batches.value_or(false);
  const LoaderMode mode =
      by_parts ? LoaderMode::kParts : mode_for(options_.dispatch_batches.value_or(true), codec);
  if (mode != LoaderMode::kWhole) {
    TS_CHECK_AS(ConfigError, loader.share().world_size == 1, kPrepareLoader,
                "deals a stream among the ranks itself; the loader has a share of ",
                loader.share().world_size, " ranks already; leave set_share() to it.");
    if (options_.split_batches) split_size(loader.share().batch_size, ranks_.size());
  }
  if (readers_.size() > 1) {
    if (!loader.options().seed) loader.set_seed(common_seed(loader, readers_));
    if (options_.verify) {
      detail::check_equal_on_all_ranks(kPrepareLoader, fingerprint(loader),
                                       "make the same loader on every rank", readers_, {});
    }
  }
  state_->add(
      {&loader, nullptr, &loader, mode, nullptr, loader.share(), relay_for(mode, loader, codec)});
  loader.add_observer(state_);
}

void LoaderPlan::check_free(const data::LoaderBase& loader) const {
  for (const auto& observer : loader.observers()) {
    TS_CHECK_AS(ConfigError, dynamic_cast<const State*>(observer.get()) == nullptr, kPrepareLoader,
                "a loader has one plan, and another one has prepared this; make a loader for each, "
                "or release() it there first.");
  }
}

void LoaderPlan::check_splits(const data::LoaderBase& loader) const {
  TS_CHECK_AS(ConfigError,
              ranks_.size() == 1 || !options_.split_batches ||
                  loader.options().batch_size != data::kNoBatching,
              kPrepareLoader,
              "split_batches cuts batches that the loader makes; this one's are made already "
              "(kNoBatching); leave split_batches off.");
}

std::vector<data::LoaderBase*> LoaderPlan::loaders() const { return state_->loaders(); }

LoaderMode LoaderPlan::mode_for(bool dispatch, const BatchCodec* codec) const {
  if (ranks_.size() == 1) return LoaderMode::kWhole;
  if (!dispatch) return options_.split_batches ? LoaderMode::kSplit : LoaderMode::kSharded;
  TS_CHECK_AS(UnsupportedError, codec != nullptr, kPrepareLoader,
              "dispatched batches are made anew on other ranks, and this loader's have no default "
              "constructor; give them one or set dispatch_batches = false.");
  return options_.split_batches ? LoaderMode::kDispatchedSplit : LoaderMode::kDispatched;
}

std::shared_ptr<data::BatchRelay> LoaderPlan::relay_for(LoaderMode mode,
                                                        const data::LoaderBase& loader,
                                                        const BatchCodec* codec) const {
  if (mode == LoaderMode::kParts)
    return std::make_shared<PartsRelay>(ranks_, loader.options().drop_last);
  if (dispatches(mode)) return std::make_shared<ScatterRelay>(ranks_, *codec);
  return nullptr;
}

void LoaderPlan::release(data::LoaderBase& loader) { state_->remove(loader); }
void LoaderPlan::release_all() { state_->remove_all(); }

bool LoaderPlan::is_prepared(const data::LoaderBase& loader) const {
  return state_->find(loader) != nullptr;
}

LoaderMode LoaderPlan::mode(const data::LoaderBase& loader) const {
  const State::Record* record = state_->find(loader);
  TS_CHECK(record != nullptr, "LoaderPlan", "the loader was not prepared; call prepare() first.");
  return record->mode;
}

std::string LoaderPlan::describe(const data::LoaderBase& loader) const {
  const LoaderMode how = mode(loader);
  const State::Record& record = *state_->find(loader);
  const int64_t total = loader.total_batch_size();
  PlainText<std::ostringstream> out;
  switch (how) {
    case LoaderMode::kWhole:
      out << "whole, ";
      break;
    case LoaderMode::kSharded:
      out << "sharded, ";
      break;
    case LoaderMode::kSplit:
      out << "split, ";
      break;
    case LoaderMode::kDispatched:
      out << "dispatched from rank 0, ";
      break;
    case LoaderMode::kDispatchedSplit:
      out << "split and dispatched from rank 0, ";
      break;
    case LoaderMode::kParts:
      out << "by parts of the stream, ";
      break;
  }
  out << ranks_.size() << (ranks_.size() == 1 ? " rank" : " ranks") << " x ";
  if (total == 0) {
    out << "batches of any size";
  } else {
    out << total / ranks_.size()
        << (loader.options().batch_size == data::kNoBatching ? " batch made already" : " samples");
  }
  if (how != LoaderMode::kWhole) {
    const char* const kTails[] = {"even batches", "uneven batches", "last turn dropped"};
    out << ", "
        << kTails[static_cast<int>(tail_of(loader.options().drop_last, state_->even_batches()))];
  }
  if (record.indexed) out << ", " << record.indexed->size() << " batches a rank";
  return out.str();
}

bool LoaderPlan::even_batches() const { return state_->even_batches(); }
void LoaderPlan::set_even_batches(bool value) { state_->set_even_batches(value); }
data::LoaderBase* LoaderPlan::active() const { return state_->active(); }

int64_t LoaderPlan::loops_left(const data::LoaderBase* loader) const {
  const auto* record = loader != nullptr ? state_->find(*loader) : nullptr;
  return record != nullptr ? record->loops_left : -1;
}

bool LoaderPlan::end_of_loader() const {
  const data::LoaderBase* loader = active();
  return loader != nullptr && loader->batch_is_last();
}

EvenBatchesScope::EvenBatchesScope(LoaderPlan& plan, bool value)
    : plan_(plan), previous_(plan.even_batches()) {
  plan.set_even_batches(value);
}
EvenBatchesScope::~EvenBatchesScope() { plan_.set_even_batches(previous_); }

}  // namespace tessera::accelerate
