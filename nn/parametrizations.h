// A parameter that is calculated from others at each call, as torch.nn.utils.parametrizations.
//
//     nn::Conv2d conv(16, 32, 3);
//     nn::weight_norm(conv);    // weight = g v / |v|, row by row (Salimans, Kingma 2016)
//     nn::Linear linear(16, 1);
//     nn::spectral_norm(linear);  // weight / its largest singular value (Miyato et al. 2018)
//
// State names are torch's: "parametrizations.weight.original0" (g) and "original1" (v) of
// weight_norm; "parametrizations.weight.original" of spectral_norm, with the buffers
// "parametrizations.weight.0._u" and "_v". They are what is trained, saved and moved. In a call of
// the module the calculated tensor stands in the parameter's place, once for all that the call
// does; outside of calls the place is empty, and parametrized(module) gives the tensor. The order
// is: parametrize, then make optimizers, replicate or shard. clone() takes parametrizations along.
// A module has them or adapters (lora.h), not both. Parameters with bytes: materialise first.
// Throws ValueError for a name that is no parameter, or is parametrized already.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include <tessera/nn/module.h>

namespace tessera::nn {

// g: the norms of the parameter over all dimensions but `dim`, whose others have size 1; without
// `dim` one number. The parameter is what it was, up to rounding, until g or v change.
void weight_norm(ModuleBase& module, std::string_view name = "weight",
                 std::optional<int64_t> dim = 0);

struct SpectralNormOptions {
  int64_t n_power_iterations = 1;  // in each call while training
  double eps = 1e-12;
  std::optional<int64_t> dim = {};  // of the rows: 0, of transposed convolutions 1
};
// The parameter is seen as a matrix of `dim` and the rest. u and v, its singular vectors, begin
// random, drawn from the parameter's dotted name, and are improved 15 times at once. One of one
// dimension is divided by its norm.
void spectral_norm(ModuleBase& module, std::string_view name = "weight",
                   const SpectralNormOptions& options = {});

bool is_parametrized(const ModuleBase& module, std::string_view name = "weight");
// What a call would put in the parameter's place now, on the tape. u and v stay as they are.
Tensor parametrized(const ModuleBase& module, std::string_view name = "weight");
// The parameter is an ordinary one again, with the value that it has now.
void remove_parametrizations(ModuleBase& module, std::string_view name = "weight");

}  // namespace tessera::nn
