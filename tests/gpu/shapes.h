// What the parts of gpu_shapes share: sizes, numbers made on the device, and comparisons with f64
// that are calculated there.
//
// References are of the ops in f64, which neither cuDNN nor tensor cores in 16 bits take part in;
// ShapesReference holds them against multiplications and sums. Bounds, with eps the distance from 1
// to the next number of a dtype and products of magnitudes calculated in f64 as the product itself:
//
//   |error| <= eps_out / 2 |y|               the result, rounded once; of a product in 16 bits to which beta
//                                            or an epilogue comes, twice: cuBLASLt 13.1 rounds the sums to
//                                            the result's dtype before (seen on an H200)
//            + 4 2^-23 sqrt(K) sum |a b|     sums in f32, which tensor cores truncate;
//                                            fp8: 2^-13 sum |a b|, as Hopper adds up 14 bits
//                                            of each group
//            + 2^-10 |v| (1 + |v|)           where a library's GELU takes tanh.approx
//
// Where operands are small integers every sum is exact in any order, and the first term is all:
// a row too many, a wrong scale or a partial sum in 16 bits shows.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera::gpu_shapes {

inline const Device kGpu = cuda(0);

// Sizes that try the code and not the machine: on the emulation, and with TESSERA_SMALL_SHAPES=1.
bool small_shapes();
inline int64_t size_or(int64_t full, int64_t small) { return small_shapes() ? small : full; }

// Made on the device, the same in each run: N(0, 1), and whole numbers in [-most, most].
Tensor normal(const Shape& shape, DType dtype);
Tensor integers(const Shape& shape, DType dtype, int64_t most);

// Of `size` rows the first and last ones, neighbours of tiles' borders, and one of each 128.
std::vector<int64_t> sampled_rows(int64_t size);
// Of a matrix of any floating dtype, in f64.
Tensor rows_of(const Tensor& x, int64_t dim, const std::vector<int64_t>& rows);
Tensor f64_of(const Tensor& x);

// |got - expected| <= bound everywhere; a failure names the element that is furthest off.
void expect_within(const Tensor& got, const Tensor& expected, const Tensor& bound,
                   const std::string& what);
// The same bits.
void expect_same(const Tensor& got, const Tensor& expected, const std::string& what);

// Rounding a result once: half the distance to the next number, which of subnormal ones does not shrink.
Tensor rounding(const Tensor& y, DType dtype);

}  // namespace tessera::gpu_shapes
