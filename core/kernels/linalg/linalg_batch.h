// How the kernels of linalg walk over a batch of matrices. Internal, and without Eigen's headers,
// which are included by sources only.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include <tessera/core/dtype.h>
#include <tessera/core/error.h>
#include <tessera/core/parallel.h>
#include <tessera/core/shape.h>
#include <tessera/core/tensor/empty.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera::kernels::linalg {

inline Shape batch_of(const Tensor& x) { return x.shape().slice(0, x.dim() - 2); }
inline Shape with_sizes(Shape batch, std::initializer_list<int64_t> sizes) {
  for (const int64_t size : sizes) batch.push_back(size);
  return batch;
}
inline Tensor empty_like_batch(const Tensor& x, const Shape& batch,
                               std::initializer_list<int64_t> sizes) {
  return raw::empty(with_sizes(batch, sizes), x.dtype(), x.device());
}

inline void check_matrices(const char* where, const Tensor& x) {
  TS_CHECK_AS(UnsupportedError, !x.device().is_cuda(), where, "runs on the CPU; got ", x,
              "; move its operands with to(kCpu)");
  TS_CHECK_DTYPE(x.dtype() == kF32 || x.dtype() == kF64, where, "expects f32 or f64; got ", x,
                 "; convert with to(kF32)");
  TS_CHECK_SHAPE(x.dim() >= 2, where, "expects a matrix or a batch of them, [..., m, n]; got ", x);
}
inline void check_square(const char* where, const Tensor& a) {
  check_matrices(where, a);
  TS_CHECK_SHAPE(a.size(-1) == a.size(-2), where, "expects square matrices; got ", a.size(-2),
                 " by ", a.size(-1), " ones in ", a);
}
inline void check_one_dtype(const char* where, const Tensor& a, const Tensor& b) {
  TS_CHECK_DTYPE(a.dtype() == b.dtype(), where, "expects operands of one dtype; got ", a, " and ",
                 b, "; convert one with to(dtype)");
}

// f: a template lambda on float or double; the dtype was checked.
template <class F>
void dispatch_matrices(DType dtype, F&& f) {
  if (dtype == kF64) {
    f.template operator()<double>();
  } else {
    f.template operator()<float>();
  }
}

// Matrices by their number in a batch, to which x's leading dimensions are broadcast.
template <class T>
class MatrixBatch {
 public:
  MatrixBatch(const Tensor& x, const Shape& batch)
      : rows(x.size(-2)),
        columns(x.size(-1)),
        row_stride(x.stride(-2)),
        column_stride(x.stride(-1)),
        data_(x.data_as<T>()),
        batch_(batch),
        strides_(broadcast_strides(batch_of(x), x.strides().slice(0, x.dim() - 2), batch)) {}
  const T* at(int64_t index) const {
    int64_t offset = 0;
    for (int d = batch_.size() - 1; d >= 0; --d) {
      offset += index % batch_[d] * strides_[d];
      index /= batch_[d];
    }
    return data_ + offset;
  }

  int64_t rows, columns, row_stride, column_stride;

 private:
  const T* data_;
  Shape batch_, strides_;
};

// Calls f(begin, end) on ranges of `count` matrices; work: operations for one.
template <class F>
void for_matrices(int64_t count, double work, F&& f) {
  // Below this many operations a second thread costs more than it saves.
  constexpr double kWorth = 65536;
  parallel_for(count, static_cast<int64_t>(std::max(1.0, kWorth / std::max(work, 1.0))), f);
}

// "matrix [1, 0] of the batch f64[2, 1, 3, 3] cpu", or "the matrix f64[3, 3] cpu".
inline std::string matrix_name(const Tensor& x, const Shape& batch, int64_t index) {
  if (batch.empty()) return tessera::detail::concatenate("the matrix ", x);
  Shape place = batch;
  for (int d = batch.size() - 1; d >= 0; --d) {
    place[d] = index % batch[d];
    index /= batch[d];
  }
  return tessera::detail::concatenate("matrix ", place, " of the batch ", x);
}

// What is wrong with each matrix of a batch, 0 where nothing is. Threads write their own entries;
// check() then finds the first, whatever their number.
class Faults {
 public:
  explicit Faults(int64_t count) : list_(static_cast<size_t>(count), 0) {}
  void set(int64_t index, int64_t fault) { list_[static_cast<size_t>(index)] = fault; }
  // describe(fault): what follows the name of the matrix. Throws ValueError.
  template <class Describe>
  void check(const char* where, const Tensor& x, const Shape& batch,
             const Describe& describe) const {
    for (size_t i = 0; i < list_.size(); ++i) {
      TS_CHECK(list_[i] == 0, where, matrix_name(x, batch, static_cast<int64_t>(i)), " ",
               describe(list_[i]));
    }
  }

 private:
  std::vector<int64_t> list_;
};

}  // namespace tessera::kernels::linalg
