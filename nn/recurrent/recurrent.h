// LSTM (Hochreiter, Schmidhuber 1997), GRU (Cho et al. 2014) and RNN (Elman 1990), with torch's
// parameter names and order of gates (LSTM: input, forget, cell, output; GRU: reset, update, new).
//
// All take sequences of one length, padded, or of different lengths, packed (packed_sequence.h).
// The products with the inputs of all steps are one matrix product a layer; the recurrent products
// run step by step. On the CPU one direction of an LSTM or GRU layer is one op
// (autograd/recurrent.h); on a GPU, with a projection and for RNN each step runs several ops.
#pragma once

#include <memory>
#include <vector>

#include <tessera/nn/module.h>
#include <tessera/nn/recurrent/packed_sequence.h>

namespace tessera::nn {

struct RecurrentOptions {
  enum class Nonlinearity { kTanh, kRelu };
  int64_t num_layers = 1;
  bool bias = true;
  bool batch_first = false;  // [N, L, ...] instead of [L, N, ...]; states are [layers, N, ...]
  double dropout = 0;        // between layers, while training
  bool bidirectional = false;
  int64_t proj_size = 0;  // LSTM: above 0, hidden states are projected to this size
  Nonlinearity nonlinearity = Nonlinearity::kTanh;  // of an RNN
};

struct LstmState {
  Tensor hidden;  // [layers * directions, N, proj_size, or hidden_size without projection]
  Tensor cell;    // [layers * directions, N, hidden_size]
  void visit_tensors(auto&& visit) { visit(hidden), visit(cell); }
};
struct LstmResult {
  Tensor output;    // [L, N, directions * (proj_size or hidden_size)]
  LstmState state;  // after the last step
  void visit_tensors(auto&& visit) { visit(output), visit(state); }
};
struct GruResult {
  Tensor output;
  Tensor hidden;
  void visit_tensors(auto&& visit) { visit(output), visit(hidden); }
};
// For packed sequences; states are in the original order.
struct PackedLstmResult {
  PackedSequence output;
  LstmState state;
  void visit_tensors(auto&& visit) { visit(output), visit(state); }
};
struct PackedGruResult {
  PackedSequence output;
  Tensor hidden;
  void visit_tensors(auto&& visit) { visit(output), visit(hidden); }
};
using RnnResult = GruResult;
using PackedRnnResult = PackedGruResult;

namespace detail {
// weight_ih_l0 [gates * hidden, in], weight_hh_l0 [gates * hidden, hidden], bias_ih_l0, bias_hh_l0;
// "_l1" for the next layer, "_reverse" for the second direction. All uniform in
// +-1/sqrt(hidden_size) at first. With a projection (Sak, Senior, Beaufays 2014) weight_hr_l0
// [proj, hidden] comes last, weight_hh is [gates * hidden, proj], and so are the next layer's
// inputs.
template <class Derived, int kGates>
class RecurrentModule : public Module<Derived> {
 public:
  using Options = RecurrentOptions;
  RecurrentModule(int64_t input_size, int64_t hidden_size, const RecurrentOptions& options);
  void reset_parameters();
  std::string extra_repr() const override;

  const int64_t input_size;
  const int64_t hidden_size;
  const RecurrentOptions options;

 protected:
  struct Direction {
    const Tensor* weight_ih;
    const Tensor* weight_hh;
    const Tensor* bias_ih;  // undefined tensors without bias
    const Tensor* bias_hh;
    const Tensor* weight_hr;  // null without projection
  };
  int64_t num_directions() const { return options.bidirectional ? 2 : 1; }
  int64_t state_size() const { return options.proj_size > 0 ? options.proj_size : hidden_size; }
  // x: [L, N, in] or [L, in]; one state for each layer and direction.
  struct Run {
    Tensor output;
    TensorList hidden;
    TensorList cell;  // LSTM only
  };
  Run run(const Tensor& x, const Tensor& hidden, const Tensor& cell);
  // output: the data of a packed sequence.
  Run run(const PackedSequence& x, const Tensor& hidden, const Tensor& cell);

 private:
  // input: [L, N, in], or the data of a packed sequence. sizes: how many sequences reach each step.
  Run run_layers(Tensor input, const Tensor& first_hidden, const Tensor& first_cell,
                 const std::vector<int64_t>& sizes, bool packed);
  Tensor initial_state(const Tensor& given, int64_t N, int64_t size, const Tensor& x) const;

  std::vector<Direction> directions_;
};
}  // namespace detail

// x: [L, N, input_size], or [L, input_size] with states without the dimension N.
class LSTM : public detail::RecurrentModule<LSTM, 4> {
 public:
  LSTM(int64_t input_size, int64_t hidden_size, const RecurrentOptions& options = {})
      : RecurrentModule(input_size, hidden_size, options) {}
  LstmResult forward(const Tensor& x, const LstmState& state = {});  // zeros without a state
  PackedLstmResult forward(const PackedSequence& x, const LstmState& state = {});
  std::unique_ptr<LSTM> remake() const {
    return std::make_unique<LSTM>(input_size, hidden_size, options);
  }
};
class GRU : public detail::RecurrentModule<GRU, 3> {
 public:
  GRU(int64_t input_size, int64_t hidden_size, const RecurrentOptions& options = {})
      : RecurrentModule(input_size, hidden_size, options) {}
  GruResult forward(const Tensor& x, const Tensor& hidden = {});
  PackedGruResult forward(const PackedSequence& x, const Tensor& hidden = {});
  std::unique_ptr<GRU> remake() const {
    return std::make_unique<GRU>(input_size, hidden_size, options);
  }
};
// h = tanh(W_ih x + b_ih + W_hh h + b_hh), or relu.
class RNN : public detail::RecurrentModule<RNN, 1> {
 public:
  RNN(int64_t input_size, int64_t hidden_size, const RecurrentOptions& options = {})
      : RecurrentModule(input_size, hidden_size, options) {}
  RnnResult forward(const Tensor& x, const Tensor& hidden = {});
  PackedRnnResult forward(const PackedSequence& x, const Tensor& hidden = {});
  std::unique_ptr<RNN> remake() const {
    return std::make_unique<RNN>(input_size, hidden_size, options);
  }
};

struct CellOptions {
  bool bias = true;
};
// One step. x: [N, input_size] or [input_size]; parameters weight_ih, weight_hh, bias_ih, bias_hh.
class LSTMCell : public Module<LSTMCell> {
 public:
  using Options = CellOptions;
  LSTMCell(int64_t input_size, int64_t hidden_size, const CellOptions& options = {});
  LstmState forward(const Tensor& x, const LstmState& state = {});
  void reset_parameters();
  std::unique_ptr<LSTMCell> remake() const {
    return std::make_unique<LSTMCell>(input_size, hidden_size, options);
  }

  const int64_t input_size;
  const int64_t hidden_size;
  const CellOptions options;
  const Tensor& weight_ih;
  const Tensor& weight_hh;
  const Tensor& bias_ih;
  const Tensor& bias_hh;
};
class GRUCell : public Module<GRUCell> {
 public:
  using Options = CellOptions;
  GRUCell(int64_t input_size, int64_t hidden_size, const CellOptions& options = {});
  Tensor forward(const Tensor& x, const Tensor& hidden = {});
  void reset_parameters();
  std::unique_ptr<GRUCell> remake() const {
    return std::make_unique<GRUCell>(input_size, hidden_size, options);
  }

  const int64_t input_size;
  const int64_t hidden_size;
  const CellOptions options;
  const Tensor& weight_ih;
  const Tensor& weight_hh;
  const Tensor& bias_ih;
  const Tensor& bias_hh;
};

}  // namespace tessera::nn
