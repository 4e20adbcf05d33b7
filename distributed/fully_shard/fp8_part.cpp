#include <tessera/distributed/fully_shard/fp8_part.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include <tessera/autograd/autograd.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/fp8/amax.h>
#include <tessera/core/kernels/fp8/part_labels.h>
#include <tessera/core/memory/allocator.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/distributed/backward/mutant.h>
#include <tessera/nn/linear.h>

namespace tessera::distributed {

Fp8Places fp8_places_in(const std::vector<nn::ModuleBase*>& modules) {
  Fp8Places places;
  for (nn::ModuleBase* top : modules) {
    for (const auto& [name, module] : top->named_modules()) {
      const auto* linear = dynamic_cast<const nn::Linear*>(module);
      auto layer = linear != nullptr ? linear->fp8() : nullptr;
      if (layer != nullptr && !layer->is_left_out()) places[&linear->weight] = std::move(layer);
    }
  }
  return places;
}

// ---- Maxima -------------------------------------------------------------------------------------

size_t Fp8Maxima::add(const Tensor& part) {
  weights_.push_back({.part = part});
  return weights_.size() - 1;
}

float Fp8Maxima::of(size_t weight) {
  if (weights_[weight].is_current()) return weights_[weight].all;
  const NoGradGuard no_grad;
  const Tensor message = raw::zeros({static_cast<int64_t>(weights_.size())}, kF32);
  float* const maxima = message.data_as<float>();
  for (size_t i = 0; i < weights_.size(); ++i) {
    Weight& one = weights_[i];
    if (!one.is_current()) {
      one.own = kernels::largest_magnitude_of(raw::alias(one.part));
      one.version = one.part.version();
      one.is_known = true;
    }
    // Infinite for NaN, too, so that a maximum over ranks keeps it.
    maxima[i] = std::isfinite(one.own) ? one.own : std::numeric_limits<float>::infinity();
  }
  if (!TS_MUTANT(kOwnMaxima)) {
    ranks_
        ->all_reduce(message, ReduceOp::kMax,
                     {.channel = Channel::kControl, .tag = "fp8_maxima", .waits = true})
        .wait();
  }
  for (size_t i = 0; i < weights_.size(); ++i) weights_[i].all = maxima[i];
  return weights_[weight].all;
}

Tensor Fp8Maxima::on_gpu(size_t weight) {
  const auto slot = [&](const Tensor& all) {
    return raw::narrow(all, 0, static_cast<int64_t>(weight), 1);
  };
  if (weights_[weight].is_current()) return slot(all_);
  const NoGradGuard no_grad;
  const Device device = weights_[weight].part.device();
  const auto count = static_cast<int64_t>(weights_.size());
  if (!own_.defined() || own_.numel() != count) {
    own_ = raw::zeros({count}, kF32, device);
    for (Weight& one : weights_) one.is_known = false;
  }
  for (size_t i = 0; i < weights_.size(); ++i) {
    Weight& one = weights_[i];
    if (one.is_current()) continue;
    const Tensor own = raw::narrow(own_, 0, static_cast<int64_t>(i), 1);
    kernels::fill(own, 0);
    kernels::raise_to_largest(own, raw::alias(one.part));
    one.version = one.part.version();
    one.is_known = true;
  }
  all_ = own_.clone();  // who reads the last one may not have done so yet
  if (!TS_MUTANT(kOwnMaxima)) {
    ranks_
        ->all_reduce(all_, ReduceOp::kMax,
                     {.channel = Channel::kControl, .tag = "fp8_maxima", .waits = true})
        .wait();
  }
  return slot(all_);
}

// ---- A part -------------------------------------------------------------------------------------

Fp8Part::Fp8Part(const Tensor& part, int64_t room, WeightKey key, std::shared_ptr<Fp8Maxima> maxima)
    : part_(part), room_(room), key_(std::move(key)), maxima_(std::move(maxima)) {
  if (!key_.scale.defined()) number_ = maxima_->add(part_);
}

const Tensor& Fp8Part::bytes() {
  const bool is_current = version_ == part_.version() && made_with_ == scale_version();
  if (bytes_.defined() && (is_current || TS_MUTANT(kStaleBytes))) return bytes_;
  const NoGradGuard no_grad;
  const MemoryCategoryGuard workspace(MemoryCategory::kActivation);
  if (!bytes_.defined()) {
    const MemoryCategoryGuard category(MemoryCategory::kWeightCache);
    bytes_ = raw::zeros({room_}, kU8, part_.device());
  }
  part_.device().is_cuda() ? make_on_gpu() : make();
  version_ = part_.version();
  made_with_ = scale_version();
  return bytes_;
}

void Fp8Part::make() {
  const kernels::QuantizeOptions& options = *key_.tiles;
  Tensor scale = key_.scale;
  if (!scale.defined()) {
    const float amax = maxima_->of(number_);
    scale = raw::full({1}, kernels::fp8_scale(amax, options.format, options.power_of_two), kF32);
  }
  label_ = {.scale = *scale.data_as<float>()};
  if (part_.numel() == 0) return;
  const kernels::Quantized made = kernels::quantize(raw::alias(part_), options, scale);
  label_.largest = std::bit_cast<uint32_t>(made.amax);
  label_.saturated = made.saturated;
  label_.underflown = made.underflown;
  if (!part_.is_meta()) {
    std::memcpy(bytes_.data(), made.values.data(), static_cast<size_t>(part_.numel()));
  }
}

void Fp8Part::make_on_gpu() {
  static_assert(kernels::kPartLabelBytes == sizeof(Fp8Label));
  const Device device = part_.device();
  if (!label_on_gpu_.defined()) {
    const MemoryCategoryGuard category(MemoryCategory::kWeightCache);
    label_on_gpu_ = raw::zeros({kernels::kPartLabelBytes}, kU8, device);
  }
  // Collective, and so for empty parts, too.
  const Tensor largest = key_.scale.defined() ? Tensor() : maxima_->on_gpu(number_);
  if (part_.numel() == 0) return;
  const kernels::QuantizeWants wants{.of_largest = largest,
                                     .largest = raw::zeros({1}, kF32, device),
                                     .counts = raw::zeros({2}, kI64, device)};
  const kernels::Quantized made =
      kernels::quantize(raw::alias(part_), *key_.tiles, key_.scale, wants);
  kernels::copy_into(raw::narrow(bytes_, 0, 0, part_.numel()),
                     raw::view(raw::reinterpret(made.values, kU8), {part_.numel()}));
  kernels::write_part_label(label_on_gpu_, made.scale, wants.largest, wants.counts);
}

void Fp8Part::rest() {
  rests_ = true;
  resting_version_ = part_.version();
}

kernels::Quantized fp8_whole(std::span<const Fp8Label> labels, const WeightKey& key,
                             const Device& device, std::string_view where,
                             const std::string& name) {
  const MemoryCategoryGuard category(MemoryCategory::kWeightCache);
  const float scale = labels.front().scale;
  kernels::Quantized whole{.values = {},
                           .scale = raw::full({1, 1}, scale, kF32, device),
                           .inverse = raw::full({1, 1}, 1 / scale, kF32, device),
                           .tile = key.tiles->tile};
  uint32_t largest = 0;
  for (size_t rank = 0; rank < labels.size(); ++rank) {
    const Fp8Label& label = labels[rank];
    TS_CHECK_AS(
        DistributedError, std::bit_cast<uint32_t>(label.scale) == std::bit_cast<uint32_t>(scale),
        where, "'", name, "' was quantised with the scale ", label.scale, " on rank ", rank,
        " and with ", scale,
        " on rank 0; scales are of the maxima of all ranks: give Fp8Layers::set_reduction() "
        "what takes them, and call update() on all ranks alike");
    largest = std::max(largest, label.largest);
    whole.saturated += label.saturated;
    whole.underflown += label.underflown;
  }
  whole.amax = std::bit_cast<float>(largest);
  return whole;
}

kernels::Quantized fp8_whole(const Tensor& labels, int64_t first, const WeightKey& key) {
  const MemoryCategoryGuard category(MemoryCategory::kWeightCache);
  const kernels::WholeOfParts whole = kernels::read_part_labels(labels, first);
  return {.values = {},
          .scale = whole.scale,
          .inverse = whole.inverse,
          .tile = key.tiles->tile,
          .seen_largest = whole.largest,
          .seen_counts = whole.counts};
}

}  // namespace tessera::distributed
