#include <tessera/core/kernels/common/overlap.h>

#include <algorithm>
#include <cstdint>

namespace tessera::kernels {

bool repeats_elements(const Tensor& x) {
  if (x.numel() <= 1 || x.is_contiguous()) return false;
  int order[kMaxDims];
  int count = 0;
  for (int d = 0; d < x.dim(); ++d) {
    if (x.shape()[d] > 1) order[count++] = d;
  }
  const Shape& strides = x.strides();
  std::sort(order, order + count, [&](int a, int b) { return strides[a] < strides[b]; });
  int64_t extent = 1;  // of the dimensions so far, in elements
  for (int i = 0; i < count; ++i) {
    if (strides[order[i]] < extent) return true;
    extent += (x.shape()[order[i]] - 1) * strides[order[i]];
  }
  return false;
}

bool overlaps_shifted(const Tensor& out, const Tensor& x) {
  if (out.storage() != x.storage() || out.numel() == 0 || x.numel() == 0) return false;
  if (out.data() == x.data() && out.dtype() == x.dtype() && out.shape() == x.shape() &&
      out.strides() == x.strides()) {
    return false;
  }
  const auto bytes = [](const Tensor& t) {
    return storage_extent(t.shape(), t.strides()) * size_of(t.dtype());
  };
  const auto begin_out = reinterpret_cast<uintptr_t>(out.data());
  const auto begin_x = reinterpret_cast<uintptr_t>(x.data());
  return begin_out < begin_x + static_cast<uintptr_t>(bytes(x)) &&
         begin_x < begin_out + static_cast<uintptr_t>(bytes(out));
}

}  // namespace tessera::kernels
