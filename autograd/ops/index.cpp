// Reading and writing by index. Where a gradient is written into zeros, the target is passed as an
// absent input, so that no zeros are copied.
#include <algorithm>

#include <tessera/autograd/differentiable.h>
#include <tessera/autograd/meta_inputs.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/copy/shape.h>
#include <tessera/core/kernels/elementwise/elementwise.h>
#include <tessera/core/kernels/index/index.h>
#include <tessera/core/kernels/sort/sort.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera {
namespace {

// A fresh contiguous tensor to write into: a copy of x, or zeros where x is absent.
Tensor target_of(const Tensor& x, const Shape& shape, DType dtype, const Device& device) {
  if (!x.defined()) return raw::zeros(shape, dtype, device);
  Tensor result = raw::empty(shape, dtype, device);
  kernels::copy_into(result, x);
  return result;
}

// x: contiguous. [before dim, dim, after dim].
Tensor as_rows(const Tensor& x, int dim) {
  if (x.dim() == 0) return raw::view(x, {1, 1, 1});
  const Shape& shape = x.shape();
  return raw::view(
      x, {numel_of(shape.slice(0, dim)), shape[dim], numel_of(shape.slice(dim + 1, shape.size()))});
}

void check_dims(const Tensor& index, const Shape& shape, int dim, const Op& op) {
  bool fits = std::max(index.dim(), 1) == std::max(shape.size(), 1);
  for (int d = 0; fits && d < std::min(index.dim(), shape.size()); ++d) {
    fits = d == dim || index.shape()[d] <= shape[d];
  }
  TS_CHECK_SHAPE(fits || index.numel() == 0, op, "index ", index.shape(),
                 " must have as many dimensions as ", shape,
                 " and be no larger in any but dimension ", dim);
}

// source in the shape of index, where it is larger.
Tensor fitted_source(const Tensor& x, const Tensor& index, const Tensor& source, const Op& op) {
  TS_CHECK_DTYPE(source.dtype() == x.dtype(), op, "source must have x's dtype; got ", source,
                 " for ", x, "; convert one with to(dtype)");
  Tensor fitted = source.dim() == 0 && index.dim() == 1 ? reshape(source, {1}) : source;
  TS_CHECK_SHAPE(fitted.dim() == index.dim(), op, "source and index must have as many dimensions; ",
                 "got ", source, " and ", index);
  for (int d = 0; d < index.dim(); ++d) {
    const int64_t size = index.shape()[d];
    TS_CHECK_SHAPE(fitted.shape()[d] >= size, op, "source must be at least as large as index; got ",
                   source, " and ", index);
    if (fitted.shape()[d] > size) fitted = narrow(fitted, d, 0, size);
  }
  return fitted;
}

}  // namespace

// ---- Rows ---------------------------------------------------------------------------------------

const Op kIndexAdd{
    .name = "index_add", .marks = MarkRule::kAlongDims, .reads = {inputs(), inputs(), inputs(1)}};

// x may be absent: then zeros of `shape`.
static Tensor add_at(const Tensor& x, const Shape& shape, int dim, const Tensor& index,
                     const Tensor& source) {
  return differentiable(
      kIndexAdd, {x, index, source},
      [=](Inputs in) {
        const Tensor rows =
            raw::view(kernels::contiguous(in[2]),
                      {numel_of(shape.slice(0, dim)), in[1].numel(),
                       shape.empty() ? 1 : numel_of(shape.slice(dim + 1, shape.size()))});
        const Tensor result = target_of(in[0], shape, in[2].dtype(), in[2].device());
        const Tensor target = as_rows(result, dim);
        kernels::add_rows(
            target, kernels::checked_index(in[1], target.size(1), false, kIndexAdd.name), rows);
        return result;
      },
      [=](Grads dy, const Saved& s) -> TensorList {
        return {s.needs(0) ? dy[0] : Tensor(), Tensor(),
                s.needs(2) ? index_select(dy[0], dim, s.input(1)) : Tensor()};
      });
}

const Op kIndexSelect{.name = "index_select",
                      .marks = MarkRule::kAlongDims,
                      .reads = {inputs(1)},
                      .flops_per_element = 0};

Tensor index_select(const Tensor& x, int64_t dim, const Tensor& index) {
  check_defined(kIndexSelect, "x", x);
  check_defined(kIndexSelect, "index", index);
  TS_CHECK_SHAPE(index.dim() <= 1, kIndexSelect, "index must have one dimension; got ", index);
  const int d = wrap_dim(dim, x.dim(), kIndexSelect.name);
  return differentiable(
      kIndexSelect, {x, index},
      [=](Inputs in) {
        const Tensor rows = as_rows(kernels::contiguous(in[0]), d);
        Shape shape = in[0].shape();
        if (in[0].dim() > 0) shape[d] = in[1].numel();
        TS_CHECK_SHAPE(in[0].dim() > 0 || in[1].numel() == 1, kIndexSelect,
                       "a tensor without dimensions has one element; got ", in[1].numel(),
                       " indices");
        return raw::view(
            kernels::select_rows(
                rows, kernels::checked_index(in[1], rows.size(1), false, kIndexSelect.name)),
            shape);
      },
      [=](Grads dy, const Saved& s) -> TensorList {
        return {add_at({}, s.input_shape(0), d, s.input(1), dy[0]), Tensor()};
      });
}

Tensor index_add(const Tensor& x, int64_t dim, const Tensor& index, const Tensor& source) {
  check_defined(kIndexAdd, "x", x);
  check_defined(kIndexAdd, "index", index);
  check_defined(kIndexAdd, "source", source);
  const int d = wrap_dim(dim, x.dim(), kIndexAdd.name);
  TS_CHECK_SHAPE(index.dim() <= 1, kIndexAdd, "index must have one dimension; got ", index);
  TS_CHECK_DTYPE(source.dtype() == x.dtype(), kIndexAdd, "source must have x's dtype; got ", source,
                 " for ", x, "; convert one with to(dtype)");
  Shape expected = x.shape();
  if (x.dim() > 0) expected[d] = index.numel();
  TS_CHECK_SHAPE(source.shape() == expected ||
                     (source.dim() == 0 && source.numel() == 1 && numel_of(expected) == 1),
                 kIndexAdd, "source must be ", expected, " for ", x, " and ", index.numel(),
                 " indices along dimension ", d, "; got ", source);
  return add_at(x, x.shape(), d, index, source);
}

Tensor index_fill(const Tensor& x, int64_t dim, const Tensor& index, const Scalar& value) {
  constexpr std::string_view kName = "index_fill";
  TS_CHECK_SHAPE(index.dim() <= 1, kName, "index must have one dimension; got ", index);
  const int d = wrap_dim(dim, x.dim(), kName);
  if (x.dim() == 0) return scatter(x, 0, reshape(index, {}), value);
  Shape line = Shape::filled(x.dim(), 1), places = x.shape();
  line[d] = places[d] = index.numel();
  return scatter(x, d, expand(reshape(index, line), places), value);
}

// ---- Elements along a dimension -----------------------------------------------------------------

const Op kScatterAdd{
    .name = "scatter_add", .marks = MarkRule::kAlongDims, .reads = {inputs(), inputs(), inputs(1)}};

static Tensor scatter_add_at(const Tensor& x, const Shape& shape, int dim, const Tensor& index,
                             const Tensor& source) {
  return differentiable(
      kScatterAdd, {x, index, source},
      [=](Inputs in) {
        const Tensor result = target_of(in[0], shape, in[2].dtype(), in[2].device());
        kernels::scatter_add(result, dim, in[1], in[2]);
        return result;
      },
      [=](Grads dy, const Saved& s) -> TensorList {
        return {s.needs(0) ? dy[0] : Tensor(), Tensor(),
                s.needs(2) ? gather(dy[0], dim, s.input(1)) : Tensor()};
      });
}

const Op kGather{
    .name = "gather", .marks = MarkRule::kAlongDims, .reads = {inputs(1)}, .flops_per_element = 0};

Tensor gather(const Tensor& x, int64_t dim, const Tensor& index) {
  check_defined(kGather, "x", x);
  check_defined(kGather, "index", index);
  const int d = wrap_dim(dim, x.dim(), kGather.name);
  check_dims(index, x.shape(), d, kGather);
  if (index.dim() != x.dim()) {  // an element and a list of one dimension may meet
    const Tensor list = x.dim() == 0 ? reshape(x, {1}) : x;
    if (index.dim() == 0) return reshape(gather(list, 0, raw::view(index, {1})), {});
    if (x.dim() == 0) return gather(list, 0, index);
  }
  return differentiable(
      along(kGather, d), {x, index}, [=](Inputs in) { return kernels::gather(in[0], d, in[1]); },
      [=](Grads dy, const Saved& s) -> TensorList {
        return {scatter_add_at({}, s.input_shape(0), d, s.input(1), dy[0]), Tensor()};
      });
}

const Op kScatter{.name = "scatter",
                  .marks = MarkRule::kAlongDims,
                  .reads = {inputs(1), inputs(), inputs(1)},
                  .flops_per_element = 0};

static Tensor scatter_value(const Tensor& x, int dim, const Tensor& index, const Scalar& value) {
  return differentiable(
      kScatter, {x, index},
      [=](Inputs in) {
        const Tensor result = target_of(in[0], in[0].shape(), in[0].dtype(), in[0].device());
        const Tensor number = raw::full({}, value, in[0].dtype(), in[0].device());
        kernels::scatter(result, dim, in[1], raw::expand(number, in[1].shape()));
        return result;
      },
      [=](Grads dy, const Saved& s) -> TensorList {
        return {scatter_value(dy[0], dim, s.input(1), 0), Tensor()};
      });
}

Tensor scatter(const Tensor& x, int64_t dim, const Tensor& index, const Tensor& source) {
  check_defined(kScatter, "x", x);
  check_defined(kScatter, "index", index);
  check_defined(kScatter, "source", source);
  const int d = wrap_dim(dim, x.dim(), kScatter.name);
  check_dims(index, x.shape(), d, kScatter);
  const Tensor fitted = fitted_source(x, index, source, kScatter);
  return differentiable(
      kScatter, {x, index, fitted},
      [=](Inputs in) {
        const Tensor result = target_of(in[0], in[0].shape(), in[0].dtype(), in[0].device());
        kernels::scatter(result, d, in[1], in[2]);
        return result;
      },
      [=](Grads dy, const Saved& s) -> TensorList {
        return {s.needs(0) ? scatter_value(dy[0], d, s.input(1), 0) : Tensor(), Tensor(),
                s.needs(2) ? gather(dy[0], d, s.input(1)) : Tensor()};
      });
}

Tensor scatter(const Tensor& x, int64_t dim, const Tensor& index, const Scalar& value) {
  check_defined(kScatter, "x", x);
  check_defined(kScatter, "index", index);
  const int d = wrap_dim(dim, x.dim(), kScatter.name);
  check_dims(index, x.shape(), d, kScatter);
  return scatter_value(x, d, index, value);
}

Tensor scatter_add(const Tensor& x, int64_t dim, const Tensor& index, const Tensor& source) {
  check_defined(kScatterAdd, "x", x);
  check_defined(kScatterAdd, "index", index);
  check_defined(kScatterAdd, "source", source);
  const int d = wrap_dim(dim, x.dim(), kScatterAdd.name);
  check_dims(index, x.shape(), d, kScatterAdd);
  return scatter_add_at(x, x.shape(), d, index, fitted_source(x, index, source, kScatterAdd));
}

// ---- scatter_reduce -----------------------------------------------------------------------------

const Op kScatterReduce{.name = "scatter_reduce",
                        .marks = MarkRule::kAlongDims,
                        .reads = {inputs(0, 1, 2), inputs(), inputs(0, 1, 2)},
                        .reads_outputs = outputs(0)};

namespace {

Tensor combined(ScatterReduce reduce, const Tensor& a, const Tensor& b) {
  if (reduce == ScatterReduce::kProd) return kernels::binary<fn::Mul>(a, b);
  return reduce == ScatterReduce::kAmax ? kernels::binary<fn::Maximum>(a, b)
                                        : kernels::binary<fn::Minimum>(a, b);
}

// What goes to one place are neighbours once the index is sorted. After the step of `distance` each
// of them knows the last 2 * distance of its place up to itself, so that in the end the last one
// knows all, and is the one that scatter leaves.
Tensor reduce_at(const Tensor& x, int dim, const Tensor& index, const Tensor& source,
                 ScatterReduce reduce, bool include_self) {
  const kernels::SortedValues sorted = kernels::sort(index, dim, false);
  const Tensor places = sorted.values;
  Tensor values = kernels::gather(source, dim, sorted.indices);
  const int64_t n = index.shape()[dim];
  for (int64_t distance = 1; distance < n; distance *= 2) {
    const int64_t rest = n - distance;
    const Tensor right = raw::narrow(values, dim, distance, rest);
    const Tensor same = kernels::binary<fn::Eq>(raw::narrow(places, dim, 0, rest),
                                                raw::narrow(places, dim, distance, rest));
    const Tensor both = combined(reduce, raw::narrow(values, dim, 0, rest), right);
    const Tensor parts[] = {raw::narrow(values, dim, 0, distance),
                            kernels::ternary<fn::Where>(same, both, right)};
    values = kernels::cat(parts, dim);
  }
  if (include_self) values = combined(reduce, kernels::gather(x, dim, places), values);
  const Tensor result = target_of(x, x.shape(), x.dtype(), x.device());
  kernels::scatter(result, dim, places, values);
  return result;
}

// Those that equal the result share, x's own element among them (as in torch, also where it took no
// part).
TensorList extremum_gradient(const Tensor& dy, const Tensor& x, int dim, const Tensor& index,
                             const Tensor& source, const Tensor& y) {
  const Tensor own = to(eq(x, y), x.dtype());
  const Tensor given = to(eq(source, gather(y, dim, index)), x.dtype());
  const Tensor share = div(dy, scatter_add(own, dim, index, given));
  return {mul(own, share), Tensor(), mul(given, gather(share, dim, index))};
}

// Products of the others: y / x, and where x is the only 0 of its place the product without it.
TensorList product_gradient(const Tensor& dy, const Tensor& x, int dim, const Tensor& index,
                            const Tensor& source, const Tensor& y, bool include_self) {
  const auto product = [&](const Tensor& own, const Tensor& given) {
    return scatter_reduce(own, dim, index, given, ScatterReduce::kProd, include_self);
  };
  const Tensor own = masked_fill(x, eq(x, 0), 1);
  const Tensor is_zero = eq(source, 0);
  const Tensor zero_counts = scatter_add(zeros(x.shape(), {.dtype = kI64, .device = x.device()}),
                                         dim, index, to(is_zero, kI64));
  const Tensor only_zero = logical_and(is_zero, eq(gather(zero_counts, dim, index), 1));
  const Tensor without = product(x, masked_fill(source, only_zero, 1));
  const Tensor by_division = div(gather(mul(dy, y), dim, index), masked_fill(source, is_zero, 1));
  return {div(mul(dy, product(own, source)), own), Tensor(),
          where(only_zero, gather(mul(dy, without), dim, index), by_division)};
}

}  // namespace

Tensor scatter_reduce(const Tensor& x, int64_t dim, const Tensor& index, const Tensor& source,
                      ScatterReduce reduce, bool include_self) {
  const Op& op = kScatterReduce;
  check_defined(op, "x", x);
  check_defined(op, "index", index);
  check_defined(op, "source", source);
  const int d = wrap_dim(dim, x.dim(), op.name);
  check_dims(index, x.shape(), d, op);
  const Tensor given = fitted_source(x, index, source, op);
  if (index.numel() == 0) return clone(x);
  if (x.dim() == 0 || index.dim() == 0) {
    const Tensor list = scatter_reduce(reshape(x, {-1}), 0, reshape(index, {-1}),
                                       reshape(given, {-1}), reduce, include_self);
    return reshape(list, x.shape());
  }
  if (reduce == ScatterReduce::kSum || reduce == ScatterReduce::kMean) {
    TS_CHECK_DTYPE(reduce == ScatterReduce::kSum || x.dtype() != kBool, op,
                   "has no mean of bool; got ", x, "; convert with to(dtype)");
    const Tensor total = scatter_add(include_self ? x : scatter(x, d, index, 0), d, index, given);
    if (reduce == ScatterReduce::kSum) return total;
    const TensorOptions counting{.dtype = kI64, .device = x.device()};
    const Tensor own = include_self ? ones(x.shape(), counting) : zeros(x.shape(), counting);
    const Tensor counts = clamp(scatter_add(own, d, index, ones(index.shape(), counting)), 1);
    return is_floating(x.dtype()) ? div(total, counts) : to(floor_divide(total, counts), x.dtype());
  }
  return differentiable(
      op, {x, index, given},
      [=](Inputs in) { return reduce_at(in[0], d, in[1], in[2], reduce, include_self); },
      [=](Grads dy, const Saved& s) -> TensorList {
        const Tensor x = s.input(0), index = s.input(1), source = s.input(2), y = s.output();
        TensorList gradients = reduce == ScatterReduce::kProd
                                   ? product_gradient(dy[0], x, d, index, source, y, include_self)
                                   : extremum_gradient(dy[0], x, d, index, source, y);
        if (!include_self) gradients[0] = scatter(gradients[0], d, index, 0);
        return gradients;
      });
}

// ---- x[indices...] ------------------------------------------------------------------------------

namespace {

// [Note: how x[indices] is calculated]
// Masks become the coordinates of their true elements. The index tensors are broadcast and joined
// to one list of positions in the indexed dimensions, which are brought together: x is seen as
// [B, M, A] with M the indexed dimensions. Where they are neighbours the result's index dimensions
// take their place; where others lie between them they come first (numpy's rule).
struct IndexPlan {
  Shape x_shape;
  Shape order;  // permutation of x's dimensions; empty where they stay
  int64_t before = 1, indexed = 1, after = 1;
  Shape result_shape;
};

struct PlannedIndex {
  IndexPlan plan;
  Tensor positions;  // i64, contiguous
};

TensorList without_masks(const Shape& shape, const TensorList& indices, const Op& op) {
  TensorList result;
  for (const Tensor& index : indices) {
    if (!index.defined() || index.dtype() != kBool) {
      result.push_back(index);
      continue;
    }
    const int first = static_cast<int>(result.size());
    bool fits = first + index.dim() <= shape.size();
    for (int d = 0; fits && d < index.dim(); ++d) fits = index.shape()[d] == shape[first + d];
    TS_CHECK_SHAPE(fits, op, "mask ", index, " must have the sizes of ", shape, " from dimension ",
                   first, " on");
    TS_CHECK_SHAPE(index.dim() > 0, op, "a mask needs at least one dimension; got ", index);
    const Tensor places = kernels::nonzero(index);
    for (int d = 0; d < index.dim(); ++d) result.push_back(raw::select(places, 1, d));
  }
  return result;
}

PlannedIndex plan_index(const Tensor& x, const TensorList& indices, const Op& op) {
  const Shape& shape = x.shape();
  const Device& device = x.device();
  for (const Tensor& index : indices) {
    if (index.defined() && !is_left_unread(x)) check_same_device(op, "an index", index, x);
  }
  const TensorList list = without_masks(shape, indices, op);
  TS_CHECK_SHAPE(static_cast<int>(list.size()) <= shape.size(), op,
                 "too many indices: ", list.size(), " for ", shape);
  Shape index_shape;
  int first = -1, last = -1, count = 0;
  for (int d = 0; d < static_cast<int>(list.size()); ++d) {
    const Tensor& index = list[static_cast<size_t>(d)];
    if (!index.defined()) continue;
    index_shape = broadcast_shapes(index_shape, index.shape(), op.name);
    first = first < 0 ? d : first;
    last = d;
    ++count;
  }
  TS_CHECK(count > 0, op, "needs at least one index tensor");
  IndexPlan plan;
  plan.x_shape = shape;
  const bool neighbours = last - first + 1 == count;
  Shape before, indexed, after, dims_before, dims_indexed, dims_after;
  for (int d = 0; d < shape.size(); ++d) {
    const bool is_indexed =
        d < static_cast<int>(list.size()) && list[static_cast<size_t>(d)].defined();
    const bool is_before = neighbours && d < first;
    (is_indexed ? indexed : is_before ? before : after).push_back(shape[d]);
    (is_indexed ? dims_indexed : is_before ? dims_before : dims_after).push_back(d);
  }
  plan.before = numel_of(before);
  plan.indexed = numel_of(indexed);
  plan.after = numel_of(after);
  if (!neighbours) {
    plan.order = dims_indexed;
    for (int64_t d : dims_after) plan.order.push_back(d);
  }
  plan.result_shape = before;
  for (int64_t size : index_shape) plan.result_shape.push_back(size);
  for (int64_t size : after) plan.result_shape.push_back(size);

  Tensor positions = raw::empty(index_shape, kI64, device);
  for (int i = 0; i < indexed.size(); ++i) {
    const Tensor index = kernels::contiguous(
        raw::expand(kernels::checked_index(list[static_cast<size_t>(dims_indexed[i])], indexed[i],
                                           true, op.name),
                    index_shape));
    if (device.is_meta()) continue;
    if (device.is_cuda()) {
      positions =
          i == 0 ? index
                 : kernels::binary<fn::Add>(kernels::binary<fn::Mul>(positions, indexed[i]), index);
      continue;
    }
    const int64_t* values = index.data_as<int64_t>();
    int64_t* joined = positions.data_as<int64_t>();
    for (int64_t j = 0; j < positions.numel(); ++j) {
      joined[j] = (i == 0 ? 0 : joined[j] * indexed[i]) + values[j];
    }
  }
  return {plan, positions};
}

Tensor planned_rows(const Tensor& x, const IndexPlan& plan) {
  const Tensor ordered = plan.order.empty() ? x : raw::permute(x, plan.order);
  return raw::view(kernels::contiguous(ordered), {plan.before, plan.indexed, plan.after});
}

// Writes values into rows [B, M, A].
void write_rows(const Tensor& rows, const IndexPlan& plan, const Tensor& positions,
                const Tensor& values, bool accumulate) {
  const Tensor source = raw::view(kernels::contiguous(raw::expand(values, plan.result_shape)),
                                  {plan.before, positions.numel(), plan.after});
  if (accumulate) {
    kernels::add_rows(rows, positions, source);
  } else {
    kernels::put_rows(rows, positions, source);
  }
}

// rows [B, M, A] in x's order of dimensions again.
Tensor unplanned(const Tensor& rows, const IndexPlan& plan) {
  if (plan.order.empty()) return raw::view(rows, plan.x_shape);
  Shape shape = plan.x_shape, inverse = plan.order;
  for (int i = 0; i < plan.order.size(); ++i) {
    shape[i] = plan.x_shape[static_cast<int>(plan.order[i])];
    inverse[static_cast<int>(plan.order[i])] = i;
  }
  return raw::permute(raw::view(rows, shape), inverse);
}

}  // namespace

const Op kIndexPut{
    .name = "index_put", .marks = MarkRule::kAlongDims, .reads = {inputs(1), inputs(), inputs(1)}};
static Tensor take_at(const Tensor& x, const IndexPlan& plan, const Tensor& positions);

static Tensor put_at(const Tensor& x, const IndexPlan& plan, const Tensor& positions,
                     const Tensor& values, bool accumulate);

static TensorList put_backward(const IndexPlan& plan, bool accumulate, const Tensor& dy,
                               const Saved& s) {
  Tensor dx;
  if (s.needs(0)) {
    dx =
        accumulate ? dy : put_at(dy, plan, s.input(1), zeros({}, {dy.dtype(), dy.device()}), false);
  }
  return {dx, Tensor(), s.needs(2) ? take_at(dy, plan, s.input(1)) : Tensor()};
}

// x may be absent: then zeros.
static Tensor put_at(const Tensor& x, const IndexPlan& plan, const Tensor& positions,
                     const Tensor& values, bool accumulate) {
  return differentiable(
      kIndexPut, {x, positions, values},
      [=](Inputs in) {
        const Tensor rows =
            raw::zeros({plan.before, plan.indexed, plan.after}, in[2].dtype(), in[2].device());
        if (in[0].defined()) kernels::copy_into(rows, planned_rows(in[0], plan));
        write_rows(rows, plan, in[1], in[2], accumulate);
        return kernels::contiguous(unplanned(rows, plan));
      },
      [=](Grads dy, const Saved& s) { return put_backward(plan, accumulate, dy[0], s); });
}

const Op kIndex{
    .name = "index", .marks = MarkRule::kAlongDims, .reads = {inputs(1)}, .flops_per_element = 0};

static Tensor take_at(const Tensor& x, const IndexPlan& plan, const Tensor& positions) {
  return differentiable(
      kIndex, {x, positions},
      [=](Inputs in) {
        return raw::view(kernels::select_rows(planned_rows(in[0], plan), in[1]), plan.result_shape);
      },
      [=](Grads dy, const Saved& s) -> TensorList {
        return {put_at({}, plan, s.input(1), dy[0], true), Tensor()};
      });
}

// See [Note: how x[indices] is calculated].
Tensor index(const Tensor& x, const TensorList& indices) {
  check_defined(kIndex, "x", x);
  const PlannedIndex planned = plan_index(x, indices, kIndex);
  return take_at(x, planned.plan, planned.positions);
}

static void check_values(const Tensor& x, const IndexPlan& plan, const Tensor& values) {
  TS_CHECK_DTYPE(values.dtype() == x.dtype(), kIndexPut, "values must have x's dtype; got ", values,
                 " for ", x, "; convert one with to(dtype)");
  TS_CHECK_SHAPE(broadcastable_to(values.shape(), plan.result_shape), kIndexPut, "values ", values,
                 " cannot be broadcast to ", plan.result_shape, ", the shape of x[indices]");
}

Tensor index_put(const Tensor& x, const TensorList& indices, const Tensor& values,
                 bool accumulate) {
  check_defined(kIndexPut, "x", x);
  check_defined(kIndexPut, "values", values);
  const PlannedIndex planned = plan_index(x, indices, kIndexPut);
  check_values(x, planned.plan, values);
  return put_at(x, planned.plan, planned.positions, values, accumulate);
}

const Op kIndexPutInPlace{.name = "index_put_", .reads = {inputs(1), inputs(), inputs(1)}};

const Tensor& index_put_(const Tensor& x, const TensorList& indices, const Tensor& values,
                         bool accumulate) {
  check_defined(kIndexPutInPlace, "x", x);
  check_defined(kIndexPutInPlace, "values", values);
  const auto [plan, positions] = plan_index(x, indices, kIndexPutInPlace);
  check_values(x, plan, values);
  differentiable_inplace(
      kIndexPutInPlace, {x, positions, values},
      [&, plan = plan](Inputs in) {
        const Tensor rows = planned_rows(in[0], plan);
        // Values may lie in x itself: they are read before anything is written.
        const Tensor source = in[2].storage() == in[0].storage() ? clone(in[2]) : in[2];
        write_rows(rows, plan, in[1], source, accumulate);
        if (rows.storage() != in[0].storage()) kernels::copy_into(in[0], unplanned(rows, plan));
        return in[0];
      },
      [plan = plan, accumulate](Grads dy, const Saved& s) {
        return put_backward(plan, accumulate, dy[0], s);
      });
  return x;
}

// ---- Masks and counts ---------------------------------------------------------------------------

Tensor masked_select(const Tensor& x, const Tensor& mask) {
  TS_CHECK_DTYPE(mask.dtype() == kBool, "masked_select", "mask must be bool; got ", mask);
  const Shape shape = broadcast_shapes(x.shape(), mask.shape(), "masked_select");
  if (shape.empty()) return masked_select(reshape(x, {1}), raw::view(mask, {1}));
  return index(expand(x, shape), {raw::expand(mask, shape)});
}

const Op kNonzero{.name = "nonzero", .marks = MarkRule::kAlongDims};

Tensor nonzero(const Tensor& x) {
  check_defined(kNonzero, "x", x);
  return not_differentiable(kNonzero, {x}, [](Inputs in) { return kernels::nonzero(in[0]); });
}

const Op kTril{.name = "tril", .marks = MarkRule::kMovement, .flops_per_element = 0};

Tensor tril(const Tensor& x, int64_t diagonal) {
  check_defined(kTril, "x", x);
  return differentiable(
      along(kTril, Shape{-2, -1}), {x}, [=](Inputs in) { return kernels::tril(in[0], diagonal); },
      [=](Grads dy, const Saved&) { return tril(dy[0], diagonal); });
}

const Op kTriu{.name = "triu", .marks = MarkRule::kMovement, .flops_per_element = 0};

Tensor triu(const Tensor& x, int64_t diagonal) {
  check_defined(kTriu, "x", x);
  return differentiable(
      along(kTriu, Shape{-2, -1}), {x}, [=](Inputs in) { return kernels::triu(in[0], diagonal); },
      [=](Grads dy, const Saved&) { return triu(dy[0], diagonal); });
}

const Op kBincount{.name = "bincount", .marks = MarkRule::kAlongDims};

Tensor bincount(const Tensor& x, const Tensor& weights, int64_t minlength) {
  check_defined(kBincount, "x", x);
  return not_differentiable(kBincount, {x, weights},
                            [=](Inputs in) { return kernels::bincount(in[0], in[1], minlength); });
}

const Op kOneHot{.name = "one_hot", .marks = MarkRule::kAlongDims, .flops_per_element = 0};

Tensor one_hot(const Tensor& x, int64_t num_classes) {
  check_defined(kOneHot, "x", x);
  return not_differentiable(kOneHot, {x},
                            [=](Inputs in) { return kernels::one_hot(in[0], num_classes); });
}

}  // namespace tessera
