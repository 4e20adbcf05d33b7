#include <tessera/autograd/differentiable.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/kernels/embedding/embedding.h>

namespace tessera {

// ---- embedding ----------------------------------------------------------------------------------

const Op kEmbeddingBackward{.name = "embedding_backward", .reads = {inputs(1)}};

static Tensor embedding_backward(const Tensor& dy, const Tensor& index, int64_t rows,
                                 int64_t padding_idx) {
  return differentiable(
      kEmbeddingBackward, {dy, index},
      [=](Inputs in) { return kernels::embedding_backward(in[0], in[1], rows, padding_idx); },
      [=](Grads ddw, const Saved& s) -> TensorList {
        const Tensor index = s.input(1);
        const Tensor picked = embedding(index, ddw[0]);
        if (padding_idx < 0) return {picked, Tensor()};
        return {masked_fill(picked, unsqueeze(eq(index, Scalar(padding_idx)), -1), 0), Tensor()};
      });
}

const Op kEmbedding{.name = "embedding", .reads = {inputs(), inputs(0)}, .flops_per_element = 0};

Tensor embedding(const Tensor& index, const Tensor& weight, std::optional<int64_t> padding_idx) {
  check_defined(kEmbedding, "index", index);
  check_defined(kEmbedding, "weight", weight);
  TS_CHECK_SHAPE(weight.dim() == 2, kEmbedding, "weight must be [V, C]; got ", weight);
  const int64_t rows = weight.size(0);
  int64_t padding = -1;
  if (padding_idx) {
    padding = *padding_idx < 0 ? *padding_idx + rows : *padding_idx;
    TS_CHECK_INDEX(padding >= 0 && padding < rows, kEmbedding, "padding_idx ", *padding_idx,
                   " is outside the ", rows, " rows of ", weight);
  }
  return differentiable(
      kEmbedding, {index, weight}, [](Inputs in) { return kernels::embedding(in[0], in[1]); },
      [=](Grads dy, const Saved& s) -> TensorList {
        return {Tensor(), embedding_backward(dy[0], s.input(0), rows, padding)};
      });
}

// ---- rotary_embedding ---------------------------------------------------------------------------

const Op kRotaryEmbedding{.name = "rotary_embedding",
                          .reads = {inputs(1, 2), inputs(0), inputs(0)},
                          .flops_per_element = 3};

// The gradient with respect to x turns back: the same op with `inverse` changed.
static Tensor rotate(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved,
                     bool inverse) {
  return differentiable(
      kRotaryEmbedding, {x, cos, sin},
      [=](Inputs in) { return kernels::rotary(in[0], in[1], in[2], interleaved, inverse); },
      [=](Grads dy, const Saved& s) -> TensorList {
        TensorList grads(3);
        if (s.needs(0)) grads[0] = rotate(dy[0], s.input(1), s.input(2), interleaved, !inverse);
        if (!s.needs(1) && !s.needs(2)) return grads;
        const Tensor x = s.input(0);
        const int64_t half = x.size(-1) / 2;
        const auto first = [&](const Tensor& t) {
          return interleaved ? slice(t, -1, 0, {}, 2) : narrow(t, -1, 0, half);
        };
        const auto second = [&](const Tensor& t) {
          return interleaved ? slice(t, -1, 1, {}, 2) : narrow(t, -1, half, half);
        };
        const Tensor a = first(x), b = second(x), da = first(dy[0]), db = second(dy[0]);
        if (s.needs(1)) grads[1] = add(mul(a, da), mul(b, db));
        if (s.needs(2)) {
          grads[2] = inverse ? sub(mul(b, da), mul(a, db)) : sub(mul(a, db), mul(b, da));
        }
        return grads;
      });
}

Tensor rotary_embedding(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved) {
  check_defined(kRotaryEmbedding, "x", x);
  check_defined(kRotaryEmbedding, "cos", cos);
  check_defined(kRotaryEmbedding, "sin", sin);
  TS_CHECK_SHAPE(x.dim() >= 1 && x.size(-1) % 2 == 0, kRotaryEmbedding,
                 "needs an even last dimension; got ", x);
  Shape angles = x.shape();
  angles[x.dim() - 1] = x.size(-1) / 2;
  for (const Tensor* table : {&cos, &sin}) {
    TS_CHECK_SHAPE(broadcastable_to(table->shape(), angles) && table->dim() >= 1 &&
                       table->size(-1) == angles.back(),
                   kRotaryEmbedding, "cos and sin must be broadcastable to ", angles, "; got ",
                   *table);
    TS_CHECK_DTYPE(table->dtype() == x.dtype() || table->dtype() == kF32, kRotaryEmbedding,
                   "cos and sin must have x's dtype or be f32; got ", *table, " for ", x);
  }
  return rotate(x, cos, sin, interleaved, false);
}

}  // namespace tessera
