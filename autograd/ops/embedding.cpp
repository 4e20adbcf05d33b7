#include <algorithm>
#include <limits>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/differentiable.h>
#include <tessera/autograd/ops.h>
#include <tessera/autograd/ops/compute_dtype.h>
#include <tessera/core/kernels/embedding/embedding.h>

namespace tessera {

// ---- embedding ----------------------------------------------------------------------------------

const Op kEmbeddingBackward{.name = "embedding_backward", .reads = {inputs(1)}};

static Tensor embedding_backward(const Tensor& dy, const Tensor& index, int64_t rows,
                                 int64_t padding_idx) {
  return differentiable(
      kEmbeddingBackward, {dy, index},
      [=](Inputs in) { return kernels::embedding_backward(in[0], in[1], rows, padding_idx); },
      [=](Grads ddw, const Saved& s) -> TensorList {
        const Tensor index = s.input(1);
        const Tensor picked = embedding(index, ddw[0]);
        if (padding_idx < 0) return {picked, Tensor()};
        return {masked_fill(picked, unsqueeze(eq(index, Scalar(padding_idx)), -1), 0), Tensor()};
      });
}

// The gradient of the weight: rows are added to what reached it before, as that of a head does that
// has the same weight, where nobody else holds that.
static Tensor embedding_gradient(const Tensor& dy, const Saved& s, int64_t rows,
                                 int64_t padding_idx) {
  const Tensor index = s.input(0);
  if (!grad_enabled()) {
    if (const Tensor pending = s.take_pending(1); pending.defined()) {
      const bool alone = pending.use_count() == 1 && pending.storage().use_count() == 1 &&
                         !pending.storage()->is_foreign() && pending.is_contiguous();
      if (alone && pending.dtype() == dy.dtype()) {
        return kernels::embedding_backward(dy, index, rows, padding_idx, pending);
      }
      return add(pending, embedding_backward(dy, index, rows, padding_idx));
    }
  }
  return embedding_backward(dy, index, rows, padding_idx);
}

static void check_embedding(const Op& op, const Tensor& index, const Tensor& weight) {
  check_defined(op, "index", index);
  check_defined(op, "weight", weight);
  TS_CHECK_SHAPE(weight.dim() == 2, op, "weight must be [V, C]; got ", weight);
}

// -1: none.
static int64_t padding_row(const Op& op, const Tensor& weight, std::optional<int64_t> padding_idx) {
  if (!padding_idx) return -1;
  const int64_t rows = weight.size(0);
  const int64_t padding = *padding_idx < 0 ? *padding_idx + rows : *padding_idx;
  TS_CHECK_INDEX(padding >= 0 && padding < rows, op, "padding_idx ", *padding_idx,
                 " is outside the ", rows, " rows of ", weight);
  return padding;
}

const Op kEmbedding{.name = "embedding",
                    .marks = MarkRule::kSpecial,
                    .reads = {inputs(), inputs(0)},
                    .flops_per_element = 0};

Tensor embedding(const Tensor& index, const Tensor& weight, std::optional<int64_t> padding_idx) {
  check_embedding(kEmbedding, index, weight);
  const int64_t rows = weight.size(0), padding = padding_row(kEmbedding, weight, padding_idx);
  return differentiable(
      kEmbedding, {index, weight}, [](Inputs in) { return kernels::embedding(in[0], in[1]); },
      [=](Grads dy, const Saved& s) -> TensorList {
        return {Tensor(), embedding_gradient(dy[0], s, rows, padding)};
      });
}

const Op kEmbeddingAdd{.name = "embedding_add",
                       .marks = MarkRule::kSpecial,
                       .reads = {inputs(), inputs(0), inputs()},
                       .flops_per_element = 1};

Tensor embedding_add(const Tensor& index, const Tensor& weight, const Tensor& other,
                     std::optional<int64_t> padding_idx) {
  check_embedding(kEmbeddingAdd, index, weight);
  check_defined(kEmbeddingAdd, "other", other);
  const int64_t rows = weight.size(0), padding = padding_row(kEmbeddingAdd, weight, padding_idx);
  Shape shape = index.shape();
  shape.push_back(weight.size(1));
  TS_CHECK_SHAPE(broadcastable_to(other.shape(), shape), kEmbeddingAdd,
                 "other must be broadcastable to ", shape, "; got ", other);
  if (other.dtype() != weight.dtype()) return add(embedding(index, weight, padding_idx), other);
  return differentiable(
      kEmbeddingAdd, {index, weight, other},
      [](Inputs in) { return kernels::embedding_add(in[0], in[1], in[2]); },
      [=](Grads dy, const Saved& s) -> TensorList {
        return {Tensor(), s.needs(1) ? embedding_gradient(dy[0], s, rows, padding) : Tensor(),
                s.needs(2) ? dy[0] : Tensor()};
      });
}

// ---- embedding_bag ------------------------------------------------------------------------------

namespace {

constexpr const char* kEmbeddingBag = "embedding_bag";

// The bag of each of n positions, without a look at the offsets' values: how many begin at it or
// before it, less one.
Tensor bags_of(const Tensor& offsets, int64_t n) {
  const Tensor begins = scatter_add(zeros({n + 1}, {.dtype = kI64, .device = offsets.device()}), 0,
                                    offsets, ones_like(offsets));
  return sub(narrow(cumsum(begins, 0), 0, 0, n), 1);
}

// Positions of each bag's members, [bags, longest], and where there are any: read on the host.
struct BagRows {
  Tensor positions;  // i64
  Tensor valid;      // bool
};
BagRows rows_of_bags(const Tensor& offsets, int64_t n) {
  const int64_t bags = offsets.size(0);
  if (offsets.is_meta()) {
    const Tensor none = zeros({bags, 1}, {.dtype = kI64, .device = kMeta});
    return {none, to(none, kBool)};
  }
  std::vector<int64_t> begin = offsets.to_vector<int64_t>();
  begin.push_back(n);
  int64_t longest = 1;
  for (size_t b = 0; b + 1 < begin.size(); ++b) {
    TS_CHECK(begin[b] <= begin[b + 1], kEmbeddingBag, "offsets must ascend to at most ", n,
             "; got ", begin[b], " at ", b);
    longest = std::max(longest, begin[b + 1] - begin[b]);
  }
  const Tensor step = unsqueeze(to(arange(longest), offsets.device()), 0);
  const Tensor first = unsqueeze(offsets, 1);
  const Tensor ends =
      cat(TensorList{narrow(offsets, 0, 1, bags - 1), full_like(narrow(offsets, 0, 0, 1), n)});
  const Tensor positions = add(first, step), valid = lt(positions, unsqueeze(ends, 1));
  return {masked_fill(positions, logical_not(valid), 0), valid};
}

// rows: [bags, n, C]; valid: [bags, n].
Tensor largest_of(const Tensor& rows, const Tensor& valid) {
  const Tensor outside = unsqueeze(logical_not(valid), 2);
  const Tensor most =
      max(masked_fill(rows, outside, -std::numeric_limits<double>::infinity()), 1).values;
  return masked_fill(most, logical_not(any(valid, {1}, true)), 0);
}

}  // namespace

Tensor embedding_bag(const Tensor& index, const Tensor& weight, const Tensor& offsets,
                     const EmbeddingBagOptions& options) {
  TS_CHECK(index.defined() && weight.defined(), kEmbeddingBag,
           "index or weight is undefined; give it a value first");
  TS_CHECK_SHAPE(weight.dim() == 2, kEmbeddingBag, "weight must be [V, C]; got ", weight);
  TS_CHECK_SHAPE((index.dim() == 2 && !offsets.defined()) ||
                     (index.dim() == 1 && offsets.defined() && offsets.dim() == 1),
                 kEmbeddingBag, "expects an index [bags, n], or [n] with offsets [bags]; got ",
                 index, offsets.defined() ? " with offsets " + offsets.describe() : "");
  const Tensor& scales = options.per_sample_weights;
  TS_CHECK(!scales.defined() || options.mode == BagMode::kSum, kEmbeddingBag,
           "per_sample_weights are for sums; use mode kSum");
  TS_CHECK_SHAPE(!scales.defined() || scales.shape() == index.shape(), kEmbeddingBag,
                 "per_sample_weights must have the shape of ", index, "; got ", scales);
  const DType dtype = weight.dtype();
  Tensor rows = in_compute(embedding(index, weight, options.padding_idx));
  if (scales.defined()) rows = mul(rows, unsqueeze(in_compute(scales), -1));
  Tensor valid = ones_like(index, kBool);
  if (options.padding_idx) {
    const int64_t padding = *options.padding_idx;
    valid = ne(index, padding < 0 ? padding + weight.size(0) : padding);
    rows = masked_fill(rows, unsqueeze(logical_not(valid), -1), 0);
  }
  const int64_t n = index.size(-1);
  if (!offsets.defined()) {
    if (n == 0) return to(sum(rows, {1}), dtype);
    if (options.mode == BagMode::kMax) return to(largest_of(rows, valid), dtype);
    const Tensor total = sum(rows, {1});
    if (options.mode == BagMode::kSum) return to(total, dtype);
    return to(div(total, to(clamp(sum(valid, {1}, true), 1), total.dtype())), dtype);
  }
  const int64_t bags = offsets.size(0) - (options.include_last_offset ? 1 : 0);
  TS_CHECK_SHAPE(bags >= 0, kEmbeddingBag, "include_last_offset needs an offset; got ", offsets);
  const Tensor begins = to(narrow(offsets, 0, 0, bags), kI64);
  const TensorOptions like{.dtype = rows.dtype(), .device = rows.device()};
  if (bags == 0) return to(zeros({bags, weight.size(1)}, like), dtype);
  if (options.mode == BagMode::kMax && n > 0) {
    const BagRows members = rows_of_bags(begins, n);
    const Shape shape = {bags, members.positions.size(1)};
    const Tensor flat = flatten(members.positions);
    const Tensor taken = logical_and(members.valid, reshape(index_select(valid, 0, flat), shape));
    return to(largest_of(reshape(index_select(rows, 0, flat), {shape[0], shape[1], -1}), taken),
              dtype);
  }
  const Tensor bag = bags_of(begins, n);
  const Tensor total = index_add(zeros({bags, weight.size(1)}, like), 0, bag, rows);
  if (options.mode == BagMode::kSum) return to(total, dtype);
  const Tensor counts = index_add(zeros({bags}, like), 0, bag, to(valid, rows.dtype()));
  return to(div(total, unsqueeze(clamp(counts, 1), 1)), dtype);
}

// ---- rotary_embedding ---------------------------------------------------------------------------

const Op kRotaryEmbedding{.name = "rotary_embedding",
                          .marks = MarkRule::kAlongDims,
                          .reads = {inputs(1, 2), inputs(0), inputs(0)},
                          .flops_per_element = 3};

// The gradient with respect to x turns back: the same op with `inverse` changed.
static Tensor rotate(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved,
                     bool inverse) {
  return differentiable(
      along(kRotaryEmbedding, -1), {x, cos, sin},
      [=](Inputs in) { return kernels::rotary(in[0], in[1], in[2], interleaved, inverse); },
      [=](Grads dy, const Saved& s) -> TensorList {
        TensorList grads(3);
        if (s.needs(0)) grads[0] = rotate(dy[0], s.input(1), s.input(2), interleaved, !inverse);
        if (!s.needs(1) && !s.needs(2)) return grads;
        const Tensor x = s.input(0);
        const int64_t half = x.size(-1) / 2;
        const auto first = [&](const Tensor& t) {
          return interleaved ? slice(t, -1, 0, {}, 2) : narrow(t, -1, 0, half);
        };
        const auto second = [&](const Tensor& t) {
          return interleaved ? slice(t, -1, 1, {}, 2) : narrow(t, -1, half, half);
        };
        const Tensor a = first(x), b = second(x), da = first(dy[0]), db = second(dy[0]);
        if (s.needs(1)) grads[1] = add(mul(a, da), mul(b, db));
        if (s.needs(2)) {
          grads[2] = inverse ? sub(mul(b, da), mul(a, db)) : sub(mul(a, db), mul(b, da));
        }
        return grads;
      });
}

Tensor rotary_embedding(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved) {
  check_defined(kRotaryEmbedding, "x", x);
  check_defined(kRotaryEmbedding, "cos", cos);
  check_defined(kRotaryEmbedding, "sin", sin);
  TS_CHECK_SHAPE(x.dim() >= 1 && x.size(-1) % 2 == 0, kRotaryEmbedding,
                 "needs an even last dimension; got ", x);
  Shape angles = x.shape();
  angles[x.dim() - 1] = x.size(-1) / 2;
  for (const Tensor* table : {&cos, &sin}) {
    TS_CHECK_SHAPE(broadcastable_to(table->shape(), angles) && table->dim() >= 1 &&
                       table->size(-1) == angles.back(),
                   kRotaryEmbedding, "cos and sin must be broadcastable to ", angles, "; got ",
                   *table);
    TS_CHECK_DTYPE(table->dtype() == x.dtype() || table->dtype() == kF32, kRotaryEmbedding,
                   "cos and sin must have x's dtype or be f32; got ", *table, " for ", x);
  }
  return rotate(x, cos, sin, interleaved, false);
}

}  // namespace tessera
