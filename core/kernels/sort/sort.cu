// Rows of numbers are sorted as rows of unsigned keys with the place that each came from.
//
// Up to kBlockSort elements a row: one block, a bitonic network in shared memory over pairs (key,
// place), which no two elements share: so the order is the stable one. Longer rows: radix passes of
// eight bits from the lowest, each a histogram of tiles, a running sum over (digit, tile) and a
// stable move through shared memory. topk of a small part of a long row finds the k-th key by its
// digits from the highest and sorts what it keeps: one block a row, from kLongSelect elements on a
// grid of tiles.
#include <tessera/core/kernels/sort/sort.h>

#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/reduce/reduce.h>
#include <tessera/core/kernels/sort/device_sort.h>
#include <tessera/core/kernels/sort/sort_keys.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/core/kernels/reduce/block_scan.cuh>

namespace tessera::kernels {
namespace {

constexpr int kBlock = 256;
constexpr int kDigits = 256, kDigitBits = 8;
constexpr int64_t kBlockSort = 2048;

// ---- Keys ---------------------------------------------------------------------------------------

// Keys lie in tensors of a dtype of their size.
template <class K>
inline constexpr DType kStorage = sizeof(K) == 8   ? kI64
                                  : sizeof(K) == 4 ? kI32
                                  : sizeof(K) == 2 ? kF16
                                                   : kU8;

template <class T>
__global__ void make_keys_kernel(const T* x, Key<T>* keys, int32_t* order, int64_t total, int64_t n,
                                 bool inverted) {
  const int64_t i = gpu::first_index();
  if (i >= total) return;
  const Key<T> key = key_of(x[i]);
  keys[i] = inverted ? static_cast<Key<T>>(~key) : key;
  if (order != nullptr) order[i] = static_cast<int32_t>(i % n);
}

// ---- Rows that fit into a block -----------------------------------------------------------------

template <class K>
struct Item {
  K key;
  int32_t place;
};
template <class K>
TS_DEVICE bool comes_before(const Item<K>& a, const Item<K>& b) {
  return a.key != b.key ? a.key < b.key : a.place < b.place;
}

// `size`: the power of two that the row is filled up to, with items that come last.
template <class K>
__global__ void sort_block_kernel(K* keys, int32_t* order, int n, int size) {
  Item<K>* const items = gpu::dynamic_shared<Item<K>>();
  keys += int64_t{blockIdx.x} * n;
  order += int64_t{blockIdx.x} * n;
  const int threads = static_cast<int>(blockDim.x), t = static_cast<int>(threadIdx.x);
  for (int i = t; i < size; i += threads) {
    items[i] = i < n ? Item<K>{keys[i], order[i]} : Item<K>{static_cast<K>(~K{0}), INT32_MAX};
  }
  for (int width = 2; width <= size; width *= 2) {
    for (int step = width / 2; step > 0; step /= 2) {
      __syncthreads();
      for (int pair = t; pair < size / 2; pair += threads) {
        const int low = pair / step * 2 * step + pair % step, high = low + step;
        const bool ascending = (low & width) == 0;
        const Item<K> a = items[low], b = items[high];
        if (comes_before(b, a) == ascending) {
          items[low] = b;
          items[high] = a;
        }
      }
    }
  }
  __syncthreads();
  for (int i = t; i < n; i += threads) {
    keys[i] = items[i].key;
    order[i] = items[i].place;
  }
}

// ---- Longer rows: radix passes ------------------------------------------------------------------

constexpr int kWarps = kBlock / gpu::kWarp, kSteps = 16;
constexpr int kWarpTile = gpu::kWarp * kSteps, kTile = kWarps * kWarpTile;

template <class K>
TS_DEVICE int digit_of(K key, int shift) {
  return static_cast<int>(key >> shift) & (kDigits - 1);
}

// counts: (rows, digit, tile)
template <class K>
__global__ void __launch_bounds__(kBlock)
    count_digits_kernel(const K* keys, int32_t* counts, int64_t n, int64_t tiles, int shift) {
  TS_SHARED(int32_t, own, kDigits);
  const int64_t row = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  own[threadIdx.x] = 0;
  __syncthreads();
  const int64_t end = (tile + 1) * kTile < n ? (tile + 1) * kTile : n;
  for (int64_t i = tile * kTile + threadIdx.x; i < end; i += kBlock) {
    atomicAdd(&own[digit_of(keys[row * n + i], shift)], 1);
  }
  __syncthreads();
  counts[(row * kDigits + threadIdx.x) * tiles + tile] = own[threadIdx.x];
}

// Shared memory of move_digits_kernel, whose arrays follow each other.
template <class K>
struct TileMemory {
  K keys[kTile];  // the tile in the order of its digits
  int32_t order[kTile];
  int32_t starts[kWarps * kDigits];  // of each warp's elements in it
  int32_t targets[kDigits];          // from a place in it to one in the row
  int32_t scan[gpu::kWarp];
};

// A warp walks its part of the tile in order; equal digits among its lanes are ranked by a vote for
// each bit. The tile is put in order in shared memory, so that neighbouring threads write to
// neighbouring places. ends: running sums of counts along (digit, tile).
template <class K>
__global__ void __launch_bounds__(kBlock)
    move_digits_kernel(const K* keys, const int32_t* order, K* keys_out, int32_t* order_out,
                       const int32_t* counts, const int64_t* ends, int64_t n, int64_t tiles,
                       int shift) {
  TileMemory<K>& memory = *gpu::dynamic_shared<TileMemory<K>>();
  const int64_t row = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  const int t = static_cast<int>(threadIdx.x);
  const int warp = t / gpu::kWarp, lane = t % gpu::kWarp;
  for (int i = t; i < kWarps * kDigits; i += kBlock) memory.starts[i] = 0;
  __syncthreads();
  int32_t* const own = memory.starts + warp * kDigits;
  const int64_t first = tile * kTile + warp * kWarpTile + lane;
  const K* const source = keys + row * n;
  K held[kSteps];
  int32_t ranks[kSteps];
  TS_UNROLL
  for (int step = 0; step < kSteps; ++step) {
    const bool inside = first + step * gpu::kWarp < n;
    held[step] = inside ? source[first + step * gpu::kWarp] : K{0};
  }
  TS_UNROLL
  for (int step = 0; step < kSteps; ++step) {
    const bool inside = first + step * gpu::kWarp < n;
    const int digit = digit_of(held[step], shift);
    const unsigned present = __ballot_sync(gpu::kAllLanes, inside);
    unsigned peers = inside ? present : ~present;
    for (int bit = 0; bit < kDigitBits; ++bit) {
      const bool is_set = (digit >> bit & 1) != 0;
      const unsigned votes = __ballot_sync(gpu::kAllLanes, is_set);
      peers &= is_set ? votes : ~votes;
    }
    const unsigned before = peers & ((1u << lane) - 1);
    ranks[step] = inside ? own[digit] + __popc(before) : 0;
    __syncwarp();
    if (inside && before == 0) own[digit] += __popc(peers);
    __syncwarp();
  }
  __syncthreads();
  {  // a thread a digit: where each warp's elements begin
    const int64_t at = (row * kDigits + t) * tiles + tile;
    const int32_t count = counts[at];
    int32_t start = block_scan(count, gpu::Plus{}, memory.scan) - count;
    memory.targets[t] = static_cast<int32_t>(ends[at]) - count - start;
    for (int w = 0; w < kWarps; ++w) {
      int32_t& slot = memory.starts[w * kDigits + t];
      const int32_t of_warp = slot;
      slot = start;
      start += of_warp;
    }
  }
  __syncthreads();
  TS_UNROLL
  for (int step = 0; step < kSteps; ++step) {
    const int64_t i = first + step * gpu::kWarp;
    if (i >= n) continue;
    const int to = own[digit_of(held[step], shift)] + ranks[step];
    memory.keys[to] = held[step];
    memory.order[to] = order[row * n + i];
  }
  __syncthreads();
  const int64_t rest = n - tile * kTile;
  const int size = static_cast<int>(rest < kTile ? rest : kTile);
  for (int i = t; i < size; i += kBlock) {
    const K key = memory.keys[i];
    const int64_t to = row * n + memory.targets[digit_of(key, shift)] + i;
    keys_out[to] = key;
    order_out[to] = memory.order[i];
  }
}

// Sorts rows of keys stably and takes `order` along, whose rows ascend among equal keys; keys
// differ in their lowest `bits`.
template <class K>
void sort_rows(const char* where, Tensor& keys, Tensor& order, int64_t rows, int64_t n, int bits) {
  if (n <= 1 || rows == 0) return;
  K* const data = static_cast<K*>(keys.data());
  constexpr auto kSize = static_cast<int64_t>(sizeof(K));
  const int64_t items = rows * n * (kSize + 4);  // with their places, in bytes
  if (n <= kBlockSort) {
    unsigned size = 2;
    while (size < n) size *= 2;
    const unsigned threads = size / 2 < 32 ? 32 : size / 2 > 512 ? 512 : size / 2;
    gpu::launch({.name = where,
                 .grid = static_cast<unsigned>(rows),
                 .block = threads,
                 .shared_bytes = size * sizeof(Item<K>),
                 .traffic = {items, items}},
                sort_block_kernel<K>, data, order.data_as<int32_t>(), static_cast<int>(n),
                static_cast<int>(size));
    return;
  }
  const Device& device = keys.device();
  const int64_t tiles = (n + kTile - 1) / kTile;
  Tensor other_keys = raw::empty(keys.shape(), keys.dtype(), device);
  Tensor other_order = raw::empty({rows * n}, kI32, device);
  const Tensor counts = raw::empty({rows, kDigits * tiles}, kI32, device);
  gpu::LaunchConfig config{
      .name = where, .grid = static_cast<unsigned>(rows * tiles), .block = kBlock};
  for (int shift = 0; shift < bits; shift += kDigitBits) {
    const K* const from = static_cast<const K*>(keys.data());
    config.shared_bytes = 0;
    config.traffic = {rows * n * kSize, counts.numel() * 4};
    gpu::launch(config, count_digits_kernel<K>, from, counts.data_as<int32_t>(), n, tiles, shift);
    const Tensor ends = cumsum(counts, 1, kI64);
    config.shared_bytes = sizeof(TileMemory<K>);
    config.traffic = {items + counts.numel() * (4 + 8), items};
    gpu::launch(config, move_digits_kernel<K>, from, order.data_as<int32_t>(),
                static_cast<K*>(other_keys.data()), other_order.data_as<int32_t>(),
                counts.data_as<int32_t>(), ends.data_as<int64_t>(), n, tiles, shift);
    std::swap(keys, other_keys);
    std::swap(order, other_order);
  }
}

// ---- The k smallest keys of a long row ----------------------------------------------------------

// The k-th key is found digit by digit: those above are known, the others 0.
template <class K>
struct Search {
  K threshold;
  int32_t wanted;  // how many of the keys that agree with the threshold so far are among the k
};

template <class K>
TS_DEVICE bool agrees(K key, K threshold, int shift) {
  // The digits above this one; a shift by the whole width is not defined.
  return static_cast<K>((key ^ threshold) >> shift >> (kDigitBits - 1) >> 1) == 0;
}

// The next digit, from how many agreeing keys have each. All threads of a block of at least kDigits
// call it; `found` is shared memory.
template <class K>
TS_DEVICE void find_digit(Search<K>& search, int shift, const int32_t* counts, int32_t* found,
                          int32_t* slot) {
  const int t = static_cast<int>(threadIdx.x);
  const int32_t own = t < kDigits ? counts[t] : 0;
  const int32_t up_to = block_scan(own, gpu::Plus{}, slot);
  if (own > 0 && up_to - own < search.wanted && up_to >= search.wanted) {
    found[0] = t;
    found[1] = search.wanted - (up_to - own);
  }
  __syncthreads();
  search.threshold =
      static_cast<K>(search.threshold | static_cast<K>(static_cast<K>(found[0]) << shift));
  search.wanted = found[1];
  __syncthreads();
}

// Elements [begin, end) of a row, in their order, to their places among those kept: smaller keys
// all are, of those that equal the threshold the first `wanted`. Both are counted at once, in the
// halves of one number; `before` is that of the elements before `begin`.
template <class K>
TS_DEVICE void keep_range(const K* keys, int64_t begin, int64_t end, const Search<K>& search,
                          int64_t before, K* kept, int32_t* places, int64_t* slot) {
  for (int64_t tile = begin; tile < end; tile += blockDim.x) {
    const int64_t i = tile + threadIdx.x;
    const K key = i < end ? keys[i] : static_cast<K>(~K{0});
    const bool smaller = i < end && key < search.threshold;
    const bool equal = i < end && key == search.threshold;
    const int64_t own = smaller ? 1 : equal ? int64_t{1} << 32 : 0;
    const int64_t place = before + block_scan(own, gpu::Plus{}, slot) - own;
    const int64_t total = slot[blockDim.x / gpu::kWarp - 1];
    const auto smaller_before = static_cast<int32_t>(place & 0xffffffff);
    const auto equal_before = static_cast<int32_t>(place >> 32);
    if (smaller || (equal && equal_before < search.wanted)) {
      const int32_t to =
          smaller_before + (equal_before < search.wanted ? equal_before : search.wanted);
      kept[to] = key;
      places[to] = static_cast<int32_t>(i);
    }
    before += total;
    __syncthreads();  // the next tile writes the slot
  }
}

// One block a row, at least kDigits threads. Leaves the k smallest, and of equal ones the first, in
// the order in which they stand.
template <class K>
__global__ void select_kernel(const K* keys,    // (rows, n)
                              K* kept,          // (rows, k)
                              int32_t* places,  // (rows, k)
                              int64_t n, int k) {
  TS_SHARED(int32_t, counts, kDigits);
  TS_SHARED(int32_t, narrow_slot, gpu::kWarp);
  TS_SHARED(int64_t, slot, gpu::kWarp);
  TS_SHARED(int32_t, found, 2);
  keys += int64_t{blockIdx.x} * n;
  const int t = static_cast<int>(threadIdx.x);
  Search<K> search{0, k};
  for (int shift = static_cast<int>(8 * sizeof(K)) - kDigitBits; shift >= 0; shift -= kDigitBits) {
    if (t < kDigits) counts[t] = 0;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
      const K key = keys[i];
      if (agrees(key, search.threshold, shift)) atomicAdd(&counts[digit_of(key, shift)], 1);
    }
    __syncthreads();
    find_digit(search, shift, counts, found, narrow_slot);
  }
  keep_range(keys, 0, n, search, 0, kept + int64_t{blockIdx.x} * k,
             places + int64_t{blockIdx.x} * k, slot);
}

// The same by tiles of kSelectTile elements: for each digit the tiles count and a block a row
// picks, then the tiles count what they keep, and write it.
constexpr int64_t kLongSelect = 1 << 16;
constexpr int64_t kSelectTile = 16 * kBlock;

// counts: (rows, kDigits), zero before. Integers: the order of the additions cannot be seen.
template <class K>
__global__ void __launch_bounds__(kBlock)
    count_agreeing_kernel(const K* keys, const Search<K>* searches, int32_t* counts, int64_t n,
                          int64_t tiles, int shift) {
  TS_SHARED(int32_t, own, kDigits);
  const int64_t row = blockIdx.x / tiles, begin = blockIdx.x % tiles * kSelectTile;
  const int64_t end = begin + kSelectTile < n ? begin + kSelectTile : n;
  const K threshold = searches[row].threshold;
  own[threadIdx.x] = 0;
  __syncthreads();
  for (int64_t i = begin + threadIdx.x; i < end; i += kBlock) {
    const K key = keys[row * n + i];
    if (agrees(key, threshold, shift)) atomicAdd(&own[digit_of(key, shift)], 1);
  }
  __syncthreads();
  if (own[threadIdx.x] > 0) atomicAdd(&counts[row * kDigits + threadIdx.x], own[threadIdx.x]);
}

// A block a row, which leaves the counts at zero.
template <class K>
__global__ void __launch_bounds__(kBlock)
    pick_digit_kernel(Search<K>* searches, int32_t* counts, int shift) {
  TS_SHARED(int32_t, slot, gpu::kWarp);
  TS_SHARED(int32_t, found, 2);
  Search<K> search = searches[blockIdx.x];
  int32_t* const own = counts + int64_t{blockIdx.x} * kDigits;
  find_digit(search, shift, own, found, slot);
  own[threadIdx.x] = 0;
  if (threadIdx.x == 0) searches[blockIdx.x] = search;
}

template <class K>
__global__ void begin_search_kernel(Search<K>* searches, int32_t* counts, int64_t rows, int k) {
  const int64_t i = gpu::first_index();
  if (i < rows) searches[i] = Search<K>{0, k};
  if (i < rows * kDigits) counts[i] = 0;
}

// kept: (rows, tiles)
template <class K>
__global__ void __launch_bounds__(kBlock)
    count_kept_kernel(const K* keys, const Search<K>* searches, int64_t* kept, int64_t n,
                      int64_t tiles) {
  TS_SHARED(int64_t, slot, gpu::kWarp);
  const int64_t row = blockIdx.x / tiles, begin = blockIdx.x % tiles * kSelectTile;
  const int64_t end = begin + kSelectTile < n ? begin + kSelectTile : n;
  const K threshold = searches[row].threshold;
  int64_t own = 0;
  for (int64_t i = begin + threadIdx.x; i < end; i += kBlock) {
    const K key = keys[row * n + i];
    own += key < threshold ? 1 : key == threshold ? int64_t{1} << 32 : 0;
  }
  own = gpu::block_reduce(own, gpu::Plus{}, int64_t{0}, slot);
  if (threadIdx.x == 0) kept[blockIdx.x] = own;
}

// ends: running sums of what count_kept_kernel found, along the tiles.
template <class K>
__global__ void __launch_bounds__(kBlock)
    keep_kernel(const K* keys, const Search<K>* searches, const int64_t* ends, K* kept,
                int32_t* places, int64_t n, int64_t tiles, int k) {
  TS_SHARED(int64_t, slot, gpu::kWarp);
  const int64_t row = blockIdx.x / tiles, tile = blockIdx.x % tiles, begin = tile * kSelectTile;
  const int64_t end = begin + kSelectTile < n ? begin + kSelectTile : n;
  keep_range(keys + row * n, begin, end, searches[row], tile > 0 ? ends[blockIdx.x - 1] : 0,
             kept + row * k, places + row * k, slot);
}

template <class K>
void select(const char* where, const Tensor& keys, const Tensor& kept, const Tensor& places,
            int64_t rows, int64_t n, int k) {
  const K* const from = static_cast<const K*>(keys.data());
  K* const to = static_cast<K*>(kept.data());
  if (n < kLongSelect) {
    gpu::launch({.name = where, .grid = static_cast<unsigned>(rows), .block = 1024},
                select_kernel<K>, from, to, places.data_as<int32_t>(), n, k);
    return;
  }
  const Device& device = keys.device();
  const int64_t tiles = (n + kSelectTile - 1) / kSelectTile;
  const Tensor state =
      raw::empty({rows * static_cast<int64_t>(sizeof(Search<K>) / sizeof(K))}, kStorage<K>, device);
  const Tensor counts = raw::empty({rows, kDigits}, kI32, device);
  const Tensor by_tile = raw::empty({rows, tiles}, kI64, device);
  auto* const searches = static_cast<Search<K>*>(state.data());
  const gpu::LaunchConfig by_tiles{
      .name = where, .grid = static_cast<unsigned>(rows * tiles), .block = kBlock};
  const gpu::LaunchConfig by_rows{
      .name = where, .grid = static_cast<unsigned>(rows), .block = kBlock};
  gpu::launch(by_rows, begin_search_kernel<K>, searches, counts.data_as<int32_t>(), rows, k);
  for (int shift = static_cast<int>(8 * sizeof(K)) - kDigitBits; shift >= 0; shift -= kDigitBits) {
    gpu::launch(by_tiles, count_agreeing_kernel<K>, from, searches, counts.data_as<int32_t>(), n,
                tiles, shift);
    gpu::launch(by_rows, pick_digit_kernel<K>, searches, counts.data_as<int32_t>(), shift);
  }
  gpu::launch(by_tiles, count_kept_kernel<K>, from, searches, by_tile.data_as<int64_t>(), n, tiles);
  const Tensor ends = cumsum(by_tile, 1, kI64);
  gpu::launch(by_tiles, keep_kernel<K>, from, searches, ends.data_as<int64_t>(), to,
              places.data_as<int32_t>(), n, tiles, k);
}

// ---- Results ------------------------------------------------------------------------------------

// order: (rows, stride), of which the first k count.
template <class B>
__global__ void take_sorted_kernel(const B* x, const int32_t* order, B* values, int64_t* indices,
                                   int64_t total, int64_t n, int64_t stride, int64_t k) {
  const int64_t i = gpu::first_index();
  if (i >= total) return;
  const int64_t row = i / k;
  const int32_t place = order[row * stride + i % k];
  values[i] = x[row * n + place];
  indices[i] = place;
}

// The k first elements of each line along `dim`.
SortedValues sorted_along(const char* where, const Tensor& x, int dim, int64_t k, bool descending) {
  const int64_t n = x.dim() == 0 ? 1 : x.shape()[dim];
  TS_CHECK_SHAPE(n <= INT32_MAX, where, "at most 2^31 - 1 elements in a row; got ", x);
  const Device& device = x.device();
  Shape shape = x.shape();
  if (x.dim() > 0) shape[dim] = k;
  const bool last = x.dim() == 0 || dim == x.dim() - 1;
  SortedValues result{raw::empty(shape, x.dtype(), device), raw::empty(shape, kI64, device)};
  if (result.values.numel() == 0) return result;
  const Tensor lines = contiguous(last ? x : raw::transpose(x, dim, -1));
  SortedValues sorted = result;
  if (!last) {
    std::swap(shape[dim], shape[x.dim() - 1]);
    sorted = {raw::empty(shape, x.dtype(), device), raw::empty(shape, kI64, device)};
  }
  const int64_t rows = x.numel() / n, total = x.numel();
  dispatch_all(x.dtype(), where, [&]<class T>() {
    using K = Key<T>;
    constexpr int kBits = 8 * static_cast<int>(sizeof(K));
    Tensor keys = raw::empty({total}, kStorage<K>, device);
    const bool selects = n > kBlockSort && 2 * k < n;
    Tensor order;
    if (!selects) order = raw::empty({total}, kI32, device);
    constexpr auto kSize = static_cast<int64_t>(sizeof(K));
    gpu::launch(
        {.name = where,
         .grid = gpu::blocks(total, kBlock),
         .block = kBlock,
         .traffic = {total * static_cast<int64_t>(sizeof(T)), total * (kSize + (selects ? 0 : 4))}},
        make_keys_kernel<T>, lines.data_as<T>(), static_cast<K*>(keys.data()),
        selects ? nullptr : order.data_as<int32_t>(), total, n, descending);
    int64_t stride = n;
    if (selects) {
      const Tensor kept = raw::empty({rows * k}, kStorage<K>, device);
      order = raw::empty({rows * k}, kI32, device);
      select<K>(where, keys, kept, order, rows, n, static_cast<int>(k));
      keys = kept;
      stride = k;
    }
    sort_rows<K>(where, keys, order, rows, stride, kBits);
    gpu::launch({.name = where,
                 .grid = gpu::blocks(rows * k, kBlock),
                 .block = kBlock,
                 .traffic = {rows * k * (kSize + 4), rows * k * (kSize + 8)}},
                take_sorted_kernel<K>, static_cast<const K*>(lines.data()),
                order.data_as<int32_t>(), static_cast<K*>(sorted.values.data()),
                sorted.indices.data_as<int64_t>(), rows * k, n, stride, k);
  });
  if (!last) {
    copy_into(result.values, raw::transpose(sorted.values, dim, -1));
    copy_into(result.indices, raw::transpose(sorted.indices, dim, -1));
  }
  return result;
}

SortedValues sort_cuda(const Tensor& x, int dim, bool descending) {
  return sorted_along("sort", x, dim, x.dim() == 0 ? 1 : x.shape()[dim], descending);
}
SortedValues topk_cuda(const Tensor& x, int64_t k, int dim, bool largest) {
  return sorted_along("topk", x, dim, k, largest);
}

__global__ void place_keys_kernel(const int64_t* places, uint32_t* keys, int32_t* order,
                                  int64_t n) {
  const int64_t i = gpu::first_index();
  if (i >= n) return;
  keys[i] = static_cast<uint32_t>(places[i]);
  order[i] = static_cast<int32_t>(i);
}

}  // namespace

SortedPlaces sort_places(const Tensor& places, int64_t size) {
  const int64_t n = places.numel();
  TS_CHECK_SHAPE(n <= INT32_MAX && size <= INT32_MAX, "index",
                 "at most 2^31 - 1 indices and places; got ", places, " for ", size);
  Tensor keys = raw::empty({n}, kI32, places.device());
  Tensor order = raw::empty({n}, kI32, places.device());
  if (n > 0) {
    int bits = 1;
    while (bits < 31 && (int64_t{1} << bits) < size) ++bits;
    gpu::launch({.name = "sort_places",
                 .grid = gpu::blocks(n, kBlock),
                 .block = kBlock,
                 .traffic = {n * 8, n * 8}},
                place_keys_kernel, places.data_as<int64_t>(), static_cast<uint32_t*>(keys.data()),
                order.data_as<int32_t>(), n);
    sort_rows<uint32_t>("sort_places", keys, order, 1, n, bits);
  }
  return {keys, order};
}

void register_sort() {
  cuda_kernel<sort> = sort_cuda;
  cuda_kernel<topk> = topk_cuda;
}

}  // namespace tessera::kernels
