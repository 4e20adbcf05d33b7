#include <tessera/distributed/mesh/box.h>

#include <algorithm>
#include <cstring>
#include <ostream>

#include <tessera/core/error.h>

namespace tessera::distributed {
namespace {

// Of a row-major piece: elements from its start to the first element of `part`.
int64_t position_in(const Box& piece, const Shape& strides, const Shape& coordinates) {
  int64_t position = 0;
  for (int d = 0; d < piece.dim(); ++d) position += (coordinates[d] - piece.offset[d]) * strides[d];
  return position;
}

}  // namespace

Box Box::rows(int64_t begin, int64_t end) const {
  Box result = *this;
  result.offset[0] += begin;
  result.extent[0] = end - begin;
  return result;
}

std::ostream& operator<<(std::ostream& out, const Box& box) {
  out << '[';
  for (int d = 0; d < box.dim(); ++d) {
    out << (d > 0 ? ", " : "") << box.offset[d] << ':' << box.end(d);
  }
  return out << ']';
}

bool lies_within(const Box& box, const Shape& shape) {
  if (box.offset.size() != shape.size() || box.extent.size() != shape.size()) return false;
  for (int d = 0; d < shape.size(); ++d) {
    if (box.offset[d] < 0 || box.extent[d] < 0 || box.offset[d] > shape[d] ||
        box.extent[d] > shape[d] - box.offset[d]) {
      return false;
    }
  }
  return true;
}

std::optional<Box> intersect(const Box& a, const Box& b) {
  Box result = a;
  for (int d = 0; d < a.dim(); ++d) {
    result.offset[d] = std::max(a.offset[d], b.offset[d]);
    result.extent[d] = std::min(a.end(d), b.end(d)) - result.offset[d];
    if (result.extent[d] <= 0) return std::nullopt;
  }
  return result;
}

std::vector<Box> boxes_of_run(const Shape& shape, int64_t begin, int64_t end) {
  std::vector<Box> boxes;
  const Shape strides = contiguous_strides(shape);
  while (begin < end) {
    Box box{shape, Shape::filled(shape.size(), 1)};
    int64_t rest = begin;
    for (int d = 0; d < shape.size(); ++d) {
      box.offset[d] = rest / strides[d];
      rest %= strides[d];
    }
    // Rows of the outermost dimension of which one begins here and lies in the run.
    int64_t taken = 1;
    for (int d = 0; d < shape.size(); ++d) {
      if (begin % strides[d] != 0 || end - begin < strides[d]) continue;
      box.extent[d] = std::min((end - begin) / strides[d], shape[d] - box.offset[d]);
      taken = box.extent[d] * strides[d];
      for (int inner = d + 1; inner < shape.size(); ++inner) box.extent[inner] = shape[inner];
      break;
    }
    boxes.push_back(box);
    begin += taken;
  }
  return boxes;
}

std::optional<std::string> tiling_problem(const Shape& shape, std::span<const Box> boxes) {
  // Disjoint boxes within the shape that hold as many elements as it has leave none out.
  const int64_t needed = numel_of(shape);
  std::vector<const Box*> sorted;
  for (const Box& box : boxes) {
    if (box.numel() > 0) sorted.push_back(&box);
  }
  if (shape.empty()) {
    if (sorted.size() == 1) return std::nullopt;
    return detail::concatenate("its one element lies in ", sorted.size(), " parts");
  }
  std::ranges::sort(sorted, {}, [](const Box* box) { return box->offset[0]; });
  std::vector<const Box*> open;  // those that reach the rows of the current one
  int64_t held = 0, reached = 0;
  for (const Box* box : sorted) {
    if (box->offset[0] > reached) {
      return detail::concatenate("rows [", reached, ":", box->offset[0], "] lie in no part");
    }
    std::erase_if(open, [&](const Box* other) { return other->end(0) <= box->offset[0]; });
    for (const Box* other : open) {
      if (const auto both = intersect(*box, *other)) {
        return detail::concatenate("the parts ", *other, " and ", *box, " share ", *both);
      }
    }
    open.push_back(box);
    reached = std::max(reached, box->end(0));
    held += box->numel();  // of disjoint parts: at most `needed`
  }
  if (held == needed) return std::nullopt;
  if (reached < shape[0]) {
    return detail::concatenate("rows [", reached, ":", shape[0], "] lie in no part");
  }
  return detail::concatenate("its parts hold ", held, " of ", needed, " elements");
}

void copy_part(const Box& part, const std::byte* from, const Box& from_box, std::byte* to,
               const Box& to_box, size_t width) {
  if (part.numel() == 0) return;
  const Shape from_strides = contiguous_strides(from_box.extent);
  const Shape to_strides = contiguous_strides(to_box.extent);
  // Trailing dimensions that both pieces hold whole, and the one before them, are one run.
  int last = part.dim();
  int64_t run = 1;
  while (last > 0) {
    --last;
    run *= part.extent[last];
    if (part.extent[last] != from_box.extent[last] || part.extent[last] != to_box.extent[last]) {
      break;
    }
  }
  Shape at = part.offset;
  for (;;) {
    std::memcpy(to + static_cast<size_t>(position_in(to_box, to_strides, at)) * width,
                from + static_cast<size_t>(position_in(from_box, from_strides, at)) * width,
                static_cast<size_t>(run) * width);
    int d = last - 1;
    for (; d >= 0 && ++at[d] == part.end(d); --d) at[d] = part.offset[d];
    if (d < 0) return;
  }
}

}  // namespace tessera::distributed
