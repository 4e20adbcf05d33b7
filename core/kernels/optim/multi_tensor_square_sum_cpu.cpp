#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <vector>

#include <tessera/core/dispatch.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/optim/multi_tensor.h>
#include <tessera/core/kernels/optim/multi_tensor_square_sum.h>
#include <tessera/core/kernels/optim/multi_tensor_square_sum_blocks.h>
#include <tessera/core/kernels/optim/multi_tensor_square_sum_limbs.h>
#include <tessera/core/parallel.h>

namespace tessera::kernels {
namespace {

using Limbs = std::array<int64_t, kNumSquareSum>;

void check_sum(const char* where, const Tensor& sum) {
  TS_CHECK_DTYPE(sum.dtype() == kI64, where, "a sum of squares is i64; got ", sum);
  TS_CHECK_SHAPE(sum.shape() == Shape{kNumSquareSum} && sum.is_contiguous(), where,
                 "a sum of squares is contiguous and has the shape [", int{kNumSquareSum},
                 "], as multi_tensor_square_sum() gives it; got ", sum);
}

void check_squared(const char* where, std::span<const Tensor> tensors, const Device& device) {
  TS_CHECK_DEVICE(!device.is_meta(), where, "reads elements, and the meta device has none");
  for (const Tensor& x : tensors) {
    TS_CHECK_DTYPE(is_floating(x.dtype()) && !is_fp8(x.dtype()), where,
                   "a tensor must be f64, f32, bf16 or f16; got ", x);
    TS_CHECK_DEVICE(x.device() == device, where, "a tensor must be on ", device, "; got ", x,
                    "; call it for each device");
  }
}

double value_of(const Tensor& sum) {
  std::vector<int64_t> limbs = sum.to_vector<int64_t>();
  square_sum::carry(limbs.data());
  return square_sum::nearest(limbs.data());
}

// A piece of a tensor that one thread adds up.
struct SquaredChunk {
  const char* data;
  DType dtype;
  int64_t numel;
  int64_t sum;  // that it belongs to
};

// Those of tensor t are added to sums + t * stride.
void add_square_sums(std::span<const Tensor> tensors, int64_t* sums, int64_t stride) {
  std::vector<Tensor> dense(tensors.begin(), tensors.end());
  std::vector<SquaredChunk> chunks;
  for (size_t t = 0; t < dense.size(); ++t) {
    Tensor& x = dense[t];
    if (!is_dense(x.shape(), x.strides())) x = contiguous(x);
    for (int64_t begin = 0; begin < x.numel(); begin += kMultiTensorChunk) {
      chunks.push_back({static_cast<const char*>(x.data()) + begin * size_of(x.dtype()), x.dtype(),
                        std::min(kMultiTensorChunk, x.numel() - begin),
                        static_cast<int64_t>(t) * stride});
    }
  }
  parallel_for(static_cast<int64_t>(chunks.size()), 1, [&](int64_t begin, int64_t end) {
    Limbs limbs{};
    for (int64_t c = begin; c < end; ++c) {
      const SquaredChunk& chunk = chunks[static_cast<size_t>(c)];
      TS_SIMD_CALL(square_sum_block, chunk.dtype, chunk.data, chunk.numel, limbs.data());
      if ((c - begin) % 4096 == 4095) square_sum::carry(limbs.data());  // before limbs are full
      if (c + 1 < end && chunks[static_cast<size_t>(c) + 1].sum == chunk.sum) continue;
      square_sum::carry(limbs.data());
      for (size_t i = 0; i < limbs.size(); ++i) {  // integers: whoever comes first
        if (limbs[i] == 0) continue;
        std::atomic_ref(sums[chunk.sum + static_cast<int64_t>(i)])
            .fetch_add(limbs[i], std::memory_order_relaxed);
      }
      limbs.fill(0);
    }
  });
}

}  // namespace

std::vector<double> multi_tensor_square_sums(std::span<const Tensor> tensors) {
  constexpr const char* kWhere = "multi_tensor_square_sums";
  if (tensors.empty()) return {};
  const Device& device = tensors[0].device();
  check_squared(kWhere, tensors, device);
  if (device.is_cuda()) {
    return on_cuda<kernels::multi_tensor_square_sums>(kWhere, device, tensors);
  }
  std::vector<int64_t> limbs(tensors.size() * kNumSquareSum);
  add_square_sums(tensors, limbs.data(), kNumSquareSum);
  std::vector<double> sums(tensors.size());
  for (size_t t = 0; t < sums.size(); ++t) {
    int64_t* const sum = limbs.data() + t * kNumSquareSum;
    square_sum::carry(sum);
    sums[t] = square_sum::nearest(sum);
  }
  return sums;
}

Tensor multi_tensor_square_sum(std::span<const Tensor> tensors, const Device& device) {
  constexpr const char* kWhere = "multi_tensor_square_sum";
  check_squared(kWhere, tensors, device);
  if (tensors.empty()) return raw::zeros({kNumSquareSum}, kI64, device);
  if (device.is_cuda()) {
    return on_cuda<kernels::multi_tensor_square_sum>(kWhere, device, tensors, device);
  }
  const Tensor sum = raw::zeros({kNumSquareSum}, kI64);
  add_square_sums(tensors, sum.data_as<int64_t>(), 0);
  square_sum::carry(sum.data_as<int64_t>());
  return sum;
}

double square_sum_value(const Tensor& sum) {
  check_sum("square_sum_value", sum);
  TS_CHECK_DEVICE(!sum.is_meta(), "square_sum_value", "reads elements, and ", sum, " has none");
  return value_of(sum);
}

Tensor square_sum_clip_factor(const Tensor& sum, double scale, double max_norm,
                              const Tensor& factor) {
  constexpr const char* kWhere = "square_sum_clip_factor";
  check_sum(kWhere, sum);
  TS_CHECK_DEVICE(!sum.is_meta(), kWhere, "reads elements, and ", sum, " has none");
  if (sum.device().is_cuda()) {
    return on_cuda<kernels::square_sum_clip_factor>(kWhere, sum.device(), sum, scale, max_norm,
                                                    factor);
  }
  const double given = factor.defined() ? factor.item() : 1;
  const double norm = std::sqrt(value_of(sum)) * (scale * given);
  const double clip = max_norm / (norm + 1e-6);
  return tensor({norm, given * (clip >= 1 ? 1 : clip), std::isfinite(norm) ? 0.0 : 1.0}, kF64);
}

}  // namespace tessera::kernels
