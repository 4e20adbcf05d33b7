// What a fused op asks of a module that it replaces (fused.h).
#pragma once

#include <initializer_list>

#include <tessera/core/tensor/tensor.h>

namespace tessera::nn {

class Linear;
class ModuleBase;

// Whether everything that a call of the module does besides forward runs in scopes
// (register_call_scope); then other code may run in these scopes instead of forward. True without
// hooks.
bool has_scopes_alone(const ModuleBase& module);

// Whether a fused op may read the layer's weight instead of calling the layer.
bool is_plain(const Linear& layer);
// What the layer adds, as its boundary has it.
Tensor bias_of(const Linear& layer);
// To be called when it does: a layer that a recipe leaves out of fp8 counts its calls.
void count_call(const Linear& layer, const Tensor& x);

// Whether products of x should run fused with `other`, which is added or multiplied: on a GPU,
// where both have the dtype of the active autocast, if any, and calling the modules would do
// nothing else.
bool fuses_products(const Tensor& x, const Tensor& other,
                    std::initializer_list<const ModuleBase*> modules);

// What `layer`, which is called with x, adds to its result (transformer/residual.h); undefined for
// nothing.
Tensor take_residual(const Linear& layer, const Tensor& x);
// forward of a layer whose weight is packed (quantize/quantize.h).
Tensor quantized_linear(const Linear& layer, const Tensor& x);

}  // namespace tessera::nn
