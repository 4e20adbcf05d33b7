// Letters as in conv.h; P output positions (OH * OW), K elements of a patch of one group
// (C / G * KH * KW).
#include <algorithm>
#include <cstring>
#include <vector>

#include <tessera/core/dispatch.h>
#include <tessera/core/factory.h>
#include <tessera/core/kernels/common/compute.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/conv/conv.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/gemm/gemm.h>
#include <tessera/core/parallel.h>

namespace tessera::kernels {
namespace {

struct Sizes : ConvSizes {
  int64_t K, P;

  Sizes(const Shape& x, const Shape& weight, const ConvGeometry& g)
      : ConvSizes(x, weight, g), K(C / G * KH * KW), P(OH * OW) {}

  // Samples whose patches are unfolded at a time.
  int64_t chunk(int64_t element_bytes) const {
    const int64_t bytes = std::max<int64_t>(1, G * K * P * element_bytes);
    return std::clamp<int64_t>((int64_t{32} << 20) / bytes, 1, std::max<int64_t>(N, 1));
  }
};

// Columns of one group of one sample: row (c, kh, kw) holds what that kernel element meets at each
// output position. x: (C / G, H, W) of the group; columns: (K, P) with a row stride.
template <class T>
void unfold(const Sizes& n, const T* x, T* columns, int64_t row_stride) {
  const int64_t* stride = n.geometry.stride;
  const int64_t* padding = n.geometry.padding;
  const int64_t* dilation = n.geometry.dilation;
  for (int64_t row = 0; row < n.K; ++row, columns += row_stride) {
    const int64_t c = row / (n.KH * n.KW), kh = row / n.KW % n.KH, kw = row % n.KW;
    const int64_t w0 = kw * dilation[1] - padding[1];
    for (int64_t oh = 0; oh < n.OH; ++oh) {
      T* target = columns + oh * n.OW;
      const int64_t h = oh * stride[0] - padding[0] + kh * dilation[0];
      if (h < 0 || h >= n.H) {
        std::fill(target, target + n.OW, store<T>(0.0f));
        continue;
      }
      const T* source = x + (c * n.H + h) * n.W;
      for (int64_t ow = 0; ow < n.OW; ++ow) {
        const int64_t w = w0 + ow * stride[1];
        target[ow] = w >= 0 && w < n.W ? source[w] : store<T>(0.0f);
      }
    }
  }
}

// The transpose of unfold: each position of x collects what the patches hold for it.
template <class A>
void fold(const Sizes& n, const A* columns, A* x) {
  const int64_t* stride = n.geometry.stride;
  const int64_t* padding = n.geometry.padding;
  const int64_t* dilation = n.geometry.dilation;
  std::fill(x, x + n.C / n.G * n.H * n.W, A(0));
  for (int64_t row = 0; row < n.K; ++row, columns += n.P) {
    const int64_t c = row / (n.KH * n.KW), kh = row / n.KW % n.KH, kw = row % n.KW;
    for (int64_t oh = 0; oh < n.OH; ++oh) {
      const int64_t h = oh * stride[0] - padding[0] + kh * dilation[0];
      if (h < 0 || h >= n.H) continue;
      for (int64_t ow = 0; ow < n.OW; ++ow) {
        const int64_t w = ow * stride[1] - padding[1] + kw * dilation[1];
        if (w >= 0 && w < n.W) x[(c * n.H + h) * n.W + w] += columns[oh * n.OW + ow];
      }
    }
  }
}

// Offsets of (sample, group) pairs.
std::vector<int64_t> pair_offsets(int64_t samples, int64_t groups, int64_t sample_stride,
                                  int64_t group_stride) {
  std::vector<int64_t> offsets;
  offsets.reserve(static_cast<size_t>(samples * groups));
  for (int64_t i = 0; i < samples; ++i) {
    for (int64_t g = 0; g < groups; ++g) offsets.push_back(i * sample_stride + g * group_stride);
  }
  return offsets;
}

template <class T>
void forward(const Sizes& n, const T* x, const T* weight, const T* bias, T* result) {
  const int64_t chunk = n.chunk(sizeof(T)), rows = n.O / n.G;
  const Tensor columns = raw::empty({chunk, n.G, n.K, n.P}, dtype_of<T>);
  T* const unfolded = columns.data_as<T>();
  for (int64_t first = 0; first < n.N; first += chunk) {
    const int64_t samples = std::min(chunk, n.N - first);
    parallel_for(samples * n.G, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        unfold(n, x + (first * n.G + i) * (n.C / n.G) * n.H * n.W, unfolded + i * n.K * n.P, n.P);
      }
    });
    // The bias of a group's rows: one product a group where there are several.
    for (int64_t g = 0; g < n.G; ++g) {
      const std::vector<int64_t> b_offsets = pair_offsets(samples, 1, n.G * n.K * n.P, 0);
      const std::vector<int64_t> c_offsets = pair_offsets(samples, 1, n.O * n.P, 0);
      const std::vector<int64_t> a_offsets(static_cast<size_t>(samples), 0);
      gemm({.m = rows,
            .n = n.P,
            .k = n.K,
            .dtype = dtype_of<T>,
            .result_dtype = dtype_of<T>,
            .a = {weight + g * rows * n.K, n.K, 1},
            .b = {unfolded + g * n.K * n.P, n.P, 1},
            .c = result + first * n.O * n.P + g * rows * n.P,
            .c_row_stride = n.P,
            .bias = bias == nullptr ? nullptr : bias + g * rows,
            .bias_kind = bias == nullptr ? GemmBias::kNone : GemmBias::kRow,
            .batch = samples,
            .a_offsets = a_offsets.data(),
            .b_offsets = b_offsets.data(),
            .c_offsets = c_offsets.data()});
    }
  }
}

template <class T>
void input_gradient(const Sizes& n, const T* grad, const T* weight, T* result) {
  using A = Compute<T>;
  const int64_t chunk = n.chunk(sizeof(A)), rows = n.O / n.G, plane = n.C / n.G * n.H * n.W;
  const Tensor columns = raw::empty({chunk, n.G, n.K, n.P}, dtype_of<A>);
  const Tensor planes = raw::empty({chunk, n.G, plane}, dtype_of<A>);
  A* const unfolded = columns.data_as<A>();
  for (int64_t first = 0; first < n.N; first += chunk) {
    const int64_t samples = std::min(chunk, n.N - first);
    const std::vector<int64_t> a_offsets = pair_offsets(samples, n.G, 0, rows * n.K);
    const std::vector<int64_t> b_offsets = pair_offsets(samples, n.G, n.O * n.P, rows * n.P);
    const std::vector<int64_t> c_offsets = pair_offsets(samples, n.G, n.G * n.K * n.P, n.K * n.P);
    gemm({.m = n.K,
          .n = n.P,
          .k = rows,
          .dtype = dtype_of<T>,
          .result_dtype = dtype_of<A>,
          .a = {weight, 1, n.K},
          .b = {grad + first * n.O * n.P, n.P, 1},
          .c = unfolded,
          .c_row_stride = n.P,
          .batch = samples * n.G,
          .a_offsets = a_offsets.data(),
          .b_offsets = b_offsets.data(),
          .c_offsets = c_offsets.data()});
    parallel_for(samples * n.G, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        A* sums = planes.data_as<A>() + i * plane;
        fold(n, unfolded + i * n.K * n.P, sums);
        T* target = result + (first * n.G + i) * plane;
        for (int64_t j = 0; j < plane; ++j) target[j] = store<T>(sums[j]);
      }
    });
  }
}

// One long product a group and chunk: positions of all samples side by side.
template <class T>
void weight_gradient(const Sizes& n, const T* grad, const T* x, Compute<T>* result) {
  using A = Compute<T>;
  const int64_t chunk = n.chunk(sizeof(T)), rows = n.O / n.G;
  const Tensor columns = raw::empty({n.G, n.K, chunk * n.P}, dtype_of<T>);
  const Tensor grads = raw::empty({n.G, rows, chunk * n.P}, dtype_of<T>);
  for (int64_t first = 0; first < n.N; first += chunk) {
    const int64_t samples = std::min(chunk, n.N - first), width = samples * n.P;
    parallel_for(samples * n.G, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t sample = i / n.G, g = i % n.G;
        unfold(n, x + (first * n.G + i) * (n.C / n.G) * n.H * n.W,
               columns.data_as<T>() + g * n.K * width + sample * n.P, width);
        const T* source = grad + ((first + sample) * n.O + g * rows) * n.P;
        T* target = grads.data_as<T>() + g * rows * width + sample * n.P;
        for (int64_t row = 0; row < rows; ++row) {
          std::copy(source + row * n.P, source + (row + 1) * n.P, target + row * width);
        }
      }
    });
    const std::vector<int64_t> a_offsets = pair_offsets(1, n.G, 0, rows * width);
    const std::vector<int64_t> b_offsets = pair_offsets(1, n.G, 0, n.K * width);
    const std::vector<int64_t> c_offsets = pair_offsets(1, n.G, 0, rows * n.K);
    gemm({.m = rows,
          .n = n.K,
          .k = width,
          .dtype = dtype_of<T>,
          .result_dtype = dtype_of<A>,
          .a = {grads.data(), width, 1},
          .b = {columns.data(), 1, width},
          .c = result,
          .c_row_stride = n.K,
          .beta = first > 0 ? 1.0 : 0.0,
          .batch = n.G,
          .a_offsets = a_offsets.data(),
          .b_offsets = b_offsets.data(),
          .c_offsets = c_offsets.data()});
  }
}

}  // namespace

Tensor conv2d(const Tensor& x, const Tensor& weight, const Tensor& bias,
              const ConvGeometry& geometry) {
  if (x.device().is_cuda()) {
    return on_cuda<kernels::conv2d>("conv2d", x.device(), x, weight, bias, geometry);
  }
  const Sizes n(x.shape(), weight.shape(), geometry);
  const Tensor result = raw::empty({n.N, n.O, n.OH, n.OW}, x.dtype(), x.device());
  if (result.is_meta() || result.numel() == 0) return result;
  const Tensor dense_x = contiguous(x), dense_weight = contiguous(weight);
  const Tensor dense_bias = bias.defined() ? contiguous(bias) : Tensor();
  dispatch_floating(x.dtype(), "conv2d", [&]<class T>() {
    forward<T>(n, dense_x.data_as<T>(), dense_weight.data_as<T>(),
               bias.defined() ? dense_bias.data_as<T>() : nullptr, result.data_as<T>());
  });
  return result;
}

Tensor conv2d_input_gradient(const Tensor& grad, const Tensor& weight, const Shape& x_shape,
                             const ConvGeometry& geometry) {
  if (grad.device().is_cuda()) {
    return on_cuda<kernels::conv2d_input_gradient>("conv2d", grad.device(), grad, weight, x_shape,
                                                   geometry);
  }
  const Sizes n(x_shape, weight.shape(), geometry);
  const Tensor result = raw::empty(x_shape, grad.dtype(), grad.device());
  if (result.is_meta() || result.numel() == 0) return result;
  const Tensor dense_grad = contiguous(grad), dense_weight = contiguous(weight);
  dispatch_floating(grad.dtype(), "conv2d", [&]<class T>() {
    input_gradient<T>(n, dense_grad.data_as<T>(), dense_weight.data_as<T>(), result.data_as<T>());
  });
  return result;
}

Tensor conv2d_weight_gradient(const Tensor& grad, const Tensor& x, const Shape& weight_shape,
                              const ConvGeometry& geometry) {
  if (grad.device().is_cuda()) {
    return on_cuda<kernels::conv2d_weight_gradient>("conv2d", grad.device(), grad, x, weight_shape,
                                                    geometry);
  }
  const Sizes n(x.shape(), weight_shape, geometry);
  const DType sum_dtype = compute_dtype(x.dtype());
  const Tensor result = raw::empty(weight_shape, sum_dtype, x.device());
  if (!result.is_meta() && result.numel() > 0) {
    if (n.N * n.P == 0) {
      fill(result, 0);
    } else {
      const Tensor dense_grad = contiguous(grad), dense_x = contiguous(x);
      dispatch_floating(x.dtype(), "conv2d", [&]<class T>() {
        weight_gradient<T>(n, dense_grad.data_as<T>(), dense_x.data_as<T>(),
                           result.data_as<Compute<T>>());
      });
    }
  }
  return x.dtype() == sum_dtype ? result : convert(result, x.dtype());
}

}  // namespace tessera::kernels
