// Matrix products: by cuBLASLt (core/cuda/libraries/gemm.h) where it serves them, f16 and bf16 else on tensor
// cores (matmul_tensor.cu), and the rest by the tiles below. Without the library, as in the
// emulation, these kernels are all there is. Tiles of 32 x 32 in shared memory, sums in the compute
// type in the order of K: the bits depend on the shape alone.
#include <tessera/core/kernels/gemm/matmul.h>

#include <tessera/core/context.h>
#include <tessera/core/cuda/launch.h>
#include <tessera/core/cuda/libraries/gemm.h>
#include <tessera/core/cuda/libraries/library_graph.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/functors.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/elementwise/elementwise.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/core/kernels/common/strided.cuh>
#include <tessera/core/kernels/gemm/matmul_tiles.cuh>

namespace tessera::kernels {
namespace {

constexpr int kTile = 32, kRows = 8;  // a block of 32 x 8 threads; four results a thread

// c = alpha a b + beta c + bias, for each matrix of the batch.
template <class T, class R>
__global__ void matmul_kernel(const Product p, const T* a, const T* b, const T* bias, R* c,
                              const DeviceWalk<3> batch) {
  using A = Compute<T>;
  TS_SHARED(A, a_tile, kTile * (kTile + 1));
  TS_SHARED(A, b_tile, kTile * (kTile + 1));
  int64_t offsets[3];
  const TilePlace place = tile_place(p);
  batch.offsets(place.matrix, offsets);
  c += offsets[0];
  a += offsets[1];
  b += offsets[2];
  const int x = static_cast<int>(threadIdx.x), y0 = static_cast<int>(threadIdx.y);
  const int64_t row0 = place.row * kTile, column = place.column * kTile + x;
  A sums[kTile / kRows] = {};
  for (int64_t k0 = 0; k0 < p.K; k0 += kTile) {
    for (int y = y0; y < kTile; y += kRows) {
      const int64_t row = row0 + y, k = k0 + y;
      a_tile[y * (kTile + 1) + x] =
          row < p.M && k0 + x < p.K ? load<A>(a[row * p.a_row + (k0 + x) * p.a_column]) : A(0);
      b_tile[y * (kTile + 1) + x] =
          k < p.K && column < p.N ? load<A>(b[k * p.b_row + column * p.b_column]) : A(0);
    }
    __syncthreads();
    for (int k = 0; k < kTile; ++k) {
      const A right = b_tile[k * (kTile + 1) + x];
      for (int i = 0; i < kTile / kRows; ++i) {
        const A left = a_tile[(y0 + i * kRows) * (kTile + 1) + k];
        sums[i] = fn::Add{}(sums[i], fn::Mul{}(left, right));
      }
    }
    __syncthreads();
  }
  if (column >= p.N) return;
  for (int i = 0; i < kTile / kRows; ++i) {
    const int64_t row = row0 + y0 + i * kRows;
    if (row >= p.M) continue;
    R& target = c[row * p.c_row + column];
    A value = sums[i];
    if (p.alpha != 1) value = fn::Mul{}(static_cast<A>(p.alpha), value);
    if (p.beta != 0) {
      const A before = static_cast<A>(load<Compute<R>>(target));
      value = fn::Add{}(value, fn::Mul{}(static_cast<A>(p.beta), before));
    }
    if (bias != nullptr) value = fn::Add{}(value, load<A>(bias[column]));
    target = store<R>(static_cast<Compute<R>>(value));
  }
}

// With one stride from matrix to matrix; `batch` holds merged ones.
bool as_operand(const Tensor& x, const Walk& batch, int operand, gpu::GemmMatrix& matrix) {
  if (!as_gemm_matrix(x, matrix)) return false;
  matrix.batch_stride = batch.dims == 1 ? batch.strides[operand][0] : 0;
  return true;
}

bool multiply_by_library(const Tensor& a, const Tensor& b, const Tensor& bias, const Tensor& result,
                         double alpha, double beta, const Tensor& base, const Walk& batch) {
  auto& counts = Context::current().slot<gpu::GemmCounts>();
  if (batch.dims > 1) {
    ++counts.unmerged_batches;
    return false;
  }
  gpu::GemmProblem problem{
      .M = result.size(-2),
      .N = result.size(-1),
      .K = a.size(-1),
      .batch = batch.numel,
      .alpha = alpha,
      .beta = beta,
      .c = base.defined() ? base.data() : nullptr,
      .tf32 = a.dtype() == kF32 && Context::current().slot<GemmOptions>().tf32};
  if (!as_operand(result, batch, 0, problem.d) || !as_operand(a, batch, 1, problem.a) ||
      !as_operand(b, batch, 2, problem.b)) {
    ++counts.other_strides;
    return false;
  }
  if (bias.defined()) {
    problem.epilogue = gpu::GemmEpilogue::kBias;
    problem.bias = bias.data();
    problem.bias_dtype = bias.dtype();
  }
  if (run_counted(problem)) return true;
  ++counts.not_served;
  gpu::refuse_own_kernels("matmul", [&] {
    const std::string reason = validate(problem);
    return reason.empty() ? gpu::gemm_library() : reason;
  });
  return false;
}

// result = alpha a b + beta result + bias; a: [..., M, K], b: [..., K, N], batches broadcast to
// those of result, whose rows are contiguous. With a base, which lies as result does, beta is of it
// and result need not have been written.
void multiply(const char* where, const Tensor& a, const Tensor& b, const Tensor& bias,
              const Tensor& result, double alpha, double beta, const Tensor& base = {}) {
  if (result.numel() == 0) return;
  const int dims = result.dim() - 2;
  const auto batch_strides = [&](const Tensor& x, const Shape& batch) {
    return broadcast_strides(x.shape().slice(0, x.dim() - 2), x.strides().slice(0, x.dim() - 2),
                             batch);
  };
  const Shape batch = result.shape().slice(0, dims);
  const Shape strides[3] = {result.strides().slice(0, dims), batch_strides(a, batch),
                            batch_strides(b, batch)};
  const Walk walk(batch, strides);
  Product product{.M = result.size(-2),
                  .N = result.size(-1),
                  .K = a.size(-1),
                  .a_row = a.stride(-2),
                  .a_column = a.stride(-1),
                  .b_row = b.stride(-2),
                  .b_column = b.stride(-1),
                  .c_row = result.stride(-2),
                  .alpha = alpha,
                  .beta = beta};
  const Tensor packed = bias.defined() ? contiguous(bias) : bias;
  if (is_floating(a.dtype()) &&
      multiply_by_library(a, b, packed, result, alpha, beta, base, walk)) {
    return;
  }
  if (base.defined()) copy_into(result, base);
  if (multiply_on_tensor_cores(where, product, a, b, packed, result, walk)) return;
  const unsigned grid = cut_into_tiles(where, product, kTile, walk.numel);
  dispatch_numeric(a.dtype(), where, [&]<class T>() {
    const auto run = [&]<class R>() {
      gpu::launch({.name = where, .grid = grid, .block = dim3(kTile, kRows)}, matmul_kernel<T, R>,
                  product, a.data_as<T>(), b.data_as<T>(),
                  packed.defined() ? packed.data_as<T>() : nullptr, result.data_as<R>(),
                  DeviceWalk<3>(walk));
    };
    if (result.dtype() == a.dtype()) {
      run.template operator()<T>();
    } else {
      run.template operator()<float>();  // matmul_into: weight gradients in f32
    }
  });
}

Tensor product(const char* where, const Tensor& a, const Tensor& b, const Tensor& bias) {
  Shape shape =
      broadcast_shapes(a.shape().slice(0, a.dim() - 2), b.shape().slice(0, b.dim() - 2), where);
  shape.push_back(a.size(-2));
  shape.push_back(b.size(-1));
  const Tensor result = raw::empty(shape, a.dtype(), a.device());
  multiply(where, a, b, bias, result, 1, 0);
  return result;
}

Tensor matmul_cuda(const Tensor& a, const Tensor& b) { return product("matmul", a, b, {}); }

Tensor linear_cuda(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  const Tensor transposed = raw::transpose(weight, 0, 1);
  if (x.dim() >= 2) return product("linear", x, transposed, bias);
  return raw::squeeze(product("linear", raw::unsqueeze(x, 0), transposed, bias), 0);
}

Tensor addmm_cuda(const Tensor& x, const Tensor& a, const Tensor& b, double beta, double alpha) {
  const Tensor result = raw::empty({a.size(0), b.size(1)}, a.dtype(), a.device());
  if (beta != 0) copy_into(result, x);
  multiply("addmm", a, b, {}, result, alpha, beta);
  return result;
}

void matmul_into_cuda(const Tensor& target, const Tensor& a, const Tensor& b, bool accumulate) {
  multiply("matmul", a, b, {}, target, 1, accumulate ? 1 : 0);
}

Tensor matmul_onto_cuda(const Tensor& base, const Tensor& a, const Tensor& b, const Tensor& bias) {
  if (Context::current().slot<GemmOptions>().fusion == GemmFusion::kNever) {
    return binary<fn::Add>(base, product("matmul", a, b, bias));
  }
  const Tensor result = raw::empty(base.shape(), base.dtype(), base.device());
  multiply("matmul", a, b, bias, result, 1, 1, base);
  return result;
}

}  // namespace

bool as_gemm_matrix(const Tensor& x, gpu::GemmMatrix& matrix) {
  const int64_t rows = x.size(-2), columns = x.size(-1);
  const bool by_rows = columns == 1 || x.stride(-1) == 1;
  const bool by_columns = rows == 1 || x.stride(-2) == 1;
  if (by_rows && (rows == 1 || x.stride(-2) >= columns)) {
    matrix.transposed = false;
    matrix.leading = rows == 1 ? columns : x.stride(-2);
  } else if (by_columns && (columns == 1 || x.stride(-1) >= rows)) {
    matrix.transposed = true;
    matrix.leading = columns == 1 ? rows : x.stride(-1);
  } else {
    return false;
  }
  matrix.dtype = x.dtype();
  matrix.data = x.data();
  return true;
}

bool run_counted(const gpu::GemmProblem& problem) {
  if (!gpu::run_gemm(problem)) return false;
  ++Context::current().slot<gpu::GemmCounts>().library;
  return true;
}

void register_matmul() {
  cuda_kernel<matmul> = matmul_cuda;
  cuda_kernel<linear> = linear_cuda;
  cuda_kernel<addmm> = addmm_cuda;
  cuda_kernel<matmul_into> = matmul_into_cuda;
  cuda_kernel<matmul_onto> = matmul_onto_cuda;
}

}  // namespace tessera::kernels
