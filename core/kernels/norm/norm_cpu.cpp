#include <tessera/core/kernels/norm/norm.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include <tessera/core/dispatch.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/common/compute.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/norm/norm_blocks.h>
#include <tessera/core/kernels/norm/norm_quantized.h>
#include <tessera/core/kernels/random/random_fill.h>
#include <tessera/core/kernels/reduce/reduce.h>
#include <tessera/core/parallel.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera::kernels {
namespace {

constexpr int64_t kNormWork = 1 << 14;

void check_operand(const char* where, const Tensor& x) {
  TS_CHECK_DTYPE(is_floating(x.dtype()) && !is_fp8(x.dtype()), where,
                 "expects f64, f32, f16 or bf16; got ", x, "; convert with to(dtype)");
  TS_CHECK_DEVICE(x.device().is_cpu() || x.is_meta(), where, "has no kernel for ", x);
}

// weight or bias in the compute type, contiguous; undefined stays.
Tensor as_compute(const Tensor& x, DType compute) {
  if (!x.defined()) return x;
  return contiguous(x.dtype() == compute ? x : convert(x, compute));
}
const void* data_or_null(const Tensor& x) { return x.defined() ? x.data() : nullptr; }
const char* row_at(const Tensor& x, int64_t row, int64_t columns) {
  return x.defined() ? static_cast<const char*>(x.data()) + row * columns * size_of(x.dtype())
                     : nullptr;
}
Tensor like_dtype(const Tensor& x, DType dtype) {
  return x.dtype() == dtype ? contiguous(x) : contiguous(convert(x, dtype));
}

// partials: (blocks, n), added up in the order of the blocks in f64, rounded to `dtype`.
Tensor sum_partials(const Tensor& partials, DType dtype) {
  return convert(kernels::sum(partials, {0}, false, partials.dtype()), dtype);
}

}  // namespace

RowNorm row_norm_forward(const Tensor& x, const Tensor& residual, int64_t columns,
                         const Tensor& weight, const Tensor& bias, double eps, bool center,
                         const std::optional<ResidualDropout>& dropout) {
  if (x.device().is_cuda()) {
    return on_cuda<kernels::row_norm_forward>(center ? "layer_norm" : "rms_norm", x.device(), x,
                                              residual, columns, weight, bias, eps, center,
                                              dropout);
  }
  if (dropout) {
    return row_norm_forward(kernels::dropout(x, dropout->p, dropout->stream, dropout->place),
                            residual, columns, weight, bias, eps, center);
  }
  const char* where = center ? "layer_norm" : "rms_norm";
  check_operand(where, x);
  const int64_t rows = columns == 0 ? 0 : x.numel() / columns;
  const DType compute = compute_dtype(x.dtype());
  RowNorm result;
  result.y = raw::empty(x.shape(), x.dtype(), x.device());
  result.rstd = raw::empty({rows}, compute, x.device());
  if (center) result.mean = raw::empty({rows}, compute, x.device());
  if (residual.defined()) result.sum = raw::empty(x.shape(), x.dtype(), x.device());
  if (x.is_meta() || rows == 0) return result;
  const Tensor source = contiguous(x), w = as_compute(weight, compute);
  const Tensor b = as_compute(bias, compute);
  const Tensor other = residual.defined() ? like_dtype(residual, x.dtype()) : Tensor();
  const auto mutable_row = [&](const Tensor& t, int64_t row, int64_t n) {
    return const_cast<char*>(row_at(t, row, n));
  };
  parallel_for(rows, std::max<int64_t>(1, kNormWork / columns), [&](int64_t begin, int64_t end) {
    const RowNormBlock block{.dtype = x.dtype(),
                             .rows = end - begin,
                             .C = columns,
                             .x = row_at(source, begin, columns),
                             .residual = row_at(other, begin, columns),
                             .sum = mutable_row(result.sum, begin, columns),
                             .y = mutable_row(result.y, begin, columns),
                             .weight = data_or_null(w),
                             .bias = data_or_null(b),
                             .mean = mutable_row(result.mean, begin, 1),
                             .rstd = mutable_row(result.rstd, begin, 1),
                             .eps = eps};
    TS_SIMD_CALL(row_norm_block, block);
  });
  return result;
}

QuantizedRowNorm row_norm_quantized(const Tensor& x, const Tensor& residual, int64_t columns,
                                    const Tensor& weight, const Tensor& bias, double eps,
                                    bool center, const QuantizeOptions& options,
                                    const Tensor& scale, const QuantizeWants& wants) {
  if (x.device().is_cuda()) {
    return on_cuda<kernels::row_norm_quantized>(center ? "layer_norm" : "rms_norm", x.device(), x,
                                                residual, columns, weight, bias, eps, center,
                                                options, scale, wants);
  }
  QuantizedRowNorm result{.norm = row_norm_forward(x, residual, columns, weight, bias, eps, center),
                          .y = {}};
  const Tensor y = std::exchange(result.norm.y, {});
  result.y = quantize(raw::view(y, {columns == 0 ? 0 : x.numel() / columns, columns}), options,
                      scale, wants);
  return result;
}

RowNormGradients row_norm_backward(const Tensor& dy, const Tensor& dsum, const Tensor& x,
                                   int64_t columns, const Tensor& weight, const Tensor& mean,
                                   const Tensor& rstd, const bool (&wanted)[3],
                                   const RowNormBackwardOptions& options) {
  if (x.device().is_cuda()) {
    return on_cuda<kernels::row_norm_backward>(mean.defined() ? "layer_norm" : "rms_norm",
                                               x.device(), dy, dsum, x, columns, weight, mean, rstd,
                                               wanted, options);
  }
  const int64_t rows = columns == 0 ? 0 : x.numel() / columns;
  const DType compute = compute_dtype(x.dtype());
  const int64_t blocks = (rows + kNormRows - 1) / kNormRows;
  RowNormGradients result;
  if (wanted[0]) result.input = raw::empty(x.shape(), x.dtype(), x.device());
  const DType weight_dtype = options.weight_dtype.value_or(compute);
  const DType bias_dtype = options.bias_dtype.value_or(compute);
  if (x.is_meta()) {
    if (wanted[1]) result.weight = raw::empty({columns}, weight_dtype, x.device());
    if (wanted[2]) result.bias = raw::empty({columns}, bias_dtype, x.device());
    if (wanted[0] && options.dropout) result.update = raw::empty(x.shape(), x.dtype(), x.device());
    return result;
  }
  const Tensor source = contiguous(x), grad = like_dtype(dy, x.dtype());
  const Tensor more = dsum.defined() ? like_dtype(dsum, x.dtype()) : Tensor();
  const Tensor w = as_compute(weight, compute);
  Tensor dweights, dbiases;  // (blocks, columns)
  if (wanted[1]) dweights = raw::zeros({blocks, columns}, compute);
  if (wanted[2]) dbiases = raw::zeros({blocks, columns}, compute);
  const Tensor scratch = x.dtype() == compute
                             ? Tensor()
                             : raw::empty({blocks > 0 ? num_threads() : 0, 2 * columns}, compute);
  // One range of blocks for each thread: the scratch row belongs to the range.
  const int64_t ranges = std::min<int64_t>(num_threads(), blocks);
  const bool small = rows * columns < kNormWork;
  parallel_for(ranges, small ? ranges : 1, [&](int64_t first_range, int64_t last_range) {
    for (int64_t range = first_range; range < last_range; ++range) {
      for (int64_t i = blocks * range / ranges; i < blocks * (range + 1) / ranges; ++i) {
        const int64_t row = i * kNormRows;
        const auto at = [&](const Tensor& t, int64_t r, int64_t n) {
          return const_cast<char*>(row_at(t, r, n));
        };
        const RowNormGradientBlock block{.dtype = x.dtype(),
                                         .rows = std::min(kNormRows, rows - row),
                                         .C = columns,
                                         .dy = row_at(grad, row, columns),
                                         .dsum = row_at(more, row, columns),
                                         .x = row_at(source, row, columns),
                                         .weight = data_or_null(w),
                                         .mean = row_at(mean, row, 1),
                                         .rstd = row_at(rstd, row, 1),
                                         .dx = at(result.input, row, columns),
                                         .dweight = at(dweights, i, columns),
                                         .dbias = at(dbiases, i, columns),
                                         .scratch = at(scratch, range, 2 * columns)};
        TS_SIMD_CALL(row_norm_gradient_block, block);
      }
    }
  });
  if (wanted[1]) result.weight = sum_partials(dweights, weight_dtype);
  if (wanted[2]) result.bias = sum_partials(dbiases, bias_dtype);
  if (wanted[0] && options.dropout) {
    const ResidualDropout& drop = *options.dropout;
    result.update = dropout(result.input, drop.p, drop.stream, drop.place);
  }
  return result;
}

namespace {

// x as (N, C, S).
struct Channels {
  explicit Channels(const Tensor& x) : N(x.shape()[0]), C(x.shape()[1]), S(1) {
    for (int d = 2; d < x.dim(); ++d) S *= x.shape()[d];
  }
  int64_t N, C, S;
};

// Numbers of a tensor of the compute type as f64, or one value for all where it is absent.
struct Numbers {
  Numbers(const Tensor& x, double otherwise) : otherwise_(otherwise) {
    if (x.defined()) values_ = x.to_vector<double>();
  }
  double operator[](int64_t i) const {
    return values_.empty() ? otherwise_ : values_[static_cast<size_t>(i)];
  }

 private:
  std::vector<double> values_;
  double otherwise_;
};

Tensor columns_tensor(const std::vector<double>& values, DType compute) {
  return tensor(std::span<const double>(values), {static_cast<int64_t>(values.size())}, compute);
}

}  // namespace

Statistics channel_statistics(const Tensor& x, int64_t groups) {
  const DType compute = compute_dtype(x.dtype());
  Moments m;
  if (groups == 0) {
    Shape dims = {0};
    for (int d = 2; d < x.dim(); ++d) dims.push_back(d);
    m = moments(x, dims, false, 0, false, compute);
  } else {
    const Tensor rows = raw::view(
        contiguous(x),
        {x.shape()[0] * groups, x.numel() == 0 ? 0 : x.numel() / (x.shape()[0] * groups)});
    m = moments(rows, {1}, false, 0, false, compute);
  }
  return {m.mean, m.variance};
}

Tensor rstd_of(const Tensor& variance, double eps) {
  if (variance.device().is_cuda()) {
    return on_cuda<kernels::rstd_of>("batch_norm", variance.device(), variance, eps);
  }
  const DType compute = compute_dtype(variance.dtype());
  const Tensor result = raw::empty(variance.shape(), compute, variance.device());
  if (variance.is_meta()) return result;
  const std::vector<double> values = variance.to_vector<double>();
  with_compute(compute, [&]<class C>() {
    for (size_t i = 0; i < values.size(); ++i) {
      const double overflowed = values[i] - values[i];  // NaN, see norm.h
      result.data_as<C>()[i] = static_cast<C>(1 / std::sqrt(values[i] + eps) + overflowed);
    }
  });
  return result;
}

Tensor channel_norm_forward(const Tensor& x, int64_t groups, const Tensor& mean, const Tensor& rstd,
                            const Tensor& weight, const Tensor& bias) {
  if (x.device().is_cuda()) {
    return on_cuda<kernels::channel_norm_forward>(groups > 0 ? "group_norm" : "batch_norm",
                                                  x.device(), x, groups, mean, rstd, weight, bias);
  }
  check_operand(groups == 0 ? "batch_norm" : "group_norm", x);
  const Tensor y = raw::empty(x.shape(), x.dtype(), x.device());
  if (x.is_meta() || x.numel() == 0) return y;
  const Channels size(x);
  const DType compute = compute_dtype(x.dtype());
  const Tensor source = contiguous(x);
  const Numbers means(mean, 0), rstds(rstd, 1), w(weight, 1), b(bias, 0);
  const int64_t item = size_of(x.dtype());
  const char* from = static_cast<const char*>(source.data());
  char* to = static_cast<char*>(y.data());
  const auto slot = [&](int64_t n, int64_t c) {
    return groups == 0 ? c : n * groups + c * groups / size.C;
  };
  if (size.S == 1 && groups == 0) {
    std::vector<double> scales, m;
    for (int64_t c = 0; c < size.C; ++c) {
      m.push_back(means[c]);
      scales.push_back(rstds[c] * w[c]);
    }
    std::vector<double> shifts;
    for (int64_t c = 0; c < size.C; ++c) shifts.push_back(b[c]);
    const Tensor mean_row = columns_tensor(m, compute), scale_row = columns_tensor(scales, compute);
    const Tensor shift_row = columns_tensor(shifts, compute);
    parallel_for(size.N, std::max<int64_t>(1, kNormWork / size.C), [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        const int64_t offset = n * size.C * item;
        TS_SIMD_CALL(affine_columns, x.dtype(), from + offset, to + offset, size.C, mean_row.data(),
                     scale_row.data(), shift_row.data());
      }
    });
    return y;
  }
  parallel_for(size.N * size.C, std::max<int64_t>(1, kNormWork / size.S),
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) {
                   const int64_t c = i % size.C, g = slot(i / size.C, c);
                   const int64_t offset = i * size.S * item;
                   TS_SIMD_CALL(affine_segment, x.dtype(), from + offset, to + offset, size.S,
                                means[g], rstds[g] * w[c], b[c]);
                 }
               });
  return y;
}

RowNormGradients channel_norm_backward(const Tensor& dy, const Tensor& x, int64_t groups,
                                       const Tensor& mean, const Tensor& rstd, const Tensor& weight,
                                       bool fixed, const bool (&wanted)[3]) {
  if (x.device().is_cuda()) {
    return on_cuda<kernels::channel_norm_backward>(groups > 0 ? "group_norm" : "batch_norm",
                                                   x.device(), dy, x, groups, mean, rstd, weight,
                                                   fixed, wanted);
  }
  RowNormGradients result;
  const Channels size(x);
  const DType compute = compute_dtype(x.dtype());
  const auto [N, C, S] = size;
  if (wanted[0]) result.input = raw::empty(x.shape(), x.dtype(), x.device());
  if (wanted[1]) result.weight = raw::empty({C}, compute, x.device());
  if (wanted[2]) result.bias = raw::empty({C}, compute, x.device());
  if (x.is_meta()) return result;
  const Tensor source = contiguous(x), grad = like_dtype(dy, x.dtype());
  const Numbers means(mean, 0), rstds(rstd, 1), w(weight, 1);
  const int64_t item = size_of(x.dtype());
  const char* xs = static_cast<const char*>(source.data());
  const char* dys = static_cast<const char*>(grad.data());
  const bool by_columns = S == 1 && groups == 0;
  const int64_t slots = groups == 0 ? C : N * groups;
  const auto slot = [&, C = C](int64_t n, int64_t c) {
    return groups == 0 ? c : n * groups + c * groups / C;
  };

  // Sums of dy and dy xhat: for each block of samples and channel, or for each sample and channel.
  const int64_t pieces = by_columns ? (N + kNormRows - 1) / kNormRows : N;
  std::vector<double> dy_sums(static_cast<size_t>(pieces * C), 0), xhat_sums(dy_sums);
  std::vector<double> mean_values, rstd_values;
  Tensor mean_row, rstd_row;
  if (by_columns) {
    for (int64_t c = 0; c < C; ++c) {
      mean_values.push_back(means[c]);
      rstd_values.push_back(rstds[c]);
    }
    mean_row = columns_tensor(mean_values, compute);
    rstd_row = columns_tensor(rstd_values, compute);
    parallel_for(pieces, std::max<int64_t>(1, kNormWork / std::max<int64_t>(1, kNormRows * C)),
                 [&, N = N, C = C](int64_t begin, int64_t end) {
                   for (int64_t n = begin * kNormRows; n < std::min(N, end * kNormRows); ++n) {
                     const int64_t offset = n * C * item, piece = n / kNormRows * C;
                     TS_SIMD_CALL(column_sums, x.dtype(), dys + offset, xs + offset, C,
                                  mean_row.data(), rstd_row.data(), dy_sums.data() + piece,
                                  xhat_sums.data() + piece);
                   }
                 });
  } else {
    parallel_for(N * C, std::max<int64_t>(1, kNormWork / std::max<int64_t>(1, S)),
                 [&, C = C, S = S](int64_t begin, int64_t end) {
                   for (int64_t i = begin; i < end; ++i) {
                     const int64_t g = slot(i / C, i % C), offset = i * S * item;
                     const SegmentSums sums = TS_SIMD_CALL(segment_sums, x.dtype(), dys + offset,
                                                           xs + offset, S, means[g], rstds[g]);
                     dy_sums[static_cast<size_t>(i)] = sums.dy;
                     xhat_sums[static_cast<size_t>(i)] = sums.dy_xhat;
                   }
                 });
  }
  // Gradients of weight and bias, and the sums of w dy over what shares statistics.
  std::vector<double> dweight(static_cast<size_t>(C), 0), dbias(dweight);
  std::vector<double> slot_dy(static_cast<size_t>(slots), 0), slot_xhat(slot_dy);
  for (int64_t p = 0; p < pieces; ++p) {
    for (int64_t c = 0; c < C; ++c) {
      const size_t i = static_cast<size_t>(p * C + c), at = static_cast<size_t>(c);
      dbias[at] += dy_sums[i];
      dweight[at] += xhat_sums[i];
      const size_t g = static_cast<size_t>(groups == 0 ? c : slot(p, c));
      slot_dy[g] += w[c] * dy_sums[i];
      slot_xhat[g] += w[c] * xhat_sums[i];
    }
  }
  if (wanted[1]) result.weight = columns_tensor(dweight, compute);
  if (wanted[2]) result.bias = columns_tensor(dbias, compute);
  if (!wanted[0] || x.numel() == 0) return result;

  // dx = rstd (w dy - average - xhat along) = a dy - b - (x - mean) c
  const double terms = static_cast<double>(x.numel() / slots);
  char* dxs = static_cast<char*>(result.input.data());
  const auto a = [&](int64_t g, int64_t c) { return rstds[g] * w[c]; };
  const auto b = [&](int64_t g) {
    return fixed ? 0 : rstds[g] * slot_dy[static_cast<size_t>(g)] / terms;
  };
  const auto along = [&](int64_t g) {
    return fixed ? 0 : rstds[g] * rstds[g] * slot_xhat[static_cast<size_t>(g)] / terms;
  };
  if (by_columns) {
    std::vector<double> as, bs, cs;
    for (int64_t c = 0; c < C; ++c) {
      as.push_back(a(c, c));
      bs.push_back(b(c));
      cs.push_back(along(c));
    }
    const Tensor a_row = columns_tensor(as, compute), b_row = columns_tensor(bs, compute);
    const Tensor c_row = columns_tensor(cs, compute);
    parallel_for(N, std::max<int64_t>(1, kNormWork / C), [&, C = C](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        const int64_t offset = n * C * item;
        TS_SIMD_CALL(gradient_columns, x.dtype(), dys + offset, xs + offset, dxs + offset, C,
                     mean_row.data(), a_row.data(), b_row.data(), c_row.data());
      }
    });
  } else {
    parallel_for(N * C, std::max<int64_t>(1, kNormWork / S),
                 [&, C = C, S = S](int64_t begin, int64_t end) {
                   for (int64_t i = begin; i < end; ++i) {
                     const int64_t c = i % C, g = slot(i / C, c), offset = i * S * item;
                     TS_SIMD_CALL(gradient_segment, x.dtype(), dys + offset, xs + offset,
                                  dxs + offset, S, means[g], a(g, c), b(g), along(g));
                   }
                 });
  }
  return result;
}

void update_running(const Tensor& running, const Tensor& value, double factor, double momentum) {
  if (running.device().is_cuda()) {
    return on_cuda<kernels::update_running>("batch_norm", running.device(), running, value, factor,
                                            momentum);
  }
  if (running.is_meta()) return;
  const std::vector<double> values = value.to_vector<double>();
  std::vector<double> next = running.to_vector<double>();
  for (size_t i = 0; i < next.size(); ++i) {
    next[i] = (1 - momentum) * next[i] + momentum * factor * values[i];
  }
  copy_into(running, tensor(std::span<const double>(next), running.shape(), kF64));
  running.bump_version();
}

}  // namespace tessera::kernels
