#include <algorithm>

#include <tessera/core/dispatch.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/pool/max_pool.h>
#include <tessera/core/kernels/pool/pool.h>
#include <tessera/core/parallel.h>

namespace tessera::kernels {
namespace {

Shape with_plane(const Shape& shape, int64_t rows, int64_t columns) {
  Shape result = shape.slice(0, shape.size() - 2);
  result.push_back(rows);
  result.push_back(columns);
  return result;
}

// Planes of a loop's grain: about 32K elements.
int64_t plane_grain(int64_t plane) {
  return std::max<int64_t>(1, 32768 / std::max<int64_t>(plane, 1));
}

}  // namespace

Tensor window_sum(const Tensor& x, const WindowMap& rows, const WindowMap& columns) {
  if (x.device().is_cuda()) {
    return on_cuda<kernels::window_sum>("avg_pool", x.device(), x, rows, columns);
  }
  const int64_t H = rows.input_size, W = columns.input_size, OH = rows.size(), OW = columns.size();
  const Tensor result = raw::empty(with_plane(x.shape(), OH, OW), x.dtype(), x.device());
  if (result.is_meta() || result.numel() == 0) return result;
  const Tensor source = contiguous(x);
  dispatch_floating(x.dtype(), "pool", [&]<class T>() {
    using A = Compute<T>;
    parallel_for(result.numel() / (OH * OW), plane_grain(H * W), [&](int64_t begin, int64_t end) {
      for (int64_t plane = begin; plane < end; ++plane) {
        const T* in = source.data_as<T>() + plane * H * W;
        T* out = result.data_as<T>() + plane * OH * OW;
        for (int64_t i = 0; i < OH; ++i) {
          const size_t r = static_cast<size_t>(i);
          for (int64_t j = 0; j < OW; ++j) {
            const size_t c = static_cast<size_t>(j);
            A sum = 0;
            for (int64_t h = rows.begin[r]; h < rows.end[r]; ++h) {
              for (int64_t w = columns.begin[c]; w < columns.end[c]; ++w) {
                sum += load<A>(in[h * W + w]);
              }
            }
            out[i * OW + j] = store<T>(sum * static_cast<A>(rows.weight[r] * columns.weight[c]));
          }
        }
      }
    });
  });
  return result;
}

Tensor window_sum_transposed(const Tensor& grad, const WindowMap& rows, const WindowMap& columns) {
  if (grad.device().is_cuda()) {
    return on_cuda<kernels::window_sum_transposed>("avg_pool", grad.device(), grad, rows, columns);
  }
  const int64_t H = rows.input_size, W = columns.input_size, OH = rows.size(), OW = columns.size();
  const Tensor result = raw::empty(with_plane(grad.shape(), H, W), grad.dtype(), grad.device());
  if (result.is_meta() || result.numel() == 0) return result;
  const Tensor source = contiguous(grad);
  dispatch_floating(grad.dtype(), "pool", [&]<class T>() {
    using A = Compute<T>;
    // Sums of overlapping windows are rounded once.
    const Tensor sums_tensor =
        std::is_same_v<A, T> ? result : raw::empty(result.shape(), dtype_of<A>);
    parallel_for(result.numel() / (H * W), plane_grain(H * W), [&](int64_t begin, int64_t end) {
      for (int64_t plane = begin; plane < end; ++plane) {
        const T* in = source.data_as<T>() + plane * OH * OW;
        A* sums = sums_tensor.data_as<A>() + plane * H * W;
        std::fill(sums, sums + H * W, A(0));
        for (int64_t i = 0; i < OH; ++i) {
          const size_t r = static_cast<size_t>(i);
          for (int64_t j = 0; j < OW; ++j) {
            const size_t c = static_cast<size_t>(j);
            const A share =
                load<A>(in[i * OW + j]) * static_cast<A>(rows.weight[r] * columns.weight[c]);
            for (int64_t h = rows.begin[r]; h < rows.end[r]; ++h) {
              for (int64_t w = columns.begin[c]; w < columns.end[c]; ++w) sums[h * W + w] += share;
            }
          }
        }
        if constexpr (!std::is_same_v<A, T>) {
          T* out = result.data_as<T>() + plane * H * W;
          for (int64_t i = 0; i < H * W; ++i) out[i] = store<T>(sums[i]);
        }
      }
    });
  });
  return result;
}

MaxPool max_pool(const Tensor& x, const int64_t (&kernel)[2], const ConvGeometry& geometry,
                 int64_t OH, int64_t OW) {
  if (x.device().is_cuda()) {
    return on_cuda<kernels::max_pool>("max_pool", x.device(), x, kernel, geometry, OH, OW);
  }
  const int64_t H = x.size(-2), W = x.size(-1);
  MaxPool result{raw::empty(with_plane(x.shape(), OH, OW), x.dtype(), x.device()),
                 raw::empty(with_plane(x.shape(), OH, OW), kI64, x.device())};
  if (x.is_meta() || result.values.numel() == 0) return result;
  const Tensor source = contiguous(x);
  const PoolWindows windows{H, W, kernel[0], kernel[1], OH, OW, geometry};
  dispatch_floating(x.dtype(), "max_pool2d", [&]<class T>() {
    parallel_for(result.values.numel() / (OH * OW), plane_grain(H * W),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t plane = begin; plane < end; ++plane) {
                     TS_SIMD_CALL(max_pool_plane, windows, source.data_as<T>() + plane * H * W,
                                  result.values.data_as<T>() + plane * OH * OW,
                                  result.indices.data_as<int64_t>() + plane * OH * OW);
                   }
                 });
  });
  return result;
}

}  // namespace tessera::kernels
