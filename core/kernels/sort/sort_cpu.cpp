#include <tessera/core/kernels/sort/sort.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include <tessera/core/dispatch.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/sort/sort_keys.h>
#include <tessera/core/parallel.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera::kernels {
namespace {

// A key and where it came from, in the order of keys and then of places. Up to 32 bits of key share
// one number with the place: one comparison then decides.
struct WideItem {
  uint64_t key;
  uint32_t index;
  friend bool operator<(const WideItem& a, const WideItem& b) {
    return a.key != b.key ? a.key < b.key : a.index < b.index;
  }
};
template <class K>
using Item = std::conditional_t<sizeof(K) == 8, WideItem, uint64_t>;

template <class K>
Item<K> make_item(K key, int64_t index) {
  if constexpr (sizeof(K) == 8) {
    return {key, static_cast<uint32_t>(index)};
  } else {
    return (uint64_t{key} << 32) | static_cast<uint64_t>(index);
  }
}
uint32_t index_of(uint64_t item) { return static_cast<uint32_t>(item); }
uint32_t index_of(const WideItem& item) { return item.index; }
template <class K>
K key_in(const Item<K>& item) {
  if constexpr (sizeof(K) == 8) {
    return item.key;
  } else {
    return static_cast<K>(item >> 32);
  }
}

// Below this a merge sort is faster than clearing and scanning counters.
constexpr int64_t kRadixSize = 256;

// What one thread sorts with: two lists of a row's length, and the counters of each pass.
template <class K>
struct SortScratch {
  static constexpr int kBits = sizeof(K) == 1 || sizeof(K) == 2 ? 8 : 11;
  static constexpr int kPasses = (8 * static_cast<int>(sizeof(K)) + kBits - 1) / kBits;
  using Counts = std::array<uint32_t, size_t{1} << kBits>;

  explicit SortScratch(int64_t size)
      : items(new Item<K>[static_cast<size_t>(size)]),
        other(new Item<K>[static_cast<size_t>(size)]),
        counts(size < kRadixSize ? nullptr : new Counts[kPasses]) {}
  std::unique_ptr<Item<K>[]> items, other;
  std::unique_ptr<Counts[]> counts;
};

// Sorts scratch.items by key, stably; the result lies in `items` again.
template <class K>
void sort_items(SortScratch<K>& scratch, int64_t size) {
  if (size < kRadixSize) {
    std::sort(scratch.items.get(), scratch.items.get() + size);
    return;
  }
  constexpr int kBits = SortScratch<K>::kBits, kPasses = SortScratch<K>::kPasses;
  constexpr uint32_t kMask = (1u << kBits) - 1;
  const auto& counts = scratch.counts;
  std::fill_n(counts.get(), kPasses, typename SortScratch<K>::Counts{});
  for (int64_t i = 0; i < size; ++i) {
    const K key = key_in<K>(scratch.items[static_cast<size_t>(i)]);
    for (int pass = 0; pass < kPasses; ++pass) {
      ++counts[static_cast<size_t>(pass)][static_cast<uint32_t>(key >> (pass * kBits)) & kMask];
    }
  }
  for (int pass = 0; pass < kPasses; ++pass) {
    const int shift = pass * kBits;
    uint32_t* const count = counts[static_cast<size_t>(pass)].data();
    const Item<K>* from = scratch.items.get();
    const uint32_t digit = static_cast<uint32_t>(key_in<K>(from[0]) >> shift) & kMask;
    if (count[digit] == static_cast<uint64_t>(size)) continue;  // the same digit everywhere
    uint32_t start = 0;
    for (uint32_t d = 0; d <= kMask; ++d) {
      const uint32_t here = count[d];
      count[d] = start;
      start += here;
    }
    Item<K>* to = scratch.other.get();
    for (int64_t i = 0; i < size; ++i) {
      to[count[static_cast<uint32_t>(key_in<K>(from[i]) >> shift) & kMask]++] = from[i];
    }
    std::swap(scratch.items, scratch.other);
  }
}

// The k first items of a row in order, ties by index. Returns how many items lie in scratch.items;
// the first k of them are the answer.
template <class T>
void select_items(const T* row, int64_t size, int64_t k, bool largest,
                  SortScratch<Key<T>>& scratch) {
  using K = Key<T>;
  Item<K>* items = scratch.items.get();
  // Keys are turned so that the smallest is the best. Candidates collect until there are 2 k and
  // more; then the best k stay, and the worst of them is the bar for what follows.
  const int64_t room = std::min(size, std::max<int64_t>(4 * k, 256));
  int64_t count = 0;
  K bar = static_cast<K>(~K{0});
  bool barred = false;
  for (int64_t i = 0; i < size; ++i) {
    const K key = largest ? static_cast<K>(~key_of(row[i])) : key_of(row[i]);
    if (barred && key >= bar) continue;  // an equal one that comes later loses
    items[count++] = make_item(key, i);
    if (count == room && i + 1 < size) {
      std::nth_element(items, items + k - 1, items + count);
      count = k;
      bar = key_in<K>(items[k - 1]);
      barred = true;
    }
  }
  if (count > k) std::nth_element(items, items + k - 1, items + count);
  std::sort(items, items + k);
}

// Runs f(row of x, values, indices) on rows along `dim`, which lie one after the other.
// k: the length of a result row.
template <class F>
SortedValues along(const Tensor& x, int dim, int64_t k, const char* where, F&& f) {
  const int64_t size = x.dim() == 0 ? 1 : x.shape()[dim];
  TS_CHECK_SHAPE(size < (int64_t{1} << 32), where, "at most 2^32 - 1 elements in a row; got ", x);
  Shape shape = x.shape();
  if (x.dim() > 0) shape[dim] = k;
  const bool last = x.dim() == 0 || dim == x.dim() - 1;
  SortedValues result{raw::empty(shape, x.dtype(), x.device()),
                      raw::empty(shape, kI64, x.device())};
  if (x.is_meta() || result.values.numel() == 0) return result;
  const Tensor rows = contiguous(last ? x : raw::transpose(x, dim, -1));
  SortedValues sorted = result;
  if (!last) {
    std::swap(shape[dim], shape[x.dim() - 1]);
    sorted = {raw::empty(shape, x.dtype(), x.device()), raw::empty(shape, kI64, x.device())};
  }
  dispatch_all(x.dtype(), where, [&]<class T>() {
    const T* source = rows.data_as<T>();
    T* values = sorted.values.data_as<T>();
    int64_t* indices = sorted.indices.data_as<int64_t>();
    const int64_t grain = std::max<int64_t>(1, 4096 / size);
    parallel_for(x.numel() / size, grain, [&](int64_t begin, int64_t end) {
      SortScratch<Key<T>> scratch(size);
      for (int64_t row = begin; row < end; ++row) {
        const T* from = source + row * size;
        f(from, size, scratch);
        for (int64_t i = 0; i < k; ++i) {
          const uint32_t index = index_of(scratch.items[static_cast<size_t>(i)]);
          indices[row * k + i] = index;
          values[row * k + i] = from[index];
        }
      }
    });
  });
  if (!last) {
    copy_into(result.values, raw::transpose(sorted.values, dim, -1));
    copy_into(result.indices, raw::transpose(sorted.indices, dim, -1));
  }
  return result;
}

}  // namespace

SortedValues sort(const Tensor& x, int dim, bool descending) {
  if (x.device().is_cuda()) {
    return on_cuda<kernels::sort>("sort", x.device(), x, dim, descending);
  }
  const int64_t size = x.dim() == 0 ? 1 : x.shape()[dim];
  return along(x, dim, size, "sort",
               [&]<class T>(const T* row, int64_t n, SortScratch<Key<T>>& scratch) {
                 for (int64_t i = 0; i < n; ++i) {
                   const Key<T> key = key_of(row[i]);
                   scratch.items[static_cast<size_t>(i)] =
                       make_item(descending ? static_cast<Key<T>>(~key) : key, i);
                 }
                 sort_items(scratch, n);
               });
}

SortedValues topk(const Tensor& x, int64_t k, int dim, bool largest) {
  if (x.device().is_cuda()) {
    return on_cuda<kernels::topk>("topk", x.device(), x, k, dim, largest);
  }
  return along(x, dim, k, "topk",
               [&]<class T>(const T* row, int64_t n, SortScratch<Key<T>>& scratch) {
                 if (2 * k >= n) {
                   for (int64_t i = 0; i < n; ++i) {
                     const Key<T> key = key_of(row[i]);
                     scratch.items[static_cast<size_t>(i)] =
                         make_item(largest ? static_cast<Key<T>>(~key) : key, i);
                   }
                   sort_items(scratch, n);
                 } else {
                   select_items(row, n, k, largest, scratch);
                 }
               });
}

}  // namespace tessera::kernels
