// The sum of the squares of many tensors, in a form that does not see how they are cut.
//
//     Tensor sum = multi_tensor_square_sum(gradients, device);  // of the pieces of this rank
//     all_reduce(sum, ReduceOp::kSum);                          // one collective of 544 bytes
//     double norm = std::sqrt(square_sum_value(sum));
//
// [Note: exact sums of squares] The sum is exact: its bits cannot depend on an order, and so not on
// the cut of tensors into pieces (ranks, ZeRO's slices, FSDP's units), on threads, or on the
// device. Squares of f32, bf16 and f16 have at most 48 bits and are exact in f64; a square of an
// f64 is first rounded to f64, by itself. One rounding follows, of the whole sum to the nearest
// f64, and one of its root.
//
// A sum is a fixed-point number over all of f64's range, 66 limbs of 32 bits in int64: limb i
// counts units of 2^(32 i - 1074). Sums merge as int64 do, limb by limb, in any order and without
// carries: limbs have room for 2^31 sums. Two counts follow, of the NaNs and of the infinities
// (also of f64 whose squares overflow), which cannot be lost in a merge.
//
// Loops do not touch limbs for each element. A run of a few thousand is summed in f64 registers of
// two levels (one for narrow types, three where magnitudes differ by more than about 2^21): adding
// to the first rounds a square to the register's unit, which the largest magnitude decides; what
// rounding took away is exact and goes to the second. Runs of bf16 go by the register of the run
// before in one pass, which says at its end whether that was right. Each run ends as one integer
// for each level, which the limbs receive. Alternatives that were left out: bins relative to the
// global maximum need a collective of their own before; a running sum of f64 with fixed bins alone
// keeps fewer bits and takes as many operations.
//
// Cost beside a plain f64 sum of squares, one thread, 8 M normal elements from memory, ns an
// element. AVX-512 (Xeon): f32 0.101 for 0.099, bf16 0.065 for 0.058, f16 0.084 for 0.046, f64
// 0.184 for 0.196. AVX2 (Zen 3): f32 0.298 for 0.276, bf16 0.199 for 0.179, f16 0.208 for 0.167,
// f64 0.567 for 0.496. Where they come from a cache the operations decide: AVX2, f32 0.169 for
// 0.079, bf16 0.175 for 0.150, f64 0.26 for 0.10. Where magnitudes are spread over many binades
// (times exp(4 normal)): AVX-512, f32 0.156, bf16 0.124.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <tessera/core/tensor/tensor.h>

namespace tessera::kernels {

inline constexpr int kSquareSumLimbs = 66;
// Elements of a sum beside its limbs, int64 [kNumSquareSum].
enum SquareSum : int {
  kSquareSumNaNs = kSquareSumLimbs,
  kSquareSumInfinities,
  kNumSquareSum,
};

// int64 [kNumSquareSum] on `device`, where the tensors are (f64, f32, bf16 or f16; there may be
// none). The first 65 limbs are in [0, 2^32): the same sum has the same bits. Merge sums by `+`,
// 2^30 of them at most. Reads every element once; a GPU reads nothing back. Throws DTypeError,
// DeviceError.
Tensor multi_tensor_square_sum(std::span<const Tensor> tensors, const Device& device);

// The f64 nearest to the sum: NaN where an element was, else infinity where a square was or where
// the sum is beyond f64. Waits for a GPU.
double square_sum_value(const Tensor& sum);

// The f64 nearest to the sum of the squares of each tensor. Waits for a GPU.
std::vector<double> multi_tensor_square_sums(std::span<const Tensor> tensors);

// multi_tensor_clip_factor() of the tensors of a sum, p = 2: f64 [3] beside it. A GPU reads nothing
// back.
Tensor square_sum_clip_factor(const Tensor& sum, double scale, double max_norm,
                              const Tensor& factor = {});

}  // namespace tessera::kernels
