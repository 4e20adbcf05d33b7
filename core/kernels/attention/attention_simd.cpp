// Letters: B batch, H heads, Hk key heads, T queries, S keys, E width of query and key, Ev of
// value.
//
// Scores are calculated in the orientation in which the result of one product, a block of C, is the
// panel that the next product reads, so that probabilities are never moved:
//   forward   scores^T (S, 32 queries) = K Q^T, softmax down the columns, output^T = V^T scores^T
//   backward  scores (T, 32 keys) = Q K^T, grad_value^T = grad_output^T P, grad_key^T = Q^T dS;
//             only grad_query += dS K packs its left side once more
// Few queries are not worth the packing of keys and values: those of all heads that share them are
// rows of scores (rows, S), and each key and value is read once, where it lies.
#include <tessera/core/kernels/attention/attention_head.h>
#include <tessera/core/kernels/gemm/gemm_block.h>
#include <tessera/core/kernels/gemm/gemm_dot.h>
#include <tessera/core/kernels/gemm/gemm_rows.h>
#include <tessera/core/kernels/gemm/gemm_split.h>
#include <tessera/core/math.h>

namespace tessera::kernels::TS_SIMD {
namespace {

template <class T>
const T* head_of(const HeadView& view, int64_t batch, int64_t head) {
  return static_cast<const T*>(view.data) + batch * view.batch_stride + head * view.head_stride;
}
template <class T>
T* mutable_head_of(const HeadView& view, int64_t batch, int64_t head) {
  return static_cast<T*>(view.data) + batch * view.batch_stride + head * view.head_stride;
}

// Cuts workspace out of a block; measures where the block is null.
class Arena {
 public:
  explicit Arena(void* block) : block_(static_cast<char*>(block)) {}
  template <class T>
  T* take(int64_t count) {
    const int64_t at = used_;
    used_ += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    return block_ == nullptr ? nullptr : reinterpret_cast<T*>(block_ + at);
  }
  int64_t used() const { return used_; }

 private:
  char* block_;
  int64_t used_ = 0;
};

template <class A>
A infinity() {
  return static_cast<A>(__builtin_inf());
}

// Row t of the mask from key `first` on, as numbers to add to scores.
template <class A, class M>
void read_mask(const AttentionProblem& p, int64_t batch, int64_t head, int64_t t, int64_t first,
               int64_t count, A* row, int64_t stride) {
  const M* mask = head_of<M>(p.mask, batch, head) + t * p.mask.row_stride;
  for (int64_t s = 0; s < count; ++s) {
    const M value = mask[(first + s) * p.mask.column_stride];
    if constexpr (std::is_same_v<M, bool>) {
      row[s * stride] = value ? A(0) : -infinity<A>();
    } else {
      row[s * stride] = load<A>(value);
    }
  }
}
template <class A>
void read_mask(const AttentionProblem& p, int64_t batch, int64_t head, int64_t t, int64_t first,
               int64_t count, A* row, int64_t stride) {
  switch (p.mask_dtype) {
    case kBool:
      return read_mask<A, bool>(p, batch, head, t, first, count, row, stride);
    case kF64:
      return read_mask<A, double>(p, batch, head, t, first, count, row, stride);
    case kF16:
      return read_mask<A, f16>(p, batch, head, t, first, count, row, stride);
    case kBF16:
      return read_mask<A, bf16>(p, batch, head, t, first, count, row, stride);
    default:
      return read_mask<A, float>(p, batch, head, t, first, count, row, stride);
  }
}

// What dropout multiplies row t with: 0 or 1 / (1 - p).
template <class A>
void draw_dropout(const AttentionProblem& p, int64_t batch, int64_t head, int64_t t, int64_t first,
                  int64_t count, A* row, int64_t stride) {
  const int64_t query =
      p.draws.first_row + (batch * p.draws.heads + head) * p.draws.queries + p.first_query + t;
  const uint64_t start = static_cast<uint64_t>(query * p.all_S + p.first_key + first);
  const float probability = static_cast<float>(p.dropout);
  const A kept = static_cast<A>(p.dropout < 1 ? 1 / (1 - p.dropout) : 0);
  uint32_t numbers[4];
  uint64_t block = ~uint64_t{0};
  for (int64_t s = 0; s < count; ++s) {
    const uint64_t index = start + static_cast<uint64_t>(s);
    if (index / 4 != block) {
      block = index / 4;
      const auto drawn = philox4x32(p.stream.seed, p.stream.stream, block);
      __builtin_memcpy(numbers, &drawn, sizeof(numbers));
    }
    row[s * stride] = uniform_from_bits(numbers[index % 4]) >= probability ? kept : A(0);
  }
}

// (rows, columns) of sums, times a factor, to a tensor of any strides.
template <class T, class A>
void store_rows(const A* source, int64_t source_stride, int64_t rows, int64_t columns, A factor,
                T* target, int64_t row_stride, int64_t column_stride) {
  for (int64_t i = 0; i < rows; ++i) {
    const A* from = source + i * source_stride;
    T* to = target + i * row_stride;
    if (column_stride == 1) {
      for (int64_t j = 0; j < columns; ++j) to[j] = store<T>(from[j] * factor);
    } else {
      for (int64_t j = 0; j < columns; ++j) to[j * column_stride] = store<T>(from[j] * factor);
    }
  }
}

// The log_sums of a head's queries.
template <class A>
A* log_sums_of(const AttentionProblem& p, int64_t batch, int64_t head) {
  return static_cast<A*>(p.log_sums) + (batch * p.H + head) * p.all_T + p.first_query;
}

struct Stretch {
  int64_t begin, end;
};
int64_t clamp_to(int64_t x, int64_t most) { return x < 0 ? 0 : x < most ? x : most; }

// Keys that some of the queries t .. t + count - 1 see.
Stretch keys_seen_from(const AttentionProblem& p, int64_t t, int64_t count) {
  if (p.ranges == nullptr) {
    return {0, p.causal && t + count < p.keys ? t + count : p.keys};
  }
  Stretch seen{p.keys, 0};
  for (int64_t i = t; i < t + count; ++i) {
    const KeyRange range = p.ranges[i];
    if (range.begin == range.end) continue;
    if (range.begin < seen.begin) seen.begin = range.begin;
    if (range.end > seen.end) seen.end = range.end;
  }
  return seen.begin < seen.end ? seen : Stretch{0, 0};
}

// The ranges of a block's queries, for whole registers.
template <int64_t kC>
struct BlockRanges {
  int32_t begin[kC] = {}, end[kC] = {};
  Stretch all;  // keys that every query of the block sees

  BlockRanges(const KeyRange* ranges, int64_t t, int64_t count) : all{0, int64_t{1} << 31} {
    if (ranges == nullptr) return;
    for (int64_t c = 0; c < kC; ++c) {
      const KeyRange range = c < count ? ranges[t + c] : KeyRange{0, 0};
      begin[c] = range.begin;
      end[c] = range.end;
      if (c < count && range.begin > all.begin) all.begin = range.begin;
      if (c < count && range.end < all.end) all.end = range.end;
    }
  }
  template <class A>
  void hide(int64_t s, A* TS_RESTRICT row) const {
    if (s >= all.begin && s < all.end) return;
    const int32_t key = static_cast<int32_t>(s);
    for (int64_t c = 0; c < kC; ++c) {
      row[c] = (key >= begin[c]) & (key < end[c]) ? row[c] : -infinity<A>();
    }
  }
};

// The right-hand panel that `sums` (depth, kColumns) is; depth is padded with zero rows.
template <class Kernel>
const typename Kernel::Value* as_panel(typename Kernel::Accumulator* sums, int64_t depth,
                                       typename Kernel::Value* panel) {
  if constexpr (std::is_same_v<typename Kernel::Value, typename Kernel::Accumulator>) {
    return sums;
  } else {
    Kernel::pack_b(sums, Kernel::kColumns, 1, Kernel::kColumns, depth, panel);
    return panel;
  }
}

// ---- Forward
// -------------------------------------------------------------------------------------

template <class Kernel>
struct ForwardBuffers {
  using Value = typename Kernel::Value;
  using A = typename Kernel::Accumulator;
  static constexpr int64_t kC = Kernel::kColumns, kR = Kernel::kRows;
  Value *keys, *values, *queries, *panel;
  A *scores, *bias, *keep, *transposed, *rows;
  int64_t bytes;

  ForwardBuffers(const AttentionProblem& p, void* scratch) {
    Arena arena(scratch);
    keys = arena.take<Value>(round_up(p.keys, kR) * Kernel::padded_depth(p.E));
    values = arena.take<Value>(round_up(p.Ev, kR) * Kernel::padded_depth(p.keys));
    queries = arena.take<Value>(kC * Kernel::padded_depth(p.E));
    panel = arena.take<Value>(kC * Kernel::padded_depth(p.keys));
    scores = arena.take<A>(kC * round_up(p.keys, kR));
    bias = arena.take<A>(p.has_mask ? kC * p.keys : 0);
    keep = arena.take<A>(p.dropout > 0 ? kC * p.keys : 0);
    transposed = arena.take<A>(round_up(p.Ev, kR) * kC);
    rows = arena.take<A>(kC * round_up(p.Ev, 16));
    bytes = arena.used();
  }
};

template <class Kernel, class T>
void forward(const AttentionProblem& p, int64_t batch, int64_t head, void* scratch) {
  using A = typename Kernel::Accumulator;
  constexpr int64_t kC = Kernel::kColumns, kR = Kernel::kRows;
  const ForwardBuffers<Kernel> buffers(p, scratch);
  const int64_t key_head = head / (p.H / p.Hk);
  const T* query = head_of<T>(p.query, batch, head);
  const A scale = static_cast<A>(p.scale);
  Kernel::begin();
  pack_rows<Kernel>(head_of<T>(p.key, batch, key_head), p.key.row_stride, p.key.column_stride,
                    p.keys, p.E, buffers.keys);
  pack_rows<Kernel>(head_of<T>(p.value, batch, key_head), p.value.column_stride, p.value.row_stride,
                    p.Ev, p.keys, buffers.values);
  for (int64_t t0 = 0; t0 < p.T; t0 += kC) {
    const int64_t count = p.T - t0 < kC ? p.T - t0 : kC;
    const Stretch seen = keys_seen_from(p, t0, count);
    // A whole panel of rows begins here.
    const int64_t first = seen.begin / kR * kR, keys = seen.end - first;
    const BlockRanges<kC> ranges(p.ranges, t0, count);
    pack_columns<Kernel>(query + t0 * p.query.row_stride, p.query.column_stride, p.query.row_stride,
                         count, p.E, buffers.queries);
    A* const scores = buffers.scores;  // (keys, kC)
    multiply_panels<Kernel>(round_up(keys, kR), kC, p.E,
                            buffers.keys + first * Kernel::padded_depth(p.E), buffers.queries,
                            scores, kC, false);
    if (p.has_mask) {
      for (int64_t c = 0; c < count; ++c) {
        read_mask(p, batch, head, t0 + c, first, keys, buffers.bias + c, kC);
      }
    }
    A maximum[kC], sum[kC];
    for (int64_t c = 0; c < kC; ++c) {
      maximum[c] = -infinity<A>();
      sum[c] = 0;
    }
    for (int64_t s = 0; s < keys; ++s) {
      A* TS_RESTRICT row = scores + s * kC;
      for (int64_t c = 0; c < kC; ++c) row[c] *= scale;
      if (p.has_mask) {
        const A* TS_RESTRICT bias = buffers.bias + s * kC;
        for (int64_t c = 0; c < count; ++c) row[c] += bias[c];
      }
      if (p.causal) {
        for (int64_t c = 0; c < s - t0; ++c) row[c] = -infinity<A>();
      }
      if (p.ranges != nullptr) ranges.hide(first + s, row);
      for (int64_t c = 0; c < kC; ++c) maximum[c] = row[c] > maximum[c] ? row[c] : maximum[c];
    }
    for (int64_t c = 0; c < kC; ++c) {
      if (maximum[c] == -infinity<A>()) maximum[c] = 0;  // no key: exp(-inf) = 0, not NaN
    }
    for (int64_t s = 0; s < keys; ++s) {
      A* TS_RESTRICT row = scores + s * kC;
      for (int64_t c = 0; c < kC; ++c) {
        row[c] = math::exp(row[c] - maximum[c]);
        sum[c] += row[c];
      }
    }
    if (p.dropout > 0) {
      for (int64_t c = 0; c < count; ++c) {
        draw_dropout(p, batch, head, t0 + c, first, keys, buffers.keep + c, kC);
      }
      for (int64_t i = 0; i < keys * kC; ++i) {
        scores[i] *= i % kC < count ? buffers.keep[i] : A(0);
      }
    }
    const auto* panel = as_panel<Kernel>(scores, keys, buffers.panel);
    multiply_panels<Kernel>(round_up(p.Ev, kR), kC, keys,
                            buffers.values + Kernel::padded_depth(first) * kR, panel,
                            buffers.transposed, kC, false, p.keys);
    A* log_sums = log_sums_of<A>(p, batch, head) + t0;
    for (int64_t c = 0; c < count; ++c) {
      log_sums[c] =
          sum[c] > 0 ? maximum[c] + math::log(sum[c]) : (sum[c] == 0 ? infinity<A>() : sum[c]);
      sum[c] = sum[c] == 0 ? A(0) : 1 / sum[c];
    }
    for (int64_t e = 0; e < p.Ev; ++e) {
      for (int64_t c = 0; c < kC; ++c) buffers.transposed[e * kC + c] *= c < count ? sum[c] : A(0);
    }
    const int64_t stride = round_up(p.Ev, 16);
    transpose_block(buffers.transposed, kC, p.Ev, kC, buffers.rows, stride);
    store_rows(buffers.rows, stride, count, p.Ev, A(1),
               mutable_head_of<T>(p.output, batch, head) + t0 * p.output.row_stride,
               p.output.row_stride, p.output.column_stride);
  }
  Kernel::end();
}

// ---- Forward of few queries
// ----------------------------------------------------------------------

template <class P>
struct RowBuffers {
  using Left = typename P::Left;
  using A = typename P::Sum;
  static constexpr int64_t kLanes = 16;
  static constexpr bool kNarrow = !std::is_same_v<Left, A>;  // products take probabilities as Left
  int64_t rows, query_stride, score_stride, output_stride;
  Left *queries, *probabilities;
  A *scores, *bias, *keep, *outputs;
  int64_t bytes;

  RowBuffers(const AttentionProblem& p, void* scratch) {
    const int64_t all = p.H / p.Hk * p.T;
    rows = all < kRowsAtOnce ? all : kRowsAtOnce;
    // Not a power of two, so that rows do not fall into the same sets of a cache.
    query_stride = round_up(p.E, 64) + 32;
    score_stride = round_up(p.S, 64) + 32;
    output_stride = round_up(p.Ev, 64) + 32;
    Arena arena(scratch);
    queries = arena.take<Left>(rows * query_stride);
    scores = arena.take<A>(rows * score_stride);
    probabilities = kNarrow ? arena.take<Left>(rows * score_stride) : nullptr;
    if constexpr (!kNarrow) probabilities = scores;
    bias = arena.take<A>(p.has_mask ? score_stride : 0);
    keep = arena.take<A>(p.dropout > 0 ? score_stride : 0);
    outputs = arena.take<A>(rows * output_stride);
    bytes = arena.used();
  }
};

// Turns a row of scores with the keys `seen` into exp(score - their maximum) and gives the
// logarithm of the sum, and what outputs are to be multiplied with.
template <class P>
typename P::Sum softmax_row(const AttentionProblem& p, const RowBuffers<P>& buffers, int64_t batch,
                            int64_t head, int64_t t, const Stretch& seen, typename P::Sum* row,
                            typename P::Sum* log_sum) {
  using A = typename P::Sum;
  constexpr int64_t kLanes = RowBuffers<P>::kLanes;
  const A scale = static_cast<A>(p.scale);
  const int64_t keys = seen.end - seen.begin, padded = round_up(keys, 64);
  int64_t hidden = 0, visible = p.causal && t + 1 < keys ? t + 1 : keys;
  if (p.ranges != nullptr) {
    hidden = clamp_to(p.ranges[t].begin - seen.begin, keys);
    visible = clamp_to(p.ranges[t].end - seen.begin, keys);
  }
  A most[kLanes], sums[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) {
    most[i] = -infinity<A>();
    sums[i] = 0;
  }
  if (p.has_mask) {
    read_mask(p, batch, head, t, seen.begin, keys, buffers.bias, 1);
    for (int64_t s = 0; s < keys; ++s) row[s] = row[s] * scale + buffers.bias[s];
  } else {
    for (int64_t s = 0; s < keys; ++s) row[s] *= scale;
  }
  for (int64_t s = 0; s < hidden; ++s) row[s] = -infinity<A>();
  for (int64_t s = visible; s < padded; ++s) row[s] = -infinity<A>();
  for (int64_t s = 0; s < padded; s += kLanes) {
#pragma GCC unroll 1
    for (int64_t i = 0; i < kLanes; ++i) most[i] = row[s + i] > most[i] ? row[s + i] : most[i];
  }
  A maximum = -infinity<A>(), sum = 0;
  for (const A one : most) maximum = one > maximum ? one : maximum;
  if (maximum == -infinity<A>()) maximum = 0;  // no key: exp(-inf) = 0, not NaN
  for (int64_t s = 0; s < padded; s += kLanes) {
    for (int64_t i = 0; i < kLanes; ++i) {
      row[s + i] = math::exp(row[s + i] - maximum);
      sums[i] += row[s + i];
    }
  }
  for (const A one : sums) sum += one;
  if (p.dropout > 0) {
    draw_dropout(p, batch, head, t, seen.begin, keys, buffers.keep, 1);
    for (int64_t s = 0; s < keys; ++s) row[s] *= buffers.keep[s];
  }
  *log_sum = sum > 0 ? maximum + math::log(sum) : (sum == 0 ? infinity<A>() : sum);
  return sum == 0 ? A(0) : 1 / sum;
}

// The sum of x[i] * y[i], or of x[i] alone where y is null. Lanes in a fixed order.
template <class A>
A sum_of_products(const A* TS_RESTRICT x, const A* TS_RESTRICT y, int64_t count) {
  constexpr int64_t kLanes = 16;
  A lanes[kLanes] = {}, sum = 0;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] += y == nullptr ? x[i + lane] : x[i + lane] * y[i + lane];
    }
  }
  for (const A lane : lanes) sum += lane;
  for (; i < count; ++i) sum += y == nullptr ? x[i] : x[i] * y[i];
  return sum;
}

// Keys or values of a head that are bytes, with what a vector's byte 0 and a step are.
struct ByteRows {
  const float *least, *step;
  ByteRows(const HeadView& leasts, const HeadView& steps, int64_t batch, int64_t head,
           int64_t first)
      : least(head_of<float>(leasts, batch, head) + first),
        step(head_of<float>(steps, batch, head) + first) {}
};

template <class P, class T>
void forward_rows(const AttentionProblem& p, int64_t batch, int64_t key_head, int64_t first,
                  void* scratch) {
  using A = typename P::Sum;
  using Right = typename P::Right;
  const RowBuffers<P> buffers(p, scratch);
  const int64_t group = p.H / p.Hk, rest = group * p.T - first;
  const int64_t rows = rest < buffers.rows ? rest : buffers.rows;
  const Stretch seen = keys_seen_from(p, 0, p.T);
  const int64_t keys = seen.end - seen.begin;
  const auto head_of_row = [&](int64_t row) { return key_head * group + (first + row) / p.T; };
  const auto query_of_row = [&](int64_t row) { return (first + row) % p.T; };
  for (int64_t row = 0; row < rows; ++row) {
    const T* query =
        head_of<T>(p.query, batch, head_of_row(row)) + query_of_row(row) * p.query.row_stride;
    for (int64_t e = 0; e < p.E; ++e) {
      buffers.queries[row * buffers.query_stride + e] =
          store<typename P::Left>(load<A>(query[e * p.query.column_stride]));
    }
  }
  dot_rows<P>(rows, keys, p.E, buffers.queries, buffers.query_stride,
              head_of<Right>(p.key, batch, key_head) + seen.begin * p.key.row_stride,
              p.key.row_stride, buffers.scores, buffers.score_stride);
  constexpr bool kBytes = std::is_same_v<typename P::Right, uint8_t>;
  A factors[kRowsAtOnce], bases[kRowsAtOnce] = {};
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t head = head_of_row(row), t = query_of_row(row);
    A* const scores = buffers.scores + row * buffers.score_stride;
    if constexpr (kBytes) {
      // q (least + step n) = least sum(q) + step (q n)
      const ByteRows key(p.key_least, p.key_step, batch, key_head, seen.begin);
      const A query_sum =
          sum_of_products<A>(buffers.queries + row * buffers.query_stride, nullptr, p.E);
      for (int64_t s = 0; s < keys; ++s) {
        scores[s] = ::fmaf(key.step[s], scores[s], key.least[s] * query_sum);
      }
    }
    factors[row] =
        softmax_row(p, buffers, batch, head, t, seen, scores, log_sums_of<A>(p, batch, head) + t);
    if constexpr (kBytes) {
      const ByteRows value(p.value_least, p.value_step, batch, key_head, seen.begin);
      bases[row] = sum_of_products<A>(scores, value.least, keys);
      for (int64_t s = 0; s < keys; ++s) scores[s] *= value.step[s];
    }
    if constexpr (RowBuffers<P>::kNarrow) {
      P::narrow(scores, round_up(keys, 32), buffers.probabilities + row * buffers.score_stride);
    }
  }
  if (keys == 0) {
    __builtin_memset(buffers.outputs, 0,
                     static_cast<size_t>(rows * buffers.output_stride) * sizeof(A));
  }
  spread_rows<P>(rows, p.Ev, keys, buffers.probabilities, buffers.score_stride,
                 head_of<Right>(p.value, batch, key_head) + seen.begin * p.value.row_stride,
                 p.value.row_stride, buffers.outputs, buffers.output_stride);
  for (int64_t row = 0; row < rows; ++row) {
    if constexpr (kBytes) {
      A* const output = buffers.outputs + row * buffers.output_stride;
      for (int64_t e = 0; e < p.Ev; ++e) output[e] += bases[row];
    }
    store_rows(buffers.outputs + row * buffers.output_stride, 0, 1, p.Ev, factors[row],
               mutable_head_of<T>(p.output, batch, head_of_row(row)) +
                   query_of_row(row) * p.output.row_stride,
               0, p.output.column_stride);
  }
}

// Calls f<Products, T>() for the problem's dtype.
template <class F>
auto with_products(const AttentionProblem& p, F&& f) {
  if (p.in_bytes) {
    using Bytes = WideProducts<float, uint8_t>;
    switch (p.dtype) {
      case kF16:
        return f.template operator()<Bytes, f16>();
      case kBF16:
        return f.template operator()<Bytes, bf16>();
      default:
        return f.template operator()<Bytes, float>();
    }
  }
#if defined(TESSERA_DOT_KERNEL)
  if (p.in_pairs) return f.template operator()<PairProducts, bf16>();
#endif
  switch (p.dtype) {
    case kF64:
      return f.template operator()<WideProducts<double, double>, double>();
    case kF16:
      return f.template operator()<WideProducts<float, f16>, f16>();
    case kBF16:
      return f.template operator()<WideProducts<float, bf16>, bf16>();
    default:
      return f.template operator()<WideProducts<float, float>, float>();
  }
}

// ---- Backward
// ------------------------------------------------------------------------------------

template <class Kernel>
struct BackwardBuffers {
  using Value = typename Kernel::Value;
  using A = typename Kernel::Accumulator;
  static constexpr int64_t kC = Kernel::kColumns, kR = Kernel::kRows;
  Value *query_rows, *grad_rows, *query_columns, *grad_columns;  // left sides
  Value *key_panel, *value_panel, *key_rows_panel;               // right sides of 32 keys
  Value *panel, *left;
  A *scores, *grad_scores, *bias, *keep;
  A *grad_query, *grad_key, *grad_value, *transposed, *rows, *delta;
  Stretch* queries;  // that see some of a block of keys; where the problem has ranges
  int64_t bytes;

  BackwardBuffers(const AttentionProblem& p, void* scratch) {
    Arena arena(scratch);
    const int64_t depth_T = Kernel::padded_depth(p.T), rows_T = round_up(p.T, kR);
    const int64_t widest = p.E > p.Ev ? p.E : p.Ev;
    query_rows = arena.take<Value>(rows_T * Kernel::padded_depth(p.E));
    grad_rows = arena.take<Value>(rows_T * Kernel::padded_depth(p.Ev));
    query_columns = arena.take<Value>(round_up(p.E, kR) * depth_T);
    grad_columns = arena.take<Value>(round_up(p.Ev, kR) * depth_T);
    key_panel = arena.take<Value>(kC * Kernel::padded_depth(p.E));
    value_panel = arena.take<Value>(kC * Kernel::padded_depth(p.Ev));
    key_rows_panel = arena.take<Value>(round_up(p.E, kC) * Kernel::padded_depth(kC));
    panel = arena.take<Value>(kC * depth_T);
    left = arena.take<Value>(rows_T * Kernel::padded_depth(kC));
    scores = arena.take<A>(rows_T * kC);
    grad_scores = arena.take<A>(rows_T * kC);
    bias = arena.take<A>(p.has_mask ? p.T * kC : 0);
    keep = arena.take<A>(p.dropout > 0 ? p.T * kC : 0);
    grad_query = arena.take<A>(rows_T * round_up(p.E, kC));
    grad_key = arena.take<A>(round_up(p.keys, kC) * p.E);
    grad_value = arena.take<A>(round_up(p.keys, kC) * p.Ev);
    transposed = arena.take<A>(round_up(widest, kR) * kC);
    rows = arena.take<A>(kC * round_up(widest, 16));
    delta = arena.take<A>(p.T);
    queries = arena.take<Stretch>(p.ranges != nullptr ? round_up(p.keys, kC) / kC : 0);
    bytes = arena.used();
  }
};

// Fills `queries`: for each block of kC keys the first query that sees one, and the last.
template <int64_t kC>
void find_queries(const AttentionProblem& p, Stretch* queries) {
  for (int64_t i = 0; i < round_up(p.keys, kC) / kC; ++i) queries[i] = {p.T, 0};
  for (int64_t t = 0; t < p.T; ++t) {
    const KeyRange range = p.ranges[t];
    if (range.begin == range.end) continue;
    for (int64_t i = range.begin / kC; i <= (range.end - 1) / kC; ++i) {
      if (t < queries[i].begin) queries[i].begin = t;
      queries[i].end = t + 1;
    }
  }
}

// target (kC, width) += transposed (width, kC)^T
template <class A, int64_t kC>
void add_transposed(const A* transposed, int64_t width, A* rows, A* target) {
  const int64_t stride = round_up(width, 16);
  transpose_block(transposed, kC, width, kC, rows, stride);
  for (int64_t c = 0; c < kC; ++c) {
    for (int64_t e = 0; e < width; ++e) target[c * width + e] += rows[c * stride + e];
  }
}

// Adds the share of one query head to grad_key and grad_value, and stores its grad_query.
template <class Kernel, class T>
void backward_query_head(const AttentionProblem& p, const BackwardBuffers<Kernel>& buffers,
                         int64_t batch, int64_t head, int64_t key_head) {
  using A = typename Kernel::Accumulator;
  constexpr int64_t kC = Kernel::kColumns, kR = Kernel::kRows;
  const T* query = head_of<T>(p.query, batch, head);
  const T* key = head_of<T>(p.key, batch, key_head);
  const T* value = head_of<T>(p.value, batch, key_head);
  const T* output = head_of<T>(p.output, batch, head);
  const T* grad = head_of<T>(p.grad_output, batch, head);
  const HeadView &q = p.query, &k = p.key, &v = p.value, &g = p.grad_output;
  const A scale = static_cast<A>(p.scale);
  const A* log_sums = log_sums_of<A>(p, batch, head);
  pack_rows<Kernel>(query, q.row_stride, q.column_stride, p.T, p.E, buffers.query_rows);
  pack_rows<Kernel>(grad, g.row_stride, g.column_stride, p.T, p.Ev, buffers.grad_rows);
  pack_rows<Kernel>(query, q.column_stride, q.row_stride, p.E, p.T, buffers.query_columns);
  pack_rows<Kernel>(grad, g.column_stride, g.row_stride, p.Ev, p.T, buffers.grad_columns);
  for (int64_t t = 0; t < p.T; ++t) {
    A sums[16] = {};
    const T* grad_row = grad + t * g.row_stride;
    const T* output_row = output + t * p.output.row_stride;
    for (int64_t e = 0; e < p.Ev; ++e) {
      sums[e % 16] +=
          load<A>(grad_row[e * g.column_stride]) * load<A>(output_row[e * p.output.column_stride]);
    }
    A sum = 0;
    for (A part : sums) sum += part;
    buffers.delta[t] = sum;
  }
  const int64_t width_E = round_up(p.E, kC);
  const int64_t rows_T = round_up(p.T, kR);
  __builtin_memset(buffers.grad_query, 0, static_cast<size_t>(rows_T * width_E) * sizeof(A));

  for (int64_t s0 = 0; s0 < p.keys; s0 += kC) {
    // Queries from `first` to `end` see these keys; a whole panel of rows begins there.
    const Stretch seeing =
        p.ranges != nullptr ? buffers.queries[s0 / kC] : Stretch{p.causal ? s0 : 0, p.T};
    if (seeing.begin >= seeing.end) continue;
    const int64_t first = seeing.begin / kR * kR, end = seeing.end;
    const int64_t count = p.keys - s0 < kC ? p.keys - s0 : kC;
    const int64_t depth = end - first, rows = round_up(end, kR) - first;
    pack_columns<Kernel>(key + s0 * k.row_stride, k.column_stride, k.row_stride, count, p.E,
                         buffers.key_panel);
    pack_columns<Kernel>(value + s0 * v.row_stride, v.column_stride, v.row_stride, count, p.Ev,
                         buffers.value_panel);
    pack_columns<Kernel>(key + s0 * k.row_stride, k.row_stride, k.column_stride, p.E, count,
                         buffers.key_rows_panel);
    multiply_panels<Kernel>(rows, kC, p.E, buffers.query_rows + first * Kernel::padded_depth(p.E),
                            buffers.key_panel, buffers.scores, kC, false);
    multiply_panels<Kernel>(rows, kC, p.Ev, buffers.grad_rows + first * Kernel::padded_depth(p.Ev),
                            buffers.value_panel, buffers.grad_scores, kC, false);
    for (int64_t t = first; t < end; ++t) {
      A* TS_RESTRICT probability = buffers.scores + (t - first) * kC;
      A* TS_RESTRICT grad_score = buffers.grad_scores + (t - first) * kC;
      const A log_sum = log_sums[t], delta = buffers.delta[t];
      int64_t hidden = 0, visible = p.causal ? clamp_to(t - s0 + 1, count) : count;
      if (p.ranges != nullptr) {
        hidden = clamp_to(p.ranges[t].begin - s0, count);
        visible = clamp_to(p.ranges[t].end - s0, count);
      }
      if (p.has_mask) {
        read_mask(p, batch, head, t, s0, count, buffers.bias, 1);
        for (int64_t c = 0; c < kC; ++c) {
          probability[c] =
              math::exp(scale * probability[c] + (c < count ? buffers.bias[c] : A(0)) - log_sum);
        }
      } else {
        for (int64_t c = 0; c < kC; ++c) {
          probability[c] = math::exp(scale * probability[c] - log_sum);
        }
      }
      for (int64_t c = 0; c < hidden; ++c) probability[c] = 0;
      for (int64_t c = visible; c < kC; ++c) probability[c] = 0;
      if (p.dropout > 0) {
        draw_dropout(p, batch, head, t, s0, count, buffers.keep, 1);
        for (int64_t c = hidden; c < visible; ++c) {
          grad_score[c] = probability[c] * (grad_score[c] * buffers.keep[c] - delta);
          probability[c] *= buffers.keep[c];
        }
      } else {
        for (int64_t c = 0; c < kC; ++c) {
          grad_score[c] = probability[c] * (grad_score[c] - delta);
        }
      }
      for (int64_t c = 0; c < hidden; ++c) grad_score[c] = 0;
      for (int64_t c = visible; c < kC; ++c) grad_score[c] = 0;
    }
    const auto* panel = as_panel<Kernel>(buffers.scores, depth, buffers.panel);
    multiply_panels<Kernel>(round_up(p.Ev, kR), kC, depth,
                            buffers.grad_columns + Kernel::padded_depth(first) * kR, panel,
                            buffers.transposed, kC, false, p.T);
    add_transposed<A, kC>(buffers.transposed, p.Ev, buffers.rows, buffers.grad_value + s0 * p.Ev);
    panel = as_panel<Kernel>(buffers.grad_scores, depth, buffers.panel);
    multiply_panels<Kernel>(round_up(p.E, kR), kC, depth,
                            buffers.query_columns + Kernel::padded_depth(first) * kR, panel,
                            buffers.transposed, kC, false, p.T);
    add_transposed<A, kC>(buffers.transposed, p.E, buffers.rows, buffers.grad_key + s0 * p.E);
    pack_rows<Kernel>(buffers.grad_scores, kC, 1, depth, count, buffers.left);
    multiply_panels<Kernel>(rows, width_E, count, buffers.left, buffers.key_rows_panel,
                            buffers.grad_query + first * width_E, width_E, true);
  }
  store_rows(buffers.grad_query, width_E, p.T, p.E, scale,
             mutable_head_of<T>(p.grad_query, batch, head), p.grad_query.row_stride,
             p.grad_query.column_stride);
}

// Keys that the sample does not have.
template <class T>
void clear_padding(const AttentionProblem& p, const HeadView& grad, int64_t columns, int64_t batch,
                   int64_t key_head) {
  T* const rows = mutable_head_of<T>(grad, batch, key_head);
  for (int64_t s = p.keys; s < p.S; ++s) {
    for (int64_t e = 0; e < columns; ++e) {
      rows[s * grad.row_stride + e * grad.column_stride] = store<T>(0.0f);
    }
  }
}

template <class Kernel, class T>
void backward(const AttentionProblem& p, int64_t batch, int64_t key_head, void* scratch) {
  using A = typename Kernel::Accumulator;
  constexpr int64_t kC = Kernel::kColumns;
  const BackwardBuffers<Kernel> buffers(p, scratch);
  const int64_t group = p.H / p.Hk;
  __builtin_memset(buffers.grad_key, 0,
                   static_cast<size_t>(round_up(p.keys, kC) * p.E) * sizeof(A));
  __builtin_memset(buffers.grad_value, 0,
                   static_cast<size_t>(round_up(p.keys, kC) * p.Ev) * sizeof(A));
  if (p.ranges != nullptr) find_queries<kC>(p, buffers.queries);
  Kernel::begin();
  for (int64_t i = 0; i < group; ++i) {
    backward_query_head<Kernel, T>(p, buffers, batch, key_head * group + i, key_head);
  }
  Kernel::end();
  store_rows(buffers.grad_key, p.E, p.keys, p.E, static_cast<A>(p.scale),
             mutable_head_of<T>(p.grad_key, batch, key_head), p.grad_key.row_stride,
             p.grad_key.column_stride);
  store_rows(buffers.grad_value, p.Ev, p.keys, p.Ev, A(1),
             mutable_head_of<T>(p.grad_value, batch, key_head), p.grad_value.row_stride,
             p.grad_value.column_stride);
  clear_padding<T>(p, p.grad_key, p.E, batch, key_head);
  clear_padding<T>(p, p.grad_value, p.Ev, batch, key_head);
}

// f32 in three bf16 parts (gemm_split.h): not for few queries, whose time is the packing of keys
// and values.
bool splits(const AttentionProblem& p) {
  return p.isa == Isa::kAmx && p.dtype == kF32 && p.T >= 32;
}

#if defined(TESSERA_AMX_KERNEL)
// The exponent of the largest magnitude; 0 where all are zero, of which every product is exact.
int largest_exponent(const HeadView& view, int64_t batch, int64_t head, int64_t rows,
                     int64_t columns) {
  const float* data = head_of<float>(view, batch, head);
  uint32_t largest = 0;
  for (int64_t i = 0; i < rows; ++i) {
    const float* row = data + i * view.row_stride;
    for (int64_t j = 0; j < columns; ++j) {
      const uint32_t magnitude =
          __builtin_bit_cast(uint32_t, row[j * view.column_stride]) & 0x7fffffff;
      largest = magnitude > largest ? magnitude : largest;
    }
  }
  return largest == 0 ? 0 : SplitAmxKernel::exponent_of(largest);
}

// From here on products of probabilities and gradients come near the end of the range (infinities
// and NaN have the exponent 128).
constexpr int kLargestAttended = 30;
// What the tiles lose of a product, because it is subnormal, is at most 2^-126, thousands of times
// in a deep sum: less than f32's rounding of results whose largest terms are at least this. Scores
// need no such bound: what is lost of them is nothing in exp().
constexpr int kLeastAttended = -80;

bool splits_forward(const AttentionProblem& p, int64_t batch, int64_t head) {
  if (!splits(p)) return false;
  const int64_t key_head = head / (p.H / p.Hk);
  const int q = largest_exponent(p.query, batch, head, p.T, p.E);
  const int k = largest_exponent(p.key, batch, key_head, p.keys, p.E);
  const int v = largest_exponent(p.value, batch, key_head, p.keys, p.Ev);
  return q < kLargestAttended && k < kLargestAttended && v < kLargestAttended &&
         v >= kLeastAttended;
}

bool splits_backward(const AttentionProblem& p, int64_t batch, int64_t key_head) {
  if (!splits(p)) return false;
  const int k = largest_exponent(p.key, batch, key_head, p.keys, p.E);
  const int v = largest_exponent(p.value, batch, key_head, p.keys, p.Ev);
  if (k >= kLargestAttended || v >= kLargestAttended) return false;
  const int64_t group = p.H / p.Hk;
  for (int64_t i = key_head * group; i < (key_head + 1) * group; ++i) {
    const int q = largest_exponent(p.query, batch, i, p.T, p.E);
    const int g = largest_exponent(p.grad_output, batch, i, p.T, p.Ev);
    if (q >= kLargestAttended || g >= kLargestAttended) return false;
    // Of the gradients of value, scores, query and key.
    for (const int product : {g, g + v, g + v + k, g + v + q}) {
      if (product < kLeastAttended) return false;
    }
  }
  return true;
}
#else
bool splits_forward(const AttentionProblem&, int64_t, int64_t) { return false; }
bool splits_backward(const AttentionProblem&, int64_t, int64_t) { return false; }
#endif

// Calls f<Kernel, T>() for the problem's dtype; `split`: f32 in parts.
template <class F>
auto with_kernel(const AttentionProblem& p, [[maybe_unused]] bool split, F&& f) {
#if defined(TESSERA_AMX_KERNEL)
  if (p.isa == Isa::kAmx && p.dtype == kBF16) return f.template operator()<AmxKernel, bf16>();
  if (split) return f.template operator()<SplitAmxKernel, float>();
#endif
#if defined(TESSERA_DOT_KERNEL)
  if (p.isa == Isa::kBf16 && p.dtype == kBF16) {
    return f.template operator()<AttentionDotKernel, bf16>();
  }
#endif
  switch (p.dtype) {
    case kF64:
      return f.template operator()<FmaKernel<double>, double>();
    case kF16:
      return f.template operator()<FmaKernel<float>, f16>();
    case kBF16:
      return f.template operator()<FmaKernel<float>, bf16>();
    default:
      return f.template operator()<FmaKernel<float>, float>();
  }
}

}  // namespace

int64_t attention_scratch_bytes(const AttentionProblem& p, bool is_backward) {
  if (!is_backward && reads_in_place(p)) {
    return with_products(p, [&]<class P, class T>() { return RowBuffers<P>(p, nullptr).bytes; });
  }
  int64_t most = 0;
  for (const bool split : {false, splits(p)}) {
    const int64_t bytes = with_kernel(p, split, [&]<class Kernel, class T>() {
      return is_backward ? BackwardBuffers<Kernel>(p, nullptr).bytes
                         : ForwardBuffers<Kernel>(p, nullptr).bytes;
    });
    most = bytes > most ? bytes : most;
  }
  return most;
}

void attention_head(const AttentionProblem& p, int64_t batch, int64_t head, void* scratch) {
  with_kernel(p, splits_forward(p, batch, head),
              [&]<class Kernel, class T>() { forward<Kernel, T>(p, batch, head, scratch); });
}

void attention_rows(const AttentionProblem& p, int64_t batch, int64_t key_head, int64_t first,
                    void* scratch) {
  with_products(
      p, [&]<class P, class T>() { forward_rows<P, T>(p, batch, key_head, first, scratch); });
}

void attention_head_backward(const AttentionProblem& p, int64_t batch, int64_t key_head,
                             void* scratch) {
  with_kernel(p, splits_backward(p, batch, key_head),
              [&]<class Kernel, class T>() { backward<Kernel, T>(p, batch, key_head, scratch); });
}

}  // namespace tessera::kernels::TS_SIMD
