// The kernel of split f32 products (core/kernels/gemm/gemm_split.h), and attention made of them, on
// tiles in plain C++.
#pragma once

#include <cstdint>

#include <tessera/core/kernels/attention/attention_head.h>
#include <tessera/core/kernels/gemm/gemm_tile.h>

namespace tessera::tests {

// Compiled for AVX-512, which packs; call the others only where it is so.
bool has_avx512();

// sums = a b for f32, tile by tile as the processor does it: bf16 in, even and odd elements of K
// summed apart in f32 before they meet the result, subnormal numbers as zeros in and out. Returns
// how many tiles were multiplied: none where all went through f32 registers.
int64_t multiply_on_reference_tiles(const kernels::GemmTile& tile);
// The same in f32 registers, one chain of fused sums for each stretch of K.
void multiply_in_registers(const kernels::GemmTile& tile);
int64_t scratch_bytes(int64_t m, int64_t n);

// Head 0 of sample 0, forward or backward, on such tiles where attention_simd.cpp would take the
// processor's, else in f32 registers. Returns how many tiles were multiplied.
int64_t attend(const kernels::AttentionProblem& problem, bool backward);

}  // namespace tessera::tests
