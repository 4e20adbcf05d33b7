// Weights that products in fp8 read, for who moves weights: sharded training sends the bytes
// that these products read in place of f32 values (distributed/fully_shard/fp8_part.h).
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <unordered_map>

#include <tessera/autograd/fp8/linear.h>
#include <tessera/autograd/op.h>

namespace tessera {

struct WeightKey;  // autograd/weight_cache.h

// Layers in fp8, by the places of their weights.
using Fp8Places = std::unordered_map<const Tensor*, std::shared_ptr<Fp8Linear>>;

// The copy that these layers read of the weight that stands in `places`, one scale for all of it.
// None where a place is no layer's, where layers quantise in different ways or with scales of their
// own, and where a weight has several scales: rows, blocks.
std::optional<WeightKey> fp8_key_of(const Fp8Places& layers, std::span<Tensor* const> places);

namespace detail {
// Its second input is a weight, of which it reads the quantised copy that is kept.
extern const Op kFp8Linear;
extern const Op kFp8LinearGeluLinear;  // its second and fourth
// Whether that is how `op` reads its input of this number.
inline bool reads_fp8(const Op& op, size_t input) {
  return (&op == &kFp8Linear && input == 1) ||
         (&op == &kFp8LinearGeluLinear && (input == 1 || input == 3));
}
}  // namespace detail

namespace weight_cache {

// As provide() in weight_cache.h, of a copy that quantized() gives. `about`: all of that but the
// values, which the caller writes into the result, f8[leaf's shape]; and then calls turn(), by
// which a GPU gets its copy by columns.
Tensor provide(const Tensor& leaf, const WeightKey& key, kernels::Quantized about);
void turn(const Tensor& leaf, const WeightKey& key);

}  // namespace weight_cache
}  // namespace tessera
