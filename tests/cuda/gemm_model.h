// Products by a model of cuBLASLt, for tests that train on the emulation: fp8, bf16 and f32,
// with the epilogues of a bias and of GELU. By columns and in f64, as the library describes them.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>

#include <tessera/core/cuda/emulation/gemm.h>
#include <tessera/core/cuda/libraries/gemm.h>
#include <tessera/core/functors.h>
#include <tessera/core/half.h>

#include "on_emulation.h"

namespace tessera::gpu {

// A model, or null for none, in the place of the emulation's library while one lives. A GPU has its
// own library.
class GemmModelScope {
 public:
  explicit GemmModelScope(emulation::GemmModel model) {
    if (on_emulation()) emulation::set_gemm_model(model);
  }
  ~GemmModelScope() {
    if (on_emulation()) emulation::set_gemm_model(nullptr);
  }
  GemmModelScope(const GemmModelScope&) = delete;
  GemmModelScope& operator=(const GemmModelScope&) = delete;
};

inline double number_at(const LibraryMatrix& x, int64_t which, int64_t row, int64_t column) {
  const int64_t at = which * x.batch_stride + row + column * x.leading;
  switch (x.dtype) {
    case kF8E4M3:
      return static_cast<double>(to_float(static_cast<const f8e4m3*>(x.data)[at]));
    case kF8E5M2:
      return static_cast<double>(to_float(static_cast<const f8e5m2*>(x.data)[at]));
    case kBF16:
      return static_cast<double>(to_float(static_cast<const bf16*>(x.data)[at]));
    default:
      EXPECT_EQ(x.dtype, kF32);
      return static_cast<double>(static_cast<const float*>(x.data)[at]);
  }
}
inline void put_at(const LibraryMatrix& x, int64_t which, int64_t row, int64_t column,
                   double value) {
  const int64_t at = which * x.batch_stride + row + column * x.leading;
  if (x.dtype == kBF16) {
    static_cast<bf16*>(x.data)[at] = bf16(static_cast<float>(value));
  } else {
    EXPECT_EQ(x.dtype, kF32);
    static_cast<float*>(x.data)[at] = static_cast<float>(value);
  }
}
// Of the number at k in the given row of a, or column of b: by the mode, as the library's header
// and documentation have it.
inline double scale_at(const void* scales, int32_t mode, int64_t outer, int64_t outers, int64_t k,
                       int64_t K) {
  if (scales == nullptr) return 1;
  const auto* const all = static_cast<const float*>(scales);
  const int64_t pieces = (K + 127) / 128, pitch = (pieces + 3) / 4 * 4;
  switch (mode) {
    case 0:
      return static_cast<double>(*all);
    case 3:
      return static_cast<double>(all[outer]);
    case 4:
      return static_cast<double>(all[k / 128 * outers + outer]);
    default:
      EXPECT_EQ(mode, 5);
      return static_cast<double>(all[outer / 128 * pitch + k / 128]);
  }
}

inline void run_by_model(const GemmProblem& problem, const LibraryCall& call) {
  const auto scales = [&](int64_t i, int64_t j, int64_t k) {
    return scale_at(call.a_scale, call.a_scale_mode, i, call.m, k, call.k) *
           scale_at(call.b_scale, call.b_scale_mode, j, call.n, k, call.k);
  };
  const bool along_k = call.a_scale_mode >= 4;
  for (int64_t which = 0; which < call.batch; ++which) {
    for (int64_t j = 0; j < call.n; ++j) {
      for (int64_t i = 0; i < call.m; ++i) {
        double sum = 0;
        for (int64_t k = 0; k < call.k; ++k) {
          const double a =
              call.transpose_a ? number_at(call.a, which, k, i) : number_at(call.a, which, i, k);
          const double b =
              call.transpose_b ? number_at(call.b, which, j, k) : number_at(call.b, which, k, j);
          sum += along_k ? scales(i, j, k) * a * b : a * b;
        }
        double value = problem.alpha * (along_k ? sum : scales(i, j, 0) * sum);
        if (problem.beta != 0) value += problem.beta * number_at(call.d, which, i, j);
        const bool gelu =
            problem.epilogue == GemmEpilogue::kGelu || problem.epilogue == GemmEpilogue::kGeluBias;
        if (problem.bias != nullptr) {
          const LibraryMatrix bias{problem.bias_dtype, call.m, 1, call.m, 0, problem.bias};
          value += number_at(bias, 0, i, 0);
        }
        if (gelu && call.aux.data != nullptr) put_at(call.aux, 0, i, j, value);
        if (gelu) value = fn::GeluTanh{}(value);
        put_at(call.d, which, i, j, value);
      }
    }
  }
}

}  // namespace tessera::gpu
