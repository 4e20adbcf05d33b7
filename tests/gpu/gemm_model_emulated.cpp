// The library of products that gpu_shapes_emulated asks: sums in f64 in the order that a call by
// columns has them, rounded once. TESSERA_PLANTED_MISTAKE names one that it then makes, which the
// checks must find (tests/gpu/CMakeLists.txt runs each).
#include <cmath>
#include <cstdlib>
#include <string_view>
#include <vector>

#include <tessera/core/cuda/emulation/gemm.h>
#include <tessera/core/functors.h>
#include <tessera/core/half.h>

namespace tessera::gpu_shapes {
namespace {

bool planted(std::string_view mistake) {
  const char* const name = std::getenv("TESSERA_PLANTED_MISTAKE");
  return name != nullptr && mistake == name;
}

double load(DType dtype, const void* data, int64_t i) {
  switch (dtype) {
    case kF64:
      return static_cast<const double*>(data)[i];
    case kF32:
      return static_cast<double>(static_cast<const float*>(data)[i]);
    case kF16:
      return static_cast<double>(static_cast<float>(static_cast<const f16*>(data)[i]));
    case kBF16:
      return static_cast<double>(static_cast<float>(static_cast<const bf16*>(data)[i]));
    case kF8E4M3:
      return static_cast<double>(static_cast<float>(static_cast<const f8e4m3*>(data)[i]));
    case kF8E5M2:
      return static_cast<double>(static_cast<float>(static_cast<const f8e5m2*>(data)[i]));
    default:
      return NAN;
  }
}
double rounded(DType dtype, double value) {
  const auto single = static_cast<float>(value);
  switch (dtype) {
    case kF64:
      return value;
    case kF16:
      return static_cast<double>(static_cast<float>(f16(single)));
    case kBF16:
      return static_cast<double>(static_cast<float>(bf16(single)));
    default:
      return static_cast<double>(single);
  }
}
void store(DType dtype, void* data, int64_t i, double value) {
  const auto single = static_cast<float>(value);
  switch (dtype) {
    case kF64:
      static_cast<double*>(data)[i] = value;
      break;
    case kF32:
      static_cast<float*>(data)[i] = single;
      break;
    case kF16:
      static_cast<f16*>(data)[i] = f16(single);
      break;
    case kBF16:
      static_cast<bf16*>(data)[i] = bf16(single);
      break;
    default:
      break;
  }
}

double one_scale(const void* scale) {
  return scale != nullptr ? static_cast<double>(*static_cast<const float*>(scale)) : 1;
}
// Of row i of op(b)^T or op(a)^T at depth k, by the mode of library_call().
double scale_at(const void* scales, int32_t mode, int64_t outer, int64_t k, int64_t rows,
                int64_t depth) {
  const auto* const numbers = static_cast<const float*>(scales);
  const int64_t stretches = (depth + 127) / 128;
  switch (mode) {
    case 3:
      return static_cast<double>(numbers[outer]);
    case 4:
      return static_cast<double>(numbers[k / 128 * rows + outer]);
    case 5:
      return static_cast<double>(numbers[outer / 128 * ((stretches + 3) / 4 * 4) + k / 128]);
    default:
      return one_scale(scales);
  }
}

void run(const gpu::GemmProblem& p, const gpu::LibraryCall& call) {
  // References in f64 come from here too, and are right.
  const auto plants = [&](std::string_view mistake) {
    return p.a.dtype != kF64 && planted(mistake);
  };
  const auto place = [](const gpu::LibraryMatrix& x, int64_t which, int64_t row, int64_t column) {
    return which * x.batch_stride + row + column * x.leading;
  };
  const auto at = [&](const gpu::LibraryMatrix& x, int64_t which, int64_t row, int64_t column) {
    return load(x.dtype, x.data, place(x, which, row, column));
  };
  const auto a = [&](int64_t which, int64_t i, int64_t k) {
    return call.transpose_a ? at(call.a, which, k, i) : at(call.a, which, i, k);
  };
  const auto b = [&](int64_t which, int64_t k, int64_t j) {
    return call.transpose_b ? at(call.b, which, j, k) : at(call.b, which, k, j);
  };
  const bool adds_bias = call.epilogue == 4 || call.epilogue == 36 || call.epilogue == 164;
  std::vector<double> sums(static_cast<size_t>(call.m), 0.0);
  for (int64_t which = 0; which < call.batch; ++which) {
    for (int64_t j = 0; j < call.n; ++j) {
      const int64_t read = plants("row") && j > 0 && j + 1 == call.n ? j - 1 : j;
      for (int64_t i = 0; i < call.m; ++i) {
        double sum = 0;
        for (int64_t k = 0; k < call.k; ++k) {
          double term = a(which, i, k) * b(which, k, read);
          if (!plants("scale")) {
            term *= scale_at(call.a_scale, call.a_scale_mode, i, k, call.m, call.k);
          }
          sum += term * scale_at(call.b_scale, call.b_scale_mode, read, k, call.n, call.k);
          if (plants("partial sums") && k == call.k / 2) sum = rounded(kBF16, sum);
        }
        double value = p.alpha * sum;
        if (p.beta != 0 && !plants("beta")) value += p.beta * at(call.c, which, i, j);
        const double bias = adds_bias ? load(p.bias_dtype, p.bias, i) : 0;
        if (!plants("epilogue")) value += bias;
        if ((call.epilogue & 32) != 0) {
          if ((call.epilogue & 128) != 0) {
            store(call.aux.dtype, call.aux.data, place(call.aux, 0, i, j), value);
          }
          value = fn::GeluTanh{}(value);
        } else if ((call.epilogue & 64) != 0) {
          value *= fn::GeluTanhGrad{}(1.0, at(call.aux, 0, i, j));
        }
        if (plants("epilogue")) value += bias;
        if (!plants("bias gradient") || j > 0) sums[static_cast<size_t>(i)] += value;
        store(call.d.dtype, call.d.data, place(call.d, which, i, j),
              value * one_scale(call.d_scale));
      }
    }
  }
  const auto total = [&](int64_t count, const auto& element) {
    for (int64_t i = 0; i < count; ++i) {
      double sum = 0;
      for (int64_t k = plants("bias gradient") ? 1 : 0; k < call.k; ++k) sum += element(i, k);
      store(p.bias_dtype, p.bias, i, sum);
    }
  };
  if ((call.epilogue & 16) != 0) {
    for (int64_t i = 0; i < call.m; ++i) {
      store(p.bias_dtype, p.bias, i, sums[static_cast<size_t>(i)]);
    }
  }
  if (call.epilogue == 256) total(call.m, [&](int64_t i, int64_t k) { return a(0, i, k); });
  if (call.epilogue == 512) total(call.n, [&](int64_t j, int64_t k) { return b(0, k, j); });
}

const bool registered = [] {
  gpu::emulation::set_gemm_model(run);
  return true;
}();

}  // namespace
}  // namespace tessera::gpu_shapes
