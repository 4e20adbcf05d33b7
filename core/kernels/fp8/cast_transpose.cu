#include <tessera/core/kernels/fp8/cast_transpose.h>

#include <tessera/core/dispatch.h>
#include <tessera/core/factory.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/fp8/quantize.h>
#include <tessera/core/raw_views.h>
#include <tessera/core/kernels/fp8/cast_transpose.cuh>

namespace tessera::kernels {
namespace {

constexpr const char* kCast = "cast_transpose";

// What a launch is about, before types are known.
struct CastRequest {
  DType dtype;
  Tensor scale = {}, largest = {};  // see CastJob
  bool power_of_two = false;
  Tensor values = {}, transposed = {};
  Tensor scale_used = {}, inverse = {};
  Tensor amax = {}, counts = {};
  bool no_nan = false;
};

template <class T>
T* data_or_null(const Tensor& x) {
  return x.defined() ? static_cast<T*>(x.data()) : nullptr;
}

bool begins_vectors(const Tensor& x) {
  return !x.defined() || reinterpret_cast<uintptr_t>(x.data()) % 16 == 0;
}

void launch_cast(const Tensor& source, const CastRequest& request) {
  const int64_t M = source.size(0), N = source.size(1);
  dispatch_floating(source.dtype(), kCast, [&]<class T>() {
    if constexpr (!std::is_same_v<T, double>) {
      dispatch_cast_target(request.dtype, [&]<class Q>() {
        constexpr int64_t kSide = cast::kSide<Q>;
        const dim3 grid(gpu::blocks(N, cast::kAcross, kSide), gpu::blocks(M, cast::kDown, kSide));
        TS_CHECK_SHAPE(grid.y <= 65535, kCast, "at most ", 65535 * cast::kDown * kSide,
                       " rows; got ", source);
        const CastJob<T, Q> job{
            .x = source.data_as<T>(),
            .scale = data_or_null<float>(request.scale),
            .largest = data_or_null<uint32_t>(request.largest),
            .power_of_two = request.power_of_two,
            .values = data_or_null<Q>(request.values),
            .transposed = data_or_null<Q>(request.transposed),
            .scale_used = data_or_null<float>(request.scale_used),
            .inverse = data_or_null<float>(request.inverse),
            .amax = data_or_null<uint32_t>(request.amax),
            .counts = data_or_null<unsigned long long>(request.counts),
            .no_nan = request.no_nan,
            .M = M,
            .N = N,
            .vectors = M % kSide == 0 && N % kSide == 0 && begins_vectors(source) &&
                       begins_vectors(request.values) && begins_vectors(request.transposed)};
        const int64_t copies = (job.values != nullptr) + (job.transposed != nullptr);
        const int64_t scalars = (job.scale != nullptr) + (job.scale == nullptr && job.largest);
        gpu::launch({.name = kCast,
                     .grid = grid,
                     .block = cast::kThreads,
                     .traffic = {.reads = source.nbytes() + 4 * scalars,
                                 .writes = copies * M * N * static_cast<int64_t>(sizeof(Q)) +
                                           (job.inverse != nullptr ? 8 : 0)}},
                    cast_transpose_kernel<T, Q>, job);
      });
    }
  });
}

CastTransposed cast_transpose_cuda(const Tensor& x, DType dtype, const Tensor& scale,
                                   bool want_values, bool want_transposed) {
  const int64_t M = x.size(0), N = x.size(1);
  CastTransposed result;
  if (want_values) result.values = raw::empty({M, N}, dtype, x.device());
  if (want_transposed) result.transposed = raw::empty({N, M}, dtype, x.device());
  result.amax = raw::zeros({}, kF32, x.device());
  if (x.numel() == 0) return result;
  launch_cast(contiguous(x), {.dtype = dtype,
                              .scale = scale,
                              .values = result.values,
                              .transposed = result.transposed,
                              .amax = result.amax});
  return result;
}

// ---- Scales of the values at hand ---------------------------------------------------------------

constexpr int kAmaxThreads = 256, kAmaxEach = 64;  // numbers of a thread, as loads that overlap

template <class T>
__global__ void __launch_bounds__(kAmaxThreads)
    largest_magnitude_kernel(const T* x, uint32_t* largest, int64_t n, bool vectors) {
  constexpr int kN = 16 / static_cast<int>(sizeof(T)), kLoads = kAmaxEach / kN;
  TS_SHARED(uint32_t, slot, gpu::kWarp);
  const int64_t begin = int64_t{blockIdx.x} * kAmaxThreads * kAmaxEach;
  uint32_t most = 0;
  if (vectors && begin + kAmaxThreads * kAmaxEach <= n) {
    TS_UNROLL
    for (int i = 0; i < kLoads; ++i) {
      const gpu::Vector<T, kN> in =
          gpu::load_vector<kN>(x + begin + (i * kAmaxThreads + threadIdx.x) * kN);
      TS_UNROLL
      for (int j = 0; j < kN; ++j) {
        most = cast::LargerBits{}(most, rules::magnitude_bits(load<float>(in.values[j])));
      }
    }
  } else {
    for (int i = 0; i < kAmaxEach; ++i) {
      const int64_t at = begin + i * kAmaxThreads + threadIdx.x;
      if (at < n) most = cast::LargerBits{}(most, rules::magnitude_bits(load<float>(x[at])));
    }
  }
  most = gpu::block_reduce(most, cast::LargerBits{}, 0u, slot);
  if (threadIdx.x == 0 && most > 0) atomicMax(largest, most);
}

Tensor largest_of(const Tensor& source) {
  const Tensor largest = raw::zeros({1, 1}, kF32, source.device());
  dispatch_floating(source.dtype(), kCast, [&]<class T>() {
    if constexpr (!std::is_same_v<T, double>) {
      gpu::launch({.name = "largest_magnitude",
                   .grid = gpu::blocks(source.numel(), kAmaxThreads, kAmaxEach),
                   .block = kAmaxThreads,
                   .traffic = {.reads = source.nbytes(), .writes = 0}},
                  largest_magnitude_kernel<T>, source.data_as<T>(),
                  static_cast<uint32_t*>(largest.data()), source.numel(), begins_vectors(source));
    }
  });
  return largest;
}

Quantized quantize_cuda(const Tensor& x, const QuantizeOptions& options, const Tensor& scale,
                        const QuantizeWants& wants) {
  TS_CHECK_AS(UnsupportedError, options.tile == ScaleTile::tensor(), "quantize",
              "a GPU has one scale for the whole matrix (recipes tensorwise and delayed); asked "
              "for tiles of ",
              options.tile.rows, " x ", options.tile.columns,
              " (0: all), as rowwise and blockwise have them");
  const int64_t M = x.size(0), N = x.size(1);
  const auto empty = [&](bool wanted, const Shape& shape, DType dtype) {
    return wanted ? raw::empty(shape, dtype, x.device()) : Tensor();
  };
  Quantized result{.values = empty(wants.by_rows, {M, N}, options.format),
                   .transposed = empty(wants.by_columns, {N, M}, options.format),
                   .scale = raw::empty({1, 1}, kF32, x.device()),
                   .inverse = raw::empty({1, 1}, kF32, x.device()),
                   .tile = options.tile};
  if (x.numel() == 0) {
    for (const Tensor& scalar : {result.scale, result.inverse}) fill(scalar, 1);
    return result;
  }
  const Tensor source = contiguous(x);
  launch_cast(source, {.dtype = options.format,
                       .scale = scale,
                       .largest = scale.defined() ? Tensor() : largest_of(source),
                       .power_of_two = options.power_of_two,
                       .values = result.values,
                       .transposed = result.transposed,
                       .scale_used = result.scale,
                       .inverse = result.inverse,
                       .amax = wants.largest,
                       .counts = wants.counts,
                       .no_nan = true});
  return result;
}

}  // namespace

void register_cast_transpose() {
  cuda_kernel<cast_transpose> = cast_transpose_cuda;
  cuda_kernel<quantize> = quantize_cuda;
}

}  // namespace tessera::kernels
