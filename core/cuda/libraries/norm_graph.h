// The gradient of batch norm in training by cuDNN, as data; see conv_graph.h.
//
// x and its gradients lie as [N, C, H, W] without gaps, in f32, f16 or bf16; statistics, scale and
// the parameters' gradients are f32.
#pragma once

#include <cstdint>
#include <string>

#include <tessera/core/cuda/libraries/library_graph.h>

namespace tessera::gpu {

struct NormProblem {
  DType dtype = kBF16;
  int64_t N = 0, C = 0, S = 0;  // S: positions of a plane
  bool backward = true;         // false: training forward, y, mean and rstd of x
  double eps = 0;               // of forward
};

enum NormSlot : int {
  kNormInputSlot,
  kNormGradOutputSlot,
  kNormScaleSlot,
  kNormMeanSlot,
  kNormRstdSlot,
  kNormGradInputSlot,  // y of forward
  kNormGradScaleSlot,  // bias of forward
  kNormGradBiasSlot,
  kNormSlots
};

std::string validate(const NormProblem& problem, int version);
LibraryGraph norm_graph(const NormProblem& problem);
std::string describe(const NormProblem& problem);
GraphRequest norm_request(const NormProblem& problem);

}  // namespace tessera::gpu
