#include <tessera/distributed/backward/buffer.h>

#include <algorithm>

#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera::distributed {

FlatLayout FlatLayout::even_chunk(std::span<const Shape> shapes, int shards, int64_t alignment) {
  TS_CHECK(shards >= 1, "FlatLayout", "needs at least one shard; got ", shards);
  FlatLayout layout;
  layout.shards_ = shards;
  layout.parts_.reserve(shapes.size());
  for (const Shape& shape : shapes) {
    const int64_t rows = shape.empty() ? 1 : shape[0];
    const int64_t row_numel = shape.empty() ? 1 : numel_of(shape.slice(1, shape.size()));
    const int64_t chunk = (rows + shards - 1) / shards;
    const int64_t room = aligned_to(chunk * row_numel, alignment);
    layout.parts_.push_back({shape, rows, row_numel, chunk, layout.shard_numel_, room});
    layout.shard_numel_ += room;
  }
  return layout;
}

FlatLayout::Rows FlatLayout::rows(size_t tensor, int shard) const {
  const Part& part = parts_[tensor];
  return {std::min(part.rows, part.chunk * shard), std::min(part.rows, part.chunk * (shard + 1))};
}

FlatLayout::Slice FlatLayout::local_slice(size_t tensor, int shard) const {
  const Part& part = parts_[tensor];
  return {part.offset, rows(tensor, shard).size() * part.row_numel};
}

Shape FlatLayout::local_shape(size_t tensor, int shard) const {
  Shape shape = parts_[tensor].shape;
  const int64_t held = rows(tensor, shard).size();
  if (shape.empty()) return held == 1 ? shape : Shape{0};
  shape[0] = held;
  return shape;
}

FlatBuffer::FlatBuffer(FlatLayout layout, int shard, DType dtype, const Device& device,
                       MemoryCategory category)
    : layout_(std::move(layout)), shard_(shard) {
  const MemoryCategoryGuard guard(category);
  flat_ = raw::zeros({layout_.shard_numel()}, dtype, device);
  views_.reserve(layout_.size());
  for (size_t i = 0; i < layout_.size(); ++i) {
    const Shape shape = layout_.local_shape(i, shard);
    views_.push_back(raw::as_parameter(raw::as_strided(flat_, shape, contiguous_strides(shape),
                                                       layout_.local_slice(i, shard).offset)));
  }
}

}  // namespace tessera::distributed
