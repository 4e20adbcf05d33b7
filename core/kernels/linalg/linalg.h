// Factorizations of matrices and the solvers on them, on the CPU, by Eigen.
//
// Matrices are the last two dimensions: [..., rows, columns], any strides; leading dimensions are a
// batch. f32 and f64. Results are contiguous; meta tensors give meta results. One thread works on a
// matrix, several on a batch: bits do not depend on their number. Cost: O(n^3) per matrix, and a
// copy of it for each thread.
//
// Errors name the op (linalg_solve, ...): DTypeError for other dtypes, UnsupportedError on a GPU,
// ShapeError, and ValueError with the batch index of the first matrix that has no result. If an op
// reads one triangle only, the other may have any values.
#pragma once

#include <tessera/core/tensor/tensor.h>

namespace tessera::kernels::linalg {

// ---- By LU with partial pivoting: a is square (linalg_cpu.cpp) ----------------------------------
// Calculated in the dtype of a.

// a x = b. a: [..., n, n], b: [..., n, k]; batches broadcast. An `a` that serves several b is
// factored once. ValueError if a pivot is exactly zero.
Tensor solve(const Tensor& a, const Tensor& b);
Tensor inv(const Tensor& a);
Tensor det(const Tensor& a);  // 0 for a singular matrix
struct SignLogDet {
  Tensor sign;  // -1, 0 or 1
  Tensor logabsdet;
};
SignLogDet slogdet(const Tensor& a);  // 0 and -infinity for a singular matrix

// ---- Triangles (linalg_cpu.cpp) -----------------------------------------------------------------

// a x = b, reading only the upper (lower) triangle of `a`, and taking its diagonal as ones if
// `unitriangular`. A zero on the diagonal gives infinities and NaN, as in torch.
Tensor solve_triangular(const Tensor& a, const Tensor& b, bool upper, bool unitriangular);
// L with a = L L^T; the lower triangle is read. ValueError, with the order of the minor, if `a` is
// not positive-definite.
Tensor cholesky(const Tensor& a);

// ---- Orthogonal factors (linalg_orthogonal_cpu.cpp) ---------------------------------------------
// Calculated in f64 and rounded once, so that these long algorithms are compiled only once.

enum class QrMode {
  kReduced,   // q: [..., m, k], r: [..., k, n], k = min(m, n)
  kComplete,  // q: [..., m, m], r: [..., m, n]
  kR,         // r as reduced; q: [0]
};
struct Qr {
  Tensor q, r;
};
// Householder's reflections with LAPACK's signs.
Qr qr(const Tensor& a, QrMode mode);

// [Note: signs of vectors] A singular vector or eigenvector is determined up to its sign, which
// LAPACK leaves to the order of its operations. Here its component of the largest magnitude is
// positive (in a pair of singular vectors, that of the left one): the same in f32 and f64 and on
// every machine.
struct Svd {
  Tensor u;   // [..., m, k], or [..., m, m] where full
  Tensor s;   // [..., k], descending
  Tensor vh;  // [..., k, n], or [..., n, n] where full
};
// Divide and conquer. ValueError for numbers that are not finite. where: the op in errors.
Svd svd(const Tensor& a, bool full_matrices, const char* where = "linalg_svd");

struct Eigh {
  Tensor eigenvalues;   // [..., n], ascending
  Tensor eigenvectors;  // [..., n, n], in columns
};
// For a symmetric matrix; the lower triangle is read. ValueError as svd.
Eigh eigh(const Tensor& a, const char* where = "linalg_eigh");

}  // namespace tessera::kernels::linalg
