// QR, singular values and eigenvalues of symmetric matrices.
#include <Eigen/Eigenvalues>
#include <Eigen/QR>
#include <Eigen/SVD>

#include <tessera/core/kernels/linalg/linalg.h>
#include <tessera/core/kernels/linalg/linalg_batch.h>

namespace tessera::kernels::linalg {
namespace {

using Columns = Eigen::MatrixXd;

// A matrix of f32 or f64 numbers, as f64.
class Source {
 public:
  Source(const Tensor& x, const Shape& batch)
      : single_(x.dtype() == kF32), rows_(x.size(-2)), columns_(x.size(-1)) {
    if (single_) {
      floats_.emplace(x, batch);
    } else {
      doubles_.emplace(x, batch);
    }
  }
  void read(int64_t index, Columns& matrix) const {
    matrix.resize(rows_, columns_);
    if (single_) {
      read_from(*floats_, index, matrix);
    } else {
      read_from(*doubles_, index, matrix);
    }
  }

 private:
  template <class T>
  static void read_from(const MatrixBatch<T>& matrices, int64_t index, Columns& matrix) {
    const T* data = matrices.at(index);
    for (int64_t j = 0; j < matrices.columns; ++j) {
      for (int64_t i = 0; i < matrices.rows; ++i) {
        matrix(i, j) = data[i * matrices.row_stride + j * matrices.column_stride];
      }
    }
  }

  bool single_;
  int64_t rows_, columns_;
  std::optional<MatrixBatch<float>> floats_;
  std::optional<MatrixBatch<double>> doubles_;
};

// Writes matrix number `index` of y: [..., rows, columns], or the vector: [..., rows].
template <class Values>
void write(const Tensor& y, int64_t index, const Values& values) {
  const int64_t rows = values.rows(), columns = values.cols();
  dispatch_matrices(y.dtype(), [&]<class T>() {
    T* data = y.data_as<T>() + index * rows * columns;
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; ++j) data[i * columns + j] = static_cast<T>(values(i, j));
    }
  });
}

double work_of(const Tensor& a) {
  const double m = static_cast<double>(a.size(-2)), n = static_cast<double>(a.size(-1));
  return 4 * m * n * std::min(m, n);
}

enum Fault : int64_t { kNone, kNotFinite, kNoConvergence };

void check_faults(const char* where, const Faults& faults, const Tensor& a, const Shape& batch) {
  faults.check(where, a, batch, [](int64_t fault) {
    return fault == kNotFinite
               ? "contains infinities or NaN"
               : "did not converge: it is ill-conditioned or has too many repeated eigenvalues";
  });
}

// See [Note: signs of vectors]. `other`: V's columns, or none.
void fix_signs(Columns& vectors, Columns* other, Eigen::Index count) {
  for (Eigen::Index j = 0; j < count; ++j) {
    Eigen::Index largest = 0;
    vectors.col(j).cwiseAbs().maxCoeff(&largest);
    if (vectors(largest, j) >= 0) continue;
    vectors.col(j) = -vectors.col(j);
    if (other != nullptr) other->col(j) = -other->col(j);
  }
}

}  // namespace

Qr qr(const Tensor& a, QrMode mode) {
  check_matrices("linalg_qr", a);
  const Shape batch = batch_of(a);
  const int64_t m = a.size(-2), n = a.size(-1), k = std::min(m, n);
  const int64_t inner = mode == QrMode::kComplete ? m : k;
  const Qr result{mode == QrMode::kR ? raw::empty({0}, a.dtype(), a.device())
                                     : empty_like_batch(a, batch, {m, inner}),
                  empty_like_batch(a, batch, {inner, n})};
  if (a.is_meta()) return result;
  const Source source(a, batch);
  for_matrices(numel_of(batch), work_of(a), [&](int64_t begin, int64_t end) {
    Eigen::HouseholderQR<Columns> factors;
    Columns matrix, q, r;
    for (int64_t i = begin; i < end; ++i) {
      r.setZero(inner, n);
      if (k > 0) {
        source.read(i, matrix);
        factors.compute(matrix);
        r.topRows(k).triangularView<Eigen::Upper>() = factors.matrixQR().topRows(k);
      }
      write(result.r, i, r);
      if (mode == QrMode::kR) continue;
      q.setIdentity(m, inner);
      if (k > 0) q.applyOnTheLeft(factors.householderQ());
      write(result.q, i, q);
    }
  });
  return result;
}

Svd svd(const Tensor& a, bool full_matrices, const char* where) {
  check_matrices(where, a);
  const Shape batch = batch_of(a);
  const int64_t m = a.size(-2), n = a.size(-1), k = std::min(m, n);
  const Svd result{empty_like_batch(a, batch, {m, full_matrices ? m : k}),
                   empty_like_batch(a, batch, {k}),
                   empty_like_batch(a, batch, {full_matrices ? n : k, n})};
  if (a.is_meta()) return result;
  const Source source(a, batch);
  Faults faults(numel_of(batch));
  for_matrices(numel_of(batch), 4 * work_of(a), [&](int64_t begin, int64_t end) {
    const unsigned options = full_matrices ? Eigen::ComputeFullU | Eigen::ComputeFullV
                                           : Eigen::ComputeThinU | Eigen::ComputeThinV;
    Eigen::BDCSVD<Columns> solver;
    Columns matrix, u, v;
    for (int64_t i = begin; i < end; ++i) {
      if (k == 0) {
        u.setIdentity(m, full_matrices ? m : 0);
        v.setIdentity(n, full_matrices ? n : 0);
      } else {
        source.read(i, matrix);
        if (!matrix.allFinite()) {
          faults.set(i, kNotFinite);
          continue;
        }
        solver.compute(matrix, options);
        if (solver.info() != Eigen::Success) {
          faults.set(i, kNoConvergence);
          continue;
        }
        u = solver.matrixU();
        v = solver.matrixV();
        fix_signs(u, &v, k);
        write(result.s, i, solver.singularValues());
      }
      write(result.u, i, u);
      write(result.vh, i, v.transpose());
    }
  });
  check_faults(where, faults, a, batch);
  return result;
}

Eigh eigh(const Tensor& a, const char* where) {
  check_square(where, a);
  const Shape batch = batch_of(a);
  const int64_t n = a.size(-1);
  const Eigh result{empty_like_batch(a, batch, {n}), empty_like_batch(a, batch, {n, n})};
  if (a.is_meta() || n == 0) return result;
  const Source source(a, batch);
  Faults faults(numel_of(batch));
  for_matrices(numel_of(batch), 2 * work_of(a), [&](int64_t begin, int64_t end) {
    Eigen::SelfAdjointEigenSolver<Columns> solver;
    Columns matrix, vectors;
    for (int64_t i = begin; i < end; ++i) {
      source.read(i, matrix);
      matrix.triangularView<Eigen::StrictlyUpper>().setZero();  // nobody reads it
      if (!matrix.allFinite()) {
        faults.set(i, kNotFinite);
        continue;
      }
      solver.compute(matrix);
      if (solver.info() != Eigen::Success) {
        faults.set(i, kNoConvergence);
        continue;
      }
      vectors = solver.eigenvectors();
      fix_signs(vectors, nullptr, n);
      write(result.eigenvalues, i, solver.eigenvalues());
      write(result.eigenvectors, i, vectors);
    }
  });
  check_faults(where, faults, a, batch);
  return result;
}

}  // namespace tessera::kernels::linalg
