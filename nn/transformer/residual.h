// Pre-norm blocks with a residual around each part, x + part(norm(x)), as in GPT-2.
//
//     struct Block : nn::Module<Block> {
//       explicit Block(int64_t width)
//           : ln_1(add<nn::LayerNorm>("ln_1", width)),
//             mix(add<nn::Linear>("mix", width, width)),
//             ln_2(add<nn::LayerNorm>("ln_2", width)),
//             mlp(add<nn::Mlp>("mlp", width, 4 * width)) {}
//       nn::Residual forward(const nn::Residual& x) {
//         const nn::Residual mixed = nn::pre_norm_residual(x, ln_1, mix);  // x + mix(ln_1(x))
//         return nn::pre_norm_residual(mixed, ln_2, mlp);
//       }
//       nn::LayerNorm& ln_1;
//       nn::Linear& mix;
//       nn::LayerNorm& ln_2;
//       nn::Mlp& mlp;
//     };
//     Block first(64), second(64);
//     Tensor y = nn::pre_norm(ln, second(first(x)));  // a tensor is a Residual
//
// The result is that of the formula, within rounding, in fewer passes over memory. An addition is
// left to the next norm, which does both at once. On a GPU the last product of a part adds the
// residual itself, and a norm before an fp8 layer writes that layer's operand
// (autograd/fp8/norm.h); for these a part declares its first and last layers.
//
//     nn::PartEnds ends() const { return {&c_attn, &c_proj}; }  // in Attention
//
// As in fused.h, hooks, scopes of a policy, adapters and sharded units are respected: if the part
// or its last layer has one, the layer is called and the next norm adds.
#pragma once

#include <optional>
#include <utility>

#include <tessera/autograd/ops.h>
#include <tessera/core/context.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/module.h>
#include <tessera/nn/norm.h>

namespace tessera::nn {

// The sum of the blocks so far, and the last block's addition to it.
struct Residual {
  Residual(Tensor sum_in = {}, Tensor update_in = {})
      : sum(std::move(sum_in)), update(std::move(update_in)) {}
  Tensor tensor() const { return update.defined() ? update + sum : sum; }
  void visit_tensors(auto&& visit) { visit(sum), visit(update); }

  Tensor sum;
  Tensor update;  // undefined where nothing is left to add
};

namespace detail {

// {x, norm(x)}; only `reader` reads the norm, null: any layer.
ResidualNorm pre_norm_for(const Linear* reader, LayerNorm& norm, const Residual& x);

// What the call of a layer, or the fused op that replaces it, may add to its result.
struct ResidualSlot {
  const Linear* layer = nullptr;
  Tensor sum = {};
  bool taken = false;
};
// During its lifetime `last` may add `sum`, where that pays.
class LentResidual {
 public:
  LentResidual(const ModuleBase& part, const Linear* last, const Tensor& normalized,
               const Tensor& sum);
  bool taken() const { return scope_ && Context::current().slot<ResidualSlot>().taken; }

 private:
  std::optional<ScopedValue<ResidualSlot>> scope_;
};

}  // namespace detail

// norm(x).
inline Tensor pre_norm(LayerNorm& norm, const Residual& x) {
  return detail::pre_norm_for(nullptr, norm, x).normalized;
}

struct PreNormOptions {
  double dropout = 0;  // of the part's result; 0 in evaluation
};
// x + part(norm(x), arguments...)
template <class Part, class... Args>
Residual pre_norm_residual(const Residual& x, LayerNorm& norm, Part& part,
                           const PreNormOptions& options = {}, Args&&... arguments) {
  PartEnds ends;
  if constexpr (requires { part.ends(); }) ends = part.ends();
  const auto [sum, normalized] = detail::pre_norm_for(ends.first, norm, x);
  if (options.dropout > 0) ends.last = nullptr;
  const detail::LentResidual lent(part, ends.last, normalized, sum);
  Tensor update = part(normalized, std::forward<Args>(arguments)...);
  if (lent.taken()) return update;
  return {sum, dropout(update, options.dropout)};
}

}  // namespace tessera::nn
