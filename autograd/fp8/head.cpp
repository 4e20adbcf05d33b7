#include <tessera/autograd/fp8/head.h>

#include <algorithm>
#include <optional>
#include <utility>

#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/differentiable.h>
#include <tessera/autograd/fp8/operands.h>
#include <tessera/autograd/linear_rules.h>
#include <tessera/core/functors.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/elementwise/elementwise.h>
#include <tessera/core/kernels/fp8/logits_gradient.h>
#include <tessera/core/kernels/fp8/quantize_pieces.h>
#include <tessera/core/kernels/gemm/matmul.h>
#include <tessera/core/kernels/loss/cross_entropy.h>
#include <tessera/core/kernels/reduce/reduce.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera {

// ---- fp8_linear_cross_entropy ----------------------------------------------------------------

// Inputs: x, weight, targets, then bytes and inverse scales that backward reads: of x and W for the
// logits, of x for grad_W, of W for grad_x. The last four are undefined where they are the first.
const Op kFp8LinearCrossEntropy{
    .name = "fp8_linear_cross_entropy",
    .reads = {inputs(2, 3, 4, 5, 6, 9, 10), inputs(2, 3, 4, 5, 6, 7, 8), inputs()},
    .twice_differentiable = false,
    .composed = "cross_entropy(linear(x, weight), target)"};

// Of whole logits; inputs: x, weight, targets, bytes and inverse scales of x and W for backward.
const Op kFp8Head{.name = "fp8_linear_cross_entropy_whole",
                  .reads = {inputs(5, 6), inputs(3, 4), inputs()},
                  .twice_differentiable = false,
                  .composed = "cross_entropy(linear(x, weight), target)"};

namespace {

// Rows that are taken at once: about equal chunks, which begin where blocks of rows do.
struct HeadChunks {
  int64_t rows, step;
  HeadChunks(int64_t N, int64_t V, int64_t chunk, const Fp8Casts& casts) : rows(N) {
    int64_t whole = 16;
    for (const auto& cast : {std::optional(casts.input), casts.input_of_weight,
                             std::optional(casts.grad_output), casts.grad_output_of_weight}) {
      if (cast) whole = std::max(whole, cast->tile.rows);
    }
    const int64_t most = std::max<int64_t>(128, chunk / std::max<int64_t>(V, 1));
    const int64_t pieces = std::max<int64_t>(1, (N + most - 1) / most);
    const int64_t even = std::max<int64_t>(1, (N + pieces - 1) / pieces);
    step = (even + whole - 1) / whole * whole;
  }
  template <class F>
  void for_each(const F& f) const {
    for (int64_t first = 0; first < rows; first += step) f(first, std::min(step, rows - first));
  }
};

// How dy is quantised for one of its products, chunk by chunk.
struct ChunkCast {
  kernels::QuantizeOptions options;
  Tensor given = {};    // delayed: the scale
  Tensor largest = {};  // of all chunks, where a scale is of more than one
  Tensor scales = {};

  bool needs_all() const { return !given.defined() && options.tile.rows == 0; }
  void see(const Tensor& dy) {
    if (!needs_all()) return;
    const Tensor here = kernels::largest_of_tiles(dy, options.tile);
    if (largest.defined()) {
      kernels::merge_largest(largest, here);
    } else {
      largest = here;
    }
  }
  kernels::Quantized quantized(const Tensor& dy) {
    if (!needs_all()) return kernels::quantize(dy, options, given);
    if (!scales.defined()) scales = kernels::scales_of(largest, options);
    return kernels::quantize_by(dy, options, scales);
  }
};

// All logits at once, as a GPU has it. Their gradient with one scale is calculated while it is
// quantised, and never stored; with scales of rows and tiles it overwrites them, and is multiplied
// by that of the loss while it is quantised.
Tensor whole_head(const Tensor& given, const Tensor& weight, const Tensor& target,
                  std::shared_ptr<Fp8Linear> layer, int64_t ignore_index) {
  const Op& op = kFp8Head;
  const int64_t N = given.size(0), V = weight.size(0), C = weight.size(1);
  const Fp8Casts casts = layer->casts();
  const std::optional<DType> through = fp8_through(given, casts);
  const Tensor x = through ? given : detail::autocast_product(given);
  const DType dtype = through.value_or(x.dtype()), dtype_of_loss = loss_dtype(x);
  const Tensor targets = kernels::check_targets("cross_entropy", target, V, ignore_index);
  const Fp8Operands operands = fp8_operands(op, x, weight, *layer, through);
  const Fp8Kept kept = operands.kept();
  const bool folds = casts.grad_output.tile == kernels::ScaleTile::tensor() &&
                     casts.grad_output_of_weight == std::optional(casts.grad_output);
  return differentiable(
      op, {x, weight, targets, kept.x, kept.x_scales, kept.weight, kept.weight_scales},
      [&](Inputs, Extras& extras) {
        const Tensor logits = kernels::fp8_matmul({operands.x}, {operands.weight, true}, dtype,
                                                  {.fast_accumulation = true});
        count_flops(fp8_flops(N, V, C));
        const Tensor counted =
            kernels::sum(kernels::binary<fn::Ne>(targets, ignore_index), {0}, false, kF64);
        const auto mean_of = [&](const Tensor& losses) {
          const Tensor total = kernels::sum(losses, {0}, false, kF64);
          return kernels::convert(kernels::binary<fn::Div>(total, counted), dtype_of_loss);
        };
        if (folds || !extras.wanted()) {
          const kernels::CrossEntropyRows rows =
              kernels::cross_entropy_forward(logits, targets, {.ignore_index = ignore_index});
          if (extras.wanted()) {
            for (const Tensor& each : {logits, targets, rows.statistics, counted}) {
              extras.save(each);
            }
          }
          return mean_of(rows.losses);
        }
        // Of f16 the division waits for what the loss is multiplied by: it would sink.
        const bool divides_later = dtype == kF16;
        const Tensor losses = raw::empty({N}, kF64, logits.device());
        kernels::cross_entropy_in_place(logits, targets, ignore_index,
                                        divides_later ? Tensor() : counted, losses);
        extras.save(logits);
        extras.save(divides_later ? counted : Tensor());
        return mean_of(losses);
      },
      [=](Grads up, const Saved& s) -> TensorList {
        TensorList grads(7);
        Fp8Gradient dy8;
        if (folds) {
          const Tensor up_of_loss = kernels::contiguous(kernels::convert(up[0], kF32));
          const kernels::Quantized once = kernels::quantize_logits_gradient(
              {.logits = s.extra(0),
               .targets = s.extra(1),
               .statistics = s.extra(2),
               .gradient = up_of_loss,
               .divisor = s.extra(3),
               .ignore_index = ignore_index},
              casts.grad_output, layer->scale(Fp8Role::kGradOutput),
              fp8_grad_wants(*layer, s.needs(0), s.needs(1), /*sums=*/false));
          layer->saw(Fp8Role::kGradOutput, s.extra(0), once);
          dy8 = {.of_x = once, .of_weight = once};
        } else {
          Tensor factor = kernels::convert(up[0], kF64);
          if (s.extra(1).defined()) {
            factor =
                kernels::binary<fn::Div>(factor, kernels::binary<fn::Maximum>(s.extra(1), 1.0));
          }
          dy8 = fp8_gradient(s.extra(0), *layer,
                             {.x = s.needs(0),
                              .weight = s.needs(1),
                              .factor = raw::view(kernels::convert(factor, kF32), {1})});
        }
        if (s.needs(0)) {
          grads[0] = kernels::fp8_matmul(
              {dy8.of_x}, {fp8_kept(s.input(5), s.input(6), casts.weight_of_grad.tile)},
              through ? kF32 : dtype);
          count_flops(fp8_flops(N, C, V));
        }
        if (s.needs(1)) {
          grads[1] = kernels::fp8_matmul(
              {dy8.of_weight, true},
              {fp8_kept(s.input(3), s.input(4), casts.input_of_weight->tile)}, dtype);
          count_flops(fp8_flops(V, C, N));
        }
        return grads;
      });
}

}  // namespace

Tensor fp8_linear_cross_entropy(const Tensor& given, const Tensor& weight, const Tensor& target,
                                std::shared_ptr<Fp8Linear> layer, int64_t ignore_index,
                                Reduction reduction, int64_t chunk) {
  const int64_t N = given.size(0), V = weight.size(0), C = weight.size(1);
  const bool on_gpu = given.device().is_cuda();
  if (on_gpu && reduction == Reduction::kMean && layer->casts().input_of_weight) {
    return whole_head(given, weight, target, std::move(layer), ignore_index);
  }
  if (N * V <= chunk || given.is_meta() || on_gpu) {
    return cross_entropy(fp8_linear(given, weight, {}, std::move(layer)), target,
                         {.ignore_index = ignore_index, .reduction = reduction});
  }
  const Tensor x = detail::autocast_product(given);
  const Tensor targets = kernels::check_targets("cross_entropy", target, V, ignore_index);
  const Fp8Casts casts = layer->casts();
  const Fp8Operands operands = fp8_operands(kFp8LinearCrossEntropy, x, weight, *layer);
  Fp8Kept kept = operands.kept();
  const bool same_x = casts.input_of_weight && *casts.input_of_weight == casts.input;
  const bool same_weight = casts.weight_of_grad == casts.weight;
  if (same_x) kept.x = kept.x_scales = Tensor();
  if (same_weight) kept.weight = kept.weight_scales = Tensor();
  const DType dtype = x.dtype(), dtype_of_loss = loss_dtype(x);
  const HeadChunks chunks(N, V, chunk, casts);
  const kernels::CrossEntropyAttributes attributes{.ignore_index = ignore_index};
  const bool mean = reduction == Reduction::kMean;

  return differentiable(
      kFp8LinearCrossEntropy,
      {x, weight, targets, operands.x.values, operands.x.inverse, operands.weight.values,
       operands.weight.inverse, kept.x, kept.x_scales, kept.weight, kept.weight_scales},
      [&](Inputs, Extras& extras) {
        const Tensor losses = raw::empty({N}, kF32), statistics = raw::empty({N, 2}, kF32);
        double counted = 0;
        chunks.for_each([&](int64_t first, int64_t rows) {
          const Tensor logits = kernels::fp8_matmul({kernels::rows_of(operands.x, first, rows)},
                                                    {operands.weight, true}, dtype);
          count_flops(fp8_flops(rows, V, C));
          const kernels::CrossEntropyRows here = kernels::cross_entropy_forward(
              logits, raw::narrow(targets, 0, first, rows), attributes);
          kernels::copy_into(raw::narrow(losses, 0, first, rows), here.losses);
          kernels::copy_into(raw::narrow(statistics, 0, first, rows), here.statistics);
          counted += here.total_weight.item();
        });
        const Tensor divisor = scalar_tensor(counted, kF64);
        extras.save(statistics);
        extras.save(mean ? divisor : Tensor());
        const Tensor total = kernels::sum(losses, {0}, false, kF64);
        return kernels::convert(mean ? kernels::binary<fn::Div>(total, divisor) : total,
                                dtype_of_loss);
      },
      [=](Grads up, const Saved& s) -> TensorList {
        const auto bytes = [&](int values, const kernels::QuantizeOptions& options) {
          return kernels::Quantized{.values = s.input(values),
                                    .scale = {},
                                    .inverse = s.input(values + 1),
                                    .tile = options.tile};
        };
        const bool wants_x = s.needs(0), wants_weight = s.needs(1);
        const Tensor targets = s.input(2), statistics = s.extra(0), divisor = s.extra(1);
        const kernels::Quantized x8 = bytes(3, casts.input), weight8 = bytes(5, casts.weight);
        const Tensor factor = raw::view(up[0], {1});
        const auto gradient_of = [&](int64_t first, int64_t rows) {
          const Tensor logits =
              kernels::fp8_matmul({kernels::rows_of(x8, first, rows)}, {weight8, true}, dtype);
          count_flops(fp8_flops(rows, V, C));
          return kernels::cross_entropy_backward(
              logits, raw::narrow(targets, 0, first, rows), attributes,
              raw::narrow(statistics, 0, first, rows), factor, divisor);
        };

        const Tensor given = layer->scale(Fp8Role::kGradOutput);
        std::optional<ChunkCast> of_x, of_weight;  // the second where it is not the first
        if (wants_x) of_x = {.options = casts.grad_output, .given = given};
        const bool low = wants_weight && casts.grad_output_of_weight;
        if (low && (!of_x || *casts.grad_output_of_weight != casts.grad_output)) {
          of_weight = {.options = *casts.grad_output_of_weight, .given = given};
        }
        if ((of_x && of_x->needs_all()) || (of_weight && of_weight->needs_all())) {
          chunks.for_each([&](int64_t first, int64_t rows) {
            const Tensor dy = gradient_of(first, rows);
            if (of_x) of_x->see(dy);
            if (of_weight) of_weight->see(dy);
          });
        }

        TensorList grads(11);
        const kernels::Quantized weight_of_grad =
            !wants_x || same_weight ? weight8 : bytes(9, casts.weight_of_grad);
        const kernels::Quantized x_of_weight =
            !low || same_x ? x8 : bytes(7, *casts.input_of_weight);
        if (wants_x) grads[0] = raw::empty({N, C}, dtype);
        kernels::Fp8Sums sums;
        Tensor high;  // f32 sums of grad_W in the dtype of x
        if (wants_weight && !low) high = raw::empty({V, C}, kF32);
        float amax = 0;
        chunks.for_each([&](int64_t first, int64_t rows) {
          const Tensor dy = gradient_of(first, rows);
          kernels::Quantized dy8;
          const auto quantize = [&](ChunkCast& cast) {
            const bool seen = dy8.values.defined();
            dy8 = cast.quantized(dy);
            if (seen) return;
            amax = dy8.amax = kernels::larger_magnitude(amax, dy8.amax);  // of dy until here
            layer->saw(Fp8Role::kGradOutput, dy, dy8);
          };
          if (of_x) {
            quantize(*of_x);
            kernels::copy_into(raw::narrow(grads[0], 0, first, rows),
                               kernels::fp8_matmul({dy8}, {weight_of_grad}, dtype));
            count_flops(fp8_flops(rows, C, V));
          }
          if (low) {
            if (of_weight) quantize(*of_weight);
            sums.add({dy8, true}, {kernels::rows_of(x_of_weight, first, rows)});
          } else if (wants_weight) {
            kernels::matmul_into(high, raw::transpose(dy, 0, 1),
                                 raw::narrow(s.input(7), 0, first, rows), first > 0);
          }
          if (wants_weight) count_flops(fp8_flops(V, C, rows));
        });
        if (low) grads[1] = sums.result(dtype);
        if (high.defined()) grads[1] = kernels::convert(high, dtype);
        return grads;
      });
}

Tensor linear_cross_entropy_by(const std::shared_ptr<Fp8Linear>& layer, const Tensor& x,
                               const Tensor& weight, const Tensor& target, int64_t ignore_index,
                               Reduction reduction) {
  check_linear_cross_entropy(x, weight, target);
  if (reduction == Reduction::kNone) {
    return cross_entropy(linear_by(layer, x, weight, {}), target,
                         {.ignore_index = ignore_index, .reduction = reduction});
  }
  return layer->takes(x, weight, x.size(0))
             ? fp8_linear_cross_entropy(x, weight, target, layer, ignore_index, reduction)
             : linear_cross_entropy(x, weight, target, ignore_index, reduction);
}

}  // namespace tessera
