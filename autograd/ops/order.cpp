// What elements are when they are put in order: medians, quantiles, distinct values, running
// extrema, places in sorted rows; and whether tensors are close to each other.
#include <cmath>
#include <limits>

#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/differentiable.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/kernels/index/order.h>

namespace tessera {
namespace {

void check_orderable(std::string_view op, const Tensor& x) {
  TS_CHECK(x.defined(), op, "a tensor is undefined");
  TS_CHECK_DTYPE(!is_fp8(x.dtype()), op, "fp8 is storage only; got ", x,
                 "; convert with to(dtype)");
}

// x with `dim` reduced away, or kept with size 1.
Tensor without_dim(const Tensor& x, int dim, bool keepdim) {
  return keepdim || x.dim() == 0 ? x : squeeze(x, dim);
}

}  // namespace

// ---- isclose, allclose --------------------------------------------------------------------------

Tensor isclose(const Tensor& a, const Tensor& b, double rtol, double atol, bool equal_nan) {
  constexpr std::string_view kName = "isclose";
  check_orderable(kName, a);
  check_orderable(kName, b);
  TS_CHECK_DTYPE(a.dtype() == b.dtype(), kName, "expects tensors of one dtype; got ", a, " and ", b,
                 "; convert one with to(dtype)");
  TS_CHECK(rtol >= 0 && atol >= 0, kName, "rtol and atol must not be negative; got ", rtol, " and ",
           atol);
  const NoGradGuard no_grad;
  Tensor close = eq(a, b);
  if (equal_nan && is_floating(a.dtype())) {
    close = logical_or(close, logical_and(isnan(a), isnan(b)));
  }
  if (rtol == 0 && atol == 0) return close;
  const bool floating = is_floating(a.dtype());
  const Tensor left = floating ? a : to(a, kF32), right = floating ? b : to(b, kF32);
  const Tensor allowed = add(abs(mul(right, rtol)), atol), actual = abs(sub(left, right));
  return logical_or(close, logical_and(isfinite(actual), le(actual, allowed)));
}

bool allclose(const Tensor& a, const Tensor& b, double rtol, double atol, bool equal_nan) {
  return all(isclose(a, b, rtol, atol, equal_nan)).item<bool>();
}

// ---- median, quantile ---------------------------------------------------------------------------

ValuesIndices median(const Tensor& x, int64_t dim, bool keepdim) {
  constexpr std::string_view kName = "median";
  check_orderable(kName, x);
  TS_CHECK_DTYPE(x.dtype() != kBool, kName, "is not defined for bool; got ", x,
                 "; convert with to(dtype)");
  const int d = wrap_dim(dim, x.dim(), kName);
  const int64_t size = x.dim() == 0 ? 1 : x.shape()[d];
  TS_CHECK_INDEX(size > 0, kName, "dimension ", d, " of ", x, " has no elements");
  Tensor index;
  {
    const NoGradGuard no_grad;
    const ValuesIndices sorted = sort(x, d);  // NaN last
    const auto at = [&](int64_t place) {
      return x.dim() == 0 ? sorted.indices : narrow(sorted.indices, d, place, 1);
    };
    index = at((size - 1) / 2);
    if (is_floating(x.dtype()) && x.dim() > 0) {  // the first NaN where there is one
      const Tensor nans = sum(isnan(x), {d}, true);
      const Tensor first = gather(sorted.indices, d, remainder(rsub(size, nans), size));
      index = where(gt(nans, 0), first, index);
    }
  }
  const Tensor values = gather(x, d, index);
  return {without_dim(values, d, keepdim), without_dim(index, d, keepdim)};
}

const Op kMedian{.name = "median",
                 .marks = MarkRule::kAlongDims,
                 .reads = {inputs(0)},
                 .reads_outputs = outputs(0)};

Tensor median(const Tensor& x) {
  check_orderable(kMedian.name, x);
  TS_CHECK_DTYPE(x.dtype() != kBool, kMedian, "is not defined for bool; got ", x,
                 "; convert with to(dtype)");
  return differentiable(
      kMedian, {x},
      [](Inputs in) {
        const TensorOptions options{.dtype = in[0].dtype(), .device = in[0].device()};
        if (in[0].numel() > 0) return median(reshape(in[0], {-1}), 0).values;
        // torch's value of no numbers
        const DType dtype = is_floating(options.dtype) ? options.dtype : kI64;
        const Tensor none =
            dtype == kI64 ? full({}, std::numeric_limits<int64_t>::min(), {dtype, options.device})
                          : full({}, std::numeric_limits<double>::quiet_NaN(), options);
        return to(none, options.dtype);
      },
      [](Grads dy, const Saved& s) {  // all that equal the median share, as those of max()
        const Tensor x = s.input(0), y = s.output();
        Tensor equal = eq(x, y);
        if (is_floating(x.dtype())) equal = logical_or(equal, logical_and(isnan(x), isnan(y)));
        const Tensor mask = to(equal, x.dtype());
        return mul(mask, div(dy[0], sum(mask)));
      });
}

namespace {

constexpr std::string_view kQuantile = "quantile";

// [..., n] sorted and q [Q] or []: [..., Q].
Tensor interpolated(const Tensor& sorted, const Tensor& q, Quantile interpolation) {
  const int64_t last = sorted.size(-1) - 1;
  Tensor ranks = mul(q, static_cast<double>(last));
  const Tensor has_nan = any(isnan(sorted), {-1}, true);
  Shape shape = has_nan.shape();
  shape[shape.size() - 1] = q.numel();
  ranks = masked_fill(expand(ranks, shape), has_nan, static_cast<double>(last));
  if (interpolation == Quantile::kLower) ranks = floor(ranks);
  if (interpolation == Quantile::kHigher) ranks = ceil(ranks);
  if (interpolation == Quantile::kNearest) ranks = round(ranks);
  const Tensor below = to(detach(ranks), kI64);
  const Tensor values = gather(sorted, -1, below);
  if (interpolation != Quantile::kLinear && interpolation != Quantile::kMidpoint) return values;
  const Tensor above = to(ceil(detach(ranks)), kI64);
  const Tensor weights =
      interpolation == Quantile::kMidpoint ? full_like(ranks, 0.5) : sub(ranks, below);
  return lerp(values, gather(sorted, -1, above), weights);
}

Tensor quantile_of(const Tensor& x, const Tensor& q, std::optional<int64_t> dim, bool keepdim,
                   Quantile interpolation) {
  TS_CHECK(x.defined(), kQuantile, "x is undefined");
  TS_CHECK_DTYPE(is_floating(x.dtype()) && !is_fp8(x.dtype()), kQuantile,
                 "expects f64, f32, f16 or bf16; got ", x, "; convert with to(dtype)");
  TS_CHECK_SHAPE(x.numel() > 0, kQuantile, "needs at least one element; got ", x);
  if (x.dtype() != kF32 && x.dtype() != kF64) {  // ranks need more than 16 bits
    return to(quantile_of(to(x, kF32), to(q, kF32), dim, keepdim, interpolation), x.dtype());
  }
  const int d = wrap_dim(dim.value_or(0), dim ? x.dim() : 1, kQuantile);
  const Tensor lines = dim && x.dim() > 0 ? movedim(x, {d}, {-1}) : reshape(x, {-1});
  const Tensor y = interpolated(sort(lines, -1).values, q, interpolation);  // [..., Q]
  Tensor result = movedim(y, {-1}, {0});                                    // [Q, ...]
  if (keepdim) {
    Shape shape = dim ? x.shape() : Shape::filled(x.dim(), 1);
    if (dim && x.dim() > 0) shape[d] = 1;
    shape.insert(0, q.numel());
    result = dim ? reshape(unsqueeze(result, d + 1), shape) : reshape(result, shape);
  }
  return q.dim() == 0 ? squeeze(result, 0) : result;
}

}  // namespace

Tensor quantile(const Tensor& given, const Tensor& given_q, std::optional<int64_t> dim,
                bool keepdim, Quantile interpolation) {
  const Tensor x = detail::autocast_float32(given), q = detail::autocast_float32(given_q);
  TS_CHECK(x.defined() && q.defined(), kQuantile, "x and q must be defined");
  TS_CHECK_SHAPE(q.dim() <= 1, kQuantile, "q must be a number or have one dimension; got ", q);
  TS_CHECK_DTYPE(q.dtype() == x.dtype(), kQuantile, "q must have x's dtype; got ", q, " for ", x,
                 "; convert one with to(dtype)");
  if (q.device().is_cpu()) {
    for (double value : q.to_vector()) {
      TS_CHECK(value >= 0 && value <= 1, kQuantile, "q must be in [0, 1]; got ", value);
    }
  }
  return quantile_of(x, q, dim, keepdim, interpolation);
}

Tensor quantile(const Tensor& given, double q, std::optional<int64_t> dim, bool keepdim,
                Quantile interpolation) {
  TS_CHECK(given.defined(), kQuantile, "x is undefined");
  const Tensor x = detail::autocast_float32(given);
  TS_CHECK(q >= 0 && q <= 1, kQuantile, "q must be in [0, 1]; got ", q);
  return quantile_of(x, full({}, q, {.dtype = x.dtype(), .device = x.device()}), dim, keepdim,
                     interpolation);
}

// ---- unique -------------------------------------------------------------------------------------

namespace {

constexpr std::string_view kUnique = "unique";

// How lines follow each other in ascending order: `order` sorts them, `starts` marks the first of
// equals among those.
struct Grouped {
  Tensor order, starts;
};

Grouped grouped(const Tensor& lines) {  // [n, m]
  const int64_t n = lines.size(0);
  const TensorOptions options{.dtype = kBool, .device = lines.device()};
  Tensor order = arange(0, n, 1, kI64, lines.device());
  // Columns from the last to the first: each stable sort keeps the order of what lies behind.
  for (int64_t column = lines.size(1) - 1; column >= 0; --column) {
    const Tensor keys = index_select(select(lines, 1, column), 0, order);
    order = index_select(order, 0, argsort(keys, 0));
  }
  const Tensor sorted = index_select(lines, 0, order);
  const Tensor differs = any(ne(narrow(sorted, 0, 1, n - 1), narrow(sorted, 0, 0, n - 1)), {1});
  return {order, cat({ones({1}, options), to(differs, kBool)})};
}

}  // namespace

UniqueResult unique(const Tensor& x, bool /*sorted*/, bool return_inverse, bool return_counts,
                    std::optional<int64_t> dim) {
  check_orderable(kUnique, x);
  TS_CHECK_DEVICE(!x.is_meta(), kUnique, "the shape of the result depends on the values, which ", x,
                  " does not have; use a CPU tensor");
  const NoGradGuard no_grad;
  const int d = dim ? wrap_dim(*dim, x.dim(), kUnique) : 0;
  const TensorOptions counting{.dtype = kI64, .device = x.device()};
  const Shape inverse_shape = dim && x.dim() > 0 ? Shape{x.shape()[d]} : x.shape();
  const Tensor moved = dim && x.dim() > 0 ? movedim(x, {d}, {0}) : reshape(x, {-1});
  const int64_t n = moved.size(0);
  if (x.numel() == 0) {
    for (int i = 0; dim && i < x.dim(); ++i) {
      TS_CHECK_SHAPE(i == d || x.shape()[i] > 0, kUnique, "lines along dimension ", d, " of ", x,
                     " have no elements");
    }
    return {dim ? x : reshape(x, {0}), return_inverse ? zeros(inverse_shape, counting) : Tensor(),
            return_counts ? zeros({0}, counting) : Tensor()};
  }
  const Grouped groups = grouped(reshape(moved, {n, -1}));
  const Tensor starts = select(nonzero(groups.starts), 1, 0);
  UniqueResult result;
  const Tensor values = index_select(moved, 0, index_select(groups.order, 0, starts));
  result.values = dim && x.dim() > 0 ? contiguous(movedim(values, {0}, {d})) : values;
  if (return_inverse) {
    const Tensor group = sub(cumsum(groups.starts, 0), 1);
    result.inverse = reshape(scatter(zeros({n}, counting), 0, groups.order, group), inverse_shape);
  }
  if (return_counts) {
    const Tensor ends = cat({narrow(starts, 0, 1, starts.size(0) - 1), full({1}, n, counting)});
    result.counts = sub(ends, starts);
  }
  return result;
}

// ---- cummax, cummin -----------------------------------------------------------------------------

const Op kCummax{.name = "cummax", .marks = MarkRule::kAlongDims};
const Op kCummin{.name = "cummin", .marks = MarkRule::kAlongDims};

namespace {

ValuesIndices running(const Op& op, const Tensor& x, int64_t dim, bool largest) {
  check_orderable(op.name, x);
  const int d = wrap_dim(dim, x.dim(), op.name);
  const Tensor indices = not_differentiable(
      along(op, d), {x}, [=](Inputs in) { return kernels::running_extremum(in[0], d, largest); });
  return {gather(x, d, indices), indices};
}

}  // namespace

ValuesIndices cummax(const Tensor& x, int64_t dim) { return running(kCummax, x, dim, true); }
ValuesIndices cummin(const Tensor& x, int64_t dim) { return running(kCummin, x, dim, false); }

// ---- searchsorted, bucketize --------------------------------------------------------------------

const Op kSearchsorted{.name = "searchsorted", .marks = MarkRule::kAlongDims};

Tensor searchsorted(const Tensor& sorted_sequence, const Tensor& values, bool right,
                    const Tensor& sorter, DType dtype) {
  const Op& op = kSearchsorted;
  check_orderable(op.name, sorted_sequence);
  check_orderable(op.name, values);
  TS_CHECK_SHAPE(sorted_sequence.dim() > 0, op, "the sorted sequence needs a dimension; got ",
                 sorted_sequence);
  TS_CHECK_DTYPE(dtype == kI64 || dtype == kI32, op, "gives i64 or i32; asked for ", dtype);
  const Shape& shape = sorted_sequence.shape();
  bool fits = shape.size() == 1 || shape.size() == values.dim();
  for (int i = 0; fits && shape.size() > 1 && i < shape.size() - 1; ++i) {
    fits = shape[i] == values.shape()[i];
  }
  TS_CHECK_SHAPE(fits, op,
                 "the sorted sequence must have one dimension, or the dimensions of the "
                 "values but for the last; got ",
                 sorted_sequence, " and ", values);
  Tensor sequence = sorted_sequence;
  if (sorter.defined()) {
    TS_CHECK_SHAPE(sorter.shape() == shape, op, "the sorter must have the shape of ",
                   sorted_sequence, "; got ", sorter);
    sequence = gather(detach(sequence), -1, sorter);
  }
  const DType common = promote_types(sequence.dtype(), values.dtype());
  return not_differentiable(op, {sequence, values}, [=](Inputs in) {
    const Tensor places = kernels::search_sorted(to(in[0], common), to(in[1], common), right);
    return to(places, dtype);
  });
}

Tensor bucketize(const Tensor& x, const Tensor& boundaries, bool right, DType dtype) {
  TS_CHECK(boundaries.defined(), "bucketize", "boundaries is undefined");
  TS_CHECK_SHAPE(boundaries.dim() == 1, "bucketize", "boundaries must have one dimension; got ",
                 boundaries);
  return searchsorted(boundaries, x, right, {}, dtype);
}

}  // namespace tessera
