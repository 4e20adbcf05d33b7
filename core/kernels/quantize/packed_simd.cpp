#include <tessera/core/kernels/common/float_blocks.h>
#include <tessera/core/kernels/quantize/packed_rows.h>

namespace tessera::kernels::TS_SIMD {
namespace {

// Calls f(first, scaled numbers, count) for blocks of the run.
template <class T, class F>
TS_HD void for_scaled(const PackRun& run, F&& f) {
  float scaled[kBlock];
  for_blocks<T>(run.x, run.n, [&](int64_t begin, const float* x, int64_t count) TS_LANES {
    const float factor = run.factor;
    if (run.divides) {
      for (int64_t i = 0; i < count; ++i) scaled[i] = x[i] / factor;
    } else {
      for (int64_t i = 0; i < count; ++i) scaled[i] = x[i] * factor;
    }
    f(begin, static_cast<const float*>(scaled), count);
  });
}

// Calls f(first, where to write floats, count) for blocks of y.
template <class T, class F>
TS_HD void for_written(T* y, int64_t n, F&& f) {
  float buffer[kBlock];
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t count = n - begin < kBlock ? n - begin : kBlock;
    float* const to = stage_for_write<float>(y + begin, buffer);
    f(begin, to, count);
    stage_out(y + begin, count, to);
  }
}

// Two numbers for each byte, the upper half first.
TS_HD void look_up(const uint8_t* bytes, int64_t n, const float* numbers, float scale, float* y) {
  int64_t i = 0;
#if defined(__AVX512F__)
  // g++ 12 takes what an intrinsic without a mask ignores for an operand that is read.
  constexpr __mmask16 all = 0xffff;
  const __m512 table = _mm512_mul_ps(_mm512_loadu_ps(numbers), _mm512_set1_ps(scale));
  const __m128i low = _mm_set1_epi8(15);
  for (; i + 32 <= n; i += 32) {
    const __m128i pair = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + i / 2));
    const __m128i upper = _mm_and_si128(_mm_srli_epi16(pair, 4), low);
    const __m128i lower = _mm_and_si128(pair, low);
    const __m512i first = _mm512_maskz_cvtepu8_epi32(all, _mm_unpacklo_epi8(upper, lower));
    const __m512i second = _mm512_maskz_cvtepu8_epi32(all, _mm_unpackhi_epi8(upper, lower));
    _mm512_storeu_ps(y + i, _mm512_maskz_permutexvar_ps(all, first, table));
    _mm512_storeu_ps(y + i + 16, _mm512_maskz_permutexvar_ps(all, second, table));
  }
#elif defined(__AVX2__)
  const __m256 factor = _mm256_set1_ps(scale);
  const __m256 small = _mm256_mul_ps(_mm256_loadu_ps(numbers), factor);
  const __m256 large = _mm256_mul_ps(_mm256_loadu_ps(numbers + 8), factor);
  const __m128i low = _mm_set1_epi8(15);
  for (; i + 16 <= n; i += 16) {
    const __m128i pair = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes + i / 2));
    const __m128i upper = _mm_and_si128(_mm_srli_epi16(pair, 4), low);
    const __m128i codes = _mm_unpacklo_epi8(upper, _mm_and_si128(pair, low));
    for (int half = 0; half < 2; ++half) {
      const __m256i index = _mm256_cvtepu8_epi32(half == 0 ? codes : _mm_srli_si128(codes, 8));
      // The fourth bit, at the sign, chooses between the halves of the table.
      const __m256 chooses = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));
      const __m256 found = _mm256_blendv_ps(_mm256_permutevar8x32_ps(small, index),
                                            _mm256_permutevar8x32_ps(large, index), chooses);
      _mm256_storeu_ps(y + i + 8 * half, found);
    }
  }
#endif
  for (; i < n; ++i) {
    const uint8_t byte = bytes[i / 2];
    y[i] = numbers[i % 2 == 0 ? byte >> 4 : byte & 15] * scale;
  }
}

}  // namespace

void codes_of_run(const PackRun& run, uint8_t* codes) {
  float bounds[15];
  uint8_t order[16];
  for (int b = 0; b < 15; ++b) bounds[b] = run.bounds[b];
  for (int c = 0; c < 16; ++c) order[c] = run.order[c];
  visit_up_to_f32(run.dtype, [&]<class T>() {
    for_scaled<T>(run, [&](int64_t begin, const float* x, int64_t count) TS_LANES {
      int32_t places[kBlock];
      for (int64_t i = 0; i < count; ++i) {
        int32_t place = 0;
        for (int b = 0; b < 15; ++b) place += x[i] <= bounds[b] ? 0 : 1;
        places[i] = place;
      }
      for (int64_t i = 0; i < count; ++i) codes[begin + i] = order[places[i]];
    });
  });
}

void bytes_of_run(const PackRun& run, uint8_t* bytes) {
  constexpr float kRounds = 12582912;  // 1.5 * 2^23: a sum with it has no room for fractions
  visit_up_to_f32(run.dtype, [&]<class T>() {
    for_scaled<T>(run, [&](int64_t begin, const float* x, int64_t count) TS_LANES {
      for (int64_t i = 0; i < count; ++i) {
        const float value = x[i] - x[i] == 0 ? x[i] : 0.0f;
        bytes[begin + i] = static_cast<uint8_t>(__builtin_bit_cast(uint32_t, value + kRounds));
      }
    });
  });
}

void unpack_codes(const uint8_t* bytes, int64_t n, const float* numbers, float scale, DType dtype,
                  void* y) {
  visit_up_to_f32(dtype, [&]<class T>() {
    for_written(static_cast<T*>(y), n, [&](int64_t begin, float* to, int64_t count) TS_LANES {
      look_up(bytes + begin / 2, count, numbers, scale, to);
    });
  });
}

void unpack_bytes(const uint8_t* bytes, int64_t n, float scale, DType dtype, void* y) {
  visit_up_to_f32(dtype, [&]<class T>() {
    for_written(static_cast<T*>(y), n, [&](int64_t begin, float* to, int64_t count) TS_LANES {
      for (int64_t i = 0; i < count; ++i) {
        to[i] = static_cast<float>(static_cast<int8_t>(bytes[begin + i])) * scale;
      }
    });
  });
}

}  // namespace tessera::kernels::TS_SIMD
