#include <tessera/autograd/distributions.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>

namespace tessera::distributions {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

const Tensor& checked(const char* where, const char* name, const Tensor& x) {
  TS_CHECK(x.defined(), where, name, " is undefined; give it a value first");
  TS_CHECK_DTYPE(is_floating(x.dtype()) && !is_fp8(x.dtype()), where, name,
                 " must be f64, f32, f16 or bf16; got ", x);
  return x;
}
// x in the shape that it and `other` broadcast to.
Tensor as_wide_as(const char* where, const char* name, const Tensor& x, const Tensor& other) {
  checked(where, name, x);
  TS_CHECK_DTYPE(!other.defined() || x.dtype() == other.dtype(), where,
                 "expects parameters of one dtype; got ", x, " and ", other);
  return other.defined() ? expand(x, broadcast_shapes(x.shape(), other.shape(), where)) : x;
}

Shape extended(const Shape& shape, const Shape& batch) {
  Shape result = shape;
  for (const int64_t size : batch) result.push_back(size);
  return result;
}
TensorOptions like(const Tensor& x) { return {.dtype = x.dtype(), .device = x.device()}; }

// A logarithm of a probability that may be 0 times that probability is 0.
Tensor times_log(const Tensor& p, const Tensor& log) {
  return mul(p, clamp(log, std::numeric_limits<float>::lowest()));
}
// log(sigmoid(x)) without overflow.
Tensor log_sigmoid(const Tensor& x) { return neg(softplus(neg(x))); }

double epsilon(const Tensor& x) { return epsilon_of(x.dtype()); }

Tensor odds_of(const Tensor& probs) {
  const Tensor inside = clamp(probs, epsilon(probs), 1 - epsilon(probs));
  return sub(log(inside), log1p(neg(inside)));
}
Tensor normalised(const Tensor& parameter) {
  TS_CHECK_SHAPE(parameter.dim() >= 1 && parameter.size(-1) > 0, "Categorical",
                 "needs at least one class in the last dimension; got ", parameter);
  return parameter;
}
Tensor class_probs(Of kind, const Tensor& parameter) {
  normalised(checked("Categorical", "the parameter", parameter));
  return kind == Of::kLogits ? softmax(parameter, -1) : div(parameter, sum(parameter, {-1}, true));
}

}  // namespace

// ---- Normal ------------------------------------------------------------------------------------

Normal::Normal(const Tensor& loc, const Tensor& scale)
    : loc(as_wide_as("Normal", "loc", loc, scale)),
      scale(as_wide_as("Normal", "scale", scale, loc)) {}
Tensor Normal::variance() const { return square(scale); }
Tensor Normal::sample(const Shape& shape) const {
  const NoGradGuard no_grad;
  return detach(rsample(shape));
}
Tensor Normal::rsample(const Shape& shape) const {
  return add(loc, mul(scale, randn(extended(shape, batch_shape()), like(loc))));
}
Tensor Normal::log_prob(const Tensor& value) const {
  checked("Normal", "the value", value);
  const Tensor distance = div(square(sub(value, loc)), mul(square(scale), 2));
  return sub(neg(add(distance, log(scale))), 0.5 * std::log(2 * M_PI));
}
Tensor Normal::cdf(const Tensor& value) const {
  return mul(add(erf(mul(div(sub(value, loc), scale), M_SQRT1_2)), 1), 0.5);
}
Tensor Normal::entropy() const { return add(log(scale), 0.5 + 0.5 * std::log(2 * M_PI)); }

Tensor kl_divergence(const Normal& p, const Normal& q) {
  const Tensor ratio = square(div(p.scale, q.scale));
  const Tensor shift = square(div(sub(p.loc, q.loc), q.scale));
  return mul(sub(sub(add(ratio, shift), 1), log(ratio)), 0.5);
}

// ---- Uniform -----------------------------------------------------------------------------------

Uniform::Uniform(const Tensor& low, const Tensor& high)
    : low(as_wide_as("Uniform", "low", low, high)),
      high(as_wide_as("Uniform", "high", high, low)) {}
Tensor Uniform::mean() const { return mul(add(low, high), 0.5); }
Tensor Uniform::stddev() const { return mul(sub(high, low), 1 / std::sqrt(12.0)); }
Tensor Uniform::variance() const { return mul(square(sub(high, low)), 1 / 12.0); }
Tensor Uniform::sample(const Shape& shape) const {
  const NoGradGuard no_grad;
  return detach(rsample(shape));
}
Tensor Uniform::rsample(const Shape& shape) const {
  return add(low, mul(sub(high, low), rand(extended(shape, batch_shape()), like(low))));
}
Tensor Uniform::log_prob(const Tensor& value) const {
  checked("Uniform", "the value", value);
  const Tensor inside = logical_and(ge(value, low), lt(value, high));
  const Tensor density = expand(neg(log(sub(high, low))), inside.shape());
  return masked_fill(density, logical_not(inside), -kInfinity);
}
Tensor Uniform::cdf(const Tensor& value) const {
  return clamp(div(sub(value, low), sub(high, low)), 0, 1);
}
Tensor Uniform::entropy() const { return log(sub(high, low)); }

Tensor kl_divergence(const Uniform& p, const Uniform& q) {
  const Tensor beyond = logical_or(gt(q.low, p.low), lt(q.high, p.high));
  const Tensor ratio = log(div(sub(q.high, q.low), sub(p.high, p.low)));
  return masked_fill(ratio, beyond, kInfinity);
}

// ---- Bernoulli ---------------------------------------------------------------------------------

Bernoulli::Bernoulli(Of kind, const Tensor& parameter)
    : probs(kind == Of::kProbs ? checked("Bernoulli", "the parameter", parameter)
                               : sigmoid(checked("Bernoulli", "the parameter", parameter))),
      logits(kind == Of::kLogits ? parameter : odds_of(parameter)) {}
Tensor Bernoulli::variance() const { return mul(probs, rsub(1, probs)); }
Tensor Bernoulli::sample(const Shape& shape) const {
  const NoGradGuard no_grad;
  return to(lt(rand(extended(shape, batch_shape()), like(probs)), probs), probs.dtype());
}
Tensor Bernoulli::log_prob(const Tensor& value) const {
  checked("Bernoulli", "the value", value);
  const Shape shape = broadcast_shapes(value.shape(), batch_shape(), "Bernoulli");
  return neg(binary_cross_entropy_with_logits(expand(logits, shape), expand(value, shape), {},
                                              Reduction::kNone));
}
Tensor Bernoulli::entropy() const {
  return binary_cross_entropy_with_logits(logits, probs, {}, Reduction::kNone);
}

Tensor kl_divergence(const Bernoulli& p, const Bernoulli& q) {
  const auto part = [](const Tensor& p, const Tensor& log_p, const Tensor& q, const Tensor& log_q) {
    const Tensor value = masked_fill(mul(p, sub(log_p, log_q)), eq(p, 0), 0);
    return masked_fill(value, logical_and(eq(q, 0), ne(p, 0)), kInfinity);
  };
  return add(part(p.probs, log_sigmoid(p.logits), q.probs, log_sigmoid(q.logits)),
             part(rsub(1, p.probs), log_sigmoid(neg(p.logits)), rsub(1, q.probs),
                  log_sigmoid(neg(q.logits))));
}

// ---- Categorical -------------------------------------------------------------------------------

Categorical::Categorical(Of kind, const Tensor& parameter)
    : probs(class_probs(kind, parameter)),
      logits(kind == Of::kLogits ? log_softmax(parameter, -1)
                                 : log(clamp(probs, epsilon(probs), 1 - epsilon(probs)))),
      batch_shape_(probs.shape().slice(0, probs.dim() - 1)) {}
Tensor Categorical::sample(const Shape& shape) const {
  const NoGradGuard no_grad;
  const int64_t count = numel_of(shape), rows = numel_of(batch_shape_);
  const Shape result = extended(shape, batch_shape_);
  if (count == 0 || rows == 0) return zeros(result, {.dtype = kI64, .device = probs.device()});
  const Tensor drawn = multinomial(detach(reshape(probs, {rows, num_classes()})), count, true);
  return reshape(transpose(drawn, 0, 1), result);
}
Tensor Categorical::log_prob(const Tensor& value) const {
  TS_CHECK(value.defined(), "Categorical", "the value is undefined; give it a value first");
  TS_CHECK_DTYPE(value.dtype() == kI64 || value.dtype() == kI32, "Categorical",
                 "the value must hold class indices, i64 or i32; got ", value);
  const Shape shape = broadcast_shapes(value.shape(), batch_shape_, "Categorical");
  const Tensor index = unsqueeze(expand(value, shape), -1);
  return squeeze(gather(expand(logits, extended(shape, {num_classes()})), -1, index), -1);
}
Tensor Categorical::entropy() const { return neg(sum(times_log(probs, logits), {-1})); }

Tensor kl_divergence(const Categorical& p, const Categorical& q) {
  Tensor parts = mul(p.probs, sub(p.logits, q.logits));
  parts = masked_fill(parts, expand(eq(q.probs, 0), parts.shape()), kInfinity);
  return sum(masked_fill(parts, expand(eq(p.probs, 0), parts.shape()), 0), {-1});
}

}  // namespace tessera::distributions
