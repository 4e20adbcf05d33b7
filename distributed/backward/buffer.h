// Flat buffers: many tensors of one dtype in one piece of memory, whole or as this rank's shard.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <vector>

#include <tessera/core/dtype.h>
#include <tessera/core/memory/allocator.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera::distributed {

// A tensor in a flat buffer begins at a multiple of 16 bytes: a GPU moves 16 bytes at once, and
// matrix products expect their operands so. Padding is 0, so that reductions of whole buffers are
// those of the tensors; readers of tensors never see it.
//
// In elements, of a buffer whose parts lie in any of these dtypes at the same places.
inline int64_t alignment_of(std::initializer_list<DType> dtypes) {
  int64_t smallest = 16;
  for (const DType dtype : dtypes) smallest = std::min<int64_t>(smallest, size_of(dtype));
  return 16 / smallest;
}
inline int64_t aligned_to(int64_t count, int64_t alignment) {
  return (count + alignment - 1) / alignment * alignment;
}

// The positions of rows of several tensors that are sharded along dimension 0 into `shards` shards:
// geometry only, known on every rank without communication.
//
// EvenChunk, the contract of sharded training: a tensor of R rows gives ceil(R / shards) rows to
// each shard, less or none to the last ones; a shard's local buffer holds its parts one behind the
// other, with the room of ceil(R / shards) rows for each, so that all shards are of one size and
// one collective moves them all. A gathered buffer is the shards' local buffers in order. With one
// shard nothing is cut. A room is a multiple of `alignment` elements. A scalar is one row.
class FlatLayout {
 public:
  struct Rows {
    int64_t begin = 0, end = 0;
    int64_t size() const { return end - begin; }
    friend bool operator==(const Rows&, const Rows&) = default;
  };
  struct Slice {
    int64_t offset = 0, numel = 0;  // in elements
    friend bool operator==(const Slice&, const Slice&) = default;
  };

  FlatLayout() = default;
  // Throws ValueError for less than one shard.
  static FlatLayout even_chunk(std::span<const Shape> shapes, int shards, int64_t alignment);

  size_t size() const { return parts_.size(); }
  int shards() const { return shards_; }
  int64_t shard_numel() const { return shard_numel_; }  // of a local buffer, padding included
  int64_t gathered_numel() const { return shard_numel_ * shards_; }

  Rows rows(size_t tensor, int shard) const;          // of dimension 0, that the shard holds
  Slice local_slice(size_t tensor, int shard) const;  // in the shard's local buffer
  int64_t room(size_t tensor) const { return parts_[tensor].room; }  // there, padding included
  Shape local_shape(size_t tensor, int shard) const;

 private:
  struct Part {
    Shape shape;
    int64_t rows, row_numel, chunk;  // chunk: rows for each shard
    int64_t offset, room;            // in a local buffer
  };
  std::vector<Part> parts_;
  int shards_ = 1;
  int64_t shard_numel_ = 0;
};

// One allocation with a tensor over each part of one shard.
class FlatBuffer {
 public:
  FlatBuffer() = default;
  // Zeros.
  FlatBuffer(FlatLayout layout, int shard, DType dtype, const Device& device,
             MemoryCategory category);

  bool defined() const { return flat_.defined(); }
  const FlatLayout& layout() const { return layout_; }
  int shard() const { return shard_; }
  const Tensor& flat() const { return flat_; }  // [shard_numel], padding included
  int64_t bytes() const { return flat_.defined() ? flat_.nbytes() : 0; }
  // Contiguous, with a version counter of its own.
  const Tensor& view(size_t tensor) const { return views_[tensor]; }

 private:
  FlatLayout layout_;
  int shard_ = 0;
  Tensor flat_;
  std::vector<Tensor> views_;
};

}  // namespace tessera::distributed
