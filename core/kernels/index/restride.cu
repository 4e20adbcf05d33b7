// Between geometries of one storage: places that several elements share add up by index.
#include <algorithm>
#include <cstdint>

#include <tessera/core/cuda/launch.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/copy/full.h>
#include <tessera/core/kernels/copy/shape.h>
#include <tessera/core/kernels/index/index.h>
#include <tessera/core/tensor/empty.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/core/kernels/common/strided.cuh>

namespace tessera::kernels {
namespace {

constexpr int kBlock = 256;

// The place of each element, counted from `first`.
__global__ void places_kernel(int64_t* places, int64_t first, const DeviceWalk<2> walk) {
  const int64_t i = gpu::first_index();
  if (i >= walk.numel) return;
  int64_t at[2];
  walk.offsets(i, at);
  places[at[0]] = at[1] - first;
}

// False where each element certainly has a place of its own.
bool overlaps_itself(const Geometry& geometry) {
  // Sorted by stride, each dimension must step over all of the smaller ones.
  Shape order;
  for (int d = 0; d < geometry.shape.size(); ++d) {
    if (geometry.shape[d] > 1) order.push_back(d);
  }
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return geometry.strides[static_cast<int>(a)] < geometry.strides[static_cast<int>(b)];
  });
  int64_t reach = 0;
  for (const int64_t d : order) {
    const int64_t stride = geometry.strides[static_cast<int>(d)];
    if (stride <= reach) return true;
    reach += stride * (geometry.shape[static_cast<int>(d)] - 1);
  }
  return false;
}

Tensor restride_cuda(const Tensor& x, const Geometry& from, const Geometry& to) {
  const Device& device = x.device();
  const Tensor result = raw::empty(to.shape, x.dtype(), device);
  const int64_t first = std::min(from.offset, to.offset);
  const int64_t end = std::max(from.offset + storage_extent(from.shape, from.strides),
                               to.offset + storage_extent(to.shape, to.strides));
  Tensor storage = raw::zeros({end - first}, x.dtype(), device);
  if (x.numel() > 0) {
    if (!overlaps_itself(from)) {
      copy_into(raw::as_strided(storage, from.shape, from.strides, from.offset - first), x);
    } else {
      const Tensor places = raw::empty({x.numel()}, kI64, device);
      const Shape strides[2] = {contiguous_strides(from.shape), from.strides};
      const Walk walk(from.shape, strides);
      gpu::launch({.name = "as_strided",
                   .grid = gpu::blocks(walk.numel, kBlock),
                   .block = kBlock,
                   .traffic = {0, places.numel() * 8}},
                  places_kernel, places.data_as<int64_t>(), first - from.offset,
                  DeviceWalk<2>(walk));
      add_rows(raw::view(storage, {1, end - first, 1}), places,
               raw::view(contiguous(x), {1, x.numel(), 1}));
    }
  }
  if (result.numel() > 0) {
    copy_into(result, raw::as_strided(storage, to.shape, to.strides, to.offset - first));
  }
  return result;
}

}  // namespace

void register_restride() { cuda_kernel<restride> = restride_cuda; }

}  // namespace tessera::kernels
