// Compiled without instrumentation, also where kernels have it.
#include <tessera/core/cuda/emulation/race.h>

#if !defined(TESSERA_TRACK_RACES)

namespace tessera::gpu::emulation::race {
bool tracked() { return false; }
void begin_launch() {}
void begin_block() {}
void barrier() {}
void join_lanes(int, unsigned) {}
void set_arena(char*, size_t, size_t) {}
void set_live(const char*, size_t, bool) {}
void atomic_access(const void*, size_t) {}
Counts counts() { return {}; }
void count_sectors(bool) {}
}  // namespace tessera::gpu::emulation::race

#else

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <tessera/core/cuda/emulation/arena.h>
#include <tessera/core/cuda/emulation/simt.h>

namespace tessera::gpu::emulation::race {
namespace {

constexpr int kMaxWarps = kMaxThreads / kWarpSize;

// One access: block, barriers passed, clock of the lane, thread, atomic.
struct Stamp {
  uint64_t bits;
  static constexpr uint64_t kMaxClock = (1 << 12) - 1, kMaxBarrier = (1 << 14) - 1;
  static Stamp make(uint64_t block, uint64_t barrier, uint64_t clock, int thread, bool atomic) {
    return {block << 37 | std::min(barrier, kMaxBarrier) << 23 | std::min(clock, kMaxClock) << 11 |
            static_cast<uint64_t>(thread) << 1 | static_cast<uint64_t>(atomic)};
  }
  uint64_t block() const { return bits >> 37; }
  uint64_t barrier() const { return bits >> 23 & kMaxBarrier; }
  uint64_t clock() const { return bits >> 11 & kMaxClock; }
  int thread() const { return static_cast<int>(bits >> 1 & 1023); }
  bool atomic() const { return (bits & 1) != 0; }
};

// The two last readers: a writer that is one of them still meets the other.
struct Cell {
  Stamp write, read, read_before;
};

// Bytes that are accessed together share a cell: each four have one, or one for each two, or four, by the
// smallest access that they have met.
constexpr size_t kGranule = 4;

char* arena_begin = nullptr;
size_t arena_bytes = 0, shared_bytes = 0;
// Of each byte of the arena, mapped when touched; in use are a granule's first, or its first and third, or all.
Cell* cells = nullptr;
uint8_t* parts = nullptr;  // of each granule: by how many halvings its cells are parted, 0 to 2
uint8_t* live = nullptr;   // of each granule: how many of its 16 first bytes are valid

// Of the block that runs; one runs at a time in the process.
uint64_t block = 0, launch_first_block = 0, barriers = 0;
int used_warps = 0;
Counts of_launch;
// clocks[warp][a][b]: what lane a knows of lane b's time.
uint16_t clocks[kMaxWarps][kWarpSize][kWarpSize];

template <class T>
T* reserve(size_t count) {
  void* memory = mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    std::fputs("emulation: no address space for race tracking\n", stderr);
    std::abort();
  }
  return static_cast<T*>(memory);
}

std::string thread_name(int thread) {
  const Index3& size = current_grid.block_size;
  const auto t = static_cast<unsigned>(thread);
  return "thread (" + std::to_string(t % size.x) + ", " + std::to_string(t / size.x % size.y) +
         ", " + std::to_string(t / size.x / size.y) + ")";
}

[[gnu::noinline]] void report(const void* pointer, const char* now, const char* before,
                              Stamp earlier) {
  const Thread& self = *current_thread;
  char text[160];
  const Index3& b = current_grid.block_index;
  fail(std::string("race: ") + now + " by " + thread_name(self.linear) + " of block (" +
       std::to_string(b.x) + ", " + std::to_string(b.y) + ", " + std::to_string(b.z) + ") and " +
       before + " by " + thread_name(earlier.thread()) +
       (earlier.block() == block ? " of the same block, with no barrier between: "
                                 : " of another block: ") +
       arena::describe(pointer, text, sizeof text));
}

// True where the earlier access happened before what the running thread does now.
bool ordered(Stamp earlier, const Thread& self, bool shared) {
  if (earlier.block() != block) return shared || earlier.block() < launch_first_block;
  if (earlier.thread() == self.linear ||
      earlier.barrier() != std::min(barriers, Stamp::kMaxBarrier))
    return true;
  const int warp = earlier.thread() / kWarpSize;
  if (warp != self.warp) return false;
  const uint64_t known = clocks[warp][self.lane][earlier.thread() % kWarpSize];
  return known > earlier.clock() || earlier.clock() == Stamp::kMaxClock;
}

[[gnu::noinline]] void report_outside(size_t bytes, const void* pointer, const char* what) {
  char text[160];
  fail(std::string(what) + " of " + std::to_string(bytes) + " bytes by " +
       thread_name(current_thread->linear) +
       " outside of what was allocated: " + arena::describe(pointer, text, sizeof text));
}

[[gnu::noinline]] void report_unwritten(const Thread& self, const void* pointer) {
  char text[160];
  fail("a read by " + thread_name(self.linear) +
       " of shared memory that was never written: " + arena::describe(pointer, text, sizeof text));
}

[[gnu::always_inline]] inline bool all_live(size_t offset, size_t bytes) {
  const size_t last = offset + bytes - 1;
  bool inside = last / 16 < arena_bytes / 16 && live[last / 16] > last % 16;
  for (size_t granule = offset / 16; inside && granule < last / 16; ++granule) {
    inside = live[granule] == 16;
  }
  return inside;
}

enum class Access { kRead, kWrite, kAtomic };

// Of `bytes` bytes that share a cell.
[[gnu::always_inline]] inline void touch(Cell& cell, size_t bytes, const char* byte, Stamp now,
                                         const Thread& self, bool shared, Access kind) {
  const auto size = static_cast<int64_t>(bytes);
  const bool both_atomic = kind == Access::kAtomic && cell.write.atomic();
  if (cell.write.bits != now.bits && !both_atomic && !ordered(cell.write, self, shared)) {
    report(byte, kind == Access::kRead ? "a read" : "a write", "a write", cell.write);
  }
  if (kind == Access::kRead) {
    if (shared && cell.write.block() != block) report_unwritten(self, byte);
    if (!shared && cell.read.block() < launch_first_block) of_launch.read += size;
    if (cell.read.thread() != self.linear || cell.read.block() != block) {
      cell.read_before = cell.read;
    }
    cell.read = now;
  } else {
    if (!ordered(cell.read, self, shared)) report(byte, "a write", "a read", cell.read);
    if (!ordered(cell.read_before, self, shared))
      report(byte, "a write", "a read", cell.read_before);
    if (!shared && cell.write.block() < launch_first_block) {
      of_launch.written += size;
      if (kind == Access::kAtomic) of_launch.read += size;
    }
    cell.write = now;
  }
}

// True where they say the same: accesses before this launch are all alike.
bool same(Stamp a, Stamp b) {
  return a.bits == b.bits || (a.block() < launch_first_block && b.block() < launch_first_block);
}
bool same(const Cell& a, const Cell& b) {
  return same(a.write, b.write) && same(a.read, b.read) && same(a.read_before, b.read_before);
}

// Of [begin, end) within the granule, where it is parted or this access parts it.
[[gnu::noinline]] void touch_parts(size_t begin, size_t end, Stamp now, const Thread& self,
                                   bool shared, Access kind) {
  const size_t first = begin / kGranule * kGranule;
  uint8_t& halvings = parts[first / kGranule];
  size_t size = kGranule >> halvings;
  while (begin % size != 0 || end % size != 0) {
    for (size_t i = first; i < first + kGranule; i += size) cells[i + size / 2] = cells[i];
    size /= 2;
    ++halvings;
  }
  for (size_t i = begin; i < end; i += size) {
    touch(cells[i], size, arena_begin + i, now, self, shared, kind);
  }
  if (end - begin < kGranule) return;
  for (size_t i = first + size; i < first + kGranule; i += size) {
    if (!same(cells[i], cells[first])) return;
  }
  halvings = 0;
}

// Of a thread, in device memory.
struct Piece {
  size_t begin, end;
  bool reads;
};
constexpr size_t kSector = 32;
bool counts_sectors = false;
std::vector<Piece> pieces[kMaxThreads];  // of the block that runs

[[gnu::noinline]] void note_piece(int thread, size_t begin, size_t bytes, bool reads) {
  std::vector<Piece>& own = pieces[thread];
  const size_t end = begin + bytes;
  if (!own.empty()) {
    Piece& last = own.back();
    if (last.reads == reads && last.end == begin && end - last.begin <= kSector) {
      last.end = end;
      return;
    }
  }
  own.push_back({begin, end, reads});
}

void fold_sectors() {
  std::vector<size_t> asked[2];
  for (int warp = 0; warp < used_warps; ++warp) {
    std::vector<Piece>* const lanes = pieces + warp * kWarpSize;
    size_t most = 0;
    for (int lane = 0; lane < kWarpSize; ++lane) most = std::max(most, lanes[lane].size());
    for (size_t i = 0; i < most; ++i) {
      for (std::vector<size_t>& of_kind : asked) of_kind.clear();
      for (int lane = 0; lane < kWarpSize; ++lane) {
        if (i >= lanes[lane].size()) continue;
        const Piece& piece = lanes[lane][i];
        for (size_t at = piece.begin / kSector; at <= (piece.end - 1) / kSector; ++at) {
          asked[piece.reads ? 0 : 1].push_back(at);
        }
      }
      for (std::vector<size_t>& of_kind : asked) {
        std::ranges::sort(of_kind);
        of_launch.sectors += std::ranges::unique(of_kind).begin() - of_kind.begin();
      }
    }
    for (int lane = 0; lane < kWarpSize; ++lane) lanes[lane].clear();
  }
}

[[gnu::always_inline]] inline void access(const void* pointer, size_t bytes, Access kind) {
  const Thread* const self = current_thread;
  if (self == nullptr) return;  // host code
  const size_t offset = static_cast<size_t>(static_cast<const char*>(pointer) - arena_begin);
  if (offset >= arena_bytes || bytes == 0) return;  // its own stack, parameters, constants
  if (!all_live(offset, bytes)) {
    report_outside(bytes, pointer, kind == Access::kRead ? "a read" : "a write");
  }
  const Stamp now = Stamp::make(block, barriers, clocks[self->warp][self->lane][self->lane],
                                self->linear, kind == Access::kAtomic);
  const bool shared = offset < shared_bytes;
  if (!shared) {
    of_launch.accessed += static_cast<int64_t>(bytes);
    if (counts_sectors) note_piece(self->linear, offset, bytes, kind == Access::kRead);
  }
  const size_t end = offset + bytes;
  for (size_t i = offset; i < end;) {
    const size_t next = std::min(end, (i / kGranule + 1) * kGranule);
    if (next - i == kGranule && parts[i / kGranule] == 0) {
      touch(cells[i], kGranule, arena_begin + i, now, *self, shared, kind);
    } else {
      touch_parts(i, next, now, *self, shared, kind);
    }
    i = next;
  }
}

}  // namespace

bool tracked() { return true; }

void begin_launch() {
  launch_first_block = block + 1;
  of_launch = {};
  for (std::vector<Piece>& own : pieces) own.clear();
}
Counts counts() {
  fold_sectors();
  return of_launch;
}
void count_sectors(bool on) {
  for (std::vector<Piece>& own : pieces) own.clear();
  counts_sectors = on;
}

namespace {
void restart_clocks() {
  for (int w = 0; w < used_warps; ++w) {
    std::memset(clocks[w], 0, sizeof clocks[w]);
    for (int lane = 0; lane < kWarpSize; ++lane) clocks[w][lane][lane] = 1;
  }
}
}  // namespace

void begin_block() {
  if (counts_sectors) fold_sectors();
  ++block;
  barriers = 0;
  const Index3& size = current_grid.block_size;
  used_warps = static_cast<int>(size.x * size.y * size.z + kWarpSize - 1) / kWarpSize;
  restart_clocks();
}

void barrier() {
  ++barriers;
  restart_clocks();
}

void join_lanes(int warp, unsigned mask) {
  uint16_t joined[kWarpSize] = {};
  for (int lane = 0; lane < kWarpSize; ++lane) {
    if ((mask >> lane & 1) == 0) continue;
    for (int other = 0; other < kWarpSize; ++other) {
      joined[other] = std::max(joined[other], clocks[warp][lane][other]);
    }
  }
  for (int lane = 0; lane < kWarpSize; ++lane) {
    if ((mask >> lane & 1) == 0) continue;
    uint16_t* const known = clocks[warp][lane];
    // What was done before is known to all of them as of a time that has passed.
    for (int other = 0; other < kWarpSize; ++other) {
      if (mask >> other & 1)
        known[other] = static_cast<uint16_t>(joined[other] + 1);
      else
        known[other] = joined[other];
    }
  }
}

void set_arena(char* begin, size_t bytes, size_t shared) {
  cells = reserve<Cell>(bytes);
  parts = reserve<uint8_t>(bytes / kGranule);
  live = reserve<uint8_t>(bytes / 16);
  arena_bytes = bytes;
  shared_bytes = shared;
  arena_begin = begin;
}

void set_live(const char* begin, size_t bytes, bool is_live) {
  const size_t first = static_cast<size_t>(begin - arena_begin) / 16;
  std::memset(live + first, is_live ? 16 : 0, (bytes + 15) / 16);
  if (is_live && bytes % 16 != 0) live[first + bytes / 16] = static_cast<uint8_t>(bytes % 16);
}

void atomic_access(const void* pointer, size_t bytes) { access(pointer, bytes, Access::kAtomic); }

}  // namespace tessera::gpu::emulation::race

// ---- What instrumented code calls ---------------------------------------------------------------

namespace race = tessera::gpu::emulation::race;
using race::Access;

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

#define TS_ACCESS(size)                                                                \
  void __tsan_read##size(void* p) { race::access(p, size, Access::kRead); }            \
  void __tsan_write##size(void* p) { race::access(p, size, Access::kWrite); }          \
  void __tsan_volatile_read##size(void* p) { race::access(p, size, Access::kRead); }   \
  void __tsan_volatile_write##size(void* p) { race::access(p, size, Access::kWrite); } \
  void __tsan_unaligned_read##size(void* p) { race::access(p, size, Access::kRead); }  \
  void __tsan_unaligned_write##size(void* p) { race::access(p, size, Access::kWrite); }
TS_ACCESS(1)
TS_ACCESS(2)
TS_ACCESS(4)
TS_ACCESS(8)
TS_ACCESS(16)
#undef TS_ACCESS
void __tsan_read_range(void* p, size_t size) { race::access(p, size, Access::kRead); }
void __tsan_write_range(void* p, size_t size) { race::access(p, size, Access::kWrite); }

#define TS_ATOMICS(bits, T)                                                                        \
  T __tsan_atomic##bits##_load(const volatile T* p, int) {                                         \
    race::atomic_access(const_cast<const T*>(p), sizeof(T));                                       \
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                                   \
  }                                                                                                \
  void __tsan_atomic##bits##_store(volatile T* p, T value, int) {                                  \
    race::atomic_access(const_cast<const T*>(p), sizeof(T));                                       \
    __atomic_store_n(p, value, __ATOMIC_SEQ_CST);                                                  \
  }                                                                                                \
  T __tsan_atomic##bits##_exchange(volatile T* p, T value, int) {                                  \
    race::atomic_access(const_cast<const T*>(p), sizeof(T));                                       \
    return __atomic_exchange_n(p, value, __ATOMIC_SEQ_CST);                                        \
  }                                                                                                \
  T __tsan_atomic##bits##_fetch_add(volatile T* p, T value, int) {                                 \
    race::atomic_access(const_cast<const T*>(p), sizeof(T));                                       \
    return __atomic_fetch_add(p, value, __ATOMIC_SEQ_CST);                                         \
  }                                                                                                \
  T __tsan_atomic##bits##_fetch_sub(volatile T* p, T value, int) {                                 \
    race::atomic_access(const_cast<const T*>(p), sizeof(T));                                       \
    return __atomic_fetch_sub(p, value, __ATOMIC_SEQ_CST);                                         \
  }                                                                                                \
  T __tsan_atomic##bits##_fetch_or(volatile T* p, T value, int) {                                  \
    race::atomic_access(const_cast<const T*>(p), sizeof(T));                                       \
    return __atomic_fetch_or(p, value, __ATOMIC_SEQ_CST);                                          \
  }                                                                                                \
  T __tsan_atomic##bits##_fetch_and(volatile T* p, T value, int) {                                 \
    race::atomic_access(const_cast<const T*>(p), sizeof(T));                                       \
    return __atomic_fetch_and(p, value, __ATOMIC_SEQ_CST);                                         \
  }                                                                                                \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile T* p, T* expected, T value, int,      \
                                                    int) {                                         \
    race::atomic_access(const_cast<const T*>(p), sizeof(T));                                       \
    return __atomic_compare_exchange_n(p, expected, value, false, __ATOMIC_SEQ_CST,                \
                                       __ATOMIC_SEQ_CST);                                          \
  }                                                                                                \
  int __tsan_atomic##bits##_compare_exchange_weak(volatile T* p, T* expected, T value, int, int) { \
    return __tsan_atomic##bits##_compare_exchange_strong(p, expected, value, 0, 0);                \
  }
TS_ATOMICS(8, uint8_t)
TS_ATOMICS(16, uint16_t)
TS_ATOMICS(32, uint32_t)
TS_ATOMICS(64, uint64_t)
#undef TS_ATOMICS
void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
void __tsan_atomic_signal_fence(int) {}

}  // extern "C"

#endif
