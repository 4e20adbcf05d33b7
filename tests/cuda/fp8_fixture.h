// float8 on the emulated device, for tests: products by a model of cuBLASLt, which are noted, and
// comparisons with the CPU.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include <tessera/autograd/ops.h>
#include <tessera/core/cuda/emulation/gemm.h>
#include <tessera/core/cuda/gemm.h>
#include <tessera/core/random.h>

#include "gemm_model.h"

namespace tessera::fp8_on_gpu {

using gpu::GemmProblem;
using gpu::LibraryCall;

inline const Device kGpu = cuda(0);

inline std::vector<GemmProblem> asked;  // products in float8

inline void run_model(const GemmProblem& problem, const LibraryCall& call) {
  if (is_float8(problem.a.dtype)) asked.push_back(problem);
  gpu::run_by_model(problem, call);
}

class CudaFp8 : public testing::Test {
 protected:
  CudaFp8() {
    asked.clear();
    gpu::emulation::set_gemm_model(run_model);
    manual_seed(11);
  }
  ~CudaFp8() override { gpu::emulation::set_gemm_model(nullptr); }
};

inline void expect_same_bytes(const Tensor& got, const Tensor& expected, const std::string& what) {
  ASSERT_EQ(got.dtype(), expected.dtype()) << what;
  ASSERT_EQ(got.shape(), expected.shape()) << what;
  const Tensor a = got.to(kCpu), b = expected.contiguous();
  EXPECT_EQ(std::memcmp(a.data(), b.data(), static_cast<size_t>(a.nbytes())), 0) << what;
}

inline double relative_error(const Tensor& got, const Tensor& expected) {
  const std::vector<double> a = got.to(kCpu).to_vector(), b = expected.to_vector();
  double error = 0, largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    error = std::max(error, std::abs(a[i] - b[i]));
    largest = std::max(largest, std::abs(b[i]));
  }
  return error / largest;
}

}  // namespace tessera::fp8_on_gpu
