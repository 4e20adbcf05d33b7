#include <tessera/core/memory/block_arena.h>

#include <sys/mman.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include <tessera/core/asan.h>

namespace tessera::detail {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
// The first mapping; later ones are as large as all before them, so that few are needed.
constexpr size_t kSmallestMapping = size_t{1} << 30;

void* as_pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }

// `bytes` (a multiple of kHugePage) aligned to kHugePage, or 0.
uintptr_t map_aligned(size_t bytes) {
  if (bytes + kHugePage < bytes) return 0;
  void* mapped =
      mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return 0;
  const auto begin = reinterpret_cast<uintptr_t>(mapped);
  const uintptr_t aligned = (begin + kHugePage - 1) / kHugePage * kHugePage;
  if (aligned != begin) munmap(mapped, aligned - begin);
  const size_t after = begin + kHugePage - aligned;
  if (after != 0) munmap(as_pointer(aligned + bytes), after);
  // Fewer TLB misses in large products. A system that has no huge pages does without.
  madvise(as_pointer(aligned), bytes, MADV_HUGEPAGE);
  return aligned;
}

}  // namespace

BlockArena::~BlockArena() {
  for (const auto& [begin, size] : mappings_) {
    ASAN_UNPOISON_MEMORY_REGION(as_pointer(begin), size);
    munmap(as_pointer(begin), size);
  }
}

bool BlockArena::map_more(size_t bytes) {
  if (bytes + kHugePage < bytes) return false;
  const size_t needed = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  const size_t wanted = std::max({needed, kSmallestMapping, mapped_});
  size_t size = wanted;
  uintptr_t begin = map_aligned(size);
  // Where addresses are counted (limits, strict overcommit), no more than is needed.
  if (begin == 0 && wanted != needed) begin = map_aligned(size = needed);
  if (begin == 0) return false;
  mappings_.emplace(begin, size);
  mapped_ += size;
  insert(begin, {size, 0});
  return true;
}

void BlockArena::insert(uintptr_t begin, Range range) {
  free_.emplace(begin, range);
  order_.emplace(range.size, begin);
  cached_ += range.resident;
}

BlockArena::Range BlockArena::take(Ranges::iterator range) {
  const Range taken = range->second;
  order_.erase({taken.size, range->first});
  free_.erase(range);
  cached_ -= taken.resident;
  return taken;
}

void* BlockArena::allocate(size_t bytes) {
  auto found = order_.lower_bound({bytes, 0});
  if (found == order_.end()) {
    if (!map_more(bytes)) return nullptr;
    found = order_.lower_bound({bytes, 0});
  }
  const uintptr_t begin = found->second;
  const Range whole = take(free_.find(begin));
  // What was handed out before lies at the front: a mapping fills from there.
  const size_t resident = std::min(whole.resident, bytes);
  if (whole.size > bytes) insert(begin + bytes, {whole.size - bytes, whole.resident - resident});
  return as_pointer(begin);
}

void BlockArena::deallocate(void* block, size_t bytes) noexcept {
  uintptr_t begin = reinterpret_cast<uintptr_t>(block);
  Range range{bytes, bytes};
  try {
    const auto after = free_.lower_bound(begin);
    // Mappings that happen to be neighbours stay apart, so that each can be unmapped.
    const bool joins_after =
        after != free_.end() && after->first == begin + bytes && !mappings_.contains(after->first);
    if (joins_after) {
      const Range next = take(after);
      range.size += next.size;
      range.resident += next.resident;
    }
    const auto next = free_.lower_bound(begin);
    if (next != free_.begin() && !mappings_.contains(begin)) {
      const auto before = std::prev(next);
      if (before->first + before->second.size == begin) {
        begin = before->first;
        const Range previous = take(before);
        range.size += previous.size;
        range.resident += previous.resident;
      }
    }
    insert(begin, range);
  } catch (...) {  // no memory to write it down: the pages go back, the addresses are lost
    madvise(as_pointer(begin), range.size, MADV_DONTNEED);
  }
}

void BlockArena::release_free() {
  for (auto it = free_.begin(); it != free_.end();) {
    const auto range = it++;
    const auto mapping = mappings_.find(range->first);
    if (mapping != mappings_.end() && mapping->second == range->second.size) {
      // Whoever gets these addresses next may touch them.
      ASAN_UNPOISON_MEMORY_REGION(as_pointer(mapping->first), mapping->second);
      munmap(as_pointer(mapping->first), mapping->second);
      mapped_ -= mapping->second;
      mappings_.erase(mapping);
      take(range);
    } else if (range->second.resident != 0) {
      madvise(as_pointer(range->first), range->second.size, MADV_DONTNEED);
      cached_ -= std::exchange(range->second.resident, 0);
    }
  }
}

}  // namespace tessera::detail
