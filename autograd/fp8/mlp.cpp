#include <utility>

#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/differentiable.h>
#include <tessera/autograd/engine.h>
#include <tessera/autograd/fp8/operands.h>
#include <tessera/autograd/fp8/weight.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera {

// ---- fp8_linear_gelu_linear ------------------------------------------------------------------

// Inputs: x, weight, bias, out_weight, out_bias; what backward reads: bytes and inverse scales of
// x, weight, gelu(h) and out_weight, and h, which gelu took.
const Op kFp8LinearGeluLinear{
    .name = "fp8_linear_gelu_linear",
    .reads = {inputs(7, 8, 11, 12, 13), inputs(5, 6, 11, 12, 13), inputs(11, 12, 13),
              inputs(9, 10)},
    .reads_copies = inputs(1, 3),
    .twice_differentiable = false,
    .composed = "linear(gelu(linear(x, weight, bias)), out_weight, out_bias)"};

Tensor fp8_linear_gelu_linear(const Tensor& given, const Tensor& weight, const Tensor& given_bias,
                              std::shared_ptr<Fp8Linear> layer, const Tensor& out_weight,
                              const Tensor& given_out_bias, std::shared_ptr<Fp8Linear> out_layer,
                              bool tanh_form) {
  const Op& op = kFp8LinearGeluLinear;
  const Fp8Casts casts = layer->casts(), out_casts = out_layer->casts();
  const std::optional<DType> through = fp8_through(given, casts);
  const Tensor x = through ? given : detail::autocast_product(given);
  const Tensor bias = detail::autocast_product(given_bias);
  const Tensor out_bias = detail::autocast_product(given_out_bias);
  const DType dtype = through.value_or(x.dtype());
  for (const Tensor* each : {&bias, &out_bias}) {
    TS_CHECK_DTYPE(!each->defined() || each->dtype() == dtype, op,
                   "expects x and biases of one dtype; got ", x, " and ", *each);
  }
  TS_CHECK_SHAPE(out_weight.dim() == 2 && out_weight.size(1) == weight.size(0), op,
                 "expects weights [inner, in] and [out, inner]; got ", weight, " and ", out_weight);
  const Fp8Operands inner = fp8_operands(op, x, weight, *layer, through);
  const Fp8Kept kept = inner.kept();
  const int64_t M = inner.rows.size(0), hidden = weight.size(0), in = weight.size(1);
  const Tensor h = kernels::fp8_matmul({inner.x}, {inner.weight, true}, dtype,
                                       {.bias = bias, .fast_accumulation = true});
  count_flops(fp8_flops(M, hidden, in));

  const bool wants_weight = grad_enabled() && out_weight.requires_grad();
  const bool wants_h = inner.wants_x || inner.wants_weight ||
                       (grad_enabled() && bias.defined() && bias.requires_grad());
  kernels::QuantizeWants wants = out_layer->notes(Fp8Role::kInput);
  wants.by_columns = wants_weight;
  const kernels::Quantized a8 = kernels::quantize_gelu(h, tanh_form, out_casts.input,
                                                       out_layer->scale(Fp8Role::kInput), wants);
  out_layer->saw(Fp8Role::kInput, h, a8);
  const kernels::Quantized weight8 = fp8_weight(out_weight, out_casts.weight, *out_layer);
  const auto kept_of = [](bool wanted, const kernels::Quantized& q) {
    return wanted ? fp8_to_keep(q) : Tensor();
  };

  return differentiable(
      op,
      {x, weight, bias, out_weight, out_bias, kept.x, kept.x_scales, kept.weight,
       kept.weight_scales, kept_of(wants_weight, a8), wants_weight ? a8.inverse : Tensor(),
       kept_of(wants_h, weight8), wants_h ? weight8.inverse : Tensor(), wants_h ? h : Tensor()},
      [&](Inputs inputs) {
        const Tensor y = kernels::fp8_matmul({a8}, {weight8, true}, dtype,
                                             {.bias = inputs[4], .fast_accumulation = true});
        count_flops(fp8_flops(M, y.size(1), hidden));
        Shape shape = inputs[0].shape();
        shape[shape.size() - 1] = y.size(1);
        return raw::view(y, shape);
      },
      [=](Grads dy, const Saved& s) -> TensorList {
        TensorList grads(14);
        const Tensor rows = fp8_rows(dy[0]);
        const bool wants_h = s.needs(0) || s.needs(1) || s.needs(2);
        const auto bytes = [&](int at, const kernels::QuantizeOptions& options) {
          return fp8_kept(s.input(at), s.input(at + 1), options.tile);
        };
        const kernels::Quantized dy8 =
            kernels::quantize(rows, out_casts.grad_output, out_layer->scale(Fp8Role::kGradOutput),
                              fp8_grad_wants(*out_layer, wants_h, s.needs(3), s.needs(4)));
        out_layer->saw(Fp8Role::kGradOutput, rows, dy8);
        if (s.needs(4)) grads[4] = dy8.sums;
        if (s.needs(3)) {
          const auto of_weight = [=, dtype = rows.dtype(), out = rows.size(1),
                                  a8 = bytes(9, out_casts.input)]() -> TensorList {
            count_flops(fp8_flops(out, hidden, M));
            return {kernels::fp8_matmul({dy8, true}, {a8}, dtype)};
          };
          grads[3] = weight_gradients({3}, of_weight)[0];
        }
        if (!wants_h) return grads;
        const Tensor da = kernels::fp8_matmul({dy8}, {bytes(11, out_casts.weight)}, rows.dtype());
        count_flops(fp8_flops(M, hidden, rows.size(1)));
        const kernels::Quantized dh8 = kernels::quantize_gelu_grad(
            da, s.input(13), tanh_form, casts.grad_output, layer->scale(Fp8Role::kGradOutput),
            fp8_grad_wants(*layer, s.needs(0), s.needs(1), s.needs(2)));
        layer->saw(Fp8Role::kGradOutput, da, dh8);
        if (s.needs(2)) grads[2] = dh8.sums;
        if (s.needs(0)) {
          const Tensor grad = kernels::fp8_matmul({dh8}, {bytes(7, casts.weight_of_grad)},
                                                  through ? kF32 : rows.dtype());
          count_flops(fp8_flops(M, in, hidden));
          grads[0] = raw::view(grad, s.input_shape(0));
        }
        if (s.needs(1)) {
          const auto of_weight = [=, dtype = rows.dtype(),
                                  x8 = bytes(5, casts.input)]() -> TensorList {
            count_flops(fp8_flops(hidden, in, M));
            return {kernels::fp8_matmul({dh8, true}, {x8}, dtype)};
          };
          grads[1] = weight_gradients({1}, of_weight)[0];
        }
        return grads;
      });
}

}  // namespace tessera
