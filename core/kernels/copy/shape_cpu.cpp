#include <tessera/core/kernels/copy/shape.h>

#include <algorithm>
#include <cstring>

#include <tessera/core/dispatch.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/copy/full.h>
#include <tessera/core/parallel.h>
#include <tessera/core/tensor/empty.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera::kernels {
namespace {

constexpr int64_t kShapeGrain = 16384;  // elements a piece

// Calls f(row of the result, first element of x) for every row (last dimension) of the result.
template <class F>
void for_each_row(const Shape& shape, std::span<const std::vector<int64_t>> maps,
                  const Shape& strides, int64_t begin, int64_t end, F&& f) {
  for (int64_t row = begin; row < end; ++row) {
    int64_t rest = row, offset = 0;
    for (int d = shape.size() - 2; d >= 0; --d) {
      const int64_t i = rest % shape[d];
      rest /= shape[d];
      const std::vector<int64_t>& map = maps[static_cast<size_t>(d)];
      offset += (map.empty() ? i : map[static_cast<size_t>(i)]) * strides[d];
    }
    f(row, offset);
  }
}

// What elements are summed in: f32 for narrower floats.
DType sum_dtype_of(DType dtype) { return is_low_precision(dtype) ? kF32 : dtype; }
template <class F>
void dispatch_sum(DType dtype, const char* where, F&& f) {
  dispatch_numeric_and_bool(dtype, where, [&]<class T>() {
    if constexpr (!is_narrow_float<T>) f.template operator()<T>();
  });
}

// Calls f(i, place) for each element in row-major order.
template <class F>
void for_each_place(const Geometry& geometry, F&& f) {
  const int64_t count = numel_of(geometry.shape);
  Shape index = Shape::filled(geometry.shape.size(), 0);
  int64_t place = geometry.offset;
  for (int64_t i = 0; i < count; ++i) {
    f(i, place);
    for (int d = index.size() - 1; d >= 0; --d) {
      place += geometry.strides[d];
      if (++index[d] < geometry.shape[d]) break;
      place -= index[d] * geometry.strides[d];
      index[d] = 0;
    }
  }
}

}  // namespace

Tensor cat(std::span<const Tensor> tensors, int dim) {
  if (!tensors.empty() && tensors[0].device().is_cuda()) {
    return on_cuda<kernels::cat>("cat", tensors[0].device(), tensors, dim);
  }
  const Tensor& first = tensors[0];
  Shape shape = first.shape();
  shape[dim] = 0;
  for (const Tensor& tensor : tensors) shape[dim] += tensor.shape()[dim];
  Tensor result = raw::empty(shape, first.dtype(), first.device());
  if (result.is_meta() || result.numel() == 0) return result;
  const int64_t bytes = size_of(result.dtype());
  const int64_t inner = numel_of(shape.slice(dim + 1, shape.size())) * bytes;
  const int64_t outer = numel_of(shape.slice(0, dim));
  int64_t start = 0;
  for (const Tensor& tensor : tensors) {
    const int64_t length = tensor.shape()[dim];
    if (tensor.numel() == 0) continue;
    if (tensor.is_contiguous()) {
      const char* source = static_cast<const char*>(tensor.data());
      char* target = static_cast<char*>(result.data()) + start * inner;
      const int64_t row = length * inner, target_row = shape[dim] * inner;
      if (outer == 1) {  // one long row: cut it
        parallel_for(row, kShapeGrain * 4, [&](int64_t begin, int64_t end) {
          std::memcpy(target + begin, source + begin, static_cast<size_t>(end - begin));
        });
      } else {
        parallel_for(
            outer, std::max<int64_t>(1, kShapeGrain * 4 / row), [&](int64_t begin, int64_t end) {
              for (int64_t i = begin; i < end; ++i) {
                std::memcpy(target + i * target_row, source + i * row, static_cast<size_t>(row));
              }
            });
      }
    } else {
      copy_into(raw::narrow(result, dim, start, length), tensor);
    }
    start += length;
  }
  return result;
}

Tensor take(const Tensor& x, std::span<const std::vector<int64_t>> maps) {
  if (x.device().is_cuda()) {
    return on_cuda<kernels::take>("take", x.device(), x, maps);
  }
  Shape shape = x.shape();
  for (int d = 0; d < x.dim(); ++d) {
    const auto& map = maps[static_cast<size_t>(d)];
    if (!map.empty()) shape[d] = static_cast<int64_t>(map.size());
  }
  Tensor result = raw::empty(shape, x.dtype(), x.device());
  if (x.is_meta() || result.numel() == 0) return result;
  if (x.dim() == 0) {
    copy_into(result, x);
    return result;
  }
  const Tensor dense = contiguous(x);
  const int64_t columns = shape.back();
  const std::vector<int64_t>& places = maps[static_cast<size_t>(x.dim() - 1)];
  dispatch_all(x.dtype(), "take", [&]<class T>() {
    const T* source = dense.data_as<T>();
    T* target = result.data_as<T>();
    parallel_for(result.numel() / columns, std::max<int64_t>(1, kShapeGrain / columns),
                 [&](int64_t begin, int64_t end) {
                   for_each_row(shape, maps, dense.strides(), begin, end,
                                [&](int64_t row, int64_t offset) {
                                  const T* from = source + offset;
                                  T* to = target + row * columns;
                                  if (places.empty()) {
                                    std::copy_n(from, columns, to);
                                  } else {
                                    const int64_t* place = places.data();
                                    for (int64_t j = 0; j < columns; ++j) to[j] = from[place[j]];
                                  }
                                });
                 });
  });
  return result;
}

Tensor take_transposed(const Tensor& x, std::span<const std::vector<int64_t>> maps,
                       const Shape& shape) {
  if (x.device().is_cuda()) {
    return on_cuda<kernels::take_transposed>("take", x.device(), x, maps, shape);
  }
  const DType sum_dtype = sum_dtype_of(x.dtype());
  Tensor sums = raw::zeros(shape, sum_dtype, x.device());
  if (!x.is_meta() && x.numel() > 0) {
    const Tensor dense = raw::empty(x.shape(), sum_dtype, x.device());
    copy_into(dense, x);
    const int64_t columns = x.dim() == 0 ? 1 : x.shape().back();
    dispatch_sum(sum_dtype, "pad_backward", [&]<class T>() {
      const T* source = dense.data_as<T>();
      T* target = sums.data_as<T>();
      if (x.dim() == 0) {
        *target = *source;
        return;
      }
      const std::vector<int64_t>& places = maps[static_cast<size_t>(x.dim() - 1)];
      for_each_row(x.shape(), maps, sums.strides(), 0, x.numel() / columns,
                   [&](int64_t row, int64_t offset) {
                     const T* from = source + row * columns;
                     T* to = target + offset;
                     for (int64_t j = 0; j < columns; ++j) {
                       T& sum = to[places.empty() ? j : places[static_cast<size_t>(j)]];
                       sum = static_cast<T>(sum + from[j]);
                     }
                   });
    });
  }
  if (sum_dtype == x.dtype()) return sums;
  Tensor result = raw::empty(shape, x.dtype(), x.device());
  copy_into(result, sums);
  return result;
}

Tensor embed_slice(const Tensor& x, const Shape& shape, int dim, int64_t start, int64_t step) {
  if (x.device().is_cuda()) {
    return on_cuda<kernels::embed_slice>("slice", x.device(), x, shape, dim, start, step);
  }
  Tensor result = raw::zeros(shape, x.dtype(), x.device());
  if (x.is_meta() || x.numel() == 0) return result;
  Shape strides = result.strides();
  const int64_t offset = start * strides[dim];
  strides[dim] *= step;
  copy_into(raw::as_strided(result, x.shape(), strides, offset), x);
  return result;
}

Tensor restride(const Tensor& x, const Geometry& from, const Geometry& to) {
  if (x.device().is_cuda()) {
    return on_cuda<kernels::restride>("as_strided", x.device(), x, from, to);
  }
  Tensor result = raw::empty(to.shape, x.dtype(), x.device());
  if (x.is_meta()) return result;
  const int64_t first = std::min(from.offset, to.offset);
  const int64_t end = std::max(from.offset + storage_extent(from.shape, from.strides),
                               to.offset + storage_extent(to.shape, to.strides));
  const DType sum_dtype = sum_dtype_of(x.dtype());
  const Tensor storage = raw::zeros({end - first}, sum_dtype, x.device());
  const Tensor dense = raw::empty(x.shape(), sum_dtype, x.device());
  copy_into(dense, x);
  const Tensor gathered = raw::empty(to.shape, sum_dtype, x.device());
  dispatch_sum(sum_dtype, "as_strided", [&]<class T>() {
    T* sums = storage.data_as<T>();
    const T* values = dense.data_as<T>();
    for_each_place(from, [&](int64_t i, int64_t place) {
      T& sum = sums[place - first];
      sum = static_cast<T>(sum + values[i]);
    });
    T* target = gathered.data_as<T>();
    for_each_place(to, [&](int64_t i, int64_t place) { target[i] = sums[place - first]; });
  });
  copy_into(result, gathered);
  return result;
}

}  // namespace tessera::kernels
