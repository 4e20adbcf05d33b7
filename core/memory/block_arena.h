// Large blocks of host memory from a few mappings: too large ones are split, freed ones are joined
// with their neighbors.
//
// Size classes would keep a block of each size that a training step ever requested; an arena needs
// only what was in use at the same time. With a vocabulary of 50304 this is the difference between
// a GPT's peak in use and a fifth more (bench_step).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <utility>

namespace tessera::detail {

// Not thread-safe. A block is split from the smallest free range that holds it, of equal ones from
// that of the lowest address, so the order of calls alone decides its place. Memory of a mapping
// that was never used is not touched and costs addresses only.
class BlockArena {
 public:
  static constexpr size_t kGrain = size_t{64} << 10;  // blocks begin and end at multiples of it

  BlockArena() = default;
  ~BlockArena();
  BlockArena(const BlockArena&) = delete;
  BlockArena& operator=(const BlockArena&) = delete;

  // bytes: a multiple of kGrain. nullptr if the system has no more memory.
  void* allocate(size_t bytes);
  void deallocate(void* block, size_t bytes) noexcept;
  // Returns the pages of free ranges to the system and unmaps mappings that are entirely free.
  void release_free();
  // Bytes of free ranges whose pages the system still holds for us.
  int64_t cached_bytes() const { return static_cast<int64_t>(cached_); }

 private:
  struct Range {
    size_t size;
    size_t resident;  // of it, bytes that were handed out since their pages last went back
  };
  using Ranges = std::map<uintptr_t, Range>;

  bool map_more(size_t bytes);
  void insert(uintptr_t begin, Range range);
  Range take(Ranges::iterator range);

  std::map<uintptr_t, size_t> mappings_;
  Ranges free_;                                   // by address
  std::set<std::pair<size_t, uintptr_t>> order_;  // the same by size
  size_t mapped_ = 0, cached_ = 0;
};

}  // namespace tessera::detail
