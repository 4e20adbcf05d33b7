#include <optional>

#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/common/compute.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/norm/norm.h>
#include <tessera/core/kernels/random/random_fill.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/core/kernels/common/column_fold.cuh>
#include <tessera/core/kernels/common/rows.cuh>
#include <tessera/core/kernels/common/vector_lanes.cuh>
#include <tessera/core/kernels/norm/norm_rows.cuh>

namespace tessera::kernels {
namespace {

using namespace row_norms;

template <class T>
struct NormBackward {
  const T* dy;             // (rows, C)
  const T* dsum;           // (rows, C) or null
  const T* x;              // (rows, C)
  const void* weight;      // (C) as in NormForward
  const Compute<T>* mean;  // (rows), null for rms_norm
  const Compute<T>* rstd;  // (rows)
  T* dx;                   // (rows, C) or null
  Compute<T>* dweights;    // (blocks of kNormRows rows, C) or null
  Compute<T>* dbiases;     // (blocks of kNormRows rows, C) or null
  int64_t rows, C;
  // Of kernels that have more to do with dx.
  T* update;             // (rows, C) or null: what dropout takes of dx
  Compute<T>* dupdates;  // (blocks of kNormRows rows, C) or null: sums of update, or else of dx
  NormDropout<T> dropout;
};

// A block walks kNormRows rows, a warp every fourth of them or all threads each; the sums of its
// columns stay in registers and are joined in the order of the warps.
template <class T, class W, int kThreads, bool kMore>
__global__ void __launch_bounds__(kRegisterBlock<kThreads>)
    register_row_norm_backward_kernel(const NormBackward<T> p) {
  using A = Compute<T>;
  using Lanes = InRegisters<T, kThreads>;
  constexpr int kWidth = 16 / sizeof(T), kNumbers = Lanes::kNumbers;
  constexpr int kRows = kRowsOfBlock<kThreads>;
  TS_SHARED(A, joined, kRows > 1 ? Lanes::kMost : 1);
  TS_REDUCE_SLOT(double, slot);
  const int group = static_cast<int>(threadIdx.x) / kThreads;
  const int64_t begin = int64_t{blockIdx.x} * kNormRows;
  const int64_t end = begin + kNormRows < p.rows ? begin + kNormRows : p.rows;
  A dweight[kNumbers] = {}, dbias[kNumbers] = {}, dupdate[kMore ? kNumbers : 1] = {};
  RandomStream now{};
  if constexpr (kMore) {
    if (p.update != nullptr) now = p.dropout.stream.now();
  }
  for (int64_t row = begin + group; row < end; row += kRows) {
    const A m = p.mean != nullptr ? p.mean[row] : A(0), r = p.rstd[row];
    A xhats[kNumbers], gs[kNumbers];  // g = dy weight
    double sum = 0, product = 0;      // of g and g xhat
    Lanes::each(p.C, [&](int v, int64_t c) {
      const auto grads = gpu::load_vector<kWidth>(p.dy + row * p.C + c);
      const auto in = gpu::load_vector<kWidth>(p.x + row * p.C + c);
      gpu::Vector<A, kWidth> w;
      if (p.weight != nullptr) w = load_stored<W, A, kWidth>(p.weight, c);
      TS_UNROLL
      for (int j = 0; j < kWidth; ++j) {
        const int i = v * kWidth + j;
        const A grad = load<A>(grads.values[j]);
        xhats[i] = (load<A>(in.values[j]) - m) * r;
        gs[i] = p.weight != nullptr ? grad * w.values[j] : grad;
        sum += static_cast<double>(gs[i]);
        product += static_cast<double>(gs[i] * xhats[i]);
        dweight[i] += grad * xhats[i];
        dbias[i] += grad;
      }
    });
    if (p.dx == nullptr) continue;
    A mean_g = 0;
    if (p.mean != nullptr) {
      mean_g = static_cast<A>(row_reduce<kThreads>(sum, gpu::Plus{}, 0.0, slot) /
                              static_cast<double>(p.C));
    }
    const A mean_product = static_cast<A>(row_reduce<kThreads>(product, gpu::Plus{}, 0.0, slot) /
                                          static_cast<double>(p.C));
    Lanes::each(p.C, [&](int v, int64_t c) {
      gpu::Vector<T, kWidth> more, out;
      if (p.dsum != nullptr) more = gpu::load_vector<kWidth>(p.dsum + row * p.C + c);
      TS_UNROLL
      for (int j = 0; j < kWidth; ++j) {
        const int i = v * kWidth + j;
        A value = (gs[i] - mean_g - xhats[i] * mean_product) * r;
        if (p.dsum != nullptr) value = value + load<A>(more.values[j]);
        out.values[j] = store<T>(value);
      }
      gpu::store_vector(p.dx + row * p.C + c, out);
      if constexpr (kMore) {
        if (p.update != nullptr) {
          p.dropout.apply(out, now, row * p.C + c);
          gpu::store_vector(p.update + row * p.C + c, out);
        }
        TS_UNROLL
        for (int j = 0; j < kWidth; ++j) dupdate[v * kWidth + j] += load<A>(out.values[j]);
      }
    });
  }
  const auto join = [&](const auto& own, A* result) {
    if (result == nullptr) return;  // all threads
    for (int turn = 0; turn < kRows; ++turn) {
      if (group == turn) {
        Lanes::each(p.C, [&](int v, int64_t c) {
          TS_UNROLL
          for (int j = 0; j < kWidth; ++j) {
            const A before = turn > 0 ? joined[c + j] : A(0);
            const A value = before + own[v * kWidth + j];
            if (turn + 1 < kRows) {
              joined[c + j] = value;
            } else {
              result[blockIdx.x * p.C + c + j] = value;
            }
          }
        });
      }
      __syncthreads();
    }
  };
  join(dweight, p.dweights);
  join(dbias, p.dbiases);
  if constexpr (kMore) join(dupdate, p.dupdates);
}

// One block a row: the input's gradient. `stage`: numbers between the stages of dy and x in shared
// memory, 0 where they do not fit and are read again.
template <class T, int kWidth>
__global__ void __launch_bounds__(1024)
    row_norm_backward_kernel(const NormBackward<T> p, int64_t stage) {
  using A = Compute<T>;
  TS_REDUCE_SLOT(double, slot);
  const int64_t row = blockIdx.x, C = p.C;
  const T* const x = p.x + row * C;
  const RowWalk<T, kWidth> walk(x, C);
  T* const stages = gpu::dynamic_shared<T>();
  const StagedRow<T, kWidth> grads(p.dy + row * C, walk, stages, stage > 0);
  const StagedRow<T, kWidth> inputs(x, walk, stages + stage, stage > 0);
  const A m = p.mean != nullptr ? p.mean[row] : A(0), r = p.rstd[row];
  // g = dy weight
  const auto weighted = [&]<int N>(int64_t c, const gpu::Vector<T, N>& grad, A(&gs)[N]) {
    TS_UNROLL
    for (int j = 0; j < N; ++j) gs[j] = load<A>(grad.values[j]);
    if (p.weight == nullptr) return;
    const gpu::Vector<A, N> weight = load_columns<N>(static_cast<const A*>(p.weight) + c);
    TS_UNROLL
    for (int j = 0; j < N; ++j) gs[j] = gs[j] * weight.values[j];
  };
  double sum = 0, product = 0;  // of g and g xhat
  walk.each([&]<int N>(int64_t c) {
    const gpu::Vector<T, N> grad = grads.template first<N>(c), in = inputs.template first<N>(c);
    A gs[N];
    weighted(c, grad, gs);
    TS_UNROLL
    for (int j = 0; j < N; ++j) {
      sum += static_cast<double>(gs[j]);
      product += static_cast<double>(gs[j] * ((load<A>(in.values[j]) - m) * r));
    }
  });
  A mean_g = 0;
  if (p.mean != nullptr) {
    mean_g =
        static_cast<A>(gpu::block_reduce(sum, gpu::Plus{}, 0.0, slot) / static_cast<double>(C));
  }
  const A mean_product =
      static_cast<A>(gpu::block_reduce(product, gpu::Plus{}, 0.0, slot) / static_cast<double>(C));
  walk.each([&]<int N>(int64_t c) {
    const gpu::Vector<T, N> grad = grads.template again<N>(c), in = inputs.template again<N>(c);
    A gs[N];
    weighted(c, grad, gs);
    gpu::Vector<T, N> more, out;
    if (p.dsum != nullptr) more = gpu::load_vector<N>(p.dsum + row * C + c);
    TS_UNROLL
    for (int j = 0; j < N; ++j) {
      const A xhat = (load<A>(in.values[j]) - m) * r;
      A value = (gs[j] - mean_g - xhat * mean_product) * r;
      if (p.dsum != nullptr) value = value + load<A>(more.values[j]);
      out.values[j] = store<T>(value);
    }
    gpu::store_vector(p.dx + row * C + c, out);
  });
}

// The partial column sums of kNormRows rows and a tile of columns: each lane has kWidth columns,
// each of kNormLines warps every kNormLines-th row, and their sums are joined in the order of the
// warps.
constexpr int kNormLines = 8;
template <class T, int kWidth>
__global__ void __launch_bounds__(gpu::kWarp* kNormLines)
    norm_column_sums_kernel(const NormBackward<T> p) {
  using A = Compute<T>;
  constexpr int kTile = gpu::kWarp * kWidth;
  TS_SHARED(A, sums, kNormLines * kTile);
  const int lane = static_cast<int>(threadIdx.x), line = static_cast<int>(threadIdx.y);
  const int64_t C = p.C, tiles = (C + kTile - 1) / kTile, block = blockIdx.x / tiles;
  const int64_t c = blockIdx.x % tiles * kTile + lane * kWidth;
  const int64_t begin = block * kNormRows;
  const int64_t end = begin + kNormRows < p.rows ? begin + kNormRows : p.rows;
  A dweight[kWidth] = {}, dbias[kWidth] = {};
  if (c < C) {
    for (int64_t row = begin + line; row < end; row += kNormLines) {
      const A m = p.mean != nullptr ? p.mean[row] : A(0), r = p.rstd[row];
      const auto grads = gpu::load_vector<kWidth>(p.dy + row * C + c);
      const auto in = gpu::load_vector<kWidth>(p.x + row * C + c);
      TS_UNROLL
      for (int j = 0; j < kWidth; ++j) {
        const A grad = load<A>(grads.values[j]);
        dweight[j] += grad * ((load<A>(in.values[j]) - m) * r);
        dbias[j] += grad;
      }
    }
  }
  const auto join = [&](const A(&own)[kWidth], A* result) {
    if (result == nullptr) return;  // all threads
    TS_UNROLL
    for (int j = 0; j < kWidth; ++j) sums[line * kTile + j * gpu::kWarp + lane] = own[j];
    __syncthreads();
    if (line == 0 && c < C) {
      gpu::Vector<A, kWidth> total;
      TS_UNROLL
      for (int j = 0; j < kWidth; ++j) {
        total.values[j] = own[j];
        for (int l = 1; l < kNormLines; ++l) {
          total.values[j] += sums[l * kTile + j * gpu::kWarp + lane];
        }
      }
      gpu::store_vector(result + block * C + c, total);
    }
    __syncthreads();
  };
  join(dweight, p.dweights);
  join(dbias, p.dbiases);
}

// `threads`: how many keep a row in their registers.
template <class T>
void launch_norm_backward(NormBackward<T>& p, int threads, Tensor& weight) {
  constexpr const char* kName = "norm_backward";
  constexpr int kWidth = 16 / sizeof(T);
  const unsigned blocks = gpu::blocks(p.rows, kNormRows);
  constexpr auto kSize = static_cast<int64_t>(sizeof(T));
  constexpr auto kWide = static_cast<int64_t>(sizeof(Compute<T>));
  const int64_t plane = p.rows * p.C * kSize;
  const int64_t statistics = p.rows * (p.mean != nullptr ? 2 : 1) * kWide;
  const int64_t column_sums =
      int64_t{blocks} * p.C * kWide * ((p.dweights != nullptr) + (p.dbiases != nullptr));
  gpu::Traffic traffic{2 * plane + statistics, 0};
  const gpu::Traffic sums_alone{p.dweights != nullptr ? traffic.reads : plane, column_sums};
  if (p.dx != nullptr) {
    traffic.reads += (p.dsum != nullptr ? plane : 0);
    traffic.writes = plane;
  }
  gpu::Traffic whole{traffic.reads, traffic.writes + column_sums};
  const bool more = p.update != nullptr || p.dupdates != nullptr;
  if (p.update != nullptr) {
    whole.reads += state_bytes_of(p.dropout.stream);
    whole.writes += plane;
  }
  if (p.dupdates != nullptr) whole.writes += int64_t{blocks} * p.C * kWide;
  const auto weight_bytes = [&] {
    return p.dx != nullptr && weight.defined() ? p.C * size_of(weight.dtype()) : 0;
  };
  const auto run = [&]<int kThreads>() {
    with_stored_type<T>({&weight}, [&]<class W>() {
      p.weight = address_or_null(weight);
      whole.reads += weight_bytes();
      gpu::launch(
          {.name = kName, .grid = blocks, .block = kRegisterBlock<kThreads>, .traffic = whole},
          more ? register_row_norm_backward_kernel<T, W, kThreads, true>
               : register_row_norm_backward_kernel<T, W, kThreads, false>,
          p);
    });
  };
  if (threads == gpu::kWarp) return run.template operator()<gpu::kWarp>();
  if (threads == kWideBlock) return run.template operator()<kWideBlock>();
  p.weight = address_or_null(weight);
  traffic.reads += weight_bytes();
  if (p.dx != nullptr) {
    const bool vectors = p.dsum == nullptr ? begin_alike<T>({p.x, p.dy, p.dx}, {})
                                           : begin_alike<T>({p.x, p.dy, p.dx, p.dsum}, {});
    const size_t bytes = stage_bytes<T>(p.C);
    const bool staged = 2 * bytes <= kMostStaged;
    gpu::launch({.name = kName,
                 .grid = static_cast<unsigned>(p.rows),
                 .block = walk_threads(p.C, vectors ? kWidth : 1),
                 .shared_bytes = staged ? 2 * bytes : 0,
                 .traffic = traffic},
                vectors ? row_norm_backward_kernel<T, kWidth> : row_norm_backward_kernel<T, 1>, p,
                staged ? static_cast<int64_t>(bytes / sizeof(T)) : int64_t{0});
  }
  if (p.dweights != nullptr || p.dbiases != nullptr) {
    // Results are new tensors, and so aligned.
    const bool vectors = p.C % kWidth == 0 && is_aligned(p.x) && is_aligned(p.dy);
    gpu::launch({.name = kName,
                 .grid = blocks * gpu::blocks(p.C, gpu::kWarp, vectors ? kWidth : 1),
                 .block = dim3(gpu::kWarp, kNormLines),
                 .traffic = sums_alone},
                vectors ? norm_column_sums_kernel<T, kWidth> : norm_column_sums_kernel<T, 1>, p);
  }
}

RowNormGradients row_norm_backward_cuda(const Tensor& dy, const Tensor& dsum, const Tensor& x,
                                        int64_t columns, const Tensor& weight, const Tensor& mean,
                                        const Tensor& rstd, const bool (&wanted)[3],
                                        const RowNormBackwardOptions& options) {
  const int64_t rows = columns == 0 ? 0 : x.numel() / columns;
  const DType compute = compute_dtype(x.dtype());
  const int64_t blocks = (rows + kNormRows - 1) / kNormRows;
  RowNormGradients result;
  const auto column_result = [&](std::optional<DType> dtype) {
    return raw::empty({columns}, dtype.value_or(compute), x.device());
  };
  if (wanted[0]) result.input = raw::empty(x.shape(), x.dtype(), x.device());
  if (wanted[1]) result.weight = column_result(options.weight_dtype);
  if (wanted[2]) result.bias = column_result(options.bias_dtype);
  const bool drops = wanted[0] && options.dropout;
  const Tensor source = contiguous(x), grad = in_dtype(dy, x.dtype());
  const Tensor more = in_dtype(dsum, x.dtype());
  dispatch_floating(x.dtype(), "layer_norm", [&]<class T>() {
    using A = Compute<T>;
    Tensor w = stored_parameter<T>(weight);
    const int threads = register_threads<T>(columns, {&grad, &more, &source, &w, &result.input});
    if (threads == 0) w = in_dtype(weight, compute);
    if (drops && threads > 0) result.update = raw::empty(x.shape(), x.dtype(), x.device());
    if (wanted[0] && options.column_sums && threads > 0) {
      result.column_sums = column_result(x.dtype());
    }
    // (blocks, columns) for each of the sums
    Tensor partials[3];
    const Tensor* const sums[3] = {&result.weight, &result.bias, &result.column_sums};
    ColumnFold<T> fold{.rows = blocks, .columns = columns};
    for (int i = 0; i < 3; ++i) {
      if (!sums[i]->defined()) continue;
      partials[i] = raw::empty({blocks, columns}, compute, x.device());
      fold.add(partials[i], *sums[i]);
    }
    if (blocks > 0) {
      NormBackward<T> p{grad.data_as<T>(),
                        data_or_null<T>(more),
                        source.data_as<T>(),
                        nullptr,
                        data_or_null<A>(mean),
                        rstd.data_as<A>(),
                        data_or_null<T>(result.input),
                        data_or_null<A>(partials[0]),
                        data_or_null<A>(partials[1]),
                        rows,
                        columns,
                        data_or_null<T>(result.update),
                        data_or_null<A>(partials[2]),
                        {}};
      if (result.update.defined()) p.dropout = dropout_of<T>(options.dropout);
      launch_norm_backward<T>(p, threads, w);
    }
    launch_column_fold("norm_fold", fold);
  });
  if (drops && !result.update.defined()) {
    result.update = dropout(result.input, options.dropout->p, options.dropout->stream);
  }
  return result;
}

}  // namespace

void register_norm_gradient() {
  cuda_kernel<row_norm_backward> = row_norm_backward_cuda;
}

}  // namespace tessera::kernels
