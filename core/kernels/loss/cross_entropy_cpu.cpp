#include <tessera/core/kernels/loss/cross_entropy.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include <tessera/core/dispatch.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/common/compute.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/loss/cross_entropy_blocks.h>
#include <tessera/core/kernels/reduce/reduce.h>
#include <tessera/core/parallel.h>

namespace tessera::kernels {
namespace {

constexpr int64_t kLossWork = 1 << 14;

void check_logits(const Tensor& logits) {
  constexpr const char* kWhere = "cross_entropy";
  TS_CHECK_DTYPE(is_floating(logits.dtype()) && !is_fp8(logits.dtype()), kWhere,
                 "expects logits of f64, f32, f16 or bf16; got ", logits);
  TS_CHECK_SHAPE(logits.dim() == 2 && (logits.stride(1) == 1 || logits.size(1) <= 1), kWhere,
                 "expects [N, V] with contiguous rows; got ", logits, " with strides ",
                 logits.strides());
}

const void* row_of(const Tensor& x, int64_t row) {
  return static_cast<const char*>(x.data()) + row * x.stride(0) * size_of(x.dtype());
}

// The class weights in the compute dtype, as the rows read them.
struct ClassWeights {
  ClassWeights(const Tensor& weight, DType compute, int64_t V) : sum(static_cast<double>(V)) {
    if (!weight.defined()) return;
    values = contiguous(convert(weight, compute));
    sum = kernels::sum(values, {0}, false, kF64).item();
  }
  const void* data() const { return values.defined() ? values.data() : nullptr; }
  double at(int64_t c) const {
    if (!values.defined()) return 1;
    return values.dtype() == kF64 ? values.data_as<double>()[c]
                                  : static_cast<double>(values.data_as<float>()[c]);
  }
  Tensor values;
  double sum;
};

// The value at column `c` of a row.
double element(const Tensor& x, int64_t row, int64_t c) {
  return dispatch_floating(x.dtype(), "cross_entropy", [&]<class T>() {
    return static_cast<double>(load<Compute<T>>(static_cast<const T*>(row_of(x, row))[c]));
  });
}

template <class F>
void for_each_row(int64_t rows, int64_t V, F&& f) {
  parallel_for(rows, std::max<int64_t>(1, kLossWork / std::max<int64_t>(1, V)),
               [&](int64_t begin, int64_t end) {
                 for (int64_t n = begin; n < end; ++n) f(n);
               });
}

}  // namespace

Tensor check_targets(const char* where, const Tensor& target, int64_t classes,
                     int64_t ignore_index) {
  if (target.device().is_cuda()) {
    return on_cuda<kernels::check_targets>(where, target.device(), where, target, classes,
                                           ignore_index);
  }
  TS_CHECK_DTYPE(target.dtype() == kI64 || target.dtype() == kI32, where,
                 "expects class indices of i64 or i32; got ", target,
                 "; probabilities have the dtype and shape of the input");
  if (target.is_meta()) return target;
  const Tensor indices = contiguous(target.dtype() == kI64 ? target : convert(target, kI64));
  const int64_t* values = indices.data_as<int64_t>();
  for (int64_t i = 0; i < indices.numel(); ++i) {
    if (values[i] == ignore_index) continue;
    if (values[i] < 0 || values[i] >= classes) {
      Shape position = target.shape();
      int64_t rest = i;
      for (int d = target.dim() - 1; d >= 0; --d) {
        position[d] = rest % target.shape()[d];
        rest /= target.shape()[d];
      }
      TS_THROW(IndexError, where, "target ", values[i], " at position ", position,
               " is outside [0, ", classes, "), the classes of the input; ignore_index is ",
               ignore_index);
    }
  }
  return indices;
}

CrossEntropyRows cross_entropy_forward(const Tensor& logits, const Tensor& targets,
                                       const CrossEntropyAttributes& attributes) {
  if (logits.device().is_cuda()) {
    return on_cuda<kernels::cross_entropy_forward>("cross_entropy", logits.device(), logits,
                                                   targets, attributes);
  }
  check_logits(logits);
  const int64_t N = logits.size(0), V = logits.size(1);
  const DType compute = compute_dtype(logits.dtype());
  CrossEntropyRows result{raw::empty({N}, compute, logits.device()),
                          raw::empty({N, 2}, compute, logits.device()), Tensor()};
  if (logits.is_meta()) return result;
  const ClassWeights weights(attributes.weight, compute, V);
  const double smoothing = attributes.label_smoothing;
  const int64_t* t = targets.data_as<int64_t>();
  double total_weight = 0;
  for (int64_t n = 0; n < N; ++n) {
    if (t[n] != attributes.ignore_index) total_weight += weights.at(t[n]);
  }
  result.total_weight = scalar_tensor(total_weight, kF64);
  with_compute(compute, [&]<class C>() {
    C* losses = result.losses.data_as<C>();
    C* statistics = result.statistics.data_as<C>();
    for_each_row(N, V, [&](int64_t n) {
      if (t[n] == attributes.ignore_index) {
        losses[n] = statistics[2 * n] = statistics[2 * n + 1] = C(0);
        return;
      }
      const RowStatistics row = TS_SIMD_CALL(cross_entropy_row, logits.dtype(), row_of(logits, n),
                                             V, weights.data(), smoothing != 0);
      const double log_sum = std::log(row.sum);
      double loss =
          (1 - smoothing) * weights.at(t[n]) * ((row.largest - element(logits, n, t[n])) + log_sum);
      if (smoothing != 0) {
        loss += smoothing / static_cast<double>(V) * (weights.sum * log_sum - row.weighted_sum);
      }
      losses[n] = static_cast<C>(loss);
      statistics[2 * n] = static_cast<C>(row.largest);
      statistics[2 * n + 1] = static_cast<C>(1 / row.sum);
    });
  });
  return result;
}

Tensor cross_entropy_backward(const Tensor& logits, const Tensor& targets,
                              const CrossEntropyAttributes& attributes, const Tensor& statistics,
                              const Tensor& row_gradients, const Tensor& divisor) {
  if (logits.device().is_cuda()) {
    return on_cuda<kernels::cross_entropy_backward>("cross_entropy", logits.device(), logits,
                                                    targets, attributes, statistics, row_gradients,
                                                    divisor);
  }
  check_logits(logits);
  const int64_t N = logits.size(0), V = logits.size(1);
  const Tensor result = raw::empty({N, V}, logits.dtype(), logits.device());
  if (logits.is_meta()) return result;
  const double scale = divisor.defined() ? 1 / divisor.item() : 1;
  const DType compute = compute_dtype(logits.dtype());
  const ClassWeights weights(attributes.weight, compute, V);
  const double smoothing = attributes.label_smoothing;
  const double smooth = smoothing / static_cast<double>(V);
  const int64_t* t = targets.data_as<int64_t>();
  const Tensor gradients = contiguous(convert(row_gradients, compute));
  with_compute(compute, [&]<class C>() {
    const C* gradient = gradients.data_as<C>();
    const C* saved = statistics.data_as<C>();
    const int64_t step = gradients.numel() == 1 ? 0 : 1;
    const int64_t row_bytes = V * size_of(logits.dtype());
    for_each_row(N, V, [&](int64_t n) {
      char* out = static_cast<char*>(result.data()) + n * row_bytes;
      if (t[n] == attributes.ignore_index) {
        std::memset(out, 0, static_cast<size_t>(row_bytes));
        return;
      }
      const double g = static_cast<double>(gradient[n * step]) * scale;
      const double hard = g * (1 - smoothing) * weights.at(t[n]);
      const double a = (hard + g * smooth * weights.sum) * static_cast<double>(saved[2 * n + 1]);
      TS_SIMD_CALL(cross_entropy_row_gradient, logits.dtype(), row_of(logits, n), out, V,
                   static_cast<double>(saved[2 * n]), a, g * smooth, weights.data(), t[n], hard);
    });
  });
  return result;
}

void cross_entropy_in_place(const Tensor& logits, const Tensor& targets, int64_t ignore_index,
                            const Tensor& divisor, const Tensor& losses) {
  if (logits.device().is_cuda()) {
    return on_cuda<kernels::cross_entropy_in_place>("cross_entropy", logits.device(), logits,
                                                    targets, ignore_index, divisor, losses);
  }
  check_logits(logits);
  if (logits.is_meta()) return;
  const int64_t N = logits.size(0), V = logits.size(1);
  const int64_t* const t = targets.data_as<int64_t>();
  double* const loss = losses.data_as<double>();
  const double scale = divisor.defined() ? 1 / *divisor.data_as<double>() : 1;
  for_each_row(N, V, [&](int64_t n) {
    char* row = static_cast<char*>(const_cast<void*>(row_of(logits, n)));
    if (t[n] == ignore_index) {
      std::memset(row, 0, static_cast<size_t>(V * size_of(logits.dtype())));
      loss[n] = 0;
      return;
    }
    const RowStatistics s = TS_SIMD_CALL(cross_entropy_row, logits.dtype(), row, V, nullptr, false);
    loss[n] = (s.largest - element(logits, n, t[n])) + std::log(s.sum);
    TS_SIMD_CALL(cross_entropy_row_gradient, logits.dtype(), row, row, V, s.largest, scale / s.sum,
                 0.0, nullptr, t[n], scale);
  });
  logits.bump_version();
}

void scale_unless_one(const Tensor& x, const Tensor& factor) {
  on_cuda<kernels::scale_unless_one>("cross_entropy", x.device(), x, factor);
}

Tensor cross_entropy_distribution(const Tensor& like, const Tensor& targets,
                                  const CrossEntropyAttributes& attributes) {
  if (like.device().is_cuda()) {
    return on_cuda<kernels::cross_entropy_distribution>("cross_entropy", like.device(), like,
                                                        targets, attributes);
  }
  const int64_t N = like.size(0), V = like.size(1);
  const DType compute = compute_dtype(like.dtype());
  const Tensor result = raw::zeros({N, V}, compute, like.device());
  if (like.is_meta()) return result;
  const ClassWeights weights(attributes.weight, compute, V);
  const int64_t* t = targets.data_as<int64_t>();
  const double s = attributes.label_smoothing;
  with_compute(compute, [&]<class C>() {
    for_each_row(N, V, [&](int64_t n) {
      if (t[n] == attributes.ignore_index) return;
      C* row = result.data_as<C>() + n * V;
      if (s != 0) {
        for (int64_t c = 0; c < V; ++c) {
          row[c] = static_cast<C>(s / static_cast<double>(V) * weights.at(c));
        }
      }
      row[t[n]] += static_cast<C>((1 - s) * weights.at(t[n]));
    });
  });
  return result;
}

}  // namespace tessera::kernels
