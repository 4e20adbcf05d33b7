// Inner loops of copies and conversions; copy_simd.cpp makes them for each instruction set.
#pragma once

#include <cstdint>

#include <tessera/core/isa.h>
#include <tessera/core/kernels/common/strided.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera::kernels {

// The bits of a number in a dtype, in the first size_of(dtype) bytes.
uint64_t element_bits(const Scalar& value, DType dtype);
// target[i] = source[i], converted; the walk has the target's strides and the source's.
void move_elements(const Walk& walk, const Tensor& target, const Tensor& source);
void fill_elements(const Walk& walk, const Tensor& x, uint64_t bits);

struct MoveFunctions {  // for elements of one size, moved as bits
  void (*run)(const void* source, int64_t source_stride, void* target, int64_t target_stride,
              int64_t count);
  // source: (columns, rows), rows contiguous; target: (rows, columns), columns contiguous.
  void (*transpose)(const void* source, int64_t source_stride, void* target, int64_t target_stride,
                    int64_t rows, int64_t columns);
};

TS_SIMD_DECLARE(LoadFunction load_function(DType dtype, Lane lane))
TS_SIMD_DECLARE(StoreFunction store_function(Lane lane, DType dtype))
TS_SIMD_DECLARE(MoveFunctions move_functions(int64_t element_size))

}  // namespace tessera::kernels
