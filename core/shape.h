// Shapes and strides: short inline lists of int64, and the arithmetic on them.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <iosfwd>
#include <span>
#include <string_view>
#include <vector>

namespace tessera {

inline constexpr int kMaxDims = 16;

// A list of at most kMaxDims integers without a heap allocation: shapes, strides, dimensions.
class Shape {
 public:
  constexpr Shape() = default;
  Shape(std::initializer_list<int64_t> values) { assign(values.begin(), values.size()); }
  Shape(std::span<const int64_t> values) { assign(values.data(), values.size()); }
  Shape(const std::vector<int64_t>& values) { assign(values.data(), values.size()); }
  // One number stands for a list of one: x.sum(1), x.view(-1), {.stride = 2}.
  Shape(int value) { push_one(value); }
  Shape(long value) { push_one(value); }
  Shape(long long value) { push_one(value); }
  Shape(unsigned value) { push_one(value); }
  Shape(unsigned long value) { push_one(static_cast<int64_t>(value)); }
  Shape(unsigned long long value) { push_one(static_cast<int64_t>(value)); }
  Shape(bool) = delete;    // x.sum(true): keepdim comes after the dimensions
  Shape(double) = delete;  // a size is an integer
  static Shape filled(int size, int64_t value);

  int size() const { return size_; }
  bool empty() const { return size_ == 0; }
  int64_t operator[](int i) const { return values_[i]; }
  int64_t& operator[](int i) { return values_[i]; }
  int64_t back() const { return values_[size_ - 1]; }
  const int64_t* begin() const { return values_.data(); }
  const int64_t* end() const { return values_.data() + size_; }
  int64_t* begin() { return values_.data(); }
  int64_t* end() { return values_.data() + size_; }
  const int64_t* data() const { return values_.data(); }

  void push_back(int64_t value);
  void pop_back() { --size_; }
  void insert(int position, int64_t value);
  void erase(int position);
  Shape slice(int begin, int end) const;  // elements [begin, end)
  std::vector<int64_t> to_vector() const { return {begin(), end()}; }

  operator std::span<const int64_t>() const { return {values_.data(), static_cast<size_t>(size_)}; }
  friend bool operator==(const Shape& a, const Shape& b);

 private:
  void assign(const int64_t* values, size_t size);
  void push_one(int64_t value) {
    values_[0] = value;
    size_ = 1;
  }
  std::array<int64_t, kMaxDims> values_{};
  int size_ = 0;
};
std::ostream& operator<<(std::ostream& out, const Shape& shape);  // [2, 3]

// Number of elements. Throws ShapeError where a size is negative or the product exceeds int64,
// sizes of 0 counted as 1.
int64_t checked_numel(const Shape& shape, std::string_view where);
int64_t numel_of(const Shape& shape);  // of a shape that was checked before

Shape contiguous_strides(const Shape& shape);
bool is_contiguous(const Shape& shape, const Shape& strides);  // row-major without gaps
// True where the elements fill one block of memory in some order of dimensions, none twice.
bool is_dense(const Shape& shape, const Shape& strides);

// Dimension counted from the end when negative. Scalars accept 0 and -1, as in PyTorch.
// Throws IndexError.
int wrap_dim(int64_t dim, int dims, std::string_view where);
// Sorted, unique dimensions; an empty list means all. Throws IndexError, ValueError (twice).
Shape wrap_dims(const Shape& dims, int ndim, std::string_view where);

// Numpy broadcasting. Throws ShapeError that names both shapes.
Shape broadcast_shapes(const Shape& a, const Shape& b, std::string_view where);
bool broadcastable_to(const Shape& from, const Shape& to);
// Strides of a tensor of `shape` seen as `target`: 0 where a dimension is repeated.
Shape broadcast_strides(const Shape& shape, const Shape& strides, const Shape& target);
// Shape after reducing `dims` (sorted, wrapped).
Shape reduced_shape(const Shape& shape, const Shape& dims, bool keepdim);

// A shape with at most one -1, which is inferred from `numel`. Throws ShapeError.
Shape infer_shape(const Shape& shape, int64_t numel, std::string_view where);
// Strides of a view as `target` without a copy, in `result`; false where there are none.
bool view_strides(const Shape& shape, const Shape& strides, const Shape& target, Shape& result);

// Elements from the first to the last that is reached, both included; 0 for empty tensors.
int64_t storage_extent(const Shape& shape, const Shape& strides);

}  // namespace tessera
