// How elementwise kernels traverse tensors of any layout and dtype.
//
// A loop calculates on *lanes*: short contiguous arrays of one of four types. An operand whose
// elements lie in order and have the lane's type is read and written where it is; any other is
// converted through a buffer in the L1 cache, a tile at a time. So a formula is compiled for few
// types and one layout, and serves all dtypes, strides and broadcasts.
#pragma once

#include <cstdint>
#include <span>

#include <tessera/core/dtype.h>
#include <tessera/core/isa.h>
#include <tessera/core/shape.h>

namespace tessera::kernels {

enum class Lane : uint8_t {
  kFloat,   // f32 and everything narrower
  kDouble,  // f64
  kInt64,   // integers, bool
  kBool,    // conditions and predicates
};
constexpr int64_t size_of(Lane lane) {
  return lane == Lane::kFloat ? 4 : lane == Lane::kBool ? 1 : 8;
}
// The lane in which a dtype is calculated.
constexpr Lane lane_of(DType dtype) {
  return dtype == kF64 ? Lane::kDouble : is_floating(dtype) ? Lane::kFloat : Lane::kInt64;
}
constexpr bool is_stored_as(Lane lane, DType dtype) {
  return (lane == Lane::kFloat && dtype == kF32) || (lane == Lane::kDouble && dtype == kF64) ||
         (lane == Lane::kInt64 && dtype == kI64) || (lane == Lane::kBool && dtype == kBool);
}

// Converts `count` elements that lie `stride` elements apart into a lane, and back. Any pair of
// types; the rules are those of core/dispatch.h.
using LoadFunction = void (*)(const void* source, int64_t stride, void* lane, int64_t count);
using StoreFunction = void (*)(const void* lane, void* target, int64_t stride, int64_t count);
LoadFunction load_function(DType dtype, Lane lane);
StoreFunction store_function(Lane lane, DType dtype);

inline constexpr int kMaxOperands = 5;

// Dimensions common to several operands, merged where all of them allow it; the innermost is last.
// Operand 0 decides the order: its elements are walked in the order of memory.
struct Walk {
  int dims = 0;
  int operands = 0;
  int64_t numel = 1;
  int64_t sizes[kMaxDims];
  int64_t strides[kMaxOperands][kMaxDims];  // in elements

  // `strides[i]` are the strides of operand i for `shape`, 0 in dimensions where it is broadcast.
  Walk(const Shape& shape, std::span<const Shape> strides);

  bool is_linear(int operand) const;    // elements lie one after the other
  bool is_constant(int operand) const;  // all elements are the same one
  // The number of the operand's elements, each counted once although broadcast ones are visited
  // more often. (Views whose elements overlap in memory have fewer.)
  int64_t distinct(int operand) const;
};

// Calls run(offset in elements, position in the range, count) for the pieces of positions
// [begin, begin + count) in which the operand has one stride, walk.strides[operand][walk.dims - 1].
template <class Run>
void for_each_run(const Walk& walk, int operand, int64_t begin, int64_t count, Run&& run) {
  const int inner = walk.dims - 1;
  const int64_t* strides = walk.strides[operand];
  int64_t index[kMaxDims];
  int64_t offset = 0;
  int64_t rest = begin;
  for (int d = inner; d >= 0; --d) {
    index[d] = rest % walk.sizes[d];
    rest /= walk.sizes[d];
    offset += index[d] * strides[d];
  }
  for (int64_t done = 0; done < count;) {
    const int64_t left = walk.sizes[inner] - index[inner];
    const int64_t length = left < count - done ? left : count - done;
    run(offset, done, length);
    done += length;
    offset += length * strides[inner];
    index[inner] += length;
    for (int d = inner; d > 0 && index[d] == walk.sizes[d]; --d) {
      offset += strides[d - 1] - index[d] * strides[d];
      index[d] = 0;
      ++index[d - 1];
    }
  }
}

}  // namespace tessera::kernels
