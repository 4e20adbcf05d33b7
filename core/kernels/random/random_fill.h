// Random numbers into tensors, from Philox streams (core/random.h).
//
// Element i in row-major order is a pure function of (seed, stream, i): its bits depend neither on
// the number of threads nor on the instruction set, nor on how the tensor is laid out. f32 and
// narrower take one 32-bit number an element (block i / 4, lane i % 4), f64 and integers 64 bits
// (block i / 2, half i % 2). Meta tensors keep their shape and draw nothing.
//
// A part of a tensor, as a rank holds one, takes `first`: x is elements [first, first + numel) of
// the whole in row-major order and gets their bits, on any device and wherever the whole is cut.
// The numbers before cost nothing. On a GPU a part that begins off a multiple of the vector's
// elements (four in f32, eight in 16 bits) is stored element by element. A constant knows no
// element: fill() (kernels/copy/copy.h) gives a part what it gives the whole.
#pragma once

#include <tessera/core/isa.h>
#include <tessera/core/kernels/random/draw_place.h>
#include <tessera/core/random.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera {
struct bf16;
struct f16;
}  // namespace tessera

namespace tessera::kernels {

// x: floating. Uniform on [low, high): a number that rounds to `high` becomes `low`. f32 uses 24
// bits, f16 11, bf16 8, f64 53, so that every number of [0, 1) is exact and equally likely.
void random_uniform(const Tensor& x, double low, double high, RandomStream stream,
                    int64_t first = 0);
// x: floating. Box and Muller's transform, one Philox block for four numbers (two in f64); the
// farthest of f32 are 6.8 standard deviations out.
void random_normal(const Tensor& x, double mean, double std, RandomStream stream,
                   int64_t first = 0);
// x: any dtype but fp8. 1 with probability p (32 bits), else 0.
void random_bernoulli(const Tensor& x, double p, RandomStream stream, int64_t first = 0);
// x: any dtype but fp8. Integers of [low, high), each with the same probability up to
// (high - low) / 2^64.
void random_integers(const Tensor& x, int64_t low, int64_t high, RandomStream stream,
                     int64_t first = 0);
// 0 .. size - 1 in a random order (Fisher and Yates' shuffle, on one thread).
Tensor random_permutation(int64_t size, RandomStream stream);
// weights: floating, [rows, n]. `count` indices a row, i64 [rows, count]. With replacement: binary
// search in the cumulative weights. Without: the `count` largest log(u) / weight (Efraimidis and
// Spirakis, 2006), in the order in which successive draws would give them. Throws ValueError where
// a row has a negative or non-finite weight, or fewer positive ones than it must give.
Tensor random_choice(const Tensor& weights, int64_t count, bool replacement, RandomStream stream);

// x: floating; result like x. Keeps an element with probability 1 - p and divides it by 1 - p. The
// same stream keeps the same elements, whatever the dtype, and of a part those that it keeps of the
// whole. On a GPU a part whose runs are no multiples of four draws for each element.
Tensor dropout(const Tensor& x, double p, RandomStream stream, const DrawPlace& place = {});

// The loops of random_fill_simd.cpp: elements [begin, end) of a contiguous array, `begin` a
// multiple of 4. Element i takes the numbers of element i + first, `first` a multiple of 4 too; in
// dropout both may be any. T: double, float, f16, bf16.
TS_SIMD_DECLARE(template <class T> void uniform_range(T* x, int64_t begin, int64_t end,
                                                      RandomStream stream, int64_t first,
                                                      double low, double high))
TS_SIMD_DECLARE(template <class T> void normal_range(T* x, int64_t begin, int64_t end,
                                                     RandomStream stream, int64_t first,
                                                     double mean, double std))
TS_SIMD_DECLARE(template <class T> void dropout_range(const T* x, T* y, int64_t begin, int64_t end,
                                                      RandomStream stream, int64_t first, double p))
// Philox blocks [first, first + count) as 4 * count numbers.
TS_SIMD_DECLARE(void philox_range(uint32_t* bits, RandomStream stream, uint64_t first,
                                  int64_t count))

}  // namespace tessera::kernels
