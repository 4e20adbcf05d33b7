// What a fused op asks of a module that it stands in for (fused.h).
#pragma once

#include <initializer_list>

#include <tessera/core/tensor/tensor.h>

namespace tessera::nn {

class Linear;
class ModuleBase;

// Whether all that a call of the module does beyond forward is to stand in scopes
// (register_call_scope): then something else may run in them in forward's place. True without
// hooks.
bool has_scopes_alone(const ModuleBase& module);

// Whether a fused op may read the layer's weight in place of a call.
bool is_plain(const Linear& layer);
// For who does so. A layer that a recipe leaves out of fp8 counts its calls.
void count_call(const Linear& layer, const Tensor& x);

// Whether products of x had better do more than the modules' calls say, at once with `other`, which
// is added or multiplied: on a GPU, where both have one dtype, which is that of an autocast that
// they are in, and calling the modules does nothing else.
bool fuses_products(const Tensor& x, const Tensor& other,
                    std::initializer_list<const ModuleBase*> modules);

// What `layer`, which is called with x, adds to its result (transformer/residual.h); undefined:
// nothing.
Tensor take_residual(const Linear& layer, const Tensor& x);

}  // namespace tessera::nn
