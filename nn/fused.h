// Fused ops over modules: one op on the weights of a chain of modules.
//
//     Tensor hidden = nn::linear_gelu(dense, x);                       // gelu(dense(x))
//     auto [sum, normed] = nn::residual_layer_norm(ln, x, residual);   // ln(x + residual)
//     Tensor loss = nn::linear_cross_entropy(lm_head, x, targets);     // logits never whole
//
// Each is the op of its name in autograd/ops.h. It reads the modules' weights only while calling
// them would do nothing else (ModuleBase::has_hooks). If one has a hook, the scope of a policy, an
// adapter or a sharded unit, or runs in fp8, the modules are called one after the other, so each is
// called once a forward either way. Both forms agree within rounding. A head with its loss, whose
// logits are large, is fused in scopes and in fp8 too (autograd/fp8/head.h).
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>

#include <tessera/autograd/ops.h>
#include <tessera/nn/embedding.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/module.h>
#include <tessera/nn/norm.h>

namespace tessera::nn {

// gelu(layer(x)).
Tensor linear_gelu(Linear& layer, const Tensor& x, Gelu approximate = Gelu::kNone);

// outer(gelu(inner(x))).
Tensor linear_gelu_linear(Linear& inner, Linear& outer, const Tensor& x,
                          Gelu approximate = Gelu::kNone);

// table(index) + other: the rows of tokens and those of their positions.
Tensor embedding_add(Embedding& table, const Tensor& index, const Tensor& other);

// {x + residual, norm(x + residual)}, after dropout of x with probability `drop`.
ResidualNorm residual_layer_norm(LayerNorm& norm, const Tensor& x, const Tensor& residual,
                                 double drop = 0);
ResidualNorm residual_rms_norm(RMSNorm& norm, const Tensor& x, const Tensor& residual);

// cross_entropy(head(x), target) over all rows. x: [..., C]; target: [...]. A head with a bias, or
// with hooks other than scopes, is called, and its logits are materialized.
Tensor linear_cross_entropy(Linear& head, const Tensor& x, const Tensor& target,
                            int64_t ignore_index = -100, Reduction reduction = Reduction::kMean);

// The results of layers of one width that read the same x, side by side in the last dimension, from
// one product with concatenated weights. With many rows this is faster on a GPU, since each layer
// alone has few tiles and their gradients of x must be added up. Undefined if the layers have to be
// called.
Tensor stacked_linear(std::initializer_list<Linear*> layers, const Tensor& x);

// x as the module's boundary (parallel_style.h) has it, x itself where there is none: for several
// modules that read it and begin alike, so that it is converted once.
Tensor entered(const ModuleBase& module, const Tensor& x);

struct MlpOptions {
  Gelu approximate = Gelu::kNone;
  bool bias = true;
  // The children's names in state dicts: {"c_fc", "c_proj"} for GPT-2.
  std::string inner = "fc1";
  std::string outer = "fc2";
};
// The perceptron of a transformer's layer. x: [..., features]; result: the same shape.
class Mlp : public Module<Mlp> {
 public:
  using Options = MlpOptions;
  Mlp(int64_t features, int64_t hidden_features, const MlpOptions& options = {});
  Tensor forward(const Tensor& x);
  PartEnds ends() const;
  std::unique_ptr<Mlp> remake() const {
    return std::make_unique<Mlp>(inner.in_features, inner.out_features, options);
  }

  const MlpOptions options;
  Linear& inner;
  Linear& outer;
};

}  // namespace tessera::nn
