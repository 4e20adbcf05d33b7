#include "test_emulation.h"

#include <mma.h>

#include <tessera/core/cuda/launch.h>

namespace tessera::gpu::tests {
namespace {

constexpr int kBlock = 256;

__global__ void block_sums_kernel(Bug bug, const float* x, float* y, int64_t n) {
  float* const partial = dynamic_shared<float>();
  const int64_t i = first_index();
  const int t = static_cast<int>(threadIdx.x);
  const bool beyond = bug == Bug::kOffByOne ? i > n : i >= n;
  if (bug != Bug::kUninitialised || t != 7) partial[t] = beyond ? 0.0f : x[i];
  __syncthreads();
  for (int half = kBlock / 2; half > 0; half /= 2) {
    if (t < half) partial[t] += partial[t + half];
    if (bug != Bug::kMissingBarrier) __syncthreads();
  }
  if (t == 0) y[bug == Bug::kBlocksRace ? 0 : blockIdx.x] = partial[0];
}

__global__ void swap_neighbours_kernel(Bug bug, const float* x, float* y, int64_t n) {
  const int64_t i = first_index();
  const float own = x[i < n ? i : 0];
  float other = 0;
  switch (bug) {
    case Bug::kWrongMask:  // each half believes that it is alone, and the halves overlap
      other = __shfl_xor_sync(threadIdx.x % 32 < 16 ? 0x0000ffffu : kAllLanes, own, 1);
      break;
    case Bug::kMaskWithoutSelf:
      other = __shfl_xor_sync(0x0000ffffu, own, 1);
      break;
    case Bug::kDivergentBarrier:
      if (threadIdx.x < 16) __syncthreads();
      other = __shfl_xor_sync(kAllLanes, own, 1);
      break;
    default:
      other = __shfl_xor_sync(kAllLanes, own, 1);
  }
  if (i < n) y[i] = other;
}

__global__ void reverse_tiles_kernel(Bug bug, const float* x, float* y, int64_t n) {
  TS_SHARED(float, tile, 32);
  const int lane = static_cast<int>(threadIdx.x);
  const int64_t i = first_index();
  tile[lane] = x[i];
  if (bug != Bug::kMissingWarpSync) __syncwarp();
  y[n - 32 * (blockIdx.x + 1) + lane] = tile[31 - lane];
}

__global__ void copy_beside_kernel(const float* x, float* y) {
  TS_SHARED(float, fixed, 512);
  dynamic_shared<float>()[threadIdx.x] = x[threadIdx.x];
  fixed[threadIdx.x] = dynamic_shared<float>()[threadIdx.x];
  y[threadIdx.x] = fixed[threadIdx.x];
}

__global__ void stage_vectors_kernel(Bug bug, const float* x, float* y) {
  float* const stage = dynamic_shared<float>();
  const int64_t i = 4 * first_index();
  const Vector<float, 4> vector = load_vector<4>(x + i);
  if (bug == Bug::kGlobalStoreToShared) {
    store_vector(stage + i, vector);
  } else {
    store_shared_vector(stage + i, vector);
  }
  if (bug == Bug::kSharedStoreToGlobal) {
    store_shared_vector(y + i, load_vector<4>(stage + i));
  } else {
    store_vector(y + i, load_vector<4>(stage + i));
  }
}

__global__ void copy_vectors_kernel(const float* x, float* y, int64_t n) {
  const int64_t i = 4 * first_index();
  if (i < n) store_vector(y + i, load_vector<4>(x + i));
}

__global__ void add_one_kernel(float* x, int64_t n) {
  for (int64_t i = first_index(); i < n; i += grid_stride()) x[i] += 1;
}

template <class Body>
__device__ void as_word(int bytes, const Body& body) {
  if (bytes == 1) body.template operator()<uint8_t>();
  if (bytes == 2) body.template operator()<uint16_t>();
  if (bytes == 4) body.template operator()<uint32_t>();
  if (bytes == 8) body.template operator()<uint64_t>();
}
__global__ void two_words_kernel(char* x, int first, int second, int offset, bool reads) {
  const bool is_first = blockIdx.x == 0;
  as_word(is_first ? first : second, [&]<class T>() {
    T* const word = reinterpret_cast<T*>(x + (is_first ? 0 : offset));
    const T value = is_first || !reads ? T{1} : *word;
    if (is_first || !reads) *word = value;
    if (value == T{200}) __syncthreads();  // the read is used
  });
}
__global__ void read_and_write_kernel(uint8_t* x) {
  const uint32_t read = blockIdx.x == 0 ? x[1] : *reinterpret_cast<const uint32_t*>(x);
  if (blockIdx.x == 1) x[1] = static_cast<uint8_t>(read + 1);
  if (read == 200) __syncthreads();  // it is used
}
__global__ void same_words_kernel(char* x, int bytes) {
  as_word(bytes, [&]<class T>() { reinterpret_cast<T*>(x)[threadIdx.x] += 0; });
}

__global__ void histogram_kernel(const int* x, int* counts, int64_t n) {
  const int64_t i = first_index();
  if (i < n) atomicAdd(&counts[x[i]], 1);
}

__global__ void warp_scan_kernel(const int* x, int* y, unsigned* y2, int64_t n) {
  const int64_t i = first_index();
  const int lane = static_cast<int>(threadIdx.x % 32);
  int value = i < n ? x[i] : 0;
  const unsigned odd = __ballot_sync(kAllLanes, value % 2);
  for (unsigned step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(kAllLanes, value, step);
    if (lane >= static_cast<int>(step)) value += before;
  }
  if (i < n) {
    y[i] = value;
    y2[i] = odd;
  }
}

__global__ void warp_product_kernel(Bug bug, const uint16_t* a, const uint16_t* b, float* c) {
  namespace wmma = nvcuda::wmma;
  using Element = __nv_bfloat16;
  Element* const tile = dynamic_shared<Element>();
  const int lane = static_cast<int>(threadIdx.x);
  for (int i = lane; i < 256; i += 32) {
    tile[i] = reinterpret_cast<const Element*>(b)[i % 16 * 16 + i / 16];  // by columns
  }
  if (bug != Bug::kMissingWarpSync) __syncwarp();
  wmma::fragment<wmma::matrix_a, 16, 16, 16, Element, wmma::row_major> left;
  wmma::fragment<wmma::matrix_b, 16, 16, 16, Element, wmma::col_major> right;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> sums;
  const auto* from = reinterpret_cast<const Element*>(a);
  if (bug == Bug::kMisalignedTile) from += 8;
  if (bug == Bug::kTwoTiles && lane == 5) from += 16;
  if (bug != Bug::kHalfWarp || lane < 16) {
    wmma::load_matrix_sync(left, from, bug == Bug::kTileStride ? 20 : 16);
  }
  if (bug != Bug::kUnsetTile) wmma::load_matrix_sync(right, tile, 16);
  wmma::load_matrix_sync(sums, c, 16, wmma::mem_row_major);
  wmma::mma_sync(sums, left, right, sums);
  wmma::store_matrix_sync(c, sums, 16, wmma::mem_row_major);
}

}  // namespace

void warp_product(Bug bug, const uint16_t* a, const uint16_t* b, float* c, cudaStream_t stream) {
  launch({.name = "warp_product", .grid = 1, .block = 32, .shared_bytes = 512, .stream = stream},
         warp_product_kernel, bug, a, b, c);
}
void block_sums(Bug bug, const float* x, float* y, int64_t n, cudaStream_t stream) {
  launch({.name = "block_sums",
          .grid = blocks(n, kBlock),
          .block = kBlock,
          .shared_bytes = kBlock * sizeof(float),
          .stream = stream},
         block_sums_kernel, bug, x, y, n);
}
void swap_neighbours(Bug bug, const float* x, float* y, int64_t n, cudaStream_t stream) {
  launch({.name = "swap_neighbours", .grid = blocks(n, 64), .block = 64, .stream = stream},
         swap_neighbours_kernel, bug, x, y, n);
}
void reverse_tiles(Bug bug, const float* x, float* y, int64_t n, cudaStream_t stream) {
  launch({.name = "reverse_tiles", .grid = blocks(n, 32), .block = 32, .stream = stream},
         reverse_tiles_kernel, bug, x, y, n);
}
void stage_vectors(Bug bug, const float* x, float* y, cudaStream_t stream) {
  launch({.name = "stage_vectors", .grid = 1, .block = 32, .shared_bytes = 512, .stream = stream},
         stage_vectors_kernel, bug, x, y);
}
void copy_vectors(const float* x, float* y, int64_t n, cudaStream_t stream) {
  launch({.name = "copy_vectors", .grid = blocks(n, 128, 4), .block = 128, .stream = stream},
         copy_vectors_kernel, x, y, n);
}
void copy_beside(size_t shared_bytes, const float* x, float* y, cudaStream_t stream) {
  launch({.name = "copy_beside", .block = 32, .shared_bytes = shared_bytes, .stream = stream},
         copy_beside_kernel, x, y);
}
void add_one(float* x, int64_t n, cudaStream_t stream) {
  launch({.name = "add_one", .grid = 2, .block = 64, .stream = stream}, add_one_kernel, x, n);
}
void two_words(void* x, int first, int second, int offset, bool reads, cudaStream_t stream) {
  launch({.name = "two_words", .grid = 2, .block = 1, .stream = stream}, two_words_kernel,
         static_cast<char*>(x), first, second, offset, reads);
}
void read_and_write(void* x, cudaStream_t stream) {
  launch({.name = "read_and_write", .grid = 2, .block = 1, .stream = stream}, read_and_write_kernel,
         static_cast<uint8_t*>(x));
}
void same_words(void* x, int bytes, cudaStream_t stream) {
  launch({.name = "same_words",
          .grid = 1,
          .block = static_cast<unsigned>(16 / bytes),
          .stream = stream},
         same_words_kernel, static_cast<char*>(x), bytes);
}
void histogram(const int* x, int* counts, int64_t n, cudaStream_t stream) {
  launch({.name = "histogram", .grid = blocks(n, 128), .block = 128, .stream = stream},
         histogram_kernel, x, counts, n);
}
void warp_scan(const int* x, int* y, unsigned* y2, int64_t n, cudaStream_t stream) {
  launch({.name = "warp_scan", .grid = blocks(n, 64), .block = 64, .stream = stream},
         warp_scan_kernel, x, y, y2, n);
}

}  // namespace tessera::gpu::tests
