#include <tessera/core/cuda/emulation/arena.h>

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include <tessera/core/cuda/emulation/race.h>
#include <tessera/core/cuda/emulation/simt.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(pointer, size) ((void)(pointer), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(pointer, size) ((void)(pointer), (void)(size))
#endif

namespace tessera::gpu::emulation::arena {
namespace {

constexpr size_t kAlignment = 512;
constexpr size_t kGap = 512;  // between allocations, never accessible
constexpr size_t kSharedBytes = 256u << 10;
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kProtects = false;  // poisoning tells more
#else
constexpr bool kProtects = true;
#endif

struct Arena {
  char* base = nullptr;
  std::mutex mutex;
  std::map<char*, size_t> blocks;      // by address
  std::map<char*, size_t> accessible;  // what kernels may touch, by address
  size_t in_use = 0;
  int open = 0;

  Arena() {
    void* memory = mmap(nullptr, kBytes, kProtects ? PROT_NONE : PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    base = static_cast<char*>(memory);
    ASAN_POISON_MEMORY_REGION(base, kBytes);
    race::set_arena(base, kBytes, kSharedBytes);
    race::set_live(base, kSharedBytes, true);
  }
};

Arena& the_arena() {
  static Arena* arena = new Arena;  // outlives every holder of device memory
  return *arena;
}

void set_open(Arena& arena, bool open) {
  if (kProtects) mprotect(arena.base, kBytes, open ? PROT_READ | PROT_WRITE : PROT_NONE);
  if (open) {
    ASAN_UNPOISON_MEMORY_REGION(arena.base, kSharedBytes);
    for (const auto& [begin, size] : arena.accessible) ASAN_UNPOISON_MEMORY_REGION(begin, size);
  } else {
    ASAN_POISON_MEMORY_REGION(arena.base, kSharedBytes);
    for (const auto& [begin, size] : arena.accessible) ASAN_POISON_MEMORY_REGION(begin, size);
  }
}

// Removes [begin, begin + bytes) from the accessible ranges.
void forbid(Arena& arena, char* begin, size_t bytes) {
  char* const end = begin + bytes;
  auto place = arena.accessible.upper_bound(begin);
  if (place != arena.accessible.begin()) --place;
  while (place != arena.accessible.end() && place->first < end) {
    char* const first = place->first;
    char* const last = first + place->second;
    if (last <= begin) {
      ++place;
      continue;
    }
    place = arena.accessible.erase(place);
    if (first < begin) arena.accessible[first] = static_cast<size_t>(begin - first);
    if (last > end) arena.accessible[end] = static_cast<size_t>(last - end);
  }
  race::set_live(begin, (bytes + 15) / 16 * 16, false);
  ASAN_POISON_MEMORY_REGION(begin, bytes);
}

void permit(Arena& arena, char* begin, size_t bytes) {
  forbid(arena, begin, bytes);
  arena.accessible[begin] = bytes;
  race::set_live(begin, bytes, true);
  if (arena.open > 0) ASAN_UNPOISON_MEMORY_REGION(begin, bytes);
}

}  // namespace

void* allocate(size_t bytes) {
  Arena& arena = the_arena();
  Open open;
  std::lock_guard lock(arena.mutex);
  const size_t needed = (bytes + kAlignment - 1) / kAlignment * kAlignment + kGap;
  char* place = arena.base + kSharedBytes;
  for (const auto& [begin, size] : arena.blocks) {  // first fit
    if (static_cast<size_t>(begin - place) >= needed) break;
    place = begin + size;
  }
  if (bytes > kBytes || place + needed > arena.base + kBytes) return nullptr;
  arena.blocks[place] = needed;
  arena.in_use += needed;
  permit(arena, place, bytes);
  std::memset(place, 0xff, bytes);
  return place;
}

bool release(void* pointer) {
  Arena& arena = the_arena();
  std::lock_guard lock(arena.mutex);
  const auto place = arena.blocks.find(static_cast<char*>(pointer));
  if (place == arena.blocks.end()) return false;
  arena.in_use -= place->second;
  forbid(arena, place->first, place->second);
  arena.blocks.erase(place);
  return true;
}

bool contains(const void* pointer) {
  const char* const address = static_cast<const char*>(pointer);
  return address >= the_arena().base && address < the_arena().base + kBytes;
}

size_t free_bytes() {
  std::lock_guard lock(the_arena().mutex);
  return kBytes - kSharedBytes - the_arena().in_use;
}

char* shared_memory() { return the_arena().base; }

void set_accessible(const void* pointer, size_t bytes, bool accessible, bool fills) {
  Arena& arena = the_arena();
  char* const begin = const_cast<char*>(static_cast<const char*>(pointer));
  if (accessible) {
    Open open;
    std::lock_guard lock(arena.mutex);
    permit(arena, begin, bytes);
    if (fills) std::memset(begin, 0xff, bytes);
  } else {
    std::lock_guard lock(arena.mutex);
    forbid(arena, begin, bytes);
  }
}

const char* describe(const void* pointer, char* text, size_t size) {
  Arena& arena = the_arena();
  const char* const address = static_cast<const char*>(pointer);
  if (!contains(pointer)) {
    std::snprintf(text, size, "address %p, which is no device memory", pointer);
  } else if (address < arena.base + kSharedBytes) {
    std::snprintf(text, size, "byte %zu of shared memory",
                  static_cast<size_t>(address - arena.base));
  } else {
    auto place = arena.accessible.upper_bound(const_cast<char*>(address));
    if (place == arena.accessible.begin()) {
      std::snprintf(text, size, "device address %p", pointer);
    } else {
      --place;
      std::snprintf(text, size, "byte %zu of the %zu bytes of device memory at %p",
                    static_cast<size_t>(address - place->first), place->second,
                    static_cast<void*>(place->first));
    }
  }
  return text;
}

Open::Open() {
  Arena& arena = the_arena();
  std::lock_guard lock(arena.mutex);
  if (arena.open++ == 0) set_open(arena, true);
}

Open::~Open() {
  Arena& arena = the_arena();
  std::lock_guard lock(arena.mutex);
  if (--arena.open == 0) set_open(arena, false);
}

}  // namespace tessera::gpu::emulation::arena
