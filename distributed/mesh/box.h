// Boxes: rectangular parts of tensors, in the tensor's own coordinates. A checkpoint is a set of
// boxes; loading for another number of ranks is their intersection.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <tessera/core/shape.h>

namespace tessera::distributed {

// Elements [offset, offset + extent) of every dimension. For a scalar both are empty.
struct Box {
  Shape offset;
  Shape extent;

  static Box whole(const Shape& shape) { return {Shape::filled(shape.size(), 0), shape}; }
  // Rows [begin, end) of dimension 0 of this box, counted within it. Not of a scalar's.
  Box rows(int64_t begin, int64_t end) const;

  int dim() const { return extent.size(); }
  int64_t numel() const { return numel_of(extent); }
  int64_t end(int dim) const { return offset[dim] + extent[dim]; }
  friend bool operator==(const Box&, const Box&) = default;
};
std::ostream& operator<<(std::ostream& out, const Box& box);  // [0:4, 8:16]

// Whether the box lies within a tensor of that shape, with no side negative. Any values.
bool lies_within(const Box& box, const Shape& shape);
// What two boxes of one tensor share; nothing where that has no elements.
std::optional<Box> intersect(const Box& a, const Box& b);

// The elements [begin, end) of a tensor's row-major order as boxes: those of one box behind those
// of the one before. At most 2 * dim - 1, of a scalar one; none where there are no elements.
std::vector<Box> boxes_of_run(const Shape& shape, int64_t begin, int64_t end);

// Why the boxes are not the tensor cut into parts, each element in one: "elements [4:8] lie in no
// part"; nothing where they are. The boxes lie within the shape. O(n log n) for parts that are cut
// along dimension 0.
std::optional<std::string> tiling_problem(const Shape& shape, std::span<const Box> boxes);

// Copies the elements of `part` from one row-major piece to another, which both hold it.
// `width`: bytes an element.
void copy_part(const Box& part, const std::byte* from, const Box& from_box, std::byte* to,
               const Box& to_box, size_t width);

}  // namespace tessera::distributed
