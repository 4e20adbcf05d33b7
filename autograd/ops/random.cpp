#include <tessera/autograd/differentiable.h>
#include <tessera/autograd/ops.h>
#include <tessera/autograd/ops/dropout_at.h>
#include <tessera/core/kernels/random/random_fill.h>

namespace tessera {

const Op kDropout{.name = "dropout", .marks = MarkRule::kLinear, .flops_per_element = 2};

// Its own backward: the same mask and scale, drawn again, for the gradient of any order.
Tensor dropout_at(const Tensor& x, double p, RandomStream stream, const kernels::DrawPlace& place) {
  return differentiable(
      kDropout, {x}, [&](Inputs in) { return kernels::dropout(in[0], p, stream, place); },
      [=](Grads dy, const Saved&) { return dropout_at(dy[0], p, stream, place); });
}

Tensor dropout(const Tensor& x, double p, bool training, std::optional<RandomStream> stream) {
  TS_CHECK(p >= 0 && p <= 1, kDropout, "p must be in [0, 1]; got ", p);
  TS_CHECK_DTYPE(is_floating(x.dtype()) && !is_fp8(x.dtype()), kDropout,
                 "expects f64, f32, f16 or bf16; got ", x);
  if (!training || p == 0) return x;
  if (p == 1) return mul(x, Scalar(0));
  const RandomStream drawn = stream ? *stream : next_random_stream();
  return dropout_at(x, p, drawn, kernels::DrawPlace::of(x.shape(), cuts_of(kDropout, x)));
}

}  // namespace tessera
