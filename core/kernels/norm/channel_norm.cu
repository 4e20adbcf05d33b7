// group_norm and batch_norm: x seen as (N, C, S), statistics of slots: a channel (batch_norm), or a
// group of channels of one sample (group_norm). The gradient of batch_norm in training runs on
// cuDNN where it serves the problem (core/cuda/libraries/norm_graph.h).
#include <array>

#include <tessera/core/cuda/libraries/norm_graph.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/common/compute.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/norm/norm.h>
#include <tessera/core/kernels/common/rows.cuh>
#include <tessera/core/kernels/common/strided.cuh>

namespace tessera::kernels {
namespace {

constexpr int kBlock = 256;
constexpr int kGroup = 8;  // neighbours that a thread takes

struct Channels {
  int64_t N = 1, C = 1, S = 1, groups = 0;
  DivisorOf<uint64_t> by_C, by_S, by_width;  // width: channels of a group
  Channels(const Tensor& x, int64_t number_of_groups)
      : N(x.shape()[0]), C(x.shape()[1]), groups(number_of_groups) {
    for (int d = 2; d < x.dim(); ++d) S *= x.shape()[d];
    by_C = divisor(C);
    by_S = divisor(S);
    by_width = divisor(groups == 0 ? 1 : C / groups);
  }
  static DivisorOf<uint64_t> divisor(int64_t n) {
    return DivisorOf<uint64_t>(static_cast<uint64_t>(n));
  }
  int64_t slots() const { return groups == 0 ? C : N * groups; }
  TS_DEVICE int64_t slot(int64_t n, int64_t c) const {
    return groups == 0
               ? c
               : n * groups + static_cast<int64_t>(by_width.quotient(static_cast<uint64_t>(c)));
  }
};

// Numbers of channels that may be absent.
template <class C>
TS_DEVICE double number_at(const C* values, int64_t i, double otherwise) {
  return values != nullptr ? static_cast<double>(values[i]) : otherwise;
}

template <class C>
__global__ void rstd_kernel(const void* variance, DType dtype, C* result, int64_t n, double eps) {
  const int64_t i = gpu::first_index();
  if (i >= n) return;
  with_any_dtype(dtype, [&]<class T>() {
    const auto value = load<double>(static_cast<const T*>(variance)[i]);
    result[i] = static_cast<C>(1 / ::sqrt(value + eps) + (value - value));  // see norm.h
  });
}

__global__ void update_running_kernel(void* running, DType dtype, const void* value,
                                      DType value_dtype, int64_t n, double factor,
                                      double momentum) {
  const int64_t i = gpu::first_index();
  if (i >= n) return;
  double next = 0;
  with_any_dtype(value_dtype, [&]<class T>() {
    next = momentum * factor * load<double>(static_cast<const T*>(value)[i]);
  });
  with_any_dtype(dtype, [&]<class T>() {
    T& target = static_cast<T*>(running)[i];
    target = store<T>((1 - momentum) * load<double>(target) + next);
  });
}

// A thread takes a group of neighbours. Calls enter(slot, c) for each plane among them and f(place
// in the group) for each of them.
template <class Enter, class F>
TS_DEVICE void for_group(const Channels& size, int64_t total, const Enter& enter, const F& f) {
  const int64_t first = gpu::first_index() * kGroup;
  if (first >= total) return;
  const auto plane = static_cast<int64_t>(size.by_S.quotient(static_cast<uint64_t>(first)));
  auto n = static_cast<int64_t>(size.by_C.quotient(static_cast<uint64_t>(plane)));
  int64_t s = first - plane * size.S, c = plane - n * size.C;
  const int count = static_cast<int>(total - first < kGroup ? total - first : kGroup);
  enter(size.slot(n, c), c);
  TS_UNROLL
  for (int j = 0; j < kGroup; ++j) {
    if (j >= count) break;
    if (s == size.S) {
      s = 0;
      if (++c == size.C) {
        c = 0;
        ++n;
      }
      enter(size.slot(n, c), c);
    }
    f(j);
    ++s;
  }
}

// Whole groups are read and written 16 bytes at a time where `vectors`.
template <class T>
TS_DEVICE void read_group(const T* x, int64_t total, bool vectors, T (&values)[kGroup]) {
  const int64_t first = gpu::first_index() * kGroup;
  if (vectors && first + kGroup <= total) {
    const gpu::Vector<T, kGroup> vector = gpu::load_vector<kGroup>(x + first);
    TS_UNROLL
    for (int j = 0; j < kGroup; ++j) values[j] = vector.values[j];
  } else {
    TS_UNROLL
    for (int j = 0; j < kGroup; ++j) {
      if (first + j < total) values[j] = x[first + j];
    }
  }
}
template <class T>
TS_DEVICE void write_group(T* y, int64_t total, bool vectors, const T (&values)[kGroup]) {
  const int64_t first = gpu::first_index() * kGroup;
  if (vectors && first + kGroup <= total) {
    gpu::Vector<T, kGroup> vector;
    TS_UNROLL
    for (int j = 0; j < kGroup; ++j) vector.values[j] = values[j];
    gpu::store_vector(y + first, vector);
  } else {
    TS_UNROLL
    for (int j = 0; j < kGroup; ++j) {
      if (first + j < total) y[first + j] = values[j];
    }
  }
}

// y = (x - mean) (rstd w) + b
template <class T>
__global__ void __launch_bounds__(kBlock)
    affine_kernel(const T* x, T* y, const Channels size, const Compute<T>* mean,
                  const Compute<T>* rstd, const Compute<T>* weight, const Compute<T>* bias,
                  int64_t total, bool vectors) {
  using A = Compute<T>;
  T values[kGroup] = {};
  read_group(x, total, vectors, values);
  A m = 0, scale = 0, shift = 0;
  const auto enter = [&](int64_t slot, int64_t c) {
    m = mean[slot];
    scale = static_cast<A>(static_cast<double>(rstd[slot]) * number_at(weight, c, 1));
    shift = static_cast<A>(number_at(bias, c, 0));
  };
  for_group(size, total, enter,
            [&](int j) { values[j] = store<T>((load<A>(values[j]) - m) * scale + shift); });
  write_group(y, total, vectors, values);
}

// Sums of dy and dy xhat over each plane (n, c): a block a plane. With kWidth > 1, dy and x begin
// alike.
template <class T, int kWidth>
__global__ void plane_sums_kernel(const T* dy, const T* x, const Channels size,
                                  const Compute<T>* mean, const Compute<T>* rstd, double* dy_sums,
                                  double* xhat_sums) {
  using A = Compute<T>;
  TS_REDUCE_SLOT(double, slot);
  const int64_t plane = blockIdx.x;
  const auto n = static_cast<int64_t>(size.by_C.quotient(blockIdx.x));
  const int64_t at = size.slot(n, plane - n * size.C);
  const A m = mean[at], r = rstd[at];
  double sum = 0, product = 0;
  dy += plane * size.S;
  x += plane * size.S;
  RowWalk<T, kWidth>(x, size.S).each([&]<int N>(int64_t s) {
    const gpu::Vector<T, N> grads = gpu::load_vector<N>(dy + s),
                            values = gpu::load_vector<N>(x + s);
    TS_UNROLL
    for (int j = 0; j < N; ++j) {
      const A grad = load<A>(grads.values[j]);
      const A xhat = (load<A>(values.values[j]) - m) * r;
      sum += static_cast<double>(grad);
      product += static_cast<double>(grad * xhat);
    }
  });
  sum = gpu::block_reduce(sum, gpu::Plus{}, 0.0, slot);
  product = gpu::block_reduce(product, gpu::Plus{}, 0.0, slot);
  if (threadIdx.x == 0) {
    dy_sums[plane] = sum;
    xhat_sums[plane] = product;
  }
}

// The same for batch_norm of (N, C): a thread adds up kNormRows samples of a channel, so that
// neighbours read neighbours. `blocks` of the grid's first dimension make a piece: the others end
// at 65535.
template <class T>
__global__ void column_sums_kernel(const T* dy, const T* x, const Channels size, unsigned blocks,
                                   const Compute<T>* mean, const Compute<T>* rstd, double* dy_sums,
                                   double* xhat_sums) {
  using A = Compute<T>;
  const unsigned piece = blockIdx.x / blocks;
  const int64_t c = int64_t{blockIdx.x - piece * blocks} * blockDim.x + threadIdx.x;
  if (c >= size.C) return;
  const int64_t begin = int64_t{piece} * kNormRows;
  const int64_t end = begin + kNormRows < size.N ? begin + kNormRows : size.N;
  const A m = mean[c], r = rstd[c];
  double sum = 0, product = 0;
  for (int64_t n = begin; n < end; ++n) {
    const A grad = load<A>(dy[n * size.C + c]);
    const A xhat = (load<A>(x[n * size.C + c]) - m) * r;
    sum += static_cast<double>(grad);
    product += static_cast<double>(grad * xhat);
  }
  dy_sums[piece * size.C + c] = sum;
  xhat_sums[piece * size.C + c] = product;
}

// Gradients of weight and bias: partial sums of a channel, in their order.
template <class A>
__global__ void channel_gradients_kernel(const double* dy_sums, const double* xhat_sums,
                                         int64_t pieces, int64_t C, A* dweight, A* dbias) {
  const int64_t c = gpu::first_index();
  if (c >= C) return;
  double sum = 0, product = 0;
  for (int64_t p = 0; p < pieces; ++p) {
    sum += dy_sums[p * C + c];
    product += xhat_sums[p * C + c];
  }
  if (dbias != nullptr) dbias[c] = static_cast<A>(sum);
  if (dweight != nullptr) dweight[c] = static_cast<A>(product);
}

// What dx = a dy - b - (x - mean) c takes from the sums of each slot.
template <class A>
__global__ void slot_gradients_kernel(const double* dy_sums, const double* xhat_sums,
                                      int64_t pieces, const Channels size, const A* rstd,
                                      const A* weight, double terms, A* b, A* c) {
  const int64_t slot = gpu::first_index();
  if (slot >= (size.groups == 0 ? size.C : size.N * size.groups)) return;
  double sum = 0, product = 0;
  if (size.groups == 0) {
    const double w = number_at(weight, slot, 1);
    for (int64_t p = 0; p < pieces; ++p) {
      sum += w * dy_sums[p * size.C + slot];
      product += w * xhat_sums[p * size.C + slot];
    }
  } else {
    const int64_t width = size.C / size.groups, n = slot / size.groups;
    const int64_t first = slot % size.groups * width;
    for (int64_t channel = first; channel < first + width; ++channel) {
      const double w = number_at(weight, channel, 1);
      sum += w * dy_sums[n * size.C + channel];
      product += w * xhat_sums[n * size.C + channel];
    }
  }
  const double r = static_cast<double>(rstd[slot]);
  b[slot] = static_cast<A>(r * sum / terms);
  c[slot] = static_cast<A>(r * r * product / terms);
}

// b and c are null where the statistics did not come from x.
template <class T>
__global__ void __launch_bounds__(kBlock)
    input_gradient_kernel(const T* dy, const T* x, T* dx, const Channels size,
                          const Compute<T>* mean, const Compute<T>* rstd, const Compute<T>* weight,
                          const Compute<T>* b, const Compute<T>* c, int64_t total, bool vectors) {
  using A = Compute<T>;
  T grads[kGroup] = {}, values[kGroup] = {};
  read_group(dy, total, vectors, grads);
  read_group(x, total, vectors, values);
  A m = 0, scale = 0, average = 0, along = 0;
  const auto enter = [&](int64_t slot, int64_t channel) {
    m = mean[slot];
    scale = static_cast<A>(static_cast<double>(rstd[slot]) * number_at(weight, channel, 1));
    average = b != nullptr ? b[slot] : A(0);
    along = c != nullptr ? c[slot] : A(0);
  };
  for_group(size, total, enter, [&](int j) {
    grads[j] = store<T>(scale * load<A>(grads[j]) - average - (load<A>(values[j]) - m) * along);
  });
  write_group(dx, total, vectors, grads);
}

Tensor in_dtype(const Tensor& x, DType dtype) {
  if (!x.defined()) return x;
  return contiguous(x.dtype() == dtype ? x : convert(x, dtype));
}
template <class T>
T* data_or_null(const Tensor& x) {
  return x.defined() ? x.data_as<T>() : nullptr;
}
gpu::LaunchConfig over(const char* name, int64_t n, int each = 1) {
  return {.name = name, .grid = gpu::blocks(n, kBlock, each), .block = kBlock};
}

Tensor rstd_of_cuda(const Tensor& variance, double eps) {
  const DType compute = compute_dtype(variance.dtype());
  const Tensor result = raw::empty(variance.shape(), compute, variance.device());
  if (variance.numel() == 0) return result;
  const Tensor source = contiguous(variance);
  with_compute(compute, [&]<class C>() {
    gpu::launch(over("batch_norm", source.numel()), rstd_kernel<C>, source.data(), source.dtype(),
                result.data_as<C>(), source.numel(), eps);
  });
  return result;
}

void update_running_cuda(const Tensor& running, const Tensor& value, double factor,
                         double momentum) {
  if (running.numel() > 0) {
    const Tensor source = contiguous(value), target = contiguous(running);
    gpu::launch(over("batch_norm", target.numel()), update_running_kernel, target.data(),
                target.dtype(), source.data(), source.dtype(), target.numel(), factor, momentum);
    if (!target.is(running)) copy_into(running, target);
  }
  running.bump_version();
}

Tensor channel_norm_forward_cuda(const Tensor& x, int64_t groups, const Tensor& mean,
                                 const Tensor& rstd, const Tensor& weight, const Tensor& bias) {
  const Tensor y = raw::empty(x.shape(), x.dtype(), x.device());
  if (x.numel() == 0) return y;
  const DType compute = compute_dtype(x.dtype());
  const Tensor source = contiguous(x), m = in_dtype(mean, compute), r = in_dtype(rstd, compute);
  const Tensor w = in_dtype(weight, compute), b = in_dtype(bias, compute);
  const char* const name = groups == 0 ? "batch_norm" : "group_norm";
  dispatch_floating(x.dtype(), name, [&]<class T>() {
    using A = Compute<T>;
    gpu::launch(over(name, x.numel(), kGroup), affine_kernel<T>, source.data_as<T>(),
                y.data_as<T>(), Channels(x, groups), m.data_as<A>(), r.data_as<A>(),
                data_or_null<A>(w), data_or_null<A>(b), x.numel(), is_aligned(source.data()));
  });
  return y;
}

// All gradients of batch_norm at once; true where the library made them.
bool backward_on_library(const Tensor& dy, const Tensor& x, const Channels& size,
                         const Tensor& mean, const Tensor& rstd, const Tensor& weight,
                         const RowNormGradients& result) {
  const int version = gpu::graph_library_version();
  if (version == 0) return gpu::count_graph("batch_norm", false, gpu::graph_library);
  const gpu::NormProblem problem{.dtype = x.dtype(), .N = size.N, .C = size.C, .S = size.S};
  if (const std::string reason = validate(problem, version); !reason.empty()) {
    return gpu::count_graph("batch_norm", false, [&] { return reason; });
  }
  const auto or_scratch = [&](const Tensor& wanted) {
    return wanted.defined() ? wanted : raw::empty({size.C}, kF32, x.device());
  };
  const Tensor dweight = or_scratch(result.weight), dbias = or_scratch(result.bias);
  std::array<void*, gpu::kNormSlots> memory{};
  memory[gpu::kNormInputSlot] = x.data();
  memory[gpu::kNormGradOutputSlot] = dy.data();
  memory[gpu::kNormScaleSlot] = weight.data();
  memory[gpu::kNormMeanSlot] = mean.data();
  memory[gpu::kNormRstdSlot] = rstd.data();
  memory[gpu::kNormGradInputSlot] = result.input.data();
  memory[gpu::kNormGradScaleSlot] = dweight.data();
  memory[gpu::kNormGradBiasSlot] = dbias.data();
  for (const void* pointer : memory) {
    if (!is_aligned(pointer)) {
      return gpu::count_graph("batch_norm", false,
                              [] { return "a tensor does not begin at 16 bytes"; });
    }
  }
  return gpu::count_graph("batch_norm", run_graph(norm_request(problem), memory),
                          [] { return "none of cuDNN's engines serves it"; });
}

RowNormGradients channel_norm_backward_cuda(const Tensor& dy, const Tensor& x, int64_t groups,
                                            const Tensor& mean, const Tensor& rstd,
                                            const Tensor& weight, bool fixed,
                                            const bool (&wanted)[3]) {
  RowNormGradients result;
  const Channels size(x, groups);
  const DType compute = compute_dtype(x.dtype());
  const Device& device = x.device();
  if (wanted[0]) result.input = raw::empty(x.shape(), x.dtype(), device);
  if (wanted[1]) result.weight = raw::empty({size.C}, compute, device);
  if (wanted[2]) result.bias = raw::empty({size.C}, compute, device);
  if (size.C == 0) return result;
  const Tensor source = contiguous(x), grad = in_dtype(dy, x.dtype());
  const Tensor m = in_dtype(mean, compute), r = in_dtype(rstd, compute);
  const Tensor w = in_dtype(weight, compute);
  if (groups == 0 && !fixed && wanted[0] && w.defined() && x.numel() > 0 &&
      backward_on_library(grad, source, size, m, r, w, result)) {
    return result;
  }
  const char* const name = groups == 0 ? "batch_norm" : "group_norm";
  const bool by_columns = groups == 0 && size.S == 1;
  const int64_t pieces = by_columns ? (size.N + kNormRows - 1) / kNormRows : size.N;
  const bool wants_slots = wanted[0] && !fixed && x.numel() > 0;
  dispatch_floating(x.dtype(), name, [&]<class T>() {
    using A = Compute<T>;
    Tensor slot_b, slot_c;
    if (wanted[1] || wanted[2] || wants_slots) {
      const Tensor dy_sums = raw::empty({pieces, size.C}, kF64, device);
      const Tensor xhat_sums = raw::empty({pieces, size.C}, kF64, device);
      double* const dys = dy_sums.data_as<double>();
      double* const xhats = xhat_sums.data_as<double>();
      if (by_columns && pieces > 0) {
        const unsigned blocks = gpu::blocks(size.C, kBlock);
        gpu::launch({.name = name, .grid = blocks * static_cast<unsigned>(pieces), .block = kBlock},
                    column_sums_kernel<T>, grad.data_as<T>(), source.data_as<T>(), size, blocks,
                    m.data_as<A>(), r.data_as<A>(), dys, xhats);
      } else if (pieces > 0) {
        constexpr int kWidth = 16 / sizeof(T);
        const bool vectors = begin_alike<T>({grad.data(), source.data()}, {size.S});
        gpu::launch({.name = name,
                     .grid = static_cast<unsigned>(size.N * size.C),
                     .block = walk_threads(size.S, vectors ? kWidth : 1)},
                    vectors ? plane_sums_kernel<T, kWidth> : plane_sums_kernel<T, 1>,
                    grad.data_as<T>(), source.data_as<T>(), size, m.data_as<A>(), r.data_as<A>(),
                    dys, xhats);
      }
      if (wanted[1] || wanted[2]) {
        gpu::launch(over(name, size.C), channel_gradients_kernel<A>,
                    static_cast<const double*>(dys), static_cast<const double*>(xhats), pieces,
                    size.C, data_or_null<A>(result.weight), data_or_null<A>(result.bias));
      }
      if (wants_slots) {
        const int64_t slots = size.slots();
        slot_b = raw::empty({slots}, compute, device);
        slot_c = raw::empty({slots}, compute, device);
        gpu::launch(over(name, slots), slot_gradients_kernel<A>, static_cast<const double*>(dys),
                    static_cast<const double*>(xhats), pieces, size, r.data_as<A>(),
                    data_or_null<A>(w), static_cast<double>(x.numel() / slots), slot_b.data_as<A>(),
                    slot_c.data_as<A>());
      }
    }
    if (!wanted[0] || x.numel() == 0) return;
    gpu::launch(over(name, x.numel(), kGroup), input_gradient_kernel<T>, grad.data_as<T>(),
                source.data_as<T>(), result.input.data_as<T>(), size, m.data_as<A>(),
                r.data_as<A>(), data_or_null<A>(w), data_or_null<A>(slot_b),
                data_or_null<A>(slot_c), x.numel(),
                is_aligned(source.data()) && is_aligned(grad.data()));
  });
  return result;
}

}  // namespace

void register_channel_norm() {
  cuda_kernel<rstd_of> = rstd_of_cuda;
  cuda_kernel<update_running> = update_running_cuda;
  cuda_kernel<channel_norm_forward> = channel_norm_forward_cuda;
  cuda_kernel<channel_norm_backward> = channel_norm_backward_cuda;
}

}  // namespace tessera::kernels
