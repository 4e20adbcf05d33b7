#include <tessera/core/kernels/embedding/embedding.h>

#include <algorithm>

#include <tessera/core/cuda/launch.h>
#include <tessera/core/dispatch.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/functors.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/elementwise/elementwise.h>
#include <tessera/core/kernels/index/index.h>
#include <tessera/core/kernels/sort/device_sort.h>
#include <tessera/core/kernels/common/rows.cuh>
#include <tessera/core/kernels/common/strided.cuh>
#include <tessera/core/kernels/common/vector_lanes.cuh>

namespace tessera::kernels {
namespace {

constexpr int kBlock = 256;

// A thread a vector of a row: columns are vectors in a row, period those rows of `other` that
// repeat.
template <class T, int kWidth, class Word>
__global__ void __launch_bounds__(kBlock)
    embedding_add_kernel(const int64_t* places, const T* weight, const T* other, T* y,
                         int64_t total, const DivisorOf<Word> columns,
                         const DivisorOf<Word> period) {
  using A = Compute<T>;
  const int64_t i = gpu::first_index();
  if (i >= total) return;
  const Word row = columns.quotient(static_cast<Word>(i));
  const int64_t C = static_cast<int64_t>(columns.value) * kWidth;
  const int64_t c = (i - static_cast<int64_t>(row) * static_cast<int64_t>(columns.value)) * kWidth;
  const Word repeated = row - period.quotient(row) * period.value;
  A sums[kWidth], added[kWidth];
  unpack(gpu::load_vector<kWidth>(weight + places[row] * C + c), sums);
  unpack(gpu::load_vector<kWidth>(other + static_cast<int64_t>(repeated) * C + c), added);
  TS_UNROLL
  for (int j = 0; j < kWidth; ++j) sums[j] = fn::Add{}(sums[j], added[j]);
  gpu::store_vector(y + i * kWidth, pack<T>(sums));
}

// Rows of `other`, one after the other, that repeat below those of a result of `shape`; 0: they are
// laid out otherwise.
int64_t period_of(const Tensor& other, const Shape& shape) {
  if (!other.is_contiguous() || other.size(-1) != shape.back()) return 0;
  int d = 0;
  while (d < other.dim() - 1 && other.shape()[d] == 1) ++d;
  for (int i = d; i < other.dim(); ++i) {
    if (other.shape()[i] != shape[shape.size() - other.dim() + i]) return 0;
  }
  return other.numel() / shape.back();
}

Tensor embedding_add_cuda(const Tensor& index, const Tensor& weight, const Tensor& other) {
  Shape shape = index.shape();
  const int64_t C = weight.size(1);
  shape.push_back(C);
  const int64_t n = index.numel(), period = n * C == 0 ? 0 : period_of(other, shape);
  if (period == 0 || !is_floating(weight.dtype())) {
    const Tensor result = embedding(index, weight);
    binary_into<fn::Add>(result, result, other);
    return result;
  }
  const Tensor places = checked_index(index, weight.size(0), false, "embedding");
  const Tensor table = contiguous(weight);
  const Tensor result = raw::empty(shape, weight.dtype(), weight.device());
  dispatch_floating(weight.dtype(), "embedding_add", [&]<class T>() {
    constexpr int kMost = 16 / sizeof(T);
    const bool vectors = C % kMost == 0 && is_aligned(table.data()) && is_aligned(other.data());
    const auto run = [&]<int kWidth, class Word>() {
      const int64_t total = n * C / kWidth, row = C * static_cast<int64_t>(sizeof(T));
      gpu::launch({.name = "embedding_add",
                   .grid = gpu::blocks(total, kBlock),
                   .block = kBlock,
                   .traffic = {n * 8 + (std::min(n, table.size(0)) + period) * row, n * row, true}},
                  embedding_add_kernel<T, kWidth, Word>, places.data_as<int64_t>(),
                  table.data_as<T>(), other.data_as<T>(), result.data_as<T>(), total,
                  DivisorOf<Word>(static_cast<Word>(C / kWidth)),
                  DivisorOf<Word>(static_cast<Word>(period)));
    };
    if (n * C > INT32_MAX) {
      vectors ? run.template operator()<kMost, uint64_t>() : run.template operator()<1, uint64_t>();
    } else {
      vectors ? run.template operator()<kMost, uint32_t>() : run.template operator()<1, uint32_t>();
    }
  });
  return result;
}

// [Note: deterministic embedding gradient] Positions are sorted by their row of the table and stay
// in order within one. Blocks take segments of kSegment sorted positions, which a row with many
// positions spans several of: its parts are added up in their order by a second launch. Each number
// is summed by one thread at a time, without atomics, in an order that the index decides.
constexpr int64_t kSegment = 64;

// Of a segment: the sum of the positions that continue the row of the segment before, and of those
// at its end whose row goes on in the next. A segment of one row that does both has the first only.
constexpr int64_t kHead = 0, kTail = 1, kParts = 2;

// What the columns of a row of the table become: the sums, added to what is there or not.
template <class T, int kWidth>
TS_DEVICE void store_row(T* row, const Compute<T> (&sums)[kWidth], bool adds) {
  Compute<T> values[kWidth];
  if (adds) {
    unpack(gpu::load_vector<kWidth>(row), values);
    TS_UNROLL
    for (int j = 0; j < kWidth; ++j) values[j] += sums[j];
  } else {
    TS_UNROLL
    for (int j = 0; j < kWidth; ++j) values[j] = sums[j];
  }
  gpu::store_vector(row, pack<T>(values));
}

// places, order: (n). partials: (segments, kParts, C). Threads have kWidth columns each.
template <class T, int kWidth>
__global__ void __launch_bounds__(kBlock)
    sum_segments_kernel(const T* grad,  // (n, C)
                        const int32_t* places, const int32_t* order,
                        T* table,  // (V, C), zeros unless it adds
                        Compute<T>* partials, int64_t n, int64_t C, int64_t padding_idx,
                        bool adds) {
  using A = Compute<T>;
  TS_SHARED(int32_t, own_places, kSegment);
  TS_SHARED(int32_t, own_order, kSegment);
  const int64_t begin = int64_t{blockIdx.x} * kSegment;
  const int count = static_cast<int>(n - begin < kSegment ? n - begin : kSegment);
  for (int k = static_cast<int>(threadIdx.x); k < count; k += static_cast<int>(blockDim.x)) {
    own_places[k] = places[begin + k];
    own_order[k] = order[begin + k];
  }
  const bool continues = begin > 0 && places[begin - 1] == places[begin];
  const bool goes_on = begin + count < n && places[begin + count] == places[begin + count - 1];
  __syncthreads();
  const int64_t c = (int64_t{blockIdx.y} * blockDim.x + threadIdx.x) * kWidth;
  if (c >= C) return;
  A sums[kWidth] = {};
  bool is_first = true;      // the first row of the segment
  constexpr int kAhead = 4;  // rows that are read before they are added
  for (int k0 = 0; k0 < count; k0 += kAhead) {
    gpu::Vector<T, kWidth> rows[kAhead];
    TS_UNROLL
    for (int a = 0; a < kAhead; ++a) {
      const int k = k0 + a < count ? k0 + a : count - 1;
      rows[a] = gpu::load_vector<kWidth>(grad + own_order[k] * C + c);
    }
    TS_UNROLL
    for (int a = 0; a < kAhead; ++a) {
      const int k = k0 + a;
      if (k >= count) continue;
      TS_UNROLL
      for (int j = 0; j < kWidth; ++j) sums[j] += load<A>(rows[a].values[j]);
      const bool is_last = k + 1 == count;
      if (!is_last && own_places[k + 1] == own_places[k]) continue;
      // The end of a row, or of its part here.
      const bool is_head = is_first && continues, is_tail = is_last && goes_on;
      if (is_head || is_tail) {
        A* const to = partials + (blockIdx.x * kParts + (is_head ? kHead : kTail)) * C + c;
        gpu::Vector<A, kWidth> part;
        TS_UNROLL
        for (int j = 0; j < kWidth; ++j) part.values[j] = sums[j];
        gpu::store_vector(to, part);
      } else if (own_places[k] != padding_idx) {
        store_row(table + own_places[k] * C + c, sums, adds);
      }
      is_first = false;
      TS_UNROLL
      for (int j = 0; j < kWidth; ++j) sums[j] = A(0);
    }
  }
}

// A block for each segment: where a row begins in it and goes on, its parts in their order.
template <class T, int kWidth>
__global__ void __launch_bounds__(kBlock)
    join_segments_kernel(const int32_t* places, T* table, const Compute<T>* partials, int64_t n,
                         int64_t C, int64_t padding_idx, bool adds) {
  const int64_t segment = blockIdx.x, begin = segment * kSegment, end = begin + kSegment;
  if (end >= n || places[end] != places[end - 1]) return;
  const int64_t place = places[end - 1];
  const bool began_before = begin > 0 && places[begin - 1] == place;
  if (began_before || place == padding_idx) return;
  int64_t last = segment + 1;  // segments from here to `last` hold the row
  while ((last + 1) * kSegment < n && places[(last + 1) * kSegment] == place) ++last;
  const int64_t c = (int64_t{blockIdx.y} * blockDim.x + threadIdx.x) * kWidth;
  if (c >= C) return;
  auto sums = gpu::load_vector<kWidth>(partials + (segment * kParts + kTail) * C + c);
  for (int64_t s = segment + 1; s <= last; ++s) {
    const auto part = gpu::load_vector<kWidth>(partials + (s * kParts + kHead) * C + c);
    TS_UNROLL
    for (int j = 0; j < kWidth; ++j) sums.values[j] += part.values[j];
  }
  store_row(table + place * C + c, sums.values, adds);
}

Tensor embedding_backward_cuda(const Tensor& grad, const Tensor& index, int64_t V,
                               int64_t padding_idx, const Tensor& onto) {
  const int64_t C = grad.size(-1);
  const bool adds = onto.defined();
  const Tensor result = adds ? onto : raw::zeros({V, C}, grad.dtype(), grad.device());
  const Tensor rows = checked_index(index, V, false, "embedding");
  const int64_t n = rows.numel();
  if (result.numel() == 0 || n == 0) return result;
  const Tensor dense = contiguous(grad);
  const SortedPlaces sorted = sort_places(rows, V);
  const int64_t segments = (n + kSegment - 1) / kSegment;
  dispatch_floating(grad.dtype(), "embedding", [&]<class T>() {
    using A = Compute<T>;
    constexpr int kWidth = 16 / sizeof(T);
    const Tensor partials = raw::empty({segments, kParts, C}, dtype_of<A>, grad.device());
    const bool vectors = C % kWidth == 0 && is_aligned(dense.data()) && is_aligned(result.data());
    const int64_t columns = vectors ? C / kWidth : C;
    const int64_t row = C * static_cast<int64_t>(sizeof(T));
    const int64_t parts = partials.numel() * static_cast<int64_t>(sizeof(A));
    gpu::LaunchConfig config{
        .name = "embedding_backward",
        .grid = dim3(static_cast<unsigned>(segments), gpu::blocks(columns, kBlock)),
        .block = static_cast<unsigned>(columns < kBlock ? (columns + 31) / 32 * 32 : kBlock),
        .traffic = {n * (row + 8) + (adds ? std::min(n, V) * row : 0), std::min(n, V) * row + parts,
                    true}};
    gpu::launch(config, vectors ? sum_segments_kernel<T, kWidth> : sum_segments_kernel<T, 1>,
                dense.data_as<T>(), sorted.places.data_as<int32_t>(),
                sorted.order.data_as<int32_t>(), result.data_as<T>(), partials.data_as<A>(), n, C,
                padding_idx, adds);
    const int64_t joined = std::min(segments, V) * row;
    config.traffic = {segments * 12 + parts + (adds ? joined : 0), joined, true};
    gpu::launch(config, vectors ? join_segments_kernel<T, kWidth> : join_segments_kernel<T, 1>,
                sorted.places.data_as<int32_t>(), result.data_as<T>(),
                static_cast<const A*>(partials.data()), n, C, padding_idx, adds);
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
  TS_UNROLL
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
    // The most pairs a thread of which every group is aligned.
    constexpr int kMost = sizeof(T) == 2 ? 8 : 4;
    const auto fits = [&](int pairs) {
      bool whole = half % pairs == 0 && is_aligned(source.data()) && is_aligned(result.data()) &&
                   is_aligned(cosines.data()) && is_aligned(sines.data());
      for (const Shape& stride : strides) {
        for (int d = 0; d < last; ++d) whole = whole && stride[d] % pairs == 0;
      }
      return whole;
    };
    const int pairs = fits(kMost) ? kMost : fits(4) ? 4 : 1;
    angles[last] = half / pairs;
    for (Shape& stride : strides) stride[last] = pairs;
    if (interleaved) strides[0][last] = strides[1][last] = 2 * pairs;
    const Walk walk(angles, strides);
    const auto run = [&](auto* kernel) {
      const int64_t group = pairs * static_cast<int64_t>(sizeof(T));
      const int64_t of_angles = pairs * static_cast<int64_t>(sizeof(C));
      gpu::launch({.name = "rotary_embedding",
                   .grid = gpu::blocks(walk.numel, kBlock),
                   .block = kBlock,
                   .traffic = {2 * walk.distinct(1) * group +
                                   (walk.distinct(2) + walk.distinct(3)) * of_angles,
                               2 * walk.distinct(0) * group}},
                  kernel, result.data_as<T>(), source.data_as<T>(), cosines.data_as<C>(),
                  sines.data_as<C>(), half, interleaved, inverse, DeviceWalk<4>(walk));
    };
    pairs == kMost ? run(rotary_kernel<T, kMost>)
    : pairs == 4   ? run(rotary_kernel<T, 4>)
                   : run(rotary_kernel<T, 1>);
  });
  return result;
}

}  // namespace

void register_embedding() {
  cuda_kernel<embedding_add> = embedding_add_cuda;
  cuda_kernel<embedding_backward> = embedding_backward_cuda;
  cuda_kernel<rotary> = rotary_cuda;
}

}  // namespace tessera::kernels
