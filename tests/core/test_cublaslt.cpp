// cuBLASLt itself, where it is installed: descriptors of every kind of product can be made without
// a GPU; on one, the rules of validate() and the library agree, and products have the CPU's values.
// ctest own program: it runs on GPUs too
#include <gtest/gtest.h>

#include <iostream>
#include <vector>

#include <tessera/autograd/ops.h>
#include <tessera/core/cuda/libraries/gemm.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/gpu/backend.h>

#include "core/library_rules.h"

namespace tessera::gpu::test_cublaslt {
namespace {

std::string missing() { return gemm_library().starts_with("cuBLASLt") ? "" : gemm_library(); }

// Products of a training step and others, in every dtype and layout; some break a rule.
std::vector<GemmProblem> problems(void* memory) {
  using enum GemmEpilogue;
  std::vector<GemmProblem> result;
  const auto add = [&](DType a, DType b, DType d, bool a_transposed, bool b_transposed,
                       GemmEpilogue epilogue, int64_t K, int64_t batch) {
    GemmProblem p{.M = 64, .N = 96, .K = K, .batch = batch};
    p.a = {a, a_transposed, a_transposed ? 64 : K, 64 * K, memory};
    p.b = {b, b_transposed, b_transposed ? K : 96, 96 * K, memory};
    p.d = {d, false, 96, 64 * 96, memory};
    p.epilogue = epilogue;
    if (epilogue != kNone && epilogue != kGelu && epilogue != kGeluGrad) {
      p.bias = memory;
      p.bias_dtype = is_fp8(a) && d != kF16 ? kBF16 : d;
    }
    if (epilogue == kGeluBias || epilogue == kGeluGradBiasGrad) {
      p.aux = {d, false, 96, 0, memory};
    }
    if (is_fp8(a)) p.a_scale = p.b_scale = memory;
    result.push_back(p);
  };
  for (const DType dtype : {kF64, kF32, kF16, kBF16}) {
    for (const bool a_transposed : {false, true}) {
      for (const bool b_transposed : {false, true}) {
        for (const GemmEpilogue e :
             {kNone, kBias, kGelu, kGeluBias, kGeluGradBiasGrad, kBiasGradOfA, kBiasGradOfB}) {
          add(dtype, dtype, dtype, a_transposed, b_transposed, e, 128, 1);
        }
        add(dtype, dtype, dtype, a_transposed, b_transposed, kNone, 33, 3);
        add(dtype, dtype, kF32, a_transposed, b_transposed, kNone, 128, 1);
      }
    }
  }
  for (const auto& [a, b] : {std::pair(kF8E4M3, kF8E4M3), std::pair(kF8E4M3, kF8E5M2),
                             std::pair(kF8E5M2, kF8E4M3), std::pair(kF8E5M2, kF8E5M2)}) {
    for (const bool b_transposed : {false, true}) {
      for (const DType d : {kBF16, kF16, kF32}) {
        add(a, b, d, false, b_transposed, kNone, 128, 1);
        add(a, b, d, false, b_transposed, kBias, 128, 1);
      }
    }
  }
  // Scales of rows and tiles, those that go together and those that do not.
  using enum GemmScale;
  for (const GemmScale a : {kTensor, kOuter, kVectors, kSquares}) {
    for (const GemmScale b : {kTensor, kOuter, kVectors, kSquares}) {
      if (a == kTensor && b == kTensor) continue;
      for (const DType d : {kBF16, kF16, kF32}) {
        for (const GemmEpilogue e : {kNone, kBias}) {
          add(kF8E4M3, kF8E4M3, d, false, true, e, 272, 1);
          result.back().a_scaling = a;
          result.back().b_scaling = b;
        }
      }
    }
  }
  return result;
}

TEST(CublasLt, DescriptorsAreMadeWithoutAGpu) {
  TS_NEEDS_LIBRARY(missing());
  alignas(256) static char memory[256];
  int made = 0;
  for (const GemmProblem& p : problems(memory)) {
    if (!validate(p).empty()) continue;
    EXPECT_NO_THROW(describe_to_library(p, p)) << describe(p);
    ++made;
  }
  EXPECT_GT(made, 100);
}

// Split along K, partial sums stay f32: in the result's 16 bits they would be rounded many times.
TEST(CublasLt, PartialSumsMayOnlyBeKeptInTheComputeType) {
  TS_NEEDS_LIBRARY(missing());
  alignas(256) static char memory[256];
  for (const GemmProblem& p : problems(memory)) {
    if (!validate(p).empty()) continue;
    EXPECT_EQ(describe_to_library(p, p).reduction_schemes, kGemmReductionSchemes) << describe(p);
  }
}

// Descriptors serve many products: nothing of the one before may stand in them.
TEST(CublasLt, DescriptorsHaveTheAddressesAndSizesOfTheLastProduct) {
  TS_NEEDS_LIBRARY(missing());
  alignas(256) static char memory[256];
  for (const GemmProblem& first : problems(memory)) {
    if (!validate(first).empty()) continue;
    GemmProblem then = first;
    if (!is_fp8(first.a.dtype)) then.M = 32;
    if (first.batch > 1) then.batch = 2;
    then.a_scale = then.b_scale = then.d_scale = nullptr;
    if (first.bias != nullptr) then.bias = memory + 128;
    const GemmDescription told = describe_to_library(first, then);
    const LibraryCall call = library_call(then);
    EXPECT_EQ(told.addresses.bias, then.bias) << describe(first);
    EXPECT_EQ(told.addresses.aux, call.aux.data) << describe(first);
    EXPECT_EQ(told.addresses.a_scale, nullptr) << describe(first);
    EXPECT_EQ(told.addresses.b_scale, nullptr) << describe(first);
    EXPECT_EQ(told.addresses.d_scale, nullptr) << describe(first);
    EXPECT_EQ(told.batch, then.batch) << describe(first);
    const std::pair<const LibraryMatrix*, const LibraryMatrix*> matrices[] = {
        {&told.a, &call.a}, {&told.b, &call.b}, {&told.d, &call.d}};
    for (const auto& [got, expected] : matrices) {
      EXPECT_EQ(got->rows, expected->rows) << describe(first);
      EXPECT_EQ(got->columns, expected->columns) << describe(first);
      EXPECT_EQ(got->leading, expected->leading) << describe(first);
      if (first.batch > 1) {
        EXPECT_EQ(got->batch_stride, expected->batch_stride);
      }
    }
  }
}

TEST(CublasLt, ATableHasEveryDisagreement) {
  Disagreements all;
  all.compare("first", "", true);
  all.compare("second", "too wide", false);
  EXPECT_EQ(all.not_served(), 0U);
  all.compare("third", "", false);
  all.compare("fourth", "too long", true);
  EXPECT_EQ(all.not_served(), 1U);
  EXPECT_EQ(all.table(),
            "2 of 4 problems: what the library does | problem\n"
            "allowed by the rules, not served: no algorithm | third\n"
            "served, refused by the rules: too long | fourth\n");
}

TEST(CublasLt, TheRulesAndTheLibraryAgreeOnAGpu) {
  if (device_count() == 0) GTEST_SKIP() << unavailable_reason();
  TS_NEEDS_LIBRARY(missing());
  require_device(0, "test");
  const Tensor memory = raw::zeros({1 << 20}, kU8, cuda(0));
  Disagreements all;
  for (const GemmProblem& p : problems(memory.data())) {
    // What breaks a rule of shape or dtype alone has descriptors too; the library has no algorithm.
    int algorithms = 0;
    std::string words = "no algorithm";
    try {
      algorithms = count_gemm_algorithms(p);
    } catch (const CudaError& error) {
      words = error.what();
    }
    all.compare(describe(p), validate(p), algorithms > 0, words);
  }
  EXPECT_GT(all.compared(), 200U);
  EXPECT_EQ(all.not_served(), 0U);
  std::cout << all.table();
}

TEST(CublasLt, ProductsOnAGpuHaveTheValuesOfTheCpu) {
  if (device_count() == 0) GTEST_SKIP() << unavailable_reason();
  TS_NEEDS_LIBRARY(missing());
  for (const DType dtype : {kF32, kBF16, kF16}) {
    const Tensor x = randn({3, 40, 64}).to(dtype), weight = randn({96, 64}).to(dtype),
                 bias = randn({96}).to(dtype), other = randn({3, 64, 24}).to(dtype);
    const Device device = cuda(0);
    const auto near = [&](const Tensor& got, const Tensor& expected) {
      const std::vector<double> a = got.to_vector(), b = expected.to_vector();
      ASSERT_EQ(a.size(), b.size());
      for (size_t i = 0; i < a.size(); ++i) {
        EXPECT_NEAR(a[i], b[i], 4 * epsilon_of(dtype) * 64) << dtype << " " << i;
      }
    };
    near(linear(x.to(device), weight.to(device), bias.to(device)),
         linear(x.to(kF64), weight.to(kF64), bias.to(kF64)));
    near(matmul(x.to(device), other.to(device)), matmul(x.to(kF64), other.to(kF64)));
    near(matmul(x.to(device).transpose(1, 2), x.to(device)),
         matmul(x.to(kF64).transpose(1, 2), x.to(kF64)));
  }
}

}  // namespace
}  // namespace tessera::gpu::test_cublaslt
