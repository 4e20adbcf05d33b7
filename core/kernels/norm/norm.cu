#include <cmath>
#include <initializer_list>
#include <utility>

#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/common/compute.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/norm/norm.h>
#include <tessera/core/kernels/norm/norm_quantized.h>
#include <tessera/core/kernels/random/random_fill.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/core/kernels/common/rows.cuh>
#include <tessera/core/kernels/fp8/cast_transpose.cuh>
#include <tessera/core/kernels/norm/norm_rows.cuh>

namespace tessera::kernels {
namespace {

using namespace row_norms;

template <class T>
struct NormForward {
  const T* x;          // (rows, C)
  const T* residual;   // (rows, C) or null
  T* sum;              // (rows, C) where there is a residual
  T* y;                // (rows, C)
  const void* weight;  // (C) of W or null; of Compute<T> for kernels without a W
  const void* bias;    // the same
  Compute<T>* mean;    // (rows), null for rms_norm
  Compute<T>* rstd;    // (rows)
  int64_t rows, C;
  double eps, inverse_columns;  // the latter 1 / C
  NormDropout<T> dropout;       // of x, for kernels that drop
};

// A row in the registers of a warp. write(column, numbers of the result): of each vector.
template <class T, class W, bool kDrops, class Write>
TS_DEVICE void normalise_row(const NormForward<T>& p, int64_t row, const Write& write) {
  using A = Compute<T>;
  using Lanes = InRegisters<T>;
  constexpr int kWidth = 16 / sizeof(T);
  const auto average = [&](double total) {
    if constexpr (std::is_same_v<A, double>) {
      return total / static_cast<double>(p.C);
    } else {
      return total * p.inverse_columns;
    }
  };
  // All of a row is asked for before any of it is needed.
  PackedVector<T, kWidth> in[Lanes::kVectors];
  Lanes::each(p.C, [&](int v, int64_t c) { in[v].load(p.x + row * p.C + c); });
  if constexpr (kDrops) {
    const RandomStream now = p.dropout.stream.now();
    Lanes::each(p.C, [&](int v, int64_t c) {
      gpu::Vector<T, kWidth> vector = in[v].vector();
      p.dropout.apply(vector, now, row * p.C + c);
      in[v].set(vector);
    });
  }
  if (p.residual != nullptr) {
    PackedVector<T, kWidth> others[Lanes::kVectors];
    Lanes::each(p.C, [&](int v, int64_t c) { others[v].load(p.residual + row * p.C + c); });
    Lanes::each(p.C, [&](int v, int64_t c) {
      A values[kWidth], other[kWidth];
      in[v].unpack(values);
      others[v].unpack(other);
      TS_UNROLL
      for (int j = 0; j < kWidth; ++j) values[j] += other[j];
      in[v].set(pack<T>(values));
      gpu::store_vector(p.sum + row * p.C + c, in[v].vector());
    });
  }
  // The numbers of a vector are added up in A, vectors in f64.
  double total = 0;
  A mean = 0;
  if (p.mean != nullptr) {
    TS_UNROLL
    for (int v = 0; v < Lanes::kVectors; ++v) {
      A values[kWidth], part = 0;
      in[v].unpack(values);
      TS_UNROLL
      for (int j = 0; j < kWidth; ++j) part += values[j];
      total += static_cast<double>(part);
    }
    mean = static_cast<A>(average(gpu::warp_reduce(total, gpu::Plus{})));
  }
  double squares = 0;
  Lanes::each(p.C, [&](int v, int64_t) {
    in[v].stay_packed();
    A values[kWidth], part = 0;
    in[v].unpack(values);
    TS_UNROLL
    for (int j = 0; j < kWidth; ++j) part += (values[j] - mean) * (values[j] - mean);
    squares += static_cast<double>(part);
  });
  const double variance = average(gpu::warp_reduce(squares, gpu::Plus{}));
  const double overflowed = p.mean != nullptr ? variance - variance : 0;  // NaN, see norm.h
  const A rstd = static_cast<A>(1 / ::sqrt(variance + p.eps) + overflowed);
  if (threadIdx.x % gpu::kWarp == 0) {
    if (p.mean != nullptr) p.mean[row] = mean;
    p.rstd[row] = rstd;
  }
  Lanes::each(p.C, [&](int v, int64_t c) {
    gpu::Vector<A, kWidth> w, b;
    if (p.weight != nullptr) w = load_stored<W, A, kWidth>(p.weight, c);
    if (p.bias != nullptr) b = load_stored<W, A, kWidth>(p.bias, c);
    in[v].stay_packed();
    A values[kWidth];
    in[v].unpack(values);
    TS_UNROLL
    for (int j = 0; j < kWidth; ++j) {
      A value = (values[j] - mean) * rstd;
      if (p.weight != nullptr) value = value * w.values[j];
      if (p.bias != nullptr) value = value + b.values[j];
      values[j] = value;
    }
    write(c, pack<T>(values));
  });
}

template <class T, class W, bool kDrops>
__global__ void __launch_bounds__(kRowsOfBlock* gpu::kWarp, sizeof(T) > 2 ? 5
                                                            : kDrops      ? 7
                                                                          : 9)
    register_row_norm_kernel(const NormForward<T> p) {
  const int64_t row = int64_t{blockIdx.x} * kRowsOfBlock + threadIdx.x / gpu::kWarp;
  if (row >= p.rows) return;  // the whole warp
  normalise_row<T, W, kDrops>(
      p, row, [&](int64_t c, const auto& out) { gpu::store_vector(p.y + row * p.C + c, out); });
}

// The result in fp8, by rows and by columns; see norm_quantized.h. Of a number 1 byte each is
// written. With the copy by columns made later from the one by rows, 1 + (1 + 1) would move; by a
// cast of a stored f32 result, 4 + (4 + 1 + 1).
//
// The warps of a block take turns at kCastRows rows, whose bytes meet in shared memory, in words of
// four columns, and leave it as kCastRows neighbours of a column: whole sectors.
constexpr int kCastRows = 32, kCastThreads = 256;
template <class T, class W>
__global__ void __launch_bounds__(kCastThreads)
    register_row_norm_cast_kernel(const NormForward<T> p, const CastJob<T, f8e4m3> job) {
  using Q = f8e4m3;
  constexpr int kWidth = 16 / sizeof(T), kWords = kWidth / 4, kWarps = kCastThreads / gpu::kWarp;
  constexpr int kSixteen = 4;  // words of 16 rows
  TS_SHARED(uint32_t, slot, gpu::kWarp);
  uint32_t* const bytes = gpu::dynamic_shared<uint32_t>();  // (row, four columns)
  const int64_t begin = int64_t{blockIdx.x} * kCastRows, words = p.C / 4;
  const int rows = static_cast<int>(p.rows - begin < kCastRows ? p.rows - begin : kCastRows);
  const float factor = cast::scale_of(job);
  const cast::Before before{job.through, 1.0f};
  cast::Seen seen;
  for (int i = static_cast<int>(threadIdx.x) / gpu::kWarp; i < rows; i += kWarps) {
    normalise_row<T, W, false>(p, begin + i, [&](int64_t c, const auto& out) {
      float scaled[kWidth];
      TS_UNROLL
      for (int j = 0; j < kWidth; ++j) {
        const float value = cast::number_of(cast::Plain{}, out.values[j], out.values[j], before);
        scaled[j] = rules::scaled<Q>(value, factor);
        seen.template number<Q>(value, scaled[j]);
      }
      gpu::Vector<uint32_t, kWords> packed;
      TS_UNROLL
      for (int w = 0; w < kWords; ++w) packed.values[w] = cast::pack_word<Q>(scaled + 4 * w);
      gpu::store_vector(reinterpret_cast<uint32_t*>(job.values + (begin + i) * p.C + c), packed);
      if (job.transposed != nullptr) gpu::store_shared_vector(bytes + i * words + c / 4, packed);
    });
  }
  if (job.transposed != nullptr) {  // all threads
    __syncthreads();
    for (int64_t word = threadIdx.x; word < words; word += kCastThreads) {
      for (int first = 0; first < rows; first += 4 * kSixteen) {
        uint32_t columns[kSixteen][4];  // (four rows, column)
        TS_UNROLL
        for (int g = 0; g < kSixteen; ++g) {
          TS_UNROLL
          for (int i = 0; i < 4; ++i) columns[g][i] = bytes[(first + 4 * g + i) * words + word];
          cast::transpose_words<Q>(columns[g]);
        }
        TS_UNROLL
        for (int j = 0; j < 4; ++j) {
          gpu::Vector<uint32_t, kSixteen> column;
          TS_UNROLL
          for (int g = 0; g < kSixteen; ++g) column.values[g] = columns[g][j];
          Q* const to = job.transposed + (4 * word + j) * p.rows + begin + first;
          gpu::store_vector(reinterpret_cast<uint32_t*>(to), column);
        }
      }
    }
  }
  if (threadIdx.x == 0 && blockIdx.x == 0) {
    *job.scale_used = factor;
    *job.inverse = 1 / factor;
  }
  cast::note(job, seen, slot);
}

// One block a row: residual added and written, mean, variance of the deviations, result. `staged`:
// the row stays in shared memory; else it is read again.
template <class T, int kWidth>
__global__ void __launch_bounds__(1024) row_norm_kernel(const NormForward<T> p, bool staged) {
  using A = Compute<T>;
  TS_REDUCE_SLOT(double, slot);
  const int64_t row = blockIdx.x, C = p.C;
  const T* const x = p.x + row * C;
  const T* const residual = p.residual != nullptr ? p.residual + row * C : nullptr;
  T* const sum = residual != nullptr ? p.sum + row * C : nullptr;
  const RowWalk<T, kWidth> walk(x, C);
  // Each thread reads again what it read or wrote: no barrier between.
  const StagedRow<T, kWidth> normalised(residual != nullptr ? sum : x, walk,
                                        gpu::dynamic_shared<T>(), staged);
  double total = 0;
  walk.each([&]<int N>(int64_t c) {
    gpu::Vector<T, N> in = gpu::load_vector<N>(x + c);
    if (residual != nullptr) {
      const gpu::Vector<T, N> other = gpu::load_vector<N>(residual + c);
      TS_UNROLL
      for (int j = 0; j < N; ++j) {
        in.values[j] = store<T>(load<A>(in.values[j]) + load<A>(other.values[j]));
      }
      gpu::store_vector(sum + c, in);
    }
    normalised.keep(c, in);
    TS_UNROLL
    for (int j = 0; j < N; ++j) total += static_cast<double>(load<A>(in.values[j]));
  });
  A mean = 0;
  if (p.mean != nullptr) {
    mean =
        static_cast<A>(gpu::block_reduce(total, gpu::Plus{}, 0.0, slot) / static_cast<double>(C));
  }
  double squares = 0;
  walk.each([&]<int N>(int64_t c) {
    const gpu::Vector<T, N> in = normalised.template again<N>(c);
    TS_UNROLL
    for (int j = 0; j < N; ++j) {
      const A deviation = load<A>(in.values[j]) - mean;
      squares += static_cast<double>(deviation * deviation);
    }
  });
  squares = gpu::block_reduce(squares, gpu::Plus{}, 0.0, slot);
  const double variance = squares / static_cast<double>(C);
  const double overflowed = p.mean != nullptr ? variance - variance : 0;  // NaN, see norm.h
  const A rstd = static_cast<A>(1 / ::sqrt(variance + p.eps) + overflowed);
  if (threadIdx.x == 0) {
    if (p.mean != nullptr) p.mean[row] = mean;
    p.rstd[row] = rstd;
  }
  walk.each([&]<int N>(int64_t c) {
    gpu::Vector<T, N> vector = normalised.template again<N>(c);
    A values[N];
    TS_UNROLL
    for (int j = 0; j < N; ++j) values[j] = (load<A>(vector.values[j]) - mean) * rstd;
    if (p.weight != nullptr) {
      const gpu::Vector<A, N> weight = load_columns<N>(static_cast<const A*>(p.weight) + c);
      TS_UNROLL
      for (int j = 0; j < N; ++j) values[j] = values[j] * weight.values[j];
    }
    if (p.bias != nullptr) {
      const gpu::Vector<A, N> bias = load_columns<N>(static_cast<const A*>(p.bias) + c);
      TS_UNROLL
      for (int j = 0; j < N; ++j) values[j] = values[j] + bias.values[j];
    }
    TS_UNROLL
    for (int j = 0; j < N; ++j) vector.values[j] = store<T>(values[j]);
    gpu::store_vector(p.y + row * C + c, vector);
  });
}

RowNorm row_norm_forward_cuda(const Tensor& x, const Tensor& residual, int64_t columns,
                              const Tensor& weight, const Tensor& bias, double eps, bool center,
                              const std::optional<ResidualDropout>& given) {
  const int64_t rows = columns == 0 ? 0 : x.numel() / columns;
  const DType compute = compute_dtype(x.dtype());
  RowNorm result;
  result.y = raw::empty(x.shape(), x.dtype(), x.device());
  result.rstd = raw::empty({rows}, compute, x.device());
  if (center) result.mean = raw::empty({rows}, compute, x.device());
  if (residual.defined()) result.sum = raw::empty(x.shape(), x.dtype(), x.device());
  if (rows == 0) return result;
  Tensor source = contiguous(x);
  const Tensor other = in_dtype(residual, x.dtype());
  dispatch_floating(x.dtype(), "layer_norm", [&]<class T>() {
    using A = Compute<T>;
    const char* const name = center ? "layer_norm" : "rms_norm";
    Tensor w = stored_parameter<T>(weight), b = stored_parameter<T>(bias);
    const bool registers = register_threads<T>(columns, {&source, &other, &result.sum, &result.y,
                                                         &w, &b}) == kNarrowBlock;
    if (!registers) w = in_dtype(weight, compute), b = in_dtype(bias, compute);
    const bool drops = given && registers && !given->place.is_part();  // in the kernel
    if (given && !drops) source = dropout(source, given->p, given->stream, given->place);
    NormForward<T> p{source.data_as<T>(),
                     data_or_null<T>(other),
                     data_or_null<T>(result.sum),
                     result.y.data_as<T>(),
                     nullptr,
                     nullptr,
                     data_or_null<A>(result.mean),
                     result.rstd.data_as<A>(),
                     rows,
                     columns,
                     eps,
                     1 / static_cast<double>(columns),
                     {}};
    gpu::Traffic traffic{source.numel() * size_of(source.dtype()), 0};
    const auto take_parameters = [&] {
      p.weight = address_or_null(w), p.bias = address_or_null(b);
      for (const Tensor* in : std::initializer_list<const Tensor*>{&other, &w, &b}) {
        if (in->defined()) traffic.reads += in->numel() * size_of(in->dtype());
      }
    };
    for (const Tensor* out : {&result.sum, &result.y, &result.mean, &result.rstd}) {
      if (out->defined()) traffic.writes += out->numel() * size_of(out->dtype());
    }
    if (registers) {
      if (drops) {
        p.dropout = dropout_of<T>(given);
        traffic.reads += state_bytes_of(p.dropout.stream);
      }
      with_stored_type<T>({&w, &b}, [&]<class W>() {
        take_parameters();
        gpu::launch(
            {.name = name,
             .grid = gpu::blocks(rows, kRowsOfBlock),
             .block = kRowsOfBlock * gpu::kWarp,
             .traffic = traffic},
            drops ? register_row_norm_kernel<T, W, true> : register_row_norm_kernel<T, W, false>,
            p);
      });
      return;
    }
    take_parameters();
    constexpr int kWidth = kRowVector<T>;
    const bool vectors = p.residual == nullptr ? begin_alike<T>({p.x, p.y}, {})
                                               : begin_alike<T>({p.x, p.y, p.residual, p.sum}, {});
    const bool staged = stage_bytes<T>(columns) <= kMostStaged;
    gpu::launch({.name = name,
                 .grid = static_cast<unsigned>(rows),
                 .block = walk_threads(columns, vectors ? kWidth : 1),
                 .shared_bytes = staged ? stage_bytes<T>(columns) : 0,
                 .traffic = traffic},
                vectors ? row_norm_kernel<T, kWidth> : row_norm_kernel<T, 1>, p, staged);
  });
  return result;
}

QuantizedRowNorm row_norm_quantized_cuda(const Tensor& x, const Tensor& residual, int64_t columns,
                                         const Tensor& weight, const Tensor& bias, double eps,
                                         bool center, const QuantizeOptions& options,
                                         const Tensor& scale, const QuantizeWants& wants) {
  const int64_t rows = columns == 0 ? 0 : x.numel() / columns;
  const DType compute = compute_dtype(x.dtype());
  const Tensor source = contiguous(x), other = in_dtype(residual, x.dtype());
  bool fused = scale.defined() && quantises_rows(rows, columns, x.dtype(), options);
  QuantizedRowNorm result;
  if (fused) {
    dispatch_floating(x.dtype(), "layer_norm", [&]<class T>() {
      if constexpr (!std::is_same_v<T, double>) {
        using A = Compute<T>;
        RowNorm& norm = result.norm;
        if (residual.defined()) norm.sum = raw::empty(x.shape(), x.dtype(), x.device());
        Tensor w = stored_parameter<T>(weight), b = stored_parameter<T>(bias);
        fused = register_threads<T>(columns, {&source, &other, &norm.sum, &w, &b}) == kNarrowBlock;
        if (!fused) return;
        norm.rstd = raw::empty({rows}, compute, x.device());
        if (center) norm.mean = raw::empty({rows}, compute, x.device());
        Quantized& y = result.y;
        y = {.values = raw::empty({rows, columns}, options.format, x.device()),
             .scale = raw::empty({1, 1}, kF32, x.device()),
             .inverse = raw::empty({1, 1}, kF32, x.device()),
             .tile = options.tile};
        if (wants.by_columns) {
          y.transposed = raw::empty({columns, rows}, options.format, x.device());
        }
        NormForward<T> p{source.data_as<T>(),
                         data_or_null<T>(other),
                         data_or_null<T>(norm.sum),
                         nullptr,
                         nullptr,
                         nullptr,
                         data_or_null<A>(norm.mean),
                         norm.rstd.data_as<A>(),
                         rows,
                         columns,
                         eps,
                         1 / static_cast<double>(columns),
                         {}};
        CastJob<T, f8e4m3> job{};
        job.through = wants.through.value_or(kF32);
        job.scale = scale.data_as<float>();
        job.values = y.values.data_as<f8e4m3>();
        job.transposed = data_or_null<f8e4m3>(y.transposed);
        job.scale_used = y.scale.data_as<float>();
        job.inverse = y.inverse.data_as<float>();
        if (wants.largest.defined()) job.amax = static_cast<uint32_t*>(wants.largest.data());
        if (wants.counts.defined()) {
          job.counts = static_cast<unsigned long long*>(wants.counts.data());
        }
        job.no_nan = true;
        with_stored_type<T>({&w, &b}, [&]<class W>() {
          p.weight = address_or_null(w), p.bias = address_or_null(b);
          gpu::Traffic traffic{4, 0};
          for (const Tensor* in : std::initializer_list<const Tensor*>{&source, &other, &w, &b}) {
            if (in->defined()) traffic.reads += in->nbytes();
          }
          for (const Tensor* out : {&norm.sum, &norm.mean, &norm.rstd, &y.values, &y.transposed,
                                    &y.scale, &y.inverse}) {
            if (out->defined()) traffic.writes += out->nbytes();
          }
          gpu::launch({.name = center ? "layer_norm_cast" : "rms_norm_cast",
                       .grid = gpu::blocks(rows, kCastRows),
                       .block = kCastThreads,
                       .shared_bytes =
                           wants.by_columns ? static_cast<size_t>(kCastRows * columns) : size_t{0},
                       .traffic = traffic},
                      register_row_norm_cast_kernel<T, W>, p, job);
        });
      }
    });
    if (fused) return result;
  }
  result.norm = row_norm_forward_cuda(x, residual, columns, weight, bias, eps, center, {});
  const Tensor y = std::exchange(result.norm.y, {});
  result.y = quantize(raw::view(y, {rows, columns}), options, scale, wants);
  return result;
}

}  // namespace

void register_norm() {
  cuda_kernel<row_norm_forward> = row_norm_forward_cuda;
  cuda_kernel<row_norm_quantized> = row_norm_quantized_cuda;
}

}  // namespace tessera::kernels
