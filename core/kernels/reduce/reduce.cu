#include <cmath>

#include <tessera/core/factory/factory.h>
#include <tessera/core/functors.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/elementwise/elementwise_loops.h>
#include <tessera/core/kernels/reduce/reduce_fold.h>
#include <tessera/core/math.h>
#include <tessera/core/kernels/common/rows.cuh>
#include <tessera/core/kernels/common/strided.cuh>

namespace tessera::kernels {
namespace {

// Elements of a row, and rows of a column, that one block adds up; partial results are folded by a
// second launch. The partition is a function of the shape.
constexpr int64_t kRowChunk = 1 << 16, kColumnChunk = 512;
constexpr int64_t kWarpRow = 1024;  // elements of rows that take a warp each
constexpr int kBlock = 256;
constexpr int kTileLanes = 8, kTileLines = 32;  // of a block that folds columns
constexpr int kTileWidth = 8;                   // neighbouring columns of a thread, at most

// Integers wrap, as on the CPU: functors have that.
template <class W, class C>
TS_DEVICE W accumulate(Fold fold, double p, W a, C v, double shift) {
  switch (fold) {
    case Fold::kSum:
      return fn::Add{}(a, static_cast<W>(v));
    case Fold::kProd:
      return fn::Mul{}(a, static_cast<W>(v));
    case Fold::kMax:
      return a != a || a > static_cast<W>(v) ? a : static_cast<W>(v);
    case Fold::kMin:
      return a != a || a < static_cast<W>(v) ? a : static_cast<W>(v);
    case Fold::kCountNonzero:
      return a + static_cast<W>(v != C(0));
    default:
      break;
  }
  if constexpr (std::is_floating_point_v<C>) {
    const C magnitude = math::fabs(v);
    const C deviation = v - static_cast<C>(shift);
    switch (fold) {
      case Fold::kSumAbs:
        return a + static_cast<W>(magnitude);
      case Fold::kSumSquares:
        return a + static_cast<W>(v) * static_cast<W>(v);
      case Fold::kSumPowers:
        return a + static_cast<W>(math::pow(magnitude, static_cast<C>(p)));
      case Fold::kMaxAbs:
        return a != a || a > static_cast<W>(magnitude) ? a : static_cast<W>(magnitude);
      case Fold::kMinAbs:
        return a != a || a < static_cast<W>(magnitude) ? a : static_cast<W>(magnitude);
      case Fold::kSumSquaredDeviations:
        return a + static_cast<W>(deviation * deviation);
      case Fold::kSumExp:
        return a + static_cast<W>(math::exp(deviation));
      default:
        break;
    }
  }
  return a;
}

template <class W>
struct Join {
  Fold fold;
  TS_DEVICE W operator()(W a, W b) const {
    switch (fold) {
      case Fold::kProd:
        return fn::Mul{}(a, b);
      case Fold::kMax:
      case Fold::kMaxAbs:
        return a != a || a > b ? a : b;
      case Fold::kMin:
      case Fold::kMinAbs:
        return a != a || a < b ? a : b;
      default:
        return fn::Add{}(a, b);
    }
  }
};

struct FoldTask {
  Fold fold;
  double p;
  const void* x;
  DType dtype;
  DeviceWalk<1> kept, reduced;
  int64_t terms, chunk, chunks;
  const double* shift;  // one for each output, or null
  Finish finish;
  void* result;
  DType result_dtype;
};

template <class W>
TS_DEVICE void write_result(const FoldTask& task, int64_t output, W value) {
  const W last = finished(task.finish, value, task.shift != nullptr ? task.shift[output] : 0.0);
  with_any_dtype(task.result_dtype,
                 [&]<class T>() { static_cast<T*>(task.result)[output] = store<T>(last); });
}

template <bool kIsSum, class W, class C>
TS_DEVICE W accumulate_in(const FoldTask& task, W a, C v, double shift) {
  if constexpr (kIsSum) {
    return fn::Add{}(a, static_cast<W>(v));
  } else {
    return accumulate(task.fold, task.p, a, v, shift);
  }
}

// Rows that lie in order: `threads` of a block, a warp or all, for each chunk of each output.
template <class C, bool kIsSum>
__global__ void __launch_bounds__(1024)
    fold_linear_kernel(const FoldTask task, Wide<C>* partials, int threads) {
  using W = Wide<C>;
  TS_REDUCE_SLOT(W, slot);
  const int t = static_cast<int>(threadIdx.x) % threads;
  const int groups = static_cast<int>(blockDim.x) / threads;
  const int64_t place = int64_t{blockIdx.x} * groups + static_cast<int>(threadIdx.x) / threads;
  if (place >= task.kept.numel * task.chunks) return;  // the whole warp; a block has one place
  const int64_t output = place / task.chunks, begin = place % task.chunks * task.chunk;
  const int64_t end = begin + task.chunk < task.terms ? begin + task.chunk : task.terms;
  int64_t base[1];
  task.kept.offsets(output, base);
  const double shift = task.shift != nullptr ? task.shift[output] : 0.0;
  W value = neutral_of<W>(task.fold);
  with_lane_dtype<C>(task.dtype, [&]<class T>() {
    const T* const x = static_cast<const T*>(task.x) + base[0] + begin;
    RowWalk<T, 16 / sizeof(T)>(x, end - begin).each(t, threads, [&]<int N>(int64_t c) {
      const gpu::Vector<T, N> in = gpu::load_vector<N>(x + c);
      TS_UNROLL
      for (int j = 0; j < N; ++j) {
        value = accumulate_in<kIsSum>(task, value, load<C>(in.values[j]), shift);
      }
    });
  });
  const Join<W> join{task.fold};
  value = threads == gpu::kWarp ? gpu::warp_reduce(value, join)
                                : gpu::block_reduce(value, join, neutral_of<W>(task.fold), slot);
  if (t != 0) return;
  if (task.chunks == 1) {
    write_result(task, output, value);
  } else {
    partials[place] = value;
  }
}

// Columns of a matrix whose rows lie `stride` apart: a block takes kTileLanes vectors of a row at a
// time, kTileLines rows at once. partials: (chunks, outputs)
template <class C, bool kIsSum>
__global__ void __launch_bounds__(kTileLanes* kTileLines)
    fold_tiles_kernel(const FoldTask task, Wide<C>* partials, int64_t stride, bool vectors) {
  using W = Wide<C>;
  TS_SHARED(W, joined, kTileLanes * kTileLines * kTileWidth);
  const int lane = static_cast<int>(threadIdx.x) % kTileLanes;
  const int line = static_cast<int>(threadIdx.x) / kTileLanes;
  const int64_t columns = task.kept.numel, begin = blockIdx.y * task.chunk;
  const int64_t end = begin + task.chunk < task.terms ? begin + task.chunk : task.terms;
  with_lane_dtype<C>(task.dtype, [&]<class T>() {
    constexpr int kWidth = sizeof(T) > 1 ? 16 / static_cast<int>(sizeof(T)) : kTileWidth;
    const int64_t first = (int64_t{blockIdx.x} * kTileLanes + lane) * kWidth;
    const int count = static_cast<int>(columns - first < kWidth ? columns - first : kWidth);
    const T* const x = static_cast<const T*>(task.x) + first;
    W own[kWidth];
    double shifts[kWidth];
    TS_UNROLL
    for (int j = 0; j < kWidth; ++j) {
      own[j] = neutral_of<W>(task.fold);
      shifts[j] = !kIsSum && task.shift != nullptr && j < count ? task.shift[first + j] : 0.0;
    }
    if (vectors && count == kWidth) {
      for (int64_t row = begin + line; row < end; row += kTileLines) {
        const gpu::Vector<T, kWidth> in = gpu::load_vector<kWidth>(x + row * stride);
        TS_UNROLL
        for (int j = 0; j < kWidth; ++j) {
          own[j] = accumulate_in<kIsSum>(task, own[j], load<C>(in.values[j]), shifts[j]);
        }
      }
    } else {
      for (int64_t row = begin + line; row < end; row += kTileLines) {
        TS_UNROLL
        for (int j = 0; j < kWidth; ++j) {
          if (j >= count) continue;
          own[j] = accumulate_in<kIsSum>(task, own[j], load<C>(x[row * stride + j]), shifts[j]);
        }
      }
    }
    TS_UNROLL
    for (int j = 0; j < kWidth; ++j) {
      joined[(line * kTileWidth + j) * kTileLanes + lane] = own[j];
    }
    __syncthreads();
    // A thread a column: the lines in their order.
    const int j = line % kWidth;
    if (line >= kWidth || j >= count) return;
    W value = joined[j * kTileLanes + lane];
    for (int l = 1; l < kTileLines; ++l) {
      value = Join<W>{task.fold}(value, joined[(l * kTileWidth + j) * kTileLanes + lane]);
    }
    if (task.chunks == 1) {
      write_result(task, first + j, value);
    } else {
      partials[blockIdx.y * columns + first + j] = value;
    }
  });
}

// Any strides: a block for each chunk of each output. partials: (outputs, chunks)
template <class C>
__global__ void fold_rows_kernel(const FoldTask task, Wide<C>* partials) {
  using W = Wide<C>;
  TS_REDUCE_SLOT(W, slot);
  const int64_t output = blockIdx.x / task.chunks, part = blockIdx.x % task.chunks;
  const int64_t begin = part * task.chunk;
  const int64_t end = begin + task.chunk < task.terms ? begin + task.chunk : task.terms;
  int64_t base[1];
  task.kept.offsets(output, base);
  const double shift = task.shift != nullptr ? task.shift[output] : 0.0;
  W value = neutral_of<W>(task.fold);
  with_lane_dtype<C>(task.dtype, [&]<class T>() {
    const T* const x = static_cast<const T*>(task.x) + base[0];
    for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x) {
      int64_t at[1];
      task.reduced.offsets(i, at);
      value = accumulate(task.fold, task.p, value, load<C>(x[at[0]]), shift);
    }
  });
  value = gpu::block_reduce(value, Join<W>{task.fold}, neutral_of<W>(task.fold), slot);
  if (threadIdx.x != 0) return;
  if (task.chunks == 1) {
    write_result(task, output, value);
  } else {
    partials[blockIdx.x] = value;
  }
}

// Columns of other strides: a thread for each chunk of each output; neighbours are neighbours in
// memory. partials: (outputs, chunks)
template <class C>
__global__ void fold_columns_kernel(const FoldTask task, Wide<C>* partials) {
  using W = Wide<C>;
  const int64_t output = gpu::first_index(), part = blockIdx.y;
  if (output >= task.kept.numel) return;
  const int64_t begin = part * task.chunk;
  const int64_t end = begin + task.chunk < task.terms ? begin + task.chunk : task.terms;
  int64_t base[1];
  task.kept.offsets(output, base);
  const double shift = task.shift != nullptr ? task.shift[output] : 0.0;
  W value = neutral_of<W>(task.fold);
  with_lane_dtype<C>(task.dtype, [&]<class T>() {
    const T* const x = static_cast<const T*>(task.x) + base[0];
    for (int64_t i = begin; i < end; ++i) {
      int64_t at[1];
      task.reduced.offsets(i, at);
      value = accumulate(task.fold, task.p, value, load<C>(x[at[0]]), shift);
    }
  });
  if (task.chunks == 1) {
    write_result(task, output, value);
  } else {
    partials[output * task.chunks + part] = value;
  }
}

// How a fold walks what it reads.
enum class FoldForm : uint8_t { kLinear, kTiles, kRows, kColumns };

// What joins partial results of a fold.
Fold joining(Fold fold) {
  switch (fold) {
    case Fold::kProd:
      return fold;
    case Fold::kMax:
    case Fold::kMaxAbs:
      return Fold::kMax;
    case Fold::kMin:
    case Fold::kMinAbs:
      return Fold::kMin;
    default:
      return Fold::kSum;
  }
}

// `elements`: those of x, each once.
template <class C>
void launch_fold(const char* where, const FoldTask& task, FoldForm form, int64_t stride,
                 bool vectors, int64_t elements, Wide<C>* partials) {
  const int64_t outputs = task.kept.numel;
  constexpr auto kPartial = static_cast<int64_t>(sizeof(Wide<C>));
  const gpu::Traffic traffic{
      elements * size_of(task.dtype) + (task.shift != nullptr ? outputs * 8 : 0),
      partials != nullptr ? outputs * task.chunks * kPartial
                          : outputs * size_of(task.result_dtype)};
  const bool sums = task.fold == Fold::kSum;
  const int size = static_cast<int>(size_of(task.dtype));
  switch (form) {
    case FoldForm::kLinear: {
      const bool warps = task.terms <= kWarpRow;
      const int64_t longest = task.terms < task.chunk ? task.terms : task.chunk;
      const unsigned threads =
          warps ? static_cast<unsigned>(gpu::kWarp) : walk_threads(longest, 16 / size);
      const int64_t places = outputs * task.chunks;
      gpu::launch(
          {.name = where,
           .grid = warps ? gpu::blocks(places, kBlock / gpu::kWarp) : static_cast<unsigned>(places),
           .block = warps ? static_cast<unsigned>(kBlock) : threads,
           .traffic = traffic},
          sums ? fold_linear_kernel<C, true> : fold_linear_kernel<C, false>, task, partials,
          static_cast<int>(threads));
      return;
    }
    case FoldForm::kTiles: {
      const int width = size > 1 ? 16 / size : kTileWidth;
      gpu::launch({.name = where,
                   .grid = dim3(gpu::blocks(outputs, kTileLanes * width),
                                static_cast<unsigned>(task.chunks)),
                   .block = kTileLanes * kTileLines,
                   .traffic = traffic},
                  sums ? fold_tiles_kernel<C, true> : fold_tiles_kernel<C, false>, task, partials,
                  stride, vectors);
      return;
    }
    case FoldForm::kRows:
      gpu::launch({.name = where,
                   .grid = static_cast<unsigned>(outputs * task.chunks),
                   .block = row_threads(task.terms < task.chunk ? task.terms : task.chunk),
                   .traffic = traffic},
                  fold_rows_kernel<C>, task, partials);
      return;
    case FoldForm::kColumns:
      gpu::launch({.name = where,
                   .grid = dim3(gpu::blocks(outputs, kBlock), static_cast<unsigned>(task.chunks)),
                   .block = kBlock,
                   .traffic = traffic},
                  fold_columns_kernel<C>, task, partials);
  }
}

template <class C>
void run_fold(const char* where, FoldTask task, FoldForm form, int64_t stride, bool vectors,
              int64_t elements, const Device& device) {
  using W = Wide<C>;
  const int64_t outputs = task.kept.numel;
  const bool columns = form == FoldForm::kTiles || form == FoldForm::kColumns;
  task.chunk = columns ? kColumnChunk : kRowChunk;
  while (columns && task.terms > task.chunk * 65535) task.chunk *= 2;  // the grid's second side
  task.chunks = task.terms == 0 ? 1 : (task.terms + task.chunk - 1) / task.chunk;
  if (task.chunks == 1) {
    return launch_fold<C>(where, task, form, stride, vectors, elements, nullptr);
  }
  const Tensor partials = raw::empty({outputs * task.chunks}, dtype_of<W>, device);
  launch_fold<C>(where, task, form, stride, vectors, elements, partials.data_as<W>());
  FoldTask last = task;
  last.fold = joining(task.fold);
  last.x = partials.data();
  last.dtype = dtype_of<W>;
  last.terms = last.chunk = task.chunks;
  last.chunks = 1;
  if (form == FoldForm::kTiles) {
    return launch_fold<W>(where, last, form, outputs, outputs % 2 == 0, partials.numel(), nullptr);
  }
  const Shape sizes[2] = {{outputs}, {task.chunks}}, strides[2] = {{task.chunks}, {1}};
  last.kept = DeviceWalk<1>(Walk(sizes[0], {&strides[0], 1}));
  last.reduced = DeviceWalk<1>(Walk(sizes[1], {&strides[1], 1}));
  launch_fold<W>(where, last, FoldForm::kLinear, 0, false, partials.numel(), nullptr);
}

Tensor reduce_cuda(const char* where, Fold fold, double p, const Tensor& x_in, const Shape& dims,
                   bool keepdim, DType compute, DType dtype, const Tensor& shift,
                   const Finish& finish) {
  const Lane lane = lane_of(compute);
  const Tensor x = detail::is_direct(lane, x_in.dtype()) ? x_in : convert(x_in, compute);
  const Tensor result = raw::empty(reduced_shape(x.shape(), dims, keepdim), dtype, x.device());
  if (result.numel() == 0) return result;
  Shape kept, reduced, kept_strides, reduced_strides;
  for (int d = 0; d < x.dim(); ++d) {
    bool is_reduced = false;
    for (const int64_t dim : dims) is_reduced = is_reduced || dim == d;
    (is_reduced ? reduced : kept).push_back(x.shape()[d]);
    (is_reduced ? reduced_strides : kept_strides).push_back(x.strides()[d]);
  }
  // Outputs are numbered in row-major order: their walk may not be reordered.
  const Shape order[2] = {contiguous_strides(kept), kept_strides};
  const Walk kept_walk(kept, {order, 2});
  const Walk reduced_walk(reduced, {&reduced_strides, 1});
  Walk kept_only = kept_walk;
  for (int d = 0; d < kept_walk.dims; ++d) kept_only.strides[0][d] = kept_walk.strides[1][d];
  const int64_t inner_kept = kept_only.strides[0][kept_only.dims - 1];
  const int64_t inner_reduced = reduced_walk.strides[0][reduced_walk.dims - 1];
  const bool columns = kept_walk.numel >= 32 && inner_kept == 1 && inner_reduced != 1;
  const bool matrix = kept_only.dims == 1 && reduced_walk.dims == 1;
  const FoldForm form = columns ? (matrix ? FoldForm::kTiles : FoldForm::kColumns)
                        : reduced_walk.dims == 1 && (inner_reduced == 1 || reduced_walk.numel == 1)
                            ? FoldForm::kLinear
                            : FoldForm::kRows;
  const bool vectors = is_aligned(x.data()) && inner_reduced * size_of(x.dtype()) % 16 == 0;
  const FoldTask task{.fold = fold,
                      .p = p,
                      .x = x.data(),
                      .dtype = x.dtype(),
                      .kept = DeviceWalk<1>(kept_only),
                      .reduced = DeviceWalk<1>(reduced_walk),
                      .terms = numel_of(reduced),
                      .chunk = 0,
                      .chunks = 0,
                      .shift = shift.defined() ? shift.data_as<double>() : nullptr,
                      .finish = finish,
                      .result = result.data(),
                      .result_dtype = dtype};
  const int64_t elements = kept_only.distinct(0) * reduced_walk.distinct(0);
  switch (lane) {
    case Lane::kFloat:
      run_fold<float>(where, task, form, inner_reduced, vectors, elements, x.device());
      break;
    case Lane::kDouble:
      run_fold<double>(where, task, form, inner_reduced, vectors, elements, x.device());
      break;
    default:
      run_fold<int64_t>(where, task, form, inner_reduced, vectors, elements, x.device());
  }
  return result;
}

// ---- Extrema with their places ------------------------------------------------------------------

// True where (b, at j) takes the place of (a, at i): a NaN before all, then the value, then the
// first.
template <class C>
TS_DEVICE bool is_better(bool largest, C a, int64_t i, C b, int64_t j) {
  if (j < 0) return false;
  if (i < 0) return true;
  const bool a_nan = a != a, b_nan = b != b;
  if (a_nan || b_nan) return b_nan && (!a_nan || j < i);
  if (a == b) return j < i;
  return largest ? b > a : b < a;
}

// Of `lanes` neighbouring columns (places of inner) by each block, whose threads take a line of
// them at a time; where inner is 1, of a row.
template <class C>
__global__ void __launch_bounds__(kBlock)
    extremum_kernel(const void* source, DType dtype, void* values, int64_t* indices, int64_t n,
                    int64_t inner, int lanes, bool largest) {
  TS_SHARED(C, best_value, kBlock);
  TS_SHARED(int64_t, best_index, kBlock);
  const int t = static_cast<int>(threadIdx.x), lines = static_cast<int>(blockDim.x) / lanes;
  const int64_t tiles = (inner + lanes - 1) / lanes, outer = blockIdx.x / tiles;
  const int64_t column = (blockIdx.x - outer * tiles) * lanes + t % lanes;
  C value{};
  int64_t index = -1;
  const auto consider = [&](C v, int64_t i) {
    if (is_better(largest, value, index, v, i)) {
      value = v;
      index = i;
    }
  };
  with_lane_dtype<C>(dtype, [&]<class T>() {
    const T* const x = static_cast<const T*>(source) + outer * n * inner;
    if (inner == 1) {
      RowWalk<T, 16 / sizeof(T)>(x, n).each([&]<int N>(int64_t c) {
        const gpu::Vector<T, N> in = gpu::load_vector<N>(x + c);
        TS_UNROLL
        for (int j = 0; j < N; ++j) consider(load<C>(in.values[j]), c + j);
      });
    } else if (column < inner) {
      for (int64_t i = t / lanes; i < n; i += lines) consider(load<C>(x[i * inner + column]), i);
    }
  });
  best_value[t] = value;
  best_index[t] = index;
  __syncthreads();
  for (int half = static_cast<int>(blockDim.x) / 2; half >= lanes; half /= 2) {
    if (t < half && is_better(largest, best_value[t], best_index[t], best_value[t + half],
                              best_index[t + half])) {
      best_value[t] = best_value[t + half];
      best_index[t] = best_index[t + half];
    }
    __syncthreads();
  }
  if (t >= lanes || column >= inner) return;
  const int64_t output = outer * inner + column;
  with_lane_dtype<C>(dtype,
                     [&]<class T>() { static_cast<T*>(values)[output] = store<T>(best_value[t]); });
  indices[output] = best_index[t];
}

void find_extremum_cuda(const char* where, const Tensor& x, const Around& a, bool largest,
                        const Extremum& result) {
  int lanes = 1, threads = gpu::kWarp;
  while (lanes < gpu::kWarp && lanes < a.inner) lanes *= 2;
  while (threads < kBlock && threads * 4 < a.n * lanes) threads *= 2;
  const auto run = [&]<class C>() {
    gpu::launch({.name = where,
                 .grid = static_cast<unsigned>(a.outer * ((a.inner + lanes - 1) / lanes)),
                 .block = static_cast<unsigned>(threads),
                 .traffic = {a.outer * a.n * a.inner * size_of(x.dtype()),
                             a.outer * a.inner * (size_of(x.dtype()) + 8)}},
                extremum_kernel<C>, x.data(), x.dtype(), result.values.data(),
                result.indices.data_as<int64_t>(), a.n, a.inner, lanes, largest);
  };
  const Lane lane = lane_of(x.dtype());
  if (lane == Lane::kFloat) {
    run.operator()<float>();
  } else if (lane == Lane::kDouble) {
    run.operator()<double>();
  } else {
    run.operator()<int64_t>();
  }
}

}  // namespace

void register_reduce() {
  cuda_kernel<reduce> = reduce_cuda;
  cuda_kernel<find_extremum> = find_extremum_cuda;
}

}  // namespace tessera::kernels
