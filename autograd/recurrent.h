// One direction of a layer of an LSTM, a GRU or an RNN over all steps of its sequences, for
// nn/recurrent/recurrent.h. Order of gates, formulas and values are torch's.
//
//     const Tensor x = randn({7, 2, 5}), weight_ih = randn({12, 5}), weight_hh = randn({12, 3}),
//                  bias = zeros({12}), state = zeros({2, 3});
//     const RecurrentLayer r = lstm_layer(x, weight_ih, weight_hh, bias, bias, state, state);
//
// x: [L, N, in] with one length for all sequences, or [rows, in] with the batch_sizes of packed
// ones: step by step, the longest first. Weights: [gates H, in] and [gates H, H], biases
// [gates H], both or none; states: [N, H] before the first step. One dtype: f64, f32, f16 or bf16;
// under autocast all are read in its dtype. Throws ShapeError, DTypeError.
//
// On the CPU lstm_layer and gru_layer are one op with one product for all gates and steps of x, one
// product for each step and one pass over its gates (core/kernels/recurrent/recurrent.h). Backward
// needs x, the weights, the output, the gates and (LSTM) the cells, (GRU) the recurrent sums of the
// new gate. Second derivatives use the composed ops, which a GPU, an LSTM with a projection and
// rnn_layer always run.
#pragma once

#include <vector>

#include <tessera/core/tensor/tensor.h>

namespace tessera {

struct RecurrentSteps {
  // For a packed x: how many sequences reach each step, descending from N. Empty: x is [L, N, in].
  std::vector<int64_t> batch_sizes = {};
  bool reverse = false;  // from each sequence's last step to its first
};
struct RecurrentLayer {
  Tensor output;  // [L, N, H], or [rows, H]
  Tensor hidden;  // [N, H]: after the last step that was taken
  Tensor cell;    // [N, H] of an LSTM
};

// Gates: input, forget, cell, output. With weight_hr [proj, H] states and outputs are projected to
// [.., proj], and weight_hh is [4 H, proj].
RecurrentLayer lstm_layer(const Tensor& x, const Tensor& weight_ih, const Tensor& weight_hh,
                          const Tensor& bias_ih, const Tensor& bias_hh, const Tensor& hidden,
                          const Tensor& cell, const RecurrentSteps& steps = {},
                          const Tensor& weight_hr = {});
// Gates: reset, update, new. The reset gate multiplies the recurrent sum of the new gate, including
// its bias.
RecurrentLayer gru_layer(const Tensor& x, const Tensor& weight_ih, const Tensor& weight_hh,
                         const Tensor& bias_ih, const Tensor& bias_hh, const Tensor& hidden,
                         const RecurrentSteps& steps = {});
// h = tanh(W_ih x + b_ih + W_hh h + b_hh), or relu.
RecurrentLayer rnn_layer(const Tensor& x, const Tensor& weight_ih, const Tensor& weight_hh,
                         const Tensor& bias_ih, const Tensor& bias_hh, const Tensor& hidden,
                         bool relu = false, const RecurrentSteps& steps = {});

// One step, torch's lstm_cell and gru_cell: made of ops on every device. x: [N, in] or [in]; states
// [N, H] or [H].
struct LstmStates {
  Tensor hidden;
  Tensor cell;
};
LstmStates lstm_cell(const Tensor& x, const Tensor& hidden, const Tensor& cell,
                     const Tensor& weight_ih, const Tensor& weight_hh, const Tensor& bias_ih = {},
                     const Tensor& bias_hh = {});
Tensor gru_cell(const Tensor& x, const Tensor& hidden, const Tensor& weight_ih,
                const Tensor& weight_hh, const Tensor& bias_ih = {}, const Tensor& bias_hh = {});

}  // namespace tessera
