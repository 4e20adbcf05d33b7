#include <tessera/core/kernels/embedding.h>

#include <tessera/core/cuda/launch.h>
#include <tessera/core/dispatch.h>
#include <tessera/core/factory.h>
#include <tessera/core/kernels/copy.h>
#include <tessera/core/kernels/device_sort.h>
#include <tessera/core/kernels/index.h>
#include <tessera/core/kernels/on_device.h>
#include <tessera/core/kernels/rows.cuh>
#include <tessera/core/kernels/strided.cuh>

namespace tessera::kernels {
namespace {

constexpr int kBlock = 256;

// [Note: deterministic embedding gradient] Positions are sorted by their row of the table and stay
// in order within one. Each row of the table is summed by one block in this order, without atomics.

// starts[v]: how many of the sorted rows are smaller than v; v up to V.
__global__ void starts_kernel(const int32_t* sorted, int64_t* starts, int64_t n, int64_t V) {
  const int64_t v = gpu::first_index();
  if (v > V) return;
  int64_t low = 0, high = n;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (sorted[middle] < v) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  starts[v] = low;
}

template <class T>
__global__ void sum_rows_kernel(const T* grad,          // (n, C)
                                const int64_t* starts,  // (V + 1)
                                const int32_t* order,   // (n)
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
  const SortedPlaces sorted = sort_places(rows, V);
  const Tensor starts = raw::empty({V + 1}, kI64, grad.device());
  gpu::launch({.name = "embedding_backward", .grid = gpu::blocks(V + 1, kBlock), .block = kBlock},
              starts_kernel, sorted.places.data_as<int32_t>(), starts.data_as<int64_t>(),
              rows.numel(), V);
  dispatch_floating(grad.dtype(), "embedding", [&]<class T>() {
    gpu::launch({.name = "embedding_backward",
                 .grid = static_cast<unsigned>(V),
                 .block = row_threads(C) < 256 ? row_threads(C) : 256},
                sum_rows_kernel<T>, dense.data_as<T>(), starts.data_as<int64_t>(),
                sorted.order.data_as<int32_t>(), result.data_as<T>(), C, padding_idx);
  });
  return result;
}

// ---- Rotary positions ---------------------------------------------------------------------------

// A thread turns kPairs neighbouring pairs. The walk goes over groups of pairs: y, x, cos, sin.
template <class T, int kPairs>
__global__ void __launch_bounds__(kBlock)
    rotary_kernel(T* y, const T* x, const Compute<T>* cos, const Compute<T>* sin, int64_t half,
                  bool interleaved, bool inverse, const DeviceWalk<4> walk) {
  using C = Compute<T>;
  const int64_t i = gpu::first_index();
  if (i >= walk.numel) return;
  int64_t at[4];
  walk.offsets(i, at);
  // Where the pairs' elements lie among those of the two vectors that are read.
  const int64_t second = interleaved ? kPairs : half;
  gpu::Vector<T, kPairs> parts[2] = {gpu::load_vector<kPairs>(x + at[1]),
                                     gpu::load_vector<kPairs>(x + at[1] + second)};
  const auto cosines = gpu::load_vector<kPairs>(cos + at[2]);
  const auto sines = gpu::load_vector<kPairs>(sin + at[3]);
  for (int p = 0; p < kPairs; ++p) {
    T& first_part = interleaved ? parts[2 * p / kPairs].values[2 * p % kPairs] : parts[0].values[p];
    T& second_part =
        interleaved ? parts[(2 * p + 1) / kPairs].values[(2 * p + 1) % kPairs] : parts[1].values[p];
    const C a = load<C>(first_part), b = load<C>(second_part);
    const C c = cosines.values[p], s = inverse ? -sines.values[p] : sines.values[p];
    first_part = store<T>(a * c - b * s);
    second_part = store<T>(a * s + b * c);
  }
  gpu::store_vector(y + at[0], parts[0]);
  gpu::store_vector(y + at[0] + second, parts[1]);
}

Tensor rotary_cuda(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved,
                   bool inverse) {
  const Tensor source = x.stride(-1) == 1 ? x : contiguous(x);
  Tensor result = raw::empty_like(source);
  if (result.stride(-1) != 1) result = raw::empty(x.shape(), x.dtype(), x.device());
  if (x.numel() == 0) return result;
  const int last = x.dim() - 1;
  const int64_t half = x.size(-1) / 2;
  dispatch_floating(x.dtype(), "rotary_embedding", [&]<class T>() {
    using C = Compute<T>;
    const auto table = [](const Tensor& angles) {
      return contiguous(angles.dtype() == dtype_of<C> ? angles : convert(angles, dtype_of<C>));
    };
    const Tensor cosines = table(cos), sines = table(sin);
    Shape angles = x.shape();
    angles[last] = half;
    Shape strides[4] = {result.strides(), source.strides(),
                        broadcast_strides(cos.shape(), cosines.strides(), angles),
                        broadcast_strides(sin.shape(), sines.strides(), angles)};
    TS_CHECK_SHAPE(half == 1 || (strides[2][last] == 1 && strides[3][last] == 1),
                   "rotary_embedding", "cos and sin need ", half, " angles in a row; got ", cos,
                   " and ", sin);
    // Four pairs a thread where every group of them is aligned.
    constexpr int kPairs = 4;
    bool vectors = half % kPairs == 0 && is_aligned(source.data()) && is_aligned(result.data()) &&
                   is_aligned(cosines.data()) && is_aligned(sines.data());
    for (const Shape& stride : strides) {
      for (int d = 0; d < last; ++d) vectors = vectors && stride[d] % kPairs == 0;
    }
    const int pairs = vectors ? kPairs : 1;
    angles[last] = half / pairs;
    for (Shape& stride : strides) stride[last] = pairs;
    if (interleaved) strides[0][last] = strides[1][last] = 2 * pairs;
    const Walk walk(angles, strides);
    const auto run = [&](auto* kernel) {
      gpu::launch(
          {.name = "rotary_embedding", .grid = gpu::blocks(walk.numel, kBlock), .block = kBlock},
          kernel, result.data_as<T>(), source.data_as<T>(), cosines.data_as<C>(),
          sines.data_as<C>(), half, interleaved, inverse, DeviceWalk<4>(walk));
    };
    vectors ? run(rotary_kernel<T, kPairs>) : run(rotary_kernel<T, 1>);
  });
  return result;
}

}  // namespace

void register_embedding() {
  cuda_form<embedding_backward> = embedding_backward_cuda;
  cuda_form<rotary> = rotary_cuda;
}

}  // namespace tessera::kernels
