#include <tessera/core/kernels/copy/shape.h>

#include <algorithm>
#include <vector>

#include <tessera/core/cuda/graph.h>
#include <tessera/core/factory.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/index/index.h>
#include <tessera/core/raw_views.h>
#include <tessera/core/kernels/common/strided.cuh>

namespace tessera::kernels {
namespace {

constexpr int kBlock = 256;

// Made of copies into views: the copy kernels move 16 bytes a thread where layouts allow it.
Tensor cat_cuda(std::span<const Tensor> tensors, int dim) {
  Shape shape = tensors[0].shape();
  shape[dim] = 0;
  for (const Tensor& x : tensors) shape[dim] += x.shape()[dim];
  const Tensor result = raw::empty(shape, tensors[0].dtype(), tensors[0].device());
  int64_t at = 0;
  for (const Tensor& x : tensors) {
    const int64_t size = x.shape()[dim];
    if (x.numel() > 0) copy_into(raw::narrow(result, dim, at, size), x);
    at += size;
  }
  return result;
}

Tensor embed_slice_cuda(const Tensor& x, const Shape& shape, int dim, int64_t start, int64_t step) {
  const Tensor result = raw::zeros(shape, x.dtype(), x.device());
  if (x.numel() == 0) return result;
  const int64_t end = start + (x.shape()[dim] - 1) * step + 1;
  copy_into(raw::slice(result, dim, start, end, step), x);
  return result;
}

// ---- Places from lists: flip, padding -----------------------------------------------------------

// Lists of all dimensions, one after the other in device memory.
struct Maps {
  Tensor table;  // i64
  std::vector<int64_t> values;

  int64_t add(std::span<const int64_t> list) {
    const auto first = static_cast<int64_t>(values.size());
    values.insert(values.end(), list.begin(), list.end());
    return first;
  }
  int64_t bytes() const { return static_cast<int64_t>(values.size()) * 8; }
  const int64_t* upload(const Device& device) {
    const auto count = static_cast<int64_t>(values.size());
    if (count == 0) return nullptr;
    table = raw::empty({count}, kI64, device);
    gpu::upload_constants(table.data(), device.index, values.data(),
                          values.size() * sizeof(int64_t));
    return table.data_as<int64_t>();
  }
};

struct MappedDims {
  int dims;
  int64_t sizes[kMaxDims];    // of what the threads walk
  int64_t strides[kMaxDims];  // of what they read
  int64_t maps[kMaxDims];     // where a dimension's list begins; -1: none
};

template <class B>
__global__ void take_kernel(const B* x, const int64_t* table, B* y, int64_t total,
                            const MappedDims at) {
  const int64_t i = gpu::first_index();
  if (i >= total) return;
  int64_t rest = i, offset = 0;
  for (int d = at.dims - 1; d >= 0; --d) {
    const int64_t index = rest % at.sizes[d];
    rest /= at.sizes[d];
    offset += (at.maps[d] < 0 ? index : table[at.maps[d] + index]) * at.strides[d];
  }
  y[i] = x[offset];
}

template <class F>
void with_bits(int64_t size, const F& f) {
  switch (size) {
    case 1:
      return f.template operator()<uint8_t>();
    case 2:
      return f.template operator()<uint16_t>();
    case 4:
      return f.template operator()<uint32_t>();
    default:
      return f.template operator()<uint64_t>();
  }
}

Tensor take_cuda(const Tensor& x, std::span<const std::vector<int64_t>> maps) {
  Shape shape = x.shape();
  Maps lists;
  MappedDims at{.dims = x.dim(), .sizes = {}, .strides = {}, .maps = {}};
  for (int d = 0; d < x.dim(); ++d) {
    const std::vector<int64_t>& map = maps[static_cast<size_t>(d)];
    if (!map.empty()) shape[d] = static_cast<int64_t>(map.size());
    at.sizes[d] = shape[d];
    at.strides[d] = x.strides()[d];
    at.maps[d] = map.empty() ? -1 : lists.add(map);
  }
  const Tensor result = raw::empty(shape, x.dtype(), x.device());
  if (result.numel() == 0) return result;
  const int64_t* const table = lists.upload(x.device());
  with_bits(size_of(x.dtype()), [&]<class B>() {
    const int64_t bytes = result.numel() * static_cast<int64_t>(sizeof(B));
    gpu::launch({.name = "take",
                 .grid = gpu::blocks(result.numel(), kBlock),
                 .block = kBlock,
                 .traffic = {bytes + lists.bytes(), bytes, true}},
                take_kernel<B>, static_cast<const B*>(x.data()), table,
                static_cast<B*>(result.data()), result.numel(), at);
  });
  return result;
}

// A thread a place: it adds up what take reads from there, in the row-major order of x. For each
// mapped dimension the table has, for each place, where its list of origins begins and ends, and
// then the lists.
template <class T>
__global__ void take_transposed_kernel(const T* x, const int64_t* table, T* y, int64_t total,
                                       const MappedDims at) {
  using C = Compute<T>;
  const int64_t i = gpu::first_index();
  if (i >= total) return;
  const int64_t* origins[kMaxDims];  // null: the place itself
  int64_t counts[kMaxDims], index[kMaxDims];
  int64_t rest = i, offset = 0;
  for (int d = at.dims - 1; d >= 0; --d) {
    const int64_t place = rest % at.sizes[d];
    rest /= at.sizes[d];
    index[d] = 0;
    if (at.maps[d] < 0) {
      origins[d] = nullptr;
      counts[d] = 1;
      offset += place * at.strides[d];
      continue;
    }
    const int64_t* const starts = table + at.maps[d];
    origins[d] = starts + at.sizes[d] + 1 + starts[place];
    counts[d] = starts[place + 1] - starts[place];
    if (counts[d] == 0) {
      y[i] = store<T>(C(0));
      return;
    }
    offset += origins[d][0] * at.strides[d];
  }
  C sum = 0;
  for (;;) {
    sum = static_cast<C>(sum + load<C>(x[offset]));
    int d = at.dims - 1;
    for (; d >= 0; --d) {
      if (counts[d] == 1) continue;
      const int64_t before = origins[d][index[d]];
      index[d] = index[d] + 1 < counts[d] ? index[d] + 1 : 0;
      offset += (origins[d][index[d]] - before) * at.strides[d];
      if (index[d] > 0) break;
    }
    if (d < 0) break;
  }
  y[i] = store<T>(sum);
}

Tensor take_transposed_cuda(const Tensor& x, std::span<const std::vector<int64_t>> maps,
                            const Shape& shape) {
  const Tensor result = raw::empty(shape, x.dtype(), x.device());
  if (result.numel() == 0) return result;
  Maps lists;
  MappedDims at{.dims = x.dim(), .sizes = {}, .strides = {}, .maps = {}};
  for (int d = 0; d < x.dim(); ++d) {
    const std::vector<int64_t>& map = maps[static_cast<size_t>(d)];
    at.sizes[d] = shape[d];
    at.strides[d] = x.strides()[d];
    at.maps[d] = -1;
    if (map.empty()) continue;
    std::vector<int64_t> starts(static_cast<size_t>(shape[d]) + 1, 0), origins(map.size());
    for (const int64_t place : map) ++starts[static_cast<size_t>(place) + 1];
    for (size_t p = 1; p < starts.size(); ++p) starts[p] += starts[p - 1];
    std::vector<int64_t> next = starts;
    for (size_t i = 0; i < map.size(); ++i) {
      origins[static_cast<size_t>(next[static_cast<size_t>(map[i])]++)] = static_cast<int64_t>(i);
    }
    at.maps[d] = lists.add(starts);
    lists.add(origins);
  }
  const int64_t* const table = lists.upload(x.device());
  dispatch_numeric_and_bool(x.dtype(), "pad_backward", [&]<class T>() {
    constexpr auto kSize = static_cast<int64_t>(sizeof(T));
    gpu::launch({.name = "pad_backward",
                 .grid = gpu::blocks(result.numel(), kBlock),
                 .block = kBlock,
                 .traffic = {x.numel() * kSize + lists.bytes(), result.numel() * kSize, true}},
                take_transposed_kernel<T>, x.data_as<T>(), table, result.data_as<T>(),
                result.numel(), at);
  });
  return result;
}

// ---- Between geometries of one storage ----------------------------------------------------------

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

void register_shape() {
  cuda_kernel<cat> = cat_cuda;
  cuda_kernel<take> = take_cuda;
  cuda_kernel<take_transposed> = take_transposed_cuda;
  cuda_kernel<embed_slice> = embed_slice_cuda;
  cuda_kernel<restride> = restride_cuda;
}

}  // namespace tessera::kernels
