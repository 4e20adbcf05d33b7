// The fp8 copies of weights, for code that moves weights: sharded training sends the bytes that
// products in fp8 read in place of f32 values (distributed/fully_shard/fp8_part.h).
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <unordered_map>

#include <tessera/autograd/fp8/layer.h>
#include <tessera/autograd/weight_cache.h>

namespace tessera {

// Layers in fp8, by the addresses of their weights.
using Fp8Places = std::unordered_map<const Tensor*, std::shared_ptr<Fp8Linear>>;

// The key of the copy that these layers read of the weight in `places`, with one scale for all of
// it. Absent if a place belongs to no layer, if layers quantize differently or with scales of their
// own, and if a weight has several scales (rows, blocks).
std::optional<WeightKey> fp8_key_of(const Fp8Places& layers, std::span<Tensor* const> places);

}  // namespace tessera
