#include <tessera/autograd/fp8/layer.h>

#include <utility>

#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/differentiable.h>
#include <tessera/autograd/engine.h>
#include <tessera/autograd/fp8/norm_call.h>
#include <tessera/autograd/fp8/operands.h>
#include <tessera/autograd/fp8/weight.h>
#include <tessera/autograd/linear_rules.h>
#include <tessera/autograd/meta_inputs.h>
#include <tessera/autograd/ops.h>
#include <tessera/autograd/weight_cache.h>
#include <tessera/core/functors.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/elementwise/elementwise.h>
#include <tessera/core/kernels/gemm/linear_fused.h>
#include <tessera/core/kernels/reduce/reduce.h>
#include <tessera/core/tensor/element_guard.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/core/tensor/unreadable_storage.h>

namespace tessera {

Tensor fp8_rows(const Tensor& x) {
  const Tensor whole = kernels::contiguous(x);
  return raw::view(whole,
                   {x.dim() == 1 ? 1 : numel_of(x.shape().slice(0, x.dim() - 1)), x.size(-1)});
}

std::optional<DType> fp8_through(const Tensor& x, const Fp8Casts& casts) {
  const AutocastMode& mode = Context::current().slot<AutocastMode>();
  const bool folds = x.device().is_cuda() && x.dtype() == kF32 && mode.enabled &&
                     mode.boundary == nullptr && casts.input_of_weight.has_value();
  return folds ? std::optional(mode.dtype) : std::nullopt;
}

kernels::Quantized fp8_weight(const Tensor& weight, const kernels::QuantizeOptions& options,
                              Fp8Linear& layer) {
  bool is_new = false;
  const kernels::Quantized q = weight_cache::quantized(
      weight, options, layer.scale(Fp8Role::kWeight), &is_new, layer.notes(Fp8Role::kWeight));
  if (!is_new) return q;
  if (q.seen_largest.defined()) {
    const kernels::QuantizeWants notes = layer.notes(Fp8Role::kWeight);
    if (notes.largest.defined()) {
      kernels::binary_into<fn::Maximum>(notes.largest, notes.largest, q.seen_largest);
    }
    if (notes.counts.defined()) {
      const Tensor counts = raw::view(notes.counts, {2});
      kernels::binary_into<fn::Add>(counts, counts, q.seen_counts);
    }
  }
  layer.saw(Fp8Role::kWeight, weight, q);
  return q;
}

Fp8Operands fp8_operands(const Op& op, const Tensor& x, const Tensor& weight, Fp8Linear& layer,
                         std::optional<DType> through) {
  const Fp8Casts casts = layer.casts();
  Fp8Operands operands;
  operands.wants_x = grad_enabled() && x.requires_grad();
  operands.wants_weight = grad_enabled() && weight.requires_grad();
  std::optional<kernels::Quantized> written =
      take_normalised(x, layer, through, operands.wants_weight);
  for (const Tensor* each : {&x, &weight}) {  // before their bytes are read
    if (each == &x && written) continue;
    const UnreadableStorage* unreadable = unreadable_storage(*each);
    if (each == &weight && unreadable != nullptr && unreadable->can_bring()) {
      // There may be the copy that is read here, and the cache brings the weight where not.
      if ((op.reads_copies & inputs(1)) != 0) continue;
      unreadable->bring();
    }
    const ElementGuard* guard = element_guard(*each);
    TS_CHECK_AS(UnsupportedError, guard == nullptr, op, "has no rule for ", *each, "; ",
                guard->remedy());
    check_bytes(*each, op.name);
  }
  TS_CHECK_DEVICE(x.device() == weight.device(), op, "expects all tensors on one device; got ", x,
                  " and ", weight);
  operands.rows = fp8_rows(x);
  const Tensor scale = layer.scale(Fp8Role::kInput);
  const bool low = operands.wants_weight && casts.input_of_weight.has_value();
  const bool same = low && *casts.input_of_weight == casts.input;
  kernels::QuantizeWants wants = layer.notes(Fp8Role::kInput);
  wants.by_columns = same;
  wants.through = through;
  if (written) {
    operands.x = std::move(*written);
    if (operands.wants_weight) operands.x_of_weight = operands.x;
  } else if (low && !same) {
    kernels::QuantizedPair both =
        kernels::quantize_both(operands.rows, casts.input, *casts.input_of_weight, wants);
    operands.x = std::move(both.rows);
    operands.x_of_weight = std::move(both.columns);
  } else {
    operands.x = kernels::quantize(operands.rows, casts.input, scale, wants);
    if (same) operands.x_of_weight = operands.x;
  }
  layer.saw(Fp8Role::kInput, operands.rows, operands.x);
  operands.weight = fp8_weight(weight, casts.weight, layer);
  if (operands.wants_x) {
    operands.weight_of_grad = casts.weight_of_grad == casts.weight
                                  ? operands.weight
                                  : fp8_weight(weight, casts.weight_of_grad, layer);
  }
  return operands;
}

Fp8Kept Fp8Operands::kept() const {
  const bool high = wants_weight && !x_of_weight.inverse.defined();
  return {.x = high           ? raw::alias(rows)
               : wants_weight ? fp8_to_keep(x_of_weight)
                              : Tensor(),
          .x_scales = x_of_weight.inverse,
          .weight = wants_x ? fp8_to_keep(weight_of_grad) : Tensor(),
          .weight_scales = fp8_scales_to_keep(weight_of_grad)};
}

Fp8Gradient fp8_gradient(const Tensor& dy, Fp8Linear& layer, const Fp8GradientWants& wanted) {
  const Fp8Casts& casts = layer.casts();
  const Tensor scale = layer.scale(Fp8Role::kGradOutput);
  Fp8Gradient result;
  if (!wanted.x && !wanted.weight) return result;
  const bool same =
      !wanted.weight || casts.grad_output_of_weight == std::optional(casts.grad_output);
  kernels::QuantizeWants wants =
      fp8_grad_wants(layer, wanted.x, wanted.weight && same, wanted.sums);
  wants.factor = wanted.factor;
  if (same) {
    const kernels::Quantized once = kernels::quantize(dy, casts.grad_output, scale, wants);
    if (wanted.x) result.of_x = once;
    if (wanted.weight) result.of_weight = once;
    result.sums = once.sums;
  } else if (wanted.x) {
    kernels::QuantizedPair both =
        kernels::quantize_both(dy, casts.grad_output, *casts.grad_output_of_weight, wants);
    result.of_x = std::move(both.rows);
    result.of_weight = std::move(both.columns);
    result.sums = result.of_x.sums;
  } else {
    wants.by_columns = true;
    result.of_weight = kernels::quantize(dy, *casts.grad_output_of_weight, scale, wants);
    result.sums = result.of_weight.sums;
  }
  layer.saw(Fp8Role::kGradOutput, dy, wanted.x ? result.of_x : result.of_weight);
  return result;
}

// ---- fp8_linear ------------------------------------------------------------------------------

// Inputs: x, weight, bias, then what backward reads: the input's bytes and inverse scales (or x
// itself), the weight's bytes and inverse scales. As inputs, and not extras, they pass the hooks of
// saved tensors: checkpoint() drops them.
const Op kFp8Linear{.name = "fp8_linear",
                    .reads = {inputs(5, 6), inputs(3, 4), inputs()},
                    .reads_copies = inputs(1),
                    .twice_differentiable = false,
                    .composed = "linear(x, weight, bias)"};

Tensor fp8_linear(const Tensor& given, const Tensor& weight, const Tensor& given_bias,
                  std::shared_ptr<Fp8Linear> layer) {
  const Fp8Casts casts = layer->casts();
  const std::optional<DType> through = fp8_through(given, casts);
  const Tensor x = through ? given : detail::autocast_product(given);
  const Tensor bias = detail::autocast_product(given_bias);
  const DType dtype = through.value_or(x.dtype());
  TS_CHECK_DTYPE(!bias.defined() || bias.dtype() == dtype, kFp8Linear,
                 "expects x and bias of one dtype; got ", x, " and ", bias);
  const Fp8Operands operands = fp8_operands(kFp8Linear, x, weight, *layer, through);
  const Fp8Kept kept = operands.kept();

  return differentiable(
      kFp8Linear, {x, weight, bias, kept.x, kept.x_scales, kept.weight, kept.weight_scales},
      [&](Inputs in) {
        const Tensor y = kernels::fp8_matmul({operands.x}, {operands.weight, true}, dtype,
                                             {.bias = in[2], .fast_accumulation = true});
        count_flops(fp8_flops(y.size(0), y.size(1), weight.size(1)));
        Shape shape = in[0].shape();
        shape[shape.size() - 1] = y.size(1);
        return raw::view(y, shape);
      },
      [casts, layer, through](Grads dy, const Saved& s) -> TensorList {
        TensorList grads(7);
        const Tensor rows = fp8_rows(dy[0]);
        const bool low = s.needs(1) && casts.input_of_weight;
        const Fp8Gradient dy8 = fp8_gradient(
            rows, *layer,
            {.x = s.needs(0), .weight = low, .sums = s.needs(2) && (low || !s.needs(1))});
        if (s.needs(0)) {
          const kernels::Quantized weight8 =
              fp8_kept(s.input(5), s.input(6), casts.weight_of_grad.tile);
          const Tensor grad =
              kernels::fp8_matmul({dy8.of_x}, {weight8}, through ? kF32 : rows.dtype());
          count_flops(fp8_flops(rows.size(0), grad.size(1), rows.size(1)));
          grads[0] = raw::view(grad, s.input_shape(0));
        }
        if (low) {
          const kernels::Quantized x8 =
              fp8_kept(s.input(3), s.input(4), casts.input_of_weight->tile);
          const auto of_weight = [dy8 = dy8.of_weight, x8, rows_shape = rows.shape(),
                                  dtype = rows.dtype()]() -> TensorList {
            const Tensor grad = kernels::fp8_matmul({dy8, true}, {x8}, dtype);
            count_flops(fp8_flops(rows_shape[1], grad.size(1), rows_shape[0]));
            return {grad};
          };
          grads[1] = weight_gradients({1}, of_weight)[0];
        } else if (s.needs(1)) {
          const auto high = [rows, x = s.input(3), wants_bias = s.needs(2)]() -> TensorList {
            const kernels::LinearGradients of = kernels::linear_gradients(rows, x, wants_bias);
            count_flops(fp8_flops(rows.size(1), of.weight.size(1), rows.size(0)));
            if (!wants_bias || of.bias.defined()) return {of.weight, of.bias};
            return {of.weight, kernels::sum(rows, {0}, false, rows.dtype())};
          };
          const TensorList of_weight = weight_gradients({1, 2}, high);
          grads[1] = of_weight[0];
          grads[2] = of_weight[1];
        }
        if (dy8.sums.defined()) grads[2] = dy8.sums;
        if (s.needs(2) && !grads[2].defined() && (low || !s.needs(1))) {
          grads[2] = kernels::sum(rows, {0}, false, rows.dtype());
        }
        return grads;
      });
}

Tensor linear_by(const std::shared_ptr<Fp8Linear>& layer, const Tensor& x, const Tensor& weight,
                 const Tensor& bias) {
  check_linear(x, weight, bias);
  if (const auto resolved = resolved_inputs(kFp8Linear, {&x, &weight, &bias})) {
    return linear_by(layer, (*resolved)[0], (*resolved)[1], (*resolved)[2]);
  }
  const int64_t rows = numel_of(x.shape().slice(0, x.dim() - 1));
  return layer->takes(x, weight, rows) ? fp8_linear(x, weight, bias, layer)
                                       : linear(x, weight, bias);
}

std::optional<WeightKey> fp8_key_of(const Fp8Places& layers, std::span<Tensor* const> places) {
  std::optional<WeightKey> all;
  for (const Tensor* place : places) {
    const auto found = layers.find(place);
    if (found == layers.end()) return std::nullopt;
    const std::shared_ptr<Fp8Linear>& layer = found->second;
    const Fp8Casts& casts = layer->casts();
    if (casts.weight != casts.weight_of_grad || casts.weight.tile != kernels::ScaleTile::tensor()) {
      return std::nullopt;
    }
    const WeightKey key{.dtype = casts.weight.format,
                        .scale = layer->scale(Fp8Role::kWeight),
                        .tiles = casts.weight};
    if (all && *all != key) return std::nullopt;
    all = key;
  }
  return all;
}

}  // namespace tessera
