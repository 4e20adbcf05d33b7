#include <tessera/autograd/packed/linear.h>

#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/differentiable.h>
#include <tessera/autograd/meta_inputs.h>
#include <tessera/core/kernels/reduce/reduce.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera {

// Inputs: x, bias, then the parts of the weight. As inputs, and not captured, they pass the hooks
// of saved tensors: checkpoint() drops them.
const Op kPackedLinear{.name = "packed_linear",
                       .reads = {inputs(2, 3, 4, 5), inputs()},
                       .twice_differentiable = false,
                       .composed = "linear(x, unpack(weight), bias)"};

namespace {

double flops_of(const Tensor& y, int64_t in_features) {
  return 2 * static_cast<double>(y.numel()) * static_cast<double>(in_features);
}

}  // namespace

Tensor packed_linear(const Tensor& given, const kernels::PackedWeight& weight,
                     const Tensor& given_bias) {
  check_defined(kPackedLinear, "x", given);
  check_defined(kPackedLinear, "weight", weight.values);
  if (const auto resolved =
          resolved_inputs(kPackedLinear, {&given, &given_bias, &weight.values, &weight.absmax,
                                          &weight.nested_absmax, &weight.nested_offset})) {
    kernels::PackedWeight packed = weight;
    packed.values = (*resolved)[2];
    packed.absmax = (*resolved)[3];
    packed.nested_absmax = (*resolved)[4];
    packed.nested_offset = (*resolved)[5];
    return packed_linear((*resolved)[0], packed, (*resolved)[1]);
  }
  const Tensor x = detail::autocast_product(given);
  const Tensor bias = detail::autocast_product(given_bias);
  // Without the tensors, which backward has from what was saved.
  kernels::PackedWeight form{.format = weight.format,
                             .out_features = weight.out_features,
                             .in_features = weight.in_features,
                             .block_size = weight.block_size};
  return differentiable(
      kPackedLinear,
      {x, bias, weight.values, weight.absmax, weight.nested_absmax, weight.nested_offset},
      [&](Inputs in) {
        const Tensor y = kernels::packed_product(in[0], weight, in[1]);
        count_flops(flops_of(y, weight.in_features));
        return y;
      },
      [form](Grads dy, const Saved& s) -> TensorList {
        TensorList grads(6);
        if (s.needs(0)) {
          kernels::PackedWeight packed = form;
          packed.values = s.input(2);
          packed.absmax = s.input(3);
          packed.nested_absmax = s.input(4);
          packed.nested_offset = s.input(5);
          grads[0] = kernels::packed_product_gradient(dy[0], packed);
          count_flops(flops_of(dy[0], form.in_features));
        }
        if (s.needs(1)) {
          const Tensor rows = raw::view(dy[0].contiguous(), {-1, form.out_features});
          grads[1] = kernels::sum(rows, {0}, false, rows.dtype());
        }
        return grads;
      });
}

}  // namespace tessera
