// Sorting along one dimension. Stable; NaN counts as the largest number, as in torch; -0 and 0 are
// equal. Every dtype. Results are contiguous; indices are i64.
#pragma once

#include <tessera/core/tensor/tensor.h>

namespace tessera::kernels {

struct SortedValues {
  Tensor values;
  Tensor indices;
};

// Radix sort of the numbers' bits for long rows (two passes for 16-bit types, up to six for f64,
// fewer where digits are all equal), merge sort for short ones. One thread sorts a row.
SortedValues sort(const Tensor& x, int dim, bool descending);

// The k largest (smallest) in descending (ascending) order; of equal ones the first comes first.
// Small k: one pass that keeps what exceeds the k-th best so far, O(n + k log n) as a rule.
SortedValues topk(const Tensor& x, int64_t k, int dim, bool largest);

}  // namespace tessera::kernels
