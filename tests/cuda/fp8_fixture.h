// fp8 on a GPU, for tests: products by cuBLASLt or, on the emulation, by a model of it that
// notes them, and comparisons with the CPU.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include <tessera/autograd/ops.h>
#include <tessera/core/cuda/libraries/gemm.h>
#include <tessera/core/random.h>

#include "gemm_model.h"

namespace tessera::fp8_on_gpu {

using gpu::GemmProblem;
using gpu::LibraryCall;

inline const Device kGpu = cuda(0);

inline std::vector<GemmProblem> asked;  // products in fp8; none on a GPU

inline void run_model(const GemmProblem& problem, const LibraryCall& call) {
  if (is_fp8(problem.a.dtype)) asked.push_back(problem);
  gpu::run_by_model(problem, call);
}

class CudaFp8 : public testing::Test {
 protected:
  CudaFp8() {
    asked.clear();
    manual_seed(11);
  }

 private:
  const gpu::GemmModelScope model_{run_model};
};

// On a GPU whatever NaN an operation is given, it gives the one without a sign.
inline Tensor without_signs_of_nan(const Tensor& x) {
  Tensor y = x.to(kCpu).contiguous().clone();
  if (y.dtype() == kF8E4M3 || y.dtype() == kF8E5M2) {
    const int least = y.dtype() == kF8E4M3 ? 0x7f : 0x7d;
    auto* const bytes = static_cast<uint8_t*>(y.data());
    for (int64_t i = 0; i < y.nbytes(); ++i) {
      if ((bytes[i] & 0x7f) >= least) bytes[i] = 0x7f;
    }
  }
  return y;
}

inline void expect_same_bytes(const Tensor& got, const Tensor& expected, const std::string& what) {
  ASSERT_EQ(got.dtype(), expected.dtype()) << what;
  ASSERT_EQ(got.shape(), expected.shape()) << what;
  const bool exact = gpu::on_emulation();
  const Tensor a = exact ? got.to(kCpu) : without_signs_of_nan(got),
               b = exact ? expected.contiguous() : without_signs_of_nan(expected);
  EXPECT_EQ(std::memcmp(a.data(), b.data(), static_cast<size_t>(a.nbytes())), 0) << what;
}

// How far products may be from those of the CPU, of the largest result: sums of f32 in another
// order there, and on a GPU sums of which a tensor core keeps 14 bits.
inline double rounding_of_products(int64_t terms) {
  return gpu::on_emulation() ? static_cast<double>(terms) * 0x1p-24 : 0x1p-10;
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
