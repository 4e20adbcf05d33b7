// Linear algebra beside the table of ops: errors, empty and degenerate matrices, layouts, threads.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/gradcheck.h>
#include <tessera/autograd/linalg.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/parallel.h>

#include "message_of.h"

namespace tessera::test_linalg {
namespace {

using linalg::LstsqDriver;
using linalg::QrMode;
using linalg::Triangle;

constexpr double kInf = std::numeric_limits<double>::infinity();

Tensor normal(const Shape& shape, DType dtype = kF64, const char* name = "test_linalg") {
  return randn(shape, {.dtype = dtype}, named_random_stream(name));
}
Tensor matrix(std::initializer_list<double> values, const Shape& shape) {
  return tensor(std::vector<double>(values), shape, kF64);
}
Tensor transposed(const Tensor& x) { return transpose(x, -2, -1); }

// |a - b| is at most `times` eps of the largest number of b.
void expect_close(const Tensor& a, const Tensor& b, double times = 64) {
  ASSERT_EQ(a.shape(), b.shape());
  ASSERT_EQ(a.dtype(), b.dtype());
  const std::vector<double> x = a.to_vector(), y = b.to_vector();
  double largest = 0;
  for (double value : y) largest = std::max(largest, std::abs(value));
  for (size_t i = 0; i < x.size(); ++i) {
    ASSERT_NEAR(x[i], y[i], times * epsilon_of(a.dtype()) * std::max(largest, 1.0)) << "at " << i;
  }
}
bool all_finite(const Tensor& x) { return all(isfinite(x)).item<bool>(); }
bool same_bits(const Tensor& a, const Tensor& b) {
  const Tensor x = contiguous(a), y = contiguous(b);
  return x.shape() == y.shape() && x.dtype() == y.dtype() &&
         std::memcmp(x.data(), y.data(), static_cast<size_t>(x.nbytes())) == 0;
}

using Function = std::function<TensorList(const TensorList&)>;
void expect_gradients(const Function& f, const TensorList& inputs) {
  const GradcheckResult once = gradcheck(f, inputs);
  EXPECT_TRUE(once.ok) << once.message;
  const GradcheckResult twice = gradgradcheck(f, inputs, {.absolute = 1e-4});
  EXPECT_TRUE(twice.ok) << "second derivatives: " << twice.message;
}

// ---- What is wrong is said ----------------------------------------------------------------------

TEST(LinalgErrors, ASingularMatrixIsNamedByItsPlaceInTheBatch) {
  const Tensor one = matrix({1, 2, 2, 4}, {2, 2});
  const Tensor batch = matrix({1, 0, 0, 1, 3, 1, 1, 1, 1, 2, 2, 4, 2, 0, 0, 2}, {2, 2, 2, 2});
  const std::string single = message_of<ValueError>([&] { linalg::solve(one, ones({2}, {kF64})); });
  EXPECT_TRUE(mentions(single, "linalg_solve: the matrix f64[2, 2] cpu is singular: pivot 2"))
      << single;
  const std::string inverse = message_of<ValueError>([&] { linalg::inv(batch); });
  EXPECT_TRUE(mentions(inverse, "linalg_inv: matrix [1, 0] of the batch f64[2, 2, 2, 2] cpu"))
      << inverse;
  EXPECT_TRUE(mentions(message_of<ValueError>([&] { linalg::inv(zeros({3, 3})); }), "pivot 1"));
  // Many threads, many singular ones: the first is named.
  const Tensor many = zeros({50, 40, 40});
  EXPECT_TRUE(mentions(message_of<ValueError>([&] { linalg::inv(many); }), "matrix [0] of"));
}

TEST(LinalgErrors, AMatrixThatIsNotPositiveDefiniteNamesItsMinor) {
  const Tensor batch = matrix({2, 0, 0, 2, 1, 2, 2, 4}, {2, 2, 2});
  const std::string text = message_of<ValueError>([&] { linalg::cholesky(batch); });
  EXPECT_TRUE(mentions(text,
                       "linalg_cholesky: matrix [1] of the batch f64[2, 2, 2] cpu is not "
                       "positive-definite: its leading minor of order 2"))
      << text;
  const Tensor negative = matrix({-1, 0, 0, 1}, {2, 2});
  EXPECT_TRUE(mentions(message_of<ValueError>([&] { linalg::cholesky(negative); }), "order 1"));
  const Tensor nan = matrix({1, 0, NAN, 1}, {2, 2});
  EXPECT_TRUE(mentions(message_of<ValueError>([&] { linalg::cholesky(nan); }), "order 2"));
  EXPECT_TRUE(all_finite(linalg::cholesky(nan, true)));  // which reads the other triangle
}

TEST(LinalgErrors, ShapesDTypesAndNumbersThatDoNotFitAreTyped) {
  const Tensor square = eye(3, {}, {kF64}), wide = ones({2, 3}, {kF64}), b = ones({3, 2}, {kF64});
  for (const auto& call : std::vector<std::function<void()>>{
           [&] { linalg::solve(wide, ones({2}, {kF64})); }, [&] { linalg::inv(wide); },
           [&] { linalg::det(wide); }, [&] { linalg::slogdet(wide); },
           [&] { linalg::cholesky(wide); }, [&] { linalg::eigh(wide); },
           [&] { linalg::pinv(wide, {}, {}, true); }, [&] { linalg::det(ones({3}, {kF64})); },
           [&] { linalg::qr(ones({3}, {kF64})); }, [&] { linalg::svd(ones({3}, {kF64})); },
           [&] { linalg::solve(square, ones({2}, {kF64})); },
           [&] { linalg::solve(square, b, false); },
           [&] { linalg::solve(square, ones({3}, {kF64}), false); },
           [&] {
             linalg::solve(ones({2, 3, 3}, {kF64}), ones({4, 3, 1}, {kF64}));
           },
           [&] { linalg::solve_triangular(square, ones({3}, {kF64}), true); },
           [&] {
             linalg::solve_triangular(square, ones({2, 3}, {kF64}), true);
           },
           [&] { linalg::lstsq(wide, b); },
           [&] {
             linalg::lstsq(wide, ones({1, 2, 2, 2}, {kF64}));
           }}) {
    EXPECT_TRUE(mentions(message_of<ShapeError>(call), "linalg_"));
  }
  for (const auto& call : std::vector<std::function<void()>>{
           [&] { linalg::solve(square, b.to(kF32)); },
           [&] { linalg::solve_triangular(square, b.to(kF32), true); },
           [&] { linalg::lstsq(square, b.to(kF32)); }, [&] { linalg::det(square.to(kBF16)); },
           [&] { linalg::qr(square.to(kF16)); }, [&] { linalg::pinv(square.to(kI64)); }}) {
    EXPECT_TRUE(mentions(message_of<DTypeError>(call), "linalg_"));
  }
  const Tensor nan = stack({square, full({3, 3}, NAN, {kF64}), square});
  for (const auto& call : std::vector<std::function<void()>>{
           [&] { linalg::svd(nan); }, [&] { linalg::eigh(nan); }, [&] { linalg::pinv(nan); },
           [&] { linalg::pinv(nan, {}, {}, true); },
           [&] {
             linalg::lstsq(nan, ones({3, 3, 2}, {kF64}));
           }}) {
    const std::string text = message_of<ValueError>(call);
    EXPECT_TRUE(mentions(text, "matrix [1] of the batch f64[3, 3, 3] cpu contains infinities"))
        << text;
  }
  EXPECT_TRUE(std::isnan(linalg::det(nan)[1].item()));
  EXPECT_FALSE(all_finite(linalg::qr(nan).r));
}

TEST(LinalgErrors, GradientsThatDoNotExistSaySo) {
  const Tensor x = normal({4, 3}).set_requires_grad();
  const std::string r =
      message_of<UnsupportedError>([&] { linalg::qr(x, QrMode::kR).r.sum().backward(); });
  EXPECT_TRUE(mentions(r, "use 'reduced'")) << r;
  const std::string complete =
      message_of<UnsupportedError>([&] { linalg::qr(x, QrMode::kComplete).r.sum().backward(); });
  EXPECT_TRUE(mentions(complete, "more rows than columns")) << complete;
  const Tensor singular = matrix({1, 2, 2, 4}, {2, 2}).set_requires_grad();
  const linalg::SignLogDet y = linalg::slogdet(singular);
  EXPECT_EQ(y.logabsdet.item(), -kInf);
  EXPECT_EQ(y.sign.item(), 0);
  EXPECT_TRUE(
      mentions(message_of<ValueError>([&] { y.logabsdet.backward(); }), "linalg_slogdet: has no"));
}

// ---- Empty, tiny, in other layouts, by several threads ------------------------------------------

TEST(LinalgShapes, EmptyMatricesAndBatchesHaveTorchsResults) {
  const auto zero = [](const Shape& shape) { return zeros(shape, {kF64}).set_requires_grad(); };
  EXPECT_EQ(linalg::det(zero({0, 0})).item(), 1);
  EXPECT_EQ(linalg::det(zero({2, 0, 0})).to_vector(), (std::vector<double>{1, 1}));
  EXPECT_EQ(linalg::slogdet(zero({0, 0})).sign.item(), 1);
  EXPECT_EQ(linalg::slogdet(zero({0, 0})).logabsdet.item(), 0);
  EXPECT_EQ(linalg::det(zero({0, 3, 3})).shape(), (Shape{0}));
  EXPECT_EQ(linalg::solve(zero({0, 0}), zero({0, 2})).shape(), (Shape{0, 2}));
  EXPECT_EQ(linalg::solve(zero({0, 3, 3}), zero({3, 2})).shape(), (Shape{0, 3, 2}));
  EXPECT_EQ(linalg::cholesky(zero({2, 0, 0})).shape(), (Shape{2, 0, 0}));
  EXPECT_EQ(linalg::qr(zero({3, 0})).q.shape(), (Shape{3, 0}));
  EXPECT_EQ(linalg::qr(zero({0, 3})).r.shape(), (Shape{0, 3}));
  EXPECT_TRUE(same_bits(linalg::qr(zero({3, 0}), QrMode::kComplete).q, eye(3, {}, {kF64})));
  EXPECT_EQ(linalg::qr(zero({2, 3, 4}), QrMode::kR).q.shape(), (Shape{0}));
  EXPECT_TRUE(same_bits(linalg::svd(zero({0, 3})).vh, eye(3, {}, {kF64})));
  EXPECT_EQ(linalg::svd(zero({2, 3, 0}), false).u.shape(), (Shape{2, 3, 0}));
  EXPECT_EQ(linalg::eigh(zero({2, 0, 0})).eigenvalues.shape(), (Shape{2, 0}));
  EXPECT_EQ(linalg::pinv(zero({0, 3})).shape(), (Shape{3, 0}));
  EXPECT_EQ(linalg::pinv(zero({0, 3, 2})).shape(), (Shape{0, 2, 3}));
  for (const LstsqDriver driver : {LstsqDriver::kGelsy, LstsqDriver::kGelsd, LstsqDriver::kGels}) {
    const Tensor x = linalg::lstsq(zero({0, 3}), zero({0, 2}), {}, driver).solution;
    EXPECT_EQ(x.to_vector(), std::vector<double>(6, 0.0));
    EXPECT_EQ(linalg::lstsq(zero({3, 0}), zero({3, 2}), {}, driver).solution.shape(),
              (Shape{0, 2}));
    EXPECT_EQ(linalg::lstsq(zero({0, 3, 2}), zero({0, 3, 2}), {}, driver).solution.shape(),
              (Shape{0, 2, 2}));
  }
  // Backward goes through, to a gradient of the input's shape.
  const Tensor x = zero({0, 3, 3});
  for (const Tensor& y : {linalg::det(x), linalg::inv(x), linalg::cholesky(x), linalg::qr(x).r,
                          linalg::svd(x).s, linalg::eigh(x).eigenvectors, linalg::pinv(x),
                          linalg::slogdet(x).logabsdet, linalg::solve(x, x)}) {
    EXPECT_EQ(grad(sum(y), TensorList{x})[0].shape(), x.shape());
  }
  const Tensor none = zero({2, 0, 0});
  for (const Tensor& y :
       {linalg::det(none), linalg::inv(none), linalg::cholesky(none), linalg::qr(none).r,
        linalg::svd(none).s, linalg::slogdet(none).logabsdet}) {
    EXPECT_EQ(grad(sum(y), TensorList{none})[0].shape(), none.shape());
  }
}

TEST(LinalgShapes, OneByOneMatricesAreNumbers) {
  const Tensor x = matrix({-4}, {1, 1}), b = matrix({2}, {1, 1});
  EXPECT_EQ(linalg::det(x).item(), -4);
  EXPECT_EQ(linalg::slogdet(x).sign.item(), -1);
  EXPECT_EQ(linalg::slogdet(x).logabsdet.item(), std::log(4.0));
  EXPECT_EQ(linalg::inv(x).item(), -0.25);
  EXPECT_EQ(linalg::solve(x, b).item(), -0.5);
  EXPECT_EQ(linalg::cholesky(neg(x)).item(), 2);
  EXPECT_EQ(linalg::qr(x).q.item(), 1);
  EXPECT_EQ(linalg::qr(x).r.item(), -4);
  EXPECT_EQ(linalg::svd(x).u.item(), 1);
  EXPECT_EQ(linalg::svd(x).s.item(), 4);
  EXPECT_EQ(linalg::svd(x).vh.item(), -1);
  EXPECT_EQ(linalg::eigh(x).eigenvalues.item(), -4);
  EXPECT_EQ(linalg::eigh(x).eigenvectors.item(), 1);
  EXPECT_EQ(linalg::pinv(x).item(), -0.25);
  EXPECT_NEAR(linalg::lstsq(x, b).solution.item(), -0.5, 1e-15);
}

// A matrix of each shape put together again from its factors.
TEST(LinalgShapes, FactorsOfEveryShapeGiveTheMatrixBack) {
  for (const DType dtype : {kF32, kF64}) {
    for (const Shape& shape : {Shape{1, 1}, Shape{7, 3}, Shape{3, 7}, Shape{2, 40, 40},
                               Shape{2, 1, 17, 30}, Shape{33, 20}}) {
      const Tensor x = normal(shape, dtype);
      const int64_t m = x.size(-2), n = x.size(-1), k = std::min(m, n);
      const auto one = [&](int64_t size) {
        Shape batched = shape.slice(0, shape.size() - 2);
        batched.push_back(size);
        batched.push_back(size);
        return expand(eye(size, {}, {dtype}), batched);
      };
      for (const QrMode mode : {QrMode::kReduced, QrMode::kComplete}) {
        const auto [q, r] = linalg::qr(x, mode);
        EXPECT_EQ(q.size(-1), mode == QrMode::kComplete ? m : k);
        expect_close(matmul(q, r), x);
        expect_close(matmul(transposed(q), q), one(q.size(-1)));
        EXPECT_TRUE(same_bits(triu(r), r));
      }
      EXPECT_TRUE(same_bits(linalg::qr(x, QrMode::kR).r, linalg::qr(x).r));
      for (const bool full : {false, true}) {
        const auto [u, s, vh] = linalg::svd(x, full);
        EXPECT_EQ(u.size(-1), full ? m : k);
        EXPECT_EQ(vh.size(-2), full ? n : k);
        expect_close(matmul(mul(narrow(u, -1, 0, k), unsqueeze(s, -2)), narrow(vh, -2, 0, k)), x);
        expect_close(matmul(transposed(u), u), one(u.size(-1)));
        expect_close(matmul(vh, transposed(vh)), one(vh.size(-2)));
        EXPECT_TRUE(all(ge(s, 0)).item<bool>());
        EXPECT_TRUE(k == 1 ||
                    all(ge(narrow(s, -1, 0, k - 1), narrow(s, -1, 1, k - 1))).item<bool>());
      }
      const Tensor p = linalg::pinv(x);
      expect_close(matmul(matmul(x, p), x), x, 1024);
      if (m != n) continue;
      const Tensor symmetric = add(x, transposed(x));
      const auto [values, vectors] = linalg::eigh(symmetric);
      expect_close(matmul(mul(vectors, unsqueeze(values, -2)), transposed(vectors)), symmetric);
      const Tensor definite = add(matmul(x, transposed(x)), one(n));
      const Tensor l = linalg::cholesky(definite);
      expect_close(matmul(l, transposed(l)), definite);
      expect_close(linalg::cholesky(definite, true), transposed(l));
    }
  }
}

TEST(LinalgShapes, OneTriangleIsReadAndTheOtherMayHoldAnything) {
  const Tensor x = add(mul(normal({4, 4}), 0.2), mul(eye(4, {}, {kF64}), 3));
  const Tensor lower = add(tril(x), triu(full({4, 4}, NAN, {kF64}), 1));
  const Tensor clean = add(tril(x), transposed(tril(x, -1)));
  EXPECT_TRUE(same_bits(linalg::cholesky(lower), linalg::cholesky(clean)));
  EXPECT_TRUE(same_bits(linalg::cholesky(transposed(lower), true), linalg::cholesky(clean, true)));
  EXPECT_TRUE(same_bits(linalg::eigh(lower).eigenvalues, linalg::eigh(clean).eigenvalues));
  EXPECT_TRUE(same_bits(linalg::eigh(transposed(lower), Triangle::kUpper).eigenvectors,
                        linalg::eigh(clean, Triangle::kUpper).eigenvectors));
  EXPECT_TRUE(same_bits(linalg::pinv(lower, {}, {}, true), linalg::pinv(clean, {}, {}, true)));
  const Tensor b = normal({4, 2});
  EXPECT_TRUE(same_bits(linalg::solve_triangular(lower, b, false),
                        linalg::solve_triangular(tril(x), b, false)));
  expect_close(linalg::solve_triangular(tril(x), b, false), linalg::solve(tril(x), b));
  const Tensor unit = add(tril(x, -1), eye(4, {}, {kF64}));
  const Tensor hidden = add(tril(x, -1), triu(full({4, 4}, NAN, {kF64})));
  expect_close(linalg::solve_triangular(hidden, b, false, true, true), linalg::solve(unit, b));
  const Tensor zero = zeros({2, 2}, {kF64});
  EXPECT_FALSE(all_finite(linalg::solve_triangular(zero, ones({2, 1}, {kF64}), true)));
}

TEST(LinalgShapes, AnyStridesGiveTheSameBits) {
  const Tensor batch = normal({3, 5, 5}), columns = normal({3, 5, 2});
  const auto with_bits_of = [&](const Function& f, const TensorList& laid_out) {
    TensorList plain;
    for (const Tensor& x : laid_out) plain.push_back(contiguous(x));
    const TensorList a = f(laid_out), b = f(plain);
    for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(same_bits(a[i], b[i])) << "output " << i;
  };
  const std::vector<Function> functions = {
      [](const TensorList& in) { return TensorList{linalg::solve(in[0], in[1])}; },
      [](const TensorList& in) { return TensorList{linalg::solve_triangular(in[0], in[1], true)}; },
      [](const TensorList& in) {
        return TensorList{linalg::inv(in[0]), linalg::det(in[0])};
      },
      [](const TensorList& in) {
        return TensorList{linalg::qr(in[0]).q, linalg::svd(in[0]).vh};
      },
      [](const TensorList& in) {
        return TensorList{linalg::eigh(in[0]).eigenvectors, linalg::lstsq(in[0], in[1]).solution};
      }};
  for (const Function& f : functions) {
    with_bits_of(f, {transposed(batch), columns});
    with_bits_of(f, {permute(batch, {1, 0, 2}).narrow(1, 0, 3).narrow(0, 1, 3).narrow(2, 0, 3),
                     columns.narrow(1, 2, 3)});
    with_bits_of(f, {slice(normal({3, 10, 10}), 1, 0, 10, 2).slice(2, 1, 10, 2), columns});
    with_bits_of(f, {expand(batch[0], {3, 5, 5}), expand(columns.narrow(2, 0, 1), {3, 5, 4})});
  }
}

TEST(LinalgThreads, AnyNumberOfThemGivesTheSameBits) {
  const int before = num_threads();
  const Tensor a = normal({37, 24, 24}, kF32), b = normal({37, 24, 5}, kF32);
  const Tensor large = normal({1, 150, 150}, kF32);
  const auto results = [&](int threads) {
    set_num_threads(threads);
    const linalg::Svd s = linalg::svd(a);
    const linalg::Eigh e = linalg::eigh(a);
    const linalg::Qr q = linalg::qr(a);
    return TensorList{linalg::solve(a, b),
                      linalg::inv(a),
                      linalg::det(a),
                      linalg::slogdet(a).logabsdet,
                      linalg::solve_triangular(a, b, true),
                      linalg::cholesky(add(matmul(a, transposed(a)), eye(24))),
                      q.q,
                      q.r,
                      s.u,
                      s.s,
                      s.vh,
                      e.eigenvalues,
                      e.eigenvectors,
                      linalg::pinv(a),
                      linalg::lstsq(a, b).solution,
                      linalg::inv(large),
                      linalg::svd(large).u,
                      linalg::qr(large).q,
                      linalg::eigh(large).eigenvectors};
  };
  const TensorList one = results(1), four = results(4);
  set_num_threads(before);
  for (size_t i = 0; i < one.size(); ++i) EXPECT_TRUE(same_bits(one[i], four[i])) << "result " << i;
}

// ---- Values and gradients where matrices are special --------------------------------------------

TEST(LinalgValues, DeterminantsKnowSignsAndSingularMatrices) {
  const Tensor swapped = matrix({0, 1, 0, 0, 0, 1, 1, 0, 0}, {3, 3});  // an even permutation
  EXPECT_EQ(linalg::det(swapped).item(), 1);
  EXPECT_EQ(linalg::det(flip(eye(2, {}, {kF64}), {0})).item(), -1);
  EXPECT_EQ(linalg::slogdet(flip(eye(2, {}, {kF64}), {0})).sign.item(), -1);
  // Beyond the range of f64, where only the logarithm is left.
  const Tensor huge = mul(eye(400, {}, {kF64}), 1e3);
  EXPECT_EQ(linalg::det(huge).item(), kInf);
  EXPECT_NEAR(linalg::slogdet(huge).logabsdet.item(), 400 * std::log(1e3), 1e-9);
}

TEST(LinalgGradients, OfDetAreTheCofactorsOfSingularMatricesToo) {
  // Of rank 1: the cofactors of [[1, 2], [2, 4]].
  const Tensor x = matrix({1, 2, 2, 4}, {2, 2}).set_requires_grad();
  expect_close(grad(linalg::det(x), TensorList{x})[0], matrix({4, -2, -2, 1}, {2, 2}));
  // Of rank 1 of 3, they vanish.
  const Tensor low = ones({3, 3}, {kF64}).set_requires_grad();
  expect_close(grad(linalg::det(low), TensorList{low})[0], zeros({3, 3}, {kF64}));
  // A singular one among others; integers, so that the determinant is exactly 0.
  const Tensor batch =
      matrix({2, 1, 0, 1, 3, 1, 0, 1, 4, 1, 2, 0, 0, 2, 1, 1, 4, 1}, {2, 3, 3}).set_requires_grad();
  ASSERT_EQ(linalg::det(batch)[1].item(), 0);
  expect_gradients([](const TensorList& in) { return TensorList{linalg::det(in[0])}; }, {batch});
}

TEST(LinalgGradients, OfSingularValuesAloneAreFiniteWhereTheyAreEqual) {
  const Tensor x = mul(eye(3, {}, {kF64}), 2).set_requires_grad();
  expect_close(grad(linalg::svd(x).s.sum(), TensorList{x})[0], eye(3, {}, {kF64}));
  expect_close(grad(linalg::eigh(x).eigenvalues.sum(), TensorList{x})[0], eye(3, {}, {kF64}));
  // Vectors of a space of several dimensions are any: they have no derivative.
  EXPECT_FALSE(all_finite(grad(sum(mul(linalg::svd(x).u, normal({3, 3}))), TensorList{x})[0]));
  EXPECT_FALSE(
      all_finite(grad(sum(mul(linalg::eigh(x).eigenvectors, normal({3, 3}))), TensorList{x})[0]));
}

TEST(LinalgGradients, OfFullVectorsIgnoreThoseThatOnlyCompleteTheBasis) {
  for (const Shape& shape : {Shape{4, 2}, Shape{2, 2, 4}}) {
    const Tensor x = normal(shape).set_requires_grad();
    const linalg::Svd thin = linalg::svd(x, false), full = linalg::svd(x, true);
    const Tensor du = normal(full.u.shape(), kF64, "du"), dv = normal(full.vh.shape(), kF64, "dv");
    const Tensor a = grad(TensorList{full.u, full.vh}, TensorList{x}, TensorList{du, dv})[0];
    const Tensor b = grad(TensorList{thin.u, thin.vh}, TensorList{x},
                          TensorList{narrow(du, -1, 0, 2), narrow(dv, -2, 0, 2)})[0];
    expect_close(a, b);
  }
}

TEST(LinalgGradients, OfEachOutputAloneAreThoseOfAllTogether) {
  const auto pieces = [](const Function& f, const Tensor& x) {
    const TensorList outputs = f({x});
    TensorList seeds;
    Tensor parts = zeros(x.shape(), {kF64});
    for (size_t i = 0; i < outputs.size(); ++i) {
      seeds.push_back(normal(outputs[i].shape(), kF64, i == 0 ? "a" : i == 1 ? "b" : "c"));
      parts = add(parts, grad(TensorList{outputs[i]}, TensorList{x}, TensorList{seeds[i]},
                              {.retain_graph = true})[0]);
    }
    expect_close(grad(outputs, TensorList{x}, seeds)[0], parts, 1024);
  };
  for (const Shape& shape : {Shape{3, 3}, Shape{4, 3}, Shape{3, 5}}) {
    const Tensor x =
        add(normal(shape), mul(eye(shape[0], shape[1], {kF64}), 4)).set_requires_grad();
    pieces(
        [](const TensorList& in) {
          const linalg::Qr y = linalg::qr(in[0]);
          return TensorList{y.q, y.r};
        },
        x);
    pieces(
        [](const TensorList& in) {
          const linalg::Svd y = linalg::svd(in[0], false);
          return TensorList{y.u, y.s, y.vh};
        },
        x);
  }
}

TEST(LinalgGradients, OfTheHermitianPseudoInverseAndOfLowRankAreRight) {
  const auto symmetric = [](const Tensor& x) { return mul(add(x, transposed(x)), 0.5); };
  const Tensor x = add(normal({3, 3}), mul(eye(3, {}, {kF64}), 4)).set_requires_grad();
  expect_gradients(
      [&](const TensorList& in) {
        return TensorList{linalg::pinv(symmetric(in[0]), {}, {}, true)};
      },
      {x});
  // Products of thin matrices keep their rank while their elements move.
  const Tensor thin = normal({3, 2}).set_requires_grad(), b = normal({3, 2}, kF64, "b");
  expect_gradients(
      [&](const TensorList& in) {
        const Tensor low = matmul(in[0], transposed(in[0]));
        return TensorList{linalg::pinv(low, {}, 1e-9), linalg::lstsq(low, b, 1e-9).solution};
      },
      {thin});
}

// ---- Least squares ------------------------------------------------------------------------------

TEST(Lstsq, EveryDriverFindsTheLeastSquaresAndSaysWhatTorchSays) {
  for (const Shape& shape : {Shape{5, 3}, Shape{3, 5}, Shape{4, 4}, Shape{2, 1, 5, 3}}) {
    const int64_t m = shape[shape.size() - 2], n = shape.back();
    const Tensor a = normal(shape);
    const Tensor b = normal(shape.size() == 4 ? Shape{1, 3, m, 2} : Shape{m, 2}, kF64, "b");
    const Tensor expected = matmul(linalg::pinv(a), b);
    for (const LstsqDriver driver :
         {LstsqDriver::kGelsy, LstsqDriver::kGelsd, LstsqDriver::kGelss, LstsqDriver::kGels}) {
      const linalg::Lstsq y = linalg::lstsq(a, b, {}, driver);
      expect_close(y.solution, expected, 1024);
      const bool gels = driver == LstsqDriver::kGels, gelsy = driver == LstsqDriver::kGelsy;
      if (m > n && !gelsy) {
        expect_close(y.residuals, sum(square(sub(matmul(a, y.solution), b)), {-2}));
      } else {
        EXPECT_EQ(y.residuals.shape(), (Shape{0}));
      }
      const Shape batch = shape.slice(0, shape.size() - 2);
      EXPECT_EQ(y.rank.shape(), gels ? Shape{0} : batch);
      EXPECT_EQ(y.rank.dtype(), kI64);
      for (const double rank : y.rank.to_vector()) EXPECT_EQ(rank, std::min(m, n));
      if (gels || gelsy) {
        EXPECT_EQ(y.singular_values.shape(), (Shape{0}));
      } else {
        Shape sizes = batch;
        sizes.push_back(std::min(m, n));
        EXPECT_EQ(y.singular_values.shape(), sizes);
      }
    }
  }
}

TEST(Lstsq, OfLowRankHasTheLeastNormAndNoResiduals) {
  const Tensor a = matrix({1, 2, 2, 4, 0, 0}, {3, 2}), b = matrix({5, 10, 7}, {3, 1});
  const linalg::Lstsq y = linalg::lstsq(a, b, {}, LstsqDriver::kGelsd);
  expect_close(y.solution, matrix({1, 2}, {2, 1}));
  EXPECT_EQ(y.rank.item(), 1);
  EXPECT_EQ(y.residuals.shape(), (Shape{0}));
  const Tensor unequal = matrix({1, 0, 0, 1e-3}, {2, 2});
  EXPECT_EQ(linalg::lstsq(unequal, ones({2, 1}, {kF64})).rank.item(), 2);
  EXPECT_EQ(linalg::lstsq(unequal, ones({2, 1}, {kF64}), 1e-2).rank.item(), 1);
  const std::string text = message_of<ValueError>([&] {
    linalg::lstsq(zeros({2, 3, 2}), ones({2, 3, 1}), {}, LstsqDriver::kGels);
  });
  EXPECT_TRUE(mentions(text, "linalg_lstsq: matrix [0] of the batch")) << text;
}

TEST(Lstsq, ResidualsHaveGradients) {
  const TensorList inputs = {normal({4, 2}).set_requires_grad(),
                             normal({4, 3}, kF64, "b").set_requires_grad()};
  expect_gradients(
      [](const TensorList& in) {
        const linalg::Lstsq y = linalg::lstsq(in[0], in[1], {}, LstsqDriver::kGelsd);
        return TensorList{y.residuals, y.solution};
      },
      inputs);
  EXPECT_FALSE(
      linalg::lstsq(inputs[0], inputs[1], {}, LstsqDriver::kGelsd).singular_values.requires_grad());
}

TEST(LinalgValues, SignsOfVectorsAreTheSameInBothDTypes) {
  const Tensor x = normal({6, 5, 4}, kF32);
  const linalg::Svd single = linalg::svd(x), twice = linalg::svd(x.to(kF64));
  expect_close(narrow(single.u, -1, 0, 4).to(kF64), narrow(twice.u, -1, 0, 4), 1e10);
  const Tensor largest = amax(narrow(single.u, -1, 0, 4), {-2});
  EXPECT_TRUE(same_bits(largest, amax(abs(narrow(single.u, -1, 0, 4)), {-2})));
}

TEST(LinalgUse, TheDocumentedExamplesHold) {
  const Tensor a = matrix({4, 1, 2, 3}, {2, 2}), b = matrix({1, 2}, {2});
  const Tensor x = linalg::solve(a, b);
  expect_close(matmul(a, x), b);
  const auto [q, r] = linalg::qr(a);
  expect_close(matmul(q, r), a);
}

}  // namespace
}  // namespace tessera::test_linalg
