#include <tessera/core/kernels/gemm/linear_fused.h>

#include <type_traits>

#include <tessera/core/approximate.h>
#include <tessera/core/context.h>
#include <tessera/core/cuda/libraries/gemm.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/functors.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/elementwise/elementwise.h>
#include <tessera/core/kernels/gemm/matmul.h>
#include <tessera/core/kernels/reduce/reduce.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/core/kernels/common/column_fold.cuh>
#include <tessera/core/kernels/common/vector_lanes.cuh>
#include <tessera/core/kernels/gemm/matmul_tiles.cuh>

namespace tessera::kernels {
namespace {

using gpu::GemmEpilogue;

// d = a b with matrices as they lie; nothing where the library cannot read them.
bool product_of(const Tensor& a, const Tensor& b, const Tensor& d, gpu::GemmProblem& problem) {
  problem.M = d.size(0);
  problem.N = d.size(1);
  problem.K = a.size(1);
  problem.tf32 = a.dtype() == kF32 && Context::current().slot<GemmOptions>().tf32;
  return d.numel() > 0 && problem.K > 0 && as_gemm_matrix(a, problem.a) &&
         as_gemm_matrix(b, problem.b) && as_gemm_matrix(d, problem.d);
}
void set_bias(gpu::GemmProblem& problem, const Tensor& bias) {
  problem.bias = bias.data();
  problem.bias_dtype = bias.dtype();
}

// The last dimension as columns, the others as rows.
Tensor rows_of(const Tensor& x) {
  const int64_t columns = x.size(-1);
  return raw::view(contiguous(x), {columns == 0 ? 0 : x.numel() / columns, columns});
}

Tensor column_sums(const Tensor& x) { return sum(x, {0}, false, x.dtype()); }

// ---- GELU's gradient and its sums over rows -----------------------------------------------------

// A block has kGeluRows rows of a tile of columns: each lane a vector, each of kGeluLines warps
// every kGeluLines-th row. Sums of a thread are joined in the order of the warps.
constexpr int kGeluLines = 8;
constexpr int64_t kGeluRows = 64;
template <class T>
struct GeluGradient {
  const T* dy;
  const T* before;
  T* grad;               // may be dy
  Compute<T>* partials;  // (blocks of rows, C)
  int64_t rows, C;
};
template <class T, class F, class Number>
__global__ void __launch_bounds__(gpu::kWarp* kGeluLines)
    gelu_gradient_kernel(const GeluGradient<T> p) {
  using A = Compute<T>;
  constexpr int kWidth = 16 / sizeof(T), kTile = gpu::kWarp * kWidth;
  TS_SHARED(A, joined, kGeluLines * kTile);
  const int lane = static_cast<int>(threadIdx.x), line = static_cast<int>(threadIdx.y);
  const int64_t tiles = (p.C + kTile - 1) / kTile, block = blockIdx.x / tiles;
  const int64_t c = blockIdx.x % tiles * kTile + lane * kWidth;
  const int64_t begin = block * kGeluRows;
  const int64_t end = begin + kGeluRows < p.rows ? begin + kGeluRows : p.rows;
  A sums[kWidth] = {};
  if (c < p.C) {
    for (int64_t row = begin + line; row < end; row += kGeluLines) {
      A dy[kWidth], x[kWidth];
      unpack(gpu::load_vector<kWidth>(p.dy + row * p.C + c), dy);
      unpack(gpu::load_vector<kWidth>(p.before + row * p.C + c), x);
      TS_UNROLL
      for (int j = 0; j < kWidth; ++j) {
        if constexpr (std::is_same_v<Number, A>) {
          dy[j] = F{}(dy[j], x[j]);
        } else {
          dy[j] = F{}(Number(dy[j]), Number(x[j])).value;
        }
        if constexpr (std::is_same_v<T, A>) sums[j] += dy[j];
      }
      const auto grads = pack<T>(dy);
      if constexpr (!std::is_same_v<T, A>) {  // sums are of what is stored
        unpack(grads, dy);
        TS_UNROLL
        for (int j = 0; j < kWidth; ++j) sums[j] += dy[j];
      }
      gpu::store_vector(p.grad + row * p.C + c, grads);
    }
  }
  TS_UNROLL
  for (int j = 0; j < kWidth; ++j) joined[line * kTile + j * gpu::kWarp + lane] = sums[j];
  __syncthreads();
  if (line > 0 || c >= p.C) return;
  gpu::Vector<A, kWidth> total;
  TS_UNROLL
  for (int j = 0; j < kWidth; ++j) {
    total.values[j] = sums[j];
    for (int l = 1; l < kGeluLines; ++l) {
      total.values[j] += joined[l * kTile + j * gpu::kWarp + lane];
    }
  }
  gpu::store_vector(p.partials + block * p.C + c, total);
}

// Writes GELU's gradient to `grad`, which may be dy. The sums where they are wanted and rows are
// made of vectors, else undefined.
template <class F>
Tensor gelu_gradient_into(const Tensor& grad, const Tensor& dy, const Tensor& before,
                          bool want_bias) {
  const int64_t rows = before.size(0), C = before.size(1);
  const bool vectors = want_bias && rows > 0 && C > 0 && dy.dtype() == before.dtype() &&
                       C * size_of(dy.dtype()) % 16 == 0 && dy.is_contiguous() &&
                       before.is_contiguous() && is_aligned(dy.data()) &&
                       is_aligned(before.data()) && is_aligned(grad.data());
  if (!vectors) {
    binary_into<F>(grad, dy, before);
    return {};
  }
  const Tensor bias = raw::empty({C}, dy.dtype(), dy.device());
  dispatch_floating(dy.dtype(), "gelu", [&]<class T>() {
    using A = Compute<T>;
    using Number = std::conditional_t<sizeof(T) == 2, math::Approximate, A>;
    const unsigned blocks = gpu::blocks(rows, kGeluRows);
    const Tensor partials = raw::empty({blocks, C}, dtype_of<A>, dy.device());
    const int64_t plane = rows * C * static_cast<int64_t>(sizeof(T));
    gpu::launch({.name = "gelu_gradient",
                 .grid = blocks * gpu::blocks(C, gpu::kWarp, 16 / sizeof(T)),
                 .block = dim3(gpu::kWarp, kGeluLines),
                 .traffic = {2 * plane, plane + blocks * C * static_cast<int64_t>(sizeof(A))}},
                gelu_gradient_kernel<T, F, Number>,
                GeluGradient<T>{dy.data_as<T>(), before.data_as<T>(), grad.data_as<T>(),
                                partials.data_as<A>(), rows, C});
    ColumnFold<T> fold{.rows = blocks, .columns = C};
    fold.add(partials, bias);
    launch_column_fold("gelu_fold", fold);
  });
  return bias;
}

GeluGradients gelu_gradients_cuda(const Tensor& dy, const Tensor& before, bool tanh_form,
                                  bool want_bias) {
  const Tensor grad = raw::empty(before.shape(), dy.dtype(), dy.device());
  const Tensor bias = tanh_form ? gelu_gradient_into<fn::GeluTanhGrad>(grad, dy, before, want_bias)
                                : gelu_gradient_into<fn::GeluGrad>(grad, dy, before, want_bias);
  return {grad, bias};
}

LinearGelu linear_gelu_cuda(const Tensor& x, const Tensor& weight, const Tensor& bias,
                            bool tanh_form, bool want_before) {
  if (tanh_form && x.numel() > 0) {
    Shape shape = x.shape();
    shape[x.dim() - 1] = weight.size(0);
    const Tensor y = raw::empty(shape, x.dtype(), x.device());
    const Tensor before = want_before ? raw::empty(shape, x.dtype(), x.device()) : Tensor();
    const Tensor rows = rows_of(x);  // perhaps a copy, which must live until the product is queued
    gpu::GemmProblem problem;
    if (product_of(rows, raw::transpose(weight, 0, 1), rows_of(y), problem)) {
      problem.epilogue = bias.defined() ? GemmEpilogue::kGeluBias : GemmEpilogue::kGelu;
      const Tensor packed = bias.defined() ? contiguous(bias) : bias;
      if (bias.defined()) set_bias(problem, packed);
      if (want_before) as_gemm_matrix(rows_of(before), problem.aux);
      if (gpu::fused_gemm_wins(problem, [&] { unary<fn::GeluTanh>(y); }) && run_counted(problem)) {
        return {y, before};
      }
    }
  }
  const Tensor before = linear(x, weight, bias);
  return {tanh_form ? unary<fn::GeluTanh>(before) : unary<fn::Gelu>(before),
          want_before ? before : Tensor()};
}

LinearGradients linear_gradients_cuda(const Tensor& dy, const Tensor& x, bool want_bias) {
  const Tensor transposed = raw::transpose(dy, 0, 1);
  if (!want_bias) return {matmul(transposed, x), Tensor()};
  LinearGradients result{raw::empty({dy.size(1), x.size(1)}, x.dtype(), x.device()),
                         raw::empty({dy.size(1)}, x.dtype(), x.device())};
  gpu::GemmProblem problem;
  if (product_of(transposed, x, result.weight, problem)) {
    problem.epilogue = GemmEpilogue::kBiasGradOfA;
    set_bias(problem, result.bias);
    if (gpu::fused_gemm_wins(problem, [&] { column_sums(dy); }) && run_counted(problem)) {
      return result;
    }
  }
  matmul_into(result.weight, transposed, x, false);
  result.bias = column_sums(dy);
  return result;
}

GeluGradients linear_gelu_gradients_cuda(const Tensor& dy, const Tensor& weight,
                                         const Tensor& before, bool tanh_form, bool want_bias) {
  const Tensor grad = raw::empty(before.shape(), dy.dtype(), dy.device());
  const auto through_gelu = [&] {
    return tanh_form ? gelu_gradient_into<fn::GeluTanhGrad>(grad, grad, before, want_bias)
                     : gelu_gradient_into<fn::GeluGrad>(grad, grad, before, want_bias);
  };
  gpu::GemmProblem problem;
  if (tanh_form && product_of(dy, weight, grad, problem) && as_gemm_matrix(before, problem.aux)) {
    const Tensor bias =
        want_bias ? raw::empty({grad.size(1)}, grad.dtype(), grad.device()) : Tensor();
    problem.epilogue = want_bias ? GemmEpilogue::kGeluGradBiasGrad : GemmEpilogue::kGeluGrad;
    if (want_bias) set_bias(problem, bias);
    const auto rest = [&] {
      if (!through_gelu().defined() && want_bias) column_sums(grad);
    };
    if (gpu::fused_gemm_wins(problem, rest) && run_counted(problem)) return {grad, bias};
  }
  matmul_into(grad, dy, weight, false);
  return {grad, through_gelu()};
}

}  // namespace

void register_linear_fused() {
  cuda_kernel<linear_gelu> = linear_gelu_cuda;
  cuda_kernel<linear_gradients> = linear_gradients_cuda;
  cuda_kernel<gelu_gradients> = gelu_gradients_cuda;
  cuda_kernel<linear_gelu_gradients> = linear_gelu_gradients_cuda;
}

}  // namespace tessera::kernels
