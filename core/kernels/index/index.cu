#include <tessera/core/kernels/index/index.h>

#include <algorithm>
#include <string>

#include <tessera/core/cuda/device_errors.h>
#include <tessera/core/cuda/launch.h>
#include <tessera/core/dispatch.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/functors.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/elementwise/elementwise.h>
#include <tessera/core/kernels/reduce/reduce.h>
#include <tessera/core/kernels/sort/device_sort.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/core/kernels/common/rows.cuh>
#include <tessera/core/kernels/common/strided.cuh>
#include <tessera/core/kernels/reduce/block_scan.cuh>

namespace tessera::kernels {
namespace {

constexpr int kBlock = 256;

// ---- Indices ------------------------------------------------------------------------------------

template <class Index>
__global__ void check_index_kernel(const Index* index, int64_t* result, int64_t n, int64_t low,
                                   int64_t high, const char* op, gpu::DeviceErrorWord* errors) {
  const int64_t i = gpu::first_index();
  if (i >= n) return;
  const int64_t value = index[i];
  if (value < low || value >= high) {
    if (atomicCAS(&errors->found, 0, 1) == 0) {
      errors->op = op;
      errors->position = i;
      errors->value = value;
      errors->low = low;
      errors->high = high;
    }
    result[i] = 0;
  } else {
    result[i] = value < 0 ? value + high : value;
  }
}

Tensor checked_index_cuda(const Tensor& index, int64_t size, bool negative,
                          std::string_view where) {
  TS_CHECK_DTYPE(index.dtype() == kI64 || index.dtype() == kI32, where,
                 "expects an index of dtype i64 or i32; got ", index, "; convert with to(kI64)");
  const Tensor result = raw::empty(index.shape(), kI64, index.device());
  if (index.numel() == 0) return result;
  TS_CHECK_INDEX(size > 0, where, "the indices ", index, " have nothing to point at");
  const Tensor dense = contiguous(index);
  const auto run = [&]<class Index>() {
    gpu::launch(
        {.name = "check_index",
         .grid = gpu::blocks(index.numel(), kBlock),
         .block = kBlock,
         .traffic = {index.numel() * static_cast<int64_t>(sizeof(Index)), index.numel() * 8}},
        check_index_kernel<Index>, dense.data_as<Index>(), result.data_as<int64_t>(), index.numel(),
        negative ? -size : 0, size, where.data(), gpu::device_error_word());
  };
  index.dtype() == kI64 ? run.operator()<int64_t>() : run.operator()<int32_t>();
  return result;
}

// ---- Rows and elements, moved as bits -----------------------------------------------------------

// result[b, n, a] = x[b, positions[n], a], a thread a unit of up to 16 bytes.
template <class T>
__global__ void select_rows_kernel(const T* x, const int64_t* positions, T* result, int64_t total,
                                   int64_t M, int64_t N, int64_t A, const Divisor by_A,
                                   const Divisor by_N) {
  const int64_t i = gpu::first_index();
  if (i >= total) return;
  int64_t row, b;  // row = b N + n
  if (total <= INT32_MAX) {
    row = by_A.quotient(static_cast<uint32_t>(i));
    b = by_N.quotient(static_cast<uint32_t>(row));
  } else {
    row = i / A;
    b = row / N;
  }
  result[i] = x[(b * M + positions[row - b * N]) * A + i - row * A];
}

Tensor select_rows_cuda(const Tensor& x, const Tensor& positions) {
  const int64_t B = x.size(0), M = x.size(1), A = x.size(2), N = positions.numel();
  const Tensor result = raw::empty({B, N, A}, x.dtype(), x.device());
  if (result.numel() == 0) return result;
  // The widest unit that rows and addresses allow.
  const int64_t bytes = size_of(x.dtype());
  int64_t unit = bytes;
  while (unit < 16 && A * bytes % (2 * unit) == 0 && is_aligned(x.data())) unit *= 2;
  const int64_t width = A * bytes / unit, total = B * N * width;
  const auto run = [&]<class T>() {
    // Divisors count where the total, and so each of them, is below 2^31.
    const auto divisor = [](int64_t n) {
      return Divisor(n > INT32_MAX ? 1 : static_cast<uint32_t>(n));
    };
    gpu::launch({.name = "index_select",
                 .grid = gpu::blocks(total, kBlock),
                 .block = kBlock,
                 .traffic = {N * 8 + B * std::min(N, M) * A * bytes, B * N * A * bytes, true}},
                select_rows_kernel<T>, static_cast<const T*>(x.data()),
                positions.data_as<int64_t>(), static_cast<T*>(result.data()), total, M, N, width,
                divisor(width), divisor(N));
  };
  if (unit == 16) {
    run.template operator()<gpu::Vector<uint64_t, 2>>();
  } else {
    dispatch_size(unit, run);
  }
  return result;
}

// [Note: order of writes] Where several indices name one place they take effect in their order:
// positions are sorted stably, and one thread takes all that go to one place.

// x[b, positions[n], a] = the last source[b, n, a], or += all of them where Adds. A thread an
// element of the source, of which those at the head of a run of equal positions work.
template <class T, bool kAdds>
__global__ void write_rows_kernel(T* x, const int32_t* places, const int32_t* order,
                                  const T* source, int64_t total, int64_t M, int64_t N, int64_t A) {
  const int64_t i = gpu::first_index();
  if (i >= total) return;
  const int64_t a = i % A, first = i / A % N, b = i / A / N;
  const int32_t place = places[first];
  if constexpr (kAdds) {
    if (first > 0 && places[first - 1] == place) return;
    T& target = x[(b * M + place) * A + a];
    Compute<T> sum = load<Compute<T>>(target);
    for (int64_t n = first; n < N && places[n] == place; ++n) {
      sum = fn::Add{}(sum, load<Compute<T>>(source[(b * N + order[n]) * A + a]));
    }
    target = store<T>(sum);
  } else {
    if (first + 1 < N && places[first + 1] == place) return;
    x[(b * M + place) * A + a] = source[(b * N + order[first]) * A + a];
  }
}

template <class T, bool kAdds>
void launch_write_rows(const char* where, const Tensor& x, const SortedPlaces& sorted,
                       const Tensor& source) {
  const int64_t total = source.numel(), N = source.size(1);
  constexpr auto kSize = static_cast<int64_t>(sizeof(T));
  const int64_t changed = x.size(0) * std::min(N, x.size(1)) * x.size(2) * kSize;
  gpu::launch({.name = where,
               .grid = gpu::blocks(total, kBlock),
               .block = kBlock,
               .traffic = {N * 8 + total * kSize + (kAdds ? changed : 0), changed, true}},
              write_rows_kernel<T, kAdds>, static_cast<T*>(x.data()),
              sorted.places.data_as<int32_t>(), sorted.order.data_as<int32_t>(),
              static_cast<const T*>(source.data()), total, x.size(1), source.size(1), x.size(2));
}

void put_rows_cuda(const Tensor& x, const Tensor& positions, const Tensor& source) {
  if (source.numel() == 0) return;
  const SortedPlaces sorted = sort_places(positions, x.size(1));
  dispatch_size(size_of(x.dtype()),
                [&]<class T>() { launch_write_rows<T, false>("index_put", x, sorted, source); });
}

void add_rows_cuda(const Tensor& x, const Tensor& positions, const Tensor& source) {
  if (source.numel() == 0) return;
  const SortedPlaces sorted = sort_places(positions, x.size(1));
  // Sums of f16 and bf16 are f32 inside and rounded once, by the thread that makes them.
  const Tensor values = source.dtype() == x.dtype() ? source : convert(source, x.dtype());
  dispatch_numeric_and_bool(x.dtype(), "index_add", [&]<class T>() {
    launch_write_rows<T, true>("index_add", x, sorted, values);
  });
}

// result[.., i, ..] = x[.., index[.., i, ..], ..]; the walk has result, index and x, whose stride
// along the dimension is left out.
template <class T>
__global__ void gather_kernel(const T* x, const int64_t* index, T* result, int64_t stride,
                              const DeviceWalk<3> walk) {
  const int64_t i = gpu::first_index();
  if (i >= walk.numel) return;
  int64_t at[3];
  walk.offsets(i, at);
  result[at[0]] = x[at[2] + index[at[1]] * stride];
}

Shape without(const Shape& strides, int dim) {
  Shape result = strides;
  if (result.size() > 0) result[dim] = 0;
  return result;
}

Tensor gather_cuda(const Tensor& x, int dim, const Tensor& index) {
  const Tensor result = raw::empty(index.shape(), x.dtype(), x.device());
  const Tensor places = checked_index(index, x.dim() == 0 ? 1 : x.shape()[dim], false, "gather");
  if (result.numel() == 0) return result;
  const Shape strides[3] = {result.strides(), places.strides(), without(x.strides(), dim)};
  const Walk walk(index.shape(), strides);
  dispatch_size(size_of(x.dtype()), [&]<class T>() {
    constexpr auto kSize = static_cast<int64_t>(sizeof(T));
    gpu::launch({.name = "gather",
                 .grid = gpu::blocks(walk.numel, kBlock),
                 .block = kBlock,
                 .traffic = {places.numel() * 8 + std::min(result.numel(), x.numel()) * kSize,
                             result.numel() * kSize, true}},
                gather_kernel<T>, static_cast<const T*>(x.data()), places.data_as<int64_t>(),
                static_cast<T*>(result.data()), x.dim() == 0 ? 0 : x.strides()[dim],
                DeviceWalk<3>(walk));
  });
  return result;
}

// Many lines, or short ones: a thread a line, in the order of the index.
template <class T, bool kAdds>
__global__ void scatter_lines_kernel(T* x, const int64_t* index, const T* source, int64_t n,
                                     int64_t x_stride, int64_t index_stride, int64_t source_stride,
                                     const DeviceWalk<3> lines) {
  const int64_t line = gpu::first_index();
  if (line >= lines.numel) return;
  int64_t at[3];
  lines.offsets(line, at);
  for (int64_t i = 0; i < n; ++i) {
    T& target = x[at[0] + index[at[1] + i * index_stride] * x_stride];
    const T value = source[at[2] + i * source_stride];
    if constexpr (kAdds) {
      target = store<T>(fn::Add{}(load<Compute<T>>(target), load<Compute<T>>(value)));
    } else {
      target = value;
    }
  }
}

// Few long lines: elements are sorted by their place, see [Note: order of writes]. Elements of a
// line stand in their order, and places of different lines differ.
__global__ void scatter_places_kernel(const int64_t* index, int64_t* places, int64_t x_stride,
                                      const DeviceWalk<2> walk) {
  const int64_t i = gpu::first_index();
  if (i >= walk.numel) return;
  int64_t at[2];  // in x without its dimension, in the index
  walk.offsets(i, at);
  places[i] = at[0] + index[at[1]] * x_stride;
}

template <class T, bool kAdds>
__global__ void scatter_sorted_kernel(T* x, const int32_t* places, const int32_t* order,
                                      const T* source, const DeviceWalk<1> walk) {
  const int64_t i = gpu::first_index();
  if (i >= walk.numel) return;
  const int32_t place = places[i];
  int64_t at[1];
  if constexpr (kAdds) {
    if (i > 0 && places[i - 1] == place) return;
    Compute<T> sum = load<Compute<T>>(x[place]);
    for (int64_t k = i; k < walk.numel && places[k] == place; ++k) {
      walk.offsets(order[k], at);
      sum = fn::Add{}(sum, load<Compute<T>>(source[at[0]]));
    }
    x[place] = store<T>(sum);
  } else {
    if (i + 1 < walk.numel && places[i + 1] == place) return;
    walk.offsets(order[i], at);
    x[place] = source[at[0]];
  }
}

// Below this a thread a line would leave the GPU idle.
constexpr int64_t kManyLines = 1 << 14;
constexpr int64_t kShortLine = 16;

// A walk in row-major order, which a Walk of an operand in another one is not.
template <size_t kOperands>
Walk in_order(const Shape& shape, const Shape (&strides)[kOperands]) {
  Shape all[kOperands + 1] = {contiguous_strides(shape)};
  for (size_t k = 0; k < kOperands; ++k) all[k + 1] = strides[k];
  Walk walk(shape, {all, kOperands + 1});
  for (size_t k = 0; k < kOperands; ++k) {
    for (int d = 0; d < walk.dims; ++d) walk.strides[k][d] = walk.strides[k + 1][d];
  }
  return walk;
}

template <class T, bool kAdds>
void launch_scatter(const char* where, const Tensor& x, int dim, const Tensor& places,
                    const Tensor& source) {
  Shape lines = places.shape();
  const bool scalar = x.dim() == 0;
  const int64_t n = scalar ? 1 : places.shape()[dim], total = places.numel();
  T* const data = static_cast<T*>(x.data());
  const T* const values = static_cast<const T*>(source.data());
  const int64_t stride = scalar ? 0 : x.strides()[dim];
  constexpr auto kSize = static_cast<int64_t>(sizeof(T));
  if (n > kShortLine && total / n < kManyLines && x.is_contiguous() && x.numel() <= INT32_MAX &&
      total <= INT32_MAX) {
    const Tensor targets = raw::empty({total}, kI64, x.device());
    gpu::launch({.name = where,
                 .grid = gpu::blocks(total, kBlock),
                 .block = kBlock,
                 .traffic = {total * 8, total * 8}},
                scatter_places_kernel, places.data_as<int64_t>(), targets.data_as<int64_t>(),
                stride,
                DeviceWalk<2>(in_order<2>(lines, {without(x.strides(), dim), places.strides()})));
    const SortedPlaces sorted = sort_places(targets, x.numel());
    const int64_t changed = std::min(total, x.numel()) * kSize;
    gpu::launch({.name = where,
                 .grid = gpu::blocks(total, kBlock),
                 .block = kBlock,
                 .traffic = {total * (8 + kSize) + (kAdds ? changed : 0), changed, true}},
                scatter_sorted_kernel<T, kAdds>, data, sorted.places.data_as<int32_t>(),
                sorted.order.data_as<int32_t>(), values,
                DeviceWalk<1>(in_order<1>(lines, {source.strides()})));
    return;
  }
  if (!scalar) lines[dim] = 1;
  const Shape strides[3] = {without(x.strides(), dim), without(places.strides(), dim),
                            without(source.strides(), dim)};
  const Walk walk(lines, strides);
  const int64_t changed = std::min(total, x.numel()) * kSize;
  gpu::launch({.name = where,
               .grid = gpu::blocks(walk.numel, kBlock),
               .block = kBlock,
               .traffic = {total * (8 + kSize) + (kAdds ? changed : 0), changed, true}},
              scatter_lines_kernel<T, kAdds>, data, places.data_as<int64_t>(), values, n, stride,
              scalar ? 0 : places.strides()[dim], scalar ? 0 : source.strides()[dim],
              DeviceWalk<3>(walk));
}

void scatter_cuda(const Tensor& x, int dim, const Tensor& index, const Tensor& source) {
  const Tensor places = checked_index(index, x.dim() == 0 ? 1 : x.shape()[dim], false, "scatter");
  if (index.numel() == 0) return;
  dispatch_size(size_of(x.dtype()),
                [&]<class T>() { launch_scatter<T, false>("scatter", x, dim, places, source); });
}

// Sums of f16 and bf16 are f32 inside and rounded once: calls add(x in the dtype of sums).
template <class F>
void with_sums(const Tensor& x, const F& add) {
  if (!is_low_precision(x.dtype())) return add(x);
  const Tensor sums = contiguous(convert(x, kF32));
  add(sums);
  copy_into(x, sums);
}

void scatter_add_cuda(const Tensor& x, int dim, const Tensor& index, const Tensor& source) {
  const Tensor places =
      checked_index(index, x.dim() == 0 ? 1 : x.shape()[dim], false, "scatter_add");
  if (index.numel() == 0) return;
  with_sums(x, [&](const Tensor& sums) {
    const Tensor values = source.dtype() == sums.dtype() ? source : convert(source, sums.dtype());
    dispatch_numeric_and_bool(sums.dtype(), "scatter_add", [&]<class T>() {
      launch_scatter<T, true>("scatter_add", sums, dim, places, values);
    });
  });
}

template <class T>
__global__ void triangle_kernel(const T* x, T* y, int64_t total, int64_t rows, int64_t columns,
                                int64_t diagonal, bool lower) {
  const int64_t i = gpu::first_index();
  if (i >= total) return;
  const int64_t column = i % columns, row = i / columns % rows;
  const bool kept = lower ? column <= row + diagonal : column >= row + diagonal;
  y[i] = kept ? x[i] : T(0);
}

Tensor triangle(const Tensor& x, int64_t diagonal, bool lower, const char* where) {
  TS_CHECK_SHAPE(x.dim() >= 2, where, "needs at least two dimensions; got ", x);
  const Tensor result = raw::empty(x.shape(), x.dtype(), x.device());
  if (x.numel() == 0) return result;
  const Tensor dense = contiguous(x);
  dispatch_size(size_of(x.dtype()), [&]<class T>() {
    // Of an element that becomes zero nothing is read.
    const int64_t bytes = x.numel() * static_cast<int64_t>(sizeof(T));
    const int64_t rows = x.size(-2), columns = x.size(-1), first = diagonal + (lower ? 1 : 0);
    // The sum of 1, 2, ..., each at most `columns`, up to `last`.
    const auto ramp = [&](int64_t last) {
      const int64_t rising = std::clamp(last, int64_t{0}, columns);
      return rising * (rising + 1) / 2 + std::max(last - columns, int64_t{0}) * columns;
    };
    const int64_t below = ramp(rows - 1 + first) - ramp(first - 1);
    const int64_t kept = lower ? below : rows * columns - below;
    gpu::launch({.name = where,
                 .grid = gpu::blocks(x.numel(), kBlock),
                 .block = kBlock,
                 .traffic = {bytes / (rows * columns) * kept, bytes}},
                triangle_kernel<T>, static_cast<const T*>(dense.data()),
                static_cast<T*>(result.data()), x.numel(), x.size(-2), x.size(-1), diagonal, lower);
  });
  return result;
}
Tensor tril_cuda(const Tensor& x, int64_t diagonal) { return triangle(x, diagonal, true, "tril"); }
Tensor triu_cuda(const Tensor& x, int64_t diagonal) { return triangle(x, diagonal, false, "triu"); }

// ---- What depends on the values -----------------------------------------------------------------

TS_DEVICE bool is_set(const void* x, DType dtype, int64_t i) {
  bool result = false;
  with_any_dtype(dtype, [&]<class T>() {
    const T value = static_cast<const T*>(x)[i];
    if constexpr (is_narrow_float<T>) {
      result = to_float(value) != 0;
    } else {
      result = value != T(0);
    }
  });
  return result;
}

constexpr int kTile = 8 * kBlock;  // elements whose set ones a block lists

__global__ void count_nonzero_kernel(const void* x, DType dtype, int64_t* counts, int64_t n) {
  TS_REDUCE_SLOT(int64_t, slot);
  const int64_t first = int64_t{blockIdx.x} * kTile;
  int64_t count = 0;
  for (int64_t i = first + threadIdx.x; i < first + kTile && i < n; i += kBlock) {
    count += is_set(x, dtype, i);
  }
  count = gpu::block_reduce(count, gpu::Plus{}, int64_t{0}, slot);
  if (threadIdx.x == 0) counts[blockIdx.x] = count;
}

struct Extents {
  int dims;
  int64_t sizes[kMaxDims];
};

// ends: running sums of the counts.
__global__ void list_nonzero_kernel(const void* x, DType dtype, const int64_t* ends,
                                    int64_t* coordinates, int64_t n, const Extents extents) {
  TS_REDUCE_SLOT(int64_t, slot);
  int64_t before = blockIdx.x > 0 ? ends[blockIdx.x - 1] : 0;
  const int64_t first = int64_t{blockIdx.x} * kTile;
  for (int64_t tile = first; tile < first + kTile && tile < n; tile += kBlock) {
    const int64_t i = tile + threadIdx.x;
    const int64_t own = i < n && is_set(x, dtype, i);
    const int64_t place = before + block_scan(own, gpu::Plus{}, slot) - own;
    before += slot[kBlock / gpu::kWarp - 1];
    if (own != 0) {
      int64_t rest = i;
      for (int d = extents.dims - 1; d >= 0; --d) {
        coordinates[place * extents.dims + d] = d == 0 ? rest : rest % extents.sizes[d];
        rest /= extents.sizes[d];
      }
    }
    __syncthreads();  // the next tile writes the slot
  }
}

// Its shape is a number that only the device knows: the host waits for it.
Tensor nonzero_cuda(const Tensor& x) {
  const int64_t n = x.numel();
  if (n == 0) return raw::empty({0, x.dim()}, kI64, x.device());
  const Tensor dense = contiguous(x);
  const unsigned blocks = gpu::blocks(n, kTile);
  const Tensor counts = raw::empty({int64_t{blocks}}, kI64, x.device());
  const int64_t bytes = n * size_of(x.dtype());
  gpu::launch(
      {.name = "nonzero", .grid = blocks, .block = kBlock, .traffic = {bytes, int64_t{blocks} * 8}},
      count_nonzero_kernel, dense.data(), x.dtype(), counts.data_as<int64_t>(), n);
  const Tensor ends = cumsum(counts, 0, kI64);
  const int64_t total = raw::select(ends, 0, int64_t{blocks} - 1).item<int64_t>();
  const Tensor result = raw::empty({total, x.dim()}, kI64, x.device());
  if (result.numel() == 0) return result;
  Extents extents{.dims = x.dim(), .sizes = {}};
  for (int d = 0; d < x.dim(); ++d) extents.sizes[d] = x.shape()[d];
  gpu::launch({.name = "nonzero",
               .grid = blocks,
               .block = kBlock,
               .traffic = {bytes + (int64_t{blocks} - 1) * 8, result.numel() * 8}},
              list_nonzero_kernel, dense.data(), x.dtype(), ends.data_as<int64_t>(),
              result.data_as<int64_t>(), n, extents);
  return result;
}

__global__ void one_hot_kernel(const int64_t* places, int64_t* result, int64_t total,
                               int64_t classes) {
  const int64_t i = gpu::first_index();
  if (i < total) result[i] = places[i / classes] == i % classes;
}

Tensor one_hot_cuda(const Tensor& x, int64_t num_classes) {
  TS_CHECK_DTYPE(x.dtype() == kI64 || x.dtype() == kI32, "one_hot",
                 "expects class indices of dtype i64 or i32; got ", x, "; convert with to(kI64)");
  TS_CHECK(num_classes >= -1 && num_classes != 0, "one_hot",
           "num_classes must be positive, or -1 to find it from the values; got ", num_classes);
  if (num_classes < 0) {
    TS_CHECK(x.numel() > 0, "one_hot", "num_classes cannot be found from the empty ", x,
             "; give it");
    Shape dims;
    for (int d = 0; d < x.dim(); ++d) dims.push_back(d);
    const int64_t largest = amax(x, dims, false).item<int64_t>();
    num_classes = largest < 0 ? 1 : largest + 1;
  }
  Shape shape = x.shape();
  shape.push_back(num_classes);
  const Tensor places = checked_index(x, num_classes, false, "one_hot");
  const Tensor result = raw::empty(shape, kI64, x.device());
  if (result.numel() == 0) return result;
  gpu::launch({.name = "one_hot",
               .grid = gpu::blocks(result.numel(), kBlock),
               .block = kBlock,
               .traffic = {places.numel() * 8, result.numel() * 8}},
              one_hot_kernel, places.data_as<int64_t>(), result.data_as<int64_t>(), result.numel(),
              num_classes);
  return result;
}

// A thread a value. Integers: the order of the atomic additions cannot be seen.
__global__ void count_values_kernel(const int64_t* values, unsigned long long* counts, int64_t n) {
  const int64_t i = gpu::first_index();
  if (i < n) atomicAdd(&counts[values[i]], 1ull);
}

// A block a bin: its run in the sorted values, found by bisection, in f64 and a fixed order.
template <class W, class S>
__global__ void sum_bins_kernel(const int32_t* values, const int32_t* order, const W* weights,
                                S* sums, int64_t n) {
  TS_REDUCE_SLOT(double, slot);
  const int64_t bin = blockIdx.x;
  const auto first_from = [&](int64_t value) {
    int64_t low = 0, high = n;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (values[middle] < value) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  };
  const int64_t begin = first_from(bin), end = first_from(bin + 1);
  double sum = 0;
  for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x) {
    sum += load<double>(weights[order[i]]);
  }
  sum = gpu::block_reduce(sum, gpu::Plus{}, 0.0, slot);
  if (threadIdx.x == 0) sums[bin] = static_cast<S>(sum);
}

Tensor bincount_cuda(const Tensor& x, const Tensor& weights, int64_t minlength) {
  TS_CHECK_SHAPE(x.dim() == 1, "bincount", "expects one dimension; got ", x, "; flatten it first");
  TS_CHECK_DTYPE(is_integral(x.dtype()), "bincount", "expects integers; got ", x);
  TS_CHECK(minlength >= 0, "bincount", "minlength must not be negative; got ", minlength);
  TS_CHECK_SHAPE(!weights.defined() || weights.shape() == x.shape(), "bincount",
                 "weights must have the shape of x; got ", weights, " for ", x);
  const int64_t n = x.numel();
  const Tensor values = contiguous(x.dtype() == kI64 ? x : convert(x, kI64));
  int64_t bins = minlength;
  if (n > 0) {
    const int64_t least = amin(values, {0}, false).item<int64_t>();
    TS_CHECK(least >= 0, "bincount", "values must not be negative; the least is ", least);
    const int64_t largest = amax(values, {0}, false).item<int64_t>();
    bins = largest >= bins ? largest + 1 : bins;
  }
  const DType dtype = !weights.defined() ? kI64 : weights.dtype() == kF32 ? kF32 : kF64;
  const Tensor result = raw::zeros({bins}, dtype, x.device());
  if (n == 0 || bins == 0) return result;
  if (!weights.defined()) {
    const int64_t counted = std::min(n, bins) * 8;
    gpu::launch({.name = "bincount",
                 .grid = gpu::blocks(n, kBlock),
                 .block = kBlock,
                 .traffic = {n * 8 + counted, counted, true}},
                count_values_kernel, values.data_as<int64_t>(),
                result.data_as<unsigned long long>(), n);
    return result;
  }
  const SortedPlaces sorted = sort_places(values, bins);
  const Tensor given = contiguous(weights);
  dispatch_numeric_and_bool(weights.dtype(), "bincount", [&]<class W>() {
    using S = std::conditional_t<std::is_same_v<W, float>, float, double>;
    gpu::launch({.name = "bincount",
                 .grid = static_cast<unsigned>(bins),
                 .block = 128,
                 .traffic = {n * (8 + static_cast<int64_t>(sizeof(W))),
                             bins * static_cast<int64_t>(sizeof(S)), true}},
                sum_bins_kernel<W, S>, sorted.places.data_as<int32_t>(),
                sorted.order.data_as<int32_t>(), given.data_as<W>(), result.data_as<S>(), n);
  });
  return result;
}

}  // namespace

void register_index() {
  cuda_kernel<checked_index> = checked_index_cuda;
  cuda_kernel<select_rows> = select_rows_cuda;
  cuda_kernel<put_rows> = put_rows_cuda;
  cuda_kernel<add_rows> = add_rows_cuda;
  cuda_kernel<gather> = gather_cuda;
  cuda_kernel<scatter> = scatter_cuda;
  cuda_kernel<scatter_add> = scatter_add_cuda;
  cuda_kernel<nonzero> = nonzero_cuda;
  cuda_kernel<one_hot> = one_hot_cuda;
  cuda_kernel<bincount> = bincount_cuda;
  cuda_kernel<tril> = tril_cuda;
  cuda_kernel<triu> = triu_cuda;
}

}  // namespace tessera::kernels
