// Windows over the last two dimensions: maximum, mean, nearest neighbor, and their transposes.
#pragma once

#include <vector>

#include <tessera/core/kernels/conv/conv.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera::kernels {

// For each output index of one dimension: the inputs [begin, end) and their common weight. A mean
// over windows that lie in two dimensions has the product of the weights. Average pooling, adaptive
// pooling and nearest interpolation are such maps; all are linear, and window_sum_transposed is
// their gradient.
struct WindowMap {
  std::vector<int64_t> begin, end;
  std::vector<double> weight;
  int64_t input_size = 0;
  int64_t size() const { return static_cast<int64_t>(begin.size()); }
};

// x: [..., H, W]; returns [..., rows.size(), columns.size()]. Floating dtypes.
Tensor window_sum(const Tensor& x, const WindowMap& rows, const WindowMap& columns);
// grad: [..., rows.size(), columns.size()]; returns [..., rows.input_size, columns.input_size].
Tensor window_sum_transposed(const Tensor& grad, const WindowMap& rows, const WindowMap& columns);

struct MaxPool {
  Tensor values;   // [..., OH, OW]
  Tensor indices;  // i64, positions in the plane of H * W; the first of equals, a NaN before all
};
// x: [..., H, W]. Every window must meet the plane.
MaxPool max_pool(const Tensor& x, const int64_t (&kernel)[2], const ConvGeometry& geometry,
                 int64_t output_rows, int64_t output_columns);

}  // namespace tessera::kernels
