#include <tessera/core/cuda/libraries/attention_graph.h>

#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <tessera/core/cuda/libraries/gemm.h>
#include <tessera/core/error.h>

namespace tessera::gpu {
namespace {

using tessera::detail::concatenate;

// Loads are of 16 bytes along the columns.
std::string check_operand(const char* name, const AttentionOperand& x, bool written) {
  if (x.data == nullptr) return concatenate(name, " is missing");
  if (x.column != 1) return concatenate("the columns of ", name, " are ", x.column, " apart");
  if (reinterpret_cast<uintptr_t>(x.data) % 16 != 0) {
    return concatenate(name, " does not begin at a multiple of 16 bytes");
  }
  for (const int64_t stride : {x.batch, x.head, x.row}) {
    if (stride % 8 != 0)
      return concatenate(name, " has a stride that is no multiple of 8, ", stride);
    if (stride < 0 || (written && stride == 0)) {
      return concatenate(name, " has a stride of ", stride);
    }
  }
  return {};
}

std::string check_bias(const AttentionProblem& p) {
  const AttentionBias& x = p.bias;
  if (x.data == nullptr) return {};
  if (x.dtype != p.dtype && x.dtype != kF32) {
    return concatenate("a bias is f32 or ", p.dtype, ", not ", x.dtype);
  }
  if ((x.B != 1 && x.B != p.B) || (x.H != 1 && x.H != p.H) || (x.T != 1 && x.T != p.T)) {
    return concatenate("a bias of [", x.B, ", ", x.H, ", ", x.T, "] does not fit [", p.B, ", ", p.H,
                       ", ", p.T, "]");
  }
  // cuDNN 9.19 on an H200: gradients of such a bias are those of another one.
  if (p.backward && x.T != p.T) return "backward takes a bias of all rows, not of one for all";
  const int64_t vector = 16 / size_of(x.dtype);
  for (const int64_t stride : {x.batch, x.head, x.row}) {
    if (stride < 0 || stride % vector != 0) {
      return concatenate("bias has a stride that is no multiple of ", vector, ", ", stride);
    }
  }
  if (reinterpret_cast<uintptr_t>(x.data) % 16 != 0) {
    return "bias does not begin at a multiple of 16 bytes";
  }
  return {};
}

}  // namespace

AttentionProblem backward_of(AttentionProblem p) {
  p.backward = true;
  p.grad_output = p.output;
  p.grad_query = p.query;
  p.grad_key = p.key;
  p.grad_value = p.value;
  return p;
}

int64_t attention_length(int64_t length) {
  constexpr int64_t kLeast = 64;
  return kLeast * rounded_length((length + kLeast - 1) / kLeast);
}

bool takes_lengths(const AttentionProblem& p, bool has_mask) {
  using Lengths = std::pair<int64_t, int64_t>;
  if (attention_length(p.T) == p.T && attention_length(p.S) == p.S) return true;
  static std::mutex mutex;
  static auto* const exact = new std::map<std::string, std::set<Lengths>>;
  const std::string form =
      concatenate(p.dtype, " ", p.B, " ", p.H, " ", p.Hk, " ", p.E, " ", p.Ev, " ", p.causal, " ",
                  std::bit_cast<uint64_t>(p.dropout), " ", std::bit_cast<uint64_t>(p.scale), " ",
                  p.has_lengths, " ", has_mask, " ", p.deterministic);
  const std::lock_guard lock(mutex);
  std::set<Lengths>& known = (*exact)[form];
  if (known.contains({p.T, p.S})) return true;
  if (known.size() >= kOwnLengths) return false;
  known.insert({p.T, p.S});
  return true;
}

std::string validate(const AttentionProblem& p, int version) {
  if (const std::string reason = validate_library(version); !reason.empty()) return reason;
  if (p.dtype != kF16 && p.dtype != kBF16)
    return concatenate("the library takes f16 and bf16, not ", p.dtype);
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  for (const int64_t size : {p.B, p.H, p.Hk, p.T, p.S}) {
    if (size < 1 || size > kMost) return concatenate("sizes must be 1 to 2^31 - 1; one is ", size);
  }
  if (p.H % p.Hk != 0) return concatenate(p.H, " heads do not share ", p.Hk);
  constexpr int64_t kWidest = 256;
  for (const int64_t width : {p.E, p.Ev}) {
    if (width < 8 || width > kWidest || width % 8 != 0) {
      return concatenate("head widths are multiples of 8 up to ", kWidest, "; got ", width);
    }
  }
  if (!std::isfinite(p.scale)) return concatenate("the scale is ", p.scale);
  if (p.dropout < 0 || p.dropout >= 1)
    return concatenate("dropout of ", p.dropout, " keeps nothing");
  if (p.has_lengths && version < 91000) {  // its padding graph takes one select more there
    return "keys of different lengths need cuDNN 9.10 or later";
  }
  if (p.backward && p.S % 128 != 0 && version <= 91500) {
    return concatenate("before cuDNN 9.15.1 backward takes keys in multiples of 128; got ", p.S);
  }
  std::string reason = check_bias(p);
  const auto check = [&](const char* name, const AttentionOperand& x, bool written) {
    if (reason.empty()) reason = check_operand(name, x, written);
  };
  check("query", p.query, false);
  check("key", p.key, false);
  check("value", p.value, false);
  check("output", p.output, !p.backward);
  if (p.backward) {
    if (p.log_sums == nullptr) return "log_sums are missing";
    check("grad_output", p.grad_output, false);
    check("grad_query", p.grad_query, true);
    check("grad_key", p.grad_key, true);
    check("grad_value", p.grad_value, true);
  }
  return reason;
}

namespace {

// [Note: order of operations] cuDNN finds its fused kernels by matching these operations in this
// order; each names what the paper's formula does. FlashAttention-2 (Dao, 2023), algorithms 1
// and 2.
class Builder {
 public:
  explicit Builder(const AttentionProblem& problem)
      : p_(problem),
        pairs_({p_.B, p_.H, p_.T, p_.S}),
        rows_({p_.B, p_.H, p_.T, 1}),
        swapped_({p_.B, p_.H, p_.S, p_.T}),
        swapped_strides_({p_.H * p_.T * p_.S, p_.T * p_.S, 1, p_.S}) {}

  LibraryGraph forward() {
    const int query = heads(kQuerySlot, p_.query, p_.H, p_.T, p_.E);
    const int key = transposed_heads(kKeySlot, p_.key, p_.E);
    const int value = heads(kValueSlot, p_.value, p_.Hk, p_.S, p_.Ev);
    const int output = heads(kOutputSlot, p_.output, p_.H, p_.T, p_.Ev);
    make_lengths();
    int scores = node(GraphOp::kMatmul, {query, key, query_lengths_, key_lengths_, -1}, pairs_);
    scores = node(GraphOp::kMultiply, {scores, graph_.scalar(p_.scale)}, pairs_);
    scores = causal(padding(biased(scores)));

    const int largest = node(GraphOp::kMax, {scores}, rows_);
    const int shifted = node(GraphOp::kSubtract, {scores, largest}, pairs_);
    const int powers = node(GraphOp::kExp, {shifted}, pairs_);
    const int sum = node(GraphOp::kSum, {powers}, rows_);
    if (p_.log_sums != nullptr) {
      const int log = node(GraphOp::kLog, {sum}, rows_);
      graph_.node(GraphOp::kAdd, {largest, log}, log_sums());
    }
    // The product takes its left operand in the dtype of the inputs.
    if (p_.dropout > 0) {
      int weights = node(GraphOp::kDivide, {powers, sum}, pairs_);
      weights = node(GraphOp::kMultiply, {weights, kept()}, pairs_);
      weights = node(GraphOp::kMultiply, {weights, graph_.scalar(1 / (1 - p_.dropout))}, pairs_,
                     p_.dtype);
      product(weights, value, query_lengths_, key_lengths_, output);
    } else {
      const int weights = node(GraphOp::kDivide, {powers, sum}, pairs_, p_.dtype);
      product(weights, value, query_lengths_, key_lengths_, output);
    }
    return std::move(graph_);
  }

  LibraryGraph backward() {
    const int query = heads(kQuerySlot, p_.query, p_.H, p_.T, p_.E);
    const int key = transposed_heads(kKeySlot, p_.key, p_.E);
    const int value = transposed_heads(kValueSlot, p_.value, p_.Ev);
    const int output = heads(kOutputSlot, p_.output, p_.H, p_.T, p_.Ev);
    const int dy = heads(kGradOutputSlot, p_.grad_output, p_.H, p_.T, p_.Ev);
    const int dq = heads(kGradQuerySlot, p_.grad_query, p_.H, p_.T, p_.E);
    const int dk = heads(kGradKeySlot, p_.grad_key, p_.Hk, p_.S, p_.E);
    const int dv = heads(kGradValueSlot, p_.grad_value, p_.Hk, p_.S, p_.Ev);
    make_lengths();
    const int mask = p_.dropout > 0 ? kept() : -1;

    // delta = (1 - dropout) sum of dy y, in memory between the kernels.
    int delta = node(GraphOp::kMultiply, {dy, output}, {p_.B, p_.H, p_.T, p_.Ev});
    delta = node(GraphOp::kSum, {delta}, rows_);
    delta = graph_.node(GraphOp::kMultiply, {delta, graph_.scalar(1 - p_.dropout)},
                        graph_.scratch(kF32, rows_));

    // p = exp(scale q k^T - log_sums); dv = (kept p)^T dy
    int scores = node(GraphOp::kMatmul, {query, key, query_lengths_, key_lengths_, -1}, pairs_);
    scores = node(GraphOp::kMultiply, {scores, graph_.scalar(p_.scale)}, pairs_);
    scores = padding(biased(scores));
    scores = node(GraphOp::kSubtract, {scores, log_sums()}, pairs_);
    const int weights = node(GraphOp::kExp, {causal(scores)}, pairs_);
    const int keep_scale = p_.dropout > 0 ? graph_.scalar(1 / (1 - p_.dropout)) : -1;
    int used = weights;
    if (p_.dropout > 0) {
      used = node(GraphOp::kMultiply, {used, mask}, pairs_);
      used = node(GraphOp::kMultiply, {used, keep_scale}, pairs_);
    }
    joined_product(transposed_pairs(used), dy, p_.Ev, dv);

    // ds = scale p (kept (dy v^T) - delta); dk = ds^T q; dq = ds k
    int ds = node(GraphOp::kMatmul, {dy, value, query_lengths_, key_lengths_, -1}, pairs_);
    if (p_.dropout > 0) ds = node(GraphOp::kMultiply, {ds, mask}, pairs_);
    ds = node(GraphOp::kSubtract, {ds, delta}, pairs_);
    ds = node(GraphOp::kMultiply, {ds, weights}, pairs_);
    if (p_.dropout > 0) ds = node(GraphOp::kMultiply, {ds, keep_scale}, pairs_);
    ds = node(GraphOp::kMultiply, {ds, graph_.scalar(p_.scale)}, pairs_);
    joined_product(transposed_pairs(ds), query, p_.E, dk);

    const int by_rows =
        graph_.node(GraphOp::kReshape, {key},
                    graph_.interim(p_.dtype, {p_.B, p_.Hk, p_.S, p_.E},
                                   {p_.key.batch, p_.key.head, p_.key.row, p_.key.column}));
    if (p_.deterministic) {
      product(ds, by_rows, query_lengths_, key_lengths_, dq);
    } else {
      const int sums = graph_.scratch(kF32, {p_.B, p_.H, p_.T, p_.E});
      product(ds, by_rows, query_lengths_, key_lengths_, sums);
      graph_.node(GraphOp::kIdentity, {sums}, dq);
    }
    return std::move(graph_);
  }

 private:
  int node(GraphOp op, std::vector<int> inputs, const Shape& sizes, DType dtype = kF32) {
    return graph_.node(op, std::move(inputs), graph_.interim(dtype, sizes));
  }
  void product(int left, int right, int rows, int inner, int result) {
    graph_.node(GraphOp::kMatmul, {left, right, rows, -1, inner}, result);
  }

  int heads(int slot, const AttentionOperand& x, int64_t count, int64_t rows, int64_t columns) {
    return graph_.memory(slot, p_.dtype, {p_.B, count, rows, columns},
                         {x.batch, x.head, x.row, x.column});
  }
  // Key or value as [B, Hk, width, S].
  int transposed_heads(int slot, const AttentionOperand& x, int64_t width) {
    return graph_.memory(slot, p_.dtype, {p_.B, p_.Hk, width, p_.S},
                         {x.batch, x.head, x.column, x.row});
  }
  int log_sums() { return graph_.memory(kLogSumsSlot, kF32, rows_, {p_.H * p_.T, p_.T, 1, 1}); }
  void make_lengths() {
    if (!p_.has_lengths) return;
    const Shape sizes = {p_.B, 1, 1, 1}, strides = {1, 1, 1, 1};
    query_lengths_ = graph_.memory(kQueryLengthsSlot, kI32, sizes, strides);
    key_lengths_ = graph_.memory(kKeyLengthsSlot, kI32, sizes, strides);
  }

  int index(int scores, int axis) {
    const int result = node(GraphOp::kIndex, {scores}, pairs_, kI32);
    graph_.nodes.back().axis = axis;
    return result;
  }
  int select(int scores, int condition) {
    return node(GraphOp::kSelect,
                {scores, graph_.scalar(-std::numeric_limits<double>::infinity()), condition},
                pairs_);
  }
  int biased(int scores) {
    const AttentionBias& x = p_.bias;
    if (x.data == nullptr) return scores;
    const int bias =
        graph_.memory(kBiasSlot, x.dtype, {x.B, x.H, x.T, p_.S}, {x.batch, x.head, x.row, 1});
    return node(GraphOp::kAdd, {scores, bias}, pairs_);
  }
  int causal(int scores) {
    if (!p_.causal) return scores;
    const int row = index(scores, 2), column = index(scores, 3);
    return select(scores, node(GraphOp::kGreaterEqual, {row, column}, pairs_, kBool));
  }
  int padding(int scores) {
    if (!p_.has_lengths) return scores;
    const int row = index(scores, 2), column = index(scores, 3);
    const int row_in = node(GraphOp::kLess, {row, query_lengths_}, pairs_, kBool);
    const int column_in = node(GraphOp::kLess, {column, key_lengths_}, pairs_, kBool);
    return select(scores, node(GraphOp::kAnd, {row_in, column_in}, pairs_, kBool));
  }
  int kept() {
    const Shape one = {1, 1, 1, 1};
    const int seed = graph_.memory(kSeedSlot, kI64, one, one);
    const int offset = graph_.memory(kOffsetSlot, kI64, one, one);
    const int result = node(GraphOp::kBernoulli, {seed, offset}, pairs_);
    graph_.nodes.back().number = 1 - p_.dropout;
    return result;
  }

  int transposed_pairs(int x) {
    return graph_.node(GraphOp::kReshape, {x},
                       graph_.interim(p_.dtype, swapped_, swapped_strides_));
  }
  // left right, summed over the query heads that share a key head.
  void joined_product(int left, int right, int64_t width, int result) {
    if (p_.H == p_.Hk) return product(left, right, key_lengths_, query_lengths_, result);
    const int each = graph_.interim(p_.dtype, {p_.B, p_.H, p_.S, width});
    product(left, right, key_lengths_, query_lengths_, each);
    graph_.node(GraphOp::kSum, {each}, result);
  }

  const AttentionProblem& p_;
  const Shape pairs_, rows_, swapped_, swapped_strides_;
  LibraryGraph graph_;
  int query_lengths_ = -1, key_lengths_ = -1;
};

}  // namespace

LibraryGraph attention_graph(const AttentionProblem& problem) {
  Builder builder(problem);
  LibraryGraph graph = problem.backward ? builder.backward() : builder.forward();
  graph.deterministic = problem.deterministic;
  return graph;
}

std::string describe(const AttentionProblem& p) {
  const auto strides = [](const AttentionOperand& x) {
    return concatenate(" ", x.batch, ",", x.head, ",", x.row);
  };
  const auto bits = [](double value) { return std::bit_cast<uint64_t>(value); };
  std::string result = concatenate("attention ", p.backward ? "backward " : "forward ", p.dtype,
                                   " B", p.B, " H", p.H, "/", p.Hk, " T", p.T, " S", p.S, " E", p.E,
                                   "/", p.Ev, " scale ", bits(p.scale));
  if (p.causal) result += " causal";
  if (p.has_lengths) result += " lengths";
  if (p.bias.data != nullptr) {
    const AttentionBias& x = p.bias;
    result += concatenate(" bias ", x.dtype, " ", x.B, ",", x.H, ",", x.T, " ", x.batch, ",",
                          x.head, ",", x.row);
  }
  if (p.dropout > 0) result += concatenate(" dropout ", bits(p.dropout));
  if (p.deterministic) result += " deterministic";
  if (p.log_sums != nullptr) result += " sums";
  result += strides(p.query) + strides(p.key) + strides(p.value) + strides(p.output);
  if (p.backward) {
    result += strides(p.grad_output) + strides(p.grad_query) + strides(p.grad_key) +
              strides(p.grad_value);
  }
  return result;
}

GraphRequest attention_request(const AttentionProblem& problem) {
  return {
      .name = "scaled_dot_product_attention",
      .key = describe(problem),
      .build =
          [](const void* p) { return attention_graph(*static_cast<const AttentionProblem*>(p)); },
      .problem = &problem,
      .work = problem.backward ? GraphWork::kAttentionGradient : GraphWork::kAttention,
      .causal = problem.causal};
}

}  // namespace tessera::gpu
