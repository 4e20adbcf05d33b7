// Weights that products in fp8 read, for who moves weights: sharded training sends the bytes
// that these products read in place of f32 values (distributed/fully_shard/fp8_part.h).
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <unordered_map>

#include <tessera/autograd/fp8/layer.h>
#include <tessera/autograd/weight_cache.h>

namespace tessera {

// Layers in fp8, by the places of their weights.
using Fp8Places = std::unordered_map<const Tensor*, std::shared_ptr<Fp8Linear>>;

// The copy that these layers read of the weight that stands in `places`, one scale for all of it.
// None where a place is no layer's, where layers quantize in different ways or with scales of their
// own, and where a weight has several scales: rows, blocks.
std::optional<WeightKey> fp8_key_of(const Fp8Places& layers, std::span<Tensor* const> places);

}  // namespace tessera
