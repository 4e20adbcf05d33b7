#include <tessera/core/kernels/softmax/softmax_blocks.h>
#include <tessera/core/kernels/softmax/softmax_row.h>

namespace tessera::kernels::TS_SIMD {
namespace {

template <class T>
TS_HD void softmax_row(bool log, const T* x, T* y, int64_t n) {
  using C = Compute<T>;
  C buffer[kBlock], exponentials[kBlock], result[kBlock];
  const RowExponentials<C> row = row_exponentials<C>(x, n, buffer, exponentials);
  if (n == 0) return;
  const C largest = row.largest;
  const C log_sum = static_cast<C>(__builtin_log(row.sum));
  const C inverse = static_cast<C>(1 / row.sum);
  const bool one_block = n <= kBlock && row.sum != 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t count = n - begin < kBlock ? n - begin : kBlock;
    C* out = stage_for_write<C>(y + begin, static_cast<C*>(result));
    if (one_block && !log) {
      for (int64_t i = 0; i < count; ++i) out[i] = exponentials[i] * inverse;
    } else {
      const C* block = stage_in<C>(x + begin, count, buffer);
      if (log) {
        for (int64_t i = 0; i < count; ++i) out[i] = (block[i] - largest) - log_sum;
      } else {
        for (int64_t i = 0; i < count; ++i)
          out[i] = exp_of_nonpositive(block[i] - largest) * inverse;
      }
    }
    stage_out<C>(y + begin, count, static_cast<const C*>(result));
  }
}

template <class T>
TS_HD void softmax_row_backward(bool log, const T* dy, const T* y, T* dx, int64_t n) {
  using C = Compute<T>;
  C dy_buffer[kBlock], y_buffer[kBlock], products[kBlock];
  double sum = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t count = n - begin < kBlock ? n - begin : kBlock;
    const C* grad = stage_in<C>(dy + begin, count, dy_buffer);
    if (log) {
      sum += static_cast<double>(fold_lanes(grad, count, C(0), AddStep{}, AddStep{}));
    } else {
      const C* out = stage_in<C>(y + begin, count, y_buffer);
      for (int64_t i = 0; i < count; ++i) products[i] = grad[i] * out[i];
      sum += static_cast<double>(
          fold_lanes(static_cast<const C*>(products), count, C(0), AddStep{}, AddStep{}));
    }
  }
  const C total = static_cast<C>(sum);
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t count = n - begin < kBlock ? n - begin : kBlock;
    const C* grad = stage_in<C>(dy + begin, count, dy_buffer);
    const C* out = stage_in<C>(y + begin, count, y_buffer);
    C* result = stage_for_write<C>(dx + begin, static_cast<C*>(products));
    if (log) {
      for (int64_t i = 0; i < count; ++i) result[i] = grad[i] - math::exp(out[i]) * total;
    } else {
      for (int64_t i = 0; i < count; ++i) result[i] = out[i] * (grad[i] - total);
    }
    stage_out<C>(dx + begin, count, static_cast<const C*>(products));
  }
}

}  // namespace

void softmax_rows(DType dtype, bool log, const void* x, void* y, int64_t rows, int64_t n) {
  visit_floating(dtype, [&]<class T>() {
    for (int64_t r = 0; r < rows; ++r) {
      softmax_row(log, static_cast<const T*>(x) + r * n, static_cast<T*>(y) + r * n, n);
    }
  });
}

void softmax_rows_backward(DType dtype, bool log, const void* dy, const void* y, void* dx,
                           int64_t rows, int64_t n) {
  visit_floating(dtype, [&]<class T>() {
    for (int64_t r = 0; r < rows; ++r) {
      softmax_row_backward(log, static_cast<const T*>(dy) + r * n, static_cast<const T*>(y) + r * n,
                           static_cast<T*>(dx) + r * n, n);
    }
  });
}

void softmax_columns(DType dtype, bool log, const void* x_data, void* y_data, int64_t n,
                     int64_t stride, int64_t columns) {
  visit_floating(dtype, [&]<class T>() {
    using C = Compute<T>;
    const T* x = static_cast<const T*>(x_data);
    T* y = static_cast<T*>(y_data);
    C buffer[kSoftmaxTile], largest[kSoftmaxTile], scale[kSoftmaxTile], result[kSoftmaxTile];
    double sums[kSoftmaxTile];
    for (int64_t c = 0; c < columns; ++c) {
      largest[c] = static_cast<C>(-__builtin_inf());
      sums[c] = 0;
    }
    for (int64_t r = 0; r < n; ++r) {
      const C* row = stage_in<C>(x + r * stride, columns, buffer);
      for (int64_t c = 0; c < columns; ++c) {
        largest[c] = (row[c] > largest[c]) | (row[c] != row[c]) ? row[c] : largest[c];
      }
    }
    for (int64_t r = 0; r < n; ++r) {
      const C* row = stage_in<C>(x + r * stride, columns, buffer);
      for (int64_t c = 0; c < columns; ++c) result[c] = exp_of_nonpositive(row[c] - largest[c]);
      for (int64_t c = 0; c < columns; ++c) sums[c] += static_cast<double>(result[c]);
    }
    for (int64_t c = 0; c < columns; ++c) {
      scale[c] = static_cast<C>(log ? __builtin_log(sums[c]) : 1 / sums[c]);
    }
    for (int64_t r = 0; r < n; ++r) {
      const C* row = stage_in<C>(x + r * stride, columns, buffer);
      C* out = stage_for_write<C>(y + r * stride, static_cast<C*>(result));
      if (log) {
        for (int64_t c = 0; c < columns; ++c) out[c] = (row[c] - largest[c]) - scale[c];
      } else {
        for (int64_t c = 0; c < columns; ++c)
          out[c] = exp_of_nonpositive(row[c] - largest[c]) * scale[c];
      }
      stage_out<C>(y + r * stride, columns, static_cast<const C*>(result));
    }
  });
}

void softmax_columns_backward(DType dtype, bool log, const void* dy_data, const void* y_data,
                              void* dx_data, int64_t n, int64_t stride, int64_t columns) {
  visit_floating(dtype, [&]<class T>() {
    using C = Compute<T>;
    const T* dy = static_cast<const T*>(dy_data);
    const T* y = static_cast<const T*>(y_data);
    T* dx = static_cast<T*>(dx_data);
    C dy_buffer[kSoftmaxTile], y_buffer[kSoftmaxTile], total[kSoftmaxTile], result[kSoftmaxTile];
    double sums[kSoftmaxTile];
    for (int64_t c = 0; c < columns; ++c) sums[c] = 0;
    for (int64_t r = 0; r < n; ++r) {
      const C* grad = stage_in<C>(dy + r * stride, columns, dy_buffer);
      const C* out = stage_in<C>(y + r * stride, columns, y_buffer);
      for (int64_t c = 0; c < columns; ++c) {
        sums[c] += static_cast<double>(log ? grad[c] : grad[c] * out[c]);
      }
    }
    for (int64_t c = 0; c < columns; ++c) total[c] = static_cast<C>(sums[c]);
    for (int64_t r = 0; r < n; ++r) {
      const C* grad = stage_in<C>(dy + r * stride, columns, dy_buffer);
      const C* out = stage_in<C>(y + r * stride, columns, y_buffer);
      C* to = stage_for_write<C>(dx + r * stride, static_cast<C*>(result));
      if (log) {
        for (int64_t c = 0; c < columns; ++c) to[c] = grad[c] - math::exp(out[c]) * total[c];
      } else {
        for (int64_t c = 0; c < columns; ++c) to[c] = out[c] * (grad[c] - total[c]);
      }
      stage_out<C>(dx + r * stride, columns, static_cast<const C*>(result));
    }
  });
}

}  // namespace tessera::kernels::TS_SIMD
