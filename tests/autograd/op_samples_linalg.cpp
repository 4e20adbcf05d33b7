// Rows of autograd/linalg.h.
#include <tessera/autograd/linalg.h>

#include "autograd/op_samples.h"

namespace tessera::tests {
namespace {

using enum Differentiable;

linalg::QrMode qr_mode(Attrs& a) {
  if (a.has("some")) {  // torch.qr
    return a.flag("some", true) ? linalg::QrMode::kReduced : linalg::QrMode::kComplete;
  }
  const std::string mode = a.text("mode", "reduced");
  if (mode == "complete") return linalg::QrMode::kComplete;
  if (mode == "r") return linalg::QrMode::kR;
  TS_CHECK(mode == "reduced", "linalg_qr", "'mode' is \"reduced\", \"complete\" or \"r\"; got '",
           mode, "'");
  return linalg::QrMode::kReduced;
}

linalg::Triangle triangle_of(Attrs& a) {
  const std::string triangle = a.text("UPLO", "L");
  TS_CHECK(triangle == "L" || triangle == "U", "linalg_eigh", "'UPLO' is \"L\" or \"U\"; got '",
           triangle, "'");
  return triangle == "L" ? linalg::Triangle::kLower : linalg::Triangle::kUpper;
}

linalg::LstsqDriver driver_of(Attrs& a) {
  const std::string driver = a.text("driver", "gelsy");
  if (driver == "gels") return linalg::LstsqDriver::kGels;
  if (driver == "gelsd") return linalg::LstsqDriver::kGelsd;
  if (driver == "gelss") return linalg::LstsqDriver::kGelss;
  TS_CHECK(driver == "gelsy", "linalg_lstsq",
           "'driver' is \"gelsy\", \"gelsd\", \"gelss\" or \"gels\"; got '", driver, "'");
  return linalg::LstsqDriver::kGelsy;
}

}  // namespace

std::vector<OpRow> linalg_rows() {
  std::vector<OpRow>
      rows =
          {
              {.name = "linalg_solve",
               .parameters = "A, B",
               .call = [](const Args& in, Attrs& a) -> Result {
                 return linalg::solve(in[0], in[1], a.flag("left", true));
               },
               .samples = {{{matrices({3, 3}, 1), normal({3, 2})}, "{}", 9},
                           {{matrices({3, 3}), normal({3})}, "{}", 9},
                           {{matrices({2, 3, 3}, 2), normal({2, 3})}, "{}", 9},
                           {{matrices({2, 1, 3, 3}, 1), normal({3, 3, 2})}, "{}", 18},
                           {{matrices({3, 3}, 1), normal({2, 2, 3})}, R"({"left": false})", 18},
                           {{matrices({1, 1}), normal({1, 1})}, "{}"}}},
              {.name = "linalg_solve_triangular",
               .parameters = "A, B",
               .call = [](const Args& in, Attrs& a) -> Result {
                 TS_CHECK(a.has("upper"), "linalg_solve_triangular",
                          "'upper' is missing: a boolean");
                 return linalg::solve_triangular(in[0], in[1], a.flag("upper", false),
                                                 a.flag("left", true),
                                                 a.flag("unitriangular", false));
               },
               .samples = {{{matrices({3, 3}), normal({3, 2})}, R"({"upper": true})", 9},
                           {{matrices({3, 3}), normal({3, 2})}, R"({"upper": false})", 9},
                           {{matrices({2, 1, 3, 3}), normal({2, 3, 2})}, R"({"upper": false})", 18},
                           {{matrices({3, 3}), normal({2, 2, 3})},
                            R"({"upper": true, "left": false})",
                            18},
                           {{matrices({3, 3}), normal({3, 2})},
                            R"({"upper": false, "unitriangular": true})",
                            9},
                           {{matrices({3, 3}), normal({2, 3})},
                            R"({"upper": true, "left": false, "unitriangular": true})",
                            9}}},
              {.name = "linalg_inv",
               .parameters = "A",
               .call = [](const Args& in, Attrs&) -> Result { return linalg::inv(in[0]); },
               .samples = {{{matrices({3, 3}, 1)}, "{}", 9},
                           {{matrices({2, 4, 4})}, "{}", 16},
                           {{matrices({2, 1, 2, 2}, 1)}, "{}", 4}}},
              {.name = "linalg_det",
               .parameters = "A",
               .call = [](const Args& in, Attrs&) -> Result { return linalg::det(in[0]); },
               .samples = {{{matrices({3, 3})}, "{}", 9},
                           {{matrices({4, 4}, 1)}, "{}", 16},
                           {{matrices({2, 2, 3, 3}, 2)}, "{}", 9},
                           {{matrices({1, 1})}}}},
              {.name = "linalg_slogdet",
               .parameters = "A",
               .call = [](const Args& in, Attrs&) -> Result {
                 const linalg::SignLogDet y = linalg::slogdet(in[0]);
                 return TensorList{y.sign, y.logabsdet};
               },
               .samples = {{{matrices({3, 3})}, "{}", 9},
                           {{matrices({4, 4}, 1)}, "{}", 16},
                           {{matrices({2, 2, 3, 3}, 2)}, "{}", 9}}},
              {.name = "linalg_cholesky",
               .parameters = "A",
               .call = [](const Args& in, Attrs& a) -> Result {
                 return linalg::cholesky(in[0], a.flag("upper", false));
               },
               .samples = {{{matrices({3, 3})}, "{}", 9},
                           {{matrices({2, 4, 4})}, "{}", 16},
                           {{matrices({3, 3})}, R"({"upper": true})", 9}},
               .symmetric = true},
              {.name = "linalg_qr",
               .parameters = "A",
               .call = [](const Args& in, Attrs& a) -> Result {
                 const linalg::Qr y = linalg::qr(in[0], qr_mode(a));
                 return TensorList{y.q, y.r};
               },
               .samples = {{{matrices({3, 3}, 1)}, "{}", 9},
                           {{matrices({4, 3})}, "{}", 12},
                           {{matrices({2, 2, 4})}, "{}", 8},
                           {{matrices({2, 3})}, R"({"mode": "complete"})", 6}}},
              {.name = "linalg_svd",
               .parameters = "A",
               .call = [](const Args& in, Attrs& a) -> Result {
                 if (a.has("some")) {  // torch.svd, which returns V
                   const linalg::Svd y = linalg::svd(in[0], !a.flag("some", true));
                   return TensorList{y.u, y.s, transpose(y.vh, -2, -1)};
                 }
                 const linalg::Svd y = linalg::svd(in[0], a.flag("full_matrices", true));
                 return TensorList{y.u, y.s, y.vh};
               },
               .samples = {{{matrices({3, 3}, 1)}, "{}", 9},
                           {{matrices({4, 3})}, R"({"full_matrices": false})", 12},
                           {{matrices({2, 2, 4})}, R"({"full_matrices": false})", 8}},
               // Rounding counts by the distance of singular values: 28 against torch in f64.
               .tolerance = 64},
              {.name = "linalg_eigh",
               .parameters = "A",
               .call = [](const Args& in, Attrs& a) -> Result {
                 const linalg::Eigh y = linalg::eigh(in[0], triangle_of(a));
                 return TensorList{y.eigenvalues, y.eigenvectors};
               },
               .samples = {{{matrices({3, 3})}, "{}", 9},
                           {{matrices({2, 4, 4})}, "{}", 16},
                           {{matrices({3, 3})}, R"({"UPLO": "U"})", 9}},
               .symmetric = true,
               // By the distance of eigenvalues: 7.1 against torch in f64.
               .tolerance = 16},
              {.name = "linalg_pinv",
               .parameters = "A",
               .call = [](const Args& in, Attrs& a) -> Result {
                 return linalg::pinv(in[0], a.maybe_number("atol"), a.maybe_number("rtol|rcond"),
                                     a.flag("hermitian", false));
               },
               .samples = {{{matrices({3, 3}, 1)}, "{}", 9},
                           {{matrices({4, 2})}, "{}", 8},
                           {{matrices({2, 2, 4})}, R"({"rtol": 1e-3})", 8}}},
              {.name = "linalg_lstsq",
               .parameters = "A, B",
               .call = [](const Args& in, Attrs& a) -> Result {
                 const linalg::Lstsq y =
                     linalg::lstsq(in[0], in[1], a.maybe_number("rcond"), driver_of(a));
                 return TensorList{y.solution, y.residuals, y.rank, y.singular_values};
               },
               .samples = {{{matrices({4, 2}), normal({4, 2})}, "{}", 16},
                           {{matrices({4, 2}), normal({4, 2})}, R"({"driver": "gels"})", 16},
                           {{matrices({2, 3}), normal({2, 2})}, "{}", 12},
                           {{matrices({2, 1, 4, 2}), normal({1, 2, 4, 1})},
                            R"({"driver": "gels"})",
                            16},
                           {{matrices({2, 3, 2}), normal({2, 3})}, "{}", 12}},
               // By the square of the condition number: 17.3 against torch in f64.
               .tolerance = 64},
          };
  for (OpRow& row : rows) row.linear_algebra = true;
  return rows;
}

}  // namespace tessera::tests
