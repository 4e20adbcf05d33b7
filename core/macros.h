// The few macros of the project. Nothing here allocates a name outside TS_.
#pragma once

#if defined(__CUDACC__)
#define TS_HD __host__ __device__ __forceinline__
#else
// always_inline also keeps code of files that are compiled for several instruction sets from being
// merged by the linker (see kernels/isa.h).
#define TS_HD inline __attribute__((always_inline))
#endif

#define TS_RESTRICT __restrict__
