// LU, Cholesky and triangles.
#include <tessera/core/kernels/linalg/linalg.h>

#include <Eigen/Cholesky>
#include <Eigen/LU>
#include <cmath>
#include <limits>

#include <tessera/core/kernels/linalg/linalg_batch.h>

namespace tessera::kernels::linalg {
namespace {

template <class T>
using Matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic>;
template <class T>
using Lu = Eigen::PartialPivLU<Matrix<T>>;

template <class T>
auto source(const MatrixBatch<T>& matrices, const T* data) {
  using Strides = Eigen::Stride<Eigen::Dynamic, Eigen::Dynamic>;
  return Eigen::Map<const Matrix<T>, 0, Strides>(
      data, matrices.rows, matrices.columns, Strides(matrices.column_stride, matrices.row_stride));
}
template <class T>
auto target(const Tensor& y, int64_t index) {
  using RowMajor = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const int64_t rows = y.size(-2), columns = y.size(-1);
  return Eigen::Map<RowMajor>(y.data_as<T>() + index * rows * columns, rows, columns);
}

double cube(int64_t n) {
  return static_cast<double>(n) * static_cast<double>(n) * static_cast<double>(n);
}

// The number, from 1, of the first pivot that is zero; 0 where none is.
template <class T>
int64_t zero_pivot(const Lu<T>& lu) {
  for (Eigen::Index k = 0; k < lu.rows(); ++k) {
    if (lu.matrixLU()(k, k) == T(0)) return k + 1;
  }
  return 0;
}

void check_pivots(const char* where, const Faults& faults, const Tensor& a, const Shape& batch) {
  faults.check(where, a, batch, [](int64_t pivot) {
    return tessera::detail::concatenate("is singular: pivot ", pivot,
                                        " is zero; use pinv or lstsq, or add to the diagonal");
  });
}

// Factors each matrix of `a` and calls f(index, lu).
template <class T, class F>
void for_factors(const Tensor& a, const Shape& batch, double more_work, F&& f) {
  const MatrixBatch<T> matrices(a, batch);
  for_matrices(numel_of(batch), cube(matrices.rows) + more_work, [&](int64_t begin, int64_t end) {
    Lu<T> lu;
    const T* factored = nullptr;
    for (int64_t i = begin; i < end; ++i) {
      const T* matrix = matrices.at(i);
      if (matrix != factored) lu.compute(source(matrices, matrix));
      factored = matrix;
      f(i, lu);
    }
  });
}

}  // namespace

Tensor solve(const Tensor& a, const Tensor& b) {
  constexpr const char* kWhere = "linalg_solve";
  check_square(kWhere, a);
  check_matrices(kWhere, b);
  check_one_dtype(kWhere, a, b);
  TS_CHECK_SHAPE(a.size(-1) == b.size(-2), kWhere, "a has ", a.size(-1), " rows and b has ",
                 b.size(-2), "; got ", a, " and ", b);
  const Shape batch = broadcast_shapes(batch_of(a), batch_of(b), kWhere);
  const int64_t n = b.size(-2), k = b.size(-1);
  const Tensor x = empty_like_batch(a, batch, {n, k});
  if (x.is_meta() || x.numel() == 0) return x;
  Faults faults(numel_of(batch));
  dispatch_matrices(a.dtype(), [&]<class T>() {
    const MatrixBatch<T> right(b, batch);
    const double work = 2.0 * static_cast<double>(n * n) * static_cast<double>(k);
    for_factors<T>(a, batch, work, [&](int64_t i, const Lu<T>& lu) {
      const int64_t pivot = zero_pivot(lu);
      faults.set(i, pivot);
      if (pivot == 0) target<T>(x, i) = lu.solve(source(right, right.at(i)));
    });
  });
  check_pivots(kWhere, faults, a, batch);
  return x;
}

Tensor inv(const Tensor& a) {
  constexpr const char* kWhere = "linalg_inv";
  check_square(kWhere, a);
  const Shape batch = batch_of(a);
  const Tensor x = empty_like_batch(a, batch, {a.size(-1), a.size(-1)});
  if (x.is_meta() || x.numel() == 0) return x;
  Faults faults(numel_of(batch));
  dispatch_matrices(a.dtype(), [&]<class T>() {
    for_factors<T>(a, batch, cube(a.size(-1)), [&](int64_t i, const Lu<T>& lu) {
      const int64_t pivot = zero_pivot(lu);
      faults.set(i, pivot);
      if (pivot == 0) target<T>(x, i) = lu.inverse();
    });
  });
  check_pivots(kWhere, faults, a, batch);
  return x;
}

namespace {

// Calls f(index, sign of the permutation, diagonal of U); a 0 by 0 matrix has an empty one.
template <class T, class F>
void for_diagonals(const Tensor& a, const Shape& batch, F&& f) {
  if (a.size(-1) == 0) {
    const Eigen::Matrix<T, Eigen::Dynamic, 1> none;
    for (int64_t i = 0; i < numel_of(batch); ++i) f(i, T(1), none);
    return;
  }
  for_factors<T>(a, batch, 0, [&](int64_t i, const Lu<T>& lu) {
    const T sign = static_cast<T>(lu.permutationP().determinant());
    f(i, sign, lu.matrixLU().diagonal());
  });
}

}  // namespace

Tensor det(const Tensor& a) {
  check_square("linalg_det", a);
  const Shape batch = batch_of(a);
  const Tensor y = empty_like_batch(a, batch, {});
  if (y.is_meta() || y.numel() == 0) return y;
  dispatch_matrices(a.dtype(), [&]<class T>() {
    T* results = y.data_as<T>();
    for_diagonals<T>(a, batch, [&](int64_t i, T sign, const auto& diagonal) {
      T product = sign;
      for (Eigen::Index k = 0; k < diagonal.size(); ++k) product *= diagonal(k);
      results[i] = product;
    });
  });
  return y;
}

SignLogDet slogdet(const Tensor& a) {
  check_square("linalg_slogdet", a);
  const Shape batch = batch_of(a);
  const SignLogDet y{empty_like_batch(a, batch, {}), empty_like_batch(a, batch, {})};
  if (y.sign.is_meta() || y.sign.numel() == 0) return y;
  dispatch_matrices(a.dtype(), [&]<class T>() {
    T* signs = y.sign.data_as<T>();
    T* logs = y.logabsdet.data_as<T>();
    for_diagonals<T>(a, batch, [&](int64_t i, T sign, const auto& diagonal) {
      double log = 0;
      for (Eigen::Index k = 0; k < diagonal.size(); ++k) {
        const T pivot = diagonal(k);
        sign *= pivot > T(0) ? T(1) : pivot < T(0) ? T(-1) : pivot;  // of NaN, NaN
        log += std::log(std::abs(static_cast<double>(pivot)));
      }
      signs[i] = sign == T(0) ? T(0) : sign;  // no -0
      logs[i] = static_cast<T>(log);
    });
  });
  return y;
}

Tensor solve_triangular(const Tensor& a, const Tensor& b, bool upper, bool unitriangular) {
  constexpr const char* kWhere = "linalg_solve_triangular";
  check_square(kWhere, a);
  check_matrices(kWhere, b);
  check_one_dtype(kWhere, a, b);
  TS_CHECK_SHAPE(a.size(-1) == b.size(-2), kWhere, "a has ", a.size(-1), " rows and b has ",
                 b.size(-2), "; got ", a, " and ", b);
  const Shape batch = broadcast_shapes(batch_of(a), batch_of(b), kWhere);
  const int64_t n = b.size(-2), k = b.size(-1);
  const Tensor x = empty_like_batch(a, batch, {n, k});
  if (x.is_meta() || x.numel() == 0) return x;
  dispatch_matrices(a.dtype(), [&]<class T>() {
    const MatrixBatch<T> left(a, batch), right(b, batch);
    const double work = static_cast<double>(n * n) * static_cast<double>(k);
    for_matrices(numel_of(batch), work, [&](int64_t begin, int64_t end) {
      Matrix<T> triangle, columns;
      for (int64_t i = begin; i < end; ++i) {
        triangle = source(left, left.at(i));
        columns = source(right, right.at(i));
        if (upper && unitriangular) {
          triangle.template triangularView<Eigen::UnitUpper>().solveInPlace(columns);
        } else if (upper) {
          triangle.template triangularView<Eigen::Upper>().solveInPlace(columns);
        } else if (unitriangular) {
          triangle.template triangularView<Eigen::UnitLower>().solveInPlace(columns);
        } else {
          triangle.template triangularView<Eigen::Lower>().solveInPlace(columns);
        }
        target<T>(x, i) = columns;
      }
    });
  });
  return x;
}

namespace {

// The order of the first leading minor that is not positive, for the message.
template <class T>
int64_t failing_minor(Matrix<T> a) {
  for (Eigen::Index k = 0; k < a.rows(); ++k) {
    if (!(a(k, k) > T(0))) return k + 1;
    const Eigen::Index rest = a.rows() - k - 1;
    a.col(k).tail(rest) /= std::sqrt(a(k, k));
    for (Eigen::Index j = k + 1; j < a.rows(); ++j) {
      a.col(j).tail(a.rows() - j) -= a(j, k) * a.col(k).tail(a.rows() - j);
    }
  }
  return a.rows();  // by other roundings it would have passed
}

}  // namespace

Tensor cholesky(const Tensor& a) {
  constexpr const char* kWhere = "linalg_cholesky";
  check_square(kWhere, a);
  const Shape batch = batch_of(a);
  const Tensor l = empty_like_batch(a, batch, {a.size(-1), a.size(-1)});
  if (l.is_meta() || l.numel() == 0) return l;
  Faults faults(numel_of(batch));
  dispatch_matrices(a.dtype(), [&]<class T>() {
    const MatrixBatch<T> matrices(a, batch);
    for_matrices(numel_of(batch), cube(matrices.rows), [&](int64_t begin, int64_t end) {
      Eigen::LLT<Matrix<T>> factor;
      for (int64_t i = begin; i < end; ++i) {
        const auto matrix = source(matrices, matrices.at(i));
        factor.compute(matrix);
        // A NaN passes Eigen's comparison of a pivot with zero.
        const bool positive =
            factor.info() == Eigen::Success && (factor.matrixLLT().diagonal().array() > T(0)).all();
        if (positive) {
          target<T>(l, i) = factor.matrixL();
        } else {
          faults.set(i, failing_minor<T>(matrix));
        }
      }
    });
  });
  faults.check(kWhere, a, batch, [](int64_t order) {
    return tessera::detail::concatenate("is not positive-definite: its leading minor of order ",
                                        order, " is not positive");
  });
  return l;
}

}  // namespace tessera::kernels::linalg
