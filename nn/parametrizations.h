// Parameters that are calculated from others in each call, as torch.nn.utils.parametrizations.
//
//     nn::Conv2d conv(16, 32, 3);
//     nn::weight_norm(conv);    // weight = g v / |v|, row by row (Salimans, Kingma 2016)
//     nn::Linear linear(16, 1);
//     nn::spectral_norm(linear);  // weight / its largest singular value (Miyato et al. 2018)
//
// State names are torch's: "parametrizations.weight.original0" (g) and "original1" (v) of
// weight_norm; "parametrizations.weight.original" of spectral_norm, with the buffers
// "parametrizations.weight.0._u" and "_v". These are trained, saved and moved. During a call of the
// module the calculated tensor is in the parameter's place, calculated once for the whole call;
// outside of calls the parameter is undefined, and parametrized(module) returns the tensor. First
// parametrize, then make optimizers, replicate or shard. clone() copies parametrizations. A module
// has them or adapters (lora.h), not both. Parameters need memory: materialise first. Throws
// ValueError for a name that is not a parameter or is parametrized already.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include <tessera/nn/module.h>

namespace tessera::nn {

// g: the norms of the parameter over all dimensions except `dim`, which become 1; without `dim` one
// number. The parameter keeps its value, up to rounding, until g or v change.
void weight_norm(ModuleBase& module, std::string_view name = "weight",
                 std::optional<int64_t> dim = 0);

struct SpectralNormOptions {
  int64_t n_power_iterations = 1;  // in each call while training
  double eps = 1e-12;
  std::optional<int64_t> dim = {};  // of the rows: 0, for transposed convolutions 1
};
// The parameter is viewed as a matrix of `dim` and the rest. u and v, its singular vectors, begin
// random, drawn from the parameter's dotted name, with 15 iterations at once. A 1-D parameter is
// divided by its norm.
void spectral_norm(ModuleBase& module, std::string_view name = "weight",
                   const SpectralNormOptions& options = {});

bool is_parametrized(const ModuleBase& module, std::string_view name = "weight");
// The tensor that a call would calculate now, with gradients recorded. u and v do not change.
Tensor parametrized(const ModuleBase& module, std::string_view name = "weight");
// Makes the parameter an ordinary one again, with its current value.
void remove_parametrizations(ModuleBase& module, std::string_view name = "weight");

}  // namespace tessera::nn
