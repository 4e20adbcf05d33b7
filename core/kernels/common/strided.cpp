#include <tessera/core/kernels/common/strided.h>

#include <algorithm>

namespace tessera::kernels {

Walk::Walk(const Shape& shape, std::span<const Shape> operand_strides)
    : operands(static_cast<int>(operand_strides.size())) {
  int order[kMaxDims];
  int count = 0;
  for (int d = 0; d < shape.size(); ++d) {
    numel *= shape[d];
    if (shape[d] != 1) order[count++] = d;
  }
  const Shape& leading = operand_strides[0];
  const auto outer_first = [&](int a, int b) { return leading[a] > leading[b]; };
  if (!std::is_sorted(order, order + count, outer_first)) {
    std::stable_sort(order, order + count, outer_first);
  }
  for (int i = 0; i < count; ++i) {
    const int d = order[i];
    bool merges = dims > 0;
    for (int k = 0; merges && k < operands; ++k) {
      merges = strides[k][dims - 1] == operand_strides[static_cast<size_t>(k)][d] * shape[d];
    }
    if (merges) {
      sizes[dims - 1] *= shape[d];
    } else {
      sizes[dims++] = shape[d];
    }
    for (int k = 0; k < operands; ++k) {
      strides[k][dims - 1] = operand_strides[static_cast<size_t>(k)][d];
    }
  }
  if (dims == 0) {  // one element
    dims = 1;
    sizes[0] = 1;
    for (int k = 0; k < operands; ++k) strides[k][0] = 0;
  }
}

bool Walk::is_linear(int operand) const {
  if (numel == 1) return true;
  int64_t step = 1;
  for (int d = dims - 1; d >= 0; --d) {
    if (strides[operand][d] != step) return false;
    step *= sizes[d];
  }
  return true;
}

bool Walk::is_constant(int operand) const {
  return std::all_of(strides[operand], strides[operand] + dims,
                     [](int64_t stride) { return stride == 0; });
}

int64_t Walk::distinct(int operand) const {
  int64_t count = 1;
  for (int d = 0; d < dims; ++d) {
    if (strides[operand][d] != 0) count *= sizes[d];
  }
  return numel == 0 ? 0 : count;
}

}  // namespace tessera::kernels
