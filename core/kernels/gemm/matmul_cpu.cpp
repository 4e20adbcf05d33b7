#include <tessera/core/dispatch.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/functors.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/elementwise/elementwise.h>
#include <tessera/core/kernels/gemm/gemm.h>
#include <tessera/core/kernels/gemm/matmul.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera::kernels {
namespace {

GemmOperand operand_of(const Tensor& matrix) {
  return {matrix.data(), matrix.stride(-2), matrix.stride(-1)};
}

// Element offset of each matrix of x, whose batch dimensions are broadcast to `batch`.
std::vector<int64_t> batch_offsets(const Tensor& x, const Shape& batch) {
  const int dims = x.dim() - 2;
  const Shape strides =
      broadcast_strides(x.shape().slice(0, dims), x.strides().slice(0, dims), batch);
  std::vector<int64_t> offsets(static_cast<size_t>(numel_of(batch)));
  Shape index = Shape::filled(batch.size(), 0);
  int64_t offset = 0;
  for (int64_t& entry : offsets) {
    entry = offset;
    for (int d = batch.size() - 1; d >= 0; --d) {
      offset += strides[d];
      if (++index[d] < batch[d]) break;
      offset -= index[d] * strides[d];
      index[d] = 0;
    }
  }
  return offsets;
}

// result = a b + bias for [..., M, K] x [..., K, N].
void multiply(const Tensor& a, const Tensor& b, const Tensor& bias, const Tensor& result) {
  Gemm problem{.m = result.size(-2),
               .n = result.size(-1),
               .k = a.size(-1),
               .dtype = a.dtype(),
               .result_dtype = result.dtype(),
               .a = operand_of(a),
               .b = operand_of(b),
               .c = result.data(),
               .c_row_stride = result.size(-1)};
  const Tensor packed_bias = bias.defined() ? contiguous(bias) : bias;
  if (bias.defined()) {
    problem.bias = packed_bias.data();
    problem.bias_kind = GemmBias::kColumn;
  }
  if (result.dim() == 2) return gemm(problem);
  const Shape batch = result.shape().slice(0, result.dim() - 2);
  const std::vector<int64_t> a_offsets = batch_offsets(a, batch);
  const std::vector<int64_t> b_offsets = batch_offsets(b, batch);
  const std::vector<int64_t> c_offsets = batch_offsets(result, batch);
  problem.batch = numel_of(batch);
  problem.a_offsets = a_offsets.data();
  problem.b_offsets = b_offsets.data();
  problem.c_offsets = c_offsets.data();
  gemm(problem);
}

// [..., M, K] x [K, N]: one product where the rows of x lie at one distance.
Tensor product(const Tensor& a, const Tensor& b, const Tensor& bias) {
  Shape shape =
      broadcast_shapes(a.shape().slice(0, a.dim() - 2), b.shape().slice(0, b.dim() - 2), "matmul");
  shape.push_back(a.size(-2));
  shape.push_back(b.size(-1));
  const Tensor result = raw::empty(shape, a.dtype(), a.device());
  if (result.is_meta() || result.numel() == 0) return result;
  const Shape rows{-1, a.size(-1)};
  if (b.dim() == 2 && a.dim() > 2 && a.size(-1) > 0 && raw::can_view(a, rows)) {
    multiply(raw::view(a, rows), b, bias, raw::view(result, {-1, b.size(-1)}));
  } else {
    multiply(a, b, bias, result);
  }
  return result;
}

template <class T>
void copy_broadcast(const Tensor& x, const Tensor& result) {
  const Shape strides = broadcast_strides(x.shape(), x.strides(), result.shape());
  const T* source = x.data_as<T>();
  T* target = result.data_as<T>();
  for (int64_t i = 0; i < result.size(0); ++i) {
    for (int64_t j = 0; j < result.size(1); ++j) {
      *target++ = source[i * strides[0] + j * strides[1]];
    }
  }
}

}  // namespace

Tensor matmul(const Tensor& a, const Tensor& b) {
  if (a.device().is_cuda()) {
    return on_cuda<kernels::matmul>("matmul", a.device(), a, b);
  }
  return product(a, b, {});
}

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  if (x.device().is_cuda()) {
    return on_cuda<kernels::linear>("linear", x.device(), x, weight, bias);
  }
  const Tensor transposed = raw::transpose(weight, 0, 1);
  if (x.dim() >= 2) return product(x, transposed, bias);
  return raw::squeeze(product(raw::unsqueeze(x, 0), transposed, bias), 0);
}

Tensor addmm(const Tensor& x, const Tensor& a, const Tensor& b, double beta, double alpha) {
  if (a.device().is_cuda()) {
    return on_cuda<kernels::addmm>("addmm", a.device(), x, a, b, beta, alpha);
  }
  const Tensor result = raw::empty({a.size(0), b.size(1)}, a.dtype(), a.device());
  if (result.is_meta() || result.numel() == 0) return result;
  if (beta != 0) {
    dispatch_numeric(a.dtype(), "addmm", [&]<class T>() { copy_broadcast<T>(x, result); });
  }
  gemm({.m = a.size(0),
        .n = b.size(1),
        .k = a.size(1),
        .dtype = a.dtype(),
        .result_dtype = result.dtype(),
        .a = operand_of(a),
        .b = operand_of(b),
        .c = result.data(),
        .c_row_stride = result.size(1),
        .alpha = alpha,
        .beta = beta});
  return result;
}

Tensor matmul_onto(const Tensor& base, const Tensor& a, const Tensor& b, const Tensor& bias) {
  if (base.device().is_cuda()) {
    return on_cuda<kernels::matmul_onto>("matmul", base.device(), base, a, b, bias);
  }
  return binary<fn::Add>(base, product(a, b, bias));
}

void matmul_into(const Tensor& target, const Tensor& a, const Tensor& b, bool accumulate) {
  if (target.device().is_cuda()) {
    return on_cuda<kernels::matmul_into>("matmul", target.device(), target, a, b, accumulate);
  }
  if (target.is_meta()) return;
  gemm({.m = a.size(0),
        .n = b.size(1),
        .k = a.size(1),
        .dtype = a.dtype(),
        .result_dtype = target.dtype(),
        .a = operand_of(a),
        .b = operand_of(b),
        .c = target.data(),
        .c_row_stride = target.stride(0),
        .beta = accumulate ? 1.0 : 0.0});
}

}  // namespace tessera::kernels
