// Systems of equations, inverse, determinants and Cholesky's factor.
#include <tessera/autograd/linalg.h>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/differentiable.h>
#include <tessera/autograd/ops.h>
#include <tessera/autograd/ops/linalg_rules.h>

namespace tessera::linalg {

namespace kernel = kernels::linalg;

// ---- solve --------------------------------------------------------------------------------------

const Op kSolve{.name = "linalg_solve",
                .marks = MarkRule::kAlongDims,
                .autocast = Autocast::kFloat32,
                .reads = {inputs(0), inputs(0)},
                .reads_outputs = outputs(0)};

namespace {

void check_equation(const Op& op, const Tensor& a, const Tensor& b, bool left) {
  check_square(op, "a", a);
  TS_CHECK_SHAPE(b.dim() >= 2, op, "expects b as a matrix or a batch of them; got ", b);
  TS_CHECK_SHAPE(a.size(-1) == b.size(left ? -2 : -1), op, "shapes do not fit ",
                 left ? "a x = b" : "x a = b", ": a is ", a, " and b is ", b, "; b must have ",
                 a.size(-1), left ? " rows" : " columns");
  broadcast_shapes(leading(a), leading(b), op.name);
}

// Matrices: a x = b.
Tensor solve_matrices(const Tensor& a, const Tensor& b) {
  return differentiable(
      kSolve, {a, b}, [](Inputs in) { return kernel::solve(in[0], in[1]); },
      [](Grads dx, const Saved& s) -> TensorList {
        const Tensor grad_b = solve(mt(s.input(0)), dx[0]);
        return {s.needs(0) ? neg(matmul(grad_b, mt(s.output()))) : Tensor(), grad_b};
      });
}

}  // namespace

Tensor solve(const Tensor& a, const Tensor& b, bool left) {
  check_defined(kSolve, "a", a);
  check_defined(kSolve, "b", b);
  check_square(kSolve, "a", a);
  const bool vectors =
      b.dim() == 1 || (b.dim() == a.dim() - 1 && b.shape() == a.shape().slice(0, a.dim() - 1));
  if (vectors) {
    TS_CHECK_SHAPE(left, kSolve, "solves x a = b for matrices b only; got ", b,
                   "; add a dimension with unsqueeze(-2)");
    const Tensor columns = unsqueeze(b, -1);
    check_equation(kSolve, a, columns, true);
    return squeeze(solve_matrices(a, columns), -1);
  }
  check_equation(kSolve, a, b, left);
  return left ? solve_matrices(a, b) : mt(solve_matrices(mt(a), mt(b)));
}

// ---- solve_triangular ---------------------------------------------------------------------------

const Op kSolveTriangular{.name = "linalg_solve_triangular",
                          .marks = MarkRule::kAlongDims,
                          .autocast = Autocast::kFloat32,
                          .reads = {inputs(0), inputs(0)},
                          .reads_outputs = outputs(0)};

Tensor solve_triangular(const Tensor& a, const Tensor& b, bool upper, bool left,
                        bool unitriangular) {
  check_defined(kSolveTriangular, "a", a);
  check_defined(kSolveTriangular, "b", b);
  check_equation(kSolveTriangular, a, b, left);
  if (!left) return mt(solve_triangular(mt(a), mt(b), !upper, true, unitriangular));
  return differentiable(
      kSolveTriangular, {a, b},
      [=](Inputs in) { return kernel::solve_triangular(in[0], in[1], upper, unitriangular); },
      [=](Grads dx, const Saved& s) -> TensorList {
        const Tensor grad_b = solve_triangular(mt(s.input(0)), dx[0], !upper, true, unitriangular);
        if (!s.needs(0)) return {Tensor(), grad_b};
        const Tensor full = neg(matmul(grad_b, mt(s.output())));
        const int64_t diagonal = unitriangular ? 1 : 0;
        return {upper ? triu(full, diagonal) : tril(full, -diagonal), grad_b};
      });
}

// ---- inv ----------------------------------------------------------------------------------------

const Op kInv{.name = "linalg_inv",
              .marks = MarkRule::kAlongDims,
              .autocast = Autocast::kFloat32,
              .reads_outputs = outputs(0)};

Tensor inv(const Tensor& a) {
  check_defined(kInv, "a", a);
  check_square(kInv, "a", a);
  return differentiable(
      kInv, {a}, [](Inputs in) { return kernel::inv(in[0]); },
      [](Grads dy, const Saved& s) {
        const Tensor transposed = mt(s.output());
        return neg(matmul(matmul(transposed, dy[0]), transposed));
      });
}

// ---- det, slogdet -------------------------------------------------------------------------------

namespace {

// [..., 1, 1]: a number for each matrix.
Tensor for_matrices(const Tensor& x) { return unsqueeze(unsqueeze(x, -1), -1); }

bool any_zero(const Tensor& x) {
  NoGradGuard no_grad;
  return !x.is_meta() && x.numel() > 0 && any(eq(x, 0)).item<bool>();
}

// The matrix of cofactors, det(a) a^-T where that exists: with a = U S V^T it is
// det(U) det(V) U D V^T, where D_i is the product of all singular values but the i-th.
Tensor cofactors(const Tensor& a) {
  const auto [u, s, vh] = svd(a, false);
  const int64_t n = a.size(-1);
  const Tensor on_diagonal = eye(n, {}, {.dtype = kBool, .device = a.device()});
  const Tensor others = prod(where(on_diagonal, Scalar(1), unsqueeze(s, -2)), -1);
  const Tensor sign = mul(det(detach(u)), det(detach(vh)));  // constant: 1 or -1
  return matmul(mul(u, unsqueeze(mul(others, unsqueeze(sign, -1)), -2)), vh);
}

}  // namespace

const Op kDet{.name = "linalg_det",
              .marks = MarkRule::kAlongDims,
              .autocast = Autocast::kFloat32,
              .reads = {inputs(0)},
              .reads_outputs = outputs(0)};

Tensor det(const Tensor& a) {
  check_defined(kDet, "a", a);
  check_square(kDet, "a", a);
  return differentiable(
      kDet, {a}, [](Inputs in) { return kernel::det(in[0]); },
      [](Grads dy, const Saved& s) {
        const Tensor a = s.input(0), y = s.output();
        if (any_zero(y)) return mul(for_matrices(dy[0]), cofactors(a));
        return mul(for_matrices(mul(dy[0], y)), mt(inv(a)));
      });
}

const Op kSlogdet{.name = "linalg_slogdet",
                  .marks = MarkRule::kAlongDims,
                  .autocast = Autocast::kFloat32,
                  .reads = {inputs(0)},
                  .reads_outputs = outputs(0)};

SignLogDet slogdet(const Tensor& a) {
  check_defined(kSlogdet, "a", a);
  check_square(kSlogdet, "a", a);
  const TensorList result = differentiable(
      kSlogdet, {a},
      [](Inputs in) {
        const kernel::SignLogDet y = kernel::slogdet(in[0]);
        return TensorList{y.sign, y.logabsdet};
      },
      [](Grads dy, const Saved& s) -> Tensor {
        if (!dy.defined(1)) return {};
        TS_CHECK(!any_zero(s.output(0)), kSlogdet,
                 "has no gradient at a singular matrix, and the batch has one: log 0 is there; use "
                 "det, or add to the diagonal");
        return mul(for_matrices(dy[1]), mt(inv(s.input(0))));
      });
  return {result[0], result[1]};
}

// ---- cholesky -----------------------------------------------------------------------------------

const Op kCholesky{.name = "linalg_cholesky",
                   .marks = MarkRule::kAlongDims,
                   .autocast = Autocast::kFloat32,
                   .reads_outputs = outputs(0)};

// Backward: with S the lower triangle of L^T dL, made symmetric by halves, L^-T S L^-1 (Murray,
// "Differentiation of the Cholesky decomposition", 2016).
Tensor cholesky(const Tensor& a, bool upper) {
  check_defined(kCholesky, "a", a);
  check_square(kCholesky, "a", a);
  if (upper) return mt(cholesky(mt(a), false));
  return differentiable(
      kCholesky, {a}, [](Inputs in) { return kernel::cholesky(in[0]); },
      [](Grads dy, const Saved& s) {
        const Tensor l = s.output();
        const Tensor lower = tril(matmul(mt(l), dy[0]));
        const Tensor symmetric = mul(add(lower, mt(tril(lower, -1))), 0.5);
        const Tensor left = solve_triangular(mt(l), symmetric, true);
        return solve_triangular(l, left, false, false);
      });
}

}  // namespace tessera::linalg
