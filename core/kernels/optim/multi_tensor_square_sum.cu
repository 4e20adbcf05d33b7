#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/optim/multi_tensor_square_sum.h>
#include <tessera/core/kernels/optim/multi_tensor_square_sum_limbs.h>
#include <tessera/core/kernels/common/rows.cuh>
#include <tessera/core/kernels/common/vector_lanes.cuh>
#include <tessera/core/kernels/optim/multi_tensor.cuh>

namespace tessera::kernels {
namespace {

using namespace multi_tensor;
using namespace square_sum;

constexpr int kBlock = 256;
// Vectors that a thread holds of numbers of any kind, 8 of them: they are read once, and looked at
// for their magnitudes before they are added. Nearly all come in words (below), which read 64 KiB
// ahead on an SM, where memory asks for about 25 KiB (4.8 TB/s over 132 SMs and 0.7 us).
template <class T>
constexpr int kHeld = static_cast<int>(sizeof(T)) / 2;
constexpr int kBlocksPerSm = 2;
constexpr int kLogAdds = 3;  // of at most 8 elements
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

// A thread's registers of squares that are at most 2^base, of which each gets at most 2^kLog.
template <class T, int kLevels, int kLog>
class LevelSums {
 public:
  TS_DEVICE explicit LevelSums(int base) : base_(base) {
    TS_UNROLL
    for (int level = 0; level < kLevels; ++level) {
      sums_[level] = anchor_of(unit_of(base, kLog, level), level);
    }
  }
  TS_DEVICE void add_square(double v) {
    const double before = sums_[0];
    double rest;
    if constexpr (Widened<T>::kIsDouble) {
      const double square = v * v;
      sums_[0] = before + square;
      rest = square - (sums_[0] - before);
    } else {
      sums_[0] = ::fma(v, v, before);
      rest = ::fma(v, v, before - sums_[0]);
    }
    TS_UNROLL
    for (int level = 1; level < kLevels; ++level) {
      const double coarse = sums_[level];
      sums_[level] = coarse + rest;
      rest -= sums_[level] - coarse;
    }
  }
  // Of the whole block.
  TS_DEVICE void put(int64_t* limbs, int64_t* slot) const {
    TS_UNROLL
    for (int level = 0; level < kLevels; ++level) {
      const int unit = unit_of(base_, kLog, level);
      const int64_t units = gpu::block_reduce(units_in(sums_[level], anchor_of(unit, level)),
                                              gpu::Plus{}, int64_t{0}, slot);
      if (threadIdx.x != 0) continue;
      each_limb_of(units, unit, [&](int i, int64_t value) { add_to(limbs + i, value); });
    }
  }

 private:
  int base_;
  double sums_[kLevels];
};

// ---- Whole vectors of numbers of 32 and 16 bits -------------------------------------------------

// As they are nearly always: finite, and of magnitudes that two levels take. What a thread holds
// are 32 words, so that the block's range is found, and its registers are joined, once for 8192
// numbers of f32 or 16384 of 16 bits: with one round for each 16 numbers of a thread there were 36
// and 30 instructions a number in the PTX of nvcc 13.0, more than its bytes take.
constexpr int kWords = 32;
template <class T>
constexpr int kInWord = 4 / static_cast<int>(sizeof(T));
template <class T>
constexpr int kLogHeld = sizeof(T) == 2 ? 6 : 5;
template <class T>
constexpr int kHeldNumbers = kBlock* kWords* kInWord<T>;
static_assert(kWords * kInWord<bf16> == 1 << kLogHeld<bf16> && kWords == 1 << kLogHeld<float>);
static_assert(kMultiTensorChunk % kHeldNumbers<bf16> == 0);

TS_DEVICE uint32_t larger_halves(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t result;
  asm("max.u16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
#else
  const uint32_t low = Most{}(a & 0xffff, b & 0xffff), high = Most{}(a >> 16, b >> 16);
  return low | high << 16;
#endif
}
struct LargerHalves {
  TS_DEVICE uint32_t operator()(uint32_t a, uint32_t b) const { return larger_halves(a, b); }
};

struct Range {
  uint32_t largest, least;  // bits of f32; of those that are not 0; largest 0: there are none
};
// How far numbers are below the sign bit says which is the least: of 0 it is the most, and taken
// for none.
template <class T>
TS_DEVICE Range range_of(const uint32_t (&words)[kWords], uint32_t* slot) {
  uint32_t most = 0, below = 0;
  if constexpr (sizeof(T) == 2) {
    TS_UNROLL
    for (int w = 0; w < kWords; ++w) {
      const uint32_t bits = words[w] & 0x7fff7fffu;
      most = larger_halves(most, bits);
      below = larger_halves(below, (0x80008000u - bits) & 0x7fff7fffu);
    }
    most = Most{}(most & 0xffff, most >> 16);
    below = Most{}(below & 0xffff, below >> 16);
    const uint32_t both = gpu::block_reduce(most << 16 | below, LargerHalves{}, 0u, slot);
    const auto widened = [](uint32_t bits) {
      return std::bit_cast<uint32_t>(to_float(T::from_bits(static_cast<uint16_t>(bits))));
    };
    return {widened(both >> 16), widened(0x8000u - (both & 0xffff))};
  } else {
    TS_UNROLL
    for (int w = 0; w < kWords; ++w) {
      const uint32_t bits = words[w] & 0x7fffffffu;
      most = Most{}(most, bits);
      below = Most{}(below, (0x80000000u - bits) & 0x7fffffffu);
    }
    return {gpu::block_reduce(most, Most{}, 0u, slot),
            0x80000000u - gpu::block_reduce(below, Most{}, 0u, slot)};
  }
}

template <class T, int kLevels>
TS_DEVICE void add_words(const uint32_t (&words)[kWords], int base, int64_t* limbs, int64_t* slot) {
  LevelSums<T, kLevels, kLogHeld<T>> sums(base);
  TS_UNROLL
  for (int w = 0; w < kWords; ++w) {
    constexpr int kCount = kInWord<T>;
    gpu::Vector<T, kCount> vector;
    memcpy(&vector, &words[w], sizeof(vector));
    float values[kCount];
    unpack(vector, values);
    TS_UNROLL
    for (int j = 0; j < kCount; ++j) sums.add_square(static_cast<double>(values[j]));
  }
  sums.put(limbs, slot);
}

// Numbers [begin, end), at most kHeldNumbers. False: they are not as above, and nothing was added.
template <class T>
TS_DEVICE bool add_held(const Span& span, int begin, int end, int64_t* limbs, int64_t* slot,
                        uint32_t* range_slot) {
  using Of = Widened<T>;
  constexpr int kGroup = kGroupOf<T>, kGroupWords = kGroup / kInWord<T>;
  uint32_t words[kWords];
  TS_UNROLL
  for (int g = 0; g < kWords / kGroupWords; ++g) {
    const int i = begin + (g * kBlock + static_cast<int>(threadIdx.x)) * kGroup;
    gpu::Vector<T, kGroup> vector;
    if (i + kGroup <= end) {
      vector = gpu::load_vector<kGroup>(elements_of<T>(span, i));
    } else {
      TS_UNROLL
      for (int j = 0; j < kGroup; ++j) {
        vector.values[j] = i + j < end ? *elements_of<T>(span, i + j) : store<T>(0.0f);
      }
    }
    memcpy(words + g * kGroupWords, &vector, sizeof(vector));
  }
  const Range range = range_of<T>(words, range_slot);
  if (range.largest == 0) return true;
  if (range.largest >= Of::kOutlier) return false;
  const int base = Of::base(range.largest, kLogHeld<T>);
  const auto fits = [&](int levels) {
    return range.least >= Of::least_above(unit_of(base, kLogHeld<T>, levels - 1));
  };
  if (sizeof(T) == 2 && fits(1)) {
    add_words<T, 1>(words, base, limbs, slot);
    return true;
  }
  if (!fits(2)) return false;
  add_words<T, 2>(words, base, limbs, slot);
  return true;
}

// ---- Any numbers --------------------------------------------------------------------------------

// Adds the squares of the block's elements whose magnitudes are in [from, to); they fit into
// kLevels.
template <class T, int kLevels, class C, int kCount, class Bits>
TS_DEVICE void add_levels(const C (&x)[kCount], Bits from, Bits to, int base, int64_t* limbs,
                          int64_t* slot) {
  LevelSums<T, kLevels, kLogAdds> sums(base);
  TS_UNROLL
  for (int j = 0; j < kCount; ++j) {
    const auto bits = magnitude<Bits>(x[j]);
    sums.add_square(bits >= from && bits < to ? static_cast<double>(x[j]) : 0);
  }
  sums.put(limbs, slot);
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
    constexpr bool kByWords = !std::is_same_v<T, double>;
    constexpr int kPiece = kByWords ? kHeldNumbers<T> : static_cast<int>(kMultiTensorChunk);
    const Span own = {static_cast<T*>(span.data) + place.begin, span.dtype, span.vectors};
    const int numbers = static_cast<int>(place.end - place.begin);
    for (int begin = 0; begin < numbers; begin += kPiece) {
      const int end = begin + kPiece < numbers ? begin + kPiece : numbers;
      if constexpr (kByWords) {
        if (own.vectors && add_held<T>(own, begin, end, limbs, slot, range_slot)) continue;
      }
      for (int tile = begin; tile < end; tile += kBlock * kGroup * kVectors) {
        C x[kVectors * kGroup];
        TS_UNROLL
        for (int g = 0; g < kVectors; ++g) {
          const int i = tile + (g * kBlock + static_cast<int>(threadIdx.x)) * kGroup;
          C group[kGroup];
          load_group_of<T>(own, i, end - i, group);
          TS_UNROLL
          for (int j = 0; j < kGroup; ++j) x[g * kGroup + j] = group[j];
        }
        add_tile<T>(x, limbs, slot, range_slot);
      }
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
