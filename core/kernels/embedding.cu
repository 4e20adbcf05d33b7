#include <tessera/core/kernels/embedding.h>

#include <tessera/core/cuda/launch.h>
#include <tessera/core/dispatch.h>
#include <tessera/core/factory.h>
#include <tessera/core/kernels/copy.h>
#include <tessera/core/kernels/index.h>
#include <tessera/core/kernels/on_device.h>
#include <tessera/core/kernels/rows.cuh>

namespace tessera::kernels {
namespace {

constexpr int kBlock = 256;

// [Note: deterministic embedding gradient] Positions are sorted by their row of the table and stay
// in order within one: counts by integer atomics, whose order cannot matter; a scan; places within
// a row as the atomics fall; then the rank of each position among those of its row, which undoes
// that order. Each row of the table is summed by one block in this order, without float atomics.
__global__ void count_kernel(const int64_t* index, int* counts, int64_t n) {
  const int64_t i = gpu::first_index();
  if (i < n) atomicAdd(&counts[index[i]], 1);
}

// starts[v] = sum of counts before v, by one block; cursors begin at 0.
__global__ void scan_counts_kernel(const int* counts, int64_t* starts, int* cursors, int64_t V) {
  TS_SHARED(int64_t, sums, 1024);
  const int t = static_cast<int>(threadIdx.x);
  const int64_t each = (V + blockDim.x - 1) / blockDim.x;
  const int64_t begin = t * each < V ? t * each : V;
  const int64_t end = begin + each < V ? begin + each : V;
  int64_t own = 0;
  for (int64_t v = begin; v < end; ++v) own += counts[v];
  sums[t] = own;
  __syncthreads();
  for (unsigned step = 1; step < blockDim.x; step *= 2) {
    const int64_t before = threadIdx.x >= step ? sums[threadIdx.x - step] : 0;
    __syncthreads();
    sums[t] += before;
    __syncthreads();
  }
  int64_t running = sums[t] - own;
  for (int64_t v = begin; v < end; ++v) {
    starts[v] = running;
    cursors[v] = 0;
    running += counts[v];
  }
  if (t == static_cast<int>(blockDim.x) - 1) starts[V] = sums[t];
}

__global__ void place_kernel(const int64_t* index, const int64_t* starts, int* cursors,
                             int64_t* places, int64_t n) {
  const int64_t i = gpu::first_index();
  if (i >= n) return;
  const int64_t v = index[i];
  places[starts[v] + atomicAdd(&cursors[v], 1)] = i;
}

__global__ void rank_kernel(const int64_t* index, const int64_t* starts, const int64_t* places,
                            int64_t* order, int64_t n) {
  const int64_t k = gpu::first_index();
  if (k >= n) return;
  const int64_t i = places[k], v = index[i];
  int64_t rank = 0;
  for (int64_t j = starts[v]; j < starts[v + 1]; ++j) rank += places[j] < i;
  order[starts[v] + rank] = i;
}

template <class T>
__global__ void sum_rows_kernel(const T* grad,          // (n, C)
                                const int64_t* starts,  // (V + 1)
                                const int64_t* order,   // (n)
                                T* table,               // (V, C)
                                int64_t C, int64_t padding_idx) {
  const int64_t v = blockIdx.x;
  const int64_t begin = starts[v], end = v == padding_idx ? begin : starts[v + 1];
  for (int64_t c = threadIdx.x; c < C; c += blockDim.x) {
    Compute<T> sum = 0;
    for (int64_t k = begin; k < end; ++k) sum += load<Compute<T>>(grad[order[k] * C + c]);
    table[v * C + c] = store<T>(sum);
  }
}

Tensor embedding_backward_cuda(const Tensor& grad, const Tensor& index, int64_t V,
                               int64_t padding_idx) {
  const int64_t C = grad.size(-1);
  const Tensor result = raw::empty({V, C}, grad.dtype(), grad.device());
  const Tensor rows = checked_index(index, V, false, "embedding");
  if (result.numel() == 0) return result;
  const Tensor dense = contiguous(grad);
  const int64_t n = rows.numel();
  const Device& device = grad.device();
  const Tensor counts = raw::zeros({V}, kI32, device), cursors = raw::empty({V}, kI32, device);
  const Tensor starts = raw::empty({V + 1}, kI64, device);
  const Tensor places = raw::empty({n}, kI64, device), order = raw::empty({n}, kI64, device);
  const auto config = [&](int64_t threads) {
    return gpu::LaunchConfig{
        .name = "embedding_backward", .grid = gpu::blocks(threads, kBlock), .block = kBlock};
  };
  int64_t* const start = starts.data_as<int64_t>();
  const int64_t* const row = rows.data_as<int64_t>();
  if (n > 0) gpu::launch(config(n), count_kernel, row, counts.data_as<int>(), n);
  gpu::launch({.name = "embedding_backward", .grid = 1, .block = 1024}, scan_counts_kernel,
              counts.data_as<int>(), start, cursors.data_as<int>(), V);
  if (n > 0) {
    gpu::launch(config(n), place_kernel, row, start, cursors.data_as<int>(),
                places.data_as<int64_t>(), n);
    gpu::launch(config(n), rank_kernel, row, start, places.data_as<int64_t>(),
                order.data_as<int64_t>(), n);
  }
  dispatch_floating(grad.dtype(), "embedding", [&]<class T>() {
    gpu::launch({.name = "embedding_backward",
                 .grid = static_cast<unsigned>(V),
                 .block = row_threads(C) < 256 ? row_threads(C) : 256},
                sum_rows_kernel<T>, dense.data_as<T>(), start, order.data_as<int64_t>(),
                result.data_as<T>(), C, padding_idx);
  });
  return result;
}

}  // namespace

void register_embedding() { cuda_form<embedding_backward> = embedding_backward_cuda; }

}  // namespace tessera::kernels
