// Linear algebra: factorizations of matrices and linear systems, with gradients.
//
// Names, argument order, defaults and values are those of torch.linalg. Matrices are the last two
// dimensions, [..., m, n], all before them is a batch; operands have one dtype, f32 or f64 (f16 and
// bf16 are a DTypeError; autocast converts them to f32), on the CPU (a GPU tensor is an
// UnsupportedError). Backward is made of ops: second derivatives exist where the first do. A matrix
// without the result is a ValueError that names its place in the batch. Cost: O(n^3) a matrix, one
// thread each.
//
//     const Tensor a = randn({3, 3}), b = randn({3});
//     const Tensor x = linalg::solve(a, b);  // a x = b
//     const auto [q, r] = linalg::qr(a);
#pragma once

#include <optional>

#include <tessera/core/kernels/linalg/linalg.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera::linalg {

// ---- Equations (ops/linalg.cpp) -----------------------------------------------------------------

// a x = b, or x a = b where not `left`. a: [..., n, n]; b: [..., n, k] ([..., k, n]), batches
// broadcast; or b of a's shape without its last dimension, or [n]: vectors, left only.
// ValueError for a singular matrix.
Tensor solve(const Tensor& a, const Tensor& b, bool left = true);
// The same for a triangle of `a`; the rest is not read. `unitriangular`: its diagonal counts as
// ones. Singular matrices give infinities and NaN.
Tensor solve_triangular(const Tensor& a, const Tensor& b, bool upper, bool left = true,
                        bool unitriangular = false);
Tensor inv(const Tensor& a);  // [..., n, n]; ValueError for a singular matrix
// The determinant [...] of [..., n, n]; its gradient is the cofactors, for singular matrices too.
// (The second derivative at a singular matrix needs distinct singular values.)
Tensor det(const Tensor& a);
struct SignLogDet {
  Tensor sign;       // [...]: -1, 0 or 1; its gradient is 0
  Tensor logabsdet;  // [...]: -infinity for a singular matrix, where backward is a ValueError
};
SignLogDet slogdet(const Tensor& a);
// L with a = L L^T, or where `upper` its transpose; reads that triangle only. The gradient is
// symmetric. ValueError, with the order of the minor, where `a` is not positive-definite.
Tensor cholesky(const Tensor& a, bool upper = false);

// ---- Factorizations (ops/factorisation.cpp) -----------------------------------------------------

using kernels::linalg::QrMode;
struct Qr {
  Tensor q;  // [..., m, k], k = min(m, n); [..., m, m] where complete; [0] for kR
  Tensor r;  // [..., k, n]; [..., m, n] where complete
};
// Backward for kR, or if complete and m > n, is an UnsupportedError: it is not defined.
Qr qr(const Tensor& a, QrMode mode = QrMode::kReduced);

struct Svd {
  Tensor u;   // [..., m, m], or [..., m, k] where not full
  Tensor s;   // [..., k], descending
  Tensor vh;  // [..., n, n], or [..., k, n]
};
// The largest component of each column of u is positive. Gradients of u and vh are finite if all
// singular values differ (and, for matrices that are not square, none is zero), and ignore vectors
// beyond the k; that of s alone is always finite. ValueError for infinities and NaN.
Svd svd(const Tensor& a, bool full_matrices = true);

enum class Triangle { kLower, kUpper };
struct Eigh {
  Tensor eigenvalues;   // [..., n], ascending
  Tensor eigenvectors;  // [..., n, n], in columns; the largest component of each is positive
};
// For symmetric matrices, of which one triangle is read. The gradient is symmetric; that of the
// vectors is finite if all eigenvalues differ.
Eigh eigh(const Tensor& a, Triangle triangle = Triangle::kLower);

// The pseudo-inverse [..., n, m]. Singular values up to max(atol, rtol * the largest) count as
// zero; rtol is max(m, n) * eps unless given, 0 beside a positive atol. hermitian: `a` is symmetric
// and its lower triangle is read.
Tensor pinv(const Tensor& a, std::optional<double> atol = {}, std::optional<double> rtol = {},
            bool hermitian = false);

// By the names of LAPACK's drivers.
enum class LstsqDriver {
  kGelsy,  // singular values; the rank is returned
  kGelsd,  // the same, and residuals and singular values are returned
  kGelss,  // as kGelsd
  kGels,   // QR, which takes full rank for granted: a ValueError where a pivot is zero
};
struct Lstsq {
  Tensor solution;         // [..., n, k], or [..., n] where b is a vector
  Tensor residuals;        // [..., k]: squares summed, where m > n and all have full rank; else [0]
  Tensor rank;             // i64, a's [...]; [0] for kGels
  Tensor singular_values;  // a's [..., min(m, n)] for kGelsd and kGelss; else [0]
};
// The x that minimizes |a x - b|, and of those the one of least norm. a: [..., m, n]; b: [..., m,
// k], or [..., m] with one dimension fewer than a; batches broadcast. Singular values up to rcond
// (by default max(m, n) * eps) times the largest count as zero. kGelsy leaves residuals empty, as
// in torch. On meta the rank counts as full.
Lstsq lstsq(const Tensor& a, const Tensor& b, std::optional<double> rcond = {},
            LstsqDriver driver = LstsqDriver::kGelsy);

}  // namespace tessera::linalg
