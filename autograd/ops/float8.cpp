#include <tessera/autograd/float8.h>

#include <utility>

#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/differentiable.h>
#include <tessera/autograd/ops.h>
#include <tessera/autograd/weight_cache.h>
#include <tessera/core/functors.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/elementwise/elementwise.h>
#include <tessera/core/kernels/gemm/linear_fused.h>
#include <tessera/core/kernels/reduce/reduce.h>
#include <tessera/core/placement_slot.h>
#include <tessera/core/raw_views.h>

namespace tessera {
namespace {

Tensor float8_rows(const Tensor& x) {
  const Tensor whole = kernels::contiguous(x);
  return raw::view(whole,
                   {x.dim() == 1 ? 1 : numel_of(x.shape().slice(0, x.dim() - 1)), x.size(-1)});
}

double float8_flops(int64_t m, int64_t n, int64_t k) {
  return 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
}

}  // namespace

// ---- float8_linear ------------------------------------------------------------------------------

// Inputs: x, weight, bias, then what backward reads: the input's bytes and inverse scales (or x
// itself), the weight's bytes and inverse scales. As inputs, and not extras, they pass the hooks of
// saved tensors: checkpoint() drops them.
const Op kFloat8Linear{.name = "float8_linear",
                       .reads = {inputs(5, 6), inputs(3, 4), inputs()},
                       .twice_differentiable = false,
                       .composed = "linear(x, weight, bias)"};

Tensor float8_linear(const Tensor& given, const Tensor& weight, const Tensor& given_bias,
                     std::shared_ptr<Float8Linear> layer) {
  const Tensor x = detail::autocast_product(given), bias = detail::autocast_product(given_bias);
  TS_CHECK_DTYPE(!bias.defined() || bias.dtype() == x.dtype(), kFloat8Linear,
                 "expects x and bias of one dtype; got ", x, " and ", bias);
  if (const PlacementSlot* slot = placement_slot(weight); slot != nullptr && slot->has_casts()) {
    slot->bring();
  }
  for (const Tensor* each : {&x, &weight}) {  // before their bytes are read
    const PlacementSlot* slot = placement_slot(*each);
    TS_CHECK_AS(UnsupportedError, slot == nullptr, kFloat8Linear, "has no rule for ", *each, "; ",
                slot->remedy());
    check_bytes(*each, kFloat8Linear.name);
  }
  TS_CHECK_DEVICE(x.device() == weight.device(), kFloat8Linear,
                  "expects all tensors on one device; got ", x, " and ", weight);
  const Float8Casts casts = layer->casts();
  const bool wants_x = grad_enabled() && x.requires_grad();
  const bool wants_weight = grad_enabled() && weight.requires_grad();

  const auto quantized_weight = [&](const kernels::QuantizeOptions& options) {
    bool is_new = false;
    const kernels::Quantized q =
        weight_cache::quantized(weight, options, layer->scale(Float8Role::kWeight), &is_new);
    if (is_new) layer->saw(Float8Role::kWeight, weight, q);
    return q;
  };
  const Tensor rows = float8_rows(x);
  const kernels::Quantized x8 =
      kernels::quantize(rows, casts.input, layer->scale(Float8Role::kInput));
  layer->saw(Float8Role::kInput, rows, x8);
  const kernels::Quantized weight8 = quantized_weight(casts.weight);

  Tensor kept_x, kept_x_scales, kept_weight, kept_weight_scales;
  if (wants_weight && casts.input_of_weight) {
    const kernels::Quantized kept =
        *casts.input_of_weight == casts.input
            ? x8
            : kernels::quantize(rows, *casts.input_of_weight, layer->scale(Float8Role::kInput));
    kept_x = kept.values;
    kept_x_scales = kept.inverse;
  } else if (wants_weight) {
    kept_x = raw::alias(rows);
  }
  if (wants_x) {
    const kernels::Quantized kept =
        casts.weight_of_grad == casts.weight ? weight8 : quantized_weight(casts.weight_of_grad);
    kept_weight = kept.values;
    kept_weight_scales = kept.inverse;
  }

  return differentiable(
      kFloat8Linear, {x, weight, bias, kept_x, kept_x_scales, kept_weight, kept_weight_scales},
      [&](Inputs in) {
        Tensor y = kernels::float8_matmul({x8}, {weight8, true}, in[0].dtype());
        count_flops(float8_flops(y.size(0), y.size(1), rows.size(1)));
        if (in[2].defined()) kernels::binary_into<fn::Add>(y, y, in[2]);
        Shape shape = in[0].shape();
        shape[shape.size() - 1] = y.size(1);
        return raw::view(y, shape);
      },
      [casts, layer](Grads dy, const Saved& s) -> TensorList {
        TensorList grads(7);
        const Tensor rows = float8_rows(dy[0]);
        const auto quantized = [&](const kernels::QuantizeOptions& options) {
          return kernels::quantize(rows, options, layer->scale(Float8Role::kGradOutput));
        };
        kernels::Quantized dy8;
        if (s.needs(0)) {
          dy8 = quantized(casts.grad_output);
          layer->saw(Float8Role::kGradOutput, rows, dy8);
          const kernels::Quantized weight8{.values = s.input(5),
                                           .scale = {},
                                           .inverse = s.input(6),
                                           .tile = casts.weight_of_grad.tile};
          const Tensor grad = kernels::float8_matmul({dy8}, {weight8}, rows.dtype());
          count_flops(float8_flops(rows.size(0), grad.size(1), rows.size(1)));
          grads[0] = raw::view(grad, s.input_shape(0));
        }
        if (s.needs(1) && casts.input_of_weight) {
          if (!dy8.values.defined() || *casts.grad_output_of_weight != casts.grad_output) {
            const bool seen = dy8.values.defined();
            dy8 = quantized(*casts.grad_output_of_weight);
            if (!seen) layer->saw(Float8Role::kGradOutput, rows, dy8);
          }
          const kernels::Quantized x8{.values = s.input(3),
                                      .scale = {},
                                      .inverse = s.input(4),
                                      .tile = casts.input_of_weight->tile};
          grads[1] = kernels::float8_matmul({dy8, true}, {x8}, rows.dtype());
          count_flops(float8_flops(rows.size(1), grads[1].size(1), rows.size(0)));
        } else if (s.needs(1)) {
          const kernels::LinearGradients high =
              kernels::linear_gradients(rows, s.input(3), s.needs(2));
          count_flops(float8_flops(rows.size(1), high.weight.size(1), rows.size(0)));
          grads[1] = high.weight;
          grads[2] = high.bias;
        }
        if (s.needs(2) && !grads[2].defined()) {
          grads[2] = kernels::sum(rows, {0}, false, rows.dtype());
        }
        return grads;
      });
}

}  // namespace tessera
