// Reductions in rank order, with the same bits on every backend and for any split into pieces.
#pragma once

#include <cstdint>
#include <span>

#include <tessera/core/dtype.h>
#include <tessera/distributed/transport/trace.h>

namespace tessera::distributed {

// out[i] = inputs[0][i] op inputs[1][i] op ... from left to right. 16-bit floating types are
// accumulated in f32 and rounded once; mean multiplies the sum by 1/n once. `out` may be one of the
// inputs. Contiguous memory of `count` elements each. On the calling thread, at memory bandwidth.
void reduce_contributions(std::span<const void* const> inputs, void* out, int64_t count,
                          DType dtype, ReduceOp op);
// data[i] *= factor, with the same rounding as the mean above.
void scale_contribution(void* data, int64_t count, DType dtype, double factor);

// DTypeError for undefined reductions: fp8 and bool, the mean of integers.
void check_reduction(DType dtype, ReduceOp op, std::string_view where);

}  // namespace tessera::distributed
