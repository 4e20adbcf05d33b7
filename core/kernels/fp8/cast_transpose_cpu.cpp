#include <algorithm>
#include <bit>
#include <vector>

#include <tessera/core/dispatch.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/half.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/fp8/cast_transpose.h>
#include <tessera/core/kernels/fp8/logits_gradient.h>
#include <tessera/core/kernels/fp8/rules.h>
#include <tessera/core/kernels/loss/cross_entropy.h>
#include <tessera/core/parallel.h>

namespace tessera::kernels {
namespace {

constexpr const char* kCastTranspose = "cast_transpose";
constexpr int64_t kTile = 64;

}  // namespace

CastTransposed cast_transpose(const Tensor& x, DType dtype, const Tensor& scale, bool want_values,
                              bool want_transposed) {
  TS_CHECK_DTYPE(x.dtype() == kF32 || is_low_precision(x.dtype()), kCastTranspose,
                 "expects f32, f16 or bf16; got ", x, "; convert with to(dtype)");
  TS_CHECK_DTYPE(is_fp8(dtype) || is_low_precision(dtype), kCastTranspose,
                 "gives f8e4m3, f8e5m2, f16 or bf16; asked for ", dtype);
  TS_CHECK_SHAPE(x.dim() == 2, kCastTranspose, "expects a matrix; got ", x);
  TS_CHECK_SHAPE(!scale.defined() || (scale.numel() == 1 && scale.dtype() == kF32), kCastTranspose,
                 "expects one f32 as the scale; got ", scale);
  if (x.device().is_cuda()) {
    return on_cuda<kernels::cast_transpose>(kCastTranspose, x.device(), x, dtype, scale,
                                            want_values, want_transposed);
  }
  const int64_t M = x.size(0), N = x.size(1);
  CastTransposed result;
  if (want_values) result.values = raw::empty({M, N}, dtype, x.device());
  if (want_transposed) result.transposed = raw::empty({N, M}, dtype, x.device());
  result.amax = raw::zeros({}, kF32, x.device());
  if (x.is_meta() || x.numel() == 0) return result;
  const Tensor source = contiguous(x);
  const float factor = scale.defined() ? *scale.data_as<float>() : 1.0f;
  const int64_t tiles = (M + kTile - 1) / kTile;
  // Magnitudes order like their bits, with NaN above infinity.
  std::vector<uint32_t> largest(static_cast<size_t>(tiles), 0);
  dispatch_floating(x.dtype(), kCastTranspose, [&]<class T>() {
    if constexpr (!std::is_same_v<T, double>) {
      dispatch_cast_target(dtype, [&]<class Q>() {
        const T* const from = source.data_as<T>();
        Q* const values = want_values ? result.values.data_as<Q>() : nullptr;
        Q* const transposed = want_transposed ? result.transposed.data_as<Q>() : nullptr;
        parallel_for(tiles, 1, [&](int64_t begin, int64_t end) {
          for (int64_t tile = begin; tile < end; ++tile) {
            const int64_t last = std::min(M, (tile + 1) * kTile);
            uint32_t& most = largest[static_cast<size_t>(tile)];
            for (int64_t m = tile * kTile; m < last; ++m) {
              for (int64_t n = 0; n < N; ++n) {
                const float value = load<float>(from[m * N + n]);
                most = std::max(most, std::bit_cast<uint32_t>(value) & 0x7fffffffu);
                const Q narrow = from_float_saturate<Q>(rules::scaled<Q>(value, factor));
                if (values != nullptr) values[m * N + n] = narrow;
                if (transposed != nullptr) transposed[n * M + m] = narrow;
              }
            }
          }
        });
      });
    }
  });
  *result.amax.data_as<float>() =
      std::bit_cast<float>(*std::max_element(largest.begin(), largest.end()));
  return result;
}

Quantized quantize_logits_gradient(const LogitsGradient& of, const QuantizeOptions& options,
                                   const Tensor& scale, const QuantizeWants& wants) {
  constexpr const char* kWhere = "quantize";
  TS_CHECK_DTYPE(is_low_precision(of.logits.dtype()), kWhere, "expects logits of f16 or bf16; got ",
                 of.logits);
  TS_CHECK_SHAPE(of.logits.dim() == 2, kWhere, "expects a matrix of logits; got ", of.logits);
  if (of.logits.device().is_cuda()) {
    return on_cuda<kernels::quantize_logits_gradient>(kWhere, of.logits.device(), of, options,
                                                      scale, wants);
  }
  const Tensor gradient =
      cross_entropy_backward(of.logits, of.targets, {.ignore_index = of.ignore_index},
                             of.statistics, of.gradient, of.divisor);
  return quantize(gradient, options, scale, wants);
}

}  // namespace tessera::kernels
