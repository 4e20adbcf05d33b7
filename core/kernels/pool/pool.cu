// A thread an element of the result, planes one after the other; sums in the order of the CPU, so
// that the bits are the same.
#include <tessera/core/kernels/pool/pool.h>

#include <tessera/core/cuda/graph.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/common/strided.cuh>

namespace tessera::kernels {
namespace {

constexpr int kBlock = 256;

Shape with_plane(const Shape& shape, int64_t rows, int64_t columns) {
  Shape result = shape.slice(0, shape.size() - 2);
  result.push_back(rows);
  result.push_back(columns);
  return result;
}

// ---- Linear maps of windows ---------------------------------------------------------------------

using Count = DivisorOf<uint64_t>;

// Where an element lies in (planes, rows, columns).
struct Place {
  int64_t plane, row, column;
  TS_DEVICE Place(int64_t index, const Count& rows, const Count& columns) {
    const uint64_t lines = columns.quotient(static_cast<uint64_t>(index));
    column = index - static_cast<int64_t>(lines * columns.value);
    plane = static_cast<int64_t>(rows.quotient(lines));
    row = static_cast<int64_t>(lines) - plane * static_cast<int64_t>(rows.value);
  }
};

// A WindowMap in device memory.
struct DeviceMap {
  const int64_t* begin;  // (size)
  const int64_t* end;
  const double* weight;
  const int64_t* first;  // (input_size): the outputs whose windows may hold an input
  const int64_t* last;
  Count outputs, inputs;
  TS_DEVICE int64_t size() const { return static_cast<int64_t>(outputs.value); }
  TS_DEVICE int64_t input_size() const { return static_cast<int64_t>(inputs.value); }
};

// Both dimensions' maps as one block of device memory.
class DeviceMaps {
 public:
  DeviceMaps(const WindowMap& rows, const WindowMap& columns, bool transposed,
             const Device& device) {
    std::vector<int64_t> words;
    const WindowMap* const maps[2] = {&rows, &columns};
    size_t starts[2];
    for (int d = 0; d < 2; ++d) {
      const WindowMap& map = *maps[d];
      starts[d] = words.size();
      words.insert(words.end(), map.begin.begin(), map.begin.end());
      words.insert(words.end(), map.end.begin(), map.end.end());
      for (const double weight : map.weight) {
        words.push_back(__builtin_bit_cast(int64_t, weight));
      }
      if (!transposed) continue;
      const auto inputs = static_cast<size_t>(map.input_size);
      std::vector<int64_t> first(inputs, map.size()), last(inputs, -1);
      for (int64_t i = 0; i < map.size(); ++i) {
        const auto o = static_cast<size_t>(i);
        for (int64_t place = map.begin[o]; place < map.end[o]; ++place) {
          int64_t& earliest = first[static_cast<size_t>(place)];
          if (i < earliest) earliest = i;
          last[static_cast<size_t>(place)] = i;
        }
      }
      words.insert(words.end(), first.begin(), first.end());
      words.insert(words.end(), last.begin(), last.end());
    }
    const auto count = static_cast<int64_t>(words.size());
    memory_ = raw::empty({count}, kI64, device);
    if (count > 0) {
      gpu::upload_constants(memory_.data(), device.index, words.data(),
                            words.size() * sizeof(int64_t));
    }
    for (int d = 0; d < 2; ++d) {
      const int64_t* const at = memory_.data_as<int64_t>() + starts[d];
      const int64_t size = maps[d]->size(), inputs = maps[d]->input_size;
      maps_[d] = {.begin = at,
                  .end = at + size,
                  .weight = reinterpret_cast<const double*>(at + 2 * size),
                  .first = transposed ? at + 3 * size : nullptr,
                  .last = transposed ? at + 3 * size + inputs : nullptr,
                  .outputs = Count(static_cast<uint64_t>(size)),
                  .inputs = Count(static_cast<uint64_t>(inputs))};
    }
  }
  const DeviceMap& rows() const { return maps_[0]; }
  const DeviceMap& columns() const { return maps_[1]; }

 private:
  Tensor memory_;
  DeviceMap maps_[2];
};

template <class T>
__global__ void window_sum_kernel(const T* x,  // (planes, H, W)
                                  T* y,        // (planes, OH, OW)
                                  const DeviceMap rows, const DeviceMap columns, int64_t total) {
  using A = Compute<T>;
  const int64_t index = gpu::first_index();
  if (index >= total) return;
  const Place to(index, rows.outputs, columns.outputs);
  const int64_t i = to.row, j = to.column, width = columns.input_size();
  const T* const in = x + to.plane * rows.input_size() * width;
  A sum = 0;
  for (int64_t h = rows.begin[i]; h < rows.end[i]; ++h) {
    for (int64_t w = columns.begin[j]; w < columns.end[j]; ++w) sum += load<A>(in[h * width + w]);
  }
  y[index] = store<T>(sum * static_cast<A>(rows.weight[i] * columns.weight[j]));
}

template <class T>
__global__ void window_sum_transposed_kernel(const T* grad,  // (planes, OH, OW)
                                             T* dx,          // (planes, H, W)
                                             const DeviceMap rows, const DeviceMap columns,
                                             int64_t total) {
  using A = Compute<T>;
  const int64_t index = gpu::first_index();
  if (index >= total) return;
  const Place to(index, rows.inputs, columns.inputs);
  const int64_t h = to.row, w = to.column, width = columns.size();
  const T* const in = grad + to.plane * rows.size() * width;
  A sum = 0;
  for (int64_t i = rows.first[h]; i <= rows.last[h]; ++i) {
    if (h < rows.begin[i] || h >= rows.end[i]) continue;
    for (int64_t j = columns.first[w]; j <= columns.last[w]; ++j) {
      if (w < columns.begin[j] || w >= columns.end[j]) continue;
      sum += load<A>(in[i * width + j]) * static_cast<A>(rows.weight[i] * columns.weight[j]);
    }
  }
  dx[index] = store<T>(sum);
}

Tensor window_sum_cuda(const Tensor& x, const WindowMap& rows, const WindowMap& columns) {
  const Tensor result =
      raw::empty(with_plane(x.shape(), rows.size(), columns.size()), x.dtype(), x.device());
  if (result.numel() == 0) return result;
  const Tensor source = contiguous(x);
  const DeviceMaps maps(rows, columns, false, x.device());
  dispatch_floating(x.dtype(), "avg_pool", [&]<class T>() {
    gpu::launch({.name = "avg_pool", .grid = gpu::blocks(result.numel(), kBlock), .block = kBlock},
                window_sum_kernel<T>, source.data_as<T>(), result.data_as<T>(), maps.rows(),
                maps.columns(), result.numel());
  });
  return result;
}

Tensor window_sum_transposed_cuda(const Tensor& grad, const WindowMap& rows,
                                  const WindowMap& columns) {
  const Tensor result = raw::empty(with_plane(grad.shape(), rows.input_size, columns.input_size),
                                   grad.dtype(), grad.device());
  if (result.numel() == 0) return result;
  const Tensor source = contiguous(grad);
  const DeviceMaps maps(rows, columns, true, grad.device());
  dispatch_floating(grad.dtype(), "avg_pool", [&]<class T>() {
    gpu::launch({.name = "avg_pool", .grid = gpu::blocks(result.numel(), kBlock), .block = kBlock},
                window_sum_transposed_kernel<T>, source.data_as<T>(), result.data_as<T>(),
                maps.rows(), maps.columns(), result.numel());
  });
  return result;
}

// ---- Maxima -------------------------------------------------------------------------------------

struct MaxWindow {
  int64_t H, W;
  Count OH, OW;
  int64_t kernel[2];
  ConvGeometry geometry;
};

// The window's part inside the plane, in steps of the dilation.
TS_DEVICE int64_t first_inside(int64_t start, int64_t step) {
  return start >= 0 ? start : start + (-start + step - 1) / step * step;
}

template <class T>
__global__ void max_pool_kernel(const T* x, T* values, int64_t* indices, const MaxWindow p,
                                int64_t total) {
  using A = Compute<T>;
  const int64_t index = gpu::first_index();
  if (index >= total) return;
  const Place to(index, p.OH, p.OW);
  const T* const in = x + to.plane * p.H * p.W;
  const int64_t* const step = p.geometry.dilation;
  const int64_t h0 = to.row * p.geometry.stride[0] - p.geometry.padding[0];
  const int64_t w0 = to.column * p.geometry.stride[1] - p.geometry.padding[1];
  const int64_t h_reach = h0 + step[0] * (p.kernel[0] - 1) + 1;
  const int64_t w_reach = w0 + step[1] * (p.kernel[1] - 1) + 1;
  const int64_t h_end = h_reach < p.H ? h_reach : p.H, w_end = w_reach < p.W ? w_reach : p.W;
  const int64_t h_first = first_inside(h0, step[0]), w_first = first_inside(w0, step[1]);
  int64_t best = h_first * p.W + w_first;
  A maximum = -static_cast<A>(INFINITY);
  for (int64_t h = h_first; h < h_end; h += step[0]) {
    for (int64_t w = w_first; w < w_end; w += step[1]) {
      const A value = load<A>(in[h * p.W + w]);
      if (value > maximum || value != value) {  // of NaNs the last, as in torch
        maximum = value;
        best = h * p.W + w;
      }
    }
  }
  values[index] = store<T>(maximum);
  // Of a window that dilation takes past the plane: none.
  indices[index] = h_first < h_end && w_first < w_end ? best : p.H * p.W;
}

MaxPool max_pool_cuda(const Tensor& x, const int64_t (&kernel)[2], const ConvGeometry& geometry,
                      int64_t OH, int64_t OW) {
  const Shape shape = with_plane(x.shape(), OH, OW);
  const MaxPool result{raw::empty(shape, x.dtype(), x.device()),
                       raw::empty(shape, kI64, x.device())};
  const int64_t total = result.values.numel();
  if (total == 0) return result;
  const Tensor source = contiguous(x);
  const MaxWindow window{x.size(-2),
                         x.size(-1),
                         Count(static_cast<uint64_t>(OH)),
                         Count(static_cast<uint64_t>(OW)),
                         {kernel[0], kernel[1]},
                         geometry};
  dispatch_floating(x.dtype(), "max_pool2d", [&]<class T>() {
    gpu::launch({.name = "max_pool", .grid = gpu::blocks(total, kBlock), .block = kBlock},
                max_pool_kernel<T>, source.data_as<T>(), result.values.data_as<T>(),
                result.indices.data_as<int64_t>(), window, total);
  });
  return result;
}

}  // namespace

void register_pool() {
  cuda_kernel<window_sum> = window_sum_cuda;
  cuda_kernel<window_sum_transposed> = window_sum_transposed_cuda;
  cuda_kernel<max_pool> = max_pool_cuda;
}

}  // namespace tessera::kernels
