// Tensors from nothing, and random numbers into tensors.
#include <cmath>

#include <tessera/autograd/differentiable.h>
#include <tessera/autograd/mark_rules.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/initial_values.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/random/random_fill.h>
#include <tessera/core/tensor/element_guard.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera {
namespace {

RandomStream stream_or_next(const std::optional<RandomStream>& stream) {
  return stream ? *stream : next_random_stream();
}

void check_random_dtype(DType dtype, std::string_view where) {
  TS_CHECK_DTYPE(is_floating(dtype) && !is_fp8(dtype), where, "makes f64, f32, f16 or bf16; got ",
                 dtype, "; convert the result with to(dtype)");
}

// For marks alone, of tensors that are made as another one lies.
const Op kFullLike{.name = "full_like", .marks = MarkRule::kPointwise, .flops_per_element = 0};
const Op kRandLike{.name = "rand_like", .marks = MarkRule::kPointwise, .flops_per_element = 0};

// Fills draw by the places of elements in their own tensor.
const Op& whole_of(const Op& op, const Tensor& x) {
  TS_CHECK_AS(UnsupportedError, cuts_of(op, x).empty(), op, "of ", x,
              ", a part of a tensor, would draw random numbers by the places in the part; fill the "
              "whole and convert it to a shard");
  return op;
}

Tensor marked_as(const Tensor& x, const Tensor& result, const OpCall& call) {
  if (x.impl()->marks != 0) [[unlikely]] {
    const MarkRules* rules = mark_rules_for(call.op);
    if (rules != nullptr) result.impl()->marks = rules->of_results(call, {&x, 1});
  }
  return result;
}

}  // namespace

Tensor empty(const Shape& shape, const TensorOptions& options) {
  return raw::empty(shape, options.dtype, options.device);
}
Tensor zeros(const Shape& shape, const TensorOptions& options) { return full(shape, 0, options); }
Tensor ones(const Shape& shape, const TensorOptions& options) { return full(shape, 1, options); }
Tensor full(const Shape& shape, const Scalar& value, const TensorOptions& options) {
  const Tensor result = raw::full(shape, value, options.dtype, options.device);
  remember_fill(result, [value](const Tensor& piece, int64_t) { kernels::fill(piece, value); });
  return result;
}
Tensor empty_like(const Tensor& x) { return empty_like(x, x.dtype()); }
Tensor empty_like(const Tensor& x, DType dtype) {
  check_whole(x, "empty_like");
  return marked_as(x, raw::empty_like(x, dtype), kFullLike);
}
Tensor zeros_like(const Tensor& x) {
  check_whole(x, "zeros_like");
  return marked_as(x, raw::zeros_like(x), kFullLike);
}
Tensor zeros_like(const Tensor& x, DType dtype) {
  const Tensor result = empty_like(x, dtype);
  kernels::fill(result, 0);
  return result;
}
Tensor ones_like(const Tensor& x) { return full_like(x, 1); }
Tensor ones_like(const Tensor& x, DType dtype) { return full_like(x, 1, dtype); }
Tensor full_like(const Tensor& x, const Scalar& value) { return full_like(x, value, x.dtype()); }
Tensor full_like(const Tensor& x, const Scalar& value, DType dtype) {
  check_whole(x, "full_like");
  return marked_as(x, raw::full(x.shape(), value, dtype, x.device()), kFullLike);
}
Tensor rand_like(const Tensor& x) { return rand_like(x, x.dtype()); }
Tensor rand_like(const Tensor& x, DType dtype) {
  check_whole(x, "rand_like");
  return marked_as(x, rand(x.shape(), {dtype, x.device()}), whole_of(kRandLike, x));
}
Tensor randn_like(const Tensor& x) { return randn_like(x, x.dtype()); }
Tensor randn_like(const Tensor& x, DType dtype) {
  check_whole(x, "randn_like");
  return marked_as(x, randn(x.shape(), {dtype, x.device()}), whole_of(kRandLike, x));
}

Tensor arange(const Scalar& start, const Scalar& end, const Scalar& step,
              std::optional<DType> dtype, const Device& device) {
  const bool floating = start.is_floating() || end.is_floating() || step.is_floating();
  const DType result = dtype.value_or(floating ? kF32 : kI64);
  TS_CHECK_DTYPE(result != kBool, "arange",
                 "does not make bool; convert the result with to(kBool)");
  const double from = start.to_double(), to = end.to_double(), by = step.to_double();
  TS_CHECK(std::isfinite(from) && std::isfinite(to) && std::isfinite(by), "arange",
           "expects finite numbers; got start ", start, ", end ", end, ", step ", step);
  TS_CHECK(by != 0, "arange", "step must not be 0");
  TS_CHECK((to - from) * by >= 0, "arange", "step ", step, " leads from start ", start,
           " away from end ", end);
  const double count = std::ceil((to - from) / by);
  TS_CHECK_SHAPE(count < 0x1p62, "arange", count, " elements are too many");
  auto size = static_cast<int64_t>(count);
  if (!floating) {  // exact where doubles would not be
    const int64_t first = start.to_int(), last = end.to_int(), difference = step.to_int();
    const int64_t rounding = difference > 0 ? difference - 1 : difference + 1;
    size = (last - first + rounding) / difference;
  }
  return raw::arange(start, step, size, result, device);
}
Tensor arange(const Scalar& end) { return arange(0, end); }

Tensor linspace(double start, double end, int64_t steps, const TensorOptions& options) {
  TS_CHECK(steps >= 0, "linspace", "steps must not be negative; got ", steps);
  return raw::linspace(start, end, steps, options.dtype, options.device);
}

Tensor eye(int64_t rows, std::optional<int64_t> columns, const TensorOptions& options) {
  return raw::eye(rows, columns.value_or(rows), options.dtype, options.device);
}

Tensor rand(const Shape& shape, const TensorOptions& options, std::optional<RandomStream> stream) {
  check_random_dtype(options.dtype, "rand");
  Tensor result = raw::empty(shape, options.dtype, options.device);
  const RandomStream numbers = stream_or_next(stream);
  kernels::random_uniform(result, 0, 1, numbers);
  remember_fill(result, [=](const Tensor& piece, int64_t first) {
    kernels::random_uniform(piece, 0, 1, numbers, first);
  });
  return result;
}

Tensor randn(const Shape& shape, const TensorOptions& options, std::optional<RandomStream> stream) {
  check_random_dtype(options.dtype, "randn");
  Tensor result = raw::empty(shape, options.dtype, options.device);
  const RandomStream numbers = stream_or_next(stream);
  kernels::random_normal(result, 0, 1, numbers);
  remember_fill(result, [=](const Tensor& piece, int64_t first) {
    kernels::random_normal(piece, 0, 1, numbers, first);
  });
  return result;
}

Tensor randint(int64_t low, int64_t high, const Shape& shape, DType dtype,
               std::optional<RandomStream> stream) {
  TS_CHECK(low < high, "randint", "expects low < high; got [", low, ", ", high, ")");
  Tensor result = raw::empty(shape, dtype);
  kernels::random_integers(result, low, high, stream_or_next(stream));
  return result;
}

Tensor randperm(int64_t size, std::optional<RandomStream> stream) {
  TS_CHECK(size >= 0, "randperm", "expects a size of at least 0; got ", size);
  return kernels::random_permutation(size, stream_or_next(stream));
}

const Op kUniform{.name = "uniform_"};

const Tensor& uniform_(const Tensor& x, double low, double high,
                       std::optional<RandomStream> stream) {
  check_random_dtype(x.dtype(), kUniform.name);
  TS_CHECK(low <= high && std::isfinite(high - low), kUniform, "expects finite low <= high; got [",
           low, ", ", high, ")");
  const RandomStream numbers = stream_or_next(stream);
  differentiable_inplace(
      kUniform, {x},
      [=](Inputs in) {
        kernels::random_uniform(in[0], low, high, numbers);
        return in[0];
      },
      [](Grads, const Saved&) { return Tensor(); });
  remember_fill(x, [=](const Tensor& piece, int64_t first) {
    kernels::random_uniform(piece, low, high, numbers, first);
  });
  return x;
}

const Op kNormal{.name = "normal_"};

const Tensor& normal_(const Tensor& x, double mean, double std,
                      std::optional<RandomStream> stream) {
  check_random_dtype(x.dtype(), kNormal.name);
  TS_CHECK(std >= 0, kNormal, "std must not be negative; got ", std);
  const RandomStream numbers = stream_or_next(stream);
  differentiable_inplace(
      kNormal, {x},
      [=](Inputs in) {
        kernels::random_normal(in[0], mean, std, numbers);
        return in[0];
      },
      [](Grads, const Saved&) { return Tensor(); });
  remember_fill(x, [=](const Tensor& piece, int64_t first) {
    kernels::random_normal(piece, mean, std, numbers, first);
  });
  return x;
}

const Op kBernoulli{.name = "bernoulli_"};

const Tensor& bernoulli_(const Tensor& x, double p, std::optional<RandomStream> stream) {
  TS_CHECK(p >= 0 && p <= 1, kBernoulli, "p must be in [0, 1]; got ", p);
  const RandomStream numbers = stream_or_next(stream);
  differentiable_inplace(
      kBernoulli, {x},
      [=](Inputs in) {
        kernels::random_bernoulli(in[0], p, numbers);
        return in[0];
      },
      [](Grads, const Saved&) { return Tensor(); });
  remember_fill(x, [=](const Tensor& piece, int64_t first) {
    kernels::random_bernoulli(piece, p, numbers, first);
  });
  return x;
}

const Op kMultinomial{.name = "multinomial"};

Tensor multinomial(const Tensor& x, int64_t count, bool replacement,
                   std::optional<RandomStream> stream) {
  check_random_dtype(x.dtype(), kMultinomial.name);
  TS_CHECK_SHAPE(x.dim() == 1 || x.dim() == 2, kMultinomial, "expects [n] or [rows, n]; got ", x);
  TS_CHECK(count > 0 && (replacement || count <= x.size(-1)), kMultinomial, "cannot draw ", count,
           " of ", x.size(-1), replacement ? "" : " without replacement");
  const RandomStream numbers = stream_or_next(stream);
  return not_differentiable(kMultinomial, {x}, [=](Inputs in) {
    const bool one_row = in[0].dim() == 1;
    const Tensor rows = one_row ? raw::unsqueeze(in[0], 0) : in[0];
    const Tensor chosen = kernels::random_choice(rows, count, replacement, numbers);
    return one_row ? raw::select(chosen, 0, 0) : chosen;
  });
}

}  // namespace tessera
