#include <tessera/core/kernels/fp8/cast_transpose.h>

#include <tessera/core/dispatch.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/fp8/amax.h>
#include <tessera/core/kernels/fp8/logits_gradient.h>
#include <tessera/core/kernels/fp8/quantize.h>
#include <tessera/core/kernels/fp8/quantize_tiles.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/core/kernels/fp8/cast_transpose.cuh>

namespace tessera::kernels {
namespace {

constexpr const char* kCast = "cast_transpose";

// What a launch is about, before types are known.
struct CastRequest {
  DType dtype;
  Tensor second = {};  // see CastJob
  DType through = kF32;
  Tensor factor = {};
  Tensor scale = {}, largest = {};
  bool power_of_two = false;
  Tensor values = {}, transposed = {};
  Tensor scale_used = {}, inverse = {};
  Tensor amax = {}, counts = {};
  bool no_nan = false;
  Tensor sums = {};
  const LogitsGradient* softmax = nullptr;
};

SoftmaxRows softmax_rows(const LogitsGradient* of) {
  if (of == nullptr) return {};
  return {of->targets.data_as<int64_t>(), of->statistics.data_as<float>(),
          of->gradient.data_as<float>(), of->divisor.data_as<double>(), of->ignore_index};
}
// Of a row a target and two statistics; two numbers for all.
int64_t softmax_bytes(const LogitsGradient* of) {
  return of == nullptr ? 0 : 16 * of->targets.numel() + 12;
}

template <class T>
T* data_or_null(const Tensor& x) {
  return x.defined() ? static_cast<T*>(x.data()) : nullptr;
}

bool begins_vectors(const Tensor& x) {
  return !x.defined() || reinterpret_cast<uintptr_t>(x.data()) % 16 == 0;
}

template <class Q, class Form, bool kSums>
dim3 grid_of(int64_t M, int64_t N) {
  return {gpu::blocks(N, cast::kAcross, cast::kSide<Q>),
          gpu::blocks(M, cast::kDown, cast::kHeight<Q, Form, kSums>)};
}

template <class T, class Q, class Form, bool kSums>
void launch_as(const Tensor& source, const CastRequest& request) {
  constexpr int64_t kSide = cast::kSide<Q>;
  const int64_t M = source.size(0), N = source.size(1);
  const dim3 grid = grid_of<Q, Form, kSums>(M, N);
  TS_CHECK_SHAPE(grid.y <= 65535, kCast, "at most ",
                 65535 * cast::kDown * cast::kHeight<Q, Form, kSums>, " rows; got ", source);
  const CastJob<T, Q> job{.x = source.data_as<T>(),
                          .second = data_or_null<T>(request.second),
                          .through = request.through,
                          .factor = data_or_null<float>(request.factor),
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
                          .sums = data_or_null<float>(request.sums),
                          .softmax = softmax_rows(request.softmax),
                          .M = M,
                          .N = N,
                          .vectors = M % kSide == 0 && N % kSide == 0 && begins_vectors(source) &&
                                     begins_vectors(request.second) &&
                                     begins_vectors(request.values) &&
                                     begins_vectors(request.transposed)};
  const int64_t copies = (job.values != nullptr) + (job.transposed != nullptr);
  const int64_t numbers =
      (job.scale != nullptr || job.largest != nullptr) + (job.factor != nullptr);
  gpu::launch({.name = kCast,
               .grid = grid,
               .block = cast::kThreads,
               .traffic = {.reads = Form::kOperands * source.nbytes() + 4 * numbers +
                                    softmax_bytes(request.softmax),
                           .writes = copies * M * N * static_cast<int64_t>(sizeof(Q)) +
                                     (job.inverse != nullptr ? 8 : 0) +
                                     (kSums ? request.sums.nbytes() : 0)}},
              cast_transpose_kernel<T, Q, Form, kSums>, job);
}

void launch_cast(const Tensor& source, const CastRequest& request) {
  dispatch_floating(source.dtype(), kCast, [&]<class T>() {
    if constexpr (!std::is_same_v<T, double>) {
      dispatch_cast_target(request.dtype, [&]<class Q>() {
        if constexpr (sizeof(Q) == 1) {
          if (request.sums.defined()) {
            return launch_as<T, Q, cast::Plain, true>(source, request);
          }
        }
        launch_as<T, Q, cast::Plain, false>(source, request);
      });
    }
  });
}

// f(T of the source, Q of the result): 16 bits to fp8.
template <class F>
void dispatch_low(DType from, DType to, const F& f) {
  const auto with = [&]<class T>() {
    to == kF8E4M3 ? f.template operator()<T, f8e4m3>() : f.template operator()<T, f8e5m2>();
  };
  from == kF16 ? with.template operator()<f16>() : with.template operator()<bf16>();
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

template <class T, class Form>
__global__ void __launch_bounds__(kAmaxThreads)
    largest_magnitude_kernel(const T* x, const T* second, DType through, const float* factor,
                             uint32_t* largest, int64_t n, bool vectors, bool no_nan) {
  constexpr int kN = 16 / static_cast<int>(sizeof(T)), kLoads = kAmaxEach / kN;
  TS_SHARED(uint32_t, slot, gpu::kWarp);
  const int64_t begin = int64_t{blockIdx.x} * kAmaxThreads * kAmaxEach;
  const cast::Before before{through, factor != nullptr ? *factor : 1.0f};
  uint32_t most = 0;
  if (vectors && begin + kAmaxThreads * kAmaxEach <= n) {
    TS_UNROLL
    for (int i = 0; i < kLoads; ++i) {
      const int64_t at = begin + (i * kAmaxThreads + threadIdx.x) * kN;
      float values[kN];
      cast::load_numbers<kN, Form>(x + at, Form::kOperands == 2 ? second + at : x, before, values);
      TS_UNROLL
      for (int j = 0; j < kN; ++j) {
        most = cast::LargerBits{}(most, rules::magnitude_bits(values[j]));
      }
    }
  } else {
    for (int i = 0; i < kAmaxEach; ++i) {
      const int64_t at = begin + i * kAmaxThreads + threadIdx.x;
      if (at >= n) continue;
      const T other = Form::kOperands == 2 ? second[at] : x[at];
      const float value = cast::number_of(Form{}, x[at], other, before);
      most = cast::LargerBits{}(most, rules::magnitude_bits(value));
    }
  }
  most = gpu::block_reduce(most, cast::LargerBits{}, 0u, slot);
  if (no_nan && most > rules::kInfinityBits) most = rules::kInfinityBits;
  if (threadIdx.x == 0 && most > 0) atomicMax(largest, most);
}

// `largest` is raised to it.
template <class T, class Form>
void find_largest(const Tensor& source, const Tensor& second, DType through, const Tensor& factor,
                  const Tensor& largest, bool no_nan) {
  gpu::launch({.name = "largest_magnitude",
               .grid = gpu::blocks(source.numel(), kAmaxThreads, kAmaxEach),
               .block = kAmaxThreads,
               .traffic = {.reads = Form::kOperands * source.nbytes() + (factor.defined() ? 8 : 4),
                           .writes = 4}},
              largest_magnitude_kernel<T, Form>, source.data_as<T>(), data_or_null<T>(second),
              through, data_or_null<float>(factor), static_cast<uint32_t*>(largest.data()),
              source.numel(), begins_vectors(source) && begins_vectors(second), no_nan);
}

template <class T, class Form>
Tensor largest_of(const Tensor& source, const Tensor& second, DType through = kF32,
                  const Tensor& factor = {}) {
  const Tensor largest = raw::zeros({1, 1}, kF32, source.device());
  find_largest<T, Form>(source, second, through, factor, largest, /*no_nan=*/false);
  return largest;
}

void raise_to_largest_cuda(const Tensor& largest, const Tensor& x) {
  if (x.numel() == 0) return;
  const Tensor source = contiguous(x);
  dispatch_floating(source.dtype(), kCast, [&]<class T>() {
    if constexpr (!std::is_same_v<T, double>) {
      find_largest<T, cast::Plain>(source, {}, kF32, {}, largest, /*no_nan=*/true);
    }
  });
}

// ---- quantize -----------------------------------------------------------------------------------

// What is quantised has the shape of x. run(request): the launch.
template <class Largest, class Run>
Quantized quantized(const Tensor& x, const QuantizeOptions& options, const Tensor& scale,
                    const QuantizeWants& wants, const Largest& largest, const Run& run) {
  TS_CHECK_AS(UnsupportedError, options.tile == ScaleTile::tensor(), "quantize",
              "a GPU makes gelu with one scale for the whole matrix; asked for tiles of ",
              options.tile.rows, " x ", options.tile.columns, " (0: all)");
  const int64_t M = x.size(0), N = x.size(1);
  const auto empty = [&](bool wanted, const Shape& shape, DType dtype) {
    return wanted ? raw::empty(shape, dtype, x.device()) : Tensor();
  };
  Quantized result{.values = empty(wants.by_rows, {M, N}, options.format),
                   .transposed = empty(wants.by_columns, {N, M}, options.format),
                   .scale = raw::empty({1, 1}, kF32, x.device()),
                   .inverse = raw::empty({1, 1}, kF32, x.device()),
                   .tile = options.tile};
  const DType dtype_of_sums = wants.through.value_or(x.dtype());
  if (x.numel() == 0) {
    for (const Tensor& scalar : {result.scale, result.inverse}) fill(scalar, 1);
    if (wants.sums) result.sums = raw::zeros({N}, dtype_of_sums, x.device());
    return result;
  }
  CastRequest request{.dtype = options.format,
                      .through = wants.through.value_or(kF32),
                      .factor = wants.factor,
                      .scale = scale,
                      .largest = scale.defined()              ? Tensor()
                                 : wants.of_largest.defined() ? wants.of_largest
                                                              : largest(),
                      .power_of_two = options.power_of_two,
                      .values = result.values,
                      .transposed = result.transposed,
                      .scale_used = result.scale,
                      .inverse = result.inverse,
                      .amax = wants.largest,
                      .counts = wants.counts,
                      .no_nan = true};
  request.sums = empty(wants.sums, {int64_t{grid_of<f8e4m3, cast::Plain, true>(M, N).y}, N}, kF32);
  run(request);
  if (wants.sums) result.sums = fold_sums(request.sums, dtype_of_sums);
  return result;
}

Quantized quantize_cuda(const Tensor& x, const QuantizeOptions& options, const Tensor& scale,
                        const QuantizeWants& wants) {
  const Tensor source = contiguous(x);
  if (options.tile != ScaleTile::tensor()) return quantize_tiles(source, options, wants);
  const auto largest = [&] {
    Tensor result;
    dispatch_floating(source.dtype(), kCast, [&]<class T>() {
      if constexpr (!std::is_same_v<T, double>) {
        result = largest_of<T, cast::Plain>(source, {}, wants.through.value_or(kF32), wants.factor);
      }
    });
    return result;
  };
  return quantized(source, options, scale, wants, largest,
                   [&](const CastRequest& request) { launch_cast(source, request); });
}

template <class Form, bool kSums>
Quantized quantize_form(const Tensor& first, const Tensor& second, const QuantizeOptions& options,
                        const Tensor& scale, const QuantizeWants& wants) {
  const auto largest = [&] {
    Tensor result;
    dispatch_low(first.dtype(), options.format,
                 [&]<class T, class Q>() { result = largest_of<T, Form>(first, second); });
    return result;
  };
  return quantized(first, options, scale, wants, largest, [&](CastRequest request) {
    request.second = second;
    dispatch_low(first.dtype(), options.format,
                 [&]<class T, class Q>() { launch_as<T, Q, Form, kSums>(first, request); });
  });
}

Quantized quantize_gelu_cuda(const Tensor& x, bool tanh_form, const QuantizeOptions& options,
                             const Tensor& scale, const QuantizeWants& wants) {
  const Tensor source = contiguous(x);
  return tanh_form ? quantize_form<cast::GeluTanh, false>(source, {}, options, scale, wants)
                   : quantize_form<cast::Gelu, false>(source, {}, options, scale, wants);
}

// Its sums are always made: the gradient of a layer's bias.
Quantized quantize_gelu_grad_cuda(const Tensor& dy, const Tensor& x, bool tanh_form,
                                  const QuantizeOptions& options, const Tensor& scale,
                                  const QuantizeWants& wants) {
  const Tensor gradient = contiguous(dy), source = contiguous(x);
  QuantizeWants all = wants;
  all.sums = true;
  return tanh_form ? quantize_form<cast::GeluTanhGrad, true>(gradient, source, options, scale, all)
                   : quantize_form<cast::GeluGrad, true>(gradient, source, options, scale, all);
}

// ---- Gradients of logits ------------------------------------------------------------------------

// A block a row.
template <class T>
__global__ void __launch_bounds__(kAmaxThreads)
    largest_softmax_kernel(const T* logits, SoftmaxRows rows, uint32_t* largest, int64_t V,
                           bool vectors) {
  constexpr int kN = 8;
  TS_SHARED(uint32_t, slot, gpu::kWarp);
  const T* const x = logits + int64_t{blockIdx.x} * V;
  const cast::SoftmaxRow row = cast::softmax_row(rows, blockIdx.x, cast::softmax_share(rows));
  uint32_t most = 0;
  if (vectors) {
    for (int64_t n = threadIdx.x * kN; n < V; n += kAmaxThreads * kN) {
      float values[kN];
      cast::load_softmax<kN>(x + n, row, n, values);
      TS_UNROLL
      for (int j = 0; j < kN; ++j) {
        most = cast::LargerBits{}(most, rules::magnitude_bits(values[j]));
      }
    }
  } else {
    for (int64_t n = threadIdx.x; n < V; n += kAmaxThreads) {
      const float value = cast::softmax_number(row, x[n], n);
      most = cast::LargerBits{}(most, rules::magnitude_bits(value));
    }
  }
  most = gpu::block_reduce(most, cast::LargerBits{}, 0u, slot);
  if (threadIdx.x == 0 && most > 0) atomicMax(largest, most);
}

Quantized quantize_logits_gradient_cuda(const LogitsGradient& given, const QuantizeOptions& options,
                                        const Tensor& scale, const QuantizeWants& wants) {
  LogitsGradient of = given;
  of.logits = contiguous(given.logits);
  const Tensor& logits = of.logits;
  const int64_t N = logits.size(0), V = logits.size(1);
  const auto largest = [&] {
    const Tensor result = raw::zeros({1, 1}, kF32, logits.device());
    dispatch_low(logits.dtype(), options.format, [&]<class T, class Q>() {
      gpu::launch({.name = "largest_magnitude",
                   .grid = static_cast<unsigned>(N),
                   .block = kAmaxThreads,
                   .traffic = {.reads = logits.nbytes() + softmax_bytes(&of) + 4, .writes = 4}},
                  largest_softmax_kernel<T>, logits.data_as<T>(), softmax_rows(&of),
                  static_cast<uint32_t*>(result.data()), V, V % 8 == 0 && begins_vectors(logits));
    });
    return result;
  };
  return quantized(logits, options, scale, wants, largest, [&](CastRequest request) {
    request.softmax = &of;
    dispatch_low(logits.dtype(), options.format, [&]<class T, class Q>() {
      launch_as<T, Q, cast::SoftmaxGrad, false>(logits, request);
    });
  });
}

}  // namespace

void register_cast_transpose() {
  cuda_kernel<cast_transpose> = cast_transpose_cuda;
  cuda_kernel<quantize> = quantize_cuda;
  cuda_kernel<raise_to_largest> = raise_to_largest_cuda;
  cuda_kernel<quantize_logits_gradient> = quantize_logits_gradient_cuda;
  cuda_kernel<quantize_gelu> = quantize_gelu_cuda;
  cuda_kernel<quantize_gelu_grad> = quantize_gelu_grad_cuda;
}

}  // namespace tessera::kernels
