#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/differentiable.h>
#include <tessera/autograd/meta_inputs.h>
#include <tessera/autograd/ops.h>
#include <tessera/autograd/ops/composed_gradients.h>
#include <tessera/autograd/ops/compute_dtype.h>
#include <tessera/autograd/ops/dropout_at.h>
#include <tessera/core/context.h>
#include <tessera/core/kernels/attention/attention.h>
#include <tessera/core/kernels/attention/attention_pieces.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera {

// ---- scaled_dot_product_attention ---------------------------------------------------------------

const Op kAttention{.name = "scaled_dot_product_attention",
                    .marks = MarkRule::kSpecial,
                    .autocast = Autocast::kLow,
                    .reads = {inputs(0, 1, 2)},
                    .reads_outputs = outputs(0),
                    .composed = "matmul(softmax(matmul(q, k^T) * scale + mask), v)"};

namespace {

void check_dtypes(const Op& op, const Tensor& q, const Tensor& k, const Tensor& v) {
  TS_CHECK_DTYPE(is_floating(q.dtype()) && !is_fp8(q.dtype()), op,
                 "expects f64, f32, f16 or bf16; got ", q, "; convert with to(dtype)");
  TS_CHECK_DTYPE(q.dtype() == k.dtype() && q.dtype() == v.dtype(), op,
                 "expects query, key and value of one dtype; got ", q, ", ", k, " and ", v);
}

void check_lengths(const Op& op, const Tensor& lengths, const Tensor& like, int64_t keys) {
  if (!lengths.defined()) return;
  check_beside(op, "lengths", lengths);
  TS_CHECK_DTYPE(lengths.dtype() == kI64 || lengths.dtype() == kI32, op,
                 "expects lengths of i64 or i32; got ", lengths);
  TS_CHECK_DEVICE(lengths.device() == like.device(), op, "the lengths are ", lengths,
                  ", the query ", like);
  TS_CHECK_SHAPE(lengths.dim() == 1 && lengths.size(0) == like.size(0), op, "expects lengths of [",
                 like.size(0), "], one a sample; got ", lengths);
  TS_CHECK_SHAPE(keys > 0 || like.size(0) == 0, op, "there are no keys to have lengths of");
}

void check_bounds(const Op& op, const AttentionOptions& options, const Tensor& like, int64_t B,
                  int64_t T) {
  if (!options.starts.defined() && !options.ends.defined()) return;
  const std::pair<const char*, const Tensor&> both[] = {{"starts", options.starts},
                                                        {"ends", options.ends}};
  for (const auto& [name, bounds] : both) {
    if (!bounds.defined()) continue;
    check_beside(op, name, bounds);
    TS_CHECK_DTYPE(bounds.dtype() == kI32, op, "expects ", name, " of i32; got ", bounds,
                   "; convert them with to(kI32)");
    TS_CHECK_DEVICE(bounds.device() == like.device(), op, "the ", name, " are ", bounds,
                    ", the query ", like);
    TS_CHECK_SHAPE(bounds.shape() == (Shape{B, T}), op, "expects ", name, " of [", B, ", ", T,
                   "], one a query; got ", bounds);
  }
  TS_CHECK(!options.mask.defined() && !options.lengths.defined(), op,
           "takes starts and ends, or a mask or lengths; let the ends hide what these hide");
  TS_CHECK(!options.causal || !options.ends.defined(), op,
           "takes ends or causal, not both; without ends a query sees no key behind its own place");
}

void check_shapes(const Tensor& q, const Tensor& k, const Tensor& v,
                  const AttentionOptions& options) {
  TS_CHECK_SHAPE(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, kAttention,
                 "expects query [B, H, T, E], key [B, Hk, S, E] and value [B, Hk, S, Ev]; got ", q,
                 ", ", k, " and ", v, "; add dimensions with unsqueeze");
  TS_CHECK_SHAPE(q.size(0) == k.size(0) && q.size(0) == v.size(0), kAttention,
                 "batch sizes differ: ", q, ", ", k, " and ", v);
  TS_CHECK_SHAPE(q.size(3) == k.size(3), kAttention, "widths differ: query is ", q, " and key is ",
                 k);
  TS_CHECK_SHAPE(k.size(1) == v.size(1) && k.size(2) == v.size(2), kAttention,
                 "heads and lengths of key and value differ: ", k, " and ", v);
  TS_CHECK_SHAPE(q.size(1) == k.size(1) || options.enable_gqa, kAttention, "query has ", q.size(1),
                 " heads and key has ", k.size(1), "; set enable_gqa to share key heads");
  TS_CHECK_SHAPE(k.size(1) > 0 ? q.size(1) % k.size(1) == 0 : q.size(1) == 0, kAttention,
                 "query's heads (", q.size(1), ") must be a multiple of key's (", k.size(1), ")");
  TS_CHECK(options.dropout >= 0 && options.dropout <= 1, kAttention,
           "dropout must be in [0, 1]; got ", options.dropout);
  check_lengths(kAttention, options.lengths, q, k.size(2));
  check_bounds(kAttention, options, q, q.size(0), q.size(2));
  const Tensor& mask = options.mask;
  if (!mask.defined()) return;
  check_beside(kAttention, "mask", mask);
  TS_CHECK(!options.lengths.defined(), kAttention,
           "takes a mask or lengths, not both; hide what lies beyond the lengths in the mask");
  TS_CHECK(!options.causal, kAttention,
           "takes a mask or causal, not both; let the mask hide the keys behind each query's own");
  TS_CHECK_DTYPE(mask.dtype() == kBool || (is_floating(mask.dtype()) && !is_fp8(mask.dtype())),
                 kAttention, "expects a bool or floating mask; got ", mask);
  TS_CHECK_DEVICE(mask.device() == q.device() || is_left_unread(q), kAttention, "the mask is ",
                  mask, ", the query ", q);
  TS_CHECK_SHAPE(broadcastable_to(mask.shape(), {q.size(0), q.size(1), q.size(2), k.size(2)}),
                 kAttention, "cannot broadcast the mask ", mask, " to [", q.size(0), ", ",
                 q.size(1), ", ", q.size(2), ", ", k.size(2), "]");
}

// Of the query, whose sizes are these.
struct QueryDims {
  int batch, query, head;
};
kernels::AttentionPlace place_of(const Op& op, const Tensor& x, const QueryDims& dims) {
  const std::vector<DimCut> cuts = cuts_of(op, x);
  if (cuts.empty()) return {};
  kernels::AttentionPlace place{.heads = x.size(dims.head), .queries = x.size(dims.query)};
  for (const DimCut& cut : cuts) {
    const int64_t size = x.size(cut.dim), first = size * cut.part;
    if (cut.dim == dims.batch) place.batch = first;
    if (cut.dim == dims.query) place.query = first, place.queries = size * cut.parts;
    if (cut.dim == dims.head) place.head = first, place.heads = size * cut.parts;
  }
  return place;
}

// x: the query, or what it lies in.
kernels::AttentionSpec spec_of(const Op& op, const AttentionOptions& options, const Tensor& x,
                               const QueryDims& dims) {
  const int64_t width = x.size(-1);
  kernels::AttentionSpec spec{
      .scale = options.scale ? *options.scale : 1 / std::sqrt(static_cast<double>(width)),
      .causal = options.causal || (options.starts.defined() && !options.ends.defined()),
      .dropout = options.dropout,
      .stream = options.dropout > 0 ? (options.stream ? *options.stream : next_random_stream())
                                    : RandomStream{},
      .mask = options.mask,
      .lengths = options.lengths,
      .starts = options.starts,
      .ends = options.ends,
      .policy = Context::current().slot<kernels::AttentionPolicy>()};
  if (spec.dropout > 0) spec.place = place_of(op, x, dims);
  spec.policy.equal_dropout |= spec.place.is_part();
  return spec;
}
constexpr QueryDims kQuery{.batch = 0, .query = 2, .head = 1},
    kPacked{.batch = 0, .query = 1, .head = 3};

// Pairs of a query and a key that it sees; an explicit mask hides none of them, nor do bounds that
// the host cannot read.
double visible_pairs(const Tensor& q, const Tensor& k, const kernels::AttentionSpec& spec) {
  const bool causal = spec.causal;
  const Tensor& bounds = spec.ends.defined() ? spec.ends : spec.starts;
  if (bounds.defined() && bounds.device().is_cpu()) {
    return static_cast<double>(q.size(1)) * kernels::ranged_pairs(spec, q.size(2), k.size(2));
  }
  const auto T = static_cast<double>(q.size(2)), S = static_cast<double>(k.size(2));
  const double rising = std::min(T, S);  // rows that see one key more than the one before
  const double pairs = causal ? rising * (rising + 1) / 2 + (T - rising) * S : T * S;
  return static_cast<double>(q.size(0) * q.size(1)) * pairs;
}
double attention_flops(const Tensor& q, const Tensor& k, const Tensor& v,
                       const kernels::AttentionSpec& spec) {
  return 2 * visible_pairs(q, k, spec) * static_cast<double>(q.size(3) + v.size(3));
}
// The scores again, the gradients of probabilities and value, and those of query and key.
double backward_flops(const Tensor& q, const Tensor& k, const Tensor& v,
                      const kernels::AttentionSpec& spec) {
  return 2 * visible_pairs(q, k, spec) * static_cast<double>(3 * q.size(3) + 2 * v.size(3));
}

// [B, H, rows, width] that lies in memory as [B, rows, H, width], as a linear layer wants it.
Tensor empty_heads(const Tensor& like) {
  return raw::transpose(raw::empty({like.size(0), like.size(2), like.size(1), like.size(3)},
                                   like.dtype(), like.device()),
                        1, 2);
}

// Of the probabilities [B, H, T, S].
Tensor dropped(const Tensor& weights, const kernels::AttentionSpec& spec) {
  if (spec.dropout >= 1) return mul(weights, Scalar(0));
  const int64_t H = weights.size(1), T = weights.size(2), S = weights.size(3);
  kernels::DrawPlace place;
  if (spec.place.is_part()) {
    const auto [first_row, heads, queries] = kernels::draws_of(spec.place, H, T);
    place = {.first = first_row * S,
             .levels = 3,
             .sizes = {weights.size(0), H, T * S},
             .strides = {heads * queries * S, queries * S, 1}};
  }
  return dropout_at(weights, spec.dropout, spec.stream, place);
}

// The definition in ops: for a mask that is learned, which the kernel has no gradient for, and
// where backward itself is recorded. The mask is that of the options, not yet expanded.
Tensor composed_attention(const Tensor& given_q, const Tensor& given_k, const Tensor& given_v,
                          const Tensor& mask, const kernels::AttentionSpec& spec) {
  const Tensor q = in_compute(given_q), k = in_compute(given_k), v = in_compute(given_v);
  const int64_t group = q.size(1) / k.size(1), T = q.size(2), S = k.size(2);
  const Tensor keys = group > 1 ? repeat_interleave(k, group, 1) : k;
  const Tensor values = group > 1 ? repeat_interleave(v, group, 1) : v;
  Tensor scores = mul(matmul(q, transpose(keys, -2, -1)), spec.scale);
  Tensor hidden;  // broadcasts to the scores
  if (mask.defined() && mask.dtype() == kBool) {
    hidden = logical_not(mask);
  } else if (mask.defined()) {
    hidden = eq(mask, -std::numeric_limits<double>::infinity());
    scores = add(scores, masked_fill(in_compute(mask), hidden, 0));
  }
  const auto hide = [&](const Tensor& more) {
    hidden = hidden.defined() ? logical_or(hidden, more) : more;
  };
  const Tensor position = arange(0, S, 1, kI64, q.device());
  if (spec.causal) hide(gt(position, unsqueeze(arange(0, T, 1, kI64, q.device()), 1)));
  if (spec.lengths.defined()) hide(ge(position, reshape(spec.lengths, {-1, 1, 1, 1})));
  const auto each_query = [&](const Tensor& bounds) {
    return reshape(bounds, {bounds.size(0), 1, bounds.size(1), 1});
  };
  if (spec.starts.defined()) hide(lt(position, each_query(spec.starts)));
  if (spec.ends.defined()) hide(ge(position, each_query(spec.ends)));
  if (hidden.defined()) {
    // A row that sees no key is all 0, with gradients of 0: its softmax must be one of numbers.
    hidden = expand(hidden, scores.shape());
    const Tensor some = logical_not(all(hidden, {-1}, true));
    scores =
        masked_fill(scores, logical_and(hidden, some), -std::numeric_limits<double>::infinity());
  }
  Tensor weights = softmax(scores, -1);
  if (hidden.defined()) weights = masked_fill(weights, hidden, 0);
  if (spec.dropout > 0) weights = dropped(weights, spec);
  return to(matmul(weights, values), given_q.dtype());
}

}  // namespace

Tensor scaled_dot_product_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                    const AttentionOptions& options) {
  check_defined(kAttention, "query", query);
  check_defined(kAttention, "key", key);
  check_defined(kAttention, "value", value);
  check_shapes(query, key, value, options);
  if (options.mask.defined() && grad_enabled() && options.mask.requires_grad()) {
    return composed_attention(query, key, value, options.mask,
                              spec_of(kAttention, options, query, kQuery));
  }
  kernels::AttentionSpec spec = spec_of(kAttention, options, query, kQuery);
  if (spec.mask.defined()) {
    spec.mask = raw::expand(spec.mask, {query.size(0), query.size(1), query.size(2), key.size(2)});
  }
  return differentiable(
      kAttention, {query, key, value},
      [&spec](Inputs in, Extras& extras) {
        check_dtypes(kAttention, in[0], in[1], in[2]);
        const auto [output, log_sums] = kernels::attention(in[0], in[1], in[2], spec);
        count_flops(attention_flops(in[0], in[1], in[2], spec));
        if (extras.wanted()) extras.save(log_sums);
        return output;
      },
      [spec](Grads dy, const Saved& s) -> TensorList {
        const Tensor q = s.input(0), k = s.input(1), v = s.input(2);
        if (grad_enabled()) {
          return composed_gradients({q, k, v}, dy[0], [&](const TensorList& in) {
            return composed_attention(in[0], in[1], in[2], spec.mask, spec);
          });
        }
        const TensorList grads{empty_heads(q), empty_heads(k), empty_heads(v)};
        kernels::attention_backward(dy[0], q, k, v, s.output(), s.extra(0), spec, grads[0],
                                    grads[1], grads[2]);
        count_flops(backward_flops(q, k, v, spec));
        return grads;
      });
}

// ---- packed_attention ---------------------------------------------------------------------------

const Op kPackedAttention{
    .name = "packed_attention",
    .marks = MarkRule::kSpecial,
    .autocast = Autocast::kLow,
    .reads = {inputs(0)},
    .reads_outputs = outputs(0),
    .composed = "scaled_dot_product_attention of the three parts, heads joined"};

namespace {

// Query, key or value of (B, T, 3, H, E) as [B, H, T, E].
Tensor part_of(const Tensor& packed, int64_t part) {
  return raw::transpose(raw::select(packed, 2, part), 1, 2);
}
// [B, T, H * E] as [B, H, T, E].
Tensor split_heads(const Tensor& x, int64_t heads) {
  return raw::transpose(
      raw::view(x, {x.size(0), x.size(1), heads, heads > 0 ? x.size(2) / heads : 0}), 1, 2);
}

}  // namespace

Tensor packed_attention(const Tensor& packed, const AttentionOptions& options) {
  check_defined(kPackedAttention, "packed", packed);
  TS_CHECK_SHAPE(packed.dim() == 5 && packed.size(2) == 3, kPackedAttention,
                 "expects [B, T, 3, H, E]; got ", packed);
  TS_CHECK(!options.mask.defined() && !options.enable_gqa, kPackedAttention,
           "takes no mask and no shared heads; use scaled_dot_product_attention");
  TS_CHECK(options.dropout >= 0 && options.dropout <= 1, kPackedAttention,
           "dropout must be in [0, 1]; got ", options.dropout);
  check_lengths(kPackedAttention, options.lengths, packed, packed.size(1));
  check_bounds(kPackedAttention, options, packed, packed.size(0), packed.size(1));
  const kernels::AttentionSpec spec = spec_of(kPackedAttention, options, packed, kPacked);
  return differentiable(
      kPackedAttention, {packed},
      [&spec](Inputs in, Extras& extras) {
        const Tensor q = part_of(in[0], 0), k = part_of(in[0], 1), v = part_of(in[0], 2);
        check_dtypes(kPackedAttention, q, k, v);
        const auto [output, log_sums] = kernels::attention(q, k, v, spec);
        count_flops(attention_flops(q, k, v, spec));
        if (extras.wanted()) extras.save(log_sums);
        return raw::view(raw::transpose(output, 1, 2),
                         {q.size(0), q.size(2), q.size(1) * q.size(3)});
      },
      [spec](Grads dy, const Saved& s) {
        const Tensor qkv = s.input(0);
        if (grad_enabled()) {
          return composed_gradients({qkv}, dy[0], [&](const TensorList& in) {
            const auto part = [&](int64_t i) { return transpose(select(in[0], 2, i), 1, 2); };
            const Tensor y = composed_attention(part(0), part(1), part(2), {}, spec);
            return reshape(transpose(y, 1, 2), s.output_shape());
          })[0];
        }
        const Tensor grad = raw::empty(qkv.shape(), qkv.dtype(), qkv.device());
        const int64_t heads = qkv.size(3);
        const Tensor q = part_of(qkv, 0), k = part_of(qkv, 1), v = part_of(qkv, 2);
        kernels::attention_backward(split_heads(dy[0], heads), q, k, v,
                                    split_heads(s.output(), heads), s.extra(0), spec,
                                    part_of(grad, 0), part_of(grad, 1), part_of(grad, 2));
        count_flops(backward_flops(q, k, v, spec));
        return grad;
      });
}

}  // namespace tessera
