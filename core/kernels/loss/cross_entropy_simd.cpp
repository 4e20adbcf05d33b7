#include <tessera/core/kernels/loss/cross_entropy_blocks.h>
#include <tessera/core/kernels/softmax/softmax_row.h>

namespace tessera::kernels::TS_SIMD {

RowStatistics cross_entropy_row(DType dtype, const void* data, int64_t V, const void* class_weights,
                                bool weighted) {
  return visit_floating(dtype, [&]<class T>() -> RowStatistics {
    using C = Compute<T>;
    const T* x = static_cast<const T*>(data);
    const C* w = static_cast<const C*>(class_weights);
    C buffer[kBlock], exponentials[kBlock];
    const RowExponentials<C> row = row_exponentials<C>(x, V, buffer, exponentials);
    RowStatistics result{static_cast<double>(row.largest), row.sum, 0};
    if (!weighted) return result;
    for (int64_t begin = 0; begin < V; begin += kBlock) {
      const int64_t count = V - begin < kBlock ? V - begin : kBlock;
      const C* block = stage_in<C>(x + begin, count, buffer);
      for (int64_t i = 0; i < count; ++i) {
        exponentials[i] = (block[i] - row.largest) * (w != nullptr ? w[begin + i] : C(1));
      }
      result.weighted_sum += static_cast<double>(
          fold_lanes(static_cast<const C*>(exponentials), count, C(0), AddStep{}, AddStep{}));
    }
    return result;
  });
}

void cross_entropy_row_gradient(DType dtype, const void* data, void* gradient, int64_t V,
                                double row_largest, double a, double b, const void* class_weights,
                                int64_t target, double at_target) {
  visit_floating(dtype, [&]<class T>() {
    using C = Compute<T>;
    const T* x = static_cast<const T*>(data);
    T* dx = static_cast<T*>(gradient);
    const C* w = static_cast<const C*>(class_weights);
    const C largest = static_cast<C>(row_largest), scale = static_cast<C>(a);
    const C smooth = static_cast<C>(b);
    C buffer[kBlock], result[kBlock];
    for (int64_t begin = 0; begin < V; begin += kBlock) {
      const int64_t count = V - begin < kBlock ? V - begin : kBlock;
      const C* block = stage_in<C>(x + begin, count, buffer);
      // Through the result even for f32: dx may be x, which forbids restrict.
      for (int64_t i = 0; i < count; ++i)
        result[i] = exp_of_nonpositive(block[i] - largest) * scale;
      if (b != 0) {
        for (int64_t i = 0; i < count; ++i) {
          result[i] -= smooth * (w != nullptr ? w[begin + i] : C(1));
        }
      }
      if (target >= begin && target < begin + count) {
        result[target - begin] -= static_cast<C>(at_target);
      }
      for (int64_t i = 0; i < count; ++i) dx[begin + i] = store<T>(result[i]);
    }
  });
}

}  // namespace tessera::kernels::TS_SIMD
