#include <tessera/core/kernels/softmax/softmax.h>

#include <algorithm>

#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/softmax/softmax_blocks.h>
#include <tessera/core/parallel.h>

namespace tessera::kernels {
namespace {

constexpr int64_t kSoftmaxWork = 1 << 14;  // elements: an exponential costs more than a move

void check_softmax_operand(const char* where, const Tensor& x) {
  TS_CHECK_DTYPE(is_floating(x.dtype()) && !is_fp8(x.dtype()), where,
                 "expects f64, f32, f16 or bf16; got ", x, "; convert with to(dtype)");
  TS_CHECK_DEVICE(x.device().is_cpu() || x.is_meta(), where, "has no kernel for ", x);
}

// Calls rows(first row, count) or columns(offset of the first element, columns) in parallel.
template <class Rows, class Columns>
void for_each_piece(const Tensor& x, int dim, Rows&& rows, Columns&& columns) {
  int64_t outer = 1, inner = 1;
  const int64_t n = x.dim() == 0 ? 1 : x.shape()[dim];
  for (int d = 0; d < dim; ++d) outer *= x.shape()[d];
  for (int d = dim + 1; d < x.dim(); ++d) inner *= x.shape()[d];
  if (x.numel() == 0) return;
  if (inner == 1) {
    parallel_for(outer, std::max<int64_t>(1, kSoftmaxWork / n),
                 [&](int64_t begin, int64_t end) { rows(begin, end - begin, n); });
    return;
  }
  const int64_t tiles = (inner + kSoftmaxTile - 1) / kSoftmaxTile;
  const int64_t work = std::min(inner, kSoftmaxTile) * n;
  parallel_for(
      outer * tiles, std::max<int64_t>(1, kSoftmaxWork / work), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const int64_t column = i % tiles * kSoftmaxTile;
          columns(i / tiles * n * inner + column, n, inner, std::min(kSoftmaxTile, inner - column));
        }
      });
}

}  // namespace

Tensor softmax(const Tensor& x, int dim, bool log) {
  if (x.device().is_cuda()) {
    return on_cuda<kernels::softmax>(log ? "log_softmax" : "softmax", x.device(), x, dim, log);
  }
  check_softmax_operand(log ? "log_softmax" : "softmax", x);
  const Tensor y = raw::empty(x.shape(), x.dtype(), x.device());
  if (x.is_meta()) return y;
  const Tensor source = contiguous(x);
  const DType dtype = x.dtype();
  const int64_t item = size_of(dtype);
  const char* from = static_cast<const char*>(source.data());
  char* to = static_cast<char*>(y.data());
  for_each_piece(
      source, dim,
      [&](int64_t row, int64_t count, int64_t n) {
        const int64_t offset = row * n * item;
        TS_SIMD_CALL(softmax_rows, dtype, log, from + offset, to + offset, count, n);
      },
      [&](int64_t first, int64_t n, int64_t stride, int64_t columns) {
        const int64_t offset = first * item;
        TS_SIMD_CALL(softmax_columns, dtype, log, from + offset, to + offset, n, stride, columns);
      });
  return y;
}

Tensor softmax_backward(const Tensor& dy, const Tensor& y, int dim, bool log) {
  if (y.device().is_cuda()) {
    return on_cuda<kernels::softmax_backward>(log ? "log_softmax" : "softmax", y.device(), dy, y,
                                              dim, log);
  }
  const char* where = log ? "log_softmax" : "softmax";
  check_softmax_operand(where, y);
  TS_CHECK_SHAPE(dy.shape() == y.shape(), where, "the gradient must have the shape of y, ", y,
                 "; got ", dy);
  const Tensor dx = raw::empty(y.shape(), y.dtype(), y.device());
  if (y.is_meta()) return dx;
  const DType dtype = y.dtype();
  const Tensor grad = contiguous(dy.dtype() == dtype ? dy : convert(dy, dtype));
  const Tensor out = contiguous(y);
  const int64_t item = size_of(dtype);
  const char* grads = static_cast<const char*>(grad.data());
  const char* outs = static_cast<const char*>(out.data());
  char* to = static_cast<char*>(dx.data());
  for_each_piece(
      out, dim,
      [&](int64_t row, int64_t count, int64_t n) {
        const int64_t offset = row * n * item;
        TS_SIMD_CALL(softmax_rows_backward, dtype, log, grads + offset, outs + offset, to + offset,
                     count, n);
      },
      [&](int64_t first, int64_t n, int64_t stride, int64_t columns) {
        const int64_t offset = first * item;
        TS_SIMD_CALL(softmax_columns_backward, dtype, log, grads + offset, outs + offset,
                     to + offset, n, stride, columns);
      });
  return dx;
}

}  // namespace tessera::kernels
