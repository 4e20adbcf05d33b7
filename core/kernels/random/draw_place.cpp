#include <tessera/core/kernels/random/draw_place.h>

#include <algorithm>

#include <tessera/core/error.h>

namespace tessera::kernels {

bool DrawPlace::in_draws() const {
  bool result = first % 4 == 0 && (levels == 0 || sizes[levels - 1] % 4 == 0);
  for (int k = 0; k + 1 < levels; ++k) result = result && strides[k] % 4 == 0;
  return result;
}

DrawPlace DrawPlace::of(const Shape& shape, std::span<const DimCut> cuts) {
  DrawPlace place;
  if (cuts.empty()) return place;
  TS_CHECK(cuts.size() < kMostLevels, "dropout", "goes through at most ", kMostLevels - 1,
           " cuts of a tensor; got ", cuts.size());
  // Levels from the last dimension on. One ends with the chunk of a cut dimension.
  int64_t size = 1, stride = 1;
  int64_t step = 1;  // in the whole, from an index of dimension d to the next
  const auto add_level = [&](int64_t next_stride) {
    place.sizes[place.levels] = size, place.strides[place.levels] = stride;
    ++place.levels;
    size = 1, stride = next_stride;
  };
  for (int d = shape.size() - 1; d >= 0; --d) {
    const auto cut = std::ranges::find_if(cuts, [d](const DimCut& each) { return each.dim == d; });
    if (cut == cuts.end()) {
      size *= shape[d];
      step *= shape[d];
      continue;
    }
    const int64_t chunk = shape[d] / cut->blocks, block = chunk * cut->parts;
    place.first += step * chunk * cut->part;
    size *= chunk;
    add_level(step * block);
    size = cut->blocks;
    step *= block * cut->blocks;
  }
  add_level(0);
  std::reverse(place.sizes, place.sizes + place.levels);
  std::reverse(place.strides, place.strides + place.levels);
  return place;
}

}  // namespace tessera::kernels
