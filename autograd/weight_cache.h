// Copies of a weight in the forms that products read in its place: another dtype, transposed, with
// a scale.
//
//     const Tensor low = weight_cache::get(weight, {.dtype = kBF16});  // autocast's
//     const Tensor f8 = weight_cache::get(weight, {kF8E4M3, WeightLayout::kTransposed, scale});
//     const auto q = weight_cache::quantized(weight, {.tile = kernels::ScaleTile::row()});
//
// One leaf may have several; they hang on it and go with it. Each is stamped with what it was made
// from: the leaf's version, bytes and geometry, the scale's version. While the stamp holds, a copy
// costs nothing. Whoever writes the leaf in another way than through begin_write() (copy_, a state
// that is loaded, set_data), or writes the scale, makes it stale, and the next get() makes it
// again, as a new tensor: a graph that saved the old one keeps its values.
//
// An optimizer writes copies in place in the pass that writes the leaf, so that a weight is cast
// once in a training; a graph that saved such a copy before refuses to run backward, as one that
// saved the leaf itself does.
//
// In the capture of a graph (core/cuda/graph.h) a current copy is read by every replay, which
// throws ConfigError where it is current no more; what is not current is made by each replay anew
// and not kept.
//
// Bytes are counted under MemoryCategory::kWeightCache. Calls for one leaf may come from several
// threads, each in its own context; who writes a leaf must be alone with it.
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
  // One f32 beside the leaf, multiplied in before the rounding; undefined: 1. The tensor itself is
  // part of the key, its value is not: keep one a weight and write to it, which makes the copy
  // stale.
  Tensor scale = {};
  // Quantised with a scale a tile (core/kernels/fp8/quantize.h), of the leaf's own values where
  // `scale` is not given. Filled by quantized().
  std::optional<kernels::QuantizeOptions> tiles = {};

  // The leaf's values rounded to a floating dtype of 16 bits and nothing else: what to() gives, in
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

// The copy; made where there is none or a stale one. No gradient flows through it. Plain casts
// round as to() does; all others end at the dtype's largest finite number, are contiguous, and take
// what kernels::cast_transpose takes (a transposed one a matrix), which makes both layouts of one
// dtype and scale in one read. Throws ValueError for the leaf's own dtype without a change,
// DTypeError, ShapeError.
Tensor get(const Tensor& leaf, const WeightKey& key);

// The leaf, a matrix, quantised: bytes and scales, made as get() makes copies and kept as those
// are; on a GPU by rows and by columns, but for scales of rows or columns, which have the one copy
// that products read. `is_new`: told whether they were made by this call, which a
// GPU notes where `noted` says.
kernels::Quantized quantized(const Tensor& leaf, const kernels::QuantizeOptions& options,
                             const Tensor& scale = {}, bool* is_new = nullptr,
                             const kernels::QuantizeWants& noted = {});

// The copy if there is one and it is current, else undefined. Looking is no use: see begin_write().
Tensor find(const Tensor& leaf, const WeightKey& key);

// For who is about to write every element of `leaf`: the copies that were got since the last
// begin_write(). Those that were not are let go, so that a training that left a precision pays
// nothing for it. Write to the tensors what can be written in the same pass and name it to
// mark_written() after the leaf was written; the others are stale then. A copy that is no longer
// the leaf's (a graph writes to it still) is passed over.
std::vector<Copy> begin_write(const Tensor& leaf);
void mark_written(const Tensor& leaf, const Copy& copy);

// Frees a copy's bytes at once, also where a graph saved it. Such a graph refuses to run backward
// until get() has made the copy again from unchanged values: into the same tensor, which it then
// reads as if nothing had been. So sharded training holds a copy for as long as the gathered weight
// only. False where there is none.
bool release(const Tensor& leaf, const WeightKey& key);
void release(const Tensor& leaf);  // all copies
// Makes the released copies again that graphs wait for.
void restore(const Tensor& leaf);

// The copy without its values, for who has them in its dtype from elsewhere and writes them next: a
// weight that was cast before it travelled, and of which there may be no bytes here. It is current
// as if get() had made it, and a released one that a graph waits for is the same tensor. Plain
// casts alone; memory of the category in scope.
Tensor provide(const Tensor& leaf, const WeightKey& key);
// The same of a copy that quantized() gives. `about`: all of that but the values, which the caller
// writes into the result, f8[leaf's shape]; and then calls turn(), by which a GPU gets its copy by
// columns.
Tensor provide(const Tensor& leaf, const WeightKey& key, kernels::Quantized about);
void turn(const Tensor& leaf, const WeightKey& key);

// Bytes that the copies of a leaf hold.
int64_t bytes(const Tensor& leaf);

}  // namespace weight_cache
}  // namespace tessera
