// What a fused op asks of a module that it stands in for (fused.h).
#pragma once

namespace tessera::nn {

class ModuleBase;

// Whether all that a call of the module does beyond forward is to stand in scopes
// (register_call_scope): then something else may run in them in forward's place. True without
// hooks.
bool has_scopes_alone(const ModuleBase& module);

}  // namespace tessera::nn
