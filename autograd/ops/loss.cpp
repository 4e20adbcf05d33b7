// Losses. Cross-entropy of class indices is one fused kernel; the pointwise ones are formulas in
// ops, calculated in f32 for narrower inputs, with their slopes beside them.
#include <cmath>
#include <functional>

#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/differentiable.h>
#include <tessera/autograd/meta_inputs.h>
#include <tessera/autograd/ops.h>
#include <tessera/autograd/ops/compute_dtype.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/elementwise/elementwise.h>
#include <tessera/core/kernels/loss/cross_entropy.h>
#include <tessera/core/kernels/reduce/reduce.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera {
namespace {

void check_input(const Op& op, const char* name, const Tensor& x) {
  check_defined(op, name, x);
  TS_CHECK_DTYPE(is_floating(x.dtype()) && !is_fp8(x.dtype()), op, name,
                 " must be f64, f32, f16 or bf16; got ", x, "; convert with to(dtype)");
}
Tensor reduced(const Tensor& losses, Reduction reduction) {
  switch (reduction) {
    case Reduction::kMean:
      return mean(losses);
    case Reduction::kSum:
      return sum(losses);
    default:
      return losses;
  }
}
// What a loss of one element gets of the gradient of the result.
Tensor share_of(const Tensor& dy, Reduction reduction, int64_t numel) {
  return reduction == Reduction::kMean ? div(dy, static_cast<double>(numel)) : dy;
}

// ---- Cross-entropy ------------------------------------------------------------------------------

// Dimension 1 holds the classes, or the only one.
int64_t classes_of(const Tensor& x) { return x.dim() == 1 ? x.size(0) : x.size(1); }

// [N, C, d...] as rows [N * d..., C]; and back.
Tensor to_rows(const Tensor& x) {
  if (x.dim() <= 1) return reshape(x, {1, x.numel()});
  if (x.dim() == 2) return x;
  Shape order = {0};
  for (int d = 2; d < x.dim(); ++d) order.push_back(d);
  order.push_back(1);
  const int64_t C = x.size(1);
  return reshape(permute(x, order), {C == 0 ? 0 : x.numel() / C, C});
}
Tensor from_rows(const Tensor& rows, const Shape& shape) {
  if (shape.size() <= 2) return reshape(rows, shape);
  Shape split = {shape[0]};
  Shape order = {0, shape.size() - 1};
  for (int d = 2; d < shape.size(); ++d) {
    split.push_back(shape[d]);
    order.push_back(d - 1);
  }
  split.push_back(shape[1]);
  return permute(reshape(rows, split), order);
}
Tensor contiguous_rows(const Tensor& rows) {
  return rows.size(1) <= 1 || rows.stride(1) == 1 ? rows : kernels::contiguous(rows);
}

// Target's shape where it holds class indices: that of x without the classes.
void check_class_target(const Op& op, const Tensor& x, const Tensor& target) {
  check_defined(op, "target", target);
  TS_CHECK_SHAPE(x.dim() >= 1, op, "expects [C], [N, C] or [N, C, ...]; got ", x);
  Shape expected = x.shape();
  expected.erase(x.dim() == 1 ? 0 : 1);
  TS_CHECK_SHAPE(target.shape() == expected, op, "class indices for ", x, " must have shape ",
                 expected, "; got ", target);
  if (!is_left_unread(x)) check_same_device(op, "target", target, x);
}
// As in torch: a weight scales losses and is not trained.
void check_constant(const Op& op, const char* role, const Tensor& weight) {
  TS_CHECK(!weight.defined() || !grad_enabled() || !weight.requires_grad(), op,
           "has no gradient for ", role, ", which requires one; give it detached");
  check_beside(op, role, weight);
}
void check_class_weight(const Op& op, const Tensor& x, const Tensor& weight) {
  if (!weight.defined()) return;
  check_input(op, "weight", weight);
  check_constant(op, "weight", weight);
  if (!is_left_unread(x)) check_same_device(op, "weight", weight, x);
  TS_CHECK_SHAPE(weight.shape() == Shape{classes_of(x)}, op, "weight must have shape [",
                 classes_of(x), "], the classes of ", x, "; got ", weight);
}

// Targets that are distributions: made of ops, differentiable in both.
Tensor soft_cross_entropy(const Op& op, const Tensor& logits, const Tensor& target,
                          const CrossEntropyOptions& options) {
  TS_CHECK_SHAPE(target.shape() == logits.shape(), op,
                 "probabilities must have the shape of the logits, ", logits, "; got ", target);
  check_input(op, "target", target);
  const int64_t C = classes_of(logits);
  const double s = options.label_smoothing;
  Tensor q = to_rows(in_compute(target));
  if (s != 0) q = add(mul(q, 1 - s), s / static_cast<double>(C));
  if (options.weight.defined()) q = mul(q, in_compute(options.weight));
  const Tensor rows = to_rows(in_compute(logits));
  const Tensor losses = neg(sum(mul(log_softmax(rows, 1), q), {1}));
  Tensor result;
  if (options.reduction == Reduction::kNone) {
    Shape shape = logits.shape();
    shape.erase(logits.dim() == 1 ? 0 : 1);
    result = reshape(losses, shape);
  } else {
    result = reduced(losses, options.reduction);
  }
  return to(result, loss_dtype(logits));
}

}  // namespace

const Op kCrossEntropy{.name = "cross_entropy",
                       .marks = MarkRule::kAlongDims,
                       .reads = {inputs(0)},
                       .composed = "nll_loss(log_softmax(logits, 1), target)",
                       .flops_per_element = 15};

Tensor cross_entropy(const Tensor& logits, const Tensor& target,
                     const CrossEntropyOptions& options) {
  check_input(kCrossEntropy, "logits", logits);
  TS_CHECK(options.label_smoothing >= 0 && options.label_smoothing <= 1, kCrossEntropy,
           "label_smoothing must be in [0, 1]; got ", options.label_smoothing);
  TS_CHECK_SHAPE(logits.dim() >= 1, kCrossEntropy, "expects [C], [N, C] or [N, C, ...]; got ",
                 logits);
  check_class_weight(kCrossEntropy, logits, options.weight);
  check_defined(kCrossEntropy, "target", target);
  if (is_floating(target.dtype())) {
    return soft_cross_entropy(kCrossEntropy, logits, target, options);
  }
  check_class_target(kCrossEntropy, logits, target);
  const Tensor targets =
      kernels::check_targets("cross_entropy", target, classes_of(logits), options.ignore_index);
  const Reduction reduction = options.reduction;
  const kernels::CrossEntropyAttributes attributes{options.weight, options.ignore_index,
                                                   options.label_smoothing};
  const DType dtype = loss_dtype(logits);
  return differentiable(
      kCrossEntropy, {logits, targets},
      [=](Inputs in, Extras& extras) {
        const kernels::CrossEntropyRows rows =
            kernels::cross_entropy_forward(contiguous_rows(to_rows(in[0])), in[1], attributes);
        extras.save(in[1]);
        extras.save(rows.statistics);
        extras.save(rows.total_weight);
        if (reduction == Reduction::kNone) {
          return kernels::convert(raw::view(rows.losses, in[1].shape()), dtype);
        }
        if (in[0].is_meta()) return raw::empty({}, dtype, in[0].device());
        const Tensor total = kernels::sum(rows.losses, {0}, false, kF64);
        return kernels::convert(reduction == Reduction::kMean
                                    ? kernels::binary<fn::Div>(total, rows.total_weight)
                                    : total,
                                dtype);
      },
      [=](Grads dy, const Saved& s) -> TensorList {
        const Tensor logits = s.input(0), targets = s.extra(0), rows = to_rows(logits);
        const bool divided = reduction == Reduction::kMean && !logits.is_meta();
        const Tensor divisor = divided ? s.extra(2) : Tensor();
        const Tensor up = reshape(dy[0], {dy[0].numel()});
        if (!grad_enabled()) {
          const Tensor gradient = kernels::cross_entropy_backward(
              contiguous_rows(rows), targets, attributes, s.extra(1), up, divisor);
          return {from_rows(gradient, logits.shape()), Tensor()};
        }
        const Tensor q = kernels::cross_entropy_distribution(rows, targets, attributes);
        const Tensor p = softmax(in_compute(rows), 1);
        Tensor share = in_compute(up);
        if (divided) {
          // Where all rows are ignored their gradient is 0, not 0 times an infinity.
          const Tensor nothing = all(eq(targets, attributes.ignore_index));
          share = mul(share, reciprocal(masked_fill(divisor, nothing, 1)));
        }
        const Tensor weight = unsqueeze(share, 1);
        const Tensor gradient = mul(weight, sub(mul(p, kernels::sum(q, {1}, true, q.dtype())), q));
        return {from_rows(gradient, logits.shape()), Tensor()};
      });
}

const Op kCrossEntropyInplace{.name = "cross_entropy_inplace",
                              .twice_differentiable = false,
                              .composed = "cross_entropy(logits, target)",
                              .flops_per_element = 15};

Tensor cross_entropy_inplace(const Tensor& logits, const Tensor& target, int64_t ignore_index) {
  check_input(kCrossEntropyInplace, "logits", logits);
  TS_CHECK_SHAPE(logits.dim() == 2, kCrossEntropyInplace, "expects [N, C]; got ", logits);
  check_class_target(kCrossEntropyInplace, logits, target);
  const Tensor targets =
      kernels::check_targets("cross_entropy_inplace", target, logits.size(1), ignore_index);
  const DType dtype = loss_dtype(logits);
  // In f16 the gradient of a mean over many rows would sink below the smallest number before the
  // scale of the loss lifts it: the division waits for that.
  const bool divide_later = logits.dtype() == kF16;
  return differentiable(
      kCrossEntropyInplace, {logits, targets},
      [=](Inputs in, Extras& extras) {
        if (in[0].is_meta()) {
          extras.save(in[0]);
          extras.save(raw::empty({}, kF64, in[0].device()));
          return raw::empty({}, dtype, in[0].device());
        }
        const Tensor x = contiguous_rows(in[0]);  // rows that are not are worked on in a copy
        const int64_t N = x.size(0);
        // Beside the logits: a GPU reads nothing back.
        const Tensor valid =
            kernels::sum(kernels::binary<fn::Ne>(in[1], ignore_index), {0}, false, kF64);
        const auto mean_of = [&](const Tensor& losses) {
          const Tensor total = kernels::sum(losses, {0}, false, kF64);
          return kernels::convert(kernels::binary<fn::Div>(total, valid), dtype);
        };
        if (!extras.wanted()) {
          return mean_of(kernels::cross_entropy_forward(x, in[1], {{}, ignore_index, 0}).losses);
        }
        const Tensor losses = raw::empty({N}, kF64, x.device());
        kernels::cross_entropy_in_place(x, in[1], ignore_index, divide_later ? Tensor() : valid,
                                        losses);
        // The logits hold their gradient from here on.
        extras.save(raw::alias(x));
        extras.save(divide_later
                        ? kernels::unary<fn::Reciprocal>(kernels::binary<fn::Maximum>(valid, 1.0))
                        : Tensor());
        // What the gradient is multiplied by already; a GPU keeps it beside the gradient.
        extras.save(x.device().is_cuda() ? raw::full({}, 1, kF64, x.device()) : Tensor());
        return mean_of(losses);
      },
      [](Grads dy, const Saved& s) -> TensorList {
        const Tensor gradient = s.extra(0);
        if (dy[0].is_meta()) return {mul(gradient, dy[0]), Tensor()};
        // One number: where it is 1, as a rule, the gradient is there already.
        if (gradient.device().is_cuda()) {
          const Tensor applied = s.extra(2), up = kernels::convert(dy[0], kF64);
          const Tensor wanted =
              s.extra(1).defined() ? kernels::binary<fn::Mul>(up, s.extra(1)) : up;
          kernels::scale_unless_one(gradient,
                                    kernels::convert(kernels::binary<fn::Div>(wanted, applied),
                                                     gradient.dtype() == kF64 ? kF64 : kF32));
          kernels::copy_into(applied, wanted);
          return {gradient, Tensor()};
        }
        const double factor = dy[0].item() * (s.extra(1).defined() ? s.extra(1).item() : 1.0);
        return {factor == 1 ? gradient : mul(gradient, Scalar(factor)), Tensor()};
      });
}

Tensor nll_loss(const Tensor& log_probabilities, const Tensor& target,
                const CrossEntropyOptions& options) {
  static const Op& op = kCrossEntropy;  // for errors of the shared checks
  check_input(op, "log_probabilities", log_probabilities);
  TS_CHECK(options.label_smoothing == 0, "nll_loss", "has no label_smoothing; got ",
           options.label_smoothing, "; use cross_entropy");
  check_class_target(op, log_probabilities, target);
  check_class_weight(op, log_probabilities, options.weight);
  const Tensor targets =
      reshape(kernels::check_targets("nll_loss", target, classes_of(log_probabilities),
                                     options.ignore_index),
              {target.numel()});
  const Tensor rows = to_rows(in_compute(log_probabilities));
  const Tensor ignored = eq(targets, options.ignore_index);
  const Tensor safe = masked_fill(targets, ignored, 0);
  Tensor weights = options.weight.defined()
                       ? index_select(in_compute(options.weight), 0, safe)
                       : ones({targets.numel()}, {rows.dtype(), rows.device()});
  weights = masked_fill(weights, ignored, 0);
  const Tensor picked = masked_fill(squeeze(gather(rows, 1, unsqueeze(safe, 1)), 1), ignored, 0);
  const Tensor losses = neg(mul(picked, weights));
  Tensor result;
  switch (options.reduction) {
    case Reduction::kNone:
      result = reshape(losses, target.shape());
      break;
    case Reduction::kSum:
      result = sum(losses);
      break;
    case Reduction::kMean:
      result = div(sum(losses), sum(weights));
      break;
  }
  return to(result, loss_dtype(log_probabilities));
}

// ---- Pointwise losses ---------------------------------------------------------------------------

namespace {

using Formula = std::function<Tensor(const Tensor& x, const Tensor& target)>;

// [N, 1] against [N] would be N * N losses, and no error would say so.
void check_one_shape(const Op& op, const Tensor& x, const Tensor& target) {
  check_defined(op, "input", x);
  check_defined(op, "target", target);
  TS_CHECK_SHAPE(x.shape() == target.shape(), op, "input and target must have one shape; got ", x,
                 " and ", target, "; reshape or expand one");
}

// value(x, t) is the loss of each element, slope(x, t) its derivative by x and target_slope that by
// t; all in ops. Where target_slope is empty it is -slope: losses of x - t.
Tensor pointwise(const Op& op, const Tensor& x, const Tensor& target, Reduction reduction,
                 Formula value, Formula slope, Formula target_slope = {}) {
  check_input(op, "input", x);
  check_defined(op, "target", target);
  const Shape shape = broadcast_shapes(x.shape(), target.shape(), op.name);
  const int64_t numel = numel_of(shape);
  return differentiable(
      op, {x, target},
      [&](Inputs in) {
        const DType dtype = promote_types(in[0].dtype(), in[1].dtype());
        return to(reduced(value(in_compute(in[0]), in_compute(in[1])), reduction), dtype);
      },
      [=](Grads dy, const Saved& s) -> TensorList {
        const Tensor x = in_compute(s.input(0)), t = in_compute(s.input(1));
        const Tensor up = share_of(in_compute(dy[0]), reduction, numel);
        TensorList gradients(2);
        if (target_slope) {
          // A slope may have the shape of one input only; the engine sums what was broadcast.
          if (s.needs(0)) gradients[0] = expand(mul(slope(x, t), up), shape);
          if (s.needs(1)) gradients[1] = expand(mul(target_slope(x, t), up), shape);
        } else {
          const Tensor gradient = mul(slope(x, t), up);
          if (s.needs(0)) gradients[0] = gradient;
          if (s.needs(1)) gradients[1] = neg(gradient);
        }
        return gradients;
      });
}

}  // namespace

const Op kMseLoss{.name = "mse_loss",
                  .marks = MarkRule::kAlongDims,
                  .autocast = Autocast::kFloat32,
                  .reads = {inputs(0, 1), inputs(0, 1)}};

Tensor mse_loss(const Tensor& x, const Tensor& target, Reduction reduction) {
  check_one_shape(kMseLoss, x, target);
  return pointwise(
      kMseLoss, x, target, reduction,
      [](const Tensor& x, const Tensor& t) { return square(sub(x, t)); },
      [](const Tensor& x, const Tensor& t) { return mul(sub(x, t), 2); });
}

const Op kL1Loss{.name = "l1_loss",
                 .marks = MarkRule::kAlongDims,
                 .autocast = Autocast::kFloat32,
                 .reads = {inputs(0, 1), inputs(0, 1)}};

Tensor l1_loss(const Tensor& x, const Tensor& target, Reduction reduction) {
  check_one_shape(kL1Loss, x, target);
  return pointwise(
      kL1Loss, x, target, reduction,
      [](const Tensor& x, const Tensor& t) { return abs(sub(x, t)); },
      [](const Tensor& x, const Tensor& t) { return sign(sub(x, t)); });
}

const Op kSmoothL1Loss{.name = "smooth_l1_loss",
                       .marks = MarkRule::kAlongDims,
                       .autocast = Autocast::kFloat32,
                       .reads = {inputs(0, 1), inputs(0, 1)}};

Tensor smooth_l1_loss(const Tensor& x, const Tensor& target, Reduction reduction, double beta) {
  TS_CHECK(beta >= 0, kSmoothL1Loss, "beta must not be negative; got ", beta);
  if (beta == 0) return l1_loss(x, target, reduction);
  check_one_shape(kSmoothL1Loss, x, target);
  return pointwise(
      kSmoothL1Loss, x, target, reduction,
      [=](const Tensor& x, const Tensor& t) {
        const Tensor d = sub(x, t), size = abs(d);
        return where(lt(size, beta), mul(square(d), 0.5 / beta), sub(size, 0.5 * beta));
      },
      [=](const Tensor& x, const Tensor& t) {
        const Tensor d = sub(x, t);
        return where(ge(abs(d), beta), sign(d), div(d, beta));  // of NaN it is NaN
      });
}

const Op kHuberLoss{.name = "huber_loss",
                    .marks = MarkRule::kAlongDims,
                    .autocast = Autocast::kFloat32,
                    .reads = {inputs(0, 1), inputs(0, 1)}};

Tensor huber_loss(const Tensor& x, const Tensor& target, Reduction reduction, double delta) {
  TS_CHECK(delta > 0, kHuberLoss, "delta must be positive; got ", delta);
  check_one_shape(kHuberLoss, x, target);
  return pointwise(
      kHuberLoss, x, target, reduction,
      [=](const Tensor& x, const Tensor& t) {
        const Tensor d = sub(x, t), size = abs(d);
        return where(le(size, delta), mul(square(d), 0.5), mul(sub(size, 0.5 * delta), delta));
      },
      [=](const Tensor& x, const Tensor& t) { return clamp(sub(x, t), -delta, delta); });
}

namespace {

Tensor weighted(const Tensor& losses, const Tensor& weight) {
  return weight.defined() ? mul(losses, in_compute(weight)) : losses;
}
// log(sigmoid(x)) without overflow.
Tensor log_sigmoid(const Tensor& x) {
  return sub(clamp(x, std::nullopt, 0), log1p(exp(neg(abs(x)))));
}

}  // namespace

const Op kBinaryCrossEntropy{.name = "binary_cross_entropy",
                             .marks = MarkRule::kAlongDims,
                             .autocast = Autocast::kRefuse,
                             .reads = {inputs(0, 1), inputs(0, 1)}};

Tensor binary_cross_entropy(const Tensor& x, const Tensor& target, const Tensor& weight,
                            Reduction reduction) {
  check_input(kBinaryCrossEntropy, "input", x);
  check_constant(kBinaryCrossEntropy, "weight", weight);
  check_one_shape(kBinaryCrossEntropy, x, target);
  if (!x.is_meta() && x.numel() > 0) {
    const Shape all_dims = wrap_dims({}, x.dim(), kBinaryCrossEntropy.name);
    const double low = kernels::amin(x, all_dims, false).item();
    const double high = kernels::amax(x, all_dims, false).item();
    TS_CHECK(!(low < 0) && !(high > 1), kBinaryCrossEntropy,
             "input must hold probabilities in [0, 1]; its elements reach from ", low, " to ", high,
             "; use binary_cross_entropy_with_logits for logits");
  }
  // torch's bounds: logarithms end at -100, the divisor at 1e-12.
  return pointwise(
      kBinaryCrossEntropy, x, target, reduction,
      [=](const Tensor& x, const Tensor& t) {
        const Tensor hit = mul(t, clamp(log(x), -100));
        const Tensor miss = mul(rsub(1, t), clamp(log1p(neg(x)), -100));
        return weighted(neg(add(hit, miss)), weight);
      },
      [=](const Tensor& x, const Tensor& t) {
        return weighted(div(sub(x, t), clamp(mul(x, rsub(1, x)), 1e-12)), weight);
      },
      [=](const Tensor& x, const Tensor&) { return weighted(sub(log1p(neg(x)), log(x)), weight); });
}

const Op kBinaryCrossEntropyWithLogits{.name = "binary_cross_entropy_with_logits",
                                       .marks = MarkRule::kAlongDims,
                                       .autocast = Autocast::kFloat32,
                                       .reads = {inputs(0, 1), inputs(0, 1)}};

Tensor binary_cross_entropy_with_logits(const Tensor& x, const Tensor& target, const Tensor& weight,
                                        Reduction reduction, const Tensor& pos_weight) {
  check_input(kBinaryCrossEntropyWithLogits, "input", x);
  check_constant(kBinaryCrossEntropyWithLogits, "weight", weight);
  check_constant(kBinaryCrossEntropyWithLogits, "pos_weight", pos_weight);
  check_one_shape(kBinaryCrossEntropyWithLogits, x, target);
  const Tensor positive = pos_weight.defined() ? in_compute(pos_weight) : pos_weight;
  return pointwise(
      kBinaryCrossEntropyWithLogits, x, target, reduction,
      [=](const Tensor& x, const Tensor& t) {
        Tensor logs = log_sigmoid(x);
        if (positive.defined()) logs = mul(logs, add(mul(t, sub(positive, 1)), 1));
        return weighted(sub(mul(rsub(1, t), x), logs), weight);
      },
      [=](const Tensor& x, const Tensor& t) {
        if (!positive.defined()) return weighted(sub(sigmoid(x), t), weight);
        const Tensor hit = mul(positive, t);
        return weighted(sub(mul(sigmoid(x), add(hit, rsub(1, t))), hit), weight);
      },
      [=](const Tensor& x, const Tensor&) {
        if (!positive.defined()) return weighted(neg(x), weight);
        return weighted(sub(log_sigmoid(neg(x)), mul(positive, log_sigmoid(x))), weight);
      });
}

const Op kKlDiv{.name = "kl_div",
                .marks = MarkRule::kAlongDims,
                .autocast = Autocast::kFloat32,
                .reads = {inputs(0, 1), inputs(0, 1)}};

Tensor kl_div(const Tensor& x, const Tensor& target, KlReduction reduction, bool log_target) {
  if (reduction == KlReduction::kBatchMean) {
    const Tensor total = kl_div(x, target, KlReduction::kSum, log_target);
    return x.dim() == 0 ? total : div(total, static_cast<double>(x.size(0)));
  }
  const Reduction kind = reduction == KlReduction::kMean  ? Reduction::kMean
                         : reduction == KlReduction::kSum ? Reduction::kSum
                                                          : Reduction::kNone;
  if (log_target) {
    return pointwise(
        kKlDiv, x, target, kind,
        [](const Tensor& x, const Tensor& t) { return mul(exp(t), sub(t, x)); },
        [](const Tensor&, const Tensor& t) { return neg(exp(t)); },
        [](const Tensor& x, const Tensor& t) { return mul(exp(t), add(sub(t, x), 1)); });
  }
  return pointwise(
      kKlDiv, x, target, kind,
      [](const Tensor& x, const Tensor& t) {
        return sub(masked_fill(mul(t, log(t)), eq(t, 0), 0), mul(t, x));
      },
      [](const Tensor&, const Tensor& t) { return neg(t); },
      [](const Tensor& x, const Tensor& t) { return sub(add(log(t), 1), x); });
}

const Op kPoissonNllLoss{.name = "poisson_nll_loss",
                         .marks = MarkRule::kAlongDims,
                         .autocast = Autocast::kFloat32,
                         .reads = {inputs(0, 1), inputs(0, 1)}};

namespace {

// Stirling's approximation of log(t!), and its slope, where t > 1; elsewhere 0.
Tensor stirling(const Tensor& t) {
  const Tensor counts = gt(t, 1), safe = where(counts, t, 1);
  const Tensor value = add(sub(mul(safe, log(safe)), safe), mul(log(mul(safe, 2 * M_PI)), 0.5));
  return where(counts, value, 0);
}
Tensor stirling_slope(const Tensor& t) {
  const Tensor counts = gt(t, 1), safe = where(counts, t, 1);
  return where(counts, add(log(safe), rdiv(0.5, safe)), 0);
}

}  // namespace

Tensor poisson_nll_loss(const Tensor& x, const Tensor& target, bool log_input, bool full,
                        double eps, Reduction reduction) {
  check_one_shape(kPoissonNllLoss, x, target);
  return pointwise(
      kPoissonNllLoss, x, target, reduction,
      [=](const Tensor& x, const Tensor& t) {
        const Tensor loss = log_input ? sub(exp(x), mul(t, x)) : sub(x, mul(t, log(add(x, eps))));
        return full ? add(loss, stirling(t)) : loss;
      },
      [=](const Tensor& x, const Tensor& t) {
        return log_input ? sub(exp(x), t) : rsub(1, div(t, add(x, eps)));
      },
      [=](const Tensor& x, const Tensor& t) {
        const Tensor slope = neg(log_input ? x : log(add(x, eps)));
        return full ? add(slope, stirling_slope(t)) : slope;
      });
}

const Op kGaussianNllLoss{.name = "gaussian_nll_loss",
                          .marks = MarkRule::kAlongDims,
                          .autocast = Autocast::kFloat32,
                          .reads = {inputs(0, 1, 2)}};

Tensor gaussian_nll_loss(const Tensor& x, const Tensor& target, const Tensor& var, bool full,
                         double eps, Reduction reduction) {
  const Op& op = kGaussianNllLoss;
  check_input(op, "input", x);
  check_one_shape(op, x, target);
  check_input(op, "var", var);
  TS_CHECK(eps > 0, op, "eps must be positive; got ", eps);
  Shape without_last = x.shape(), last_of_one = x.shape();
  if (x.dim() > 0) {
    without_last.pop_back();
    last_of_one[x.dim() - 1] = 1;
  }
  const bool lacks_last = x.dim() > 0 && var.shape() == without_last && var.shape() != x.shape();
  TS_CHECK_SHAPE(lacks_last || var.shape() == x.shape() || var.shape() == last_of_one, op,
                 "var must have the shape of the input ", x, ", that without the last dimension, ",
                 "or with 1 in its place; got ", var);
  if (!var.is_meta() && var.numel() > 0) {
    const double least = kernels::amin(var, wrap_dims({}, var.dim(), op.name), false).item();
    TS_CHECK(!(least < 0), op, "var must not be negative; its least element is ", least);
  }
  const int64_t numel = x.numel();
  // The gradient of var passes below eps: the limit is a constant that is added.
  const auto limited = [eps](const Tensor& v) {
    const Tensor below = detach(v);
    return add(v, sub(clamp(below, eps), below));
  };
  return differentiable(
      op, {x, target, lacks_last ? unsqueeze(var, -1) : var},
      [=](Inputs in) {
        const DType dtype =
            promote_types(promote_types(in[0].dtype(), in[1].dtype()), in[2].dtype());
        const Tensor v = limited(in_compute(in[2]));
        const Tensor squares = square(sub(in_compute(in[0]), in_compute(in[1])));
        Tensor losses = mul(add(log(v), div(squares, v)), 0.5);
        if (full) losses = add(losses, 0.5 * std::log(2 * M_PI));
        return to(reduced(losses, reduction), dtype);
      },
      [=](Grads dy, const Saved& s) -> TensorList {
        const Tensor d = sub(in_compute(s.input(0)), in_compute(s.input(1)));
        const Tensor v = limited(in_compute(s.input(2)));
        const Tensor up = share_of(in_compute(dy[0]), reduction, numel), ratio = div(d, v);
        TensorList gradients(3);
        if (s.needs(0)) gradients[0] = mul(up, ratio);
        if (s.needs(1)) gradients[1] = neg(mul(up, ratio));
        if (s.needs(2)) {
          gradients[2] = mul(mul(up, 0.5), sub(reciprocal(v), square(ratio)));
        }
        return gradients;
      });
}

// ---- Losses of distances ------------------------------------------------------------------------

Tensor triplet_margin_loss(const Tensor& anchor, const Tensor& positive, const Tensor& negative,
                           double margin, double p, double eps, bool swap, Reduction reduction) {
  constexpr const char* kWhere = "triplet_margin_loss";
  TS_CHECK(anchor.defined() && positive.defined() && negative.defined(), kWhere,
           "an input is undefined; give it a value first");
  TS_CHECK_SHAPE(
      anchor.dim() >= 1 && anchor.dim() == positive.dim() && anchor.dim() == negative.dim(), kWhere,
      "inputs must have one number of dimensions, at least 1; got ", anchor, ", ", positive,
      " and ", negative);
  TS_CHECK(margin > 0, kWhere, "margin must be positive; got ", margin);
  // Differences of integers are integers, as torch's are: those of u8 wrap.
  const auto operand = [](const Tensor& x) { return is_floating(x.dtype()) ? in_compute(x) : x; };
  const Tensor a = operand(anchor), near = operand(positive), far = operand(negative);
  const auto distance = [&](const Tensor& x, const Tensor& y) {
    return norm(add(sub(x, y), eps), p, {-1});
  };
  Tensor apart = distance(a, far);
  if (swap) apart = minimum(apart, distance(near, far));
  const Tensor losses = relu(add(sub(distance(a, near), apart), margin));
  const Tensor loss = reduced(losses, reduction);
  return is_floating(anchor.dtype()) ? to(loss, loss_dtype(anchor)) : loss;
}

Tensor cosine_embedding_loss(const Tensor& x1, const Tensor& x2, const Tensor& target,
                             double margin, Reduction reduction) {
  constexpr const char* kWhere = "cosine_embedding_loss";
  TS_CHECK(x1.defined() && x2.defined() && target.defined(), kWhere,
           "an input is undefined; give it a value first");
  const bool fits = (x1.dim() == 1 || x1.dim() == 2) && x1.shape() == x2.shape() &&
                    target.dim() == x1.dim() - 1 && (x1.dim() == 1 || target.size(0) == x1.size(0));
  TS_CHECK_SHAPE(fits, kWhere, "expects two inputs [N, C] with a target [N], or [C] with []; got ",
                 x1, ", ", x2, " and ", target);
  constexpr double kEps = 1e-12;  // torch's
  const Tensor a = in_compute(x1), b = in_compute(x2);
  const Tensor lengths = mul(add(sum(square(a), {-1}), kEps), add(sum(square(b), {-1}), kEps));
  const Tensor cosine = div(sum(mul(a, b), {-1}), sqrt(lengths));
  const Tensor alike = masked_fill(rsub(1, cosine), ne(target, 1), 0);
  const Tensor unlike = masked_fill(relu(sub(cosine, margin)), ne(target, -1), 0);
  return to(reduced(add(alike, unlike), reduction), loss_dtype(x1));
}

}  // namespace tessera
