#include <tessera/nn/fused.h>

#include <algorithm>

#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/fp8/head.h>
#include <tessera/autograd/fp8/layer.h>
#include <tessera/core/context.h>
#include <tessera/nn/call_scopes.h>
#include <tessera/nn/parallel_style.h>
#include <tessera/nn/read_by.h>

namespace tessera::nn {

bool is_plain(const Linear& layer) {
  if (layer.has_hooks()) return false;
  const auto fp8 = layer.fp8();
  return fp8 == nullptr || fp8->is_left_out();
}
void count_call(const Linear& layer, const Tensor& x) {
  const auto fp8 = layer.fp8();
  if (fp8 == nullptr || x.dim() == 0) return;
  fp8->takes(x, layer.weight, numel_of(x.shape().slice(0, x.dim() - 1)));
}

Tensor entered(const ModuleBase& module, const Tensor& x) {
  return module.boundary() == nullptr ? x : module.boundary()->enter(x);
}

namespace {

Tensor left(const ModuleBase& module, const Tensor& y) {
  return module.boundary() == nullptr ? y : module.boundary()->leave(y);
}
bool leaves_as_is(const ModuleBase& module) {
  return module.boundary() == nullptr || module.boundary()->leaves_as_is();
}
bool enters_as_is(const ModuleBase& module) {
  return module.boundary() == nullptr || module.boundary()->enters_as_is();
}

}  // namespace

Tensor linear_gelu(Linear& layer, const Tensor& x, Gelu approximate) {
  if (!is_plain(layer) || !leaves_as_is(layer)) return gelu(layer(x), approximate);
  count_call(layer, x);
  return tessera::linear_gelu(entered(layer, x), layer.weight, bias_of(layer), approximate);
}

namespace {

bool has_one_scale(const Fp8Linear& layer) {
  const Fp8Casts& casts = layer.casts();
  return casts.input.tile == kernels::ScaleTile::tensor() && casts.input_of_weight.has_value();
}

// Both layers in fp8 on a GPU, with gelu inside of the quantisations; undefined where it is not
// to be.
Tensor fp8_linear_gelu_linear(Linear& inner, Linear& outer, const Tensor& x, Gelu approximate) {
  if (!has_scopes_alone(inner) || !has_scopes_alone(outer)) return {};
  if (inner.boundary() != nullptr || outer.boundary() != nullptr) return {};
  const std::shared_ptr<Fp8Linear> first = inner.fp8(), second = outer.fp8();
  if (first == nullptr || second == nullptr || !has_one_scale(*first)) return {};
  if (x.numel() == 0 || x.size(-1) != inner.weight.size(1)) return {};
  ModuleCall inner_call(inner);
  if (inner_call.has_hooks()) inner_call.before({});
  ModuleCall outer_call(outer);
  if (outer_call.has_hooks()) outer_call.before({});
  const int64_t rows = x.numel() / x.size(-1);
  if (!first->could_take(x, inner.weight, rows) || !second->could_take(x, outer.weight, rows)) {
    return {};
  }
  try {
    first->takes(x, inner.weight, rows);
    second->takes(x, outer.weight, rows);
    return tessera::fp8_linear_gelu_linear(x, inner.weight, inner.bias, first, outer.weight,
                                           outer.bias, second, approximate == Gelu::kTanh);
  } catch (...) {
    outer_call.rethrow_named();
  }
}

}  // namespace

Tensor linear_gelu_linear(Linear& inner, Linear& outer, const Tensor& x, Gelu approximate) {
  if (x.device().is_cuda()) {
    const Tensor y = fp8_linear_gelu_linear(inner, outer, x, approximate);
    if (y.defined()) return y;
  }
  if (!is_plain(inner) || !is_plain(outer) || !leaves_as_is(inner) || !enters_as_is(outer)) {
    return outer(linear_gelu(inner, x, approximate));
  }
  for (const Linear* each : {&inner, &outer}) count_call(*each, x);
  return left(outer, tessera::linear_gelu_linear(entered(inner, x), inner.weight, bias_of(inner),
                                                 outer.weight, bias_of(outer), approximate));
}

namespace {

Fp8Reader reader_of(const Linear& layer) {
  const auto fp8 = layer.fp8();
  // An adapter inside of the layer reads, too, and a boundary has x made another tensor first.
  if (layer.boundary() != nullptr) return {};
  if (fp8 == nullptr || fp8->is_left_out() || layer.num_children() > 0) return {};
  return {fp8, &layer.weight};
}

}  // namespace

ReadBy::ReadBy(const Linear& reader)
    : scope_(Context::current().slot<Fp8Reader>(), reader_of(reader)) {}

Tensor embedding_add(Embedding& table, const Tensor& index, const Tensor& other) {
  if (table.has_hooks() || table.boundary() != nullptr) return table(index) + other;
  return tessera::embedding_add(index, table.weight, other, table.options.padding_idx);
}

ResidualNorm residual_layer_norm(LayerNorm& norm, const Tensor& x, const Tensor& residual,
                                 double drop) {
  if (norm.has_hooks()) {
    const Tensor sum = dropout(x, drop) + residual;
    return {sum, norm(sum)};
  }
  const Tensor given = entered(norm, x), before = entered(norm, residual);
  const auto [sum, normalized] = tessera::residual_layer_norm(
      given, before, norm.normalized_shape, norm.weight, norm.bias, norm.options.eps, drop);
  return {sum, left(norm, normalized)};
}

ResidualNorm residual_rms_norm(RMSNorm& norm, const Tensor& x, const Tensor& residual) {
  if (norm.has_hooks()) {
    const Tensor sum = x + residual;
    return {sum, norm(sum)};
  }
  const Tensor given = entered(norm, x), before = entered(norm, residual);
  const auto [sum, normalized] = tessera::residual_rms_norm(given, before, norm.normalized_shape,
                                                            norm.factor(), norm.options.eps);
  return {sum, left(norm, normalized)};
}

Tensor linear_cross_entropy(Linear& head, const Tensor& x, const Tensor& target,
                            int64_t ignore_index, Reduction reduction) {
  const Tensor classes = target.dim() == 1 ? target : target.reshape({target.numel()});
  // Of what has entered: a part of the tokens has other rows.
  const auto rows_of = [&](const Tensor& each) {
    return each.dim() == 2 ? each : each.reshape({classes.size(0), each.size(-1)});
  };
  if (head.bias.defined() || !has_scopes_alone(head)) {
    const Tensor logits = rows_of(head(x));
    return cross_entropy(logits, classes, {.ignore_index = ignore_index, .reduction = reduction});
  }
  ModuleCall call(head);
  try {
    if (call.has_hooks()) call.before({});
    const Tensor rows = rows_of(entered(head, x));
    if (head.boundary() != nullptr && reduction != Reduction::kNone) {
      return head.boundary()->linear_cross_entropy(rows, head.weight, classes, ignore_index,
                                                   reduction == Reduction::kMean);
    }
    if (const auto fp8 = head.fp8()) {
      return linear_cross_entropy_by(fp8, rows, head.weight, classes, ignore_index, reduction);
    }
    return tessera::linear_cross_entropy(rows, head.weight, classes, ignore_index, reduction);
  } catch (...) {
    call.rethrow_named();
  }
}

bool fuses_products(const Tensor& x, const Tensor& other,
                    std::initializer_list<const ModuleBase*> modules) {
  if (!x.device().is_cuda() || x.dtype() != other.dtype()) return false;
  const AutocastMode& autocast = Context::current().slot<AutocastMode>();
  if (autocast.enabled && autocast.dtype != x.dtype()) return false;
  return std::ranges::all_of(modules, [](const ModuleBase* one) {
    if (one->boundary() != nullptr) return false;
    const auto* layer = dynamic_cast<const Linear*>(one);
    return layer != nullptr ? is_plain(*layer) : !one->has_hooks();
  });
}

Tensor stacked_linear(std::initializer_list<Linear*> layers, const Tensor& x) {
  constexpr int64_t kRows = 4;  // for each of a weight
  const Linear& first = **layers.begin();
  if (!x.device().is_cuda() || x.numel() < kRows * x.size(-1) * x.size(-1)) return {};
  TensorList weights, biases;
  for (const Linear* layer : layers) {
    if (!layer->bias.defined() || !fuses_products(x, first.weight, {layer})) return {};
    weights.push_back(layer->weight);
    biases.push_back(layer->bias);
  }
  for (const Linear* layer : layers) count_call(*layer, x);
  return linear(x, cat(weights, 0), cat(biases, 0));
}

Mlp::Mlp(int64_t features, int64_t hidden_features, const MlpOptions& options)
    : options(options),
      inner(add<Linear>(options.inner, features, hidden_features,
                        LinearOptions{.bias = options.bias})),
      outer(add<Linear>(options.outer, hidden_features, features,
                        LinearOptions{.bias = options.bias})) {}

PartEnds Mlp::ends() const { return {&inner, is_plain(inner) ? &outer : nullptr}; }

Tensor Mlp::forward(const Tensor& x) {
  const Tensor residual = is_plain(inner) ? take_residual(outer, x) : Tensor();
  if (!residual.defined()) return linear_gelu_linear(inner, outer, x, options.approximate);
  for (const Linear* each : {&inner, &outer}) count_call(*each, x);
  return tessera::linear_gelu_linear(x, inner.weight, inner.bias, outer.weight, outer.bias,
                                     options.approximate, residual);
}

}  // namespace tessera::nn
