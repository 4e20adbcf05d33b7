#include <tessera/autograd/differentiable.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/kernels/sort/sort.h>

namespace tessera {
namespace {

// The gradient of values[i] = x[indices[i]] where no index comes twice.
Tensor unsort(const Tensor& dy, int dim, const Tensor& indices, const Shape& shape) {
  return scatter(zeros(shape, {dy.dtype(), dy.device()}), dim, indices, dy);
}

}  // namespace

const Op kSort{.name = "sort", .marks = MarkRule::kAlongDims, .reads_outputs = outputs(1)};

ValuesIndices sort(const Tensor& x, int64_t dim, bool descending) {
  check_defined(kSort, "x", x);
  const int d = wrap_dim(dim, x.dim(), kSort.name);
  const TensorList result = differentiable(
      along(kSort, d), {x},
      [=](Inputs in) {
        kernels::SortedValues sorted = kernels::sort(in[0], d, descending);
        return TensorList{sorted.values, sorted.indices};
      },
      [=](Grads dy, const Saved& s) { return unsort(dy[0], d, s.output(1), s.input_shape(0)); });
  return {result[0], result[1]};
}

const Op kArgsort{.name = "argsort", .marks = MarkRule::kAlongDims};

Tensor argsort(const Tensor& x, int64_t dim, bool descending) {
  check_defined(kArgsort, "x", x);
  const int d = wrap_dim(dim, x.dim(), kArgsort.name);
  return not_differentiable(along(kArgsort, d), {x},
                            [=](Inputs in) { return kernels::sort(in[0], d, descending).indices; });
}

const Op kTopk{.name = "topk", .marks = MarkRule::kAlongDims, .reads_outputs = outputs(1)};

ValuesIndices topk(const Tensor& x, int64_t k, int64_t dim, bool largest) {
  check_defined(kTopk, "x", x);
  const int d = wrap_dim(dim, x.dim(), kTopk.name);
  const int64_t size = x.dim() == 0 ? 1 : x.shape()[d];
  TS_CHECK(k >= 0 && k <= size, kTopk, "k must be in [0, ", size, "], the size of dimension ", d,
           " of ", x, "; got ", k);
  if (x.dim() == 0) k = 1;  // a number is its own best, as in torch for k = 0 too
  const TensorList result = differentiable(
      along(kTopk, d), {x},
      [=](Inputs in) {
        kernels::SortedValues best = kernels::topk(in[0], k, d, largest);
        return TensorList{best.values, best.indices};
      },
      [=](Grads dy, const Saved& s) { return unsort(dy[0], d, s.output(1), s.input_shape(0)); });
  return {result[0], result[1]};
}

}  // namespace tessera
