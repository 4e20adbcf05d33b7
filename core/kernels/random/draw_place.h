// Which numbers of a stream the elements of a part draw, where ranks hold the parts of a tensor:
// those that the same elements draw in the whole.
#pragma once

#include <cstdint>
#include <span>

#include <tessera/core/macros.h>
#include <tessera/core/shape.h>

namespace tessera {

// A dimension of a part. The whole's is `blocks` equal blocks side by side, each of which is cut in
// `parts` equal chunks; the part has chunk `part` of each.
struct DimCut {
  int dim = 0;
  int64_t blocks = 1, parts = 1, part = 0;
};

}  // namespace tessera

namespace tessera::kernels {

// The part as a view of the whole: element (i0, i1, ...) of `sizes` has number
// first + i0 strides[0] + i1 strides[1]... The last stride is 1. Without levels: a tensor that is
// whole, whose element i has number i.
struct DrawPlace {
  static constexpr int kMostLevels = 5;  // one more than there are cuts
  int64_t first = 0;
  int levels = 0;
  int64_t sizes[kMostLevels] = {}, strides[kMostLevels] = {};

  TS_HD bool is_part() const { return levels > 0; }
  // Of element i of the part, row by row.
  TS_HD int64_t number_of(int64_t i) const {
    if (levels == 0) return i;
    int64_t number = first;
    for (int k = levels - 1; k > 0; --k) {
      number += i % sizes[k] * strides[k];
      i /= sizes[k];
    }
    return number + i * strides[0];
  }
  // Elements that have numbers one after the other, of a part with `numel` ones.
  int64_t run(int64_t numel) const { return levels == 0 ? numel : sizes[levels - 1]; }
  // Whether four numbers of one draw belong to four neighbours of the part.
  bool in_draws() const;

  // shape: the part's. At most four cuts, no two of one dimension.
  static DrawPlace of(const Shape& shape, std::span<const DimCut> cuts);
};

}  // namespace tessera::kernels
