// Ops that put elements elsewhere, made of those of shape.cpp and index.cpp: dimensions moved,
// grids, diagonals, windows, and patches as columns.
#include <algorithm>
#include <cstdlib>
#include <numeric>

#include <tessera/autograd/differentiable.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera {

Tensor movedim(const Tensor& x, const Shape& source, const Shape& destination) {
  constexpr std::string_view kName = "movedim";
  TS_CHECK_SHAPE(source.size() == destination.size(), kName,
                 "source and destination must have as many dimensions; got ", source, " and ",
                 destination);
  Shape order = Shape::filled(x.dim(), -1);
  std::vector<bool> moved(static_cast<size_t>(x.dim()), false);
  if (x.dim() == 0) {
    for (int i = 0; i < source.size(); ++i) {
      wrap_dim(source[i], 0, kName);
      wrap_dim(destination[i], 0, kName);
    }
    return permute(x, {});
  }
  for (int i = 0; i < source.size(); ++i) {
    const int from = wrap_dim(source[i], x.dim(), kName);
    const int to = wrap_dim(destination[i], x.dim(), kName);
    TS_CHECK_SHAPE(!moved[static_cast<size_t>(from)] && order[to] < 0, kName,
                   "a dimension is named twice; got ", source, " and ", destination);
    moved[static_cast<size_t>(from)] = true;
    order[to] = from;
  }
  int next = 0;
  for (int64_t& place : order) {  // the others keep their order
    if (place >= 0) continue;
    while (moved[static_cast<size_t>(next)]) ++next;
    place = next++;
  }
  return permute(x, order);
}

TensorList meshgrid(const TensorList& tensors, Indexing indexing) {
  constexpr std::string_view kName = "meshgrid";
  TS_CHECK(!tensors.empty(), kName, "expects at least one tensor");
  Shape sizes;
  for (const Tensor& x : tensors) TS_CHECK(x.defined(), kName, "a tensor is undefined");
  for (const Tensor& x : tensors) {
    TS_CHECK_SHAPE(x.dim() <= 1, kName, "expects tensors of 0 or 1 dimensions; got ", x);
    TS_CHECK_DTYPE(x.dtype() == tensors[0].dtype(), kName, "expects tensors of one dtype; got ",
                   tensors[0], " and ", x, "; convert one with to(dtype)");
    TS_CHECK_DEVICE(x.device() == tensors[0].device(), kName, "expects tensors on one device; got ",
                    tensors[0], " and ", x, "; move one with to(device)");
    sizes.push_back(x.numel());
  }
  TensorList result;
  for (size_t i = 0; i < tensors.size(); ++i) {
    Shape line = Shape::filled(sizes.size(), 1);
    line[static_cast<int>(i)] = tensors[i].numel();
    const Tensor grid = expand(reshape(tensors[i], line), sizes);
    result.push_back(indexing == Indexing::kXy && sizes.size() > 1 ? transpose(grid, 0, 1) : grid);
  }
  return result;
}

Tensor unfold_dim(const Tensor& x, int64_t dim, int64_t size, int64_t step) {
  constexpr std::string_view kName = "unfold";
  const int d = wrap_dim(dim, x.dim(), kName);
  const int64_t length = x.dim() == 0 ? 1 : x.shape()[d];
  TS_CHECK_SHAPE(size >= 0 && size <= length, kName, "windows must fit into dimension ", d, " of ",
                 x, "; got a size of ", size);
  TS_CHECK(step > 0, kName, "the step must be positive; got ", step);
  if (x.dim() == 0) return narrow(reshape(x, {1}), 0, 0, size);
  const int64_t windows = (length - size) / step + 1;
  std::vector<int64_t> places;
  for (int64_t w = 0; w < windows; ++w) {
    for (int64_t i = 0; i < size; ++i) places.push_back(w * step + i);
  }
  Tensor index = tensor(std::span<const int64_t>(places), {static_cast<int64_t>(places.size())});
  index = x.is_meta() ? zeros(index.shape(), {kI64, kMeta}) : index.to(x.device());
  Shape shape = x.shape();
  shape[d] = windows;
  shape.insert(d + 1, size);
  return movedim(reshape(index_select(x, d, index), shape), {d + 1}, {-1});
}

const Op kDiagonal{
    .name = "diagonal", .marks = MarkRule::kMovement, .view = true, .flops_per_element = 0};

Tensor diagonal(const Tensor& x, int64_t offset, int64_t dim1, int64_t dim2) {
  check_defined(kDiagonal, "x", x);
  const int rows = wrap_dim(dim1, x.dim(), kDiagonal.name);
  const int columns = wrap_dim(dim2, x.dim(), kDiagonal.name);
  TS_CHECK_SHAPE(rows != columns, kDiagonal, "the two dimensions must differ; got ", dim1, " and ",
                 dim2, " for ", x);
  const int64_t row = std::max<int64_t>(-offset, 0), column = std::max<int64_t>(offset, 0);
  const int64_t length =
      std::max<int64_t>(std::min(x.size(rows) - row, x.size(columns) - column), 0);
  return differentiable(
      along(kDiagonal, Shape{rows, columns}, false), {x},
      [=](Inputs in) {
        Shape shape, strides;
        for (int d = 0; d < in[0].dim(); ++d) {
          if (d == rows || d == columns) continue;
          shape.push_back(in[0].size(d));
          strides.push_back(in[0].stride(d));
        }
        shape.push_back(length);
        strides.push_back(in[0].stride(rows) + in[0].stride(columns));
        const int64_t first =
            length > 0 ? row * in[0].stride(rows) + column * in[0].stride(columns) : 0;
        return raw::as_strided(in[0], shape, strides, in[0].offset() + first);
      },
      [=](Grads dy, const Saved& s) {
        const Shape& shape = s.input_shape(0);
        const int64_t size = length + std::abs(offset);
        const Tensor square = diag_embed(dy[0], offset);
        return movedim(pad(square, {0, shape[columns] - size, 0, shape[rows] - size}), {-2, -1},
                       {rows, columns});
      });
}

Tensor diag_embed(const Tensor& x, int64_t offset, int64_t dim1, int64_t dim2) {
  constexpr std::string_view kName = "diag_embed";
  const int rows = wrap_dim(dim1, x.dim() + 1, kName), columns = wrap_dim(dim2, x.dim() + 1, kName);
  TS_CHECK_SHAPE(rows != columns, kName, "the two dimensions must differ; got ", dim1, " and ",
                 dim2, " for ", x);
  // Row by row the diagonal is every (size + 1)-th place, from the first one's on.
  const int64_t n = x.size(-1), size = n + std::abs(offset);
  const int64_t first = offset >= 0 ? offset : -offset * size;
  Shape shape = x.shape();
  shape[x.dim() - 1] = n * (size + 1);
  const Tensor spread = reshape(pad(unsqueeze(x, -1), {0, size}), shape);
  shape[x.dim() - 1] = size;
  shape.push_back(size);
  const Tensor matrix = reshape(pad(spread, {first, size * size - first - n * (size + 1)}), shape);
  return contiguous(movedim(matrix, {-2, -1}, {rows, columns}));
}

// ---- unfold, fold -------------------------------------------------------------------------------

namespace {

// Of both spatial dimensions: sizes, and which input place each (kernel place, output place) reads.
struct Patches {
  int64_t kernel[2], output[2], padding[2], padded[2];
  Tensor places[2];  // i64 [kernel * output]
};

Patches patches_of(std::string_view op, const int64_t (&size)[2], const Shape& kernel_size,
                   const Shape& dilation, const Shape& padding, const Shape& stride,
                   const Device& device) {
  const auto value = [&](const char* name, const Shape& values, int d, int64_t least) {
    TS_CHECK(values.size() == 1 || values.size() == 2, op, name,
             " must have one value or two; got ", values);
    const int64_t chosen = values[values.size() == 1 ? 0 : d];
    TS_CHECK(chosen >= least, op, name, " must be at least ", least, "; got ", values);
    return chosen;
  };
  Patches patches;
  for (int d = 0; d < 2; ++d) {
    const int64_t kernel = value("kernel_size", kernel_size, d, 1);
    const int64_t spread = value("dilation", dilation, d, 1), step = value("stride", stride, d, 1);
    patches.padding[d] = value("padding", padding, d, 0);
    patches.kernel[d] = kernel;
    patches.padded[d] = size[d] + 2 * patches.padding[d];
    const int64_t room = patches.padded[d] - spread * (kernel - 1) - 1;
    TS_CHECK_SHAPE(room >= 0, op, "a kernel of ", kernel, " with dilation ", spread,
                   " does not fit into ", size[d], " with padding ", patches.padding[d]);
    patches.output[d] = room / step + 1;
    std::vector<int64_t> places;
    for (int64_t k = 0; k < kernel; ++k) {
      for (int64_t o = 0; o < patches.output[d]; ++o) places.push_back(o * step + k * spread);
    }
    const Tensor index =
        tensor(std::span<const int64_t>(places), {static_cast<int64_t>(places.size())});
    patches.places[d] = device.is_meta() ? zeros(index.shape(), {kI64, kMeta}) : index.to(device);
  }
  return patches;
}

}  // namespace

Tensor unfold(const Tensor& x, const Shape& kernel_size, const Shape& dilation,
              const Shape& padding, const Shape& stride) {
  constexpr std::string_view kName = "unfold";
  TS_CHECK_SHAPE((x.dim() == 3 || x.dim() == 4) && x.size(-3) > 0, kName,
                 "expects [N, C, H, W] or [C, H, W] with channels; got ", x);
  if (x.dim() == 3) {
    return squeeze(unfold(unsqueeze(x, 0), kernel_size, dilation, padding, stride), 0);
  }
  const Patches p =
      patches_of(kName, {x.size(2), x.size(3)}, kernel_size, dilation, padding, stride, x.device());
  const int64_t N = x.size(0), C = x.size(1);
  const Tensor padded = pad(x, {p.padding[1], p.padding[1], p.padding[0], p.padding[0]});
  const Tensor read = index_select(index_select(padded, 2, p.places[0]), 3, p.places[1]);
  const Tensor parts = reshape(read, {N, C, p.kernel[0], p.output[0], p.kernel[1], p.output[1]});
  return reshape(permute(parts, {0, 1, 2, 4, 3, 5}),
                 {N, C * p.kernel[0] * p.kernel[1], p.output[0] * p.output[1]});
}

Tensor fold(const Tensor& x, const Shape& output_size, const Shape& kernel_size,
            const Shape& dilation, const Shape& padding, const Shape& stride) {
  constexpr std::string_view kName = "fold";
  TS_CHECK_SHAPE((x.dim() == 2 || x.dim() == 3) && x.size(-2) > 0, kName,
                 "expects [N, C * KH * KW, L] or [C * KH * KW, L]; got ", x);
  if (x.dim() == 2) {
    return squeeze(fold(unsqueeze(x, 0), output_size, kernel_size, dilation, padding, stride), 0);
  }
  TS_CHECK(output_size.size() == 1 || output_size.size() == 2, kName,
           "output_size must have one value or two; got ", output_size);
  const int64_t H = output_size[0], W = output_size.back();
  TS_CHECK_SHAPE(H > 0 && W > 0, kName, "output_size must be positive; got ", output_size);
  const Patches p = patches_of(kName, {H, W}, kernel_size, dilation, padding, stride, x.device());
  const int64_t window = p.kernel[0] * p.kernel[1], N = x.size(0), C = x.size(1) / window;
  TS_CHECK_SHAPE(x.size(1) % window == 0, kName, "dimension 1 must be a multiple of ", window,
                 ", the elements of a patch; got ", x);
  TS_CHECK_SHAPE(x.size(2) == p.output[0] * p.output[1], kName, "expects ",
                 p.output[0] * p.output[1], " columns, ", p.output[0], " x ", p.output[1],
                 " patches of ", output_size, "; got ", x);
  const Tensor parts = permute(
      reshape(x, {N, C, p.kernel[0], p.kernel[1], p.output[0], p.output[1]}), {0, 1, 2, 4, 3, 5});
  const int64_t rows = p.kernel[0] * p.output[0], columns = p.kernel[1] * p.output[1];
  const TensorOptions options{x.dtype(), x.device()};
  const Tensor lines = index_add(zeros({N, C, rows, p.padded[1]}, options), 3, p.places[1],
                                 reshape(parts, {N, C, rows, columns}));
  const Tensor padded =
      index_add(zeros({N, C, p.padded[0], p.padded[1]}, options), 2, p.places[0], lines);
  return contiguous(narrow(narrow(padded, 2, p.padding[0], H), 3, p.padding[1], W));
}

}  // namespace tessera
