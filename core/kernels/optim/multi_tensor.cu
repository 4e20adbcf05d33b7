#include <algorithm>
#include <cmath>
#include <vector>

#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/elementwise/elementwise_loops.h>
#include <tessera/core/kernels/optim/multi_tensor.h>
#include <tessera/core/kernels/optim/multi_tensor_loss_scale.h>
#include <tessera/core/kernels/optim/update_rules.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/core/kernels/common/rows.cuh>
#include <tessera/core/kernels/optim/multi_tensor.cuh>

namespace tessera::kernels {
namespace {

using namespace multi_tensor;

constexpr int kBlock = 256;

// ---- Sums of powers, scaling --------------------------------------------------------------------

// A node of the trees over partial results; NaN wins.
TS_HD double joined(double a, double b, bool largest) {
  return !largest ? a + b : b > a || b != b ? b : a;
}

template <class C>
__global__ void power_sum_kernel(const Row* rows, int count, double* partials, double p) {
  TS_REDUCE_SLOT(double, slot);
  const Place place = find_chunk(rows, count);
  const Span span = rows[place.row].spans[0];
  const bool largest = p == static_cast<double>(INFINITY);
  double value = 0;
  with_lane_dtype<C>(span.dtype, [&]<class T>() {
    for_groups<kGroupOf<T>>(place, [&](int64_t i, int count) {
      C x[kGroupOf<T>];
      load_group_of<T>(span, i, count, x);
      TS_UNROLL
      for (int j = 0; j < kGroupOf<T>; ++j) {
        if (j >= count) break;
        const double v = ::fabs(static_cast<double>(x[j]));
        if (largest) {
          value = gpu::Larger{}(value, v);
        } else {
          value += p == 1 ? v : ::pow(v, p);  // of p = 2: multi_tensor_square_sum.cu
        }
      }
    });
  });
  value = largest ? gpu::block_reduce(value, gpu::Larger{}, 0.0, slot)
                  : gpu::block_reduce(value, gpu::Plus{}, 0.0, slot);
  if (threadIdx.x == 0) partials[blockIdx.x] = value;
}

struct NormPart {  // the partial sums of one tensor
  int64_t first, count;
};
struct PowerPartials {
  Tensor sums;                  // f64, one for each chunk of each tensor; undefined for none
  std::vector<NormPart> parts;  // in the order of the tensors
};

// Tensors of each lane in one launch.
PowerPartials power_partials(std::span<const Tensor> tensors, double p) {
  const Device& device = tensors[0].device();
  TensorList dense;
  for (const Tensor& x : tensors) {
    dense.push_back(is_dense(x.shape(), x.strides()) ? x : contiguous(x));
  }
  PowerPartials result;
  result.parts.resize(dense.size());
  Table tables[2];
  int64_t bytes[2] = {};
  for (const bool is_double : {false, true}) {
    Table& table = tables[is_double];
    for (size_t i = 0; i < dense.size(); ++i) {
      if ((dense[i].dtype() == kF64) != is_double) continue;
      bytes[is_double] += dense[i].numel() * size_of(dense[i].dtype());
      const int64_t before = table.chunks;
      table.add({span_of(dense[i])}, dense[i].numel());
      result.parts[i] = {before + (is_double ? tables[0].chunks : 0), table.chunks - before};
    }
  }
  if (tables[0].chunks + tables[1].chunks == 0) return result;
  result.sums = raw::empty({tables[0].chunks + tables[1].chunks}, kF64, device);
  const auto run = [&]<class C>(Table& table, double* sums) {
    if (table.chunks == 0) return;
    const Row* const rows = table.upload(device);
    // Of the table as much as chunks look for.
    gpu::launch({.name = "multi_tensor_norm",
                 .grid = static_cast<unsigned>(table.chunks),
                 .block = kBlock,
                 .traffic = {table.bytes.numel() + bytes[std::is_same_v<C, double>],
                             table.chunks * 8, true}},
                power_sum_kernel<C>, rows, static_cast<int>(table.rows.size()), sums, p);
  };
  run.operator()<float>(tables[0], result.sums.data_as<double>());
  run.operator()<double>(tables[1], result.sums.data_as<double>() + tables[0].chunks);
  return result;
}

std::vector<double> multi_tensor_power_sums_cuda(std::span<const Tensor> tensors, double p) {
  const PowerPartials partials = power_partials(tensors, p);
  std::vector<double> values, sums;
  if (partials.sums.defined()) values = partials.sums.to_vector<double>();
  for (const NormPart& part : partials.parts) {  // the CPU's binary tree over chunks
    const std::span parts(values.data() + part.first, static_cast<size_t>(part.count));
    for (size_t width = 1; width < parts.size(); width *= 2) {
      for (size_t i = 0; i + width < parts.size(); i += 2 * width) {
        parts[i] = joined(parts[i], parts[i + width], std::isinf(p));
      }
    }
    sums.push_back(parts.empty() ? 0 : parts[0]);
  }
  return sums;
}

// One block: the tree of each tensor's partials, a warp a tensor, and then that of the tensors, as
// the host walks them in multi_tensor_norm(): the bits are the same.
__global__ void clip_factor_kernel(const NormPart* parts, int count, double* partials, double* sums,
                                   double p, double scale, double max_norm, const double* factor,
                                   double* result) {
  const bool largest = p == static_cast<double>(INFINITY);
  const int warps = static_cast<int>(blockDim.x) / gpu::kWarp;
  const int lane = static_cast<int>(threadIdx.x) % gpu::kWarp;
  for (int t = static_cast<int>(threadIdx.x) / gpu::kWarp; t < count; t += warps) {
    double* const x = partials + parts[t].first;
    const int64_t n = parts[t].count;
    for (int64_t width = 1; width < n; width *= 2) {
      for (int64_t i = lane * 2 * width; i + width < n; i += gpu::kWarp * 2 * width) {
        x[i] = joined(x[i], x[i + width], largest);
      }
      __syncwarp();
    }
    if (lane == 0) sums[t] = n > 0 ? x[0] : 0;
  }
  __syncthreads();
  for (int width = 1; width < count; width *= 2) {
    for (int i = static_cast<int>(threadIdx.x) * 2 * width; i + width < count;
         i += static_cast<int>(blockDim.x) * 2 * width) {
      sums[i] = joined(sums[i], sums[i + width], largest);
    }
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  const double total = sums[0], given = factor != nullptr ? *factor : 1;
  const double norm = (largest || p == 1 ? total : ::pow(total, 1 / p)) * (scale * given);
  const double clip = max_norm / (norm + 1e-6);
  result[0] = norm;
  result[1] = given * (clip >= 1 ? 1 : clip);  // NaN stays
  result[2] = norm - norm == 0 ? 0 : 1;
}

Tensor multi_tensor_clip_factor_cuda(std::span<const Tensor> tensors, double p, double scale,
                                     double max_norm, const Tensor& factor) {
  const PowerPartials partials = power_partials(tensors, p);
  const Device& device = tensors[0].device();
  const Tensor result = raw::empty({3}, kF64, device);
  const auto count = static_cast<int64_t>(partials.parts.size());
  const Tensor sums = raw::empty({count}, kF64, device);
  const int64_t bytes = count * static_cast<int64_t>(sizeof(NormPart));
  const Tensor parts = raw::empty({bytes}, kU8, device);
  gpu::upload_constants(parts.data(), device.index, partials.parts.data(),
                        static_cast<size_t>(bytes));
  const int64_t chunks = partials.sums.defined() ? partials.sums.numel() : 0;
  gpu::launch({.name = "multi_tensor_norm",
               .grid = 1,
               .block = 1024,
               .traffic = {bytes + (chunks + count) * 8 + (factor.defined() ? 8 : 0),
                           (chunks + count + 3) * 8, true}},
              clip_factor_kernel, static_cast<const NormPart*>(parts.data()),
              static_cast<int>(count),
              partials.sums.defined() ? partials.sums.data_as<double>() : nullptr,
              sums.data_as<double>(), p, scale, max_norm,
              factor.defined() ? factor.data_as<double>() : nullptr, result.data_as<double>());
  return result;
}

// The largest magnitude: it is NaN where any element is, and sums of nothing can overflow.
Tensor multi_tensor_found_nonfinite_cuda(std::span<const Tensor> tensors) {
  constexpr auto kInfinity = static_cast<double>(INFINITY);
  return raw::narrow(multi_tensor_clip_factor_cuda(tensors, kInfinity, 1, kInfinity, {}), 0, 2, 1);
}

__global__ void loss_scale_kernel(double* state, const LossScaleOptions options) {
  next_loss_scale(state, options);
}

void update_loss_scale_cuda(const Tensor& state, const LossScaleOptions& options) {
  gpu::launch({.name = "update_loss_scale", .grid = 1, .block = 1}, loss_scale_kernel,
              state.data_as<double>(), options);
}

// ---- Changes of every element where it lies -----------------------------------------------------

template <class C>
struct ScaleBy {
  C factor;
  TS_DEVICE C operator()(C x) const { return x * factor; }
};
template <class C>
struct ClampTo {
  C limit;
  TS_DEVICE C operator()(C x) const { return clamp_rule(limit, x); }
};

template <class C, class Change>
__global__ void __launch_bounds__(kBlock) change_kernel(const Row* rows, int count, Change change) {
  const Place place = find_chunk(rows, count);
  const Span span = rows[place.row].spans[0];
  with_lane_dtype<C>(span.dtype, [&]<class T>() {
    for_groups<kGroupOf<T>>(place, [&](int64_t i, int count) {
      C x[kGroupOf<T>];
      load_group_of<T>(span, i, count, x);
      TS_UNROLL
      for (int j = 0; j < kGroupOf<T>; ++j) x[j] = change(x[j]);
      store_group_of<T>(span, i, count, x);
    });
  });
}

template <template <class C> class Change>
void change_all(const char* name, std::span<const Tensor> tensors, double by) {
  Table narrow, wide;
  int64_t bytes[2] = {};
  for (const Tensor& x : tensors) {
    (x.dtype() == kF64 ? wide : narrow).add({span_of(x)}, x.numel());
    bytes[x.dtype() == kF64] += x.numel() * size_of(x.dtype());
  }
  const auto run = [&]<class C>(Table& table) {
    if (table.chunks == 0) return;
    const Row* const rows = table.upload(tensors[0].device());
    const int64_t changed = bytes[std::is_same_v<C, double>];
    gpu::launch({.name = name,
                 .grid = static_cast<unsigned>(table.chunks),
                 .block = kBlock,
                 .traffic = {table.bytes.numel() + changed, changed, true}},
                change_kernel<C, Change<C>>, rows, static_cast<int>(table.rows.size()),
                Change<C>{static_cast<C>(by)});
  };
  run.template operator()<float>(narrow);
  run.template operator()<double>(wide);
  for (const Tensor& x : tensors) x.bump_version();
}

void multi_tensor_scale_cuda(std::span<const Tensor> tensors, const double* factor) {
  change_all<ScaleBy>("multi_tensor_scale", tensors, *factor);
}
void multi_tensor_clamp_cuda(std::span<const Tensor> tensors, double limit) {
  change_all<ClampTo>("multi_tensor_clamp", tensors, limit);
}

void multi_tensor_zero_cuda(std::span<const Tensor> tensors) {
  for (const Tensor& x : tensors) {
    fill(x, 0);
    x.bump_version();
  }
}

}  // namespace

void register_multi_tensor() {
  cuda_kernel<multi_tensor_power_sums> = multi_tensor_power_sums_cuda;
  cuda_kernel<multi_tensor_clip_factor> = multi_tensor_clip_factor_cuda;
  cuda_kernel<multi_tensor_found_nonfinite> = multi_tensor_found_nonfinite_cuda;
  cuda_kernel<update_loss_scale> = update_loss_scale_cuda;
  cuda_kernel<multi_tensor_scale> = multi_tensor_scale_cuda;
  cuda_kernel<multi_tensor_clamp> = multi_tensor_clamp_cuda;
  cuda_kernel<multi_tensor_zero> = multi_tensor_zero_cuda;
}

}  // namespace tessera::kernels
