#include <tessera/core/kernels/common/float_blocks.h>
#include <tessera/core/kernels/fp8/quantize_rows.h>
#include <tessera/core/kernels/fp8/rules.h>

namespace tessera::kernels::TS_SIMD {
namespace {

using rules::magnitude_bits;
using rules::saturates;
TS_HD uint32_t larger_bits(uint32_t a, uint32_t b) { return a > b ? a : b; }

template <class Q, class T>
TS_HD void quantize_blocks(const QuantizeRun& run, QuantizeCounts& counts) {
  for_blocks<T>(run.x, run.n, [&](int64_t begin, const float* x, int64_t count) TS_LANES {
    uint8_t* TS_RESTRICT q = run.q + begin;
    uint32_t largest = 0, saturated = 0, underflown = 0;
    const auto loop = [&](auto scale_of) TS_LANES {
      for (int64_t i = 0; i < count; ++i) {
        const float scaled = rules::scaled<Q>(x[i], scale_of(i));
        const uint8_t code = from_float_saturate<Q>(scaled).bits;
        const uint32_t a = magnitude_bits(x[i]);
        q[i] = code;
        largest = larger_bits(largest, a);
        saturated += saturates<Q>(scaled);
        underflown += ((code & 0x7fu) == 0) & (a != 0) ? 1u : 0u;
      }
    };
    if (run.scales != nullptr) {
      const float* scales = run.scales + begin;
      loop([=](int64_t i) TS_LANES { return scales[i]; });
    } else {
      const float scale = run.scale;
      loop([=](int64_t) TS_LANES { return scale; });
    }
    counts.largest = larger_bits(counts.largest, largest);
    counts.saturated += saturated;
    counts.underflown += underflown;
  });
}

template <class Q, class T>
TS_HD void dequantize_block(const QuantizeRun& run, T* TS_RESTRICT y) {
  const uint8_t* TS_RESTRICT q = run.q;
  if (run.scales != nullptr) {
    for (int64_t i = 0; i < run.n; ++i) {
      y[i] = store<T>(to_float(Q::from_bits(q[i])) * run.scales[i]);
    }
  } else {
    const float scale = run.scale;
    for (int64_t i = 0; i < run.n; ++i) y[i] = store<T>(to_float(Q::from_bits(q[i])) * scale);
  }
}
// The commonest one: fp8 numbers as they are, whose bf16 is the top of their float.
template <class Q>
TS_HD void widen_block(const uint8_t* TS_RESTRICT q, int64_t n, uint16_t* TS_RESTRICT y) {
  for (int64_t i = 0; i < n; ++i) {
    y[i] = static_cast<uint16_t>(detail::bits_of(to_float(Q::from_bits(q[i]))) >> 16);
  }
}

}  // namespace

uint32_t largest_magnitude(DType dtype, const void* x, int64_t n) {
  uint32_t largest = 0;
  visit_up_to_f32(dtype, [&]<class T>() {
    for_blocks<T>(x, n, [&](int64_t, const float* values, int64_t count) TS_LANES {
      uint32_t most = 0;
      for (int64_t i = 0; i < count; ++i) most = larger_bits(most, magnitude_bits(values[i]));
      largest = larger_bits(largest, most);
    });
  });
  return largest;
}

void largest_magnitudes(DType dtype, const void* x, int64_t n, uint32_t* most) {
  visit_up_to_f32(dtype, [&]<class T>() {
    for_blocks<T>(x, n, [&](int64_t begin, const float* values, int64_t count) TS_LANES {
      uint32_t* TS_RESTRICT to = most + begin;
      for (int64_t i = 0; i < count; ++i) to[i] = larger_bits(to[i], magnitude_bits(values[i]));
    });
  });
}

void quantize_run(const QuantizeRun& run, QuantizeCounts& counts) {
  visit_up_to_f32(run.dtype, [&]<class T>() {
    run.format == kF8E4M3 ? quantize_blocks<f8e4m3, T>(run, counts)
                          : quantize_blocks<f8e5m2, T>(run, counts);
  });
}

void dequantize_run(const QuantizeRun& run, void* y) {
  if (run.dtype == kBF16 && run.scales == nullptr && run.scale == 1) {
    auto* const to = static_cast<uint16_t*>(y);
    return run.format == kF8E4M3 ? widen_block<f8e4m3>(run.q, run.n, to)
                                 : widen_block<f8e5m2>(run.q, run.n, to);
  }
  visit_up_to_f32(run.dtype, [&]<class T>() {
    run.format == kF8E4M3 ? dequantize_block<f8e4m3>(run, static_cast<T*>(y))
                          : dequantize_block<f8e5m2>(run, static_cast<T*>(y));
  });
}

void scale_sums(const float* sums, int64_t n, float row, const float* columns, DType dtype,
                void* y) {
  const auto loop = [&](const auto* from, auto* to) TS_LANES {
    using T = std::remove_pointer_t<decltype(to)>;
    if (columns != nullptr) {
      for (int64_t i = 0; i < n; ++i) to[i] = store<T>(from[i] * (row * columns[i]));
    } else {
      for (int64_t i = 0; i < n; ++i) to[i] = store<T>(from[i] * row);
    }
  };
  if (dtype == kF32) {  // in place or not
    auto* const to = static_cast<float*>(y);
    return y == sums ? loop(to, to) : loop(sums, to);
  }
  visit_up_to_f32(dtype, [&]<class T>() { loop(sums, static_cast<T*>(y)); });
}

}  // namespace tessera::kernels::TS_SIMD
