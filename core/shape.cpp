#include <tessera/core/shape.h>

#include <algorithm>
#include <ostream>

#include <tessera/core/error.h>

namespace tessera {

void Shape::assign(const int64_t* values, size_t size) {
  TS_CHECK_SHAPE(size <= kMaxDims, "shape", "at most ", kMaxDims, " dimensions; got ", size);
  std::copy(values, values + size, values_.begin());
  size_ = static_cast<int>(size);
}

Shape Shape::filled(int size, int64_t value) {
  Shape shape;
  for (int i = 0; i < size; ++i) shape.push_back(value);
  return shape;
}

void Shape::push_back(int64_t value) { insert(size_, value); }

void Shape::insert(int position, int64_t value) {
  TS_CHECK_SHAPE(size_ < kMaxDims, "shape", "at most ", kMaxDims, " dimensions");
  for (int i = size_; i > position; --i) values_[i] = values_[i - 1];
  values_[position] = value;
  ++size_;
}

void Shape::erase(int position) {
  for (int i = position; i + 1 < size_; ++i) values_[i] = values_[i + 1];
  --size_;
}

Shape Shape::slice(int begin, int end) const {
  return Shape(std::span<const int64_t>(values_.data() + begin, static_cast<size_t>(end - begin)));
}

bool operator==(const Shape& a, const Shape& b) {
  return a.size_ == b.size_ && std::equal(a.begin(), a.end(), b.begin());
}

std::ostream& operator<<(std::ostream& out, const Shape& shape) {
  out << '[';
  for (int i = 0; i < shape.size(); ++i) out << (i ? ", " : "") << shape[i];
  return out << ']';
}

int64_t checked_numel(const Shape& shape, std::string_view where) {
  // Sizes of 0 count as 1: strides of an empty tensor must fit too.
  int64_t extent = 1;
  bool empty = false;
  for (int64_t size : shape) {
    TS_CHECK_SHAPE(size >= 0, where, "sizes must not be negative; got ", shape);
    TS_CHECK_SHAPE(!__builtin_mul_overflow(extent, std::max<int64_t>(size, 1), &extent), where,
                   "the number of elements of ", shape, " exceeds 2^63");
    empty |= size == 0;
  }
  return empty ? 0 : extent;
}

int64_t numel_of(const Shape& shape) {
  int64_t count = 1;
  for (int64_t size : shape) count *= size;
  return count;
}

Shape contiguous_strides(const Shape& shape) {
  Shape strides = shape;
  int64_t step = 1;
  for (int i = shape.size() - 1; i >= 0; --i) {
    strides[i] = step;
    step *= std::max<int64_t>(shape[i], 1);
  }
  return strides;
}

bool is_contiguous(const Shape& shape, const Shape& strides) {
  int64_t step = 1;
  for (int i = shape.size() - 1; i >= 0; --i) {
    if (shape[i] == 0) return true;
    if (shape[i] == 1) continue;
    if (strides[i] != step) return false;
    step *= shape[i];
  }
  return true;
}

bool is_dense(const Shape& shape, const Shape& strides) {
  std::array<int, kMaxDims> order;
  int count = 0;
  for (int i = 0; i < shape.size(); ++i) {
    if (shape[i] == 0) return true;
    if (shape[i] > 1) order[count++] = i;
  }
  std::sort(order.begin(), order.begin() + count,
            [&](int a, int b) { return strides[a] < strides[b]; });
  int64_t step = 1;
  for (int i = 0; i < count; ++i) {
    if (strides[order[i]] != step) return false;
    step *= shape[order[i]];
  }
  return true;
}

int wrap_dim(int64_t dim, int dims, std::string_view where) {
  const int64_t range = std::max(dims, 1);
  TS_CHECK_INDEX(dim >= -range && dim < range, where, "dimension ", dim, " is outside [", -range,
                 ", ", range - 1, "]");
  return static_cast<int>(dim < 0 ? dim + range : dim);
}

Shape wrap_dims(const Shape& dims, int ndim, std::string_view where) {
  Shape result;
  if (dims.empty()) {
    for (int i = 0; i < ndim; ++i) result.push_back(i);
    return result;
  }
  for (int64_t dim : dims) {
    const int wrapped = wrap_dim(dim, ndim, where);
    if (ndim > 0) result.push_back(wrapped);
  }
  std::sort(result.begin(), result.end());
  for (int i = 1; i < result.size(); ++i) {
    TS_CHECK(result[i] != result[i - 1], where, "dimension ", result[i], " appears twice in ",
             dims);
  }
  return result;
}

Shape broadcast_shapes(const Shape& a, const Shape& b, std::string_view where) {
  const int dims = std::max(a.size(), b.size());
  Shape result = Shape::filled(dims, 1);
  for (int i = 1; i <= dims; ++i) {
    const int64_t size_a = i <= a.size() ? a[a.size() - i] : 1;
    const int64_t size_b = i <= b.size() ? b[b.size() - i] : 1;
    TS_CHECK_SHAPE(size_a == size_b || size_a == 1 || size_b == 1, where, "shapes ", a, " and ", b,
                   " do not broadcast: ", size_a, " and ", size_b, " in dimension ", dims - i,
                   " must be equal or one of them 1");
    result[dims - i] = size_a == 1 ? size_b : size_a;
  }
  return result;
}

bool broadcastable_to(const Shape& from, const Shape& to) {
  if (from.size() > to.size()) return false;
  for (int i = 1; i <= from.size(); ++i) {
    const int64_t size = from[from.size() - i];
    if (size != 1 && size != to[to.size() - i]) return false;
  }
  return true;
}

Shape broadcast_strides(const Shape& shape, const Shape& strides, const Shape& target) {
  Shape result = Shape::filled(target.size(), 0);
  const int lead = target.size() - shape.size();
  for (int i = 0; i < shape.size(); ++i) {
    result[lead + i] = shape[i] == 1 && target[lead + i] != 1 ? 0 : strides[i];
  }
  return result;
}

Shape reduced_shape(const Shape& shape, const Shape& dims, bool keepdim) {
  Shape result;
  int next = 0;
  for (int i = 0; i < shape.size(); ++i) {
    if (next < dims.size() && dims[next] == i) {
      ++next;
      if (keepdim) result.push_back(1);
    } else {
      result.push_back(shape[i]);
    }
  }
  return result;
}

Shape infer_shape(const Shape& shape, int64_t numel, std::string_view where) {
  Shape result = shape;
  int unknown = -1;
  int64_t known = 1;
  for (int i = 0; i < shape.size(); ++i) {
    if (shape[i] == -1) {
      TS_CHECK_SHAPE(unknown < 0, where, "at most one size may be -1; got ", shape);
      unknown = i;
    } else {
      TS_CHECK_SHAPE(shape[i] >= 0, where, "sizes must not be negative; got ", shape);
      TS_CHECK_SHAPE(!__builtin_mul_overflow(known, shape[i], &known), where,
                     "the number of elements of ", shape, " exceeds 2^63");
    }
  }
  if (unknown >= 0) {
    TS_CHECK_SHAPE(known != 0 && numel % known == 0, where, "-1 in ", shape,
                   " cannot be inferred from ", numel, " elements");
    result[unknown] = numel / known;
    known *= result[unknown];
  }
  TS_CHECK_SHAPE(known == numel, where, "shape ", shape, " holds ", known,
                 " elements, the tensor has ", numel);
  return result;
}

bool view_strides(const Shape& shape, const Shape& strides, const Shape& target, Shape& result) {
  result = contiguous_strides(target);
  if (numel_of(shape) == 0 || shape.empty() || target.empty()) return true;
  // Neighbouring source dimensions without a gap between them form a run, which the target may cut
  // as it likes; no target dimension may reach across two runs.
  int t = target.size() - 1;
  int s = shape.size() - 1;
  while (s >= 0) {
    const int64_t step = strides[s];
    int64_t run = shape[s];
    while (s > 0 && (shape[s - 1] == 1 || run == 1 || strides[s - 1] == run * step)) {
      if (run == 1 && shape[s - 1] != 1) break;  // a run of ones says nothing about the step
      run *= shape[--s];
    }
    --s;
    int64_t placed = 1;
    while (t >= 0 && (placed < run || target[t] == 1)) {
      result[t] = placed * step;
      placed *= target[t--];
    }
    if (placed != run) return false;
  }
  return t < 0;
}

int64_t storage_extent(const Shape& shape, const Shape& strides) {
  int64_t last = 0;
  for (int i = 0; i < shape.size(); ++i) {
    if (shape[i] == 0) return 0;
    last += (shape[i] - 1) * strides[i];
  }
  return last + 1;
}

}  // namespace tessera
