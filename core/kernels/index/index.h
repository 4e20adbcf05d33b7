// Kernels that read or write elements by index. All are deterministic: several indices of one
// element take effect in their order, whatever the number of threads.
//
// An index is i64 or i32; `where` is the op that errors name. An index outside its range is an
// IndexError that names op, value, position and range. Results are contiguous. Meta tensors give
// meta results; shapes that depend on data throw DeviceError.
#pragma once

#include <string_view>

#include <tessera/core/tensor/tensor.h>

namespace tessera::kernels {

// The index as contiguous i64, checked against [0, size), or if `negative` against [-size, size)
// and wrapped. Not copied if nothing changes.
Tensor checked_index(const Tensor& index, int64_t size, bool negative, std::string_view where);

// ---- Rows. x: [B, M, A], contiguous; positions: contiguous i64 of [0, M), N of them. -----------
// result[b, n, :] = x[b, positions[n], :]; [B, N, A]. A row is one memcpy. Any dtype.
Tensor select_rows(const Tensor& x, const Tensor& positions);
// x[b, positions[n], :] = source[b, n, :] in place; of equal positions the last one is kept. Any
// dtype; source: [B, N, A], contiguous, of x's dtype.
void put_rows(const Tensor& x, const Tensor& positions, const Tensor& source);
// x[b, positions[n], :] += source[b, n, :] in place, in the order of n; sums of f16 and bf16 are
// f32 inside and rounded once. Any dtype but fp8.
void add_rows(const Tensor& x, const Tensor& positions, const Tensor& source);

// ---- Elements along one dimension ---------------------------------------------------------------
// result[.., i, ..] = x[.., index[.., i, ..], ..]; the shape of index, whose other sizes are at
// most x's. Any dtype.
Tensor gather(const Tensor& x, int dim, const Tensor& index);
// x[.., index[.., i, ..], ..] = source[.., i, ..] in place; x contiguous; source at least as large
// as index. Of equal indices the last one is kept. Any dtype.
void scatter(const Tensor& x, int dim, const Tensor& index, const Tensor& source);
// As scatter, but adds in order; sums as in add_rows. Any dtype but fp8.
void scatter_add(const Tensor& x, int dim, const Tensor& index, const Tensor& source);

// ---- Masks --------------------------------------------------------------------------------------
// Coordinates of the elements that are not 0, in row-major order: i64 [count, dims].
Tensor nonzero(const Tensor& x);
// The last two dimensions with what lies above (below) the diagonal set to 0. Any dtype.
Tensor tril(const Tensor& x, int64_t diagonal);
Tensor triu(const Tensor& x, int64_t diagonal);
// [..., num_classes] i64; num_classes -1 takes the largest value plus one.
Tensor one_hot(const Tensor& x, int64_t num_classes);
// x: integers >= 0, 1-D. Counts (i64), or sums of weights (f64; f32 for f32 weights, as torch).
Tensor bincount(const Tensor& x, const Tensor& weights, int64_t minlength);

}  // namespace tessera::kernels
