#include <tessera/core/kernels/index/index.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include <tessera/core/dispatch.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/parallel.h>

namespace tessera::kernels {
namespace {

constexpr int64_t kIndexGrain = 16384;  // elements a piece

// Coordinates of element `position` of a row-major shape.
Shape coordinates(int64_t position, const Shape& shape) {
  Shape result = shape;
  for (int d = shape.size() - 1; d >= 0; --d) {
    result[d] = position % shape[d];
    position /= shape[d];
  }
  return result;
}

// In place sums: f16 and bf16 go through a float copy of x, so that each is rounded once.
template <class T>
struct Sum {
  using Type = std::conditional_t<is_narrow_float<T>, float, T>;
  static void add(Type& to, T value) {
    if constexpr (std::is_same_v<T, bool>) {
      to = to || value;
    } else if constexpr (std::is_integral_v<T>) {
      using Unsigned = std::make_unsigned_t<T>;  // wraps around
      to = static_cast<T>(
          static_cast<Unsigned>(static_cast<Unsigned>(to) + static_cast<Unsigned>(value)));
    } else {
      to += load<Type>(value);
    }
  }
};

template <class T, class F>
void with_sums(const Tensor& x, F&& accumulate) {
  if constexpr (is_narrow_float<T>) {
    const Tensor sums = raw::empty(x.shape(), kF32, x.device());
    copy_into(sums, x);
    accumulate(sums.data_as<float>());
    copy_into(x, sums);
  } else {
    accumulate(x.data_as<T>());
  }
}

// The three tensors of gather and scatter, cut into lines along `dim`; a segment is a run of
// neighbouring lines, and one thread has all of a line. `other` is result or source.
class Lines {
 public:
  Lines(const Tensor& x, int dim, const Tensor& index, const Tensor& other)
      : length_(index.dim() == 0 ? 1 : index.shape()[dim]) {
    const int dims = index.dim();
    const bool last = dim == dims - 1 || dims == 0;
    for (int d = 0; d < dims; ++d) {
      if (d == dim || (!last && d == dims - 1)) continue;
      outer_.push_back(index.shape()[d]);
      x_strides_.push_back(x.strides()[d]);
      index_strides_.push_back(index.strides()[d]);
      other_strides_.push_back(other.strides()[d]);
    }
    width_ = last ? 1 : index.shape()[dims - 1];
    x_step_ = dims == 0 ? 1 : x.strides()[dim];
    index_step_ = dims == 0 ? 1 : index.strides()[dim];
    other_step_ = dims == 0 ? 1 : other.strides()[dim];
  }

  // Calls f(x element, other element) as offsets, in the order of the index along each line.
  template <class F>
  void run(const int64_t* index, F&& f) const {
    const int64_t lines = numel_of(outer_) * width_;
    parallel_for(lines, std::max<int64_t>(1, kIndexGrain / std::max<int64_t>(length_, 1)),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t line = begin; line < end;) {
                     const int64_t column = line % width_;
                     const int64_t count = std::min(width_ - column, end - line);
                     segment(index, line / width_, column, count, f);
                     line += count;
                   }
                 });
  }

 private:
  template <class F>
  void segment(const int64_t* index, int64_t row, int64_t column, int64_t count, F& f) const {
    int64_t x_offset = column, index_offset = column, other_offset = column;
    for (int d = outer_.size() - 1; d >= 0; --d) {
      const int64_t coordinate = row % outer_[d];
      row /= outer_[d];
      x_offset += coordinate * x_strides_[d];
      index_offset += coordinate * index_strides_[d];
      other_offset += coordinate * other_strides_[d];
    }
    if (count == 1) {
      const int64_t* places = index + index_offset;
      for (int64_t i = 0; i < length_; ++i) {
        f(x_offset + places[i * index_step_] * x_step_, other_offset + i * other_step_);
      }
      return;
    }
    for (int64_t i = 0; i < length_; ++i) {
      const int64_t* places = index + index_offset + i * index_step_;
      const int64_t to = other_offset + i * other_step_;
      for (int64_t j = 0; j < count; ++j) f(x_offset + places[j] * x_step_ + j, to + j);
    }
  }

  Shape outer_, x_strides_, index_strides_, other_strides_;
  int64_t length_, width_, x_step_, index_step_, other_step_;
};

// Cuts the [B, A] columns of row operations into segments f(b, first column, columns): each
// destination belongs to one thread, which sees the positions in their order.
template <class F>
void for_each_column_segment(int64_t B, int64_t A, int64_t N, F&& f) {
  const int64_t grain = std::max<int64_t>(16, kIndexGrain / std::max<int64_t>(N, 1));
  parallel_for(B * A, grain, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end;) {
      const int64_t column = p % A, count = std::min(A - column, end - p);
      f(p / A, column, count);
      p += count;
    }
  });
}

template <class Index>
Tensor checked_index_as(const Tensor& index, int64_t size, bool negative, std::string_view where) {
  const Tensor dense = contiguous(index);
  const Index* values = dense.data_as<Index>();
  const int64_t count = dense.numel(), lowest = negative ? -size : 0;
  std::atomic<int64_t> first_bad{count};
  std::atomic<bool> any_negative{false};
  parallel_for(count, kIndexGrain, [&](int64_t begin, int64_t end) {
    bool below_zero = false;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t value = values[i];
      below_zero |= value < 0;
      if (value < lowest || value >= size) {
        int64_t seen = first_bad.load(std::memory_order_relaxed);
        while (i < seen && !first_bad.compare_exchange_weak(seen, i)) {
        }
        break;
      }
    }
    if (below_zero) any_negative.store(true, std::memory_order_relaxed);
  });
  if (first_bad < count) {
    const int64_t position = first_bad;
    TS_THROW(IndexError, where, "index ", static_cast<int64_t>(values[position]), " at position ",
             coordinates(position, index.shape()), " is outside [", lowest, ", ", size,
             "); check where the indices come from");
  }
  if constexpr (std::is_same_v<Index, int64_t>) {
    if (!any_negative) return dense;
  }
  Tensor result = raw::empty(index.shape(), kI64, index.device());
  int64_t* wrapped = result.data_as<int64_t>();
  parallel_for(count, kIndexGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t value = values[i];
      wrapped[i] = value < 0 ? value + size : value;
    }
  });
  return result;
}

// Those beyond the matrix's corners cut as much, and nothing overflows.
int64_t inside(const Tensor& x, int64_t diagonal) {
  return x.dim() < 2 ? 0 : std::clamp(diagonal, -x.size(-2), x.size(-1));
}

Tensor triangle(const Tensor& x, int64_t diagonal, bool lower, const char* where) {
  TS_CHECK_SHAPE(x.dim() >= 2, where, "needs at least two dimensions; got ", x);
  Tensor result = raw::empty(x.shape(), x.dtype(), x.device());
  if (x.is_meta() || x.numel() == 0) return result;
  const Tensor dense = contiguous(x);
  const int64_t rows = x.size(-2), columns = x.size(-1), bytes = size_of(x.dtype());
  const char* source = static_cast<const char*>(dense.data());
  char* target = static_cast<char*>(result.data());
  parallel_for(x.numel() / columns, std::max<int64_t>(1, kIndexGrain / columns),
               [&](int64_t begin, int64_t end) {
                 for (int64_t row = begin; row < end; ++row) {
                   const int64_t first = lower ? 1 : 0;  // elements left of the cut
                   const int64_t cut =
                       std::clamp<int64_t>(row % rows + diagonal + first, 0, columns) * bytes;
                   const size_t left = static_cast<size_t>(cut);
                   const size_t right = static_cast<size_t>(columns * bytes - cut);
                   const char* from = source + row * columns * bytes;
                   char* to = target + row * columns * bytes;
                   if (lower) {
                     std::memcpy(to, from, left);
                     std::memset(to + left, 0, right);
                   } else {
                     std::memset(to, 0, left);
                     std::memcpy(to + left, from + left, right);
                   }
                 }
               });
  return result;
}

}  // namespace

Tensor checked_index(const Tensor& index, int64_t size, bool negative, std::string_view where) {
  if (index.device().is_cuda()) {
    return on_cuda<kernels::checked_index>(std::string(where).c_str(), index.device(), index, size,
                                           negative, where);
  }
  TS_CHECK_DTYPE(index.dtype() == kI64 || index.dtype() == kI32, where,
                 "expects an index of dtype i64 or i32; got ", index, "; convert with to(kI64)");
  if (index.is_meta()) return raw::empty(index.shape(), kI64, index.device());
  return index.dtype() == kI64 ? checked_index_as<int64_t>(index, size, negative, where)
                               : checked_index_as<int32_t>(index, size, negative, where);
}

Tensor select_rows(const Tensor& x, const Tensor& positions) {
  if (x.device().is_cuda()) {
    return on_cuda<kernels::select_rows>("index_select", x.device(), x, positions);
  }
  const int64_t B = x.size(0), M = x.size(1), A = x.size(2), N = positions.numel();
  Tensor result = raw::empty({B, N, A}, x.dtype(), x.device());
  if (x.is_meta() || result.numel() == 0) return result;
  const int64_t* places = positions.data_as<int64_t>();
  if (A == 1) {
    dispatch_size(size_of(x.dtype()), [&]<class T>() {
      const T* source = x.data_as<T>();
      T* target = result.data_as<T>();
      parallel_for(B * N, kIndexGrain, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end;) {
          const int64_t b = i / N, stop = std::min(end, (b + 1) * N);
          for (; i < stop; ++i) target[i] = source[b * M + places[i - b * N]];
        }
      });
    });
    return result;
  }
  const int64_t row = A * size_of(x.dtype());
  const char* source = static_cast<const char*>(x.data());
  char* target = static_cast<char*>(result.data());
  parallel_for(B * N, std::max<int64_t>(1, kIndexGrain / A), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      std::memcpy(target + i * row, source + (i / N * M + places[i % N]) * row,
                  static_cast<size_t>(row));
    }
  });
  return result;
}

void put_rows(const Tensor& x, const Tensor& positions, const Tensor& source) {
  if (x.device().is_cuda()) {
    return on_cuda<kernels::put_rows>("index_put", x.device(), x, positions, source);
  }
  if (x.is_meta() || source.numel() == 0) return;
  const int64_t B = x.size(0), M = x.size(1), A = x.size(2), N = positions.numel();
  const int64_t* places = positions.data_as<int64_t>();
  dispatch_size(size_of(x.dtype()), [&]<class T>() {
    T* target = x.data_as<T>();
    const T* rows = source.data_as<T>();
    for_each_column_segment(B, A, N, [&](int64_t b, int64_t column, int64_t count) {
      for (int64_t n = 0; n < N; ++n) {
        std::copy_n(rows + (b * N + n) * A + column, count,
                    target + (b * M + places[n]) * A + column);
      }
    });
  });
}

void add_rows(const Tensor& x, const Tensor& positions, const Tensor& source) {
  if (x.device().is_cuda()) {
    return on_cuda<kernels::add_rows>("index_add", x.device(), x, positions, source);
  }
  if (x.is_meta() || source.numel() == 0) return;
  const int64_t B = x.size(0), M = x.size(1), A = x.size(2), N = positions.numel();
  const int64_t* places = positions.data_as<int64_t>();
  dispatch_numeric_and_bool(x.dtype(), "index_add", [&]<class T>() {
    with_sums<T>(x, [&](typename Sum<T>::Type* sums) {
      const T* rows = source.data_as<T>();
      for_each_column_segment(B, A, N, [&](int64_t b, int64_t column, int64_t count) {
        for (int64_t n = 0; n < N; ++n) {
          const T* from = rows + (b * N + n) * A + column;
          auto* to = sums + (b * M + places[n]) * A + column;
          for (int64_t j = 0; j < count; ++j) Sum<T>::add(to[j], from[j]);
        }
      });
    });
  });
}

Tensor gather(const Tensor& x, int dim, const Tensor& index) {
  if (x.device().is_cuda()) {
    return on_cuda<kernels::gather>("gather", x.device(), x, dim, index);
  }
  Tensor result = raw::empty(index.shape(), x.dtype(), x.device());
  const Tensor places = checked_index(index, x.dim() == 0 ? 1 : x.shape()[dim], false, "gather");
  if (x.is_meta() || result.numel() == 0) return result;
  const Tensor dense = contiguous(x);
  dispatch_size(size_of(x.dtype()), [&]<class T>() {
    const T* source = dense.data_as<T>();
    T* target = result.data_as<T>();
    Lines(dense, dim, places, result).run(places.data_as<int64_t>(), [=](int64_t from, int64_t to) {
      target[to] = source[from];
    });
  });
  return result;
}

void scatter(const Tensor& x, int dim, const Tensor& index, const Tensor& source) {
  if (x.device().is_cuda()) {
    return on_cuda<kernels::scatter>("scatter", x.device(), x, dim, index, source);
  }
  const Tensor places = checked_index(index, x.dim() == 0 ? 1 : x.shape()[dim], false, "scatter");
  if (x.is_meta() || index.numel() == 0) return;
  const Tensor values = contiguous(source);
  dispatch_size(size_of(x.dtype()), [&]<class T>() {
    T* target = x.data_as<T>();
    const T* from = values.data_as<T>();
    Lines(x, dim, places, values).run(places.data_as<int64_t>(), [=](int64_t to, int64_t i) {
      target[to] = from[i];
    });
  });
}

void scatter_add(const Tensor& x, int dim, const Tensor& index, const Tensor& source) {
  if (x.device().is_cuda()) {
    return on_cuda<kernels::scatter_add>("scatter_add", x.device(), x, dim, index, source);
  }
  const Tensor places =
      checked_index(index, x.dim() == 0 ? 1 : x.shape()[dim], false, "scatter_add");
  if (x.is_meta() || index.numel() == 0) return;
  const Tensor values = contiguous(source);
  dispatch_numeric_and_bool(x.dtype(), "scatter_add", [&]<class T>() {
    with_sums<T>(x, [&](typename Sum<T>::Type* sums) {
      const T* from = values.data_as<T>();
      Lines(x, dim, places, values).run(places.data_as<int64_t>(), [=](int64_t to, int64_t i) {
        Sum<T>::add(sums[to], from[i]);
      });
    });
  });
}

Tensor nonzero(const Tensor& x) {
  if (x.device().is_cuda()) {
    return on_cuda<kernels::nonzero>("nonzero", x.device(), x);
  }
  TS_CHECK_DEVICE(!x.is_meta(), "nonzero", "the shape of the result depends on the values, which ",
                  x, " does not have; use a CPU tensor");
  const Tensor dense = contiguous(x);
  const int64_t dims = x.dim(), size = x.numel();
  const int64_t chunks = (size + kIndexGrain - 1) / kIndexGrain;
  std::vector<int64_t> first(static_cast<size_t>(chunks) + 1, 0);
  Tensor result;
  dispatch_all(x.dtype(), "nonzero", [&]<class T>() {
    const T* values = dense.data_as<T>();
    const auto is_set = [](T value) {
      if constexpr (is_narrow_float<T>) {
        return to_float(value) != 0;
      } else {
        return value != T(0);
      }
    };
    parallel_for(chunks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t c = begin; c < end; ++c) {
        int64_t count = 0;
        const int64_t stop = std::min(size, (c + 1) * kIndexGrain);
        for (int64_t i = c * kIndexGrain; i < stop; ++i) count += is_set(values[i]);
        first[static_cast<size_t>(c) + 1] = count;
      }
    });
    for (size_t c = 1; c < first.size(); ++c) first[c] += first[c - 1];
    result = raw::empty({first.back(), dims}, kI64, x.device());
    int64_t* coordinate = result.data_as<int64_t>();
    parallel_for(chunks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t c = begin; c < end; ++c) {
        int64_t* to = coordinate + first[static_cast<size_t>(c)] * dims;
        const int64_t stop = std::min(size, (c + 1) * kIndexGrain);
        for (int64_t i = c * kIndexGrain; i < stop; ++i) {
          if (!is_set(values[i])) continue;
          int64_t rest = i;
          for (int64_t d = dims - 1; d >= 0; --d) {
            const int64_t extent = x.shape()[static_cast<int>(d)];
            to[d] = d == 0 ? rest : rest % extent;
            rest /= extent;
          }
          to += dims;
        }
      }
    });
  });
  return result;
}

Tensor tril(const Tensor& x, int64_t diagonal) {
  if (x.device().is_cuda()) {
    return on_cuda<kernels::tril>("tril", x.device(), x, inside(x, diagonal));
  }
  return triangle(x, inside(x, diagonal), true, "tril");
}
Tensor triu(const Tensor& x, int64_t diagonal) {
  if (x.device().is_cuda()) {
    return on_cuda<kernels::triu>("triu", x.device(), x, inside(x, diagonal));
  }
  return triangle(x, inside(x, diagonal), false, "triu");
}

Tensor one_hot(const Tensor& x, int64_t num_classes) {
  if (x.device().is_cuda()) {
    return on_cuda<kernels::one_hot>("one_hot", x.device(), x, num_classes);
  }
  TS_CHECK_DTYPE(x.dtype() == kI64 || x.dtype() == kI32, "one_hot",
                 "expects class indices of dtype i64 or i32; got ", x, "; convert with to(kI64)");
  TS_CHECK(num_classes >= -1 && num_classes != 0, "one_hot",
           "num_classes must be positive, or -1 to find it from the values; got ", num_classes);
  if (num_classes < 0) {
    TS_CHECK_DEVICE(!x.is_meta(), "one_hot", "num_classes cannot be found from ", x,
                    ", which has no values; give it");
    TS_CHECK(x.numel() > 0, "one_hot", "num_classes cannot be found from the empty ", x,
             "; give it");
    const std::vector<int64_t> values = x.to_vector<int64_t>();
    num_classes = *std::max_element(values.begin(), values.end()) + 1;
    num_classes = std::max<int64_t>(num_classes, 1);
  }
  Shape shape = x.shape();
  shape.push_back(num_classes);
  const Tensor places = checked_index(x, num_classes, false, "one_hot");
  Tensor result = raw::zeros(shape, kI64, x.device());
  if (x.is_meta()) return result;
  int64_t* rows = result.data_as<int64_t>();
  const int64_t* hot = places.data_as<int64_t>();
  for (int64_t i = 0; i < x.numel(); ++i) rows[i * num_classes + hot[i]] = 1;
  return result;
}

Tensor bincount(const Tensor& x, const Tensor& weights, int64_t minlength) {
  if (x.device().is_cuda()) {
    return on_cuda<kernels::bincount>("bincount", x.device(), x, weights, minlength);
  }
  TS_CHECK_SHAPE(x.dim() == 1, "bincount", "expects one dimension; got ", x, "; flatten it first");
  TS_CHECK(minlength >= 0, "bincount", "minlength must not be negative; got ", minlength);
  TS_CHECK_SHAPE(!weights.defined() || weights.shape() == x.shape(), "bincount",
                 "weights must have the shape of x; got ", weights, " for ", x);
  TS_CHECK_DEVICE(!x.is_meta(), "bincount", "the shape of the result depends on the values, which ",
                  x, " does not have; use a CPU tensor");
  const Tensor dense = contiguous(x);
  const int64_t size = x.numel();
  Tensor result;
  dispatch_integral(x.dtype(), "bincount", [&]<class T>() {
    const T* values = dense.data_as<T>();
    int64_t bins = minlength;
    for (int64_t i = 0; i < size; ++i) {
      const int64_t value = values[i];
      TS_CHECK(value >= 0, "bincount", "values must not be negative; got ", value, " at position ",
               i);
      bins = std::max(bins, value + 1);
    }
    const DType dtype = !weights.defined() ? kI64 : weights.dtype() == kF32 ? kF32 : kF64;
    result = raw::zeros({bins}, dtype, x.device());
    if (!weights.defined()) {
      int64_t* counts = result.data_as<int64_t>();
      for (int64_t i = 0; i < size; ++i) ++counts[values[i]];
      return;
    }
    const Tensor given = contiguous(weights);
    const auto add = [&]<class W, class S>(const W* weight, S* sums) {
      for (int64_t i = 0; i < size; ++i) sums[values[i]] += load<S>(weight[i]);
    };
    dispatch_numeric_and_bool(weights.dtype(), "bincount", [&]<class W>() {
      if constexpr (std::is_same_v<W, float>) {
        add(given.data_as<W>(), result.data_as<float>());
      } else {
        add(given.data_as<W>(), result.data_as<double>());
      }
    });
  });
  return result;
}

}  // namespace tessera::kernels
