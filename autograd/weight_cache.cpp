#include <tessera/autograd/weight_cache.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>

#include <tessera/autograd/node.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/cuda/graph.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/fp8/cast_transpose.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/core/tensor/unreadable_storage.h>

namespace tessera {
namespace {

// What a copy was made from. The storage is part of it because set_data keeps the version.
struct Stamp {
  uint32_t version = 0;
  uint32_t scale_version = 0;
  std::weak_ptr<Storage> storage;
  int64_t offset = 0;
  Shape shape, strides;

  static Stamp of(const Tensor& leaf, const Tensor& scale) {
    return {leaf.version(), scale.defined() ? scale.version() : 0,
            leaf.storage(), leaf.offset(),
            leaf.shape(),   leaf.strides()};
  }
  bool holds_for(const Tensor& leaf, const Tensor& scale) const {
    return version == leaf.version() && offset == leaf.offset() && shape == leaf.shape() &&
           strides == leaf.strides() && same_storage(leaf) &&
           (!scale.defined() || scale_version == scale.version());
  }
  // By owner, which takes no count of references; an owner that is gone has no equal.
  bool same_storage(const Tensor& leaf) const {
    return !storage.owner_before(leaf.storage()) && !leaf.storage().owner_before(storage);
  }
};

struct Entry {
  WeightKey key;
  Tensor tensor = {};
  Stamp stamp = {};
  bool was_got = false;   // since the last begin_write()
  bool released = false;  // the storage is empty, and someone else holds it
  uint32_t version_before_release = 0;
  kernels::Quantized tiles = {};  // where the key has them, without the bytes; see copies_of()
  Tensor turned = {};             // of a GPU's: their `transposed`, beside `values`
  uint32_t turned_version_before_release = 0;
  bool is_unread = false;  // provided, and nobody has been told that it is new
  bool is_current(const Tensor& leaf) const {
    return !released && stamp.holds_for(leaf, key.scale);
  }
  bool is_shared() const { return is_held(tensor) || (turned.defined() && is_held(turned)); }

 private:
  static bool is_held(const Tensor& x) { return x.use_count() > 1 || x.storage().use_count() > 1; }
};

// A leaf's copies may be asked for by several threads.
std::mutex& mutex_of(const Tensor& leaf) {
  static std::mutex mutexes[64];
  return mutexes[(reinterpret_cast<uintptr_t>(leaf.impl()) >> 6) % 64];
}

}  // namespace

class WeightCache {
 public:
  std::vector<Entry> entries;

  Entry* find(const WeightKey& key) {
    const auto found =
        std::ranges::find_if(entries, [&](const Entry& entry) { return entry.key == key; });
    return found == entries.end() ? nullptr : &*found;
  }
};

bool WeightKey::is_plain_cast() const {
  return layout == WeightLayout::kAsIs && !scale.defined() && !tiles &&
         (dtype == kBF16 || dtype == kF16);
}

namespace {

WeightCache* cache_of(const Tensor& leaf) {
  const AutogradSlot* slot = autograd_slot(leaf);
  return slot == nullptr ? nullptr : slot->weight_cache.get();
}

WeightCache& ensure_cache(const Tensor& leaf) {
  AutogradSlot& slot = ensure_autograd_slot(leaf);
  if (!slot.weight_cache) slot.weight_cache = std::make_shared<WeightCache>();
  return *slot.weight_cache;
}

// Puts `made` in the entry. Where a graph waits for the released bytes it gets them back.
void fill(Entry& entry, Tensor made, const Tensor& leaf, Tensor turned = {}) {
  const auto fits = [](const Tensor& before, const Tensor& now) {
    return before.defined() == now.defined() &&
           (!now.defined() || (before.shape() == now.shape() && before.strides() == now.strides()));
  };
  if (entry.released && fits(entry.tensor, made) && fits(entry.turned, turned) &&
      entry.is_shared()) {
    // Other values than before: what saved the copy must not read these, and release() saw to it.
    const bool same = entry.stamp.holds_for(leaf, entry.key.scale);
    const auto give_back = [&](const Tensor& copy, const Tensor& now, uint32_t version) {
      if (!now.defined()) return;
      copy.storage()->resize(now.storage()->bytes());
      kernels::copy_into(copy, now);
      if (same) copy.impl()->version->value = version;
    };
    give_back(entry.tensor, made, entry.version_before_release);
    give_back(entry.turned, turned, entry.turned_version_before_release);
  } else {
    entry.tensor = std::move(made);
    entry.turned = std::move(turned);
  }
  entry.released = false;
  entry.stamp = Stamp::of(leaf, entry.key.scale);
}

// Which copies of quantised bytes there are: a GPU's products sum along rows of the one that they
// read, so that scales of rows, and of columns, leave one of them; `tensor` is the first there is.
struct CopiesOfTiles {
  bool by_rows = true, by_columns = false;
};
CopiesOfTiles copies_of(const kernels::QuantizeOptions& options, const Device& device) {
  const kernels::ScaleTile& tile = options.tile;
  if (!device.is_cuda()) return {};
  const bool by_rows = tile.columns == tile.rows || tile.rows == 1;
  const bool by_columns = tile.columns == tile.rows || tile.columns == 1;
  return {by_rows, by_columns};
}

// `noted`: where a GPU notes what happened to bytes that are made now.
void make(WeightCache& cache, Entry& entry, const Tensor& leaf,
          const kernels::QuantizeWants& noted = {}) {
  const WeightKey& key = entry.key;
  const MemoryCategoryGuard category(MemoryCategory::kWeightCache);
  const Tensor values = raw::alias(leaf);  // no parameter: neither history nor autocast reach it
  if (key.is_plain_cast()) return fill(entry, to(values, key.dtype), leaf);
  if (key.tiles) {
    const CopiesOfTiles copies = copies_of(*key.tiles, leaf.device());
    entry.tiles = kernels::quantize(values, *key.tiles, key.scale,
                                    {.by_rows = copies.by_rows,
                                     .by_columns = copies.by_columns,
                                     .largest = noted.largest,
                                     .counts = noted.counts});
    Tensor by_rows = std::exchange(entry.tiles.values, Tensor());
    Tensor by_columns = std::exchange(entry.tiles.transposed, Tensor());
    if (!copies.by_rows) return fill(entry, std::move(by_columns), leaf);
    return fill(entry, std::move(by_rows), leaf, std::move(by_columns));
  }
  // Rounded once: the other layout comes of the same read where it is due.
  const bool transposes = key.layout == WeightLayout::kTransposed;
  WeightKey other_key = key;
  other_key.layout = transposes ? WeightLayout::kAsIs : WeightLayout::kTransposed;
  Entry* other = other_key.is_plain_cast() ? nullptr : cache.find(other_key);
  if (other != nullptr && other->is_current(leaf)) other = nullptr;
  const bool matrix = leaf.dim() == 2;
  TS_CHECK_SHAPE(matrix || !transposes, "weight_cache", "transposes a matrix; got ", leaf,
                 "; ask for the layout as it is");
  const Tensor rows = matrix ? values : raw::view(kernels::contiguous(values), {1, leaf.numel()});
  kernels::CastTransposed made = kernels::cast_transpose(
      rows, key.dtype, key.scale, !transposes || other != nullptr, transposes || other != nullptr);
  if (!matrix) made.values = raw::view(made.values, leaf.shape());
  fill(entry, transposes ? made.transposed : made.values, leaf);
  if (other != nullptr) fill(*other, transposes ? made.values : made.transposed, leaf);
}

// A graph reads the copy at every replay, and nobody calls get() then: it holds the tensor, counts
// as a reader, and says so where the copy is no longer that of the leaf.
void keep_for_replays(gpu::Capture& capture, const Tensor& leaf, const Entry& entry) {
  capture.feed(0, [leaf, key = entry.key, tensor = entry.tensor](void*) {
    const std::lock_guard lock(mutex_of(leaf));
    Entry* now = ensure_cache(leaf).find(key);
    TS_CHECK_AS(ConfigError, now != nullptr && now->tensor.is(tensor) && now->is_current(leaf),
                "weight_cache", "the graph reads a ", name_of(key.dtype), " copy of ", leaf,
                ", which was written since (a state was loaded, or stepped outside of the graph); "
                "reset the graph");
    now->was_got = true;
  });
}

// Where the entry stands afterwards, or is gone.
void release(Entry& entry) {
  if (entry.released) return;
  entry.released = true;
  const auto let_go = [](const Tensor& copy, uint32_t& version) {
    if (!copy.defined()) return;
    version = copy.version();
    copy.bump_version();
    copy.storage()->resize(0);
  };
  let_go(entry.tensor, entry.version_before_release);
  let_go(entry.turned, entry.turned_version_before_release);
}

}  // namespace

namespace weight_cache {

namespace {

// The copy that get() and quantized() give.
Entry use(const Tensor& leaf, const WeightKey& key, bool* is_new,
          const kernels::QuantizeWants& noted = {}) {
  if (const UnreadableStorage* unreadable = unreadable_storage(leaf);
      unreadable != nullptr && unreadable->can_bring() && !find(leaf, key).defined()) {
    unreadable->bring();
  }
  const std::lock_guard lock(mutex_of(leaf));
  WeightCache& cache = ensure_cache(leaf);
  Entry* entry = cache.find(key);
  gpu::Capture* const capture = gpu::Capture::current();
  const bool current = entry != nullptr && entry->is_current(leaf);
  const bool unread = entry != nullptr && std::exchange(entry->is_unread, false);
  if (is_new != nullptr) *is_new = !current || unread;
  if (!current) {
    Entry fresh{.key = key};
    if (capture != nullptr) {  // the graph's memory, without values before a replay: not to be kept
      WeightCache of_graph;
      make(of_graph, fresh, leaf, noted);
      return fresh;
    }
    make(cache, entry == nullptr ? fresh : *entry, leaf, noted);
    if (entry == nullptr) entry = &cache.entries.emplace_back(std::move(fresh));
  }
  if (capture != nullptr) keep_for_replays(*capture, leaf, *entry);
  entry->was_got = true;
  return *entry;
}

}  // namespace

Tensor get(const Tensor& leaf, const WeightKey& key) {
  TS_CHECK(key.dtype != leaf.dtype() || key.layout != WeightLayout::kAsIs || key.scale.defined(),
           "weight_cache", "keeps other forms than the leaf's own, which is ", leaf,
           "; read the leaf");
  return use(leaf, key, nullptr).tensor;
}

kernels::Quantized quantized(const Tensor& leaf, const kernels::QuantizeOptions& options,
                             const Tensor& scale, bool* is_new,
                             const kernels::QuantizeWants& noted) {
  Entry entry =
      use(leaf, {.dtype = options.format, .scale = scale, .tiles = options}, is_new, noted);
  const bool by_rows = copies_of(options, leaf.device()).by_rows;
  (by_rows ? entry.tiles.values : entry.tiles.transposed) = std::move(entry.tensor);
  if (by_rows) entry.tiles.transposed = std::move(entry.turned);
  return std::move(entry.tiles);
}

Tensor find(const Tensor& leaf, const WeightKey& key) {
  const std::lock_guard lock(mutex_of(leaf));
  WeightCache* cache = cache_of(leaf);
  const Entry* entry = cache == nullptr ? nullptr : cache->find(key);
  return entry != nullptr && entry->is_current(leaf) ? entry->tensor : Tensor();
}

std::vector<Copy> begin_write(const Tensor& leaf) {
  const std::lock_guard lock(mutex_of(leaf));
  std::vector<Copy> copies;
  WeightCache* cache = cache_of(leaf);
  if (cache == nullptr) return copies;
  std::erase_if(cache->entries, [&](Entry& entry) {
    const bool fits = !entry.key.is_plain_cast() || (entry.tensor.shape() == leaf.shape() &&
                                                     entry.tensor.strides() == leaf.strides() &&
                                                     entry.tensor.device() == leaf.device());
    return !std::exchange(entry.was_got, false) || !fits;
  });
  for (const Entry& entry : cache->entries) {
    if (!entry.released) copies.push_back({entry.key, entry.tensor});
  }
  return copies;
}

void mark_written(const Tensor& leaf, const Copy& copy) {
  const std::lock_guard lock(mutex_of(leaf));
  WeightCache* cache = cache_of(leaf);
  Entry* entry = cache == nullptr ? nullptr : cache->find(copy.key);
  if (entry != nullptr && entry->tensor.is(copy.tensor)) {
    entry->stamp = Stamp::of(leaf, copy.key.scale);
  }
}

bool release(const Tensor& leaf, const WeightKey& key) {
  const std::lock_guard lock(mutex_of(leaf));
  WeightCache* cache = cache_of(leaf);
  Entry* entry = cache == nullptr ? nullptr : cache->find(key);
  if (entry == nullptr) return false;
  const bool had_bytes = !entry->released;
  if (entry->is_shared()) {
    tessera::release(*entry);
  } else {
    cache->entries.erase(cache->entries.begin() + (entry - cache->entries.data()));
  }
  return had_bytes;
}

void release(const Tensor& leaf) {
  const std::lock_guard lock(mutex_of(leaf));
  WeightCache* cache = cache_of(leaf);
  if (cache == nullptr) return;
  std::erase_if(cache->entries, [](const Entry& entry) { return !entry.is_shared(); });
  for (Entry& entry : cache->entries) tessera::release(entry);
}

void restore(const Tensor& leaf) {
  const std::lock_guard lock(mutex_of(leaf));
  WeightCache* cache = cache_of(leaf);
  if (cache == nullptr) return;
  for (Entry& entry : cache->entries) {
    if (entry.released && entry.is_shared()) make(*cache, entry, leaf);
  }
}

namespace {

// The entry with memory for the leaf's values, current from now on.
Entry& provided(const Tensor& leaf, const WeightKey& key) {
  WeightCache& cache = ensure_cache(leaf);
  Entry* entry = cache.find(key);
  if (entry == nullptr) entry = &cache.entries.emplace_back(Entry{.key = key});
  const bool current = entry->stamp.holds_for(leaf, key.scale);
  const bool turns = key.tiles && copies_of(*key.tiles, leaf.device()).by_columns;
  if (entry->tensor.defined() && !entry->released && !current) tessera::release(*entry);
  if (entry->released && entry->is_shared() && entry->tensor.shape() == leaf.shape() &&
      entry->tensor.is_contiguous() && entry->turned.defined() == turns) {
    const auto give_back = [&](const Tensor& copy, uint32_t version) {
      if (!copy.defined()) return;
      copy.storage()->resize(leaf.numel() * size_of(key.dtype));
      if (current) copy.impl()->version->value = version;
    };
    give_back(entry->tensor, entry->version_before_release);
    give_back(entry->turned, entry->turned_version_before_release);
  } else if (entry->released || !entry->tensor.defined()) {
    entry->tensor = raw::empty(leaf.shape(), key.dtype, leaf.device());
    entry->turned =
        turns ? raw::empty({leaf.size(1), leaf.size(0)}, key.dtype, leaf.device()) : Tensor();
  }
  entry->released = false;
  entry->was_got = true;
  entry->is_unread = entry->is_unread || !current;
  entry->stamp = Stamp::of(leaf, key.scale);
  return *entry;
}

}  // namespace

Tensor provide(const Tensor& leaf, const WeightKey& key) {
  TS_CHECK(key.is_plain_cast(), "weight_cache", "takes casts to f16 and bf16 from elsewhere; got ",
           name_of(key.dtype), "; get() makes other forms");
  const std::lock_guard lock(mutex_of(leaf));
  return provided(leaf, key).tensor;
}

Tensor provide(const Tensor& leaf, const WeightKey& key, kernels::Quantized about) {
  TS_CHECK(key.tiles.has_value(), "weight_cache", "takes a quantised copy with its scales; got ",
           name_of(key.dtype), " without tiles; provide() without them is for plain casts");
  const std::lock_guard lock(mutex_of(leaf));
  Entry& entry = provided(leaf, key);
  entry.tiles = std::move(about);
  entry.tiles.values = Tensor();
  return entry.tensor;
}

void turn(const Tensor& leaf, const WeightKey& key) {
  const std::lock_guard lock(mutex_of(leaf));
  Entry* entry = ensure_cache(leaf).find(key);
  TS_CHECK(entry != nullptr && !entry->released, "weight_cache", "has no bytes of ", leaf,
           " to turn around; provide() them first");
  if (!entry->turned.defined()) return;
  const auto bytes = [](const Tensor& x) { return raw::reinterpret(raw::alias(x), kU8); };
  kernels::copy_into(bytes(entry->turned), raw::transpose(bytes(entry->tensor), 0, 1));
}

int64_t bytes(const Tensor& leaf) {
  const std::lock_guard lock(mutex_of(leaf));
  const WeightCache* cache = cache_of(leaf);
  int64_t total = 0;
  if (cache == nullptr) return total;
  for (const Entry& entry : cache->entries) {
    total += entry.tensor.storage()->bytes();
    if (entry.turned.defined()) total += entry.turned.storage()->bytes();
  }
  return total;
}

}  // namespace weight_cache
}  // namespace tessera
