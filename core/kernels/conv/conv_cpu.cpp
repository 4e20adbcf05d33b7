// Letters as in conv.h; P output positions (OH * OW), K elements of a patch of one group
// (C / G * KH * KW).
#include <algorithm>
#include <vector>

#include <tessera/core/dispatch.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/common/compute.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/conv/conv.h>
#include <tessera/core/kernels/conv/patches.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/gemm/gemm.h>
#include <tessera/core/parallel.h>

namespace tessera::kernels {
namespace {

struct Sizes : ConvSizes {
  int64_t K, P;

  Sizes(const Shape& x, const Shape& weight, const ConvGeometry& g)
      : ConvSizes(x, weight, g), K(C / G * KH * KW), P(OH * OW) {}

  // Patches are the planes themselves.
  bool is_pointwise() const {
    const ConvGeometry& g = geometry;
    return KH == 1 && KW == 1 && g.stride[0] == 1 && g.stride[1] == 1 && g.padding[0] == 0 &&
           g.padding[1] == 0 && OH == H && OW == W;
  }

  // Samples whose patches are unfolded at a time.
  int64_t chunk(int64_t element_bytes) const {
    const int64_t bytes = std::max<int64_t>(1, G * K * P * element_bytes);
    return std::clamp<int64_t>((int64_t{32} << 20) / bytes, 1, std::max<int64_t>(N, 1));
  }
};

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

// Groups of samples from `first` on: columns [samples, G, K, P].
template <class T>
void unfold(const Sizes& n, const T* x, T* columns, int64_t first, int64_t samples) {
  parallel_for(samples * n.G, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      TS_SIMD_CALL(unfold_patches, n, sizeof(T), x + (first * n.G + i) * (n.C / n.G) * n.H * n.W,
                   columns + i * n.K * n.P, n.P);
    }
  });
}

template <class T>
void forward(const Sizes& n, const T* x, const T* weight, const T* bias, T* result) {
  const bool pointwise = n.is_pointwise();
  const int64_t chunk = pointwise ? n.N : n.chunk(sizeof(T)), rows = n.O / n.G;
  const Tensor columns = pointwise ? Tensor() : raw::empty({chunk, n.G, n.K, n.P}, dtype_of<T>);
  const T* const unfolded = pointwise ? x : columns.data_as<T>();
  for (int64_t first = 0; first < n.N; first += chunk) {
    const int64_t samples = std::min(chunk, n.N - first);
    if (!pointwise) unfold(n, x, columns.data_as<T>(), first, samples);
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
  const bool pointwise = n.is_pointwise();  // columns are the result then
  const int64_t chunk = pointwise ? n.N : n.chunk(sizeof(A)), rows = n.O / n.G;
  const int64_t plane = n.C / n.G * n.H * n.W;
  const Tensor columns = pointwise ? Tensor() : raw::empty({chunk, n.G, n.K, n.P}, dtype_of<A>);
  // Sums are rounded once.
  const Tensor planes =
      std::is_same_v<A, T> || pointwise ? Tensor() : raw::empty({chunk, n.G, plane}, dtype_of<A>);
  A* const unfolded = pointwise ? nullptr : columns.data_as<A>();
  for (int64_t first = 0; first < n.N; first += chunk) {
    const int64_t samples = std::min(chunk, n.N - first);
    const std::vector<int64_t> a_offsets = pair_offsets(samples, n.G, 0, rows * n.K);
    const std::vector<int64_t> b_offsets = pair_offsets(samples, n.G, n.O * n.P, rows * n.P);
    const std::vector<int64_t> c_offsets = pair_offsets(samples, n.G, n.G * n.K * n.P, n.K * n.P);
    gemm({.m = n.K,
          .n = n.P,
          .k = rows,
          .dtype = dtype_of<T>,
          .result_dtype = pointwise ? dtype_of<T> : dtype_of<A>,
          .a = {weight, 1, n.K},
          .b = {grad + first * n.O * n.P, n.P, 1},
          .c = pointwise ? static_cast<void*>(result) : unfolded,
          .c_row_stride = n.P,
          .batch = samples * n.G,
          .a_offsets = a_offsets.data(),
          .b_offsets = b_offsets.data(),
          .c_offsets = c_offsets.data()});
    if (pointwise) continue;
    parallel_for(samples * n.G, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        T* const target = result + (first * n.G + i) * plane;
        if constexpr (std::is_same_v<A, T>) {
          TS_SIMD_CALL(fold_patches, n, unfolded + i * n.K * n.P, target);
        } else {
          A* const sums = planes.data_as<A>() + i * plane;
          TS_SIMD_CALL(fold_patches, n, unfolded + i * n.K * n.P, sums);
          for (int64_t j = 0; j < plane; ++j) target[j] = store<T>(sums[j]);
        }
      }
    });
  }
}

// Positions of a product of the weight gradient, at least: with several parts of the samples there
// is work for several threads. Their sums are added in order.
constexpr int64_t kPartPositions = 1024;
constexpr int64_t kMostParts = 32;

// Products of equal parts of the samples: positions of all samples of a part side by side.
template <class T>
void weight_gradient(const Sizes& n, const T* grad, const T* x, Compute<T>* result) {
  using A = Compute<T>;
  const int64_t chunk = n.chunk(sizeof(T)), rows = n.O / n.G, weights = n.O * n.K;
  const int64_t parts =
      std::clamp<int64_t>(chunk * n.P / kPartPositions, 1, std::min(chunk, kMostParts));
  const int64_t share = (chunk + parts - 1) / parts;  // samples of a part
  const Tensor columns = raw::empty({parts, n.G, n.K, share * n.P}, dtype_of<T>);
  const Tensor grads = raw::empty({parts, n.G, rows, share * n.P}, dtype_of<T>);
  const Tensor sums = parts == 1 ? Tensor() : raw::empty({parts, n.O, n.K}, dtype_of<A>);
  for (int64_t first = 0; first < n.N; first += chunk) {
    const int64_t samples = std::min(chunk, n.N - first);
    // Of the last part there may be less than of the others, or nothing.
    const auto samples_of = [&](int64_t part) {
      return std::clamp<int64_t>(samples - part * share, 0, share);
    };
    parallel_for(samples * n.G, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t sample = i / n.G, g = i % n.G, part = sample / share;
        const int64_t width = samples_of(part) * n.P, column = sample % share * n.P;
        const int64_t place = (part * n.G + g) * share * n.P;  // of the group, for each row of it
        TS_SIMD_CALL(unfold_patches, n, sizeof(T), x + (first * n.G + i) * (n.C / n.G) * n.H * n.W,
                     columns.data_as<T>() + place * n.K + column, width);
        const T* source = grad + ((first + sample) * n.O + g * rows) * n.P;
        T* target = grads.data_as<T>() + place * rows + column;
        for (int64_t row = 0; row < rows; ++row) {
          std::copy(source + row * n.P, source + (row + 1) * n.P, target + row * width);
        }
      }
    });
    const int64_t used = (samples + share - 1) / share;
    const bool adds = first > 0 && parts == 1;
    const auto multiply = [&](int64_t begin, int64_t end, int64_t width) {
      if (begin == end) return;
      const int64_t all = share * n.P;
      const std::vector<int64_t> a_offsets =
          pair_offsets(end - begin, n.G, n.G * rows * all, rows * all);
      const std::vector<int64_t> b_offsets =
          pair_offsets(end - begin, n.G, n.G * n.K * all, n.K * all);
      const std::vector<int64_t> c_offsets = pair_offsets(end - begin, n.G, weights, rows * n.K);
      A* const target = parts == 1 ? result : sums.data_as<A>() + begin * weights;
      gemm({.m = rows,
            .n = n.K,
            .k = width,
            .dtype = dtype_of<T>,
            .result_dtype = dtype_of<A>,
            .a = {grads.data_as<T>() + begin * n.G * rows * all, width, 1},
            .b = {columns.data_as<T>() + begin * n.G * n.K * all, 1, width},
            .c = target,
            .c_row_stride = n.K,
            .beta = adds ? 1.0 : 0.0,
            .batch = (end - begin) * n.G,
            .a_offsets = a_offsets.data(),
            .b_offsets = b_offsets.data(),
            .c_offsets = c_offsets.data()});
    };
    const int64_t last = samples_of(used - 1) == share ? used : used - 1;
    multiply(0, last, share * n.P);
    multiply(last, used, samples_of(used - 1) * n.P);
    if (parts == 1) continue;
    for (int64_t part = 0; part < used; ++part) {
      const A* source = sums.data_as<A>() + part * weights;
      const bool sets = first == 0 && part == 0;
      for (int64_t i = 0; i < weights; ++i) result[i] = sets ? source[i] : result[i] + source[i];
    }
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
