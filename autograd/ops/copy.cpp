// Ops that move elements: conversions, copies, fills.
#include <tessera/autograd/differentiable.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/initial_values.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera {

const Op kTo{.name = "to", .marks = MarkRule::kLinear, .flops_per_element = 0};

Tensor to(const Tensor& x, DType dtype) {
  check_defined(kTo, "x", x);
  if (x.dtype() == dtype) return x;
  return differentiable(
      affine(kTo, !is_floating(dtype)), {x},
      [dtype](Inputs in) { return kernels::convert(in[0], dtype); },
      [](Grads dy, const Saved& s) { return to(dy[0], s.input_dtype(0)); });
}

Tensor to(const Tensor& x, const Device& device) {
  check_defined(kTo, "x", x);
  if (x.device() == device) return x;
  return differentiable(
      kTo, {x},
      [device](Inputs in) {
        if (device.is_meta()) {
          return raw::empty_strided(in[0].shape(), in[0].strides(), in[0].dtype(), device);
        }
        const Tensor result = raw::empty(in[0].shape(), in[0].dtype(), device);
        kernels::copy_into(result, in[0]);
        return result;
      },
      [device = x.device()](Grads dy, const Saved&) { return to(dy[0], device); });
}

const Op kClone{.name = "clone", .marks = MarkRule::kLinear, .flops_per_element = 0};

Tensor clone(const Tensor& x) {
  check_defined(kClone, "x", x);
  return differentiable(
      kClone, {x}, [](Inputs in) { return kernels::copy(in[0]); },
      [](Grads dy, const Saved&) { return dy[0]; });
}

const Op kContiguous{.name = "contiguous", .marks = MarkRule::kLinear, .flops_per_element = 0};

Tensor contiguous(const Tensor& x) {
  check_defined(kContiguous, "x", x);
  if (x.is_contiguous()) return x;
  return differentiable(
      kContiguous, {x}, [](Inputs in) { return kernels::contiguous(in[0]); },
      [](Grads dy, const Saved&) { return dy[0]; });
}

const Op kCopy{.name = "copy_", .marks = MarkRule::kLinear, .flops_per_element = 0};

const Tensor& copy_(const Tensor& target, const Tensor& source) {
  check_defined(kCopy, "target", target);
  check_defined(kCopy, "source", source);
  TS_CHECK_SHAPE(broadcastable_to(source.shape(), target.shape()), kCopy, "the source ", source,
                 " does not broadcast to the target ", target);
  const bool travels = source.device() != target.device() && !source.is_meta() && !target.is_meta();
  const Tensor here = travels ? to(source, target.device()) : source;
  differentiable_inplace(
      kCopy, {target, here},
      [](Inputs in) {
        kernels::copy_into(in[0], in[1]);
        return in[0];
      },
      [](Grads dy, const Saved& s) -> TensorList {
        return {Tensor(), s.needs(1) ? to(dy[0], s.input_dtype(1)) : Tensor()};
      });
  return target;
}

const Op kFill{.name = "fill_", .marks = MarkRule::kPointwise, .flops_per_element = 0};

const Tensor& fill_(const Tensor& x, const Scalar& value) {
  check_defined(kFill, "x", x);
  differentiable_inplace(
      kFill, {x},
      [value](Inputs in) {
        kernels::fill(in[0], value);
        return in[0];
      },
      [](Grads, const Saved&) { return Tensor(); });
  remember_fill(x, [value](const Tensor& piece, int64_t) { kernels::fill(piece, value); });
  return x;
}

const Tensor& zero_(const Tensor& x) { return fill_(x, 0); }

}  // namespace tessera
