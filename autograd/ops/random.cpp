#include <tessera/autograd/differentiable.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/kernels/random/random_fill.h>

namespace tessera {

const Op kDropout{.name = "dropout", .marks = MarkRule::kLinear, .flops_per_element = 2};

namespace {

// Its own backward: the same mask and scale, drawn again, for the gradient of any order.
Tensor masked_by(const Tensor& x, double p, RandomStream stream) {
  return differentiable(
      drawing(kDropout), {x}, [=](Inputs in) { return kernels::dropout(in[0], p, stream); },
      [=](Grads dy, const Saved&) { return masked_by(dy[0], p, stream); });
}

}  // namespace

Tensor dropout(const Tensor& x, double p, bool training, std::optional<RandomStream> stream) {
  TS_CHECK(p >= 0 && p <= 1, kDropout, "p must be in [0, 1]; got ", p);
  TS_CHECK_DTYPE(is_floating(x.dtype()) && !is_fp8(x.dtype()), kDropout,
                 "expects f64, f32, f16 or bf16; got ", x);
  if (!training || p == 0) return x;
  if (p == 1) return mul(x, Scalar(0));
  return masked_by(x, p, stream ? *stream : next_random_stream());
}

}  // namespace tessera
