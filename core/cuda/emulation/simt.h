// A grid of GPU threads on the CPU: what launch.h and the emulated cuda_runtime.h are made of.
//
// One block runs at a time. Its threads are fibers that start lazily: a thread runs until it meets
// a barrier or a collective of its warp, and the next one goes on from there, by a direct switch
// from fiber to fiber. A thread that ends hands its stack to the next that has not begun, so a
// kernel without barriers is a loop of calls. The order of blocks and of threads is a permutation
// drawn from a seed (set_seed): what depends on it fails for some seed.
//
// What the emulation finds (a barrier that not all threads reach, a lane mask that lies, memory
// outside of what was allocated, with race tracking two threads that meet without a barrier) ends
// the launch, as an illegal access does on a GPU: the next call that waits returns
// cudaErrorLaunchFailure and report() says what it was.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace tessera::gpu::emulation {

inline constexpr int kWarpSize = 32;
inline constexpr int kMaxThreads = 1024;               // of a block
inline constexpr size_t kMaxSharedBytes = 227u << 10;  // of a block, as on sm_90
inline constexpr size_t kSharedBytes = 48u << 10;      // where the kernel asked for no more

struct Index3 {
  unsigned x, y, z;
};

// Where a kernel is: read by threadIdx, blockIdx, blockDim, gridDim.
struct Thread {
  Index3 index;
  int linear;  // in the block
  int lane, warp;
};
struct Grid {
  Index3 block_index, block_size, grid_size;
};
extern constinit thread_local Thread* current_thread;  // null outside kernels
extern constinit thread_local Grid current_grid;

// Ends the launch with a report. Only inside of a kernel.
[[noreturn]] void fail(const std::string& what);

void sync_threads();

// The last of the lanes in `mask` to arrive calls combine(payloads, mask), where payloads[lane] is
// what that lane brought (on its stack), and all go on. Fails for a mask without the own lane, for
// masks that disagree, for lanes that have left the kernel, and where names differ.
// `orders_memory`: what a lane wrote before is there for the others afterwards, as after
// __syncwarp.
using Combine = void (*)(void* const* payloads, unsigned mask);
void warp_collective(unsigned mask, const char* name, void* payload, Combine combine,
                     bool orders_memory = true);

// Shared memory of the block. An array of fixed size is known by its `site`, one address for each
// declaration.
void* dynamic_shared(size_t alignment);
void* static_shared(const void* site, size_t bytes, size_t alignment);

// An access of `bytes` at once, as vector loads are on a GPU.
void check_alignment(const void* pointer, size_t bytes);
// An access whose instruction names the memory: shared, or global.
void check_space(const void* pointer, bool shared);

// A warp meets to read or write a tile of 16 x 16 elements whose rows lie `leading` apart: all
// lanes, with the same arguments, at a multiple of 32 bytes and with rows a multiple of 16 bytes
// apart.
void check_tile(const char* name, const void* pointer, unsigned leading, size_t element_bytes);
// Checks that all tiles of a product were loaded or filled.
void check_operands(bool are_set);

// c += a b for tiles of 16 x 16 by rows, in f32 and in the order of the inner dimension.
void multiply_tiles(const float* a, const float* b, float* c);

struct Launch {
  const char* name;
  Index3 grid, block;
  size_t shared_bytes;
  size_t shared_limit = kMaxSharedBytes;  // with static_shared
};
// Runs all blocks. Returns an empty text, or what went wrong.
std::string run_grid(const Launch& launch, const std::function<void()>& kernel);

// ---- Orders -------------------------------------------------------------------------------------

// The next launches and stream choices follow this seed (at start: the environment's
// TESSERA_EMULATION_SEED, or 0).
void set_seed(uint64_t seed);
uint64_t next_random();

}  // namespace tessera::gpu::emulation
