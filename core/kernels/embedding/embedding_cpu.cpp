#include <tessera/core/kernels/embedding/embedding.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include <tessera/core/dispatch.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/elementwise/elementwise.h>
#include <tessera/core/kernels/index/index.h>
#include <tessera/core/parallel.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera::kernels {
namespace {

constexpr int64_t kEmbeddingGrain = 16384;  // elements a piece

// Positions of an index, sorted by value and stable: those of row v are
// order[start[v] .. start[v + 1]).
struct Sorted {
  std::vector<int64_t> start;  // (V + 1)
  std::unique_ptr<int64_t[]> order;
};

Sorted sort_positions(const int64_t* index, int64_t count, int64_t V) {
  Sorted sorted{std::vector<int64_t>(static_cast<size_t>(V) + 1, 0),
                std::unique_ptr<int64_t[]>(new int64_t[static_cast<size_t>(count)])};
  int64_t* start = sorted.start.data();
  for (int64_t i = 0; i < count; ++i) ++start[index[i]];
  int64_t total = 0;
  for (int64_t v = 0; v < V; ++v) total += start[v], start[v] = total;
  start[V] = count;
  // From the back, so that `start` ends at the beginnings and equal values keep their order.
  for (int64_t i = count - 1; i >= 0; --i) sorted.order[static_cast<size_t>(--start[index[i]])] = i;
  return sorted;
}

}  // namespace

Tensor embedding(const Tensor& index, const Tensor& weight) {
  const Tensor places = checked_index(index, weight.size(0), false, "embedding");
  Shape shape = index.shape();
  shape.push_back(weight.size(1));
  const Tensor table = weight.is_meta() ? weight : contiguous(weight);
  return raw::view(select_rows(raw::unsqueeze(table, 0), places), shape);
}

Tensor embedding_add(const Tensor& index, const Tensor& weight, const Tensor& other) {
  if (weight.device().is_cuda()) {
    return on_cuda<kernels::embedding_add>("embedding_add", weight.device(), index, weight, other);
  }
  const Tensor result = embedding(index, weight);
  binary_into<fn::Add>(result, result, other);
  return result;
}

Tensor embedding_backward(const Tensor& grad, const Tensor& index, int64_t V, int64_t padding_idx,
                          const Tensor& onto) {
  if (grad.device().is_cuda()) {
    return on_cuda<kernels::embedding_backward>("embedding", grad.device(), grad, index, V,
                                                padding_idx, onto);
  }
  const int64_t C = grad.size(-1);
  const bool adds = onto.defined();
  Tensor result = adds ? onto : raw::empty({V, C}, grad.dtype(), grad.device());
  const Tensor places = checked_index(index, V, false, "embedding");
  if (grad.is_meta() || result.numel() == 0) return result;
  const Tensor dense = contiguous(grad);
  const int64_t count = places.numel();
  const Sorted sorted = sort_positions(places.data_as<int64_t>(), count, V);
  const int64_t* start = sorted.start.data();
  dispatch_floating(grad.dtype(), "embedding", [&]<class T>() {
    const T* rows = dense.data_as<T>();  // (count, C)
    T* table = result.data_as<T>();      // (V, C)
    // A row of the result costs as much to write as a row of grad to read: row v begins at place
    // v + start[v] of the work, so that a frequent token does not unbalance the threads more than
    // it must.
    parallel_for(
        V + count, std::max<int64_t>(1, kEmbeddingGrain / C), [&](int64_t begin, int64_t end) {
          int64_t low = 0, high = V;  // the first row at or after `begin`
          while (low < high) {
            const int64_t middle = (low + high) / 2;
            if (middle + start[middle] < begin) {
              low = middle + 1;
            } else {
              high = middle;
            }
          }
          for (int64_t v = low; v < V && v + start[v] < end; ++v) {
            const int64_t terms = v == padding_idx ? 0 : start[v + 1] - start[v];
            if (terms == 0 && adds) continue;
            if (terms == 0) {
              std::memset(static_cast<void*>(table + v * C), 0, static_cast<size_t>(C) * sizeof(T));
            } else {
              const int64_t* order = sorted.order.get() + start[v];
              TS_SIMD_CALL(sum_rows, rows, C, order, terms, table + v * C, C, adds);
            }
          }
        });
  });
  return result;
}

Tensor rotary(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved,
              bool inverse) {
  if (x.device().is_cuda()) {
    return on_cuda<kernels::rotary>("rotary_embedding", x.device(), x, cos, sin, interleaved,
                                    inverse);
  }
  Tensor result = raw::empty_like(x);
  if (x.is_meta() || x.numel() == 0) return result;
  // Rows are read with any stride, their elements one after the other.
  const Tensor source = x.stride(-1) == 1 ? x : contiguous(x);
  if (result.stride(-1) != 1) result = raw::empty(x.shape(), x.dtype(), x.device());
  const int dims = x.dim();
  const int64_t half = x.size(-1) / 2;
  Shape angles = x.shape();
  angles[dims - 1] = half;
  dispatch_floating(x.dtype(), "rotary_embedding", [&]<class T>() {
    using C = Compute<T>;
    // The angles are few (they repeat over batch and heads): converted and laid out once.
    const auto prepare = [&](const Tensor& table) {
      const Tensor dense = raw::empty(table.shape(), dtype_of<C>, table.device());
      copy_into(dense, table);
      return dense;
    };
    const Tensor cosines = prepare(cos), sines = prepare(sin);
    const Shape cos_strides = broadcast_strides(cos.shape(), cosines.strides(), angles);
    const Shape sin_strides = broadcast_strides(sin.shape(), sines.strides(), angles);
    TS_CHECK_SHAPE(half == 1 || (cos_strides[dims - 1] == 1 && sin_strides[dims - 1] == 1),
                   "rotary_embedding", "cos and sin need ", half, " angles in a row; got ", cos,
                   " and ", sin);
    const Shape outer = x.shape().slice(0, dims - 1);
    parallel_for(numel_of(outer), std::max<int64_t>(1, kEmbeddingGrain / x.size(-1)),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t row = begin; row < end; ++row) {
                     int64_t rest = row, from = 0, to = 0, c = 0, s = 0;
                     for (int d = dims - 2; d >= 0; --d) {
                       const int64_t i = rest % outer[d];
                       rest /= outer[d];
                       from += i * source.strides()[d];
                       to += i * result.strides()[d];
                       c += i * cos_strides[d];
                       s += i * sin_strides[d];
                     }
                     const T* in = source.data_as<T>() + from;
                     T* out = result.data_as<T>() + to;
                     const C* cosine = cosines.data_as<C>() + c;
                     const C* sine = sines.data_as<C>() + s;
                     TS_SIMD_CALL(rotary_row, in, cosine, sine, out, half, interleaved, inverse);
                   }
                 });
  });
  return result;
}

}  // namespace tessera::kernels
