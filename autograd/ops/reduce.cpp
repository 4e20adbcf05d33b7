// Reductions, running sums, softmax. Backward is made of ops, except for softmax, whose gradient is
// one kernel unless backward itself is recorded.
#include <cmath>
#include <limits>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/differentiable.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/reduce/reduce.h>
#include <tessera/core/kernels/softmax/softmax.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera {
namespace {

void check_not_fp8(const Op& op, const Tensor& x) {
  check_defined(op, "the input", x);
  TS_CHECK_DTYPE(!is_fp8(x.dtype()), op, "fp8 is storage only; got ", x,
                 "; convert with to(dtype)");
}
void check_reducible(const Op& op, const Tensor& x) {
  check_defined(op, "the input", x);
  TS_CHECK_DTYPE(is_floating(x.dtype()) && !is_fp8(x.dtype()), op,
                 "expects f64, f32, f16 or bf16; got ", x, "; convert with to(dtype)");
}
// Integers are calculated in f32 where the result cannot be an integer.
Tensor as_floating(const Tensor& x) { return is_floating(x.dtype()) ? x : to(x, kF32); }

int64_t size_over(const Shape& shape, const Shape& dims) {
  int64_t size = 1;
  for (int64_t d : dims) size *= shape[static_cast<int>(d)];
  return size;
}
// A reduced tensor with its dimensions of size 1 back in place.
Tensor with_dims(const Tensor& y, const Shape& shape, const Shape& dims) {
  const Shape kept = reduced_shape(shape, dims, true);
  return y.shape() == kept ? y : reshape(y, kept);
}
Tensor spread(const Tensor& dy, const Shape& shape, const Shape& dims) {
  return expand(with_dims(dy, shape, dims), shape);
}
Shape one_dim(const Tensor& x, int64_t dim, const Op& op) {
  const int wrapped = wrap_dim(dim, x.dim(), op.name);
  return x.dim() == 0 ? Shape{} : Shape{wrapped};
}
DType sum_dtype(DType dtype) { return is_floating(dtype) ? dtype : kI64; }

}  // namespace

const Op kSum{.name = "sum", .marks = MarkRule::kSpecial, .autocast = Autocast::kFloat32};

Tensor sum(const Tensor& x, const Shape& dims, bool keepdim, std::optional<DType> dtype) {
  check_not_fp8(kSum, x);
  const Shape wrapped = wrap_dims(dims, x.dim(), kSum.name);
  return differentiable(
      along(kSum, wrapped, keepdim), {x},
      [=](Inputs in) {
        return kernels::sum(in[0], wrapped, keepdim, dtype.value_or(sum_dtype(in[0].dtype())));
      },
      [=](Grads dy, const Saved& s) { return spread(dy[0], s.input_shape(0), wrapped); });
}

const Op kSumTo{.name = "sum_to"};

Tensor sum_to(const Tensor& x, const Shape& shape) {
  check_not_fp8(kSumTo, x);
  if (x.shape() == shape) return x;
  TS_CHECK_SHAPE(broadcastable_to(shape, x.shape()), kSumTo, "shape ", shape,
                 " does not broadcast to that of x, ", x);
  return differentiable(
      kSumTo, {x}, [=](Inputs in) { return kernels::sum_to(in[0], shape); },
      [](Grads dy, const Saved& s) { return expand(dy[0], s.input_shape(0)); });
}

const Op kMean{.name = "mean", .marks = MarkRule::kLinear, .autocast = Autocast::kFloat32};

Tensor mean(const Tensor& x, const Shape& dims, bool keepdim) {
  check_reducible(kMean, x);
  const Shape wrapped = wrap_dims(dims, x.dim(), kMean.name);
  return differentiable(
      along(kMean, wrapped, keepdim), {x},
      [=](Inputs in) { return kernels::mean(in[0], wrapped, keepdim); },
      [=](Grads dy, const Saved& s) {
        const Shape& shape = s.input_shape(0);
        return spread(div(dy[0], static_cast<double>(size_over(shape, wrapped))), shape, wrapped);
      });
}

namespace {

// d variance / d x times dy: 2 / (n - correction) * dy * (x - mean). Where the correction leaves
// nothing of n, the variance is NaN or infinite, and so is its gradient.
Tensor variance_gradient(const Tensor& dy, const Tensor& x, const Shape& dims, double correction) {
  const double n = static_cast<double>(size_over(x.shape(), dims));
  const Tensor scaled = mul(with_dims(dy, x.shape(), dims), 2 / std::max(0.0, n - correction));
  return mul(scaled, sub(x, mean(x, dims, true)));
}

}  // namespace

const Op kVar{.name = "var",
              .marks = MarkRule::kAlongDims,
              .autocast = Autocast::kFloat32,
              .reads = {inputs(0)}};

Tensor var(const Tensor& x, const Shape& dims, double correction, bool keepdim) {
  check_reducible(kVar, x);
  const Shape wrapped = wrap_dims(dims, x.dim(), kVar.name);
  return differentiable(
      along(kVar, wrapped, keepdim), {x},
      [=](Inputs in) {
        return kernels::moments(in[0], wrapped, keepdim, correction, false, in[0].dtype()).variance;
      },
      [=](Grads dy, const Saved& s) {
        return variance_gradient(dy[0], s.input(0), wrapped, correction);
      });
}

const Op kStd{.name = "std",
              .marks = MarkRule::kAlongDims,
              .autocast = Autocast::kFloat32,
              .reads = {inputs(0)},
              .reads_outputs = outputs(0)};

Tensor std(const Tensor& x, const Shape& dims, double correction, bool keepdim) {
  check_reducible(kStd, x);
  const Shape wrapped = wrap_dims(dims, x.dim(), kStd.name);
  return differentiable(
      along(kStd, wrapped, keepdim), {x},
      [=](Inputs in) {
        return kernels::moments(in[0], wrapped, keepdim, correction, true, in[0].dtype()).variance;
      },
      [=](Grads dy, const Saved& s) {
        const Tensor y = s.output();
        const Tensor of_variance = masked_fill(div(dy[0], mul(y, 2)), eq(y, 0), 0);
        return variance_gradient(of_variance, s.input(0), wrapped, correction);
      });
}

// ---- Products, running sums and products --------------------------------------------------------

namespace {

bool has_zero(const Tensor& x) {
  return !x.is_meta() && x.numel() > 0 &&
         !kernels::all(x, wrap_dims({}, x.dim(), "prod"), false).item<bool>();
}

const Op kCumsum{.name = "cumsum", .marks = MarkRule::kLinear, .autocast = Autocast::kFloat32};

Tensor running_sum(const Tensor& x, int dim, bool reverse) {
  return differentiable(
      along(kCumsum, dim), {x},
      [=](Inputs in) { return kernels::cumsum(in[0], dim, sum_dtype(in[0].dtype()), reverse); },
      [=](Grads dy, const Saved&) { return running_sum(dy[0], dim, !reverse); });
}

// Products of all others along dim: what lies before times what lies behind.
Tensor product_of_others(const Tensor& x, int dim) {
  const int64_t n = x.size(dim);
  if (n <= 1) return ones_like(x);
  const Tensor one = ones_like(narrow(x, dim, 0, 1));
  const Tensor before = cat({one, cumprod(narrow(x, dim, 0, n - 1), dim)}, dim);
  const Tensor behind = cat({one, cumprod(narrow(flip(x, {dim}), dim, 0, n - 1), dim)}, dim);
  return mul(before, flip(behind, {dim}));
}

}  // namespace

const Op kProd{.name = "prod",
               .marks = MarkRule::kAlongDims,
               .autocast = Autocast::kFloat32,
               .reads = {inputs(0)},
               .reads_outputs = outputs(0)};

Tensor prod(const Tensor& x) {
  if (x.dim() != 1) return prod(reshape(x, {x.numel()}), 0);
  return prod(x, 0);
}

Tensor prod(const Tensor& x, int64_t dim, bool keepdim) {
  check_not_fp8(kProd, x);
  const Shape wrapped = one_dim(x, dim, kProd);
  return differentiable(
      along(kProd, wrapped, keepdim), {x},
      [=](Inputs in) { return kernels::prod(in[0], wrapped, keepdim, sum_dtype(in[0].dtype())); },
      [=](Grads dy, const Saved& s) {
        const Tensor x = s.input(0);
        const Tensor grad = with_dims(dy[0], x.shape(), wrapped);
        if (x.dim() == 0) return grad;
        if (!has_zero(x)) return mul(grad, div(with_dims(s.output(), x.shape(), wrapped), x));
        return mul(grad, product_of_others(x, static_cast<int>(wrapped[0])));
      });
}

Tensor cumsum(const Tensor& x, int64_t dim) {
  check_not_fp8(kCumsum, x);
  return running_sum(x, wrap_dim(dim, x.dim(), kCumsum.name), false);
}

const Op kCumprod{.name = "cumprod",
                  .marks = MarkRule::kAlongDims,
                  .autocast = Autocast::kFloat32,
                  .reads = {inputs(0)},
                  .reads_outputs = outputs(0)};

Tensor cumprod(const Tensor& x, int64_t dim) {
  check_not_fp8(kCumprod, x);
  const int wrapped = wrap_dim(dim, x.dim(), kCumprod.name);
  return differentiable(
      along(kCumprod, wrapped), {x},
      [=](Inputs in) { return kernels::cumprod(in[0], wrapped, sum_dtype(in[0].dtype())); },
      [=](Grads dy, const Saved& s) {
        const Tensor x = s.input(0), y = s.output();
        if (x.dim() == 0 || x.size(wrapped) == 1) return dy[0];
        if (!has_zero(x)) return div(running_sum(mul(dy[0], y), wrapped, true), x);
        // In front of the first zero as above; at it, the products without it; 0 behind, where the
        // products are 0, or NaN if an infinity follows.
        const Tensor zero = eq(x, 0), zeros_so_far = cumsum(zero, wrapped);
        const Tensor first = logical_and(zero, eq(zeros_so_far, 1));
        const Tensor without = cumprod(masked_fill(x, first, 1), wrapped);
        const Tensor at_first = running_sum(mul(dy[0], without), wrapped, true);
        const Tensor in_front = eq(zeros_so_far, 0), behind = logical_not(in_front);
        const Tensor sums = running_sum(masked_fill(mul(dy[0], y), behind, 0), wrapped, true);
        const Tensor safe = masked_fill(x, behind, 1);
        return where(in_front, div(sums, safe), where(first, at_first, 0));
      });
}

// ---- Extrema ------------------------------------------------------------------------------------

namespace {

// Equal extrema share the gradient. A NaN is equal to nothing: amax and amin then give NaN to all,
// max and min (nan_shares) to the NaNs their share, as torch does.
Tensor shared_gradient(const Tensor& dy, const Tensor& x, const Tensor& y, const Shape& dims,
                       bool nan_shares) {
  const Tensor extremum = with_dims(y, x.shape(), dims);
  Tensor equal = eq(x, extremum);
  if (nan_shares) equal = logical_or(equal, logical_and(isnan(x), isnan(extremum)));
  const Tensor mask = to(equal, x.dtype());
  const Tensor shares = div(with_dims(dy, x.shape(), dims), sum(mask, dims, true));
  return mul(mask, shares);
}

Tensor extreme_values(const Op& op, const Tensor& x, const Shape& dims, bool keepdim,
                      Tensor (*kernel)(const Tensor&, const Shape&, bool),
                      bool nan_shares = false) {
  check_not_fp8(op, x);
  const Shape wrapped = wrap_dims(dims, x.dim(), op.name);
  return differentiable(
      along(op, wrapped, keepdim), {x}, [=](Inputs in) { return kernel(in[0], wrapped, keepdim); },
      [=](Grads dy, const Saved& s) {
        return shared_gradient(dy[0], s.input(0), s.output(), wrapped, nan_shares);
      });
}

ValuesIndices extreme_along(const Op& op, const Tensor& x, int64_t dim, bool keepdim,
                            bool largest) {
  check_not_fp8(op, x);
  const int wrapped = wrap_dim(dim, x.dim(), op.name);
  TensorList both = differentiable(
      along(op, wrapped, keepdim), {x},
      [=](Inputs in) -> TensorList {
        const kernels::Extremum e = kernels::extremum(in[0], wrapped, keepdim, largest);
        return {e.values, e.indices};
      },
      [=](Grads dy, const Saved& s) -> Tensor {
        if (!dy.defined(0)) return {};
        const Shape& shape = s.input_shape(0);
        if (shape.empty()) return dy[0];
        const Shape dims = {wrapped};
        const Tensor grad = with_dims(dy[0], shape, dims);
        const Tensor indices = with_dims(s.output(1), shape, dims);
        return scatter(zeros(shape, {grad.dtype(), grad.device()}), wrapped, indices, grad);
      });
  return {both[0], both[1]};
}

Tensor extreme_index(const Op& op, const Tensor& x, std::optional<int64_t> dim, bool keepdim,
                     bool largest) {
  check_not_fp8(op, x);
  return not_differentiable(op, {x}, [=, &op](Inputs in) {
    if (dim) {
      const int wrapped = wrap_dim(*dim, in[0].dim(), op.name);
      return kernels::extremum(in[0], wrapped, keepdim, largest).indices;
    }
    const Tensor flat = raw::view(kernels::contiguous(in[0]), {in[0].numel()});
    const Tensor index = kernels::extremum(flat, 0, false, largest).indices;
    return keepdim ? raw::view(index, Shape::filled(in[0].dim(), 1)) : index;
  });
}

}  // namespace

const Op kAmax{.name = "amax",
               .marks = MarkRule::kAlongDims,
               .reads = {inputs(0)},
               .reads_outputs = outputs(0)};

Tensor amax(const Tensor& x, const Shape& dims, bool keepdim) {
  return extreme_values(kAmax, x, dims, keepdim, kernels::amax);
}

const Op kAmin{.name = "amin",
               .marks = MarkRule::kAlongDims,
               .reads = {inputs(0)},
               .reads_outputs = outputs(0)};

Tensor amin(const Tensor& x, const Shape& dims, bool keepdim) {
  return extreme_values(kAmin, x, dims, keepdim, kernels::amin);
}

const Op kMax{.name = "max",
              .marks = MarkRule::kAlongDims,
              .reads = {inputs(0)},
              .reads_outputs = outputs(0)};
const Op kMaxDim{.name = "max", .marks = MarkRule::kAlongDims, .reads_outputs = outputs(1)};

Tensor max(const Tensor& x) { return extreme_values(kMax, x, {}, false, kernels::amax, true); }
ValuesIndices max(const Tensor& x, int64_t dim, bool keepdim) {
  return extreme_along(kMaxDim, x, dim, keepdim, true);
}

const Op kMin{.name = "min",
              .marks = MarkRule::kAlongDims,
              .reads = {inputs(0)},
              .reads_outputs = outputs(0)};
const Op kMinDim{.name = "min", .marks = MarkRule::kAlongDims, .reads_outputs = outputs(1)};

Tensor min(const Tensor& x) { return extreme_values(kMin, x, {}, false, kernels::amin, true); }
ValuesIndices min(const Tensor& x, int64_t dim, bool keepdim) {
  return extreme_along(kMinDim, x, dim, keepdim, false);
}

const Op kArgmax{.name = "argmax", .marks = MarkRule::kAlongDims};

Tensor argmax(const Tensor& x, std::optional<int64_t> dim, bool keepdim) {
  return extreme_index(kArgmax, x, dim, keepdim, true);
}

const Op kArgmin{.name = "argmin", .marks = MarkRule::kAlongDims};

Tensor argmin(const Tensor& x, std::optional<int64_t> dim, bool keepdim) {
  return extreme_index(kArgmin, x, dim, keepdim, false);
}

namespace {
// torch's rule: u8 gives u8, everything else bool.
Tensor logical(const Tensor& truth, const Tensor& x) {
  return x.dtype() == kU8 ? kernels::convert(truth, kU8) : truth;
}
}  // namespace

const Op kAny{.name = "any", .marks = MarkRule::kAlongDims};

Tensor any(const Tensor& x, const Shape& dims, bool keepdim) {
  check_not_fp8(kAny, x);
  const Shape wrapped = wrap_dims(dims, x.dim(), kAny.name);
  return not_differentiable(along(kAny, wrapped, keepdim), {x}, [=](Inputs in) {
    return logical(kernels::any(in[0], wrapped, keepdim), in[0]);
  });
}

const Op kAll{.name = "all", .marks = MarkRule::kAlongDims};

Tensor all(const Tensor& x, const Shape& dims, bool keepdim) {
  check_not_fp8(kAll, x);
  const Shape wrapped = wrap_dims(dims, x.dim(), kAll.name);
  return not_differentiable(along(kAll, wrapped, keepdim), {x}, [=](Inputs in) {
    return logical(kernels::all(in[0], wrapped, keepdim), in[0]);
  });
}

const Op kCountNonzero{.name = "count_nonzero", .marks = MarkRule::kAlongDims};

Tensor count_nonzero(const Tensor& x, const Shape& dims) {
  check_not_fp8(kCountNonzero, x);
  const Shape wrapped = wrap_dims(dims, x.dim(), kCountNonzero.name);
  return not_differentiable(along(kCountNonzero, wrapped, false), {x},
                            [=](Inputs in) { return kernels::count_nonzero(in[0], wrapped); });
}

// ---- Norms and exponentials ---------------------------------------------------------------------

namespace {

// dy: with its dimensions back in place, as y. The conventions where |x| or the norm is 0 are
// torch's: no gradient. It is a function of x / y alone: powers of x or y would overflow and
// underflow where the norm itself does not.
Tensor norm_gradient(const Tensor& dy, const Tensor& x, const Tensor& y, double p,
                     const Shape& dims) {
  if (p == 0) return zeros_like(x);
  if (p == 1) return mul(dy, sign(x));
  if (::std::isinf(p)) {
    const Tensor mask = to(eq(abs(x), y), x.dtype());
    return mul(mul(sign(x), mask), div(dy, sum(mask, dims, true)));
  }
  const Tensor is_zero = eq(y, 0);
  const Tensor unit = masked_fill(div(x, masked_fill(y, is_zero, 1)), is_zero, 0);
  if (p == 2) return mul(dy, unit);
  if (p > 2) return mul(dy, mul(unit, pow(abs(unit), p - 2)));
  const Tensor slopes = mul(sign(unit), pow(abs(unit), p - 1));
  return mul(dy, p < 1 ? masked_fill(slopes, eq(unit, 0), 0) : slopes);
}

}  // namespace

const Op kNorm{.name = "norm",
               .marks = MarkRule::kAlongDims,
               .autocast = Autocast::kFloat32,
               .reads = {inputs(0)},
               .reads_outputs = outputs(0)};

Tensor norm(const Tensor& x, double p, const Shape& dims, bool keepdim) {
  check_reducible(kNorm, x);
  TS_CHECK(!::std::isnan(p), kNorm, "p must be a number; got NaN");
  const Shape wrapped = wrap_dims(dims, x.dim(), kNorm.name);
  return differentiable(
      along(kNorm, wrapped, keepdim), {x},
      [=](Inputs in) { return kernels::norm(in[0], p, wrapped, keepdim); },
      [=](Grads dy, const Saved& s) {
        const Tensor x = s.input(0);
        return norm_gradient(with_dims(dy[0], x.shape(), wrapped), x,
                             with_dims(s.output(), x.shape(), wrapped), p, wrapped);
      });
}

const Op kLogsumexp{.name = "logsumexp",
                    .marks = MarkRule::kAlongDims,
                    .autocast = Autocast::kFloat32,
                    .reads = {inputs(0)},
                    .reads_outputs = outputs(0)};

Tensor logsumexp(const Tensor& given, const Shape& dims, bool keepdim) {
  const Tensor x = as_floating(given);
  check_reducible(kLogsumexp, x);
  const Shape wrapped = wrap_dims(dims, x.dim(), kLogsumexp.name);
  return differentiable(
      along(kLogsumexp, wrapped, keepdim), {x},
      [=](Inputs in) { return kernels::logsumexp(in[0], wrapped, keepdim); },
      [=](Grads dy, const Saved& s) {
        const Tensor x = s.input(0);
        const Tensor y = with_dims(s.output(), x.shape(), wrapped);
        return mul(with_dims(dy[0], x.shape(), wrapped), exp(sub(x, y)));
      });
}

const Op kSoftmax{.name = "softmax",
                  .marks = MarkRule::kAlongDims,
                  .autocast = Autocast::kFloat32,
                  .reads_outputs = outputs(0),
                  .flops_per_element = 15};

Tensor softmax(const Tensor& x, int64_t dim) {
  check_reducible(kSoftmax, x);
  const int wrapped = wrap_dim(dim, x.dim(), kSoftmax.name);
  return differentiable(
      along(kSoftmax, wrapped), {x},
      [=](Inputs in) { return kernels::softmax(in[0], wrapped, false); },
      [=](Grads dy, const Saved& s) {
        const Tensor y = s.output();
        if (!grad_enabled()) return kernels::softmax_backward(dy[0], y, wrapped, false);
        return mul(y, sub(dy[0], sum(mul(dy[0], y), {wrapped}, true)));
      });
}

const Op kLogSoftmax{.name = "log_softmax",
                     .marks = MarkRule::kAlongDims,
                     .autocast = Autocast::kFloat32,
                     .reads_outputs = outputs(0),
                     .flops_per_element = 15};

Tensor log_softmax(const Tensor& x, int64_t dim) {
  check_reducible(kLogSoftmax, x);
  const int wrapped = wrap_dim(dim, x.dim(), kLogSoftmax.name);
  return differentiable(
      along(kLogSoftmax, wrapped), {x},
      [=](Inputs in) { return kernels::softmax(in[0], wrapped, true); },
      [=](Grads dy, const Saved& s) {
        const Tensor y = s.output();
        if (!grad_enabled()) return kernels::softmax_backward(dy[0], y, wrapped, true);
        return sub(dy[0], mul(exp(y), sum(dy[0], {wrapped}, true)));
      });
}

// ---- Made of the above --------------------------------------------------------------------------

Tensor normalize(const Tensor& x, double p, int64_t dim, double eps) {
  return div(x, clamp(norm(x, p, {dim}, true), eps));
}

Tensor cosine_similarity(const Tensor& a, const Tensor& b, int64_t dim, double eps) {
  const Shape shape = broadcast_shapes(a.shape(), b.shape(), "cosine_similarity");
  const DType promoted = promote_types(a.dtype(), b.dtype());
  const DType dtype = is_floating(promoted) ? promoted : kF32;
  const Tensor left = expand(to(a, dtype), shape), right = expand(to(b, dtype), shape);
  const Tensor left_unit = div(left, clamp(norm(left, 2, {dim}, true), eps));
  const Tensor right_unit = div(right, clamp(norm(right, 2, {dim}, true), eps));
  return sum(mul(left_unit, right_unit), {dim});
}

}  // namespace tessera
