#include <tessera/nn/transformer/residual.h>

#include <tessera/nn/call_scopes.h>
#include <tessera/nn/fused.h>
#include <tessera/nn/read_by.h>

namespace tessera::nn {
namespace detail {

ResidualNorm pre_norm_for(const Linear* reader, LayerNorm& norm, const Residual& x) {
  std::optional<ReadBy> scope;
  if (reader != nullptr) scope.emplace(*reader);
  if (!x.update.defined()) return {x.sum, norm(x.sum)};
  return residual_layer_norm(norm, x.update, x.sum);
}

LentResidual::LentResidual(const ModuleBase& part, const Linear* last, const Tensor& normalized,
                           const Tensor& sum) {
  if (last == nullptr || !fuses_products(normalized, sum, {&part, last})) return;
  scope_.emplace(Context::current().slot<ResidualSlot>(), ResidualSlot{last, sum});
}

}  // namespace detail

Tensor take_residual(const Linear& layer, const Tensor& x) {
  if (!x.device().is_cuda()) return {};
  detail::ResidualSlot& slot = Context::current().slot<detail::ResidualSlot>();
  if (slot.layer != &layer || slot.taken) return {};
  slot.taken = true;
  return slot.sum;
}

}  // namespace tessera::nn
