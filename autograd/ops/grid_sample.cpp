#include <cmath>

#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/differentiable.h>
#include <tessera/autograd/ops.h>

namespace tessera {
namespace {

constexpr std::string_view kGridSample = "grid_sample";

// From [-1, 1] to places of a dimension, and back into it as `padding` says.
Tensor places_of(const Tensor& coordinate, int64_t size, GridPadding padding, bool align_corners) {
  const double extent = static_cast<double>(size), last = extent - 1;
  Tensor place = align_corners ? mul(add(coordinate, 1), last / 2)
                               : mul(sub(mul(add(coordinate, 1), extent), 1), 0.5);
  if (padding == GridPadding::kZeros) return place;
  if (padding == GridPadding::kReflection) {  // at the outer pixels' centres, or their borders
    const double low = align_corners ? 0 : -0.5, span = align_corners ? last : extent;
    if (span == 0) {
      place = mul(place, 0);
    } else {
      const Tensor away = abs(sub(place, low)), rest = fmod(away, span);
      const Tensor odd = eq(remainder(floor_divide(detach(away), span), 2), 1);
      place = add(where(odd, rsub(span, rest), rest), low);
    }
  }
  // What is no number lies at the first place, as in torch.
  return masked_fill(clamp(place, 0.0, last), isnan(place), 0);
}

}  // namespace

// A corner at a time: rows of channels by their place, weighted. Coordinates are f32, f64 for f64.
Tensor grid_sample(const Tensor& given, const Tensor& given_grid, Interpolation mode,
                   GridPadding padding, bool align_corners) {
  const Tensor x = detail::autocast_float32(given), grid = detail::autocast_float32(given_grid);
  const int spatial = x.dim() - 2;
  TS_CHECK_SHAPE(spatial == 2 || spatial == 3, kGridSample,
                 "expects [N, C, H, W] or [N, C, D, H, W]; got ", x);
  TS_CHECK_SHAPE(grid.dim() == x.dim() && grid.size(-1) == spatial, kGridSample,
                 "expects a grid of ", x.dim(), " dimensions with ", spatial,
                 " coordinates in the last; got ", grid);
  TS_CHECK_SHAPE(grid.size(0) == x.size(0), kGridSample, "x and grid must have as many samples; ",
                 "got ", x, " and ", grid);
  TS_CHECK_DTYPE(is_floating(x.dtype()) && !is_fp8(x.dtype()) && x.dtype() == grid.dtype(),
                 kGridSample, "expects x and grid of one dtype of f64, f32, f16 and bf16; got ", x,
                 " and ", grid);
  const int64_t N = x.size(0), C = x.size(1);
  int64_t plane = 1, points = 1;
  Shape to_rows = {0}, result_shape = {N};
  for (int d = 0; d < spatial; ++d) {
    TS_CHECK_SHAPE(x.size(2 + d) > 0, kGridSample, "expects planes that are not empty; got ", x);
    plane *= x.size(2 + d);
    points *= grid.size(1 + d);
    to_rows.push_back(2 + d);
    result_shape.push_back(grid.size(1 + d));
  }
  to_rows.push_back(1);
  result_shape.push_back(C);
  const DType computed = x.dtype() == kF64 ? kF64 : kF32;
  const bool nearest = mode == Interpolation::kNearest;
  const Tensor rows = reshape(to(permute(x, to_rows), computed), {N * plane, C});
  const Tensor coordinates = reshape(to(grid, computed), {N, points, spatial});

  TensorList places;
  for (int d = 0; d < spatial; ++d) {  // the last coordinate is the first dimension's
    const Tensor place =
        places_of(select(coordinates, 2, spatial - 1 - d), x.size(2 + d), padding, align_corners);
    places.push_back(nearest ? round(place) : place);
  }
  const Tensor sample = mul(reshape(arange(0, N, 1, kI64, x.device()), {N, 1}), plane);
  const Tensor all_of_them = ones({}, {.dtype = kBool, .device = x.device()});
  Tensor result;
  const int corners = nearest ? 1 : 1 << spatial;
  for (int corner = 0; corner < corners; ++corner) {
    Tensor row = expand(sample, {N, points}), weight, inside;
    int64_t stride = plane;
    for (int d = 0; d < spatial; ++d) {
      const int64_t size = x.size(2 + d);
      stride /= size;
      const bool upper = (corner >> d & 1) != 0;
      const Tensor& exact = places[static_cast<size_t>(d)];
      const Tensor lower = floor(detach(exact)), place = upper ? add(lower, 1) : lower;
      // A NaN is not inside.
      const Tensor within = logical_and(ge(place, 0), le(place, static_cast<double>(size - 1)));
      row = add(row, mul(to(masked_fill(place, logical_not(within), 0), kI64), stride));
      inside = d == 0 ? within : logical_and(inside, within);
      // Of the nearest it is 1, with gradients of 0 for the grid.
      const Tensor off = nearest ? masked_fill(exact, all_of_them, 0) : sub(exact, lower);
      const Tensor share = upper ? off : rsub(1, off);
      weight = d == 0 ? share : mul(weight, share);
    }
    const Tensor values = reshape(index_select(rows, 0, reshape(row, {-1})), {N, points, C});
    const Tensor outside = unsqueeze(logical_not(inside), 2);
    // A coordinate that is no number shows in planes, and in volumes is outside, as in torch.
    weight = unsqueeze(weight, 2);
    const Tensor part = mul(masked_fill(values, outside, 0),
                            spatial == 2 ? weight : masked_fill(weight, outside, 0));
    result = corner == 0 ? part : add(result, part);
  }
  return contiguous(movedim(to(reshape(result, result_shape), x.dtype()), {-1}, {1}));
}

}  // namespace tessera
