#include <tessera/core/kernels/common/lanes.h>
#include <tessera/core/kernels/norm/norm_blocks.h>

namespace tessera::kernels::TS_SIMD {
namespace {

struct Add {
  TS_HD auto operator()(auto a, auto v) const { return a + v; }
};

// Rows up to this length are converted once and kept in L1; longer ones are converted again by each
// pass.
constexpr int64_t kRow = 4096;

template <class C>
TS_HD double sum_of(const C* x, int64_t n) {
  double sum = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t count = n - begin < kBlock ? n - begin : kBlock;
    sum += static_cast<double>(fold_lanes(x + begin, count, C(0), Add{}, Add{}));
  }
  return sum;
}
template <class C>
TS_HD double sum_of_squares(const C* x, int64_t n, C mean) {
  double sum = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t count = n - begin < kBlock ? n - begin : kBlock;
    sum += static_cast<double>(fold_lanes(
        x + begin, count, C(0),
        [mean](auto a, auto v) TS_LANES {
          const auto deviation = v - mean;
          return a + deviation * deviation;
        },
        Add{}));
  }
  return sum;
}
// Calls f(first column, block, count) for the pieces of a row; one piece where it fits.
template <class C, class T, class F>
TS_HD void for_pieces(const T* x, int64_t n, C* buffer, bool staged, F&& f) {
  if (std::is_same_v<C, T> || staged) {
    const C* row = buffer;
    if constexpr (std::is_same_v<C, T>) row = x;
    f(int64_t{0}, row, n);
    return;
  }
  for (int64_t begin = 0; begin < n; begin += kRow) {
    const int64_t count = n - begin < kRow ? n - begin : kRow;
    f(begin, stage_in<C>(x + begin, count, buffer), count);
  }
}

template <class T>
TS_HD void row_norm(const RowNormBlock& b) {
  using C = Compute<T>;
  const int64_t n = b.C;
  const C* weight = static_cast<const C*>(b.weight);
  const C* bias = static_cast<const C*>(b.bias);
  C* mean_out = static_cast<C*>(b.mean);
  C* rstd_out = static_cast<C*>(b.rstd);
  C buffer[kRow], result[kBlock];
  for (int64_t r = 0; r < b.rows; ++r) {
    const T* x = static_cast<const T*>(b.x) + r * n;
    T* y = static_cast<T*>(b.y) + r * n;
    if (b.residual != nullptr) {
      const T* residual = static_cast<const T*>(b.residual) + r * n;
      T* sum = static_cast<T*>(b.sum) + r * n;
      for (int64_t i = 0; i < n; ++i) sum[i] = store<T>(load<C>(x[i]) + load<C>(residual[i]));
      x = sum;
    }
    const bool staged = !std::is_same_v<C, T> && n <= kRow;
    if (staged) stage_in<C>(x, n, static_cast<C*>(buffer));
    C mean = 0;
    if (mean_out != nullptr) {
      double sum = 0;
      for_pieces<C>(x, n, static_cast<C*>(buffer), staged,
                    [&](int64_t, const C* piece, int64_t count)
                        TS_LANES { sum += sum_of(piece, count); });
      mean = static_cast<C>(sum / static_cast<double>(n));
      mean_out[r] = mean;
    }
    double squares = 0;
    for_pieces<C>(x, n, static_cast<C*>(buffer), staged,
                  [&](int64_t, const C* piece, int64_t count)
                      TS_LANES { squares += sum_of_squares(piece, count, mean); });
    const double variance = squares / static_cast<double>(n);
    const double overflowed = mean_out != nullptr ? variance - variance : 0;  // NaN, see norm.h
    const C rstd = static_cast<C>(1 / __builtin_sqrt(variance + b.eps) + overflowed);
    rstd_out[r] = rstd;
    for_pieces<C>(x, n, static_cast<C*>(buffer), staged,
                  [&](int64_t first, const C* piece, int64_t length) TS_LANES {
                    for (int64_t begin = 0; begin < length; begin += kBlock) {
                      const int64_t count = length - begin < kBlock ? length - begin : kBlock;
                      const C* in = piece + begin;
                      const int64_t column = first + begin;
                      C* TS_RESTRICT out = stage_for_write<C>(y + column, static_cast<C*>(result));
                      if (weight != nullptr && bias != nullptr) {
                        const C *w = weight + column, *add = bias + column;
                        for (int64_t i = 0; i < count; ++i)
                          out[i] = (in[i] - mean) * rstd * w[i] + add[i];
                      } else if (weight != nullptr) {
                        const C* w = weight + column;
                        for (int64_t i = 0; i < count; ++i) out[i] = (in[i] - mean) * rstd * w[i];
                      } else if (bias != nullptr) {
                        const C* add = bias + column;
                        for (int64_t i = 0; i < count; ++i) out[i] = (in[i] - mean) * rstd + add[i];
                      } else {
                        for (int64_t i = 0; i < count; ++i) out[i] = (in[i] - mean) * rstd;
                      }
                      stage_out<C>(y + column, count, static_cast<const C*>(result));
                    }
                  });
  }
}

// The row as numbers of the compute type: itself or a copy in scratch.
template <class C, class T>
TS_HD const C* whole_row(const T* x, int64_t n, C* TS_RESTRICT scratch) {
  return stage_in<C>(x, n, scratch);
}

template <class T>
TS_HD void row_norm_gradient(const RowNormGradientBlock& b) {
  using C = Compute<T>;
  const int64_t n = b.C;
  const C* weight = static_cast<const C*>(b.weight);
  const C* means = static_cast<const C*>(b.mean);
  const C* rstds = static_cast<const C*>(b.rstd);
  C* TS_RESTRICT dweight = static_cast<C*>(b.dweight);
  C* TS_RESTRICT dbias = static_cast<C*>(b.dbias);
  C* scratch = static_cast<C*>(b.scratch);
  C products[kBlock], scaled[kBlock];
  for (int64_t r = 0; r < b.rows; ++r) {
    const T* x_row = static_cast<const T*>(b.x) + r * n;
    const T* dy_row = static_cast<const T*>(b.dy) + r * n;
    const C* x = whole_row<C>(x_row, n, scratch);
    const C* dy = whole_row<C>(dy_row, n, scratch != nullptr ? scratch + n : nullptr);
    const C mean = means != nullptr ? means[r] : C(0), rstd = rstds[r];
    double sum = 0, sum_xhat = 0;
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      const int64_t count = n - begin < kBlock ? n - begin : kBlock;
      const C *in = x + begin, *grad = dy + begin;
      for (int64_t i = 0; i < count; ++i) {
        const C g = weight != nullptr ? grad[i] * weight[begin + i] : grad[i];
        scaled[i] = g;
        products[i] = g * ((in[i] - mean) * rstd);
      }
      if (b.dx != nullptr) {
        sum += static_cast<double>(
            fold_lanes(static_cast<const C*>(scaled), count, C(0), Add{}, Add{}));
        sum_xhat += static_cast<double>(
            fold_lanes(static_cast<const C*>(products), count, C(0), Add{}, Add{}));
      }
      if (dweight != nullptr) {
        C* TS_RESTRICT to = dweight + begin;
        for (int64_t i = 0; i < count; ++i) to[i] += grad[i] * ((in[i] - mean) * rstd);
      }
      if (dbias != nullptr) {
        C* TS_RESTRICT to = dbias + begin;
        for (int64_t i = 0; i < count; ++i) to[i] += grad[i];
      }
    }
    if (b.dx == nullptr) continue;
    const C average = means != nullptr ? static_cast<C>(sum / static_cast<double>(n)) : C(0);
    const C along = static_cast<C>(sum_xhat / static_cast<double>(n));
    const T* dsum = b.dsum != nullptr ? static_cast<const T*>(b.dsum) + r * n : nullptr;
    T* dx = static_cast<T*>(b.dx) + r * n;
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      const int64_t count = n - begin < kBlock ? n - begin : kBlock;
      const C *in = x + begin, *grad = dy + begin;
      C* TS_RESTRICT out = stage_for_write<C>(dx + begin, static_cast<C*>(products));
      for (int64_t i = 0; i < count; ++i) {
        const C g = weight != nullptr ? grad[i] * weight[begin + i] : grad[i];
        out[i] = rstd * (g - average - ((in[i] - mean) * rstd) * along);
      }
      if (dsum != nullptr) {
        for (int64_t i = 0; i < count; ++i) out[i] += load<C>(dsum[begin + i]);
      }
      stage_out<C>(dx + begin, count, static_cast<const C*>(products));
    }
  }
}

// Calls f(first, count) for the blocks of a segment.
template <class F>
TS_HD void for_blocks(int64_t n, F&& f) {
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    f(begin, n - begin < kBlock ? n - begin : kBlock);
  }
}

}  // namespace

void row_norm_block(const RowNormBlock& block) {
  visit_floating(block.dtype, [&]<class T>() { row_norm<T>(block); });
}

void row_norm_gradient_block(const RowNormGradientBlock& block) {
  visit_floating(block.dtype, [&]<class T>() { row_norm_gradient<T>(block); });
}

void affine_segment(DType dtype, const void* x_data, void* y_data, int64_t n, double given_mean,
                    double given_scale, double given_shift) {
  visit_floating(dtype, [&]<class T>() {
    using C = Compute<T>;
    const C mean = static_cast<C>(given_mean), scale = static_cast<C>(given_scale);
    const C shift = static_cast<C>(given_shift);
    C buffer[kBlock], result[kBlock];
    for_blocks(n, [&](int64_t begin, int64_t count) TS_LANES {
      const C* x = stage_in<C>(static_cast<const T*>(x_data) + begin, count, buffer);
      T* y = static_cast<T*>(y_data) + begin;
      C* TS_RESTRICT out = stage_for_write<C>(y, static_cast<C*>(result));
      for (int64_t i = 0; i < count; ++i) out[i] = (x[i] - mean) * scale + shift;
      stage_out<C>(y, count, static_cast<const C*>(result));
    });
  });
}

void affine_columns(DType dtype, const void* x_data, void* y_data, int64_t n, const void* mean_data,
                    const void* scale_data, const void* shift_data) {
  visit_floating(dtype, [&]<class T>() {
    using C = Compute<T>;
    C buffer[kBlock], result[kBlock];
    for_blocks(n, [&](int64_t begin, int64_t count) TS_LANES {
      const C* mean = static_cast<const C*>(mean_data) + begin;
      const C* scale = static_cast<const C*>(scale_data) + begin;
      const C* shift = static_cast<const C*>(shift_data) + begin;
      const C* x = stage_in<C>(static_cast<const T*>(x_data) + begin, count, buffer);
      T* y = static_cast<T*>(y_data) + begin;
      C* TS_RESTRICT out = stage_for_write<C>(y, static_cast<C*>(result));
      for (int64_t i = 0; i < count; ++i) out[i] = (x[i] - mean[i]) * scale[i] + shift[i];
      stage_out<C>(y, count, static_cast<const C*>(result));
    });
  });
}

SegmentSums segment_sums(DType dtype, const void* dy_data, const void* x_data, int64_t n,
                         double given_mean, double given_rstd) {
  return visit_floating(dtype, [&]<class T>() -> SegmentSums {
    using C = Compute<T>;
    const C mean = static_cast<C>(given_mean), rstd = static_cast<C>(given_rstd);
    C dy_buffer[kBlock], x_buffer[kBlock], products[kBlock];
    SegmentSums sums{0, 0};
    for_blocks(n, [&](int64_t begin, int64_t count) TS_LANES {
      const C* dy = stage_in<C>(static_cast<const T*>(dy_data) + begin, count, dy_buffer);
      const C* x = stage_in<C>(static_cast<const T*>(x_data) + begin, count, x_buffer);
      for (int64_t i = 0; i < count; ++i) products[i] = dy[i] * ((x[i] - mean) * rstd);
      sums.dy += static_cast<double>(fold_lanes(dy, count, C(0), Add{}, Add{}));
      sums.dy_xhat += static_cast<double>(
          fold_lanes(static_cast<const C*>(products), count, C(0), Add{}, Add{}));
    });
    return sums;
  });
}

void column_sums(DType dtype, const void* dy_data, const void* x_data, int64_t n,
                 const void* mean_data, const void* rstd_data, double* TS_RESTRICT sums_dy,
                 double* TS_RESTRICT sums_dy_xhat) {
  visit_floating(dtype, [&]<class T>() {
    using C = Compute<T>;
    C dy_buffer[kBlock], x_buffer[kBlock];
    for_blocks(n, [&](int64_t begin, int64_t count) TS_LANES {
      const C* mean = static_cast<const C*>(mean_data) + begin;
      const C* rstd = static_cast<const C*>(rstd_data) + begin;
      const C* dy = stage_in<C>(static_cast<const T*>(dy_data) + begin, count, dy_buffer);
      const C* x = stage_in<C>(static_cast<const T*>(x_data) + begin, count, x_buffer);
      for (int64_t i = 0; i < count; ++i) {
        sums_dy[begin + i] += static_cast<double>(dy[i]);
        sums_dy_xhat[begin + i] += static_cast<double>(dy[i] * ((x[i] - mean[i]) * rstd[i]));
      }
    });
  });
}

void gradient_segment(DType dtype, const void* dy_data, const void* x_data, void* dx_data,
                      int64_t n, double given_mean, double given_a, double given_b,
                      double given_c) {
  visit_floating(dtype, [&]<class T>() {
    using C = Compute<T>;
    const C mean = static_cast<C>(given_mean), a = static_cast<C>(given_a);
    const C b = static_cast<C>(given_b), c = static_cast<C>(given_c);
    C dy_buffer[kBlock], x_buffer[kBlock], result[kBlock];
    for_blocks(n, [&](int64_t begin, int64_t count) TS_LANES {
      const C* dy = stage_in<C>(static_cast<const T*>(dy_data) + begin, count, dy_buffer);
      const C* x = stage_in<C>(static_cast<const T*>(x_data) + begin, count, x_buffer);
      T* dx = static_cast<T*>(dx_data) + begin;
      C* TS_RESTRICT out = stage_for_write<C>(dx, static_cast<C*>(result));
      for (int64_t i = 0; i < count; ++i) out[i] = a * dy[i] - b - (x[i] - mean) * c;
      stage_out<C>(dx, count, static_cast<const C*>(result));
    });
  });
}

void gradient_columns(DType dtype, const void* dy_data, const void* x_data, void* dx_data,
                      int64_t n, const void* mean_data, const void* a_data, const void* b_data,
                      const void* c_data) {
  visit_floating(dtype, [&]<class T>() {
    using C = Compute<T>;
    C dy_buffer[kBlock], x_buffer[kBlock], result[kBlock];
    for_blocks(n, [&](int64_t begin, int64_t count) TS_LANES {
      const C* mean = static_cast<const C*>(mean_data) + begin;
      const C* a = static_cast<const C*>(a_data) + begin;
      const C* b = static_cast<const C*>(b_data) + begin;
      const C* c = static_cast<const C*>(c_data) + begin;
      const C* dy = stage_in<C>(static_cast<const T*>(dy_data) + begin, count, dy_buffer);
      const C* x = stage_in<C>(static_cast<const T*>(x_data) + begin, count, x_buffer);
      T* dx = static_cast<T*>(dx_data) + begin;
      C* TS_RESTRICT out = stage_for_write<C>(dx, static_cast<C*>(result));
      for (int64_t i = 0; i < count; ++i) out[i] = a[i] * dy[i] - b[i] - (x[i] - mean[i]) * c[i];
      stage_out<C>(dx, count, static_cast<const C*>(result));
    });
  });
}

}  // namespace tessera::kernels::TS_SIMD
