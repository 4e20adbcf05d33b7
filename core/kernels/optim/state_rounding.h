// Optimizer states in bf16, rounded stochastically: up or down, so that the mean is the exact
// number. A moving average whose steps are smaller than half a spacing of bf16 would stand still if
// it were rounded to nearest.
//
// The noise is a pure function of the parameter's name, the number of the step and the element's
// place in the row-major order of the whole parameter (Philox, core/random.h): bits depend neither
// on how the parameter is laid out or cut among ranks, nor on threads or the device, and a run that
// is resumed goes on with them. One 32-bit number serves an element, 16 bits for each of two
// states.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include <tessera/core/half.h>
#include <tessera/core/macros.h>
#include <tessera/core/random.h>
#include <tessera/core/shape.h>

namespace tessera::kernels {

// Where the elements of a part, counted as they lie in memory, stand in the row-major whole.
struct WholeIndex {
  int64_t first = 0;  // of the part's first element
  int32_t dims = 0;   // of the part in the order of its memory, outermost first, as few as can be
  int64_t sizes[kMaxDims] = {};
  int64_t strides[kMaxDims] = {};  // in the whole

  TS_HD int64_t operator()(int64_t i) const {
    int64_t index = first;
    for (int d = dims - 1; d > 0; --d) {
      index += i % sizes[d] * strides[d];
      i /= sizes[d];
    }
    return dims == 0 ? index : index + i * strides[0];
  }
  bool is_run() const { return dims == 0 || (dims == 1 && strides[0] == 1); }

  // The index of a dense shard of this shape and these strides that begins at `offset` of the
  // whole.
  static WholeIndex of(const Shape& shape, const Shape& part_strides, const Shape& whole,
                       const Shape& offset);
};

// What rounds the states of one parameter.
struct StateRounding {
  uint64_t key = 0;  // of its name
  WholeIndex index = {};

  TS_HD RandomStream stream(double step) const { return {key, static_cast<uint64_t>(step)}; }
  static uint64_t key_of(std::string_view name);
};

// The noise of four elements from the i-th of a part's memory on.
TS_HD void draw_noise(const WholeIndex& index, const RandomStream& stream, int64_t i,
                      uint32_t (&noise)[4]) {
  uint64_t drawn = ~uint64_t{0};
  std::array<uint32_t, 4> block{};
  for (int j = 0; j < 4; ++j) {
    const auto place = static_cast<uint64_t>(index(i + j));
    if (place / 4 != drawn) {
      drawn = place / 4;
      block = philox4x32(stream.seed, stream.stream, drawn);
    }
    const uint32_t low = (place & 1) != 0 ? block[1] : block[0];
    const uint32_t high = (place & 1) != 0 ? block[3] : block[2];
    const uint32_t number = (place & 2) != 0 ? high : low;
    for (int k = 0; k < 4; ++k) noise[k] = k == j ? number : noise[k];  // in registers
  }
}

// Up with the probability that its mean asks for, exactly. `noise`: 32 bits, of which state 0 takes
// the lower half and state 1 the upper. What is finite stays so; NaN and infinities stay.
TS_HD bf16 round_by_noise(float value, uint32_t noise, int state) {
  const uint32_t bits = tessera::detail::bits_of(value), a = bits & 0x7fffffffu;
  const uint32_t up = (a + (noise >> (16 * state) & 0xffffu)) >> 16;
  const uint32_t finite = tessera::detail::smaller(up, 0x7f7fu);
  const uint32_t other = tessera::detail::is_nan_magnitude(a) ? (a >> 16) | 0x40u : 0x7f80u;
  return bf16::from_bits(
      static_cast<uint16_t>(((bits >> 16) & 0x8000u) | (a < 0x7f800000u ? finite : other)));
}

}  // namespace tessera::kernels
