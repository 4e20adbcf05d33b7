#include <tessera/core/kernels/index/order.h>

#include <algorithm>

#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/copy/shape.h>
#include <tessera/core/kernels/elementwise/elementwise.h>
#include <tessera/core/kernels/index/index.h>
#include <tessera/core/parallel.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera::kernels {
namespace {

constexpr int64_t kOrderWork = 16384;  // elements that are worth a thread

// Contiguous, in the lane of its dtype: what is compared keeps its order.
Tensor in_lane(const Tensor& x) {
  const DType dtype = x.dtype() == kF64 ? kF64 : is_floating(x.dtype()) ? kF32 : kI64;
  return contiguous(x.dtype() == dtype ? x : convert(x, dtype));
}

template <class F>
void with_lane(const Tensor& x, F&& f) {
  if (x.dtype() == kF32) return f.template operator()<float>();
  if (x.dtype() == kF64) return f.template operator()<double>();
  return f.template operator()<int64_t>();
}

// Lines [outer, n, inner]; a tile of neighbouring lines goes through the dimension together.
template <class C>
void running_extremum_cpu(const C* x, int64_t* result, int64_t outer, int64_t n, int64_t inner,
                          bool largest) {
  constexpr int64_t kTile = 64;
  const int64_t tiles = (inner + kTile - 1) / kTile;
  const int64_t grain = std::max<int64_t>(1, kOrderWork / (n * std::min(inner, kTile)));
  parallel_for(outer * tiles, grain, [&](int64_t begin, int64_t end) {
    C best[kTile];
    int64_t place[kTile];
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t first = tile % tiles * kTile, count = std::min(kTile, inner - first);
      const int64_t offset = tile / tiles * n * inner + first;
      for (int64_t i = 0; i < n; ++i) {
        const C* const row = x + offset + i * inner;
        for (int64_t j = 0; j < count; ++j) {
          const bool wins = largest ? row[j] >= best[j] : row[j] <= best[j];
          if (i == 0 || wins || row[j] != row[j]) best[j] = row[j], place[j] = i;
          result[offset + i * inner + j] = place[j];
        }
      }
    }
  });
}

// Doubling: after the step of `distance` each place knows the best of the 2 * distance up to it.
Tensor running_extremum_composed(const Tensor& x, int dim, bool largest) {
  const int64_t n = x.shape()[dim];
  Tensor best = contiguous(x);
  Shape line = Shape::filled(x.dim(), 1);
  line[dim] = n;
  const Tensor count = raw::view(raw::arange(0, 1, n, kI64, x.device()), line);
  Tensor place = contiguous(raw::expand(count, x.shape()));
  const bool floating = is_floating(x.dtype());
  for (int64_t distance = 1; distance < n; distance *= 2) {
    const int64_t rest = n - distance;
    const Tensor left = raw::narrow(best, dim, 0, rest),
                 right = raw::narrow(best, dim, distance, rest);
    Tensor wins = largest ? binary<fn::Ge>(right, left) : binary<fn::Le>(right, left);
    if (floating) wins = binary<fn::LogicalOr>(wins, unary<fn::IsNan>(right));
    const Tensor places = ternary<fn::Where>(wins, raw::narrow(place, dim, distance, rest),
                                             raw::narrow(place, dim, 0, rest));
    const Tensor winners = ternary<fn::Where>(wins, right, left);
    copy_into(raw::narrow(place, dim, distance, rest), places);
    if (2 * distance < n) {
      const Tensor kept[] = {raw::narrow(best, dim, 0, distance), winners};
      best = cat(kept, dim);
    }
  }
  return place;
}

template <class C>
void search_sorted_cpu(const C* sorted, const C* values, int64_t* result, int64_t n, int64_t m,
                       int64_t total, bool right, bool one_row) {
  parallel_for(total, kOrderWork / 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const C* const row = sorted + (one_row ? 0 : i / m * n);
      int64_t low = 0, high = n;
      while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        // Negated, so that a NaN goes on to the end.
        if (right ? !(row[middle] > values[i]) : !(row[middle] >= values[i])) {
          low = middle + 1;
        } else {
          high = middle;
        }
      }
      result[i] = low;
    }
  });
}

// The same with all values at once: a gather for each halving.
Tensor search_sorted_composed(const Tensor& rows, const Tensor& values, int64_t n, bool right) {
  Tensor low = raw::zeros(values.shape(), kI64, values.device());
  Tensor high = raw::full(values.shape(), n, kI64, values.device());
  for (int64_t left = n; left > 0; left /= 2) {
    const Tensor middle = binary<fn::FloorDivide>(binary<fn::Add>(low, high), 2);
    // Where nothing is left, low == high may be n; what is read there is not used.
    const Tensor element = gather(rows, 1, binary<fn::Minimum>(middle, n - 1));
    const Tensor stays = right ? binary<fn::Gt>(element, values) : binary<fn::Ge>(element, values);
    const Tensor after =
        binary<fn::LogicalAnd>(unary<fn::LogicalNot>(stays), binary<fn::Lt>(low, high));
    low = ternary<fn::Where>(after, binary<fn::Add>(middle, 1), low);
    high = ternary<fn::Where>(after, high, middle);
  }
  return low;
}

}  // namespace

Tensor running_extremum(const Tensor& x, int dim, bool largest) {
  if (x.is_meta() || x.numel() == 0) return raw::empty(x.shape(), kI64, x.device());
  if (x.dim() == 0) return raw::zeros({}, kI64, x.device());
  if (x.device().is_cuda()) return running_extremum_composed(x, dim, largest);
  const Tensor result = raw::empty(x.shape(), kI64), source = in_lane(x);
  const int64_t n = x.shape()[dim];
  int64_t inner = 1;
  for (int d = dim + 1; d < x.dim(); ++d) inner *= x.shape()[d];
  with_lane(source, [&]<class C>() {
    running_extremum_cpu(source.data_as<C>(), result.data_as<int64_t>(), x.numel() / (n * inner), n,
                         inner, largest);
  });
  return result;
}

Tensor search_sorted(const Tensor& sorted, const Tensor& values, bool right) {
  if (values.is_meta() || values.numel() == 0 || sorted.numel() == 0) {
    return raw::zeros(values.shape(), kI64, values.device());
  }
  const int64_t n = sorted.shape().back(), total = values.numel();
  const bool one_row = sorted.numel() == n;
  const int64_t m = one_row ? total : values.shape().back();
  if (values.device().is_cuda()) {
    const Tensor rows = raw::view(contiguous(sorted), {sorted.numel() / n, n});
    const Tensor list = raw::view(contiguous(values), {total / m, m});
    return raw::view(search_sorted_composed(rows, list, n, right), values.shape());
  }
  const Tensor result = raw::empty(values.shape(), kI64);
  const Tensor rows = in_lane(sorted), list = in_lane(values);
  with_lane(rows, [&]<class C>() {
    search_sorted_cpu(rows.data_as<C>(), list.data_as<C>(), result.data_as<int64_t>(), n, m, total,
                      right, one_row);
  });
  return result;
}

}  // namespace tessera::kernels
