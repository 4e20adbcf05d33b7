// QR, singular values, eigenvalues, and what is made of them: pseudo-inverse and least squares.
#include <algorithm>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/differentiable.h>
#include <tessera/autograd/linalg.h>
#include <tessera/autograd/ops.h>
#include <tessera/autograd/ops/linalg_rules.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/linalg/linalg_batch.h>

namespace tessera::linalg {

namespace kernel = kernels::linalg;

namespace {

// A sum of terms, some of which may be absent.
Tensor plus(const Tensor& a, const Tensor& b) {
  if (!a.defined()) return b;
  return b.defined() ? add(a, b) : a;
}
Tensor identity(int64_t n, const Tensor& like) {
  return eye(n, {}, {.dtype = like.dtype(), .device = like.device()});
}
Tensor skew(const Tensor& x) { return sub(x, mt(x)); }
Tensor rows(const Tensor& x) { return unsqueeze(x, -2); }     // scales columns
Tensor columns(const Tensor& x) { return unsqueeze(x, -1); }  // scales rows

}  // namespace

// ---- qr -----------------------------------------------------------------------------------------

const Op kQr{.name = "linalg_qr",
             .marks = MarkRule::kAlongDims,
             .autocast = Autocast::kFloat32,
             .reads_outputs = outputs(0, 1)};

namespace {

// For q and r of m >= n: (dQ + Q copyltu(R dR^T - dQ^T Q)) R^-T, where copyltu repeats the lower
// triangle above the diagonal (Walter and Lehmann, "Algorithmic differentiation of linear algebra
// functions", 2012).
Tensor qr_gradient(const Tensor& q, const Tensor& r, const Tensor& dq, const Tensor& dr) {
  const Tensor from_r = dr.defined() ? matmul(r, mt(dr)) : Tensor();
  const Tensor from_q = dq.defined() ? neg(matmul(mt(dq), q)) : Tensor();
  const Tensor m = plus(from_r, from_q);
  const Tensor full = add(tril(m), mt(tril(m, -1)));
  return solve_triangular(mt(r), plus(matmul(q, full), dq), false, false);
}

}  // namespace

Qr qr(const Tensor& a, QrMode mode) {
  check_defined(kQr, "a", a);
  check_matrices(kQr, "a", a);
  const int64_t m = a.size(-2), n = a.size(-1);
  const TensorList result = differentiable(
      kQr, {a},
      [=](Inputs in) {
        const kernel::Qr y = kernel::qr(in[0], mode);
        return TensorList{y.q, y.r};
      },
      [=](Grads dy, const Saved& s) -> Tensor {
        TS_CHECK_AS(UnsupportedError, mode != QrMode::kR, kQr,
                    "the gradient is made of Q, which the mode 'r' leaves out; use 'reduced'");
        TS_CHECK_AS(UnsupportedError, mode != QrMode::kComplete || m <= n, kQr,
                    "has no gradient in the mode 'complete' for more rows than columns; use "
                    "'reduced'");
        const Tensor q = s.output(0), r = s.output(1);
        const Tensor dq = dy.defined(0) ? dy[0] : Tensor(), dr = dy.defined(1) ? dy[1] : Tensor();
        if (m >= n) return qr_gradient(q, r, dq, dr);
        // [A1 A2] = Q [R1 R2]: A1 = Q R1 is square, and R2 = Q^T A2 with A2 = Q R2.
        const Tensor r1 = narrow(r, -1, 0, m), r2 = narrow(r, -1, m, n - m);
        if (!dr.defined()) {
          return pad(qr_gradient(q, r1, dq, Tensor()), {0, n - m});
        }
        const Tensor dr2 = narrow(dr, -1, m, n - m);
        const Tensor more = matmul(q, matmul(r2, mt(dr2)));
        return cat({qr_gradient(q, r1, plus(dq, more), narrow(dr, -1, 0, m)), matmul(q, dr2)}, -1);
      });
  return {result[0], result[1]};
}

// ---- svd ----------------------------------------------------------------------------------------

const Op kSvd{.name = "linalg_svd",
              .marks = MarkRule::kAlongDims,
              .autocast = Autocast::kFloat32,
              .reads_outputs = outputs(0, 1, 2)};

// Backward (Townsend, "Differentiating the singular value decomposition", 2016): U M V^T with
// M = (skew(U^T dU) / E) S + S (skew(V^T dV) / E) + diag(dS), E_ij = s_j^2 - s_i^2, and for more
// rows (columns) than singular values what of dU / S (dV / S) is orthogonal to U (V).
Svd svd(const Tensor& a, bool full_matrices) {
  check_defined(kSvd, "a", a);
  check_matrices(kSvd, "a", a);
  const int64_t m = a.size(-2), n = a.size(-1), k = std::min(m, n);
  const TensorList result = differentiable(
      kSvd, {a},
      [=](Inputs in) {
        const kernel::Svd y = kernel::svd(in[0], full_matrices);
        return TensorList{y.u, y.s, y.vh};
      },
      [=](Grads dy, const Saved& s) -> Tensor {
        // Vectors beyond the k are any that complete the basis: nothing depends on them.
        const auto left = [&](const Tensor& x) { return full_matrices ? narrow(x, -1, 0, k) : x; };
        const auto right = [&](const Tensor& x) { return full_matrices ? narrow(x, -2, 0, k) : x; };
        const Tensor u = left(s.output(0)), values = s.output(1), vh = right(s.output(2));
        const bool vectors = dy.defined(0) || dy.defined(2);
        if (!vectors) return dy.defined(1) ? matmul(mul(u, rows(dy[1])), vh) : Tensor();
        const Tensor sj = rows(values), si = columns(values), one = identity(k, values);
        const Tensor e = add(mul(sub(sj, si), add(sj, si)), one);  // skew is 0 on the diagonal
        Tensor middle = dy.defined(1) ? mul(one, rows(dy[1])) : Tensor(), outside;
        if (dy.defined(0)) {
          const Tensor du = left(dy[0]), along = matmul(mt(u), du);
          middle = plus(middle, mul(div(skew(along), e), sj));
          if (m > k) {
            const Tensor scaled = div(sub(du, matmul(u, along)), sj);
            outside = matmul(scaled, vh);
          }
        }
        if (dy.defined(2)) {
          const Tensor dv = mt(right(dy[2])), v = mt(vh), along = matmul(vh, dv);
          middle = plus(middle, mul(si, div(skew(along), e)));
          if (n > k) {
            const Tensor scaled = div(sub(dv, matmul(v, along)), sj);
            outside = plus(outside, matmul(u, mt(scaled)));
          }
        }
        return plus(matmul(matmul(u, middle), vh), outside);
      });
  return {result[0], result[1], result[2]};
}

// ---- eigh ---------------------------------------------------------------------------------------

const Op kEigh{.name = "linalg_eigh",
               .marks = MarkRule::kAlongDims,
               .autocast = Autocast::kFloat32,
               .reads_outputs = outputs(0, 1)};

// Backward: V (diag(dL) + skew(V^T dV) / 2 E) V^T, E_ij = l_j - l_i (Giles, "An extended collection
// of matrix derivative results", 2008).
Eigh eigh(const Tensor& a, Triangle triangle) {
  check_defined(kEigh, "a", a);
  check_square(kEigh, "a", a);
  if (triangle == Triangle::kUpper) return eigh(mt(a), Triangle::kLower);
  const TensorList result = differentiable(
      kEigh, {a},
      [](Inputs in) {
        const kernel::Eigh y = kernel::eigh(in[0]);
        return TensorList{y.eigenvalues, y.eigenvectors};
      },
      [](Grads dy, const Saved& s) -> Tensor {
        const Tensor values = s.output(0), v = s.output(1);
        const Tensor from_values = dy.defined(0) ? matmul(mul(v, rows(dy[0])), mt(v)) : Tensor();
        if (!dy.defined(1)) return from_values;
        const Tensor e = add(sub(rows(values), columns(values)), identity(v.size(-1), v));
        const Tensor inner = mul(div(skew(matmul(mt(v), dy[1])), e), 0.5);
        return plus(from_values, matmul(matmul(v, inner), mt(v)));
      });
  return {result[0], result[1]};
}

// ---- pinv ---------------------------------------------------------------------------------------

const Op kPinv{.name = "linalg_pinv",
               .marks = MarkRule::kAlongDims,
               .autocast = Autocast::kFloat32,
               .reads = {inputs(0)},
               .reads_outputs = outputs(0)};

namespace {

double default_rtol(const Tensor& a, DType dtype) {
  return static_cast<double>(std::max(a.size(-1), a.size(-2))) * epsilon_of(dtype);
}

// What counts of singular values or eigenvalues [..., k]: those above the bound.
Tensor counting(const Tensor& values, double atol, double rtol) {
  const Tensor sizes = abs(values);
  if (values.size(-1) == 0) return gt(sizes, 0);
  return gt(sizes, maximum(mul(amax(sizes, {-1}, true), rtol), full({}, atol, {.dtype = kF64})));
}
// Their inverses, 0 for those that do not count.
Tensor inverses(const Tensor& values, const Tensor& counts) {
  return where(counts, reciprocal(where(counts, values, Scalar(1))), Scalar(0));
}

// On f64, which autocast leaves alone.
Tensor pinv_of(const Tensor& a, double atol, double rtol, bool hermitian) {
  if (hermitian) {
    const auto [values, v] = kernel::eigh(a, kPinv.name.data());
    return matmul(mul(v, rows(inverses(values, counting(values, atol, rtol)))), mt(v));
  }
  const auto [u, s, vh] = kernel::svd(a, false, kPinv.name.data());
  return matmul(mul(mt(vh), rows(inverses(s, counting(s, atol, rtol)))), mt(u));
}

}  // namespace

// Backward, with P the result: -P^T G P^T + (I - A P) G^T P P^T + P^T P G^T (I - P A) (Golub and
// Pereyra, "The differentiation of pseudo-inverses and nonlinear least squares problems", 1973).
Tensor pinv(const Tensor& a, std::optional<double> atol, std::optional<double> rtol,
            bool hermitian) {
  check_defined(kPinv, "a", a);
  if (hermitian) {
    check_square(kPinv, "a", a);
  } else {
    check_matrices(kPinv, "a", a);
  }
  return differentiable(
      kPinv, {a},
      [=](Inputs in) {
        kernel::check_matrices(kPinv.name.data(), in[0]);
        const double absolute = atol.value_or(0);
        const double relative =
            rtol.value_or(absolute > 0 ? 0 : default_rtol(in[0], in[0].dtype()));
        return kernels::convert(
            pinv_of(kernels::convert(in[0], kF64), absolute, relative, hermitian), in[0].dtype());
      },
      [](Grads dy, const Saved& s) {
        const Tensor a = s.input(0), p = s.output(), pt = mt(p), gt = mt(dy[0]);
        const Tensor first = neg(matmul(matmul(pt, dy[0]), pt));
        const Tensor left = matmul(matmul(gt, p), pt);   // G^T P P^T, [m, m]
        const Tensor right = matmul(pt, matmul(p, gt));  // P^T P G^T
        const Tensor second = sub(left, matmul(a, matmul(p, left)));
        const Tensor third = sub(right, matmul(matmul(right, p), a));
        return add(first, add(second, third));
      });
}

// ---- lstsq --------------------------------------------------------------------------------------

const Op kLstsq{.name = "linalg_lstsq",
                .marks = MarkRule::kAlongDims,
                .autocast = Autocast::kFloat32,
                .reads = {inputs(0, 1), inputs(0, 1)},
                .reads_outputs = outputs(0)};

namespace {

// By QR of a, or of its transpose where a has fewer rows than columns.
Tensor full_rank_solution(const Tensor& a, const Tensor& b) {
  const bool tall = a.size(-2) >= a.size(-1);
  const kernel::Qr y = kernel::qr(tall ? a : mt(a), QrMode::kReduced);
  if (!a.is_meta() && y.r.numel() > 0) {
    const Shape batch = leading(a);
    kernel::Faults faults(numel_of(batch));
    const Tensor pivots = sum(mul(y.r, identity(y.r.size(-1), y.r)), {-1});
    const std::vector<int64_t> singular = any(eq(pivots, 0), {-1}).to_vector<int64_t>();
    for (size_t i = 0; i < singular.size(); ++i) faults.set(static_cast<int64_t>(i), singular[i]);
    faults.check(kLstsq.name.data(), a, batch, [](int64_t) {
      return "has not full rank, which 'gels' takes for granted; use the driver 'gelsy'";
    });
  }
  if (tall) return kernel::solve_triangular(y.r, matmul(mt(y.q), b), true, false);
  return matmul(y.q, kernel::solve_triangular(mt(y.r), b, false, false));
}

struct LstsqOutputs {  // those that the driver gives
  Tensor solution, residuals, rank, singular_values;
};

// On f64, which autocast leaves alone.
LstsqOutputs least_squares(const Tensor& a, const Tensor& b, double rcond, LstsqDriver driver) {
  LstsqOutputs y;
  const int64_t m = a.size(-2), n = a.size(-1);
  bool full_rank = true;
  if (driver == LstsqDriver::kGels) {
    y.solution = full_rank_solution(a, b);
  } else {
    const auto [u, s, vh] = kernel::svd(a, false, kLstsq.name.data());
    const Tensor counts = counting(s, 0, rcond);
    y.solution = matmul(mt(vh), mul(columns(inverses(s, counts)), matmul(mt(u), b)));
    y.rank = sum(counts, {-1});
    full_rank = a.is_meta() || !any(lt(y.rank, n)).item<bool>();
    if (driver != LstsqDriver::kGelsy) y.singular_values = s;
  }
  if (driver != LstsqDriver::kGelsy && m > n && full_rank) {
    y.residuals = sum(square(sub(matmul(a, y.solution), b)), {-2});
  }
  return y;
}

}  // namespace

// Backward, with P the pseudo-inverse and R = b - a x: dx goes to b as P^T dx and to a as
// -P^T dx x^T + R dx^T P P^T + P^T x dx^T (I - P a), of Golub and Pereyra's formula for x = P b;
// residuals, which x makes least, give -2 R x^T and 2 R times their gradients.
Lstsq lstsq(const Tensor& a, const Tensor& b, std::optional<double> rcond, LstsqDriver driver) {
  check_defined(kLstsq, "a", a);
  check_defined(kLstsq, "b", b);
  check_matrices(kLstsq, "a", a);
  TS_CHECK_SHAPE(b.dim() == a.dim() || b.dim() == a.dim() - 1, kLstsq,
                 "expects b with as many dimensions as a, or one fewer for vectors; got ", a,
                 " and ", b);
  if (b.dim() == a.dim() - 1) {
    Lstsq y = lstsq(a, unsqueeze(b, -1), rcond, driver);
    y.solution = squeeze(y.solution, -1);
    return y;
  }
  TS_CHECK_SHAPE(a.size(-2) == b.size(-2), kLstsq, "a has ", a.size(-2), " rows and b has ",
                 b.size(-2), "; got ", a, " and ", b);
  broadcast_shapes(leading(a), leading(b), kLstsq.name);
  const TensorList result = differentiable(
      kLstsq, {a, b},
      [=](Inputs in) {
        const DType dtype = in[0].dtype();
        kernel::check_matrices(kLstsq.name.data(), in[0]);
        kernel::check_matrices(kLstsq.name.data(), in[1]);
        kernel::check_one_dtype(kLstsq.name.data(), in[0], in[1]);
        const LstsqOutputs y =
            least_squares(kernels::convert(in[0], kF64), kernels::convert(in[1], kF64),
                          rcond.value_or(default_rtol(in[0], dtype)), driver);
        const auto given = [&](const Tensor& x, DType as) {
          return x.defined() ? kernels::convert(x, as) : raw::empty({0}, as, in[0].device());
        };
        return TensorList{given(y.solution, dtype), given(y.residuals, dtype), given(y.rank, kI64),
                          given(y.singular_values, dtype)};
      },
      [=](Grads dy, const Saved& s) -> TensorList {
        const Tensor a = s.input(0), b = s.input(1), x = s.output(0), xt = mt(x);
        const Tensor residual = sub(b, matmul(a, x));
        Tensor grad_a, grad_b;
        if (dy.defined(1) && s.output_shape(1) != Shape{0}) {
          const Tensor scaled = mul(mul(residual, rows(dy[1])), 2);
          grad_a = neg(matmul(scaled, xt));
          grad_b = scaled;
        }
        if (dy.defined(0)) {
          const Tensor p = pinv(a, {}, rcond), pt = mt(p), dxt = mt(dy[0]);
          const Tensor to_b = matmul(pt, dy[0]);
          grad_b = plus(grad_b, to_b);
          if (s.needs(0)) {
            const Tensor outside = matmul(matmul(residual, dxt), matmul(p, pt));
            const Tensor kernel_part = sub(dxt, matmul(matmul(dxt, p), a));
            const Tensor more = add(outside, matmul(matmul(pt, x), kernel_part));
            grad_a = plus(grad_a, sub(more, matmul(to_b, xt)));
          }
        }
        return {s.needs(0) ? grad_a : Tensor(), s.needs(1) ? grad_b : Tensor()};
      });
  return {result[0], result[1], result[2], detach(result[3])};
}

}  // namespace tessera::linalg
