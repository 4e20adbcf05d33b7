// Convolution by cuDNN where it serves the problem (core/cuda/libraries/conv_graph.h), else without a
// library: three products whose operands are read through the geometry, so that no patch is ever
// laid out in memory. They are what the emulation runs.
//
// A block makes kTile x kTile results of one group from tiles in shared memory, a thread 4 x 4 of
// them in registers. Sums are in the compute type in the order of the inner dimension: the bits
// depend on the shape alone. Letters as in conv.h.
#include <array>

#include <tessera/core/context.h>
#include <tessera/core/cuda/libraries/conv_graph.h>
#include <tessera/core/cuda/libraries/gemm.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/conv/conv.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/reduce/reduce.h>
#include <tessera/core/kernels/common/strided.cuh>

namespace tessera::kernels {
namespace {

constexpr int kTile = 64, kInner = 16, kSide = 16, kEach = kTile / kSide;
constexpr int kBlock = kSide * kSide;

struct Sizes : ConvSizes {
  Divisor by_patch, by_kernel_width;  // KH * KW, KW

  Sizes(const Shape& x, const Shape& weight, const ConvGeometry& g) : ConvSizes(x, weight, g) {
    TS_CHECK_SHAPE(O < INT32_MAX && C * KH * KW < INT32_MAX && O * KH * KW < INT32_MAX, "conv2d",
                   "a patch has at most 2^31 - 1 elements; the weight is ", weight);
    if (KH * KW > 0) {
      by_patch = Divisor(static_cast<uint32_t>(KH * KW));
      by_kernel_width = Divisor(static_cast<uint32_t>(KW));
    }
  }
  int64_t channels() const { return C / G; }  // of a group
  int64_t outputs() const { return O / G; }
};

// An element of a patch: channel (or output) and place in the kernel.
struct Patch {
  int64_t channel, kh, kw;
};
TS_DEVICE Patch patch_of(const Sizes& n, int64_t k) {
  const auto index = static_cast<uint32_t>(k);
  const uint32_t channel = n.by_patch.quotient(index);
  const uint32_t rest = index - channel * n.by_patch.value;
  const uint32_t kh = n.by_kernel_width.quotient(rest);
  return {channel, kh, rest - kh * n.by_kernel_width.value};
}
// A position of a sample's plane.
struct Position {
  int64_t n, h, w;
};
TS_DEVICE Position position_of(int64_t i, int64_t height, int64_t width) {
  const int64_t row = i / width;
  return {row / height, row % height, i - row * width};
}

// What an output position meets at one element of its patch; 0 in the padding.
template <class T>
TS_DEVICE Compute<T> patch_element(const Sizes& n, const T* x, int64_t g, const Position& out,
                                   const Patch& at) {
  const int64_t h =
      out.h * n.geometry.stride[0] - n.geometry.padding[0] + at.kh * n.geometry.dilation[0];
  const int64_t w =
      out.w * n.geometry.stride[1] - n.geometry.padding[1] + at.kw * n.geometry.dilation[1];
  if (h < 0 || h >= n.H || w < 0 || w >= n.W) return Compute<T>(0);
  const int64_t channel = g * (n.C / n.G) + at.channel;
  return load<Compute<T>>(x[((out.n * n.C + channel) * n.H + h) * n.W + w]);
}

// Each form has M rows, columns and inner elements K of a group, of which a block takes [begin,
// end), and says what its operands and results are. Column and inner index are taken apart once for
// all rows of a tile.

// y[n, o, oh, ow] = bias[o] + sum over (c, kh, kw): rows o, columns (n, oh, ow).
template <class T>
struct Forward {
  using Type = T;
  using Result = T;
  using Column = Position;
  using Inner = Patch;
  Sizes n;
  const T* x;
  const T* weight;
  const T* bias;  // or null
  T* y;
  int64_t rows, columns, inner;

  TS_DEVICE Column column(int64_t j) const { return position_of(j, n.OH, n.OW); }
  TS_DEVICE Inner at(int64_t k) const { return patch_of(n, k); }
  TS_DEVICE Compute<T> left(int64_t g, int64_t row, int64_t k) const {
    return load<Compute<T>>(weight[(g * rows + row) * inner + k]);
  }
  TS_DEVICE Compute<T> right(int64_t g, const Inner& k, const Column& j) const {
    return patch_element(n, x, g, j, k);
  }
  TS_DEVICE void write(int64_t g, int64_t row, int64_t, const Column& j, int64_t,
                       Compute<T> value) const {
    const int64_t o = g * rows + row;
    if (bias != nullptr) value = value + load<Compute<T>>(bias[o]);
    y[((j.n * n.O + o) * n.OH + j.h) * n.OW + j.w] = store<T>(value);
  }
};

// dx[n, c, h, w] = sum over (o, kh, kw) of what lies under the kernel: rows c, columns (n, h, w).
template <class T>
struct InputGradient {
  using Type = T;
  using Result = T;
  using Column = Position;
  using Inner = Patch;
  Sizes n;
  const T* grad;
  const T* weight;
  T* dx;
  int64_t rows, columns, inner;

  TS_DEVICE Column column(int64_t j) const { return position_of(j, n.H, n.W); }
  TS_DEVICE Inner at(int64_t k) const { return patch_of(n, k); }
  TS_DEVICE Compute<T> left(int64_t g, int64_t row, int64_t k) const {
    const Patch at = patch_of(n, k);
    const int64_t o = g * (n.O / n.G) + at.channel;
    return load<Compute<T>>(weight[((o * rows + row) * n.KH + at.kh) * n.KW + at.kw]);
  }
  TS_DEVICE Compute<T> right(int64_t g, const Inner& k, const Column& j) const {
    const int64_t down = j.h + n.geometry.padding[0] - k.kh * n.geometry.dilation[0];
    const int64_t across = j.w + n.geometry.padding[1] - k.kw * n.geometry.dilation[1];
    if (down < 0 || across < 0) return Compute<T>(0);
    const int64_t oh = down / n.geometry.stride[0], ow = across / n.geometry.stride[1];
    if (oh >= n.OH || ow >= n.OW || oh * n.geometry.stride[0] != down ||
        ow * n.geometry.stride[1] != across) {
      return Compute<T>(0);
    }
    const int64_t o = g * (n.O / n.G) + k.channel;
    return load<Compute<T>>(grad[((j.n * n.O + o) * n.OH + oh) * n.OW + ow]);
  }
  TS_DEVICE void write(int64_t g, int64_t row, int64_t, const Column& j, int64_t,
                       Compute<T> value) const {
    dx[((j.n * n.C + g * rows + row) * n.H + j.h) * n.W + j.w] = store<T>(value);
  }
};

// dweight[o, c, kh, kw] = sum over (n, oh, ow), in parts that are joined in their order: rows o,
// columns (c, kh, kw).
template <class T>
struct WeightGradient {
  using Type = T;
  using Result = Compute<T>;
  using Column = Patch;
  using Inner = Position;
  Sizes n;
  const T* grad;
  const T* x;
  Compute<T>* parts;  // (parts, O, C / G, KH, KW)
  int64_t rows, columns, inner;

  TS_DEVICE Column column(int64_t j) const { return patch_of(n, j); }
  TS_DEVICE Inner at(int64_t k) const { return position_of(k, n.OH, n.OW); }
  TS_DEVICE Compute<T> left(int64_t g, int64_t row, int64_t k) const {
    const Position at = position_of(k, n.OH, n.OW);
    return load<Compute<T>>(grad[((at.n * n.O + g * rows + row) * n.OH + at.h) * n.OW + at.w]);
  }
  TS_DEVICE Compute<T> right(int64_t g, const Inner& k, const Column& j) const {
    return patch_element(n, x, g, k, j);
  }
  TS_DEVICE void write(int64_t g, int64_t row, int64_t column, const Column&, int64_t part,
                       Compute<T> value) const {
    parts[((part * n.G + g) * rows + row) * columns + column] = value;
  }
};

// blockIdx: tile of columns, tile of rows, (part, group).
template <class Form>
__global__ void __launch_bounds__(kBlock)
    conv_kernel(const Form form, int64_t part_size, int64_t groups) {
  using A = Compute<typename Form::Type>;
  TS_SHARED(A, left, kInner * (kTile + 1));
  TS_SHARED(A, right, kInner * (kTile + 1));
  const int t = static_cast<int>(threadIdx.x), tx = t % kSide, ty = t / kSide;
  const int64_t row0 = int64_t{blockIdx.y} * kTile, column0 = int64_t{blockIdx.x} * kTile;
  const int64_t part = blockIdx.z / groups, g = blockIdx.z % groups;
  const int64_t begin = part * part_size;
  const int64_t end = begin + part_size < form.inner ? begin + part_size : form.inner;
  // Loads: of the right a thread takes one column and every fourth inner index, of the left one
  // inner index and every 16th row.
  const int load_column = t % kTile, load_inner = t / kTile;
  const bool has_column = column0 + load_column < form.columns;
  const typename Form::Column loaded = form.column(has_column ? column0 + load_column : 0);
  A sums[kEach][kEach] = {};
  for (int64_t k0 = begin; k0 < end; k0 += kInner) {
    for (int k = load_inner; k < kInner; k += kBlock / kTile) {
      right[k * (kTile + 1) + load_column] =
          has_column && k0 + k < end ? form.right(g, form.at(k0 + k), loaded) : A(0);
    }
    for (int row = ty; row < kTile; row += kSide) {
      left[tx * (kTile + 1) + row] =
          row0 + row < form.rows && k0 + tx < end ? form.left(g, row0 + row, k0 + tx) : A(0);
    }
    __syncthreads();
    for (int k = 0; k < kInner; ++k) {
      A a[kEach], b[kEach];
      for (int i = 0; i < kEach; ++i) {
        a[i] = left[k * (kTile + 1) + ty * kEach + i];
        b[i] = right[k * (kTile + 1) + tx + i * kSide];
      }
      for (int i = 0; i < kEach; ++i) {
        for (int j = 0; j < kEach; ++j) sums[i][j] += a[i] * b[j];
      }
    }
    __syncthreads();
  }
  TS_UNROLL
  for (int j = 0; j < kEach; ++j) {
    const int64_t column = column0 + tx + j * kSide;
    if (column >= form.columns) continue;
    const typename Form::Column at = form.column(column);
    TS_UNROLL
    for (int i = 0; i < kEach; ++i) {
      const int64_t row = row0 + ty * kEach + i;
      if (row < form.rows) form.write(g, row, column, at, part, sums[i][j]);
    }
  }
}

template <class Form>
void launch_conv(const Form& form, int64_t groups, int64_t parts = 1) {
  TS_CHECK_SHAPE(parts * groups <= 65535, "conv2d", "at most 65535 groups; got ", groups);
  gpu::launch({.name = "conv2d",
               .grid = dim3(gpu::blocks(form.columns, kTile), gpu::blocks(form.rows, kTile),
                            static_cast<unsigned>(parts * groups)),
               .block = kBlock},
              conv_kernel<Form>, form, parts == 1 ? form.inner : (form.inner + parts - 1) / parts,
              groups);
}

// True where the library made the third of x, weight and y from the other two.
bool run_on_library(gpu::GraphOp op, const Tensor& x, const Tensor& weight, const Tensor& y,
                    const ConvGeometry& g) {
  const int version = gpu::graph_library_version();
  if (version == 0) return gpu::count_graph("conv2d", false, gpu::graph_library);
  const gpu::ConvProblem problem{
      .op = op,
      .dtype = x.dtype(),
      .x = x.shape(),
      .weight = weight.shape(),
      .y = y.shape(),
      .window = {.stride = {g.stride[0], g.stride[1]},
                 .padding = {g.padding[0], g.padding[1]},
                 .dilation = {g.dilation[0], g.dilation[1]}},
      .groups = g.groups,
      .tf32 = x.dtype() == kF32 && Context::current().slot<gpu::GemmOptions>().tf32,
      .x_data = x.data(),
      .weight_data = weight.data(),
      .y_data = y.data()};
  if (const std::string reason = validate(problem, version); !reason.empty()) {
    return gpu::count_graph("conv2d", false, [&] { return reason; });
  }
  const std::array<void*, gpu::kConvSlots> memory{x.data(), weight.data(), y.data()};
  return gpu::count_graph("conv2d", run_graph(conv_request(problem), memory),
                          [] { return "none of cuDNN's engines serves it"; });
}

// y[n, o, p] += bias[o], of planes of P positions.
template <class T>
__global__ void add_bias_kernel(T* y, const T* bias, int64_t O, int64_t P, int64_t n) {
  const int64_t i = gpu::first_index();
  if (i >= n) return;
  y[i] = store<T>(load<Compute<T>>(y[i]) + load<Compute<T>>(bias[i / P % O]));
}

Tensor conv2d_cuda(const Tensor& x, const Tensor& weight, const Tensor& bias,
                   const ConvGeometry& geometry) {
  const Sizes n(x.shape(), weight.shape(), geometry);
  const Tensor result = raw::empty({n.N, n.O, n.OH, n.OW}, x.dtype(), x.device());
  if (result.numel() == 0) return result;
  const Tensor dense_x = contiguous(x), dense_weight = contiguous(weight);
  const Tensor dense_bias = bias.defined() ? contiguous(bias) : bias;
  const bool is_done =
      run_on_library(gpu::GraphOp::kConvolution, dense_x, dense_weight, result, geometry);
  if (is_done && !bias.defined()) return result;
  dispatch_floating(x.dtype(), "conv2d", [&]<class T>() {
    if (is_done) {
      gpu::launch({.name = "conv2d", .grid = gpu::blocks(result.numel(), kBlock), .block = kBlock},
                  add_bias_kernel<T>, result.data_as<T>(), dense_bias.data_as<T>(), n.O,
                  n.OH * n.OW, result.numel());
      return;
    }
    launch_conv(Forward<T>{.n = n,
                           .x = dense_x.data_as<T>(),
                           .weight = dense_weight.data_as<T>(),
                           .bias = bias.defined() ? dense_bias.data_as<T>() : nullptr,
                           .y = result.data_as<T>(),
                           .rows = n.outputs(),
                           .columns = n.N * n.OH * n.OW,
                           .inner = n.channels() * n.KH * n.KW},
                n.G);
  });
  return result;
}

Tensor conv2d_input_gradient_cuda(const Tensor& grad, const Tensor& weight, const Shape& x_shape,
                                  const ConvGeometry& geometry) {
  const Sizes n(x_shape, weight.shape(), geometry);
  const Tensor result = raw::empty(x_shape, grad.dtype(), grad.device());
  if (result.numel() == 0) return result;
  const Tensor dense_grad = contiguous(grad), dense_weight = contiguous(weight);
  if (run_on_library(gpu::GraphOp::kConvolutionInputGradient, result, dense_weight, dense_grad,
                     geometry)) {
    return result;
  }
  dispatch_floating(grad.dtype(), "conv2d", [&]<class T>() {
    launch_conv(InputGradient<T>{.n = n,
                                 .grad = dense_grad.data_as<T>(),
                                 .weight = dense_weight.data_as<T>(),
                                 .dx = result.data_as<T>(),
                                 .rows = n.channels(),
                                 .columns = n.N * n.H * n.W,
                                 .inner = n.outputs() * n.KH * n.KW},
                n.G);
  });
  return result;
}

// Positions that one block adds up at least, and parts at most: enough blocks for a GPU where the
// weight is small, and little memory where it is large.
constexpr int64_t kPartSize = 1024, kMostParts = 64;

Tensor conv2d_weight_gradient_cuda(const Tensor& grad, const Tensor& x, const Shape& weight_shape,
                                   const ConvGeometry& geometry) {
  const Sizes n(x.shape(), weight_shape, geometry);
  const int64_t positions = n.N * n.OH * n.OW;
  if (numel_of(weight_shape) == 0 || positions == 0) {
    return raw::zeros(weight_shape, x.dtype(), x.device());
  }
  const Tensor dense_grad = contiguous(grad), dense_x = contiguous(x);
  const Tensor by_library = raw::empty(weight_shape, x.dtype(), x.device());
  if (run_on_library(gpu::GraphOp::kConvolutionWeightGradient, dense_x, by_library, dense_grad,
                     geometry)) {
    return by_library;
  }
  const int64_t wanted = (positions + kPartSize - 1) / kPartSize;
  const int64_t allowed = 65535 / n.G < kMostParts ? 65535 / n.G : kMostParts;
  const int64_t parts = wanted < allowed ? wanted : allowed > 0 ? allowed : 1;
  Shape shape = {parts};
  for (const int64_t size : weight_shape) shape.push_back(size);
  Tensor sums;
  dispatch_floating(x.dtype(), "conv2d", [&]<class T>() {
    sums = raw::empty(shape, dtype_of<Compute<T>>, x.device());
    launch_conv(WeightGradient<T>{.n = n,
                                  .grad = dense_grad.data_as<T>(),
                                  .x = dense_x.data_as<T>(),
                                  .parts = sums.data_as<Compute<T>>(),
                                  .rows = n.outputs(),
                                  .columns = n.channels() * n.KH * n.KW,
                                  .inner = positions},
                n.G, parts);
  });
  const Tensor total = sum(sums, {0}, false, sums.dtype());
  return x.dtype() == total.dtype() ? total : convert(total, x.dtype());
}

}  // namespace

void register_conv() {
  cuda_kernel<conv2d> = conv2d_cuda;
  cuda_kernel<conv2d_input_gradient> = conv2d_input_gradient_cuda;
  cuda_kernel<conv2d_weight_gradient> = conv2d_weight_gradient_cuda;
}

}  // namespace tessera::kernels
