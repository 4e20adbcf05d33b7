// 8 x 8 elements, transposed in registers. For `*_simd.cpp` files (see isa.h).
#pragma once

#include <tessera/core/macros.h>

namespace tessera::kernels::TS_SIMD {
namespace {

// Row: a vector type of 8 elements. Three rounds of interleaving each row with the one four below
// it.
template <class Row>
TS_HD void transpose_8x8(Row (&rows)[8]) {
  Row mixed[8];
  const auto interleave = [](const Row* from, Row* to) __attribute__((always_inline)) {
    for (int i = 0; i < 4; ++i) {
      to[2 * i] = __builtin_shufflevector(from[i], from[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);
      to[2 * i + 1] = __builtin_shufflevector(from[i], from[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);
    }
  };
  interleave(rows, mixed);
  interleave(mixed, rows);
  interleave(rows, mixed);
  for (int i = 0; i < 8; ++i) rows[i] = mixed[i];
}

}  // namespace
}  // namespace tessera::kernels::TS_SIMD
