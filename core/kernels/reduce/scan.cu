// Running sums and products: x seen as (outer, n, inner) around one dimension.
#include <tessera/core/factory/factory.h>
#include <tessera/core/functors.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/elementwise/elementwise_loops.h>
#include <tessera/core/kernels/reduce/reduce.h>
#include <tessera/core/kernels/reduce/reduce_blocks.h>
#include <tessera/core/kernels/common/strided.cuh>
#include <tessera/core/kernels/reduce/block_scan.cuh>

namespace tessera::kernels {
namespace {

constexpr int kBlock = 256;
constexpr int kEach = 4;              // neighbours that a thread takes: 16 bytes of f32
constexpr int64_t kChunk = 16 << 10;  // elements of a line that one block takes

struct ScanTask {
  const void* source;
  DType dtype;
  void* result;
  DType result_dtype;
  int64_t lines, n, inner;
  unsigned chunks;  // of a line
  bool product, reverse;
};

template <class W>
struct Running {
  bool product;
  TS_DEVICE W operator()(W a, W b) const { return product ? fn::Mul{}(a, b) : fn::Add{}(a, b); }
};

// Columns, inner > 1: a thread a line, whose neighbours are neighbours in memory.
template <class C>
__global__ void scan_columns_kernel(const ScanTask task) {
  const int64_t line = gpu::first_index();
  if (line >= task.lines) return;
  const int64_t first = line / task.inner * task.n * task.inner + line % task.inner;
  with_lane_dtype<C>(task.dtype, [&]<class T>() {
    const T* const x = static_cast<const T*>(task.source) + first;
    with_lane_dtype<C>(task.result_dtype, [&]<class R>() {
      R* const y = static_cast<R*>(task.result) + first;
      const Running<Wide<C>> op{task.product};
      Wide<C> carry = task.product ? 1 : 0;
      for (int64_t k = 0; k < task.n; ++k) {
        const int64_t i = (task.reverse ? task.n - 1 - k : k) * task.inner;
        carry = op(carry, static_cast<Wide<C>>(load<C>(x[i])));
        y[i] = store<R>(static_cast<C>(carry));
      }
    });
  });
}

// Lines in order, inner == 1: a block for each chunk of each line. Without a result it leaves the
// chunk's total in carries[block]; with one it starts from carries[block], where there are chunks.
// Places are counted from the line's end where the scan is reversed.
template <class C>
__global__ void __launch_bounds__(kBlock) scan_lines_kernel(const ScanTask task, Wide<C>* carries) {
  using W = Wide<C>;
  TS_SHARED(W, slot, gpu::kWarp);
  const int64_t line = blockIdx.x / task.chunks, chunk = blockIdx.x % task.chunks;
  const int64_t begin = chunk * kChunk;
  const int64_t end = begin + kChunk < task.n ? begin + kChunk : task.n;
  const bool writes = task.result != nullptr;
  const Running<W> op{task.product};
  const W neutral = task.product ? 1 : 0;
  W carry = writes && carries != nullptr ? carries[blockIdx.x] : neutral;
  const auto place = [&](int64_t i) { return line * task.n + (task.reverse ? task.n - 1 - i : i); };
  for (int64_t tile = begin; tile < end; tile += kBlock * kEach) {
    const int64_t first = tile + int64_t{threadIdx.x} * kEach;
    W own[kEach];
    with_lane_dtype<C>(task.dtype, [&]<class T>() {
      const T* const x = static_cast<const T*>(task.source);
      for (int j = 0; j < kEach; ++j) {
        const W value = first + j < end ? static_cast<W>(load<C>(x[place(first + j)])) : neutral;
        own[j] = j == 0 ? value : op(own[j - 1], value);
      }
    });
    const W up_to = block_scan(own[kEach - 1], op, slot);
    const W total = slot[kBlock / gpu::kWarp - 1];
    // What lies before the thread: its left neighbour's result.
    W before = __shfl_up_sync(gpu::kAllLanes, up_to, 1);
    const unsigned warp = threadIdx.x / gpu::kWarp;
    if (threadIdx.x % gpu::kWarp == 0) before = warp > 0 ? slot[warp - 1] : neutral;
    before = op(carry, before);
    if (writes) {
      with_lane_dtype<C>(task.result_dtype, [&]<class R>() {
        R* const y = static_cast<R*>(task.result);
        for (int j = 0; j < kEach; ++j) {
          if (first + j < end) y[place(first + j)] = store<R>(static_cast<C>(op(before, own[j])));
        }
      });
    }
    carry = op(carry, total);
    __syncthreads();  // the next tile writes the slot
  }
  if (!writes && threadIdx.x == 0) carries[blockIdx.x] = carry;
}

// carries[line, chunk] becomes op over the chunks before.
template <class W>
__global__ void scan_carries_kernel(W* carries, int64_t lines, int64_t chunks, bool product) {
  const int64_t line = gpu::first_index();
  if (line >= lines) return;
  const Running<W> op{product};
  W before = product ? 1 : 0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    W& carry = carries[line * chunks + chunk];
    const W own = carry;
    carry = before;
    before = op(before, own);
  }
}

template <class C>
void run_scan(const char* where, ScanTask task, const Device& device) {
  using W = Wide<C>;
  const int64_t elements = task.lines * task.n, read = elements * size_of(task.dtype);
  const int64_t written = elements * size_of(task.result_dtype);
  gpu::LaunchConfig over_lines{.name = where,
                               .grid = gpu::blocks(task.lines, kBlock),
                               .block = kBlock,
                               .traffic = {read, written}};
  if (task.inner > 1) {
    gpu::launch(over_lines, scan_columns_kernel<C>, task);
    return;
  }
  gpu::LaunchConfig over_chunks{.name = where,
                                .grid = static_cast<unsigned>(task.lines) * task.chunks,
                                .block = kBlock,
                                .traffic = {read, written}};
  Tensor carries;
  if (task.chunks > 1) {
    carries = raw::empty({task.lines * task.chunks}, dtype_of<W>, device);
    const int64_t carried = carries.numel() * static_cast<int64_t>(sizeof(W));
    ScanTask totals = task;
    totals.result = nullptr;
    over_chunks.traffic = {read, carried};
    over_lines.traffic = {carried, carried};
    gpu::launch(over_chunks, scan_lines_kernel<C>, totals, carries.data_as<W>());
    gpu::launch(over_lines, scan_carries_kernel<W>, carries.data_as<W>(), task.lines,
                int64_t{task.chunks}, task.product);
    over_chunks.traffic = {read + carried, written};
  }
  gpu::launch(over_chunks, scan_lines_kernel<C>, task,
              carries.defined() ? carries.data_as<W>() : nullptr);
}

Tensor scan(const char* where, const Tensor& x, int dim, bool product, bool reverse, DType dtype) {
  TS_CHECK_DTYPE(!is_fp8(x.dtype()) && !is_fp8(dtype), where, "does not calculate with fp8; got ",
                 x, "; convert with to(dtype)");
  const Tensor result = raw::empty(x.shape(), dtype, x.device());
  if (x.numel() == 0) return result;
  const Lane lane = lane_of(dtype);
  // Sums in a narrower type than x's values are of converted values (torch converts first).
  const bool same = lane_of(x.dtype()) == lane && dtype != kBool;
  const bool narrows = is_low_precision(dtype) && x.dtype() != dtype;
  Tensor source = same && !narrows ? x : convert(x, dtype);
  if (!detail::is_direct(lane, source.dtype())) source = convert(source, dtype);
  source = contiguous(source);
  ScanTask task{.source = source.data(),
                .dtype = source.dtype(),
                .result = result.data(),
                .result_dtype = dtype,
                .lines = 1,
                .n = x.dim() == 0 ? 1 : x.shape()[dim],
                .inner = 1,
                .chunks = 1,
                .product = product,
                .reverse = reverse};
  for (int d = dim + 1; d < x.dim(); ++d) task.inner *= x.shape()[d];
  task.lines = x.numel() / task.n;
  task.chunks = gpu::blocks(task.n, kChunk);
  switch (lane) {
    case Lane::kFloat:
      run_scan<float>(where, task, x.device());
      break;
    case Lane::kDouble:
      run_scan<double>(where, task, x.device());
      break;
    default:
      run_scan<int64_t>(where, task, x.device());
  }
  return result;
}

Tensor cumsum_cuda(const Tensor& x, int dim, DType dtype, bool reverse) {
  return scan("cumsum", x, dim, false, reverse, dtype);
}
Tensor cumprod_cuda(const Tensor& x, int dim, DType dtype) {
  return scan("cumprod", x, dim, true, false, dtype);
}

}  // namespace

void register_scan() {
  cuda_kernel<cumsum> = cumsum_cuda;
  cuda_kernel<cumprod> = cumprod_cuda;
}

}  // namespace tessera::kernels
