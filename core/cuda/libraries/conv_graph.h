// Convolution and the gradient of batch norm by cuDNN, as data; as attention_graph.h has it for
// attention. core/kernels/conv/conv.cu and channel_norm.cu ask here first.
//
// Tensors lie as [N, C, H, W] and [O, C / groups, KH, KW] without gaps. Sums are f32. Engines that
// the library notes as changing from run to run, as summing in fewer bits, or as cutting f32 to
// 10 bits of mantissa (unless GemmOptions::tf32) are left out.
#pragma once

#include <cstdint>
#include <string>

#include <tessera/core/cuda/libraries/library_graph.h>

namespace tessera::gpu {

struct ConvProblem {
  GraphOp op = GraphOp::kConvolution;  // or one of its gradients
  DType dtype = kBF16;
  Shape x = {}, weight = {}, y = {};  // shapes
  GraphWindow window = {};
  int64_t groups = 1;
  bool tf32 = false;
  // Two are read and the third is written.
  void *x_data = nullptr, *weight_data = nullptr, *y_data = nullptr;
};

enum ConvSlot : int { kConvInputSlot, kConvWeightSlot, kConvOutputSlot, kConvSlots };

std::string validate(const ConvProblem& problem, int version);
LibraryGraph conv_graph(const ConvProblem& problem);
std::string describe(const ConvProblem& problem);
GraphRequest conv_request(const ConvProblem& problem);

}  // namespace tessera::gpu
