#include <tessera/core/kernels/optim/state_rounding.h>

#include <algorithm>

namespace tessera::kernels {

WholeIndex WholeIndex::of(const Shape& shape, const Shape& part_strides, const Shape& whole,
                          const Shape& offset) {
  const Shape whole_strides = contiguous_strides(whole);
  std::array<int, kMaxDims> order{};
  int count = 0;
  WholeIndex index;
  for (int d = 0; d < shape.size(); ++d) {
    index.first += offset[d] * whole_strides[d];
    if (shape[d] != 1) order[static_cast<size_t>(count++)] = d;
  }
  std::stable_sort(order.begin(), order.begin() + count,
                   [&](int a, int b) { return part_strides[a] > part_strides[b]; });
  for (int i = 0; i < count; ++i) {
    const int d = order[static_cast<size_t>(i)];
    const int last = index.dims - 1;
    if (last >= 0 && index.strides[last] == shape[d] * whole_strides[d]) {
      index.sizes[last] *= shape[d];
      index.strides[last] = whole_strides[d];
    } else {
      index.sizes[index.dims] = shape[d];
      index.strides[index.dims++] = whole_strides[d];
    }
  }
  return index;
}

uint64_t StateRounding::key_of(std::string_view name) { return named_random_stream(name).stream; }

}  // namespace tessera::kernels
