// Views, which share elements with their input, and copies that rearrange.
#include <algorithm>
#include <limits>
#include <memory>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/differentiable.h>
#include <tessera/autograd/fp8/norm_call.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/copy/shape.h>
#include <tessera/core/tensor/element_guard.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera {
namespace {

using Maps = std::vector<std::vector<int64_t>>;

}  // namespace

// ---- Views --------------------------------------------------------------------------------------

Tensor detach(const Tensor& x) {
  write_normalised(x);
  const Tensor result = raw::alias(x);
  copy_guard(x, result);
  return result;
}

const Op kView{.name = "view", .marks = MarkRule::kMovement, .view = true, .flops_per_element = 0};

Tensor view(const Tensor& x, const Shape& shape) {
  check_defined(kView, "x", x);
  return differentiable(
      shaped(kView, shape), {x}, [=](Inputs in) { return raw::view(in[0], shape); },
      [](Grads dy, const Saved& s) { return reshape(dy[0], s.input_shape(0)); });
}

Tensor reshape(const Tensor& x, const Shape& shape) {
  TS_CHECK(x.defined(), "reshape", "x is undefined; give it a value first");
  const Shape target = infer_shape(shape, x.numel(), "reshape");
  return view(raw::can_view(x, target) ? x : contiguous(x), target);
}

Tensor flatten(const Tensor& x, int64_t start, int64_t end) {
  if (x.dim() == 0) return reshape(x, {1});
  const int first = wrap_dim(start, x.dim(), "flatten"), last = wrap_dim(end, x.dim(), "flatten");
  TS_CHECK(first <= last, "flatten", "start ", start, " comes after end ", end, " for ", x);
  Shape shape = x.shape().slice(0, first);
  shape.push_back(numel_of(x.shape().slice(first, last + 1)));
  for (int d = last + 1; d < x.dim(); ++d) shape.push_back(x.shape()[d]);
  return reshape(x, shape);
}

const Op kPermute{
    .name = "permute", .marks = MarkRule::kMovement, .view = true, .flops_per_element = 0};

Tensor permute(const Tensor& x, const Shape& dims) {
  check_defined(kPermute, "x", x);
  return differentiable(
      ordered(kPermute, dims), {x}, [=](Inputs in) { return raw::permute(in[0], dims); },
      [=](Grads dy, const Saved&) {
        Shape inverse = dims;
        for (int i = 0; i < dims.size(); ++i)
          inverse[wrap_dim(dims[i], dims.size(), "permute")] = i;
        return permute(dy[0], inverse);
      });
}

const Op kTranspose{
    .name = "transpose", .marks = MarkRule::kMovement, .view = true, .flops_per_element = 0};

Tensor transpose(const Tensor& x, int64_t dim0, int64_t dim1) {
  check_defined(kTranspose, "x", x);
  return differentiable(
      swapping(kTranspose, {dim0, dim1}), {x},
      [=](Inputs in) { return raw::transpose(in[0], dim0, dim1); },
      [=](Grads dy, const Saved&) { return transpose(dy[0], dim0, dim1); });
}

const Op kExpand{
    .name = "expand", .marks = MarkRule::kMovement, .view = true, .flops_per_element = 0};

Tensor expand(const Tensor& x, const Shape& shape) {
  check_defined(kExpand, "x", x);
  return differentiable(
      expanding(kExpand, shape), {x}, [=](Inputs in) { return raw::expand(in[0], shape); },
      [](Grads dy, const Saved&) { return dy[0]; });  // the engine sums it
}

const Op kSqueeze{
    .name = "squeeze", .marks = MarkRule::kMovement, .view = true, .flops_per_element = 0};

Tensor squeeze(const Tensor& x) {
  check_defined(kSqueeze, "x", x);
  return differentiable(
      kSqueeze, {x}, [](Inputs in) { return raw::squeeze_all(in[0]); },
      [](Grads dy, const Saved& s) { return reshape(dy[0], s.input_shape(0)); });
}

Tensor squeeze(const Tensor& x, int64_t dim) {
  check_defined(kSqueeze, "x", x);
  return differentiable(
      along(kSqueeze, dim, x.size(dim) != 1), {x},
      [=](Inputs in) { return raw::squeeze(in[0], dim); },
      [](Grads dy, const Saved& s) { return reshape(dy[0], s.input_shape(0)); });
}

const Op kUnsqueeze{
    .name = "unsqueeze", .marks = MarkRule::kMovement, .view = true, .flops_per_element = 0};

Tensor unsqueeze(const Tensor& x, int64_t dim) {
  check_defined(kUnsqueeze, "x", x);
  return differentiable(
      adding(kUnsqueeze, dim), {x}, [=](Inputs in) { return raw::unsqueeze(in[0], dim); },
      [](Grads dy, const Saved& s) { return reshape(dy[0], s.input_shape(0)); });
}

// The gradient of what takes a slice: zeros around dy.
const Op kSliceBackward{.name = "slice_backward", .flops_per_element = 0};

static Tensor slice_backward(const Tensor& dy, const Shape& shape, int dim, int64_t start,
                             int64_t step) {
  return differentiable(
      kSliceBackward, {dy},
      [=](Inputs in) { return kernels::embed_slice(in[0], shape, dim, start, step); },
      [=, length = dy.shape()[dim]](Grads ddx, const Saved&) {
        if (step == 1) return narrow(ddx[0], dim, start, length);
        return slice(ddx[0], dim, start, start + (length - 1) * step + (length > 0), step);
      });
}

const Op kNarrow{
    .name = "narrow", .marks = MarkRule::kMovement, .view = true, .flops_per_element = 0};

Tensor narrow(const Tensor& x, int64_t dim, int64_t start, int64_t length) {
  check_defined(kNarrow, "x", x);
  return differentiable(
      along(kNarrow, dim), {x}, [=](Inputs in) { return raw::narrow(in[0], dim, start, length); },
      [=](Grads dy, const Saved& s) {
        const Shape& shape = s.input_shape(0);
        const int d = wrap_dim(dim, shape.size(), "narrow");
        return slice_backward(dy[0], shape, d, start < 0 ? start + shape[d] : start, 1);
      });
}

const Op kSelect{
    .name = "select", .marks = MarkRule::kMovement, .view = true, .flops_per_element = 0};

Tensor select(const Tensor& x, int64_t dim, int64_t index) {
  check_defined(kSelect, "x", x);
  return differentiable(
      along(kSelect, dim, false), {x}, [=](Inputs in) { return raw::select(in[0], dim, index); },
      [=](Grads dy, const Saved& s) {
        const Shape& shape = s.input_shape(0);
        const int d = wrap_dim(dim, shape.size(), "select");
        return slice_backward(unsqueeze(dy[0], d), shape, d, index < 0 ? index + shape[d] : index,
                              1);
      });
}

const Op kSlice{
    .name = "slice", .marks = MarkRule::kMovement, .view = true, .flops_per_element = 0};

Tensor slice(const Tensor& x, int64_t dim, std::optional<int64_t> start, std::optional<int64_t> end,
             int64_t step) {
  check_defined(kSlice, "x", x);
  return differentiable(
      along(kSlice, dim), {x}, [=](Inputs in) { return raw::slice(in[0], dim, start, end, step); },
      [=](Grads dy, const Saved& s) {
        const Shape& shape = s.input_shape(0);
        const int d = wrap_dim(dim, shape.size(), "slice");
        const int64_t size = shape[d], first = start.value_or(0);
        return slice_backward(dy[0], shape, d,
                              std::clamp<int64_t>(first < 0 ? first + size : first, 0, size), step);
      });
}

// as_strided as a linear map between two geometries of one storage, and its transpose.
const Op kRestride{.name = "as_strided_backward", .flops_per_element = 1};

static Tensor move_strides(const Tensor& x, const kernels::Geometry& from,
                           const kernels::Geometry& to) {
  return differentiable(
      kRestride, {x}, [=](Inputs in) { return kernels::restride(in[0], from, to); },
      [=](Grads dy, const Saved&) { return move_strides(dy[0], to, from); });
}

const Op kAsStrided{.name = "as_strided", .view = true, .flops_per_element = 0};

Tensor as_strided(const Tensor& x, const Shape& shape, const Shape& strides, int64_t offset) {
  check_defined(kAsStrided, "x", x);
  const kernels::Geometry source{x.shape(), x.strides(), x.offset()};
  return differentiable(
      kAsStrided, {x}, [=](Inputs in) { return raw::as_strided(in[0], shape, strides, offset); },
      [=](Grads dy, const Saved&) {
        return move_strides(dy[0], kernels::Geometry{shape, strides, offset}, source);
      });
}

// ---- Several views ------------------------------------------------------------------------------

namespace {

// The gradients of all parts, zeros for those that nothing used.
TensorList part_gradients(const Grads& dy, const Saved& s) {
  Tensor any;
  for (int i = 0; i < dy.size(); ++i) {
    if (dy.defined(i)) any = dy[i];
  }
  TensorList parts;
  for (int i = 0; i < dy.size(); ++i) {
    parts.push_back(dy.defined(i) ? dy[i] : zeros(s.output_shape(i), {any.dtype(), any.device()}));
  }
  return parts;
}

}  // namespace

const Op kSplit{
    .name = "split", .marks = MarkRule::kMovement, .view = true, .flops_per_element = 0};

TensorList split(const Tensor& x, const Shape& sizes, int64_t dim) {
  check_defined(kSplit, "x", x);
  TS_CHECK_SHAPE(x.dim() > 0, kSplit, "needs at least one dimension; got ", x);
  const int d = wrap_dim(dim, x.dim(), kSplit.name);
  int64_t total = 0;
  for (int64_t size : sizes) {
    TS_CHECK_SHAPE(size >= 0, kSplit, "sizes must not be negative; got ", sizes);
    total += size;
  }
  TS_CHECK_SHAPE(total == x.shape()[d], kSplit, "sizes ", sizes, " add up to ", total,
                 "; dimension ", d, " of ", x, " has ", x.shape()[d]);
  const std::vector<int64_t> lengths = sizes.to_vector();
  return differentiable(
      along(kSplit, d), {x},
      [&](Inputs in) {
        TensorList parts;
        int64_t start = 0;
        for (int64_t length : lengths) {
          parts.push_back(raw::narrow(in[0], d, start, length));
          start += length;
        }
        return parts;
      },
      [=](Grads dy, const Saved& s) { return cat(part_gradients(dy, s), d); });
}

TensorList split(const Tensor& x, int64_t size, int64_t dim) {
  check_defined(kSplit, "x", x);
  TS_CHECK_SHAPE(x.dim() > 0, kSplit, "needs at least one dimension; got ", x);
  const int d = wrap_dim(dim, x.dim(), kSplit.name);
  const int64_t total = x.shape()[d];
  TS_CHECK(size > 0 || (size == 0 && total == 0), kSplit, "size must be positive; got ", size,
           " for ", x);
  TensorList parts;
  if (total == 0 || (total + size - 1) / size > kMaxDims) {
    // More parts than a Shape can name: a narrow each.
    if (total == 0) parts.push_back(narrow(x, d, 0, 0));
    for (int64_t start = 0; start < total; start += size) {
      parts.push_back(narrow(x, d, start, std::min(size, total - start)));
    }
    return parts;
  }
  Shape sizes;
  for (int64_t start = 0; start < total; start += size) {
    sizes.push_back(std::min(size, total - start));
  }
  return split(x, sizes, d);
}

TensorList chunk(const Tensor& x, int64_t chunks, int64_t dim) {
  TS_CHECK(chunks > 0, "chunk", "expects a positive number of chunks; got ", chunks);
  TS_CHECK_SHAPE(x.dim() > 0, "chunk", "needs at least one dimension; got ", x);
  const int d = wrap_dim(dim, x.dim(), "chunk");
  const int64_t total = x.shape()[d];
  if (total == 0) {  // as torch: all of them, empty
    TensorList parts;
    for (int64_t i = 0; i < chunks; ++i) parts.push_back(narrow(x, d, 0, 0));
    return parts;
  }
  return split(x, (total + chunks - 1) / chunks, d);
}

const Op kUnbind{
    .name = "unbind", .marks = MarkRule::kMovement, .view = true, .flops_per_element = 0};

TensorList unbind(const Tensor& x, int64_t dim) {
  check_defined(kUnbind, "x", x);
  TS_CHECK_SHAPE(x.dim() > 0, kUnbind, "needs at least one dimension; got ", x);
  const int d = wrap_dim(dim, x.dim(), kUnbind.name);
  return differentiable(
      along(kUnbind, d, false), {x},
      [=](Inputs in) {
        TensorList parts;
        for (int64_t i = 0; i < in[0].shape()[d]; ++i) parts.push_back(raw::select(in[0], d, i));
        return parts;
      },
      [=](Grads dy, const Saved& s) { return stack(part_gradients(dy, s), d); });
}

// ---- Copies -------------------------------------------------------------------------------------

static TensorList promoted(const TensorList& tensors, std::string_view where) {
  TS_CHECK_SHAPE(!tensors.empty(), where, "expects at least one tensor; got none");
  DType dtype = tensors[0].dtype();
  for (const Tensor& tensor : tensors) dtype = promote_types(dtype, tensor.dtype());
  TensorList result;
  for (const Tensor& tensor : tensors) result.push_back(to(tensor, dtype));
  return result;
}

const Op kCat{.name = "cat",
              .marks = MarkRule::kMovement,
              .autocast = Autocast::kWidest,
              .flops_per_element = 0};

Tensor cat(const TensorList& tensors, int64_t dim) {
  for (const Tensor& tensor : tensors) check_defined(kCat, "one of the tensors", tensor);
  TensorList parts = promoted(tensors, kCat.name);
  // As torch: tensors of shape [0] are left out beside ones of more dimensions.
  const auto is_nothing = [](const Tensor& tensor) {
    return tensor.dim() == 1 && tensor.numel() == 0;
  };
  const auto whole = std::find_if_not(parts.begin(), parts.end(), is_nothing);
  const Tensor first = whole == parts.end() ? parts[0] : *whole;
  if (first.dim() > 1) std::erase_if(parts, is_nothing);
  TS_CHECK_SHAPE(first.dim() > 0, kCat, "cannot join tensors without dimensions, such as ", first,
                 "; use stack");
  const int d = wrap_dim(dim, first.dim(), kCat.name);
  std::vector<int64_t> lengths;
  for (const Tensor& part : parts) {
    bool fits = part.dim() == first.dim();
    for (int i = 0; fits && i < first.dim(); ++i) {
      fits = i == d || part.shape()[i] == first.shape()[i];
    }
    TS_CHECK_SHAPE(fits, kCat, "sizes must agree except in dimension ", d, "; got ", first, " and ",
                   part);
    lengths.push_back(part.shape()[d]);
  }
  return differentiable(
      along(kCat, d), parts, [=](Inputs in) { return kernels::cat(in, d); },
      [=](Grads dy, const Saved& s) {
        TensorList grads(lengths.size());
        int64_t start = 0;
        for (size_t i = 0; i < lengths.size(); ++i) {
          if (s.needs(static_cast<int>(i))) {
            // A view that is differentiable holds what it is a view of.
            grads[i] = grad_enabled() ? narrow(dy[0], d, start, lengths[i])
                                      : raw::narrow(dy[0], d, start, lengths[i]);
          }
          start += lengths[i];
        }
        s.give_parts(dy[0], grads);
        return grads;
      });
}

const Op kStack{.name = "stack",
                .marks = MarkRule::kMovement,
                .autocast = Autocast::kWidest,
                .flops_per_element = 0};

Tensor stack(const TensorList& tensors, int64_t dim) {
  for (const Tensor& tensor : tensors) check_defined(kStack, "one of the tensors", tensor);
  const TensorList parts = promoted(tensors, kStack.name);
  const int d = wrap_dim(dim, parts[0].dim() + 1, kStack.name);
  for (const Tensor& part : parts) {
    TS_CHECK_SHAPE(part.shape() == parts[0].shape(), kStack, "shapes must agree; got ", parts[0],
                   " and ", part);
  }
  return differentiable(
      adding(kStack, d), parts,
      [=](Inputs in) {
        TensorList slices;
        for (const Tensor& part : in) slices.push_back(raw::unsqueeze(part, d));
        return kernels::cat(slices, d);
      },
      [=](Grads dy, const Saved&) { return unbind(dy[0], d); });
}

const Op kRepeat{.name = "repeat", .marks = MarkRule::kMovement, .flops_per_element = 0};

Tensor repeat(const Tensor& x, const Shape& repeats) {
  check_defined(kRepeat, "x", x);
  const int lead = repeats.size() - x.dim();
  TS_CHECK_SHAPE(lead >= 0, kRepeat, "needs a number for each dimension of ", x, "; got ", repeats);
  // A repeated dimension is two of the result's: the repeats, and x's.
  Shape single, split, sums, result;
  for (int d = 0; d < repeats.size(); ++d) {
    TS_CHECK_SHAPE(repeats[d] >= 0, kRepeat, "repeats must not be negative; got ", repeats);
    const int64_t size = d < lead ? 1 : x.shape()[d - lead];
    if (repeats[d] != 1) {
      sums.push_back(split.size());
      single.push_back(1);
      split.push_back(repeats[d]);
    }
    single.push_back(size);
    split.push_back(size);
    result.push_back(repeats[d] * size);
  }
  return differentiable(
      kRepeat, {x},
      [=](Inputs in) {
        const Tensor copies = raw::empty(result, in[0].dtype(), in[0].device());
        kernels::copy_into(raw::view(copies, split), raw::expand(raw::view(in[0], single), split));
        return copies;
      },
      [=](Grads dy, const Saved& s) {
        const Tensor parts = reshape(dy[0], split);
        return reshape(sums.empty() ? parts : sum(parts, sums), s.input_shape(0));
      });
}

Tensor repeat_interleave(const Tensor& x, int64_t repeats, std::optional<int64_t> dim) {
  TS_CHECK(repeats >= 0, "repeat_interleave", "repeats must not be negative; got ", repeats);
  const Tensor source = dim ? x : reshape(x, {-1});
  const int d = wrap_dim(dim.value_or(0), source.dim(), "repeat_interleave");
  TS_CHECK_SHAPE(source.dim() > 0, "repeat_interleave", "needs at least one dimension; got ", x);
  Shape expanded = source.shape(), shape = source.shape();
  expanded.insert(d + 1, repeats);
  shape[d] *= repeats;
  return reshape(expand(unsqueeze(source, d + 1), expanded), shape);
}

Tensor repeat_interleave(const Tensor& x, const Tensor& repeats, std::optional<int64_t> dim) {
  constexpr std::string_view kName = "repeat_interleave";
  TS_CHECK_DTYPE(is_integral(repeats.dtype()), kName, "repeats must be integers; got ", repeats);
  TS_CHECK_DEVICE(!repeats.is_meta(), kName,
                  "the shape of the result depends on the values, which ", repeats,
                  " does not have; use a CPU tensor");
  if (repeats.numel() == 1) return repeat_interleave(x, repeats.item<int64_t>(), dim);
  const Tensor source = dim ? x : reshape(x, {-1});
  const int d = wrap_dim(dim.value_or(0), source.dim(), kName);
  TS_CHECK_SHAPE(source.dim() > 0 && repeats.dim() == 1 && repeats.numel() == source.shape()[d],
                 kName, "needs one repeat for each place of dimension ", d, " of ", source,
                 "; got ", repeats);
  std::vector<int64_t> places;
  const std::vector<int64_t> counts = repeats.to_vector<int64_t>();
  for (size_t i = 0; i < counts.size(); ++i) {
    TS_CHECK(counts[i] >= 0, kName, "repeats must not be negative; got ", counts[i],
             " at position ", i);
    places.insert(places.end(), static_cast<size_t>(counts[i]), static_cast<int64_t>(i));
  }
  const Tensor index =
      tensor(std::span<const int64_t>(places), {static_cast<int64_t>(places.size())});
  return index_select(source, d, source.is_meta() ? index : index.to(source.device()));
}

const Op kFlip{.name = "flip", .marks = MarkRule::kMovement, .flops_per_element = 0};

Tensor flip(const Tensor& x, const Shape& dims) {
  check_defined(kFlip, "x", x);
  const Shape wrapped = dims.empty() ? Shape() : wrap_dims(dims, x.dim(), kFlip.name);
  return differentiable(
      along(kFlip, wrapped), {x},
      [=](Inputs in) {
        Maps maps(static_cast<size_t>(in[0].dim()));
        for (int64_t d : wrapped) {
          for (int64_t i = in[0].shape()[static_cast<int>(d)] - 1; i >= 0; --i) {
            maps[static_cast<size_t>(d)].push_back(i);
          }
        }
        return kernels::take(in[0], maps);
      },
      [=](Grads dy, const Saved&) { return flip(dy[0], wrapped); });
}

const Op kRoll{.name = "roll", .marks = MarkRule::kMovement, .flops_per_element = 0};

Tensor roll(const Tensor& x, const Shape& shifts, const Shape& dims) {
  check_defined(kRoll, "x", x);
  if (dims.empty()) {
    TS_CHECK_SHAPE(shifts.size() == 1, kRoll, "needs one shift where no dims are given; got ",
                   shifts);
    if (x.dim() != 1) return view(roll(reshape(x, {-1}), shifts, {0}), x.shape());
  }
  const Shape along = dims.empty() ? Shape({0}) : dims;
  TS_CHECK_SHAPE(shifts.size() == along.size(), kRoll, "needs a shift for each dimension; got ",
                 shifts, " for dims ", dims);
  return differentiable(
      kRoll, {x},
      [=](Inputs in) {
        Maps maps(static_cast<size_t>(in[0].dim()));
        Shape total = Shape::filled(in[0].dim(), 0);
        for (int i = 0; i < along.size(); ++i) {  // a dimension may be named twice
          const int d = wrap_dim(along[i], in[0].dim(), kRoll.name);
          const int64_t size = std::max<int64_t>(in[0].shape()[d], 1);
          total[d] = (total[d] + shifts[i] % size + size) % size;
        }
        for (int d = 0; d < total.size(); ++d) {
          const int64_t size = in[0].shape()[d];
          if (total[d] == 0) continue;
          for (int64_t i = 0; i < size; ++i) {
            maps[static_cast<size_t>(d)].push_back((i + size - total[d]) % size);
          }
        }
        return kernels::take(in[0], maps);
      },
      [=](Grads dy, const Saved&) {
        Shape back = shifts;
        for (int64_t& shift : back) shift = -shift;
        return roll(dy[0], back, along);
      });
}

const Op kPad{.name = "pad", .marks = MarkRule::kMovement, .flops_per_element = 0};
const Op kPadBackward{.name = "pad_backward", .flops_per_element = 1};

static Tensor pad_constant(const Tensor& x, const Shape& sizes, double value) {
  return differentiable(
      affine(kPad, value != 0), {x},
      [=](Inputs in) {
        Shape shape = in[0].shape();
        Tensor source = in[0];
        Shape first = Shape::filled(shape.size(), 0);
        for (int i = 0; i < sizes.size() / 2; ++i) {
          const int d = shape.size() - 1 - i;
          const int64_t left = sizes[2 * i], right = sizes[2 * i + 1], size = shape[d];
          shape[d] = size + left + right;
          const int64_t begin = std::max<int64_t>(-left, 0);
          const int64_t end = size - std::max<int64_t>(-right, 0);
          source = raw::narrow(source, d, begin, end - begin);
          first[d] = std::max<int64_t>(left, 0);
        }
        const Tensor result = raw::full(shape, value, in[0].dtype(), in[0].device());
        if (source.numel() == 0) return result;
        Tensor inside = result;
        for (int d = 0; d < shape.size(); ++d) {
          inside = raw::narrow(inside, d, first[d], source.shape()[d]);
        }
        kernels::copy_into(inside, source);
        return result;
      },
      [=](Grads dy, const Saved&) {
        Shape crop = sizes;
        for (int64_t& size : crop) size = -size;
        return pad_constant(dy[0], crop, 0);
      });
}

static Tensor pad_by_maps(const Tensor& x, const std::shared_ptr<const Maps>& maps);

static Tensor pad_backward(const Tensor& dy, const std::shared_ptr<const Maps>& maps,
                           const Shape& shape) {
  return differentiable(
      kPadBackward, {dy}, [=](Inputs in) { return kernels::take_transposed(in[0], *maps, shape); },
      [=](Grads ddx, const Saved&) { return pad_by_maps(ddx[0], maps); });
}

static Tensor pad_by_maps(const Tensor& x, const std::shared_ptr<const Maps>& maps) {
  return differentiable(
      kPad, {x}, [=](Inputs in) { return kernels::take(in[0], *maps); },
      [=](Grads dy, const Saved& s) { return pad_backward(dy[0], maps, s.input_shape(0)); });
}

Tensor pad(const Tensor& x, const Shape& sizes, Pad mode, double value) {
  check_defined(kPad, "x", x);
  TS_CHECK_SHAPE(sizes.size() % 2 == 0 && sizes.size() / 2 <= x.dim(), kPad,
                 "sizes come in pairs (left, right), at most one for each dimension; got ", sizes,
                 " for ", x);
  Shape padded = x.shape();
  for (int i = 0; i < sizes.size() / 2; ++i) {
    constexpr int64_t kLimit = std::numeric_limits<int64_t>::max() / 4;  // sums of three stay below
    const int64_t left = sizes[2 * i], right = sizes[2 * i + 1];
    TS_CHECK_SHAPE(std::min(left, right) >= -kLimit && std::max(left, right) <= kLimit, kPad,
                   "sizes must be within 2^61; got ", sizes, " for ", x);
    int64_t& size = padded[x.dim() - 1 - i];
    size = std::max<int64_t>(size + left + right, 0);  // below 0: reported with its dimension
  }
  checked_numel(padded, kPad.name);
  auto maps = std::make_shared<Maps>(static_cast<size_t>(x.dim()));
  for (int i = 0; i < sizes.size() / 2; ++i) {
    const int d = x.dim() - 1 - i;
    const int64_t left = sizes[2 * i], right = sizes[2 * i + 1], size = x.shape()[d];
    const int64_t cropped = size + std::min<int64_t>(left, 0) + std::min<int64_t>(right, 0);
    TS_CHECK_SHAPE(cropped >= 0, kPad, "sizes ", sizes, " crop more than dimension ", d, " of ", x,
                   " has");
    if (mode == Pad::kConstant) continue;
    const int64_t most = std::max(left, right);
    TS_CHECK_SHAPE(size > 0, kPad, "cannot pad an empty dimension with its own values; got ", x);
    TS_CHECK_SHAPE(mode != Pad::kReflect || most < size, kPad, "reflection needs sizes below ",
                   size, ", the size of dimension ", d, " of ", x, "; got ", sizes);
    TS_CHECK_SHAPE(mode != Pad::kCircular || most <= cropped, kPad,
                   "circular padding wraps once: sizes of at most ", cropped, " in dimension ", d,
                   " of ", x, "; got ", sizes);
    if (left == 0 && right == 0) continue;
    for (int64_t j = 0; j < size + left + right; ++j) {
      int64_t place = j - left;
      if (mode == Pad::kReplicate) place = std::clamp<int64_t>(place, 0, size - 1);
      if (mode == Pad::kCircular) {  // around what cropping leaves, as torch
        const int64_t begin = std::max<int64_t>(-left, 0);
        place = begin + (place - begin + cropped) % cropped;
      }
      if (mode == Pad::kReflect) {
        place = place < 0 ? -place : place;
        place = place >= size ? 2 * (size - 1) - place : place;
      }
      (*maps)[static_cast<size_t>(d)].push_back(place);
    }
  }
  if (mode == Pad::kConstant) return pad_constant(x, sizes, value);
  TS_CHECK_DTYPE(x.dtype() != kBool && !is_fp8(x.dtype()), kPad,
                 "this mode expects a floating (not fp8) or integer tensor; got ", x);
  for (int i = 0; i < sizes.size() / 2; ++i) {
    const int d = x.dim() - 1 - i;
    // A map without places would mean "as it is".
    if (x.shape()[d] + sizes[2 * i] + sizes[2 * i + 1] == 0) {
      return pad_constant(x, sizes, 0);
    }
  }
  return pad_by_maps(x, maps);
}

}  // namespace tessera
