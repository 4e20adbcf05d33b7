// Products of cuBLASLt at the shapes of GPT-2's steps, each with what the ops ask it to do around
// them.
#include "shapes.h"

#include <optional>
#include <tuple>

#include <tessera/core/context.h>
#include <tessera/core/cuda/libraries/gemm.h>
#include <tessera/core/gemm_options.h>

namespace tessera::gpu_shapes {
namespace {

using gpu::GemmEpilogue, gpu::GemmProblem, gpu::GemmScale;

// A product [M, K] [K, N]: who is transposed in memory says which one of a linear layer it is.
struct Product {
  int64_t M, N, K;
  bool a_transposed = false, b_transposed = false;
};
// Of x [tokens, in] and a weight [out, in].
Product forward(int64_t tokens, int64_t in, int64_t out) { return {tokens, out, in, false, true}; }
Product input_gradient(int64_t tokens, int64_t in, int64_t out) { return {tokens, in, out}; }
Product weight_gradient(int64_t tokens, int64_t in, int64_t out) {
  return {out, in, tokens, true, false};
}

struct Request {
  DType dtype = kBF16, out = kBF16;
  GemmEpilogue epilogue = GemmEpilogue::kNone;
  double alpha = 1, beta = 0;
  bool separate_c = false;  // what beta multiplies lies elsewhere
  bool whole_numbers = true;
  std::optional<DType> b_dtype = {};
  GemmScale a_scaling = GemmScale::kTensor, b_scaling = GemmScale::kTensor;
};

Tensor gelu_slope(const Tensor& x) {
  const double c = std::sqrt(2 / M_PI);
  const Tensor t = tanh(mul(add(x, mul(mul(square(x), x), 0.044715)), c));
  const Tensor inner = mul(add(mul(square(x), 3 * 0.044715), 1), c);
  return add(mul(add(t, 1), 0.5), mul(mul(mul(x, 0.5), rsub(1, square(t))), inner));
}
// What tanh.approx may be off by, of GELU of v and of its slope at v.
Tensor gelu_error(const Tensor& v) { return mul(mul(abs(v), add(abs(v), 1)), 0x1p-10); }
Tensor slope_error(const Tensor& v) { return mul(add(mul(square(v), 2), 1), 0x1p-10); }

// Numbers by which the rows (columns) of an operand in f64 [outer, K] are multiplied, as gemm.h
// lays them out, and those of each element.
struct Scales {
  Tensor numbers, of_each;
};
Scales make_scales(GemmScale scaling, int64_t outer, int64_t K, double one) {
  if (scaling == GemmScale::kTensor) {
    const Tensor scale = full({1}, one, {.dtype = kF32, .device = kGpu});
    return {scale, f64_of(scale).view({1, 1})};
  }
  const Tensor numbers =
      add(rand({gpu::count_scales(scaling, outer, K)}, {.device = kGpu}), 0.5).contiguous();
  if (scaling == GemmScale::kOuter) return {numbers, f64_of(numbers).view({outer, 1})};
  const int64_t stretches = (K + 127) / 128;
  const auto of_128 = [&](const Tensor& x, int64_t dim, int64_t size) {
    return repeat_interleave(x, 128, dim).narrow(dim, 0, size);
  };
  if (scaling == GemmScale::kVectors) {
    const Tensor by_rows = f64_of(numbers).view({stretches, outer}).t();
    return {numbers, of_128(by_rows, 1, K)};
  }
  const Tensor squares =
      f64_of(numbers).view({(outer + 127) / 128, (stretches + 3) / 4 * 4}).narrow(1, 0, stretches);
  return {numbers, of_128(of_128(squares, 0, outer), 1, K)};
}

std::string name_of(const Product& p, const Request& r) {
  return std::to_string(p.M) + " x " + std::to_string(p.N) + " x " + std::to_string(p.K) +
         (p.a_transposed ? " ta" : "") + (p.b_transposed ? " tb" : "") + " " +
         std::string(tessera::name_of(r.dtype)) + " to " + std::string(tessera::name_of(r.out)) +
         " " + gpu::name_of(r.epilogue) + (r.beta != 0 ? " beta" : "") +
         (r.separate_c ? " c" : "") + (r.whole_numbers ? "" : " normal") + " " +
         gpu::name_of(r.a_scaling) + " " + gpu::name_of(r.b_scaling);
}

enum class Served { kMust, kMay };

// Runs it and compares. `served`: whether the library may leave it to own kernels.
void check(const Product& p, const Request& r, Served served = Served::kMust) {
  using enum GemmEpilogue;
  const std::string what = name_of(p, r);
  SCOPED_TRACE(what);
  const DType b_dtype = r.b_dtype.value_or(r.dtype);
  const bool fp8 = is_fp8(r.dtype);
  const auto made = [&](const Shape& shape, DType dtype, int64_t most) {
    return r.whole_numbers ? integers(shape, dtype, most) : normal(shape, dtype);
  };
  const Tensor a = made(p.a_transposed ? Shape{p.K, p.M} : Shape{p.M, p.K}, r.dtype, 2);
  const Tensor b = made(p.b_transposed ? Shape{p.N, p.K} : Shape{p.K, p.N}, b_dtype, 2);
  const bool sums_bias =
      r.epilogue == kGeluGradBiasGrad || r.epilogue == kBiasGradOfA || r.epilogue == kBiasGradOfB;
  const bool has_bias = sums_bias || r.epilogue == kBias || r.epilogue == kGeluBias;
  const bool slopes = r.epilogue == kGeluGrad || r.epilogue == kGeluGradBiasGrad;
  const bool has_aux = slopes || r.epilogue == kGelu || r.epilogue == kGeluBias;
  const int64_t biases = r.epilogue == kBiasGradOfA ? p.M : p.N;
  const DType bias_dtype = fp8 && r.out == kF32 ? kBF16 : r.out;
  // Old contents are to be overwritten, and not added to.
  const Tensor d = r.beta != 0 && !r.separate_c ? made({p.M, p.N}, r.out, 3)
                                                : full({p.M, p.N}, 77, {r.out, kGpu});
  const Tensor c = r.beta == 0 ? Tensor() : r.separate_c ? made({p.M, p.N}, r.out, 3) : d;
  const Tensor bias = !has_bias   ? Tensor()
                      : sums_bias ? full({biases}, 77, {bias_dtype, kGpu})
                                  : made({biases}, bias_dtype, 3);
  const Tensor aux = !has_aux ? Tensor()
                     : slopes ? normal({p.M, p.N}, r.out)
                              : full({p.M, p.N}, 77, {r.out, kGpu});

  const std::vector<int64_t> rows = sampled_rows(p.M);
  Tensor left = rows_of(a, p.a_transposed ? 1 : 0, rows), right = f64_of(b);
  if (p.a_transposed) left = left.t();
  if (p.b_transposed) right = right.t();
  const Tensor added = c.defined() ? mul(rows_of(c, 0, rows), r.beta) : Tensor();

  GemmProblem problem{.M = p.M, .N = p.N, .K = p.K, .alpha = r.alpha, .beta = r.beta};
  problem.a = {r.dtype, p.a_transposed, p.a_transposed ? p.M : p.K, 0, a.data()};
  problem.b = {b_dtype, p.b_transposed, p.b_transposed ? p.K : p.N, 0, b.data()};
  problem.d = {r.out, false, p.N, 0, d.data()};
  if (r.separate_c) problem.c = c.data();
  problem.epilogue = r.epilogue;
  if (has_bias) {
    problem.bias = bias.data();
    problem.bias_dtype = bias_dtype;
  }
  if (has_aux) problem.aux = {r.out, false, p.N, 0, aux.data()};
  Scales a_scales, b_scales;
  if (fp8) {
    a_scales = make_scales(r.a_scaling, p.M, p.K, 0.37);
    b_scales = make_scales(r.b_scaling, p.N, p.K, 1.3);
    problem.a_scale = a_scales.numbers.data();
    problem.b_scale = b_scales.numbers.data();
    problem.a_scaling = r.a_scaling;
    problem.b_scaling = r.b_scaling;
    const Tensor index =
        tensor(std::span<const int64_t>(rows), {static_cast<int64_t>(rows.size())}).to(kGpu);
    left = mul(left, a_scales.of_each.size(0) == 1 ? a_scales.of_each
                                                   : index_select(a_scales.of_each, 0, index));
    right = mul(right, b_scales.of_each.t());
  }
  ASSERT_EQ(gpu::validate(problem), "");
  if (!gpu::run_gemm(problem)) {
    EXPECT_EQ(served, Served::kMay) << "the library does not serve " << gpu::describe(problem);
    std::printf("not served: %s\n", what.c_str());
    return;
  }

  Tensor v = mul(matmul(left, right), r.alpha);
  // Products of whole numbers with a number for all of them are rounded where that comes in, twice.
  const Tensor magnitudes = mul(matmul(abs(left), abs(right)), std::abs(r.alpha));
  const bool exact = r.whole_numbers && !fp8;
  const double per_magnitude =
      exact ? 0
      : fp8 ? (r.whole_numbers && r.a_scaling == GemmScale::kTensor ? 0x1p-21 : 0x1p-13)
            : 4 * 0x1p-23 * std::sqrt(static_cast<double>(p.K));
  Tensor error = mul(magnitudes, per_magnitude);
  if (added.defined()) v = add(v, added);
  if (r.epilogue == kBias || r.epilogue == kGeluBias) v = add(v, f64_of(bias));
  Tensor y = v;
  if (r.epilogue == kGelu || r.epilogue == kGeluBias) {
    expect_within(rows_of(aux, 0, rows), v, add(error, rounding(v, r.out)), what + ": aux");
    y = gelu(v, Gelu::kTanh);
    error = add(mul(error, 1.13), gelu_error(v));  // its slope is below 1.13
  } else if (slopes) {
    const Tensor x = rows_of(aux, 0, rows);
    y = mul(v, gelu_slope(x));
    error = add(mul(error, 1.13), mul(abs(v), slope_error(x)));
  }
  Tensor rounded = rounding(y, r.out);
  if (size_of(r.out) == 2 && added.defined())
    rounded = add(rounded, rounding(sub(v, added), r.out));
  if (size_of(r.out) == 2 && slopes) rounded = mul(rounded, 2);
  expect_within(rows_of(d, 0, rows), y, add(error, rounded), what);
  if (!sums_bias) return;
  if (r.epilogue == kGeluGradBiasGrad) {
    // Of the results, which were compared above, rounded or not: errors of both signs.
    const Tensor whole = f64_of(d);
    const Tensor sums = sum(whole, {0});
    const Tensor off = mul(sqrt(sum(square(whole), {0})), 4 * epsilon_of(r.out));
    const Tensor order = mul(sum(abs(whole), {0}), 0x1p-20);
    expect_within(bias, sums, add(add(off, order), rounding(sums, bias_dtype)), what + ": bias");
    return;
  }
  const bool of_a = r.epilogue == kBiasGradOfA;
  const Tensor& operand = of_a ? a : b;
  const int64_t along = of_a ? (p.a_transposed ? 0 : 1) : (p.b_transposed ? 1 : 0);
  const Tensor sums = sum(operand, {along}, false, kF64);
  Tensor bound = rounding(sums, bias_dtype);
  if (!exact) bound = add(bound, mul(sum(abs(operand), {along}, false, kF64), 0x1p-20));
  expect_within(bias, sums, bound, what + ": bias");
}

struct Width {
  int64_t in, out;
  bool head = false;  // nothing stands around it
};
int64_t tokens() { return size_or(65536, 144); }
// GPT-2 124M's linear layers, the head first, and 355M's of the block.
std::vector<Width> widths_124m() {
  if (small_shapes()) return {{16, 144, true}, {32, 16}};
  return {{768, 50304, true}, {768, 2304}, {768, 768}, {768, 3072}, {3072, 768}};
}
std::vector<Width> widths_355m() {
  if (small_shapes()) return {};
  return {{1024, 3072}, {1024, 1024}, {1024, 4096}, {4096, 1024}};
}

class ShapesProducts : public testing::Test {
 protected:
  void SetUp() override { manual_seed(5); }
};

TEST(ShapesReference, OfProductsIsThatOfMultiplicationsAndSums) {
  manual_seed(3);
  const int64_t K = size_or(3072, 40), N = size_or(512, 24);
  const Tensor a = integers({9, K}, kF64, 3), b = integers({K, N}, kF64, 3);
  expect_same(matmul(a, b), sum(mul(a.unsqueeze(2), b.unsqueeze(0)), {1}), "by rows");
  expect_same(matmul(a, b.t().contiguous().t()), matmul(a, b), "by columns");
  const Tensor x = normal({9, K}, kF64), y = normal({K, N}, kF64);
  const Tensor expected = sum(mul(x.unsqueeze(2), y.unsqueeze(0)), {1});
  expect_within(matmul(x, y), expected,
                mul(matmul(abs(x), abs(y)), 0x1p-50 * std::sqrt(static_cast<double>(K))), "normal");
}

TEST_F(ShapesProducts, Of16BitsWithWhatStandsAroundThem) {
  using enum GemmEpilogue;
  for (const DType dtype : {kBF16, kF16}) {
    if (small_shapes() && dtype == kF16) continue;  // the way is the same
    for (const auto& widths : {widths_124m(), widths_355m()}) {
      for (const auto& [in, out, head] : widths) {
        const Product y = forward(tokens(), in, out), dx = input_gradient(tokens(), in, out),
                      dw = weight_gradient(tokens(), in, out);
        const auto with = [&](GemmEpilogue epilogue, double alpha) {
          return Request{.dtype = dtype, .out = dtype, .epilogue = epilogue, .alpha = alpha};
        };
        for (const Product& one : {y, dx, dw}) {
          check(one, with(kNone, 1));
          // To f32, as sums of gradients are kept, onto what is there.
          Request onto = with(kNone, 1);
          onto.beta = 1;
          check(one, onto);
          onto.out = kF32;
          check(one, onto);
        }
        check(dw, with(kBiasGradOfA, 1));
        check(dw, with(kBiasGradOfB, 1), Served::kMay);  // no op asks for it
        if (head) continue;
        check(y, with(kBias, 1));
        // Numbers about 1, where GELU is no line; a power of two changes no digit.
        check(y, with(kGeluBias, 0x1p-6));
        check(y, with(kGelu, 0x1p-6));
        check(dx, with(kGeluGradBiasGrad, 0x1p-6));
        check(dx, with(kGeluGrad, 0x1p-6));
        Request residual = with(kBias, 1);
        residual.beta = 1;
        residual.separate_c = true;
        check(y, residual);
      }
    }
  }
}

TEST_F(ShapesProducts, OfNormalNumbersAreRoundedOnce) {
  for (const DType dtype : {kBF16, kF16, kF32}) {
    for (const auto& [in, out, head] : widths_124m()) {
      for (const Product& one : {forward(tokens(), in, out), input_gradient(tokens(), in, out),
                                 weight_gradient(tokens(), in, out)}) {
        check(one, {.dtype = dtype, .out = dtype, .whole_numbers = false});
      }
    }
  }
}

// f32 is multiplied in full: integers of 13 bits, which TF32 would cut, below 2^24 in the sum.
TEST_F(ShapesProducts, OfF32AreNotCutToTf32) {
  using enum GemmEpilogue;
  for (const auto& [in, out, head] : widths_124m()) {
    const Product y = forward(tokens(), in, out);
    check(y, {.dtype = kF32, .out = kF32});
    check(weight_gradient(tokens(), in, out), {.dtype = kF32, .out = kF32, .beta = 1});
    if (head) continue;
    for (const GemmEpilogue epilogue : {kBias, kGeluBias}) {
      check(y, {.dtype = kF32, .out = kF32, .epilogue = epilogue, .alpha = 0x1p-6}, Served::kMay);
    }
    check(input_gradient(tokens(), in, out),
          {.dtype = kF32, .out = kF32, .epilogue = kGeluGradBiasGrad, .alpha = 0x1p-6},
          Served::kMay);
  }
  const int64_t n = size_or(512, 32);
  const Tensor x = add(mul(integers({n, 64}, kF32, 2), 4096), integers({n, 64}, kF32, 1));
  const Tensor one = integers({64, n}, kF32, 1);
  const Tensor y = empty({n, n}, {.dtype = kF32, .device = kGpu});
  GemmProblem problem{.M = n, .N = n, .K = 64};
  problem.a = {kF32, false, 64, 0, x.data()};
  problem.b = {kF32, false, n, 0, one.data()};
  problem.d = {kF32, false, n, 0, y.data()};
  ASSERT_TRUE(gpu::run_gemm(problem));
  expect_same(y.to(kF64), matmul(x.to(kF64), one.to(kF64)), "13 bits");
}

TEST_F(ShapesProducts, OfFp8WithTheirScales) {
  using enum GemmScale;
  for (const auto& [in, out, head] : widths_124m()) {
    // fp8 has rows and columns that lie along K alone: copies by columns serve the gradients.
    const Product y = forward(tokens(), in, out);
    const Product dx{tokens(), in, out, false, true}, dw{out, in, tokens(), false, true};
    for (const DType result : {kBF16, kF32}) {
      check(y, {.dtype = kF8E4M3, .out = result});
      check(dx, {.dtype = kF8E5M2, .out = result, .b_dtype = kF8E4M3});
      check(dw, {.dtype = kF8E5M2, .out = result, .b_dtype = kF8E4M3});
    }
    check(y, {.dtype = kF8E4M3, .out = kBF16, .epilogue = GemmEpilogue::kBias});
    check(y, {.dtype = kF8E4M3, .out = kBF16, .whole_numbers = false});
    for (const auto& [a, b] : {std::pair(kOuter, kOuter), std::pair(kVectors, kVectors),
                               std::pair(kVectors, kSquares), std::pair(kSquares, kVectors)}) {
      check(y, {.dtype = kF8E4M3, .out = kBF16, .a_scaling = a, .b_scaling = b});
    }
  }
}

// Rows that begin two elements into a buffer and are not a multiple of 16 bytes long: the library
// or own kernels take them, and nothing is loaded as a vector that does not lie as one.
TEST_F(ShapesProducts, OfOddAddressesAndSizes) {
  for (const DType dtype : {kBF16, kF16, kF32}) {
    for (const int64_t offset : {int64_t{1}, int64_t{2}, int64_t{10}}) {
      const int64_t M = size_or(1030, 34), N = size_or(770, 26), K = size_or(515, 19);
      const auto odd = [&](int64_t rows, int64_t columns) {
        return integers({offset + rows * columns}, dtype, 2)
            .narrow(0, offset, rows * columns)
            .view({rows, columns});
      };
      const Tensor x = odd(M, K), weight = odd(N, K), bias = odd(1, N).view({N});
      const Tensor expected = add(matmul(f64_of(x), f64_of(weight).t()), f64_of(bias).view({1, N}));
      const std::string what =
          std::string(tessera::name_of(dtype)) + " from " + std::to_string(offset);
      expect_within(linear(x, weight, bias), expected, rounding(expected, dtype), what);
      // A bias alone at an odd address, behind which all else lies well.
      const Tensor wide = integers({size_or(1024, 32), size_or(768, 64)}, dtype, 2);
      const Tensor even = integers({size_or(768, 32), size_or(768, 64)}, dtype, 2);
      const Tensor late = odd(1, even.size(0)).view({even.size(0)});
      const Tensor sums =
          add(matmul(f64_of(wide), f64_of(even).t()), f64_of(late).view({1, even.size(0)}));
      expect_within(linear(wide, even, late), sums, rounding(sums, dtype), what + ": bias");
    }
  }
}

// A transformer's MLP and back, as its op asks for it, fused and not.
TEST_F(ShapesProducts, OfAnMlpWithItsGradients) {
  const int64_t rows = size_or(8192, 40), width = size_or(768, 16), inner = 4 * width;
  for (const DType dtype : {kBF16, kF32}) {
    const auto leaf = [&](const Shape& shape, double scale) {
      return mul(normal(shape, kF32), scale).to(dtype).detach();
    };
    const double narrow = 1 / std::sqrt(static_cast<double>(width)),
                 wide = 1 / std::sqrt(static_cast<double>(inner));
    const TensorList leaves = {leaf({rows, width}, 1), leaf({inner, width}, narrow),
                               leaf({inner}, 0.1), leaf({width, inner}, wide), leaf({width}, 0.1)};
    const Tensor up = normal({rows, width}, dtype);
    const auto run = [&](DType compute, GemmFusion fusion) {
      const ScopedValue<GemmFusion> scope(Context::current().slot<GemmOptions>().fusion, fusion);
      TensorList in;
      for (const Tensor& x : leaves) in.push_back(x.to(compute).detach().set_requires_grad());
      const Tensor y = linear_gelu_linear(in[0], in[1], in[2], in[3], in[4]);
      y.backward(up.to(compute));
      TensorList results = {y.detach()};
      for (const Tensor& x : in) results.push_back(x.grad());
      return results;
    };
    const TensorList expected = run(kF64, GemmFusion::kNever);
    for (const GemmFusion fusion : {GemmFusion::kAlways, GemmFusion::kNever}) {
      const TensorList got = run(dtype, fusion);
      for (size_t i = 0; i < got.size(); ++i) {
        // Errors of what was rounded on the way, of both signs, are those of the largest numbers:
        // a few roundings of the root of the mean square, eight sigma of it.
        const double size = std::sqrt(mean(square(expected[i])).item());
        const Tensor bound =
            add(rounding(expected[i], dtype),
                full({1}, 16 * (epsilon_of(dtype) + 0x1p-17) * size, {kF64, kGpu}));
        expect_within(got[i], expected[i], bound,
                      std::string(tessera::name_of(dtype)) + " result " + std::to_string(i) +
                          (fusion == GemmFusion::kAlways ? ", fused" : ", apart"));
      }
    }
  }
}

}  // namespace
}  // namespace tessera::gpu_shapes
