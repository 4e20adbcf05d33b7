// Cached copies of a weight in the forms that products read: another dtype, transposed, with a
// scale.
//
//     const Tensor low = weight_cache::get(weight, {.dtype = kBF16});  // autocast's
//     const Tensor f8 = weight_cache::get(weight, {kF8E4M3, WeightLayout::kTransposed, scale});
//     const auto q = weight_cache::quantized(weight, {.tile = kernels::ScaleTile::row()});
//
// A leaf may have several copies; it owns them. Each is stamped with its source: the leaf's
// version, memory and geometry, the scale's version. While the stamp is current, a copy costs
// nothing. Writing the leaf in another way than through begin_write() (copy_, a loaded state,
// set_data), or writing the scale, makes it stale, and the next get() makes a new tensor: a graph
// that saved the old one keeps its values.
//
// An optimizer writes copies in place in the pass that writes the leaf, so that a weight is not
// cast again; a graph that saved such a copy before refuses to run backward, like one that saved
// the leaf itself.
//
// In the capture of a graph (core/cuda/graph.h) every replay reads a copy that is current, and
// throws ConfigError once it is not; each replay makes stale copies again and does not keep them.
//
// Bytes are counted under MemoryCategory::kWeightCache. Several threads may make calls for one
// leaf, each in its own context; writing a leaf needs exclusive access.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <tessera/core/kernels/fp8/quantize.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera {

enum class WeightLayout : uint8_t {
  kAsIs,        // the leaf's shape
  kTransposed,  // [N, M] of a leaf [M, N], contiguous
};

// Which copy of a leaf.
struct WeightKey {
  DType dtype;
  WeightLayout layout = WeightLayout::kAsIs;
  // One f32 on the leaf's device, multiplied in before the rounding; undefined: 1. The tensor
  // itself is part of the key, its value is not: keep one for each weight and write to it, which
  // makes the copy stale.
  Tensor scale = {};
  // Quantized with a scale for each tile (core/kernels/fp8/quantize.h), from the leaf's own values
  // if `scale` is not given. Filled by quantized().
  std::optional<kernels::QuantizeOptions> tiles = {};

  // The leaf's values rounded to a 16-bit floating dtype and nothing else: the result of to(), in
  // the leaf's strides.
  bool is_plain_cast() const;
  friend bool operator==(const WeightKey& a, const WeightKey& b) {
    return a.dtype == b.dtype && a.layout == b.layout && a.scale.is(b.scale) && a.tiles == b.tiles;
  }
};

namespace weight_cache {

struct Copy {
  WeightKey key;
  Tensor tensor;
};

// Returns the copy; makes it if there is none or a stale one. No gradient flows through it. Plain
// casts round as to() does; all others saturate at the dtype's largest finite number, are
// contiguous, and take what kernels::cast_transpose takes (a transposed one needs a matrix), which
// makes both layouts of one dtype and scale in one read. Throws ValueError for the leaf's own dtype
// without a change, DTypeError, ShapeError.
Tensor get(const Tensor& leaf, const WeightKey& key);

// The leaf, a matrix, quantized: bytes and scales, made and kept as get() does; on a GPU by rows
// and by columns, except for scales of rows or columns, which have the one copy that products read.
// `is_new`: whether this call made them, which a GPU records where `noted` says.
kernels::Quantized quantized(const Tensor& leaf, const kernels::QuantizeOptions& options,
                             const Tensor& scale = {}, bool* is_new = nullptr,
                             const kernels::QuantizeWants& noted = {});

// The copy if there is a current one, else undefined. Does not count as a use: see begin_write().
Tensor find(const Tensor& leaf, const WeightKey& key);

// Called before every element of `leaf` is written: returns the copies that were used since the
// last begin_write() and frees the others, so that a training that changed its precision does not
// pay for them. Write to the tensors that can be written in the same pass and pass them to
// mark_written() after the leaf was written; the others are stale then. A copy that is no longer
// the leaf's (a graph still writes to it) is skipped.
std::vector<Copy> begin_write(const Tensor& leaf);
void mark_written(const Tensor& leaf, const Copy& copy);

// Frees a copy's memory at once, also if a graph saved it. Such a graph refuses to run backward
// until get() has made the copy again from unchanged values: into the same tensor, which it then
// reads. So sharded training keeps a copy only as long as the unsharded weight. False if there is
// none.
bool release(const Tensor& leaf, const WeightKey& key);
void release(const Tensor& leaf);  // all copies
// Makes released copies again that graphs need.
void restore(const Tensor& leaf);

// Returns the copy without its values, for a caller that has them in its dtype and writes them
// next: a weight that was cast before the all-gather, and of which there may be no memory here. It
// counts as current, as if get() had made it, and a released one that a graph needs is the same
// tensor. Plain casts only; memory of the category in scope.
Tensor provide(const Tensor& leaf, const WeightKey& key);
// The same for a copy of quantized(). `about`: everything except the values, which the caller
// writes into the result, f8[leaf's shape]; it then calls turn(), by which a GPU gets its copy by
// columns.
Tensor provide(const Tensor& leaf, const WeightKey& key, kernels::Quantized about);
void turn(const Tensor& leaf, const WeightKey& key);

// Bytes of all copies of a leaf.
int64_t bytes(const Tensor& leaf);

}  // namespace weight_cache
}  // namespace tessera
