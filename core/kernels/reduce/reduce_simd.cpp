#include <tessera/core/kernels/common/lanes.h>
#include <tessera/core/kernels/reduce/reduce_blocks.h>
#include <tessera/core/math.h>

namespace tessera::kernels::TS_SIMD {
namespace {

// The steps of folds, on numbers and on packs: a is the result so far, v an element.
struct Add {
  TS_HD auto operator()(auto a, auto v) const { return a + v; }
};
struct Multiply {
  TS_HD auto operator()(auto a, auto v) const { return a * v; }
};
struct Larger {  // NaN stays
  TS_HD auto operator()(auto a, auto v) const { return (v > a) | (v != v) ? v : a; }
};
struct Smaller {
  TS_HD auto operator()(auto a, auto v) const { return (v < a) | (v != v) ? v : a; }
};
template <class Step>
struct OfMagnitude {
  TS_HD auto operator()(auto a, auto v) const { return Step{}(a, v < 0 ? -v : v); }
};
struct AddSquare {
  TS_HD auto operator()(auto a, auto v) const { return a + v * v; }
};
struct Count {
  TS_HD auto operator()(auto a, auto v) const {
    return v != 0 ? a + 1 : a;  // NaN counts
  }
};

// Calls f(lane type tag, step, join) with what a fold is made of. Products, squares and counts of
// floats take f64 lanes: they leave float's range or precision soonest.
template <class C, class F>
TS_HD void visit_fold(Fold fold, F&& f) {
  constexpr bool kFloat = std::is_floating_point_v<C>;
  switch (fold) {
    case Fold::kProd:
      return f(Wide<C>{}, Multiply{}, Multiply{});
    case Fold::kMax:
      return f(C{}, Larger{}, Larger{});
    case Fold::kMin:
      return f(C{}, Smaller{}, Smaller{});
    case Fold::kCountNonzero:
      return f(C{}, Count{}, Add{});
    default:
      break;
  }
  if constexpr (kFloat) {
    switch (fold) {
      case Fold::kSumAbs:
        return f(C{}, OfMagnitude<Add>{}, Add{});
      case Fold::kMaxAbs:
        return f(C{}, OfMagnitude<Larger>{}, Larger{});
      case Fold::kMinAbs:
        return f(C{}, OfMagnitude<Smaller>{}, Smaller{});
      case Fold::kSumSquares:
        return f(Wide<C>{}, AddSquare{}, Add{});
      default:
        break;
    }
  }
  return f(C{}, Add{}, Add{});
}

// Folds whose elements are first turned into summands.
TS_HD bool has_summands(Fold fold) {
  return fold == Fold::kSumPowers || fold == Fold::kSumSquaredDeviations || fold == Fold::kSumExp;
}
// shift_at(i) is the shift of element i.
template <class C, class Shift>
TS_HD void make_summands(Fold fold, double p, const C* TS_RESTRICT x, int64_t n, Shift&& shift_at,
                         Wide<C>* TS_RESTRICT y) {
  if (fold == Fold::kSumExp) {
    for (int64_t i = 0; i < n; ++i) y[i] = math::exp(x[i] - static_cast<C>(shift_at(i)));
  } else if (fold == Fold::kSumSquaredDeviations) {
    for (int64_t i = 0; i < n; ++i) {
      const Wide<C> deviation = static_cast<Wide<C>>(x[i]) - shift_at(i);
      y[i] = deviation * deviation;
    }
  } else {
    for (int64_t i = 0; i < n; ++i) y[i] = __builtin_pow(absolute(static_cast<double>(x[i])), p);
  }
}

// One row in blocks: lanes of L inside a block, Wide above.
template <class L, class C, class Step, class Join>
TS_HD Wide<C> fold_row(const C* x, int64_t n, L neutral, Step step, Join join) {
  Wide<C> result =
      static_cast<Wide<C>>(fold_lanes(x, n < kBlock ? n : kBlock, neutral, step, join));
  for (int64_t begin = kBlock; begin < n; begin += kBlock) {
    const int64_t count = n - begin < kBlock ? n - begin : kBlock;
    result = join(result, static_cast<Wide<C>>(fold_lanes(x + begin, count, neutral, step, join)));
  }
  return result;
}

// One row of x joined to accumulators; four rows at a time, so that those are read and written once
// for four elements.
template <class L, class C, class Step>
TS_HD void step_columns(const C* const* rows, int count, int64_t columns, L* accumulators,
                        Step step) {
  constexpr int kSize = PackOf<L>::kSize;
  int64_t c = 0;
  if (count == 4) {
    for (; c + kSize <= columns; c += kSize) {
      Pack<L> a = load_pack<L>(accumulators + c);
      a = step(a, load_pack<L>(rows[0] + c));
      a = step(a, load_pack<L>(rows[1] + c));
      a = step(a, load_pack<L>(rows[2] + c));
      a = step(a, load_pack<L>(rows[3] + c));
      store_pack(accumulators + c, a);
    }
  } else {
    for (; c + kSize <= columns; c += kSize) {
      Pack<L> a = load_pack<L>(accumulators + c);
      for (int r = 0; r < count; ++r) a = step(a, load_pack<L>(rows[r] + c));
      store_pack(accumulators + c, a);
    }
  }
  for (; c < columns; ++c) {
    L a = accumulators[c];
    for (int r = 0; r < count; ++r) a = step(a, static_cast<L>(rows[r][c]));
    accumulators[c] = a;
  }
}

constexpr int64_t kFlushRows = 32;  // rows that are added in lanes before they join Wide

}  // namespace

template <class C>
void fold_rows(Fold fold, double p, const C* x, int64_t rows, int64_t row_stride, int64_t n,
               const Wide<C>* shift, Wide<C>* out) {
  if constexpr (std::is_floating_point_v<C>) {
    if (has_summands(fold)) {
      Wide<C> summands[kBlock];
      for (int64_t r = 0; r < rows; ++r) {
        const Wide<C> row_shift = shift != nullptr ? shift[r] : 0;
        Wide<C> result = 0;
        for (int64_t begin = 0; begin < n; begin += kBlock) {
          const int64_t count = n - begin < kBlock ? n - begin : kBlock;
          make_summands(
              fold, p, x + r * row_stride + begin, count,
              [&](int64_t) TS_LANES { return row_shift; }, summands);
          result += fold_lanes(summands, count, Wide<C>(0), Add{}, Add{});
        }
        out[r] = result;
      }
      return;
    }
  }
  visit_fold<C>(fold, [&]<class L>(L, auto step, auto join) TS_LANES {
    const L neutral = neutral_of<L>(fold);
    for (int64_t r = 0; r < rows; ++r) {
      out[r] = fold_row<L>(x + r * row_stride, n, neutral, step, join);
    }
  });
}

template <class C>
void fold_columns(Fold fold, double p, const C* x, int64_t rows, int64_t row_stride,
                  int64_t columns, const Wide<C>* shift, Wide<C>* out) {
  if constexpr (std::is_floating_point_v<C>) {
    if (has_summands(fold)) {
      Wide<C> summands[kColumnTile];
      for (int64_t r = 0; r < rows; ++r) {
        make_summands(
            fold, p, x + r * row_stride, columns,
            [&](int64_t c) TS_LANES { return shift != nullptr ? shift[c] : Wide<C>(0); }, summands);
        for (int64_t c = 0; c < columns; ++c) out[c] += summands[c];
      }
      return;
    }
  }
  visit_fold<C>(fold, [&]<class L>(L, auto step, auto join) TS_LANES {
    const L neutral = neutral_of<L>(fold);
    alignas(64) L accumulators[kColumnTile];
    for (int64_t begin = 0; begin < rows; begin += kFlushRows) {
      const int64_t end = rows - begin < kFlushRows ? rows : begin + kFlushRows;
      for (int64_t c = 0; c < columns; ++c) accumulators[c] = neutral;
      for (int64_t r = begin; r < end; r += 4) {
        const C* four[4] = {};
        const int count = end - r < 4 ? static_cast<int>(end - r) : 4;
        for (int i = 0; i < count; ++i) four[i] = x + (r + i) * row_stride;
        step_columns(four, count, columns, accumulators, step);
      }
      for (int64_t c = 0; c < columns; ++c) {
        out[c] = join(out[c], static_cast<Wide<C>>(accumulators[c]));
      }
    }
  });
}

template <class W>
void join_wide(Fold fold, W* a, const W* b, int64_t n) {
  visit_fold<W>(fold, [&](W, auto, auto join) TS_LANES {
    for (int64_t i = 0; i < n; ++i) a[i] = join(a[i], b[i]);
  });
}

template <class C>
void extremum_row(bool largest, const C* x, int64_t n, int64_t base, C& value, int64_t& index) {
  if (n == 0 || (index >= 0 && value != value)) return;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t count = n - begin < kBlock ? n - begin : kBlock;
    const C* block = x + begin;
    const C best = largest ? fold_lanes(block, count, block[0], Larger{}, Larger{})
                           : fold_lanes(block, count, block[0], Smaller{}, Smaller{});
    const bool better = index < 0 || best != best || (largest ? best > value : best < value);
    if (!better) continue;
    int64_t i = 0;
    if (best != best) {
      while (block[i] == block[i]) ++i;
    } else {
      while (block[i] != best) ++i;
    }
    value = best;
    index = base + begin + i;
    if (best != best) return;
  }
}

template <class C>
void extremum_columns(bool largest, const C* TS_RESTRICT x, int64_t n, int64_t position,
                      C* TS_RESTRICT values, int64_t* TS_RESTRICT indices) {
  if (position == 0) {
    for (int64_t c = 0; c < n; ++c) {
      values[c] = x[c];
      indices[c] = 0;
    }
    return;
  }
  for (int64_t c = 0; c < n; ++c) {
    const C v = x[c], best = values[c];
    const bool better = (best == best) & ((largest ? v > best : v < best) | (v != v));
    values[c] = better ? v : best;
    indices[c] = better ? position : indices[c];
  }
}

// Four doubles; two of them are a block of a running sum on every instruction set, so that all give
// the same bits.
typedef double Four __attribute__((vector_size(32)));

TS_HD Four load_four(const float* x) {
  typedef float Floats __attribute__((vector_size(16), aligned(4), may_alias));
  return __builtin_convertvector(*reinterpret_cast<const Floats*>(x), Four);
}
TS_HD Four load_four(const double* x) {
  typedef double Doubles __attribute__((vector_size(32), aligned(8), may_alias));
  return *reinterpret_cast<const Doubles*>(x);
}
TS_HD void store_four(float* y, Four values) {
  typedef float Floats __attribute__((vector_size(16)));
  typedef float Target __attribute__((vector_size(16), aligned(4), may_alias));
  *reinterpret_cast<Target*>(y) = __builtin_convertvector(values, Floats);
}
TS_HD void store_four(double* y, Four values) {
  typedef double Target __attribute__((vector_size(32), aligned(8), may_alias));
  *reinterpret_cast<Target*>(y) = values;
}

// The sums of v[0], v[0..1], v[0..2] and v[0..3].
TS_HD Four sums_up_to(Four v) {
  v += __builtin_shufflevector(Four{}, v, 0, 4, 5, 6);
  return v + __builtin_shufflevector(Four{}, v, 0, 0, 4, 5);
}
// And of v[0..3], v[1..3], v[2..3], v[3].
TS_HD Four sums_from(Four v) {
  v += __builtin_shufflevector(Four{}, v, 5, 6, 7, 0);
  return v + __builtin_shufflevector(Four{}, v, 6, 7, 0, 0);
}

// Running sums of eight elements at a time: one addition of the chain for eight, not for each.
// Returns how many of the n elements it has done, from the end that the sums begin at.
template <class C>
TS_HD int64_t add_by_eights(bool reverse, const C* x, int64_t n, double& carry, C* y) {
  int64_t done = 0;
  for (; done + 8 <= n; done += 8) {
    const int64_t at = reverse ? n - done - 8 : done;
    Four low = load_four(x + at), high = load_four(x + at + 4);
    if (reverse) {
      low = sums_from(low), high = sums_from(high);
      low += high[0];
    } else {
      low = sums_up_to(low), high = sums_up_to(high);
      high += low[3];
    }
    store_four(y + at, low + carry);
    store_four(y + at + 4, high + carry);
    carry += reverse ? low[0] : high[3];
  }
  return done;
}

template <class C>
void scan_row(bool product, bool reverse, const C* x, int64_t n, Wide<C>& carry, C* y) {
  int64_t i = 0;
  if constexpr (std::is_floating_point_v<C>) {
    if (!product) i = add_by_eights(reverse, x, n, carry, y);
  }
  Wide<C> running = carry;
  for (; i < n; ++i) {
    const int64_t at = reverse ? n - 1 - i : i;
    running =
        product ? running * static_cast<Wide<C>>(x[at]) : running + static_cast<Wide<C>>(x[at]);
    y[at] = static_cast<C>(running);
  }
  carry = running;
}

template <class C>
void scan_columns(bool product, const C* TS_RESTRICT x, int64_t n, Wide<C>* TS_RESTRICT carry,
                  C* TS_RESTRICT y) {
  if (product) {
    for (int64_t c = 0; c < n; ++c) carry[c] *= static_cast<Wide<C>>(x[c]);
  } else {
    for (int64_t c = 0; c < n; ++c) carry[c] += static_cast<Wide<C>>(x[c]);
  }
  for (int64_t c = 0; c < n; ++c) y[c] = static_cast<C>(carry[c]);
}

#define TS_INSTANTIATE(C)                                                                          \
  template void fold_rows<C>(Fold, double, const C*, int64_t, int64_t, int64_t, const Wide<C>*,    \
                             Wide<C>*);                                                            \
  template void fold_columns<C>(Fold, double, const C*, int64_t, int64_t, int64_t, const Wide<C>*, \
                                Wide<C>*);                                                         \
  template void extremum_row<C>(bool, const C*, int64_t, int64_t, C&, int64_t&);                   \
  template void extremum_columns<C>(bool, const C*, int64_t, int64_t, C*, int64_t*);               \
  template void scan_row<C>(bool, bool, const C*, int64_t, Wide<C>&, C*);                          \
  template void scan_columns<C>(bool, const C*, int64_t, Wide<C>*, C*);
TS_INSTANTIATE(float)
TS_INSTANTIATE(double)
TS_INSTANTIATE(int64_t)
#undef TS_INSTANTIATE
template void join_wide<double>(Fold, double*, const double*, int64_t);
template void join_wide<int64_t>(Fold, int64_t*, const int64_t*, int64_t);

}  // namespace tessera::kernels::TS_SIMD
