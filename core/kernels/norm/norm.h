// Normalization: forward keeps nothing but the statistics, backward is one sweep.
//
// x, dy: f64, f32, bf16 or f16; weight and bias: of x's dtype or f32 (f64), or absent. Statistics
// and arithmetic are f32 (f64 for f64), sums over blocks f64. Results are contiguous in x's dtype,
// gradients of weight and bias in what they are calculated in or what is asked for. A row is read
// from memory once, forward and backward. Column sums (weight and bias gradients) are partials of
// blocks of kNormRows rows, combined in their order: the same bits for any thread count. Meta
// tensors give meta results.
//
// If a variance overflowed, rstd is NaN and with it the result, as in torch: 0 would make a row its
// bias, and nothing would show that a run diverged. (For a mean square, in rms_norm, it is 0, as
// torch's.)
#pragma once

#include <optional>

#include <tessera/core/kernels/random/draw_place.h>
#include <tessera/core/random.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera::kernels {

inline constexpr int64_t kNormRows = 64;

// ---- layer_norm, rms_norm: x seen as (rows, columns) --------------------------------------------

struct RowNorm {
  Tensor sum;  // x + residual, rounded to x's dtype; undefined without a residual
  Tensor y;
  Tensor mean;  // [rows]; undefined for rms_norm
  Tensor rstd;  // [rows]: 1 / sqrt(variance + eps), or of the mean square
};
// Dropout of x before the residual is added: dropout(x, p, stream, place) of random_fill.h, p in
// (0, 1). On a GPU that of a part is a kernel of its own.
struct ResidualDropout {
  double p = 0;
  RandomStream stream = {};
  DrawPlace place = {};
};
// x: [..., columns of the last dimensions]; residual: x's shape and dtype or absent; `center` false
// for rms_norm. y = (s - mean) rstd weight + bias with s = x + residual; `dropout` needs a
// residual.
RowNorm row_norm_forward(const Tensor& x, const Tensor& residual, int64_t columns,
                         const Tensor& weight, const Tensor& bias, double eps, bool center,
                         const std::optional<ResidualDropout>& dropout = {});

struct RowNormGradients {
  Tensor input;
  Tensor weight;
  Tensor bias;
  Tensor update;       // of what dropout took, where there was dropout
  Tensor column_sums;  // [columns], see below
};
struct RowNormBackwardOptions {
  // The dtype of the gradients of weight and bias; by default that of their calculation.
  std::optional<DType> weight_dtype = {}, bias_dtype = {};
  std::optional<ResidualDropout> dropout = {};
  // Sums over rows of the gradient that goes to x (`update`, else `input`), in its dtype: what is
  // the gradient of a bias that was added to x. On a GPU, for rows that stay in registers; else
  // they are left undefined.
  bool column_sums = false;
};
// `dsum`: a gradient that reaches the normalized tensor from elsewhere (the residual stream), added
// to the input's, or absent. `wanted`: which gradients to make (input, weight, bias).
RowNormGradients row_norm_backward(const Tensor& dy, const Tensor& dsum, const Tensor& x,
                                   int64_t columns, const Tensor& weight, const Tensor& mean,
                                   const Tensor& rstd, const bool (&wanted)[3],
                                   const RowNormBackwardOptions& options = {});

// ---- group_norm, batch_norm: x seen as (N, C, S) ------------------------------------------------

// y = (x - mean) rstd weight + bias, where mean and rstd are [N * groups] (group_norm) or [C]
// (batch_norm: groups = 0), in the compute dtype.
Tensor channel_norm_forward(const Tensor& x, int64_t groups, const Tensor& mean, const Tensor& rstd,
                            const Tensor& weight, const Tensor& bias);
struct Statistics {
  Tensor mean;
  Tensor variance;  // of the whole population
};
// Statistics of each group of a sample [N * groups], or of each channel [C] if groups is 0.
Statistics channel_statistics(const Tensor& x, int64_t groups);
Tensor rstd_of(const Tensor& variance, double eps);

// `fixed`: the statistics did not come from x (batch_norm in evaluation).
RowNormGradients channel_norm_backward(const Tensor& dy, const Tensor& x, int64_t groups,
                                       const Tensor& mean, const Tensor& rstd, const Tensor& weight,
                                       bool fixed, const bool (&wanted)[3]);
// running = (1 - momentum) running + momentum value, with value scaled by `factor`; any dtype.
void update_running(const Tensor& running, const Tensor& value, double factor, double momentum);

}  // namespace tessera::kernels
