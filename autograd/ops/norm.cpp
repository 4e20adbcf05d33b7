// Normalisations. Backward is one sweep of a kernel; where backward itself is recorded, it is the
// same formula in ops.
#include <tessera/core/kernels/norm/norm.h>

#include <algorithm>
#include <optional>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/checkpoint.h>
#include <tessera/autograd/differentiable.h>
#include <tessera/autograd/fp8/norm_call.h>
#include <tessera/autograd/meta_inputs.h>
#include <tessera/autograd/ops.h>
#include <tessera/autograd/ops/compute_dtype.h>
#include <tessera/autograd/ops/dropout_at.h>
#include <tessera/core/kernels/copy/copy.h>

namespace tessera {
namespace {

// The dimensions that a norm goes along, from the end.
Shape last_dims(const Shape& normalized_shape) {
  Shape dims;
  for (int d = normalized_shape.size(); d > 0; --d) dims.push_back(-d);
  return dims;
}

void check_input(const Op& op, const Tensor& x) {
  check_defined(op, "x", x);
  TS_CHECK_DTYPE(is_floating(x.dtype()) && !is_fp8(x.dtype()), op,
                 "expects f64, f32, f16 or bf16; got ", x, "; convert with to(dtype)");
}
void check_parameter(const Op& op, const char* name, const Tensor& parameter, const Shape& shape,
                     const Tensor& x) {
  if (!parameter.defined()) return;
  TS_CHECK_SHAPE(parameter.shape() == shape, op, name, " must have shape ", shape, "; got ",
                 parameter, " for x ", x);
  TS_CHECK_DTYPE(is_floating(parameter.dtype()) && !is_fp8(parameter.dtype()), op, name,
                 " must be f64, f32, f16 or bf16; got ", parameter);
  const bool left_unread = is_left_unread(x) || is_left_unread(parameter);
  TS_CHECK_DEVICE(left_unread || parameter.device() == x.device(), op, name, " is on ",
                  parameter.device(), " and x on ", x.device());
}

// The number of elements that a row has, after checking that x ends in normalized_shape.
int64_t check_rows(const Op& op, const Tensor& x, const Shape& normalized_shape,
                   const Tensor& weight, const Tensor& bias) {
  check_input(op, x);
  const int count = normalized_shape.size();
  TS_CHECK_SHAPE(count >= 1 && count <= x.dim() &&
                     x.shape().slice(x.dim() - count, x.dim()) == normalized_shape,
                 op, "normalized_shape ", normalized_shape, " must be the end of x's shape; got ",
                 x);
  check_parameter(op, "weight", weight, normalized_shape, x);
  check_parameter(op, "bias", bias, normalized_shape, x);
  return numel_of(normalized_shape);
}

Tensor shaped(const Tensor& gradient, const Shape& shape) {
  return gradient.defined() && !(gradient.shape() == shape) ? reshape(gradient, shape) : gradient;
}

// What the kernels do, in ops: gradients of (x - mean) rstd weight + bias where mean and rstd are
// those of x over `dims`. `parameter_shape` is that of weight as it broadcasts to x.
struct Composed {
  Tensor input, weight, bias;
};
Composed norm_gradient(const Tensor& given_dy, const Tensor& given_x, const Tensor& weight,
                       const Shape& dims, const Shape& parameter_shape, double eps, bool center) {
  const Tensor dy = in_compute(given_dy), x = in_compute(given_x);
  const Tensor centred = center ? sub(x, mean(x, dims, true)) : x;
  const Tensor rstd = rsqrt(add(mean(square(centred), dims, true), eps));
  const Tensor xhat = mul(centred, rstd);
  const Tensor scaled =
      weight.defined() ? mul(dy, reshape(in_compute(weight), parameter_shape)) : dy;
  Tensor inner = sub(scaled, mul(xhat, mean(mul(scaled, xhat), dims, true)));
  if (center) inner = sub(inner, mean(scaled, dims, true));
  return {mul(rstd, inner), sum_to(mul(dy, xhat), parameter_shape), sum_to(dy, parameter_shape)};
}

Shape last_dims(int dim, int count) {
  Shape dims;
  for (int d = dim - count; d < dim; ++d) dims.push_back(d);
  return dims;
}

// Gradients of weight and bias come in their dtype where the kernel has it.
std::optional<DType> kernels_dtype(DType wanted, const Tensor& x) {
  const bool has = wanted == x.dtype() || wanted == (x.dtype() == kF64 ? kF64 : kF32);
  return has ? std::optional(wanted) : std::nullopt;
}

// The inputs of an op that are normalised, weight and bias, and the dropout of the first.
struct RowInputs {
  int x = 0, weight = 1, bias = 2;
  std::optional<kernels::ResidualDropout> dropout = {};
};

// Gradients of what was normalised, of what dropout took of it (where there is dropout, else the
// same), of weight and bias.
TensorList row_gradients(const Tensor& dy, const Tensor& dsum, const Tensor& x,
                         const Tensor& weight, const Tensor& mean, const Tensor& rstd,
                         const Shape& normalized_shape, double eps, bool center,
                         const bool (&wanted)[3], const Saved& s, const RowInputs& inputs = {}) {
  if (grad_enabled()) {
    const Composed g = norm_gradient(dy, x, weight, last_dims(x.dim(), normalized_shape.size()),
                                     normalized_shape, eps, center);
    const Tensor input = dsum.defined() ? add(g.input, dsum) : g.input;
    const auto& drop = inputs.dropout;
    const Tensor update =
        drop && wanted[0] ? dropout_at(input, drop->p, drop->stream, drop->place) : input;
    return {wanted[0] ? input : Tensor(), wanted[0] ? update : Tensor(),
            wanted[1] ? g.weight : Tensor(), wanted[2] ? g.bias : Tensor()};
  }
  kernels::RowNormBackwardOptions options{.dropout = inputs.dropout};
  if (wanted[1]) options.weight_dtype = kernels_dtype(s.input_dtype(inputs.weight), x);
  if (wanted[2]) options.bias_dtype = kernels_dtype(s.input_dtype(inputs.bias), x);
  // Sums over all but the last dimension.
  options.column_sums = wanted[0] && normalized_shape.size() == 1 && s.needs(inputs.x) &&
                        s.wants_column_sums(inputs.x);
  const kernels::RowNormGradients g = kernels::row_norm_backward(
      dy, dsum, x, numel_of(normalized_shape), weight, mean, rstd, wanted, options);
  const Tensor update = inputs.dropout ? g.update : g.input;
  if (g.column_sums.defined()) s.give_column_sums(inputs.x, update, g.column_sums);
  return {g.input, update, shaped(g.weight, normalized_shape), shaped(g.bias, normalized_shape)};
}

// Of a gradient that reached x before, the one that is calculated is the sum.
Tensor pending_of(const Saved& s, bool wanted) {
  return wanted && !grad_enabled() ? s.take_pending(0) : Tensor();
}

}  // namespace

const Op kLayerNorm{.name = "layer_norm",
                    .marks = MarkRule::kAlongDims,
                    .reads = {inputs(0, 1), inputs(0), inputs()},
                    .flops_per_element = 8};

Tensor layer_norm(const Tensor& x, const Shape& normalized_shape, const Tensor& weight,
                  const Tensor& bias, double eps) {
  const int64_t columns = check_rows(kLayerNorm, x, normalized_shape, weight, bias);
  const bool has_weight = weight.defined(), has_bias = bias.defined();
  const Fp8Norm norm(x, columns);
  return differentiable(
      along(kLayerNorm, last_dims(normalized_shape)), {x, weight, bias},
      [&](Inputs in, Extras& extras) {
        const kernels::RowNorm n = norm.forward(in[0], {}, columns, in[1], in[2], eps, true);
        extras.save(n.mean);
        extras.save(n.rstd);
        return n.y;
      },
      [=](Grads dy, const Saved& s) -> TensorList {
        const bool wanted[3] = {s.needs(0), has_weight && s.needs(1), has_bias && s.needs(2)};
        if (!wanted[0] && !wanted[1]) {
          return {Tensor(), Tensor(), wanted[2] ? sum_to(dy[0], normalized_shape) : Tensor()};
        }
        TensorList g = row_gradients(dy[0], pending_of(s, wanted[0]), s.input(0),
                                     has_weight && wanted[0] ? s.input(1) : Tensor(), s.extra(0),
                                     s.extra(1), normalized_shape, eps, true, wanted, s);
        return {g[0], g[2], g[3]};
      });
}

const Op kRmsNorm{.name = "rms_norm",
                  .marks = MarkRule::kAlongDims,
                  .reads = {inputs(0, 1), inputs(0)},
                  .flops_per_element = 6};

Tensor rms_norm(const Tensor& x, const Shape& normalized_shape, const Tensor& weight,
                std::optional<double> given_eps) {
  const int64_t columns = check_rows(kRmsNorm, x, normalized_shape, weight, {});
  // torch's default is the epsilon of the type that it calculates in.
  const double eps = given_eps.value_or(epsilon_of(x.dtype() == kF64 ? kF64 : kF32));
  const bool has_weight = weight.defined();
  const Fp8Norm norm(x, columns);
  return differentiable(
      along(kRmsNorm, last_dims(normalized_shape)), {x, weight},
      [&](Inputs in, Extras& extras) {
        const kernels::RowNorm n = norm.forward(in[0], {}, columns, in[1], {}, eps, false);
        extras.save(n.rstd);
        return n.y;
      },
      [=](Grads dy, const Saved& s) -> TensorList {
        const bool wanted[3] = {s.needs(0), has_weight && s.needs(1), false};
        TensorList g = row_gradients(dy[0], pending_of(s, wanted[0]), s.input(0),
                                     has_weight && wanted[0] ? s.input(1) : Tensor(), {},
                                     s.extra(0), normalized_shape, eps, false, wanted, s);
        return {g[0], g[2]};
      });
}

const Op kResidualLayerNorm{.name = "residual_layer_norm",
                            .marks = MarkRule::kAlongDims,
                            .reads = {inputs(2), inputs(2), inputs(), inputs()},
                            .reads_outputs = outputs(0),
                            .composed = "layer_norm(add(x, residual))",
                            .flops_per_element = 9};
const Op kResidualRmsNorm{.name = "residual_rms_norm",
                          .marks = MarkRule::kAlongDims,
                          .reads = {inputs(2), inputs(2), inputs()},
                          .reads_outputs = outputs(0),
                          .composed = "rms_norm(add(x, residual))",
                          .flops_per_element = 7};

namespace {

struct RowNormOptions {
  Shape shape;
  double eps;
  bool center;
};

// Of operands of one dtype, after `drop` in (0, 1) where there is some.
ResidualNorm residual_norm(const Op& op, const TensorList& operands, const RowNormOptions& options,
                           const std::optional<kernels::ResidualDropout>& dropped) {
  const auto& [shape, eps, center] = options;
  const int64_t columns = numel_of(shape);
  const bool has_weight = operands[2].defined(), has_bias = center && operands[3].defined();
  const Fp8Norm norm(operands[0], columns);
  const TensorList both = differentiable(
      along(op, last_dims(shape)), operands,
      [&](Inputs in, Extras& extras) -> TensorList {
        const Tensor bias = center ? in[3] : Tensor();
        const kernels::RowNorm n =
            dropped ? kernels::row_norm_forward(in[0], in[1], columns, in[2], bias, eps, center,
                                                dropped)
                    : norm.forward(in[0], in[1], columns, in[2], bias, eps, center);
        extras.save(n.rstd);
        if (center) extras.save(n.mean);
        return {n.sum, n.y};
      },
      [=](Grads dy, const Saved& s) -> TensorList {
        const bool streams = s.needs(0) || s.needs(1);
        TensorList gradients(center ? 4 : 3);
        if (!dy.defined(1)) {
          gradients[0] = dropped && s.needs(0)
                             ? dropout_at(dy[0], dropped->p, dropped->stream, dropped->place)
                             : dy[0];
          gradients[1] = dy[0];
          return gradients;
        }
        const bool wanted[3] = {streams, has_weight && s.needs(2), has_bias && s.needs(3)};
        const Tensor dsum = dy.defined(0) ? dy[0] : Tensor();
        const TensorList g =
            row_gradients(dy[1], dsum, s.output(0), has_weight && streams ? s.input(2) : Tensor(),
                          center ? s.extra(1) : Tensor(), s.extra(0), shape, eps, center, wanted, s,
                          {.weight = 2, .bias = 3, .dropout = dropped});
        gradients[0] = s.needs(0) ? g[1] : Tensor();
        gradients[1] = s.needs(1) ? g[0] : Tensor();
        gradients[2] = g[2];
        if (center) gradients[3] = g[3];
        return gradients;
      });
  return {both[0], both[1]};
}

void check_residual(const Op& op, const Tensor& x, const Tensor& residual) {
  TS_CHECK_SHAPE(residual.shape() == x.shape(), op, "x and residual must have one shape; got ", x,
                 " and ", residual);
  TS_CHECK_DTYPE(is_floating(residual.dtype()) && !is_fp8(residual.dtype()), op,
                 "expects a floating residual; got ", residual);
}

}  // namespace

ResidualNorm residual_layer_norm(const Tensor& x, const Tensor& residual,
                                 const Shape& normalized_shape, const Tensor& weight,
                                 const Tensor& bias, double eps, double drop,
                                 std::optional<RandomStream> stream) {
  check_defined(kResidualLayerNorm, "x", x);
  check_defined(kResidualLayerNorm, "residual", residual);
  check_rows(kResidualLayerNorm, x, normalized_shape, weight, bias);
  check_residual(kResidualLayerNorm, x, residual);
  if (residual.dtype() != x.dtype()) {  // as add: under autocast x is low, the stream f32
    const DType widest = promote_types(x.dtype(), residual.dtype());
    return residual_layer_norm(to(dropout(x, drop, true, stream), widest), to(residual, widest),
                               normalized_shape, weight, bias, eps);
  }
  TS_CHECK(drop >= 0 && drop <= 1, kResidualLayerNorm, "drop must be in [0, 1]; got ", drop);
  if (drop == 1) {
    return residual_layer_norm(dropout(x, drop), residual, normalized_shape, weight, bias, eps);
  }
  std::optional<kernels::ResidualDropout> dropped;
  if (drop > 0) {
    dropped.emplace(drop, stream ? *stream : next_random_stream(),
                    kernels::DrawPlace::of(x.shape(), cuts_of(kResidualLayerNorm, x)));
  }
  return residual_norm(kResidualLayerNorm, {x, residual, weight, bias},
                       {normalized_shape, eps, true}, dropped);
}

ResidualNorm residual_rms_norm(const Tensor& x, const Tensor& residual,
                               const Shape& normalized_shape, const Tensor& weight,
                               std::optional<double> eps) {
  check_defined(kResidualRmsNorm, "x", x);
  check_defined(kResidualRmsNorm, "residual", residual);
  check_rows(kResidualRmsNorm, x, normalized_shape, weight, {});
  check_residual(kResidualRmsNorm, x, residual);
  const DType widest = promote_types(x.dtype(), residual.dtype());
  const double epsilon = eps.value_or(epsilon_of(widest == kF64 ? kF64 : kF32));
  if (residual.dtype() != x.dtype()) {
    return residual_rms_norm(to(x, widest), to(residual, widest), normalized_shape, weight,
                             epsilon);
  }
  return residual_norm(kResidualRmsNorm, {x, residual, weight}, {normalized_shape, epsilon, false},
                       {});
}

// ---- Over channels ------------------------------------------------------------------------------

const Op kGroupNorm{.name = "group_norm",
                    .marks = MarkRule::kAlongDims,
                    .reads = {inputs(0, 1), inputs(0), inputs()},
                    .flops_per_element = 8};

Tensor group_norm(const Tensor& x, int64_t num_groups, const Tensor& weight, const Tensor& bias,
                  double eps) {
  check_input(kGroupNorm, x);
  TS_CHECK_SHAPE(x.dim() >= 2, kGroupNorm, "expects [N, C, ...]; got ", x);
  const int64_t C = x.size(1);
  TS_CHECK(num_groups >= 1 && C % num_groups == 0, kGroupNorm, "num_groups must divide the ", C,
           " channels of ", x, "; got ", num_groups);
  check_parameter(kGroupNorm, "weight", weight, {C}, x);
  check_parameter(kGroupNorm, "bias", bias, {C}, x);
  const bool has_weight = weight.defined(), has_bias = bias.defined();
  return differentiable(
      kGroupNorm, {x, weight, bias},
      [=](Inputs in, Extras& extras) {
        const kernels::Statistics s = kernels::channel_statistics(in[0], num_groups);
        const Tensor rstd = kernels::rstd_of(s.variance, eps);
        extras.save(s.mean);
        extras.save(rstd);
        return kernels::channel_norm_forward(in[0], num_groups, s.mean, rstd, in[1], in[2]);
      },
      [=](Grads dy, const Saved& s) -> TensorList {
        const bool wanted[3] = {s.needs(0), has_weight && s.needs(1), has_bias && s.needs(2)};
        const Tensor x = wanted[0] || wanted[1] ? s.input(0) : dy[0];
        const Tensor w = has_weight && wanted[0] ? s.input(1) : Tensor();
        if (!grad_enabled()) {
          const kernels::RowNormGradients g = kernels::channel_norm_backward(
              dy[0], x, num_groups, s.extra(0), s.extra(1), w, false, wanted);
          return {g.input, g.weight, g.bias};
        }
        // [N, groups, C / groups, S]: statistics over the last two.
        const int64_t N = x.size(0), S = x.numel() / ::std::max<int64_t>(1, N * C);
        const Shape grouped = {N, num_groups, C / num_groups, S};
        const Shape parameters = {1, num_groups, C / num_groups, 1};
        const Composed g = norm_gradient(reshape(dy[0], grouped), reshape(x, grouped), w, {2, 3},
                                         parameters, eps, true);
        return {wanted[0] ? reshape(g.input, x.shape()) : Tensor(),
                wanted[1] ? reshape(g.weight, {C}) : Tensor(),
                wanted[2] ? reshape(g.bias, {C}) : Tensor()};
      });
}

const Op kBatchNorm{.name = "batch_norm",
                    .marks = MarkRule::kAlongDims,
                    .reads = {inputs(0, 1), inputs(0), inputs()},
                    .flops_per_element = 8};

Tensor batch_norm(const Tensor& x, const Tensor& running_mean, const Tensor& running_var,
                  const Tensor& weight, const Tensor& bias, bool training, double momentum,
                  double eps) {
  check_input(kBatchNorm, x);
  TS_CHECK_SHAPE(x.dim() >= 2, kBatchNorm, "expects [N, C, ...]; got ", x);
  const int64_t C = x.size(1), count = C == 0 ? 0 : x.numel() / C;
  check_beside(kBatchNorm, "running_mean", running_mean);
  check_beside(kBatchNorm, "running_var", running_var);
  check_parameter(kBatchNorm, "running_mean", running_mean, {C}, x);
  check_parameter(kBatchNorm, "running_var", running_var, {C}, x);
  check_parameter(kBatchNorm, "weight", weight, {C}, x);
  check_parameter(kBatchNorm, "bias", bias, {C}, x);
  TS_CHECK(training || (running_mean.defined() && running_var.defined()), kBatchNorm,
           "evaluation needs running_mean and running_var; pass them or training = true");
  TS_CHECK(!training || count > 1, kBatchNorm, "training needs more than 1 value per channel; got ",
           x);
  const bool has_weight = weight.defined(), has_bias = bias.defined();
  return differentiable(
      kBatchNorm, {x, weight, bias},
      [=](Inputs in, Extras& extras) {
        const DType compute = in[0].dtype() == kF64 ? kF64 : kF32;
        kernels::Statistics s;
        if (training) {
          s = kernels::channel_statistics(in[0], 0);
          const bool follows = !is_recomputing();
          if (follows && running_mean.defined()) {
            kernels::update_running(running_mean, s.mean, 1, momentum);
          }
          if (follows && running_var.defined()) {
            const double unbiased = static_cast<double>(count) / static_cast<double>(count - 1);
            kernels::update_running(running_var, s.variance, unbiased, momentum);
          }
        } else {
          s = {kernels::convert(running_mean, compute), kernels::convert(running_var, compute)};
        }
        const Tensor rstd = kernels::rstd_of(s.variance, eps);
        extras.save(s.mean);
        extras.save(rstd);
        return kernels::channel_norm_forward(in[0], 0, s.mean, rstd, in[1], in[2]);
      },
      [=](Grads dy, const Saved& s) -> TensorList {
        const bool wanted[3] = {s.needs(0), has_weight && s.needs(1), has_bias && s.needs(2)};
        const Tensor x = wanted[0] || wanted[1] ? s.input(0) : dy[0];
        const Tensor w = has_weight && wanted[0] ? s.input(1) : Tensor();
        if (!grad_enabled()) {
          const kernels::RowNormGradients g = kernels::channel_norm_backward(
              dy[0], x, 0, s.extra(0), s.extra(1), w, !training, wanted);
          return {g.input, g.weight, g.bias};
        }
        const int64_t N = x.size(0), S = x.numel() / ::std::max<int64_t>(1, N * C);
        const Shape flat = {N, C, S}, parameters = {1, C, 1};
        const Tensor grad = reshape(dy[0], flat), values = reshape(x, flat);
        Composed g;
        if (training) {
          g = norm_gradient(grad, values, w, {0, 2}, parameters, eps, true);
        } else {
          const Tensor rstd = reshape(s.extra(1), parameters);
          const Tensor xhat = mul(sub(in_compute(values), reshape(s.extra(0), parameters)), rstd);
          const Tensor up = in_compute(grad);
          const Tensor scaled = w.defined() ? mul(up, reshape(in_compute(w), parameters)) : up;
          g = {mul(scaled, rstd), sum_to(mul(up, xhat), parameters), sum_to(up, parameters)};
        }
        return {wanted[0] ? reshape(g.input, x.shape()) : Tensor(),
                wanted[1] ? reshape(g.weight, {C}) : Tensor(),
                wanted[2] ? reshape(g.bias, {C}) : Tensor()};
      });
}

// Of group_norm with a group for each channel, or of batch_norm with given statistics.
Tensor instance_norm(const Tensor& x, const Tensor& running_mean, const Tensor& running_var,
                     const Tensor& weight, const Tensor& bias, bool use_input_stats,
                     double momentum, double eps) {
  constexpr const char* kWhere = "instance_norm";
  TS_CHECK_SHAPE(x.defined() && x.dim() >= 3, kWhere, "expects [N, C, ...] with at least 3 ",
                 "dimensions; got ", x);
  if (!use_input_stats) {
    TS_CHECK(running_mean.defined() && running_var.defined(), kWhere,
             "without use_input_stats it needs running_mean and running_var; pass them");
    return batch_norm(x, running_mean, running_var, weight, bias, false, momentum, eps);
  }
  const int64_t C = x.size(1), planes = x.size(0) * C;
  TS_CHECK_SHAPE(planes == 0 || x.numel() / planes > 1, kWhere,
                 "needs more than 1 value in each channel of a sample; got ", x);
  if (!is_recomputing() && (running_mean.defined() || running_var.defined())) {
    const NoGradGuard no_grad;
    Shape inner;
    for (int d = 2; d < x.dim(); ++d) inner.push_back(d);
    const Tensor wide = x.dtype() == kF64 ? x : to(x, kF32);
    const auto follow = [&](const Tensor& running, const Tensor& of_samples) {
      if (running.defined()) lerp_(running, to(mean(of_samples, {0}), running.dtype()), momentum);
    };
    follow(running_mean, mean(wide, inner));
    follow(running_var, var(wide, inner));
  }
  return group_norm(x, C, weight, bias, eps);
}
}  // namespace tessera
