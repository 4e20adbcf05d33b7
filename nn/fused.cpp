#include <tessera/nn/fused.h>

#include <tessera/nn/call_scopes.h>

namespace tessera::nn {

Tensor linear_gelu(Linear& layer, const Tensor& x, Gelu approximate) {
  if (layer.has_hooks()) return gelu(layer(x), approximate);
  return tessera::linear_gelu(x, layer.weight, layer.bias, approximate);
}

Tensor linear_gelu_linear(Linear& inner, Linear& outer, const Tensor& x, Gelu approximate) {
  if (inner.has_hooks() || outer.has_hooks()) return outer(linear_gelu(inner, x, approximate));
  return tessera::linear_gelu_linear(x, inner.weight, inner.bias, outer.weight, outer.bias,
                                     approximate);
}

ResidualNorm residual_layer_norm(LayerNorm& norm, const Tensor& x, const Tensor& residual) {
  if (norm.has_hooks()) {
    const Tensor sum = x + residual;
    return {sum, norm(sum)};
  }
  return tessera::residual_layer_norm(x, residual, norm.normalized_shape, norm.weight, norm.bias,
                                      norm.options.eps);
}

Tensor linear_cross_entropy(Linear& head, const Tensor& x, const Tensor& target,
                            int64_t ignore_index, Reduction reduction) {
  if (head.bias.defined() || !has_scopes_alone(head)) {
    return cross_entropy(head(x), target, {.ignore_index = ignore_index, .reduction = reduction});
  }
  ModuleCall call(head);
  try {
    if (call.has_hooks()) call.before({});
    return tessera::linear_cross_entropy(x, head.weight, target, ignore_index, reduction);
  } catch (...) {
    call.rethrow_named();
  }
}

Mlp::Mlp(int64_t features, int64_t hidden_features, const MlpOptions& options)
    : options(options),
      inner(add<Linear>(options.inner, features, hidden_features,
                        LinearOptions{.bias = options.bias})),
      outer(add<Linear>(options.outer, hidden_features, features,
                        LinearOptions{.bias = options.bias})) {}

Tensor Mlp::forward(const Tensor& x) {
  return linear_gelu_linear(inner, outer, x, options.approximate);
}

}  // namespace tessera::nn
