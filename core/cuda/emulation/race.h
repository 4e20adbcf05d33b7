// Race tracking: who read and wrote each byte of device and shared memory last, and whether a
// barrier lies between two accesses of different threads.
//
// Kernels need no change: `.cu` files are compiled with -fsanitize=thread and meet the __tsan_*
// functions of tsan_runtime.cpp in the place of the runtime of ThreadSanitizer. A thread's time is
// (number of barriers its block has passed, a clock of its warp): accesses of one warp are ordered
// by collectives (vector clocks over its 32 lanes), those of one block by barriers, those of
// different blocks of a launch by nothing. Atomic operations do not race with each other.
// In builds without tracking these functions do nothing.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera::gpu::emulation::race {

// True where this program tracks races.
bool tracked();

void begin_launch();
void begin_block();
void barrier();                            // the block passes one
void join_lanes(int warp, unsigned mask);  // a collective of these lanes
// Memory that was never written, reads of which are reported: shared memory of a new block.
void set_arena(char* begin, size_t bytes, size_t shared_bytes);
// Bytes of the arena that kernels may touch, in granules of 16.
void set_live(const char* begin, size_t bytes, bool live);
void atomic_access(const void* pointer, size_t bytes);
// The last launch's bytes outside of shared memory: bytes that were read, and written, each once;
// and bytes of all accesses. Atomic operations read and write. Sectors (32 bytes) are those that a
// warp asks for at a time, while they are counted: of the accesses of a thread neighbours in memory
// up to a sector are one, and those of the lanes with one number are asked for together.
struct Counts {
  int64_t read = 0, written = 0, accessed = 0, sectors = 0;
};
Counts counts();
void count_sectors(bool on);

}  // namespace tessera::gpu::emulation::race
