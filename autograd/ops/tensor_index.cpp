// x[{...}]: indices as Python has them, taken apart into views, and index tensors for what is left.
#include <memory>
#include <span>
#include <utility>

#include <tessera/autograd/ops.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera {

struct IndexedTensor::Place {
  Tensor view;  // of x: what the index tensors are applied to
  TensorList indices;
};

namespace {

constexpr const char* kIndexing = "x[...]";

// Dimensions of x that an index is for.
int dims_of(const TensorIndex& index) {
  switch (index.kind) {
    case TensorIndex::Kind::kNone:
    case TensorIndex::Kind::kEllipsis:
      return 0;
    case TensorIndex::Kind::kTensor:
      return index.tensor.defined() && index.tensor.dtype() == kBool ? index.tensor.dim() : 1;
    default:
      return 1;
  }
}

// As torch has it: integers, slices, None and numbers in tensors first, each a view of the last;
// then all index tensors at once.
std::pair<Tensor, TensorList> take_apart(const Tensor& x, std::span<const TensorIndex> indices) {
  TS_CHECK(x.defined(), kIndexing, "x is undefined; give it a value first");
  int named = 0, ellipses = 0;
  for (const TensorIndex& index : indices) {
    named += dims_of(index);
    ellipses += index.kind == TensorIndex::Kind::kEllipsis;
  }
  TS_CHECK_AS(IndexError, ellipses <= 1, kIndexing, "one Ellipsis at most; got ", ellipses);
  TS_CHECK_AS(IndexError, named <= x.dim(), kIndexing, "too many indices: they are for ", named,
              " dimensions of ", x);
  Tensor view = x;
  TensorList tensors;
  const auto keep = [&](int64_t dim, const Tensor& tensor) {
    tensors.resize(static_cast<size_t>(dim));
    tensors.push_back(tensor);
  };
  int64_t dim = 0;
  for (const TensorIndex& index : indices) {
    switch (index.kind) {
      case TensorIndex::Kind::kInteger:
        view = select(view, dim, index.integer);
        break;
      case TensorIndex::Kind::kSlice:
        view = slice(view, dim, index.slice.start, index.slice.end, index.slice.step);
        ++dim;
        break;
      case TensorIndex::Kind::kNone:
        view = unsqueeze(view, dim);
        ++dim;
        break;
      case TensorIndex::Kind::kEllipsis:
        dim += x.dim() - named;
        break;
      case TensorIndex::Kind::kTensor: {
        const Tensor& tensor = index.tensor;
        if (!tensor.defined()) {
          ++dim;
        } else if (tensor.dtype() == kBool && tensor.dim() == 0) {
          view = unsqueeze(view, dim);
          keep(dim, unsqueeze(tensor, 0));
          ++dim;
        } else if (tensor.dim() == 0 && !is_floating(tensor.dtype()) && !tensor.is_meta()) {
          view = select(view, dim, tensor.item<int64_t>());
        } else {
          TS_CHECK_DTYPE(!is_floating(tensor.dtype()), kIndexing,
                         "positions are i64 or i32 and masks bool; got ", tensor);
          keep(dim, tensor);
          dim += dims_of(index);
        }
        break;
      }
    }
  }
  return {view, tensors};
}

// index() and index_put() take the mask alone for the dimensions that it covers: places after it
// are counted by masks, not by dimensions.
TensorList by_place(const TensorList& tensors) {
  TensorList result;
  for (size_t dim = 0; dim < tensors.size();) {
    const Tensor& tensor = tensors[dim];
    result.push_back(tensor);
    dim += tensor.defined() && tensor.dtype() == kBool ? static_cast<size_t>(tensor.dim()) : 1;
  }
  return result;
}

// Leading dimensions of 1 that the target lacks are dropped, as in torch.
Tensor fitted(const Tensor& values, const Shape& target) {
  TS_CHECK(values.defined(), kIndexing, "the value is undefined; give it one first");
  Tensor result = values;
  while (result.dim() > target.size() && result.shape()[0] == 1) result = squeeze(result, 0);
  return result;
}

// The mask, with dimensions of 1 behind it, where it is all that indexes x.
Tensor only_mask(const Tensor& x, const TensorList& indices) {
  if (indices.size() != 1 || !indices[0].defined() || indices[0].dtype() != kBool) return {};
  Tensor mask = indices[0];
  while (mask.dim() < x.dim()) mask = unsqueeze(mask, -1);
  return mask;
}

}  // namespace

IndexedTensor IndexedTensor::of(const Tensor& x, std::span<const TensorIndex> indices) {
  const auto [view, tensors] = take_apart(x, indices);
  if (tensors.empty()) return {view.is(x) ? tessera::view(x, x.shape()) : view, nullptr};
  const auto place = std::make_shared<const Place>(Place{view, by_place(tensors)});
  return {tessera::index(view, place->indices), place};
}

void IndexedTensor::write(const Tensor& values) const {
  if (!place_) {
    tessera::copy_(*this, fitted(values, shape()));
  } else {
    tessera::index_put_(place_->view, place_->indices, fitted(values, shape()));
  }
}

void IndexedTensor::write(const Scalar& value) const {
  if (!place_) {
    tessera::fill_(*this, value);
  } else if (const Tensor mask = only_mask(place_->view, place_->indices); mask.defined()) {
    tessera::masked_fill_(place_->view, mask, value);
  } else {
    tessera::index_put_(place_->view, place_->indices, full({}, value, {dtype(), device()}));
  }
}

#define TS_INDEXED_COMPOUND(symbol, op)                                         \
  void IndexedTensor::operator symbol(const Tensor& other)&& {                  \
    place_ ? write(op(other)) : void(static_cast<Tensor&>(*this) symbol other); \
  }                                                                             \
  void IndexedTensor::operator symbol(const Scalar& other)&& {                  \
    place_ ? write(op(other)) : void(static_cast<Tensor&>(*this) symbol other); \
  }
TS_INDEXED_COMPOUND(+=, add)
TS_INDEXED_COMPOUND(-=, sub)
TS_INDEXED_COMPOUND(*=, mul)
TS_INDEXED_COMPOUND(/=, div)
TS_INDEXED_COMPOUND(&=, bitwise_and)
TS_INDEXED_COMPOUND(|=, bitwise_or)
TS_INDEXED_COMPOUND(^=, bitwise_xor)
#undef TS_INDEXED_COMPOUND

IndexedTensor Tensor::operator[](int64_t index) const {
  return {tessera::select(*this, 0, index), nullptr};
}
IndexedTensor Tensor::operator[](const TensorIndex& index) const {
  return IndexedTensor::of(*this, {&index, 1});
}
IndexedTensor Tensor::operator[](std::initializer_list<TensorIndex> indices) const {
  return IndexedTensor::of(*this, {indices.begin(), indices.size()});
}
IndexedTensor Tensor::index(std::initializer_list<TensorIndex> indices) const {
  return IndexedTensor::of(*this, {indices.begin(), indices.size()});
}

const Tensor& Tensor::index_put_(std::initializer_list<TensorIndex> indices, const Tensor& values,
                                 bool accumulate) const {
  const auto [view, tensors] = take_apart(*this, {indices.begin(), indices.size()});
  if (!tensors.empty()) {
    tessera::index_put_(view, by_place(tensors), values, accumulate);
  } else if (accumulate) {
    tessera::add_(view, values);
  } else {
    tessera::copy_(view, values);
  }
  return *this;
}
const Tensor& Tensor::index_put_(std::initializer_list<TensorIndex> indices, const Scalar& value,
                                 bool accumulate) const {
  return index_put_(indices, full({}, value, {dtype(), device()}), accumulate);
}
Tensor Tensor::index_put(std::initializer_list<TensorIndex> indices, const Tensor& values,
                         bool accumulate) const {
  const Tensor result = tessera::clone(*this);
  result.index_put_(indices, values, accumulate);
  return result;
}

}  // namespace tessera
