// A direction of a layer of an LSTM or a GRU on the CPU, all steps of all sequences in one call.
//
// T is the dtype of x, weights, biases, states and results (f64, f32, f16, bf16), C what is
// calculated in (f64 for f64, else f32). The input's products are one matrix product for all gates
// and steps, with sums in C. The recurrent weights are packed once; each step then multiplies the
// states and makes all gates, the cell and the new state in one pass. 16-bit states are rounded
// once a step, cells stay f32. Threads divide the sequences, or where these are few and a step is
// large its columns: bits do not depend on their number. As in gemm.h bf16 is multiplied in pairs
// where the processor has AVX-512 BF16, and so has bits of its own there.
//
// Backward walks back over the steps with one recurrent product each; gradients of weights, biases
// and x are one product or sum over all steps. Shapes are checked by the ops
// (autograd/recurrent.h). Meta tensors give meta results.
//
// Source: Hochreiter, Schmidhuber 1997; Cho et al. 2014 in the form of cuDNN and torch, whose reset
// gate multiplies the recurrent product of the new gate with its bias.
#pragma once

#include <cstdint>
#include <vector>

#include <tessera/core/tensor/tensor.h>

namespace tessera::kernels {

enum class RecurrentCell : uint8_t {
  kLstm,  // gates: input, forget, cell, output
  kGru,   // gates: reset, update, new
};

inline constexpr int64_t gates_of(RecurrentCell cell) {
  return cell == RecurrentCell::kLstm ? 4 : 3;
}

// G = gates_of(kind), N sequences, H units; R rows: one for each step of each sequence, step by
// step.
struct RecurrentLayerInputs {
  RecurrentCell kind = RecurrentCell::kLstm;
  std::vector<int64_t> batch_sizes;  // of each step: how many sequences reach it; descends from N
  bool reverse = false;              // the last step is taken first
  Tensor x;                          // (R, in)
  Tensor weight_ih;                  // (G H, in)
  Tensor weight_hh;                  // (G H, H)
  Tensor bias_ih;                    // (G H), or both undefined
  Tensor bias_hh;
  Tensor hidden;  // (N, H)
  Tensor cell;    // (N, H) of an LSTM
};

struct RecurrentLayerResult {
  Tensor output;  // (R, H)
  Tensor hidden;  // (N, H): of each sequence after its last step
  Tensor cell;
  // For backward, of C; undefined where it is not kept.
  Tensor gates;  // (R, G H), after sigmoid and tanh
  Tensor kept;   // (R, H): an LSTM's cells after each step, a GRU's recurrent sums of the new gate
};
RecurrentLayerResult recurrent_layer(const RecurrentLayerInputs& inputs, bool keep);

// Gradients of the results, each undefined for zeros, and what forward kept.
struct RecurrentLayerSaved {
  Tensor output, gates, kept;
  Tensor grad_output = {}, grad_hidden = {}, grad_cell = {};
};
struct RecurrentLayerWanted {
  bool x = true, weight_ih = true, weight_hh = true, bias_ih = true, bias_hh = true;
};
struct RecurrentLayerGradients {
  Tensor x, weight_ih, weight_hh, bias_ih, bias_hh;  // undefined where they are not wanted
  Tensor hidden, cell;
};
RecurrentLayerGradients recurrent_layer_backward(const RecurrentLayerInputs& inputs,
                                                 const RecurrentLayerSaved& saved,
                                                 const RecurrentLayerWanted& wanted);

}  // namespace tessera::kernels
