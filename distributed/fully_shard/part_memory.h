// The layout of parts of parameters in memory.
#pragma once

#include <optional>

#include <tessera/core/tensor/raw_views.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera::distributed {

// Rounds up to a multiple of 16: f32 elements of a cache line, or the bytes that a GPU moves at
// once.
inline int64_t aligned(int64_t count) { return (count + 15) / 16 * 16; }

// A view that is an object of its own, with its own version.
inline Tensor part_view(const Tensor& flat, const Shape& shape, int64_t offset) {
  return raw::as_parameter(
      raw::as_strided(flat, shape, contiguous_strides(shape), flat.offset() + offset));
}

inline DType wider(DType own, std::optional<DType> wanted) {
  return wanted && size_of(*wanted) > size_of(own) ? *wanted : own;
}

}  // namespace tessera::distributed
