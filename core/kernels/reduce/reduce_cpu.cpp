#include <tessera/core/kernels/reduce/reduce.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include <tessera/core/dispatch.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/common/strided.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/reduce/reduce_fold.h>
#include <tessera/core/parallel.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera::kernels {
namespace {

constexpr int64_t kReduceStage = 1024;    // elements converted at a time: the block of the lanes
constexpr int64_t kSplitUnit = 16384;     // a long row is shared out in pieces of this length
constexpr int64_t kWorkPerGroup = 65536;  // elements for which another group of partials pays
constexpr int64_t kMaxGroups = 64;        // groups of partials of one output
constexpr int64_t kEnoughOutputs = 64;    // outputs from which they alone feed all threads
constexpr int64_t kReduceWork = 1 << 15;  // elements a thread is worth waking for

struct Dimensions {
  std::vector<int64_t> sizes, strides;
  int count() const { return static_cast<int>(sizes.size()); }
  int64_t numel() const {
    return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
  }
  void add(int64_t size, int64_t stride) {
    if (size == 1) return;
    if (count() > 0 && strides.back() == size * stride) {
      sizes.back() *= size;
      strides.back() = stride;
    } else {
      sizes.push_back(size);
      strides.push_back(stride);
    }
  }
  void erase(int i) {
    sizes.erase(sizes.begin() + i);
    strides.erase(strides.begin() + i);
  }
};

// A position in some dimensions and its offset.
class Odometer {
 public:
  explicit Odometer(const Dimensions& dims) : dims_(dims) {}
  Odometer(const Dimensions& dims, int64_t position) : Odometer(dims) {
    for (int d = dims_.count() - 1; d >= 0; --d) {
      const size_t i = static_cast<size_t>(d);
      index_[i] = position % dims_.sizes[i];
      position /= dims_.sizes[i];
      offset_ += index_[i] * dims_.strides[i];
    }
  }
  int64_t offset() const { return offset_; }
  void next() {
    for (int d = dims_.count() - 1; d >= 0; --d) {
      const size_t i = static_cast<size_t>(d);
      offset_ += dims_.strides[i];
      if (++index_[i] < dims_.sizes[i]) return;
      offset_ -= index_[i] * dims_.strides[i];
      index_[i] = 0;
    }
  }

 private:
  const Dimensions& dims_;
  int64_t index_[kMaxDims] = {};
  int64_t offset_ = 0;
};

void check_not_fp8(const char* where, const Tensor& x) {
  TS_CHECK_DTYPE(!is_fp8(x.dtype()), where, "does not calculate with fp8; got ", x,
                 "; convert with to(dtype)");
}

// A view of elements of a dtype that are read as C in blocks.
template <class C>
class Reader {
 public:
  explicit Reader(const Tensor& x)
      : data_(static_cast<const char*>(x.data())),
        item_(size_of(x.dtype())),
        direct_(x.dtype() == dtype_of<C>),
        load_(load_function(x.dtype(), lane_of(dtype_of<C>))) {}
  bool is_direct(int64_t stride) const { return direct_ && stride == 1; }
  const C* at(int64_t offset) const { return reinterpret_cast<const C*>(data_ + offset * item_); }
  // n elements from `offset` on: in place or in the buffer.
  const C* read(int64_t offset, int64_t stride, int64_t n, C* buffer) const {
    if (is_direct(stride)) return at(offset);
    load_(data_ + offset * item_, stride, buffer, n);
    return buffer;
  }

 private:
  const char* data_;
  int64_t item_;
  bool direct_;
  LoadFunction load_;
};

// One reduction.
template <class C>
class Reduction {
  using W = Wide<C>;

 public:
  Reduction(Fold fold, double p, const Tensor& x, const Shape& dims, const Tensor& shift,
            const Tensor& result, const Finish& finish)
      : fold_(fold),
        p_(p),
        reader_(x),
        shift_(shift.defined() ? shift.data_as<W>() : nullptr),
        target_(static_cast<char*>(result.data())),
        target_item_(size_of(result.dtype())),
        store_(store_function(lane_of(dtype_of<C>) == Lane::kInt64 ? Lane::kInt64 : Lane::kDouble,
                              result.dtype())),
        finish_(finish) {
    std::vector<bool> is_reduced(static_cast<size_t>(x.dim()), false);
    for (int64_t d : dims) is_reduced[static_cast<size_t>(d)] = true;
    std::vector<std::pair<int64_t, int64_t>> reduced;  // stride, size
    for (int d = 0; d < x.dim(); ++d) {
      if (is_reduced[static_cast<size_t>(d)]) {
        reduced.push_back({x.strides()[d], x.shape()[d]});
      } else {
        kept_.add(x.shape()[d], x.strides()[d]);
      }
    }
    // The order of summation is that of memory.
    std::stable_sort(reduced.begin(), reduced.end(),
                     [](const auto& a, const auto& b) { return a.first > b.first; });
    for (const auto& [stride, size] : reduced) reduced_.add(size, stride);
    outputs_ = kept_.numel();
    terms_ = reduced_.numel();
  }

  void run() {
    if (outputs_ == 0) return;
    if (terms_ == 0) return fill_neutral();
    int column = -1;
    for (int d = 0; d < kept_.count(); ++d) {
      const size_t i = static_cast<size_t>(d);
      if (kept_.strides[i] == 0) continue;  // repeated outputs: their rows are the same elements
      if (column < 0 || kept_.strides[i] <= kept_.strides[static_cast<size_t>(column)]) column = d;
    }
    const bool by_rows = reduced_.count() == 0 || column < 0 ||
                         reduced_.strides.back() < kept_.strides[static_cast<size_t>(column)];
    by_rows ? run_rows() : run_columns(column);
  }

 private:
  void fill_neutral() {
    std::vector<W> values(static_cast<size_t>(std::min(outputs_, kReduceStage)));
    for (int64_t begin = 0; begin < outputs_; begin += kReduceStage) {
      const int64_t count = std::min(kReduceStage, outputs_ - begin);
      std::fill(values.begin(), values.end(), neutral_of<W>(fold_));
      emit(values.data(), begin, 1, count);
    }
  }

  void emit(W* values, int64_t first, int64_t stride, int64_t count) const {
    if (finish_.kind != Finish::kAsIs) {
      for (int64_t i = 0; i < count; ++i) {
        const double shift =
            shift_ != nullptr ? static_cast<double>(shift_[first + i * stride]) : 0.0;
        values[i] = finished(finish_, values[i], shift);
      }
    }
    store_(values, target_ + first * target_item_, stride, count);
  }

  int64_t groups_for(int64_t items, int64_t units) const {
    if (items >= kEnoughOutputs) return 1;
    const int64_t wanted = (outputs_ * terms_ / items + kWorkPerGroup - 1) / kWorkPerGroup;
    return std::clamp<int64_t>(std::min(wanted, units), 1, kMaxGroups);
  }

  // ---- Rows: the innermost reduced dimension has the smallest stride
  // -----------------------------

  void run_rows() {
    const int64_t n = reduced_.count() > 0 ? reduced_.sizes.back() : 1;
    const int64_t stride = reduced_.count() > 0 ? reduced_.strides.back() : 1;
    Dimensions outer = reduced_;
    if (outer.count() > 0) outer.erase(outer.count() - 1);
    const int64_t pieces = (n + kSplitUnit - 1) / kSplitUnit;
    const int64_t units = outer.numel() * pieces;
    const int64_t groups = groups_for(outputs_, units);
    if (groups == 1 && outer.count() == 0) return run_plain_rows(n, stride);
    std::vector<W> partials(static_cast<size_t>(outputs_ * groups));
    const int64_t work = std::max<int64_t>(1, terms_ / groups);
    parallel_for(outputs_ * groups, std::max<int64_t>(1, kReduceWork / work),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t item = begin; item < end; ++item) {
                     partials[static_cast<size_t>(item)] =
                         fold_units(item / groups, units * (item % groups) / groups,
                                    units * (item % groups + 1) / groups, n, stride, pieces, outer);
                   }
                 });
    // partials: (outputs, groups)
    std::vector<W> values(static_cast<size_t>(std::min(outputs_, kReduceStage)));
    for (int64_t first = 0; first < outputs_; first += kReduceStage) {
      const int64_t count = std::min(kReduceStage, outputs_ - first);
      for (int64_t i = 0; i < count; ++i) {
        W* groups_of = partials.data() + (first + i) * groups;
        for (int64_t g = 1; g < groups; ++g) join(groups_of, groups_of + g, 1);
        values[static_cast<size_t>(i)] = groups_of[0];
      }
      emit(values.data(), first, 1, count);
    }
  }

  // A unit is one row or a piece of kSplitUnit elements of it.
  W fold_units(int64_t output, int64_t begin, int64_t end, int64_t n, int64_t stride,
               int64_t pieces, const Dimensions& outer) const {
    const int64_t base = Odometer(kept_, output).offset();
    Odometer row(outer, begin / pieces);
    W result = neutral_of<W>(fold_);
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t start = unit % pieces * kSplitUnit;
      const int64_t count = std::min(kSplitUnit, n - start);
      fold_run(base + row.offset() + start * stride, stride, count,
               shift_ != nullptr ? shift_ + output : nullptr, result);
      if (unit % pieces == pieces - 1) row.next();
    }
    return result;
  }

  // n elements joined to `result`.
  void fold_run(int64_t offset, int64_t stride, int64_t n, const W* shift, W& result) const {
    W value;
    if (reader_.is_direct(stride)) {
      TS_SIMD_CALL(fold_rows, fold_, p_, reader_.at(offset), 1, n, n, shift, &value);
      join(&result, &value, 1);
      return;
    }
    C buffer[kReduceStage];
    for (int64_t i = 0; i < n; i += kReduceStage) {
      const int64_t count = std::min(kReduceStage, n - i);
      const C* block = reader_.read(offset + i * stride, stride, count, buffer);
      TS_SIMD_CALL(fold_rows, fold_, p_, block, 1, count, count, shift, &value);
      join(&result, &value, 1);
    }
  }

  // One row for each output.
  void run_plain_rows(int64_t n, int64_t stride) const {
    const int last = kept_.count() - 1;
    const int64_t row_count = last >= 0 ? kept_.sizes[static_cast<size_t>(last)] : 1;
    const int64_t row_stride = last >= 0 ? kept_.strides[static_cast<size_t>(last)] : n;
    Dimensions outer = kept_;
    if (last >= 0) outer.erase(last);
    const bool direct = reader_.is_direct(stride);
    // Narrow rows that follow one another are converted several at a time.
    const bool packed = stride == 1 && row_stride == n && n <= kReduceStage;
    const int64_t batch = direct ? 256 : packed ? std::max<int64_t>(1, kReduceStage / n) : 1;
    parallel_for(outputs_, std::max<int64_t>(1, kReduceWork / n), [&](int64_t begin, int64_t end) {
      C buffer[kReduceStage];
      W values[kReduceStage];
      Odometer block(outer, begin / row_count);
      for (int64_t output = begin; output < end;) {
        const int64_t row = output % row_count;
        const int64_t count = std::min({batch, row_count - row, end - output, kReduceStage});
        const int64_t offset = block.offset() + row * row_stride;
        const W* shift = shift_ != nullptr ? shift_ + output : nullptr;
        if (direct) {
          TS_SIMD_CALL(fold_rows, fold_, p_, reader_.at(offset), count, row_stride, n, shift,
                       static_cast<W*>(values));
        } else if (packed) {
          const C* rows = reader_.read(offset, 1, count * n, buffer);
          TS_SIMD_CALL(fold_rows, fold_, p_, rows, count, n, n, shift, static_cast<W*>(values));
        } else {
          values[0] = neutral_of<W>(fold_);
          fold_run(offset, stride, n, shift, values[0]);
        }
        emit(values, output, 1, count);
        output += count;
        if (row + count == row_count) block.next();
      }
    });
  }

  // ---- Columns: a kept dimension has the smallest stride
  // -----------------------------------------

  void run_columns(int column) {
    const size_t c = static_cast<size_t>(column);
    const int64_t width = kept_.sizes[c], stride = kept_.strides[c];
    // Where the outputs of the column and of the other kept dimensions lie.
    Dimensions others = kept_, targets = kept_;
    int64_t target_stride = 1;
    for (int d = kept_.count() - 1; d >= 0; --d) {
      targets.strides[static_cast<size_t>(d)] = target_stride;
      target_stride *= kept_.sizes[static_cast<size_t>(d)];
    }
    const int64_t output_stride = targets.strides[c];
    others.erase(column);
    targets.erase(column);
    const int64_t tiles = (width + kColumnTile - 1) / kColumnTile;
    const int64_t items = others.numel() * tiles;
    const int64_t groups = groups_for(items, terms_);
    const int64_t tile_width = std::min(kColumnTile, width);
    const int64_t work = std::max<int64_t>(1, terms_ / groups * tile_width);
    std::vector<W> partials(groups > 1 ? static_cast<size_t>(items * groups * tile_width) : 0);
    const auto locate = [&](int64_t item, int64_t& offset, int64_t& first, int64_t& count) {
      const int64_t other = item / tiles, begin = item % tiles * kColumnTile;
      offset = Odometer(others, other).offset() + begin * stride;
      first = Odometer(targets, other).offset() + begin * output_stride;
      count = std::min(kColumnTile, width - begin);
    };
    parallel_for(items * groups, std::max<int64_t>(1, kReduceWork / work),
                 [&](int64_t begin, int64_t end) {
                   W local[kColumnTile];
                   for (int64_t i = begin; i < end; ++i) {
                     int64_t offset, first, count;
                     locate(i / groups, offset, first, count);
                     const int64_t g = i % groups;
                     W* values = groups > 1 ? partials.data() + i * tile_width : local;
                     std::fill_n(values, count, neutral_of<W>(fold_));
                     fold_tile(offset, stride, count, first, output_stride, terms_ * g / groups,
                               terms_ * (g + 1) / groups, values);
                     if (groups == 1) emit(values, first, output_stride, count);
                   }
                 });
    if (groups == 1) return;
    parallel_for(items, std::max<int64_t>(1, kReduceWork / (groups * tile_width)),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t item = begin; item < end; ++item) {
                     int64_t offset, first, count;
                     locate(item, offset, first, count);
                     W* values = partials.data() + item * groups * tile_width;
                     for (int64_t g = 1; g < groups; ++g) {
                       join(values, values + g * tile_width, count);
                     }
                     emit(values, first, output_stride, count);
                   }
                 });
  }

  // Terms [begin, end) of `count` neighbouring outputs.
  void fold_tile(int64_t offset, int64_t stride, int64_t count, int64_t first,
                 int64_t output_stride, int64_t begin, int64_t end, W* values) const {
    W shifts[kColumnTile];
    const W* shift = nullptr;
    if (shift_ != nullptr) {
      for (int64_t c = 0; c < count; ++c) shifts[c] = shift_[first + c * output_stride];
      shift = shifts;
    }
    const int64_t rows = reduced_.count() > 0 ? reduced_.sizes.back() : 1;
    const int64_t row_stride = reduced_.count() > 0 ? reduced_.strides.back() : 0;
    Dimensions outer = reduced_;
    if (outer.count() > 0) outer.erase(outer.count() - 1);
    constexpr int64_t kStagedRows = 16;
    C buffer[kStagedRows * kColumnTile];
    Odometer block(outer, begin / rows);
    for (int64_t term = begin; term < end;) {
      const int64_t row = term % rows;
      int64_t run = std::min(rows - row, end - term);
      const int64_t start = offset + block.offset() + row * row_stride;
      if (reader_.is_direct(stride)) {
        TS_SIMD_CALL(fold_columns, fold_, p_, reader_.at(start), run, row_stride, count, shift,
                     values);
      } else {
        run = std::min(run, kStagedRows);
        for (int64_t r = 0; r < run; ++r) {
          reader_.read(start + r * row_stride, stride, count, buffer + r * count);
        }
        TS_SIMD_CALL(fold_columns, fold_, p_, static_cast<const C*>(buffer), run, count, count,
                     shift, values);
      }
      term += run;
      if (row + run == rows) block.next();
    }
  }

  void join(W* a, const W* b, int64_t n) const { TS_SIMD_CALL(join_wide, fold_, a, b, n); }

  Fold fold_;
  double p_;
  Reader<C> reader_;
  const W* shift_;
  char* target_;
  int64_t target_item_;
  StoreFunction store_;
  Finish finish_;
  Dimensions kept_, reduced_;
  int64_t outputs_ = 0, terms_ = 0;
};

int64_t terms_of(const Tensor& x, const Shape& dims) {
  int64_t terms = 1;
  for (int64_t d : dims) terms *= x.shape()[static_cast<int>(d)];
  return terms;
}

// Sums in a narrower type than x's values are of converted values (torch converts first).
Tensor converted_for(const Tensor& x, DType dtype) {
  const bool loses = (lane_of(x.dtype()) == Lane::kDouble && lane_of(dtype) == Lane::kFloat) ||
                     (is_low_precision(dtype) && x.dtype() != dtype) ||
                     (is_floating(x.dtype()) && !is_floating(dtype)) ||
                     (dtype == kBool && x.dtype() != kBool);
  return loses ? convert(x, dtype) : x;
}

void check_extremum(const char* where, const Tensor& x, const Shape& dims) {
  TS_CHECK_INDEX(terms_of(x, dims) > 0, where, "needs at least one element; got ", x,
                 " reduced over dimensions ", dims);
}

}  // namespace

Tensor reduce(const char* where, Fold fold, double p, const Tensor& x, const Shape& dims,
              bool keepdim, DType compute, DType dtype, const Tensor& shift, const Finish& finish) {
  check_not_fp8(where, x);
  if (x.device().is_cuda()) {
    return on_cuda<kernels::reduce>(where, x.device(), where, fold, p, x, dims, keepdim, compute,
                                    dtype, shift, finish);
  }
  Tensor result = raw::empty(reduced_shape(x.shape(), dims, keepdim), dtype, x.device());
  if (x.is_meta()) return result;
  switch (lane_of(compute)) {
    case Lane::kFloat:
      Reduction<float>(fold, p, x, dims, shift, result, finish).run();
      break;
    case Lane::kDouble:
      Reduction<double>(fold, p, x, dims, shift, result, finish).run();
      break;
    default:
      Reduction<int64_t>(fold, p, x, dims, shift, result, finish).run();
  }
  return result;
}

Tensor sum(const Tensor& x, const Shape& dims, bool keepdim, DType dtype) {
  return reduce("sum", Fold::kSum, 0, converted_for(x, dtype), dims, keepdim, dtype, dtype, {}, {});
}

Tensor prod(const Tensor& x, const Shape& dims, bool keepdim, DType dtype) {
  return reduce("prod", Fold::kProd, 0, converted_for(x, dtype), dims, keepdim, dtype, dtype, {},
                {});
}

Tensor mean(const Tensor& x, const Shape& dims, bool keepdim) {
  return reduce("mean", Fold::kSum, 0, x, dims, keepdim, x.dtype(), x.dtype(), {},
                {Finish::kDivide, static_cast<double>(terms_of(x, dims))});
}

Moments moments(const Tensor& x, const Shape& dims, bool keepdim, double correction, bool root,
                DType dtype) {
  const double terms = static_cast<double>(terms_of(x, dims));
  const Tensor mean =
      reduce("var", Fold::kSum, 0, x, dims, keepdim, x.dtype(), kF64, {}, {Finish::kDivide, terms});
  const Tensor variance =
      reduce("var", Fold::kSumSquaredDeviations, 0, x, dims, keepdim, x.dtype(), dtype, mean,
             {root ? Finish::kDivideRoot : Finish::kDivide, std::max(0.0, terms - correction)});
  return {convert(mean, dtype), variance};
}

Tensor amax(const Tensor& x, const Shape& dims, bool keepdim) {
  check_extremum("amax", x, dims);
  return reduce("amax", Fold::kMax, 0, x, dims, keepdim, x.dtype(), x.dtype(), {},
                {Finish::kZeroIsPositive});
}

Tensor amin(const Tensor& x, const Shape& dims, bool keepdim) {
  check_extremum("amin", x, dims);
  return reduce("amin", Fold::kMin, 0, x, dims, keepdim, x.dtype(), x.dtype(), {},
                {Finish::kZeroIsPositive});
}

Tensor any(const Tensor& x, const Shape& dims, bool keepdim) {
  return reduce("any", Fold::kCountNonzero, 0, x, dims, keepdim, x.dtype(), kBool, {}, {});
}

Tensor count_nonzero(const Tensor& x, const Shape& dims) {
  return reduce("count_nonzero", Fold::kCountNonzero, 0, x, dims, false, x.dtype(), kI64, {}, {});
}

Tensor all(const Tensor& x, const Shape& dims, bool keepdim) {
  return reduce("all", Fold::kCountNonzero, 0, x, dims, keepdim, x.dtype(), kBool, {},
                {Finish::kAll, static_cast<double>(terms_of(x, dims))});
}

Tensor norm(const Tensor& x, double p, const Shape& dims, bool keepdim) {
  const Fold fold = p == 0           ? Fold::kCountNonzero
                    : p == 1         ? Fold::kSumAbs
                    : p == 2         ? Fold::kSumSquares
                    : !std::isinf(p) ? Fold::kSumPowers
                    : p > 0          ? Fold::kMaxAbs
                                     : Fold::kMinAbs;
  if (fold == Fold::kMinAbs) check_extremum("norm", x, dims);
  const bool root = fold == Fold::kSumSquares || fold == Fold::kSumPowers;
  return reduce("norm", fold, p, x, dims, keepdim, x.dtype(), x.dtype(), {},
                {root ? Finish::kRoot : Finish::kAsIs, p});
}

Tensor logsumexp(const Tensor& x, const Shape& dims, bool keepdim) {
  // The shift is the largest element; 0 where that is infinite or there is none.
  const Tensor shift = reduce("logsumexp", Fold::kMax, 0, x, dims, keepdim, x.dtype(), kF64, {},
                              {Finish::kFiniteOrZero, 0});
  return reduce("logsumexp", Fold::kSumExp, 0, x, dims, keepdim, x.dtype(), x.dtype(), shift,
                {Finish::kLogPlusShift, 0});
}

Tensor sum_to(const Tensor& x, const Shape& shape) {
  if (x.shape() == shape) return x;
  TS_CHECK_SHAPE(broadcastable_to(shape, x.shape()), "sum_to", "shape ", shape,
                 " does not broadcast to that of x, ", x);
  const int leading = x.dim() - shape.size();
  Shape dims;
  for (int d = 0; d < x.dim(); ++d) {
    if (d < leading || (shape[d - leading] == 1 && x.shape()[d] != 1)) dims.push_back(d);
  }
  return raw::view(sum(x, dims, true, x.dtype()), shape);
}

namespace {

template <class C>
void extremum_in(const Tensor& x, const Around& a, bool largest, const Tensor& values,
                 const Tensor& indices) {
  const Reader<C> reader(x);
  const StoreFunction store = store_function(lane_of(dtype_of<C>), values.dtype());
  char* target = static_cast<char*>(values.data());
  const int64_t item = size_of(values.dtype());
  int64_t* positions = indices.data_as<int64_t>();
  if (a.inner == 1) {
    parallel_for(a.outer, std::max<int64_t>(1, kReduceWork / a.n), [&](int64_t begin, int64_t end) {
      C buffer[kReduceStage];
      for (int64_t row = begin; row < end; ++row) {
        C value{};
        int64_t index = -1;
        for (int64_t i = 0; i < a.n; i += kReduceStage) {
          const int64_t count = std::min(kReduceStage, a.n - i);
          const C* block = reader.read(row * a.n + i, 1, count, buffer);
          TS_SIMD_CALL(extremum_row, largest, block, count, i, value, index);
        }
        store(&value, target + row * item, 1, 1);
        positions[row] = index;
      }
    });
    return;
  }
  const int64_t tiles = (a.inner + kColumnTile - 1) / kColumnTile;
  const int64_t work = std::min(a.inner, kColumnTile) * a.n;
  parallel_for(a.outer * tiles, std::max<int64_t>(1, kReduceWork / work),
               [&](int64_t begin, int64_t end) {
                 C buffer[kColumnTile], best[kColumnTile];
                 for (int64_t i = begin; i < end; ++i) {
                   const int64_t block = i / tiles, column = i % tiles * kColumnTile;
                   const int64_t count = std::min(kColumnTile, a.inner - column);
                   const int64_t first = block * a.inner + column;
                   for (int64_t row = 0; row < a.n; ++row) {
                     const C* elements =
                         reader.read((block * a.n + row) * a.inner + column, 1, count, buffer);
                     TS_SIMD_CALL(extremum_columns, largest, elements, count, row,
                                  static_cast<C*>(best), positions + first);
                   }
                   store(best, target + first * item, 1, count);
                 }
               });
}

template <class C>
void scan(const Tensor& x, int dim, bool product, bool reverse, const Tensor& result) {
  const Around a(x, dim);
  const Reader<C> reader(x);
  const StoreFunction store = store_function(lane_of(dtype_of<C>), result.dtype());
  char* target = static_cast<char*>(result.data());
  const int64_t item = size_of(result.dtype());
  const Wide<C> start = product ? 1 : 0;
  if (a.inner == 1) {
    parallel_for(a.outer, std::max<int64_t>(1, kReduceWork / a.n), [&](int64_t begin, int64_t end) {
      C buffer[kReduceStage], sums[kReduceStage];
      for (int64_t row = begin; row < end; ++row) {
        Wide<C> carry = start;
        const int64_t blocks = (a.n + kReduceStage - 1) / kReduceStage;
        for (int64_t b = 0; b < blocks; ++b) {
          const int64_t i = (reverse ? blocks - 1 - b : b) * kReduceStage;
          const int64_t count = std::min(kReduceStage, a.n - i);
          const C* block = reader.read(row * a.n + i, 1, count, buffer);
          TS_SIMD_CALL(scan_row, product, reverse, block, count, carry, static_cast<C*>(sums));
          store(sums, target + (row * a.n + i) * item, 1, count);
        }
      }
    });
    return;
  }
  const int64_t tiles = (a.inner + kColumnTile - 1) / kColumnTile;
  const int64_t work = std::min(a.inner, kColumnTile) * a.n;
  parallel_for(a.outer * tiles, std::max<int64_t>(1, kReduceWork / work),
               [&](int64_t begin, int64_t end) {
                 C buffer[kColumnTile], sums[kColumnTile];
                 Wide<C> carry[kColumnTile];
                 for (int64_t i = begin; i < end; ++i) {
                   const int64_t column = i % tiles * kColumnTile;
                   const int64_t count = std::min(kColumnTile, a.inner - column);
                   std::fill_n(carry, count, start);
                   for (int64_t r = 0; r < a.n; ++r) {
                     const int64_t row = i / tiles * a.n + (reverse ? a.n - 1 - r : r);
                     const C* elements = reader.read(row * a.inner + column, 1, count, buffer);
                     TS_SIMD_CALL(scan_columns, product, elements, count,
                                  static_cast<Wide<C>*>(carry), static_cast<C*>(sums));
                     store(sums, target + (row * a.inner + column) * item, 1, count);
                   }
                 }
               });
}

Tensor scan_checked(const char* where, const Tensor& x, int dim, bool product, bool reverse,
                    DType dtype) {
  check_not_fp8(where, x);
  const Tensor result = raw::empty(x.shape(), dtype, x.device());
  if (x.is_meta() || x.numel() == 0) return result;
  const Tensor source = contiguous(converted_for(x, dtype));
  switch (lane_of(dtype)) {
    case Lane::kFloat:
      scan<float>(source, dim, product, reverse, result);
      break;
    case Lane::kDouble:
      scan<double>(source, dim, product, reverse, result);
      break;
    default:
      scan<int64_t>(source, dim, product, reverse, result);
  }
  return result;
}

}  // namespace

void find_extremum(const char* where, const Tensor& x, const Around& a, bool largest,
                   const Extremum& result) {
  if (x.device().is_cuda()) {
    return on_cuda<kernels::find_extremum>(where, x.device(), where, x, a, largest, result);
  }
  switch (lane_of(x.dtype())) {
    case Lane::kFloat:
      return extremum_in<float>(x, a, largest, result.values, result.indices);
    case Lane::kDouble:
      return extremum_in<double>(x, a, largest, result.values, result.indices);
    default:
      return extremum_in<int64_t>(x, a, largest, result.values, result.indices);
  }
}

Extremum extremum(const Tensor& x, int dim, bool keepdim, bool largest) {
  const char* where = largest ? "max" : "min";
  check_not_fp8(where, x);
  const Shape dims = x.dim() == 0 ? Shape{} : Shape{dim};
  const Shape shape = reduced_shape(x.shape(), dims, keepdim);
  Extremum result{raw::empty(shape, x.dtype(), x.device()), raw::empty(shape, kI64, x.device())};
  if (numel_of(shape) == 0) return result;
  check_extremum(where, x, dims);
  if (!x.is_meta()) find_extremum(where, contiguous(x), Around(x, dim), largest, result);
  return result;
}

Tensor cumsum(const Tensor& x, int dim, DType dtype, bool reverse) {
  if (x.device().is_cuda()) {
    return on_cuda<kernels::cumsum>("cumsum", x.device(), x, dim, dtype, reverse);
  }
  return scan_checked("cumsum", x, dim, false, reverse, dtype);
}

Tensor cumprod(const Tensor& x, int dim, DType dtype) {
  if (x.device().is_cuda()) {
    return on_cuda<kernels::cumprod>("cumprod", x.device(), x, dim, dtype);
  }
  return scan_checked("cumprod", x, dim, true, false, dtype);
}

}  // namespace tessera::kernels
