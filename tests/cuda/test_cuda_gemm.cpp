// The layer over cuBLASLt: its rules, how row-major products are asked for by columns; ops that ask
// for products with epilogues, of the library on a GPU and of a model of it on the emulation.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/context.h>
#include <tessera/core/cuda/launch_times.h>
#include <tessera/core/cuda/libraries/gemm.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/functors.h>
#include <tessera/core/gpu/backend.h>

#include "gemm_model.h"
#include "on_emulation.h"

namespace tessera::gpu::test_cuda_gemm {
namespace {

alignas(256) char some_memory[4096];

// A product that every rule allows: 32 x 48 x 64, all by rows.
GemmProblem plain(DType dtype = kBF16) {
  GemmProblem p{.M = 32, .N = 48, .K = 64};
  p.a = {.dtype = dtype, .leading = 64, .data = some_memory};
  p.b = {.dtype = dtype, .leading = 48, .data = some_memory};
  p.d = {.dtype = dtype, .leading = 48, .data = some_memory};
  return p;
}
GemmProblem with_bias(GemmEpilogue epilogue, DType dtype = kBF16) {
  GemmProblem p = plain(dtype);
  p.epilogue = epilogue;
  p.a.transposed = epilogue == GemmEpilogue::kBiasGradOfA;
  p.bias = some_memory;
  p.bias_dtype = dtype;
  return p;
}
GemmProblem with_aux(GemmProblem p) {
  p.aux = {.dtype = p.d.dtype, .leading = 48, .data = some_memory};
  return p;
}
GemmProblem fp8(DType a, DType b, DType d) {
  GemmProblem p = plain();
  p.a.dtype = a;
  p.b = {.dtype = b, .transposed = true, .leading = 64, .data = some_memory};
  p.d.dtype = d;
  p.a_scale = p.b_scale = some_memory;
  return p;
}

void expect_refused(const GemmProblem& problem, const std::string& reason) {
  const std::string said = validate(problem);
  EXPECT_NE(said.find(reason), std::string::npos)
      << "expected '" << reason << "', got '" << said << "'";
}
template <class Change>
void expect_refused_when(Change change, const std::string& reason, GemmProblem problem = plain()) {
  ASSERT_EQ(validate(problem), "");
  change(problem);
  expect_refused(problem, reason);
}

TEST(GemmRules, DtypesGoTogetherAsTheLibraryHasThem) {
  for (const DType dtype : {kF64, kF32, kF16, kBF16}) EXPECT_EQ(validate(plain(dtype)), "");
  for (const DType dtype : {kF16, kBF16}) {
    GemmProblem wide = plain(dtype);
    wide.d.dtype = kF32;
    EXPECT_EQ(validate(wide), "");
    wide.d.dtype = kF64;
    expect_refused(wide, "do not give f64");
  }
  GemmProblem mixed = plain();
  mixed.b.dtype = kF16;
  expect_refused(mixed, "a is bf16 and b is f16");
  expect_refused(plain(kI32), "no product of i32");
  GemmProblem tf32 = plain(kF32);
  tf32.tf32 = true;
  EXPECT_EQ(validate(tf32), "");
  expect_refused_when([](GemmProblem& p) { p.tf32 = true; }, "tf32 is for f32");
}

TEST(GemmRules, SizesStridesAndAddresses) {
  constexpr int64_t kMore = int64_t{1} << 31;
  expect_refused_when([](GemmProblem& p) { p.K = 0; }, "sizes must be");
  expect_refused_when([](GemmProblem& p) { p.M = kMore; }, "sizes must be");
  expect_refused_when([](GemmProblem& p) { p.batch = 0; }, "sizes must be");
  expect_refused_when([](GemmProblem& p) { p.a.leading = 63; }, "a has rows of 64 elements 63");
  expect_refused_when([](GemmProblem& p) { p.b.transposed = true; }, "b has rows of 64");
  expect_refused_when([](GemmProblem& p) { p.d.transposed = true; }, "must lie by rows");
  expect_refused_when([](GemmProblem& p) { p.d.data = nullptr; }, "the result is missing");
  expect_refused_when([](GemmProblem& p) { p.a.data = some_memory + 1; }, "no multiple");
  expect_refused_when([](GemmProblem& p) { p.batch = 2; }, "overlap");
  expect_refused_when([](GemmProblem& p) { p.b.batch_stride = -1; }, "negative batch stride");
  GemmProblem batch = plain();
  batch.batch = 2;
  batch.d.batch_stride = 31 * 48 + 48;  // a and b are the same matrix for both
  EXPECT_EQ(validate(batch), "");
  const auto added = [](GemmProblem& p, int64_t offset, double beta) {
    p.c = some_memory + offset;
    p.beta = beta;
  };
  GemmProblem sum = plain();
  added(sum, 2, 1);
  EXPECT_EQ(validate(sum), "");
  expect_refused_when([&](GemmProblem& p) { added(p, 1, 1); }, "c lies at an address");
  expect_refused_when([&](GemmProblem& p) { added(p, 0, 0); }, "beta leaves out");
}

// ---- Keys of algorithms -------------------------------------------------------------------------

TEST(GemmKeys, LengthsAreRoundedUpToThreeSignificantBits) {
  int64_t last = 0, classes = 0;
  for (int64_t length = 1; length <= 1 << 16; ++length) {
    const int64_t up = rounded_length(length);
    EXPECT_GE(up, length);
    EXPECT_LE(4 * (up - length), length) << length;  // a quarter at most
    EXPECT_GE(up, last);
    EXPECT_EQ(rounded_length(up), up);
    if (length % 16 == 0) {
      EXPECT_EQ(up % 16, 0) << length;  // as fp8 needs it
    }
    classes += up != last;
    last = up;
  }
  EXPECT_EQ(classes, 8 + 4 * 13);  // 1 to 8, and four in each octave
  for (const int64_t usual : {12288, 24576, 49152, 65536}) EXPECT_EQ(rounded_length(usual), usual);
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  EXPECT_EQ(rounded_length(kMost), kMost);
}

// The three products of a linear layer and batches of matrices, of one length.
std::vector<GemmProblem> products_of_length(int64_t length, DType dtype) {
  const auto matrix = [&](bool transposed, int64_t leading, int64_t batch_stride = 0) {
    return GemmMatrix{dtype, transposed, leading, batch_stride, some_memory};
  };
  constexpr int64_t kIn = 80, kOut = 112;  // not rounded, which their keys would show
  GemmProblem forward{.M = length, .N = kOut, .K = kIn};
  forward.a = matrix(false, kIn);
  forward.b = matrix(true, kIn);
  forward.d = matrix(false, kOut);
  GemmProblem input = {.M = length, .N = kIn, .K = kOut};
  input.a = matrix(false, kOut);
  input.b = matrix(false, kIn);
  input.d = matrix(false, kIn);
  GemmProblem weight = {.M = kOut, .N = kIn, .K = length};
  weight.a = matrix(true, kOut);
  weight.b = matrix(false, kIn);
  weight.d = matrix(false, kIn);
  GemmProblem batch = forward, batch_weight = weight;
  batch.batch = length;
  batch.a.batch_stride = length * kIn;
  batch.d.batch_stride = length * kOut;
  batch_weight.batch = length;
  batch_weight.a.batch_stride = length * kOut;
  batch_weight.b.batch_stride = length * kIn;
  batch_weight.d.batch_stride = kOut * kIn;
  std::vector<GemmProblem> all = {forward, input, weight, batch, batch_weight};
  if (is_fp8(dtype)) {  // both operands have the sum along memory
    all = {forward};
    GemmProblem sums = {.M = kOut, .N = kIn, .K = length, .sums_over_rows = true};
    sums.a = matrix(false, length);
    sums.b = matrix(true, length);
    sums.d = matrix(false, kIn);
    all.push_back(sums);
    for (GemmProblem& p : all) p.d.dtype = kBF16;
  }
  return all;
}

TEST(GemmKeys, OfAnyLengthThereAreFourInAnOctave) {
  for (const DType dtype : {kF32, kBF16, kF8E4M3}) {
    const int64_t step = is_fp8(dtype) ? 16 : 1, kinds = is_fp8(dtype) ? 2 : 5;
    std::set<std::string> keys, lengths;
    for (int64_t length = 256; length < 1024; length += step) {
      for (const GemmProblem& p : products_of_length(length, dtype)) {
        ASSERT_EQ(validate(p), "");
        ASSERT_EQ(validate(rounded(p)), "") << describe(rounded(p));
        EXPECT_EQ(key_of(rounded(p)), key_of(p));
        keys.insert(key_of(p));
        lengths.insert(describe(p));
      }
    }
    EXPECT_EQ(static_cast<int64_t>(lengths.size()), kinds * 768 / step);
    EXPECT_EQ(static_cast<int64_t>(keys.size()), kinds * 9) << dtype;  // 256, 320 ... 1024
  }
}

TEST(GemmKeys, SizesThatStridesDependOnStandAsTheyAre) {
  for (const auto size : {&GemmProblem::N, &GemmProblem::K}) {
    GemmProblem p = products_of_length(300, kBF16)[0], other = p;
    ++(other.*size);
    other.a.leading = other.b.leading = other.K;
    other.d.leading = other.N;
    EXPECT_NE(key_of(p), key_of(other));
  }
  GemmProblem columns = plain();  // a by columns: its rows lie along memory
  columns.a = {.dtype = kBF16, .transposed = true, .leading = 300, .data = some_memory};
  columns.M = 300;
  EXPECT_EQ(rounded(columns).M, 300);
  GemmProblem apart = products_of_length(300, kBF16)[3];  // matrices do not follow each other
  apart.a.batch_stride += 8;
  EXPECT_EQ(rounded(apart).a.batch_stride, apart.a.batch_stride);
}

TEST(GemmKeys, AProductIsTriedOutInItsOwnResultUnlessItReadsThat) {
  GemmProblem p = plain();
  EXPECT_FALSE(reads_result(p));
  p.beta = 1;
  EXPECT_TRUE(reads_result(p));
  p.c = some_memory;
  EXPECT_FALSE(reads_result(p));
}

// No clock decides unless it is asked for.
TEST(GemmKeys, FusedOrApartIsWhatTheTableSaysElseARule) {
  using enum GemmEpilogue;
  for (const GemmEpilogue e :
       {kGelu, kGeluBias, kGeluGrad, kGeluGradBiasGrad, kBiasGradOfA, kBiasGradOfB}) {
    GemmProblem p = plain();
    p.epilogue = e;
    const bool forward = e == kGelu || e == kGeluBias;
    EXPECT_EQ(fused_by_rule(p), forward) << name_of(e);
    for (const bool known : {false, true}) {
      const std::optional<std::string> entry = known ? "fused" : "apart";
      EXPECT_EQ(fused_without_measuring(GemmFusion::kByTable, p, entry), known);
      EXPECT_EQ(fused_without_measuring(GemmFusion::kMeasured, p, entry), known);
      EXPECT_EQ(fused_without_measuring(GemmFusion::kNever, p, entry), false);
      EXPECT_EQ(fused_without_measuring(GemmFusion::kAlways, p, entry), true);
    }
    EXPECT_EQ(fused_without_measuring(GemmFusion::kByTable, p, {}), forward);
    EXPECT_EQ(fused_without_measuring(GemmFusion::kMeasured, p, {}), std::nullopt);
  }
  EXPECT_EQ(GemmOptions{}.fusion, GemmFusion::kByTable);
}

TEST(GemmKeys, PartialSumsAreNotKeptInTheResultsDtype) {
  constexpr uint32_t kNone = 0, kInPlace = 1, kComputeType = 2, kOutputType = 4;
  EXPECT_TRUE(allows_reduction(kNone) && allows_reduction(kComputeType));
  EXPECT_FALSE(allows_reduction(kInPlace) || allows_reduction(kOutputType));
}

TEST(GemmRules, EpiloguesHaveWhatTheyNeedAndNothingElse) {
  using enum GemmEpilogue;
  for (const GemmEpilogue e : {kBias, kGeluBias, kBiasGradOfA, kBiasGradOfB}) {
    EXPECT_EQ(validate(with_bias(e)), "") << name_of(e);
    expect_refused_when([](GemmProblem& p) { p.bias = nullptr; }, "needs a bias", with_bias(e));
    expect_refused_when([](GemmProblem& p) { p.bias_dtype = kF32; }, "bias must be bf16",
                        with_bias(e));
    expect_refused_when([](GemmProblem& p) { p.bias = some_memory + 1; }, "bias lies at",
                        with_bias(e));
    expect_refused(with_bias(e, kF64), "f64 has no epilogue");
    GemmProblem batch = with_bias(e);
    batch.batch = 2;
    batch.d.batch_stride = 32 * 48;
    expect_refused(batch, "not a batch");
  }
  EXPECT_EQ(validate(with_aux(with_bias(kGeluBias))), "");
  EXPECT_EQ(validate(with_aux(with_bias(kGeluGradBiasGrad))), "");
  expect_refused(with_bias(kGeluGradBiasGrad), "needs aux");
  expect_refused(with_aux(with_bias(kBias)), "has no aux");
  expect_refused_when([](GemmProblem& p) { p.bias = some_memory; }, "without epilogue");
  GemmProblem gelu = plain();
  gelu.epilogue = kGelu;
  EXPECT_EQ(validate(gelu), "");
  EXPECT_EQ(validate(with_aux(gelu)), "");
  gelu.bias = some_memory;
  expect_refused(gelu, "has no bias");
  const GemmProblem good = with_aux(with_bias(kGeluBias));
  expect_refused_when([](GemmProblem& p) { p.aux.dtype = kF32; }, "aux must be bf16", good);
  expect_refused_when([](GemmProblem& p) { p.aux.leading = 50; }, "multiple of 8", good);
  expect_refused_when([](GemmProblem& p) { p.aux.data = some_memory + 8; }, "16 bytes", good);
  expect_refused_when([](GemmProblem& p) { p.aux.leading = 40; }, "aux has rows", good);
}

TEST(GemmRules, Fp8OnHopper) {
  EXPECT_EQ(validate(fp8(kF8E4M3, kF8E4M3, kBF16)), "");
  EXPECT_EQ(validate(fp8(kF8E5M2, kF8E4M3, kF32)), "");
  EXPECT_EQ(validate(fp8(kF8E4M3, kF8E4M3, kF8E4M3)), "");
  EXPECT_EQ(validate(fp8(kF8E4M3, kF8E5M2, kF8E5M2)), "");
  expect_refused(fp8(kF8E5M2, kF8E5M2, kBF16), "no product of f8e5m2");
  expect_refused(fp8(kF8E4M3, kF8E4M3, kF8E5M2), "do not give f8e5m2");
  expect_refused(fp8(kF8E4M3, kBF16, kBF16), "fp8 meets bf16");
  const GemmProblem good = fp8(kF8E4M3, kF8E4M3, kBF16);
  expect_refused_when([](GemmProblem& p) { p.b.transposed = false; }, "a by rows and b by columns",
                      good);
  expect_refused_when(
      [](GemmProblem& p) {
        p.a.transposed = true;
        p.a.leading = 64;
      },
      "a by rows and b by columns", good);
  expect_refused_when([](GemmProblem& p) { p.K = 56; }, "multiples of 16", good);
  expect_refused_when([](GemmProblem& p) { p.a.leading = 72; }, "multiples of 16 bytes", good);
  expect_refused_when([](GemmProblem& p) { p.a.data = some_memory + 8; }, "16 bytes", good);
  expect_refused_when([](GemmProblem& p) { p.d_scale = some_memory; }, "has no scale", good);
  expect_refused_when([](GemmProblem& p) { p.beta = 1; }, "cannot be added to",
                      fp8(kF8E4M3, kF8E4M3, kF8E4M3));
  expect_refused_when([](GemmProblem& p) { p.a_scale = some_memory; }, "scales are for fp8");
  expect_refused_when([](GemmProblem& p) { p.fast_accumulation = true; }, "is for fp8");
  GemmProblem biased = good;
  biased.epilogue = GemmEpilogue::kBias;
  biased.bias = some_memory;
  biased.d.dtype = kF32;
  biased.bias_dtype = kF32;
  expect_refused(biased, "bias must be bf16");  // there is no f32 bias
  biased.bias_dtype = kBF16;
  EXPECT_EQ(validate(biased), "");
}

TEST(GemmRules, ScalesOfRowsAndTilesGoTogetherAsTheLibraryHasThem) {
  using enum GemmScale;
  const auto scaled = [](GemmScale a, GemmScale b) {
    GemmProblem p = fp8(kF8E4M3, kF8E4M3, kBF16);
    p.a_scaling = a;
    p.b_scaling = b;
    return p;
  };
  for (const auto& [a, b] : {std::pair(kOuter, kOuter), std::pair(kVectors, kVectors),
                             std::pair(kVectors, kSquares), std::pair(kSquares, kVectors)}) {
    const GemmProblem good = scaled(a, b);
    EXPECT_EQ(validate(good), "");
    expect_refused_when([](GemmProblem& p) { p.a_scale = nullptr; }, "are missing", good);
    expect_refused_when([](GemmProblem& p) { p.b_scale = some_memory + 4; }, "multiple of 16",
                        good);
    expect_refused_when([](GemmProblem& p) { p.d.dtype = kF8E4M3; }, "do not give", good);
    expect_refused_when(
        [](GemmProblem& p) {
          p.batch = 2;
          p.d.batch_stride = 96 * 64;
        },
        "not a batch", good);
    expect_refused_when([](GemmProblem& p) { p.epilogue = GemmEpilogue::kGelu; },
                        "have no epilogue", good);
    GemmProblem fast = good;
    fast.fast_accumulation = true;
    EXPECT_EQ(validate(fast).empty(), a == kOuter);
    EXPECT_NE(describe(good), describe(scaled(kTensor, kTensor)));
    const LibraryCall call = library_call(good);  // its a is our b
    const auto mode = [](GemmScale one) { return one == kTensor ? 0 : static_cast<int>(one) + 2; };
    EXPECT_EQ(call.a_scale_mode, mode(b));
    EXPECT_EQ(call.b_scale_mode, mode(a));
  }
  for (const auto& [a, b] : {std::pair(kSquares, kSquares), std::pair(kOuter, kTensor),
                             std::pair(kTensor, kVectors), std::pair(kVectors, kOuter)}) {
    expect_refused(scaled(a, b), "there is no product of");
  }
  expect_refused_when([](GemmProblem& p) { p.b_scaling = kOuter; }, "scales are for fp8");
  EXPECT_EQ(count_scales(kTensor, 48, 300), 1);
  EXPECT_EQ(count_scales(kOuter, 48, 300), 48);
  EXPECT_EQ(count_scales(kVectors, 48, 300), 3 * 48);
  EXPECT_EQ(count_scales(kSquares, 200, 300), 2 * 4);
  EXPECT_EQ(count_scales(kSquares, 200, 600), 2 * 8);
}

// ---- The mapping, by a model of the library that reads columns ----------------------------------

double gelu(double x) { return fn::GeluTanh{}(x); }
double gelu_slope(double x) { return fn::GeluTanhGrad{}(1.0, x); }

double scale_of(const void* scale) {
  return scale != nullptr ? static_cast<double>(*static_cast<const float*>(scale)) : 1;
}

// What cublasLtMatmul does with the call, as its documentation has it.
void run_by_columns(const LibraryCall& call, double alpha, double beta, float* bias) {
  const auto at = [](const LibraryMatrix& x, int64_t which, int64_t row, int64_t column) -> float& {
    EXPECT_TRUE(row < x.rows && column < x.columns && x.rows <= x.leading);
    return static_cast<float*>(x.data)[which * x.batch_stride + row + column * x.leading];
  };
  const auto a = [&](int64_t which, int64_t i, int64_t k) -> double {
    return call.transpose_a ? at(call.a, which, k, i) : at(call.a, which, i, k);
  };
  const auto b = [&](int64_t which, int64_t k, int64_t j) -> double {
    return call.transpose_b ? at(call.b, which, j, k) : at(call.b, which, k, j);
  };
  const double operand_scales = scale_of(call.a_scale) * scale_of(call.b_scale);
  const bool adds_bias = call.epilogue == 4 || call.epilogue == 36 || call.epilogue == 164;
  std::vector<double> sums(static_cast<size_t>(call.m), 0.0);
  for (int64_t which = 0; which < call.batch; ++which) {
    for (int64_t j = 0; j < call.n; ++j) {
      for (int64_t i = 0; i < call.m; ++i) {
        double sum = 0;
        for (int64_t k = 0; k < call.k; ++k) sum += a(which, i, k) * b(which, k, j);
        float& d = at(call.d, which, i, j);
        double value = alpha * operand_scales * sum;
        if (beta != 0) value += beta * static_cast<double>(at(call.c, which, i, j));
        if (adds_bias) value += static_cast<double>(bias[i]);
        if ((call.epilogue & 32) != 0) {
          if ((call.epilogue & 128) != 0) at(call.aux, 0, i, j) = static_cast<float>(value);
          value = gelu(value);
        } else if ((call.epilogue & 64) != 0) {
          value *= gelu_slope(static_cast<double>(at(call.aux, 0, i, j)));
        }
        sums[static_cast<size_t>(i)] += value;
        d = static_cast<float>(scale_of(call.d_scale) * value);
      }
    }
  }
  if ((call.epilogue & 16) != 0) {
    for (int64_t i = 0; i < call.m; ++i) bias[i] = static_cast<float>(sums[static_cast<size_t>(i)]);
  }
  const auto total = [&](int64_t count, const auto& element) {
    for (int64_t i = 0; i < count; ++i) {
      double sum = 0;
      for (int64_t k = 0; k < call.k; ++k) sum += element(i, k);
      bias[i] = static_cast<float>(sum);
    }
  };
  if (call.epilogue == 256) total(call.m, [&](int64_t i, int64_t k) { return a(0, i, k); });
  if (call.epilogue == 512) total(call.n, [&](int64_t j, int64_t k) { return b(0, k, j); });
}

struct Buffers {
  std::vector<float> a, b, d, aux, bias, c = {};
};

// The same by the words of gemm.h, row by row.
void run_by_rows(const GemmProblem& p, Buffers& x) {
  const auto at = [](std::vector<float>& v, const GemmMatrix& m, int64_t which, int64_t row,
                     int64_t column) -> float& {
    const int64_t place = m.transposed ? column * m.leading + row : row * m.leading + column;
    return v.at(static_cast<size_t>(which * m.batch_stride + place));
  };
  using enum GemmEpilogue;
  std::vector<double> column_sums(static_cast<size_t>(p.N), 0.0);
  for (int64_t which = 0; which < p.batch; ++which) {
    for (int64_t m = 0; m < p.M; ++m) {
      for (int64_t n = 0; n < p.N; ++n) {
        double sum = 0;
        for (int64_t k = 0; k < p.K; ++k) {
          sum += static_cast<double>(at(x.a, p.a, which, m, k)) *
                 static_cast<double>(at(x.b, p.b, which, k, n));
        }
        float& d = at(x.d, p.d, which, m, n);
        double value = p.alpha * scale_of(p.a_scale) * scale_of(p.b_scale) * sum;
        std::vector<float>& added = p.c != nullptr ? x.c : x.d;
        if (p.beta != 0) value += p.beta * static_cast<double>(at(added, p.d, which, m, n));
        if (p.epilogue == kBias || p.epilogue == kGeluBias) {
          value += static_cast<double>(x.bias[static_cast<size_t>(n)]);
        }
        if (p.epilogue == kGelu || p.epilogue == kGeluBias) {
          if (p.aux.data != nullptr) at(x.aux, p.aux, 0, m, n) = static_cast<float>(value);
          value = gelu(value);
        } else if (p.epilogue == kGeluGrad || p.epilogue == kGeluGradBiasGrad) {
          value *= gelu_slope(static_cast<double>(at(x.aux, p.aux, 0, m, n)));
        }
        column_sums[static_cast<size_t>(n)] += value;
        d = static_cast<float>(value * scale_of(p.d_scale));
      }
    }
  }
  if (p.epilogue == kGeluGradBiasGrad) {
    for (size_t n = 0; n < column_sums.size(); ++n) x.bias[n] = static_cast<float>(column_sums[n]);
  }
  const auto total = [&](int64_t count, const auto& element) {
    for (int64_t i = 0; i < count; ++i) {
      double sum = 0;
      for (int64_t k = 0; k < p.K; ++k) sum += static_cast<double>(element(i, k));
      x.bias[static_cast<size_t>(i)] = static_cast<float>(sum);
    }
  };
  if (p.epilogue == kBiasGradOfA) {
    total(p.M, [&](int64_t m, int64_t k) { return at(x.a, p.a, 0, m, k); });
  }
  if (p.epilogue == kBiasGradOfB) {
    total(p.N, [&](int64_t n, int64_t k) { return at(x.b, p.b, 0, k, n); });
  }
}

TEST(GemmMapping, AProductByRowsIsTheLibrarysProductByColumns) {
  using enum GemmEpilogue;
  int cases = 0;
  for (const bool a_transposed : {false, true}) {
    for (const bool b_transposed : {false, true}) {
      for (const GemmEpilogue epilogue : {kNone, kBias, kGelu, kGeluBias, kGeluGrad,
                                          kGeluGradBiasGrad, kBiasGradOfA, kBiasGradOfB}) {
        const int64_t batch = epilogue == kNone ? 3 : 1;
        GemmProblem p{.M = 5, .N = 7, .K = 4, .batch = batch, .alpha = 0.5, .beta = 0.25};
        // Rows longer than they need be, to tell strides from sizes.
        p.a = {.transposed = a_transposed, .leading = 9, .batch_stride = 50};
        p.b = {.transposed = b_transposed, .leading = 11, .batch_stride = batch > 1 ? 0 : 80};
        p.d = {.leading = 10, .batch_stride = 60};
        p.epilogue = epilogue;
        Buffers x;
        int state = 7;
        const auto fill = [&](std::vector<float>& values, size_t size) {
          for (size_t i = 0; i < size; ++i) {
            state = (state * 75 + 74) % 65537;
            values.push_back(static_cast<float>(state % 9 - 4) / 2);
          }
        };
        fill(x.a, 200), fill(x.b, 100), fill(x.d, 200), fill(x.aux, 100), fill(x.bias, 8);
        fill(x.c, 200);
        if (cases % 2 == 1) p.c = x.c.data();  // else beta is of d
        Buffers expected = x;
        p.a.data = x.a.data(), p.b.data = x.b.data(), p.d.data = x.d.data();
        if (epilogue != kNone && epilogue != kGelu && epilogue != kGeluGrad) {
          p.bias = x.bias.data();
        }
        alignas(16) float aux[100];
        std::copy(x.aux.begin(), x.aux.end(), aux);
        const bool gelu_like = epilogue == kGelu || epilogue == kGeluBias ||
                               epilogue == kGeluGrad || epilogue == kGeluGradBiasGrad;
        if (gelu_like) p.aux = {.leading = 16, .data = aux};
        if ((epilogue == kBiasGradOfA && !a_transposed) ||
            (epilogue == kBiasGradOfB && b_transposed)) {
          expect_refused(p, "needs");
          continue;
        }
        ASSERT_EQ(validate(p), "") << name_of(epilogue);
        run_by_rows(p, expected);
        run_by_columns(library_call(p), p.alpha, p.beta, x.bias.data());
        EXPECT_EQ(x.d, expected.d) << name_of(epilogue);
        EXPECT_EQ(std::vector<float>(aux, aux + 100), expected.aux) << name_of(epilogue);
        if (epilogue == kGeluGradBiasGrad) {  // sums in another order
          for (size_t i = 0; i < 7; ++i) EXPECT_NEAR(x.bias[i], expected.bias[i], 1e-5);
        } else {
          EXPECT_EQ(x.bias, expected.bias) << name_of(epilogue);
        }
        ++cases;
      }
    }
  }
  EXPECT_EQ(cases, 28);
}

// Elements are given in f32 here, as the scales do not depend on how narrow they are.
TEST(GemmMapping, ScalesBelongToTheMatrixTheyAreNamedFor) {
  const float of_a = 0.5, of_b = 8, of_d = 0.25;
  for (const GemmEpilogue epilogue : {GemmEpilogue::kNone, GemmEpilogue::kBias}) {
    GemmProblem p{.M = 2, .N = 3, .K = 4, .alpha = 0.5};
    Buffers x{{1, 2, 3, 4, -1, -2, 0, 5},
              {1, 0, 2, -1, 3, 1, 0, 0, 4, 2, -2, 1},
              std::vector<float>(6, 0),
              {},
              {1, 2, 3}};
    Buffers expected = x;
    p.a = {.leading = 4, .data = x.a.data()};
    p.b = {.transposed = true, .leading = 4, .data = x.b.data()};
    p.d = {.leading = 3, .data = x.d.data()};
    p.epilogue = epilogue;
    if (epilogue == GemmEpilogue::kBias) p.bias = x.bias.data();
    p.a_scale = &of_a, p.b_scale = &of_b, p.d_scale = &of_d;
    run_by_rows(p, expected);
    run_by_columns(library_call(p), p.alpha, p.beta, x.bias.data());
    EXPECT_EQ(x.d, expected.d) << name_of(epilogue);
    // Row 0, column 0: 0.25 (0.5 * 0.5 * 8 * (1 + 6 - 4) + bias)
    EXPECT_EQ(x.d[0], epilogue == GemmEpilogue::kBias ? 1.75f : 1.5f);
  }
}

TEST(GemmMapping, ABatchWithOneRightOperandBecomesMoreRows) {
  GemmProblem p = plain();
  p.batch = 4;
  p.a.batch_stride = 32 * 64;
  p.d.batch_stride = 32 * 48;
  const GemmProblem folded = fold_batch(p);
  EXPECT_EQ(folded.M, 128);
  EXPECT_EQ(folded.batch, 1);
  EXPECT_EQ(validate(folded), "");
  for (const auto& change : std::initializer_list<void (*)(GemmProblem&)>{
           [](GemmProblem& q) { q.b.batch_stride = 64 * 48; },
           [](GemmProblem& q) { q.a.batch_stride += 8; },
           [](GemmProblem& q) { q.d.batch_stride += 8; },
           [](GemmProblem& q) { q.a.transposed = true; }}) {
    GemmProblem other = p;
    change(other);
    EXPECT_EQ(fold_batch(other).batch, 4);
  }
}

// Of what GPUs have, and of none that is known.
TEST(GemmRules, TheWorkspaceIsAShareOfTheMemory) {
  constexpr int64_t kMiB = int64_t{1} << 20, kGiB = int64_t{1} << 30;
  EXPECT_EQ(gemm_workspace_bytes(0), 32 * kMiB);
  EXPECT_EQ(gemm_workspace_bytes(8 * kGiB), 32 * kMiB);
  EXPECT_EQ(gemm_workspace_bytes(16 * kGiB), 64 * kMiB);
  EXPECT_EQ(gemm_workspace_bytes(80 * kGiB), 128 * kMiB);
  EXPECT_EQ(gemm_workspace_bytes(141 * kGiB), 128 * kMiB);
}

TEST(GemmMapping, AlignmentIsThatOfTheAddressUpTo256) {
  EXPECT_EQ(alignment_of(some_memory), 256);
  EXPECT_EQ(alignment_of(some_memory + 16), 16);
  EXPECT_EQ(alignment_of(some_memory + 128), 128);
  EXPECT_EQ(alignment_of(some_memory + 3), 1);
}

TEST(GemmMapping, WhatAChoiceDependsOnIsInTheDescription) {
  const std::string base = describe(plain());
  EXPECT_EQ(base,
            "m32 n48 k64 b1 a:bf16,n,64,0,@256 b:bf16,n,48,0,@256 d:bf16,n,48,0,@256 none "
            "beta0");
  for (const auto& change : std::initializer_list<void (*)(GemmProblem&)>{
           [](GemmProblem& q) { q.M = 33; }, [](GemmProblem& q) { q.batch = 2; },
           [](GemmProblem& q) { q.a.leading = 65; }, [](GemmProblem& q) { q.b.transposed = true; },
           [](GemmProblem& q) { q.d.dtype = kF32; }, [](GemmProblem& q) { q.beta = 1; },
           [](GemmProblem& q) { q.epilogue = GemmEpilogue::kGelu; },
           [](GemmProblem& q) { q.bias = some_memory; },
           [](GemmProblem& q) { q.a.data = some_memory + 2; },
           [](GemmProblem& q) { q.tf32 = true; },
           [](GemmProblem& q) { q.fast_accumulation = true; },
           [](GemmProblem& q) { q.aux.data = some_memory; }}) {
    GemmProblem other = plain();
    change(other);
    EXPECT_NE(describe(other), base);
  }
}

// ---- Ops that ask for products with epilogues ---------------------------------------------------

std::vector<GemmProblem> asked;  // of the model; none on a GPU

void run_model(const GemmProblem& problem, const LibraryCall& call) {
  asked.push_back(problem);
  run_by_columns(call, problem.alpha, problem.beta, static_cast<float*>(problem.bias));
}

class GemmOfOps : public testing::Test {
 protected:
  GemmOfOps() { asked.clear(); }

  // Numbers between -1 and 1.
  static Tensor numbers(const Shape& shape) {
    std::vector<double> values(static_cast<size_t>(numel_of(shape)));
    int state = 7;
    for (double& value : values) {
      state = (state * 75 + 74) % 65537;
      value = state / 32768.5 - 1;
    }
    return tensor(values, shape, kF32);
  }
  static int count(GemmEpilogue epilogue) {
    return static_cast<int>(std::count_if(
        asked.begin(), asked.end(), [&](const GemmProblem& p) { return p.epilogue == epilogue; }));
  }
  // So many products were asked for, with each of these epilogues so many; nobody sees it on a GPU.
  static void expect_asked(size_t products,
                           const std::vector<std::pair<GemmEpilogue, int>>& epilogues) {
    if (!on_emulation()) return;
    EXPECT_EQ(asked.size(), products);
    for (const auto& [epilogue, times] : epilogues) {
      EXPECT_EQ(count(epilogue), times) << name_of(epilogue);
    }
  }
  static void expect_added(int64_t products) {  // to what was there
    if (!on_emulation()) return;
    EXPECT_EQ(std::ranges::count_if(asked, [](const GemmProblem& p) { return p.c != nullptr; }),
              products);
  }
  // Values and gradients of both layers, on the emulated device.
  static std::vector<std::vector<double>> run(GemmFusion fusion, bool bias) {
    return run(fusion, bias, [](const TensorList& in) {
      return linear(linear_gelu(in[0], in[1], in[3]), in[2], in[4]);
    });
  }
  // call: of x, both weights and both biases.
  using Call = Tensor (*)(const TensorList&);
  static std::vector<std::vector<double>> run(GemmFusion fusion, bool bias, Call call,
                                              const Device& device = cuda(0)) {
    const ScopedValue<GemmFusion> scope(Context::current().slot<GemmOptions>().fusion, fusion);
    const auto leaf = [&](const Tensor& x) { return x.to(device).detach().set_requires_grad(); };
    const Tensor x = leaf(numbers({2, 3, 8})), first = leaf(numbers({16, 8}));
    const Tensor second = leaf(numbers({24, 16}));
    const Tensor b = bias ? leaf(numbers({16})) : Tensor(),
                 c = bias ? leaf(numbers({24})) : Tensor();
    const Tensor y = call({x, first, second, b, c});
    y.backward(numbers({2, 3, 24}).to(device));
    std::vector<std::vector<double>> results = {y.to_vector()};
    for (const Tensor& leaf : {x, first, second, b, c}) {
      if (leaf.defined()) results.push_back(leaf.grad().to_vector());
    }
    return results;
  }

 private:
  const GemmModelScope model_{run_model};
};

void expect_near(const std::vector<std::vector<double>>& got,
                 const std::vector<std::vector<double>>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i].size(), expected[i].size());
    for (size_t j = 0; j < got[i].size(); ++j) {
      // The model calculates GELU as we do; cuBLASLt takes tanh.approx, whose relative error is 2^-11.
      const double bound =
          on_emulation() ? 1e-5 : 0x1p-11 * std::fmax(1, std::fabs(expected[i][j]));
      EXPECT_NEAR(got[i][j], expected[i][j], bound) << "result " << i << ", element " << j;
    }
  }
}

TEST(GemmRules, GeluOf16BitsGoesWithItsProductAndNothingElse) {
  using enum GemmEpilogue;
  for (const GemmEpilogue e :
       {kBias, kGelu, kGeluBias, kGeluGrad, kGeluGradBiasGrad, kBiasGradOfA}) {
    EXPECT_EQ(fused_by_rule(with_bias(e)), e == kGelu || e == kGeluBias) << name_of(e);
    EXPECT_FALSE(fused_by_rule(with_bias(e, kF32))) << "the library's tanh is 2^-11 off";
  }
}

TEST_F(GemmOfOps, FusedProductsGiveWhatTheyGiveApart) {
  for (const bool bias : {true, false}) {
    asked.clear();
    const auto apart = run(GemmFusion::kNever, bias);
    expect_asked(6, {{GemmEpilogue::kGeluBias, 0}, {GemmEpilogue::kBiasGradOfA, 0}});
    asked.clear();
    expect_near(run(GemmFusion::kByTable, bias),
                apart);  // there is no table: by rule, in f32 apart
    expect_asked(
        6,
        {{GemmEpilogue::kGeluBias, 0}, {GemmEpilogue::kGelu, 0}, {GemmEpilogue::kBiasGradOfA, 0}});
    asked.clear();
    const auto fused = run(GemmFusion::kAlways, bias);
    expect_asked(6,
                 {{GemmEpilogue::kGeluBias, bias ? 1 : 0},
                  {GemmEpilogue::kGelu, bias ? 0 : 1},
                  {GemmEpilogue::kBiasGradOfA, bias ? 1 : 0}});  // GELU's gradient brings the other
    expect_near(fused, apart);
  }
}

TEST_F(GemmOfOps, TheProductThatGoesBackThroughAnMlpBringsTheGradientsOfGeluAndBias) {
  const Call mlp = [](const TensorList& in) {
    return linear_gelu_linear(in[0], in[1], in[3], in[2], in[4]);
  };
  const Call exact = [](const TensorList& in) {
    return linear_gelu_linear(in[0], in[1], in[3], in[2], in[4], Gelu::kNone);
  };
  for (const bool bias : {true, false}) {
    const auto expected = run(GemmFusion::kNever, bias, mlp, kCpu);
    asked.clear();
    const auto apart = run(GemmFusion::kNever, bias, mlp);
    EXPECT_EQ(apart, run(GemmFusion::kNever, bias));  // the ops one after the other
    expect_asked(12, {{GemmEpilogue::kGeluGrad, 0}, {GemmEpilogue::kGeluGradBiasGrad, 0}});
    expect_near(apart, expected);
    asked.clear();
    expect_near(run(GemmFusion::kAlways, bias, mlp), expected);
    expect_asked(6, {{GemmEpilogue::kGeluGradBiasGrad, bias ? 1 : 0},
                     {GemmEpilogue::kGeluGrad, bias ? 0 : 1},
                     {GemmEpilogue::kBiasGradOfA, bias ? 1 : 0}});  // the second layer's
    const auto in_erf = run(GemmFusion::kNever, bias, exact, kCpu);
    asked.clear();  // the library has the tanh form only
    expect_near(run(GemmFusion::kAlways, bias, exact), in_erf);
    expect_asked(6, {{GemmEpilogue::kGeluGrad, 0}, {GemmEpilogue::kGeluGradBiasGrad, 0}});
  }
}

// What reached x's gradient before a linear layer's backward is part of the product; where it never
// fuses, the pass adds it.
TEST_F(GemmOfOps, GradientsThatMeetAreAddedByTheProduct) {
  const Call branches = [](const TensorList& in) {
    const Tensor first = linear(in[0], in[1], in[3]);
    const Tensor again = linear(in[0], in[1], in[3]);
    return linear(first, in[2], in[4]) + linear(gelu(again), in[2], in[4]);
  };
  const auto apart = run(GemmFusion::kNever, true, branches);
  expect_added(0);
  asked.clear();
  const auto fused = run(GemmFusion::kAlways, true, branches);
  expect_added(1);
  expect_near(fused, apart);
  expect_near(run(GemmFusion::kAlways, true, branches, kCpu), apart);
}

TEST_F(GemmOfOps, AResidualIsAddedByTheProduct) {
  const Call layers = [](const TensorList& in) {
    const Tensor inner = linear_gelu(in[0], in[1], in[3]);
    const Tensor residual = expand(reshape(mul(sum(in[0], {2}), 0.5), {2, 3, 1}), {2, 3, 24});
    const Tensor once = linear(inner, in[2], in[4], residual);
    return linear_gelu_linear(in[0], in[1], in[3], in[2], in[4], Gelu::kTanh, once);
  };
  const Call composed = [](const TensorList& in) {
    const Tensor inner = linear_gelu(in[0], in[1], in[3]);
    const Tensor residual = expand(reshape(mul(sum(in[0], {2}), 0.5), {2, 3, 1}), {2, 3, 24});
    const Tensor once = residual + linear(inner, in[2], in[4]);
    return once + linear_gelu_linear(in[0], in[1], in[3], in[2], in[4]);
  };
  for (const bool bias : {true, false}) {
    const auto apart = run(GemmFusion::kNever, bias, composed);
    expect_near(run(GemmFusion::kNever, bias, layers), apart);
    asked.clear();
    expect_near(run(GemmFusion::kAlways, bias, layers), apart);
    expect_added(3);  // forward two, and x's gradient
    expect_near(run(GemmFusion::kAlways, bias, layers, kCpu), apart);
  }
}

TEST_F(GemmOfOps, FrozenLayersOfAnMlpCostNoProducts) {
  TS_NEEDS_EMULATION("notes products");
  const ScopedValue<GemmFusion> scope(Context::current().slot<GemmOptions>().fusion,
                                      GemmFusion::kAlways);
  const auto products = [](std::vector<bool> learns) {
    const std::vector<Shape> shapes = {{3, 8}, {16, 8}, {16}, {24, 16}, {24}};
    TensorList in;
    for (size_t i = 0; i < shapes.size(); ++i) {
      in.push_back(numbers(shapes[i]).to(cuda(0)).detach().set_requires_grad(learns[i]));
    }
    const Tensor y = linear_gelu_linear(in[0], in[1], in[2], in[3], in[4]);
    const Tensor loss = sum(mul(y, y));
    gpu::synchronize(0);
    asked.clear();
    loss.backward();
    gpu::synchronize(0);
    for (size_t i = 0; i < shapes.size(); ++i) EXPECT_EQ(in[i].grad().defined(), learns[i]) << i;
    return asked.size();
  };
  EXPECT_EQ(products({true, true, true, true, true}), 4U);
  EXPECT_EQ(products({false, false, false, true, true}), 1U);
  EXPECT_EQ(products({false, false, false, false, true}), 0U);
  EXPECT_EQ(products({true, false, false, false, false}), 2U);
  EXPECT_EQ(count(GemmEpilogue::kGeluGrad), 1);
  EXPECT_EQ(products({false, false, true, false, false}), 1U);
  EXPECT_EQ(count(GemmEpilogue::kGeluGradBiasGrad), 1);
}

TEST_F(GemmOfOps, WithoutGradientsNothingIsKeptForThem) {
  TS_NEEDS_EMULATION("notes products");
  const NoGradGuard none;
  const ScopedValue<GemmFusion> scope(Context::current().slot<GemmOptions>().fusion,
                                      GemmFusion::kAlways);
  linear_gelu(numbers({3, 8}).to(cuda(0)), numbers({16, 8}).to(cuda(0)), {}).to_vector();
  ASSERT_EQ(asked.size(), 1U);
  EXPECT_EQ(asked[0].epilogue, GemmEpilogue::kGelu);
  EXPECT_EQ(asked[0].aux.data, nullptr);
  asked.clear();  // the library has the tanh form only
  linear_gelu(numbers({3, 8}).to(cuda(0)), numbers({16, 8}).to(cuda(0)), {}, Gelu::kNone)
      .to_vector();
  ASSERT_EQ(asked.size(), 1U);
  EXPECT_EQ(asked[0].epilogue, GemmEpilogue::kNone);
}

TEST_F(GemmOfOps, WhatTheLibraryDoesNotGetIsCounted) {
  Context own;
  const ContextGuard guard(own);
  const GemmCounts& counts = own.slot<GemmCounts>();
  const Tensor x = numbers({2, 8, 3, 8}).to(cuda(0)), y = numbers({8, 8}).to(cuda(0));
  const Tensor heads = x.transpose(1, 2);  // [2, 3, 8, 8], heads inside of rows: two strides
  matmul(heads, heads);
  EXPECT_EQ(counts.unmerged_batches, 1);
  matmul(squeeze(numbers({8, 8, 3}).to(cuda(0)).narrow(2, 0, 1), 2), y);
  EXPECT_EQ(counts.other_strides, 1);
  const int64_t before = counts.library;
  matmul(y, y);
  EXPECT_EQ(counts.library, before + 1);
  EXPECT_EQ(counts.not_served, 0);
  TS_NEEDS_EMULATION("can take its library away");
  emulation::set_gemm_model(nullptr);
  matmul(y, y);
  EXPECT_EQ(counts.not_served, 1);
  gpu::synchronize(0);  // what is queued reports to `asked`
}

TEST_F(GemmOfOps, TimesOfLaunchesSayWhatWasAskedFor) {
  const Tensor x = numbers({8, 8}).to(cuda(0));
  const std::vector<LaunchTime> times = time_launches([&] { matmul(x, x); });
  ASSERT_EQ(times.size(), 1U);
  EXPECT_EQ(times[0].op + "|" + times[0].name, "matmul|matmul");
  if (on_emulation()) {
    EXPECT_EQ(times[0].request, describe(asked.at(0)));
  } else {
    EXPECT_EQ(times[0].request.find("m8 n8 k8 "), 0U) << times[0].request;
  }
}

TEST_F(GemmOfOps, Tf32IsASwitchAndOffAtFirst) {
  TS_NEEDS_EMULATION("notes products");
  const Tensor a = numbers({8, 8}).to(cuda(0));
  matmul(a, a).to_vector();
  {
    const ScopedValue<bool> scope(Context::current().slot<GemmOptions>().tf32, true);
    matmul(a, a).to_vector();
    linear(a, a).to_vector();
  }
  matmul(a, a).to_vector();
  ASSERT_EQ(asked.size(), 4U);
  EXPECT_FALSE(asked[0].tf32);
  EXPECT_TRUE(asked[1].tf32);
  EXPECT_TRUE(asked[2].tf32);
  EXPECT_FALSE(asked[3].tf32);
}

TEST(GemmLibrary, TheEmulationSaysThatItHasNone) {
  TS_NEEDS_EMULATION("has none");
  EXPECT_FALSE(run_gemm(plain()));
  EXPECT_NE(gemm_library().find("own kernels"), std::string::npos);
  EXPECT_THROW(describe_to_library(plain(), plain()), UnsupportedError);
}

}  // namespace
}  // namespace tessera::gpu::test_cuda_gemm
