// Kernels of test_emulation.cu: correct ones, and each with one deliberate bug.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace tessera::gpu::tests {

enum class Bug {
  kNone,
  kMissingBarrier,       // between writing shared memory and reading a neighbour's element
  kOffByOne,             // reads one element beyond the end
  kWrongMask,            // a mask that names only half of the lanes that shuffle
  kMaskWithoutSelf,      // lanes that the mask does not name
  kDivergentBarrier,     // half of a block at the barrier, the other half in a shuffle
  kMisaligned,           // a vector of 16 bytes at an address of 4
  kUninitialised,        // shared memory that nobody wrote
  kBlocksRace,           // two blocks write one address
  kMissingWarpSync,      // lanes exchange through shared memory without __syncwarp
  kGlobalStoreToShared,  // a vector's store that names the other memory
  kSharedStoreToGlobal,
  // Of products of warps:
  kMisalignedTile,  // a tile that begins at 16 bytes
  kTileStride,      // rows 40 bytes apart
  kHalfWarp,        // only half of the lanes load
  kTwoTiles,        // lanes that load different tiles
  kUnsetTile,       // an operand that was never loaded
};

// y[block] = sum of x over the block's 256 elements, through shared memory.
void block_sums(Bug bug, const float* x, float* y, int64_t n, cudaStream_t stream);
// y[i] = x[i ^ 1] through shuffles.
void swap_neighbours(Bug bug, const float* x, float* y, int64_t n, cudaStream_t stream);
// y[i] = x[n - 1 - i], by way of a tile in shared memory of each block.
void reverse_tiles(Bug bug, const float* x, float* y, int64_t n, cudaStream_t stream);
// y[i] = x[i], four at a time.
void copy_vectors(const float* x, float* y, int64_t n, cudaStream_t stream);
// y[i] = x[i] for 128 elements, by way of shared memory.
void stage_vectors(Bug bug, const float* x, float* y, cudaStream_t stream);
// y[i] = x[i] for 32 elements in a block of that much dynamic shared memory beside 2048 fixed
// bytes.
void copy_beside(size_t shared_bytes, const float* x, float* y, cudaStream_t stream);
void add_one(float* x, int64_t n, cudaStream_t stream);
// Two blocks of one thread: the first writes a word of `first` bytes (1, 2, 4 or 8) at x, the other writes one of
// `second` bytes at x + offset, or reads it.
void two_words(void* x, int first, int second, int offset, bool reads, cudaStream_t stream);
// Two blocks of one thread: the first reads byte 1 of x, the other reads the first four and writes byte 1.
void read_and_write(void* x, cudaStream_t stream);
// Reads 16 bytes at x as words of `bytes` bytes, each by a thread, and writes them back.
void same_words(void* x, int bytes, cudaStream_t stream);
// counts[x[i]] += 1 with atomic operations.
void histogram(const int* x, int* counts, int64_t n, cudaStream_t stream);
// c = a b + c for tiles of 16 x 16 by rows, bf16 as bits; b goes through shared memory.
void warp_product(Bug bug, const uint16_t* a, const uint16_t* b, float* c, cudaStream_t stream);
// y[i] = inclusive scan of each warp of x; also votes: y2[i] = lanes whose x is odd.
void warp_scan(const int* x, int* y, unsigned* y2, int64_t n, cudaStream_t stream);

}  // namespace tessera::gpu::tests
