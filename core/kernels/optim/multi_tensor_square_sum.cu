#include <bit>
#include <cmath>
#include <type_traits>
#include <vector>

#include <tessera/core/factory.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/optim/multi_tensor_square_sum.h>
#include <tessera/core/kernels/optim/multi_tensor_square_sum_limbs.h>
#include <tessera/core/kernels/common/rows.cuh>
#include <tessera/core/kernels/optim/multi_tensor.cuh>

namespace tessera::kernels {
namespace {

using namespace multi_tensor;
using namespace square_sum;

constexpr int kBlock = 256;
// Vectors that a thread holds, 16 registers of elements: they are read once, and looked at for
// their magnitudes before they are added. Two blocks on an SM have no spills (120 registers); what
// they read ahead is 32 KiB of f32 and 16 KiB of a 16-bit type, where memory asks for about 25 KiB
// (4.8 TB/s over 132 SMs and 0.7 us).
template <class T>
constexpr int kHeld = sizeof(T) == 2 ? 2 : 4;
constexpr int kBlocksPerSm = 2;
constexpr int kLogAdds = 4;  // of at most 16 elements
constexpr int kSumBlock = 96;
static_assert(kSumBlock >= kNumSquareSum);

struct Most {
  template <class V>
  TS_DEVICE V operator()(V a, V b) const {
    return b > a ? b : a;
  }
};
struct Least {
  template <class V>
  TS_DEVICE V operator()(V a, V b) const {
    return b < a ? b : a;
  }
};

template <class Bits, class C>
TS_DEVICE Bits magnitude(C x) {
  return std::bit_cast<Bits>(x) & (static_cast<Bits>(~Bits{0}) >> 1);
}

// Integers: the order does not matter.
TS_DEVICE void add_to(int64_t* limb, int64_t value) {
  if (value != 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(limb), static_cast<unsigned long long>(value));
  }
}

// Adds the squares of the block's elements whose magnitudes are in [from, to); they fit into
// kLevels.
template <class T, int kLevels, class C, int kCount, class Bits>
TS_DEVICE void add_levels(const C (&x)[kCount], Bits from, Bits to, int base, int64_t* limbs,
                          int64_t* slot) {
  using Of = Widened<T>;
  double sums[kLevels];
  TS_UNROLL
  for (int level = 0; level < kLevels; ++level) {
    sums[level] = anchor_of(unit_of(base, kLogAdds, level), level);
  }
  TS_UNROLL
  for (int j = 0; j < kCount; ++j) {
    const auto bits = magnitude<Bits>(x[j]);
    const double v = bits >= from && bits < to ? static_cast<double>(x[j]) : 0;
    const double before = sums[0];
    double rest;
    if constexpr (Of::kIsDouble) {
      const double square = v * v;
      sums[0] = before + square;
      rest = square - (sums[0] - before);
    } else {
      sums[0] = ::fma(v, v, before);
      rest = ::fma(v, v, before - sums[0]);
    }
    TS_UNROLL
    for (int level = 1; level < kLevels; ++level) {
      const double coarse = sums[level];
      sums[level] = coarse + rest;
      rest -= sums[level] - coarse;
    }
  }
  TS_UNROLL
  for (int level = 0; level < kLevels; ++level) {
    const int unit = unit_of(base, kLogAdds, level);
    const int64_t units = gpu::block_reduce(units_in(sums[level], anchor_of(unit, level)),
                                            gpu::Plus{}, int64_t{0}, slot);
    if (threadIdx.x != 0) continue;
    each_limb_of(units, unit, [&](int i, int64_t value) { add_to(limbs + i, value); });
  }
}

template <class T, class C, int kCount>
TS_DEVICE void add_tile(const C (&x)[kCount], int64_t* limbs, int64_t* slot,
                        typename Widened<T>::Bits* range_slot) {
  using Of = Widened<T>;
  using Bits = typename Of::Bits;
  // Above all magnitudes that are still to be added.
  Bits to = static_cast<Bits>(~Bits{0}) / 2 + 1;
  while (true) {
    Bits largest = 0, least = static_cast<Bits>(~Bits{0});
    TS_UNROLL
    for (int j = 0; j < kCount; ++j) {
      const auto bits = magnitude<Bits>(x[j]);
      if (bits == 0 || bits >= to) continue;
      largest = Most{}(largest, bits);
      least = Least{}(least, bits);
    }
    largest = gpu::block_reduce(largest, Most{}, Bits{0}, range_slot);
    if (largest == 0) return;
    if (largest >= Of::kOutlier) {
      TS_ROLLED
      for (int j = 0; j < kCount; ++j) {
        C element = 0;
        TS_UNROLL
        for (int k = 0; k < kCount; ++k) {  // registers have no index
          if (k == j) element = x[k];
        }
        if (magnitude<Bits>(element) < Of::kOutlier) continue;
        const auto v = static_cast<double>(element);
        each_limb_of(v * v, [&](int i, int64_t value) { add_to(limbs + i, value); });
      }
      to = static_cast<Bits>(Of::kOutlier);
      continue;
    }
    least = gpu::block_reduce(least, Least{}, static_cast<Bits>(~Bits{0}), range_slot);
    const int base = Of::base(largest, kLogAdds);
    const auto fits = [&](int levels) {
      return least >= Of::least_above(unit_of(base, kLogAdds, levels - 1));
    };
    if (sizeof(T) == 2 && fits(1)) {
      return add_levels<T, 1>(x, Bits{0}, to, base, limbs, slot);
    }
    if (fits(2)) return add_levels<T, 2>(x, Bits{0}, to, base, limbs, slot);
    const Bits from =
        fits(3) ? Bits{0}
                : static_cast<Bits>(Of::least_above(unit_of(base, kLogAdds, kMaxLevels - 1)));
    add_levels<T, kMaxLevels>(x, from, to, base, limbs, slot);
    if (from == 0) return;
    to = from;
  }
}

// Row: the tensor and the sum that it belongs to. Reads each element once; 4 operations of f64 for
// one of f32, besides widening it.
template <class C>
__global__ void __launch_bounds__(kBlock, kBlocksPerSm)
    square_sum_kernel(const Row* rows, int count) {
  TS_SHARED(int64_t, limbs, kNumSquareSum);
  TS_REDUCE_SLOT(int64_t, slot);
  using Bits = typename Widened<C>::Bits;
  TS_REDUCE_SLOT(Bits, range_slot);
  for (int i = static_cast<int>(threadIdx.x); i < kNumSquareSum; i += kBlock) limbs[i] = 0;
  __syncthreads();
  const Place place = find_chunk(rows, count);
  const Span span = rows[place.row].spans[0];
  with_lane_dtype<C>(span.dtype, [&]<class T>() {
    constexpr int kGroup = kGroupOf<T>, kVectors = kHeld<T>;
    static_assert(kVectors * kGroup <= 1 << kLogAdds);
    for (int64_t tile = place.begin; tile < place.end; tile += kBlock * kGroup * kVectors) {
      C x[kVectors * kGroup];
      TS_UNROLL
      for (int g = 0; g < kVectors; ++g) {
        const int64_t i = tile + (int64_t{g} * kBlock + threadIdx.x) * kGroup;
        const int64_t left = place.end - i;
        C group[kGroup];
        load_group_of<T>(span, i,
                         static_cast<int>(left < 0        ? 0
                                          : left < kGroup ? left
                                                          : kGroup),
                         group);
        TS_UNROLL
        for (int j = 0; j < kGroup; ++j) x[g * kGroup + j] = group[j];
      }
      add_tile<T>(x, limbs, slot, range_slot);
    }
  });
  __syncthreads();
  // Squares that went one by one may have filled limbs; those of narrow types did not.
  if (std::is_same_v<C, double> && threadIdx.x == 0) carry(limbs);
  __syncthreads();
  auto* const sum = static_cast<int64_t*>(rows[place.row].spans[1].data);
  for (int i = static_cast<int>(threadIdx.x); i < kNumSquareSum; i += kBlock) {
    add_to(sum + i, limbs[i]);
  }
}

// Those of tensor t are added to sums + t * stride.
void add_square_sums(std::span<const Tensor> tensors, int64_t* sums, int64_t stride) {
  TensorList dense;
  for (const Tensor& x : tensors) {
    dense.push_back(is_dense(x.shape(), x.strides()) ? x : contiguous(x));
  }
  Table tables[2];
  int64_t bytes[2] = {};
  for (size_t t = 0; t < dense.size(); ++t) {
    const bool is_double = dense[t].dtype() == kF64;
    Table& table = tables[is_double];
    bytes[is_double] += dense[t].numel() * size_of(dense[t].dtype());
    table.add({span_of(dense[t]), {sums + static_cast<int64_t>(t) * stride, kI64, false}},
              dense[t].numel());
  }
  const auto run = [&]<class C>(Table& table) {
    if (table.chunks == 0) return;
    const Row* const rows = table.upload(tensors[0].device());
    // Limbs that stay zero are not touched.
    const auto tensor_count = static_cast<int64_t>(table.rows.size());
    const int64_t limbs = kNumSquareSum * 8 * (stride == 0 ? 1 : tensor_count);
    gpu::launch(
        {.name = "multi_tensor_norm",
         .grid = static_cast<unsigned>(table.chunks),
         .block = kBlock,
         .traffic = {table.bytes.numel() + bytes[std::is_same_v<C, double>] + limbs, limbs, true}},
        square_sum_kernel<C>, rows, static_cast<int>(tensor_count));
  };
  run.operator()<float>(tables[0]);
  run.operator()<double>(tables[1]);
}

// A sum with its carries, in shared memory, of a block of kSumBlock threads.
TS_DEVICE void load_carried(const int64_t* sum, int64_t* limbs) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < kNumSquareSum) limbs[i] = sum[i];
  __syncthreads();
  if (i == 0) carry(limbs);
  __syncthreads();
}

__global__ void carry_kernel(int64_t* sum) {
  TS_SHARED(int64_t, limbs, kNumSquareSum);
  load_carried(sum, limbs);
  const int i = static_cast<int>(threadIdx.x);
  if (i < kNumSquareSum) sum[i] = limbs[i];
}

__global__ void nearest_kernel(const int64_t* sums, double* values) {
  TS_SHARED(int64_t, limbs, kNumSquareSum);
  load_carried(sums + int64_t{blockIdx.x} * kNumSquareSum, limbs);
  if (threadIdx.x == 0) values[blockIdx.x] = nearest(limbs);
}

__global__ void square_sum_clip_kernel(const int64_t* sum, double scale, double max_norm,
                                       const double* factor, double* result) {
  TS_SHARED(int64_t, limbs, kNumSquareSum);
  load_carried(sum, limbs);
  if (threadIdx.x != 0) return;
  const double given = factor != nullptr ? *factor : 1;
  const double norm = ::sqrt(nearest(limbs)) * (scale * given);
  const double clip = max_norm / (norm + 1e-6);
  result[0] = norm;
  result[1] = given * (clip >= 1 ? 1 : clip);  // NaN stays
  result[2] = norm - norm == 0 ? 0 : 1;
}

Tensor multi_tensor_square_sum_cuda(std::span<const Tensor> tensors, const Device& device) {
  const Tensor sum = raw::zeros({kNumSquareSum}, kI64, device);
  auto* const limbs = sum.data_as<int64_t>();
  add_square_sums(tensors, limbs, 0);
  gpu::launch({.name = "multi_tensor_norm",
               .block = kSumBlock,
               .traffic = {kNumSquareSum * 8, kNumSquareSum * 8}},
              carry_kernel, limbs);
  return sum;
}

std::vector<double> multi_tensor_square_sums_cuda(std::span<const Tensor> tensors) {
  const auto count = static_cast<int64_t>(tensors.size());
  const Device& device = tensors[0].device();
  const Tensor sums = raw::zeros({count, kNumSquareSum}, kI64, device);
  const Tensor values = raw::empty({count}, kF64, device);
  add_square_sums(tensors, sums.data_as<int64_t>(), kNumSquareSum);
  gpu::launch({.name = "multi_tensor_norm",
               .grid = static_cast<unsigned>(count),
               .block = kSumBlock,
               .traffic = {count * kNumSquareSum * 8, count * 8}},
              nearest_kernel, static_cast<const int64_t*>(sums.data_as<int64_t>()),
              values.data_as<double>());
  return values.to_vector<double>();
}

Tensor square_sum_clip_factor_cuda(const Tensor& sum, double scale, double max_norm,
                                   const Tensor& factor) {
  const Tensor result = raw::empty({3}, kF64, sum.device());
  gpu::launch({.name = "multi_tensor_norm",
               .block = kSumBlock,
               .traffic = {kNumSquareSum * 8 + (factor.defined() ? 8 : 0), 24}},
              square_sum_clip_kernel, static_cast<const int64_t*>(sum.data_as<int64_t>()), scale,
              max_norm, factor.defined() ? factor.data_as<double>() : nullptr,
              result.data_as<double>());
  return result;
}

}  // namespace

void register_multi_tensor_square_sum() {
  cuda_kernel<multi_tensor_square_sum> = multi_tensor_square_sum_cuda;
  cuda_kernel<multi_tensor_square_sums> = multi_tensor_square_sums_cuda;
  cuda_kernel<square_sum_clip_factor> = square_sum_clip_factor_cuda;
}

}  // namespace tessera::kernels
