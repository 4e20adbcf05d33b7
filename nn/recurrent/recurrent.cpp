#include <tessera/nn/recurrent/recurrent.h>

#include <cmath>

#include <tessera/autograd/ops.h>
#include <tessera/autograd/recurrent.h>
#include <tessera/nn/describe.h>
#include <tessera/nn/init.h>

namespace tessera::nn {
namespace {

// All parameters of a recurrent module have the same bounds.
void fill_uniform(const Tensor& parameter, int64_t hidden_size, RandomStream stream) {
  const double bound = hidden_size > 0 ? 1 / std::sqrt(static_cast<double>(hidden_size)) : 0;
  init::uniform(parameter, -bound, bound, stream);
}

Tensor zeros_for(const Tensor& x, const Shape& shape) {
  return zeros(shape, {.dtype = x.dtype(), .device = x.device()});
}

}  // namespace

// ---- Layers ------------------------------------------------------------------------------------

namespace detail {

template <class Derived, int kGates>
RecurrentModule<Derived, kGates>::RecurrentModule(int64_t input_size, int64_t hidden_size,
                                                  const RecurrentOptions& options)
    : input_size(input_size), hidden_size(hidden_size), options(options) {
  TS_CHECK(options.num_layers > 0 && hidden_size > 0, this->type_name(),
           "needs at least one layer and a positive hidden size; got ", options.num_layers, " and ",
           hidden_size);
  TS_CHECK(kGates == 4 || options.proj_size == 0, this->type_name(),
           "has no projection; got a proj_size of ", options.proj_size, "; use LSTM or leave it 0");
  TS_CHECK(options.proj_size >= 0 && options.proj_size < hidden_size, this->type_name(),
           "needs a proj_size of at least 0 (none) and below hidden_size (", hidden_size, "); got ",
           options.proj_size);
  const int64_t rows = kGates * hidden_size;
  for (int64_t layer = 0; layer < options.num_layers; ++layer) {
    const int64_t in = layer == 0 ? input_size : num_directions() * state_size();
    for (int64_t direction = 0; direction < num_directions(); ++direction) {
      const std::string suffix = "_l" + std::to_string(layer) + (direction == 1 ? "_reverse" : "");
      const auto bias = [&](const char* name) {
        return options.bias ? &this->parameter(name + suffix, Shape{rows})
                            : &this->parameter(name + suffix, Tensor());
      };
      Direction made{};
      made.weight_ih = &this->parameter("weight_ih" + suffix, Shape{rows, in});
      made.weight_hh = &this->parameter("weight_hh" + suffix, Shape{rows, state_size()});
      made.bias_ih = bias("bias_ih");
      made.bias_hh = bias("bias_hh");
      if (options.proj_size > 0) {
        made.weight_hr =
            &this->parameter("weight_hr" + suffix, Shape{options.proj_size, hidden_size});
      }
      directions_.push_back(made);
    }
  }
  if (ParameterDefaultsGuard::current().initialise) reset_parameters();
}

template <class Derived, int kGates>
void RecurrentModule<Derived, kGates>::reset_parameters() {
  for (const auto& [name, parameter] : this->named_parameters()) {
    fill_uniform(parameter, hidden_size, this->initial_stream(name));
  }
}

template <class Derived, int kGates>
std::string RecurrentModule<Derived, kGates>::extra_repr() const {
  std::string text = std::to_string(input_size) + ", " + std::to_string(hidden_size);
  if (options.proj_size != 0) text += ", " + describe("proj_size", options.proj_size);
  if (options.num_layers != 1) text += ", " + describe("num_layers", options.num_layers);
  if (options.nonlinearity == RecurrentOptions::Nonlinearity::kRelu)
    text += ", nonlinearity='relu'";
  if (!options.bias) text += ", " + describe("bias", options.bias);
  if (options.batch_first) text += ", " + describe("batch_first", options.batch_first);
  if (options.dropout != 0) text += ", " + describe("dropout", options.dropout);
  if (options.bidirectional) text += ", " + describe("bidirectional", options.bidirectional);
  return text;
}

template <class Derived, int kGates>
Tensor RecurrentModule<Derived, kGates>::initial_state(const Tensor& given, int64_t N, int64_t size,
                                                       const Tensor& x) const {
  const auto count = static_cast<int64_t>(directions_.size());
  if (!given.defined()) return zeros_for(x, {count, N, size});
  TS_CHECK_SHAPE(given.shape() == (Shape{count, N, size}), this->type_name(), "a state must be [",
                 count, ", ", N, ", ", size, "]; got ", given);
  return given;
}

template <class Derived, int kGates>
typename RecurrentModule<Derived, kGates>::Run RecurrentModule<Derived, kGates>::run(
    const Tensor& x, const Tensor& hidden, const Tensor& cell) {
  TS_CHECK_SHAPE((x.dim() == 2 || x.dim() == 3) && x.size(-1) == input_size, this->type_name(),
                 "needs [length, batch, ", input_size, "] or [length, ", input_size, "]; got ", x);
  const bool batched = x.dim() == 3;
  const Tensor input = !batched ? x.unsqueeze(1) : options.batch_first ? x.transpose(0, 1) : x;
  const int64_t L = input.size(0), N = input.size(1);
  TS_CHECK_SHAPE(L > 0, this->type_name(), "needs at least one step; got ", x);
  const auto initial = [&](const Tensor& given, int64_t size) {
    const bool lacks_batch = given.defined() && !batched;
    return initial_state(lacks_batch ? given.unsqueeze(1) : given, N, size, x);
  };
  const Tensor first_hidden = initial(hidden, state_size());
  const Tensor first_cell = kGates == 4 ? initial(cell, hidden_size) : Tensor();
  Run result = run_layers(input, first_hidden, first_cell,
                          std::vector<int64_t>(static_cast<size_t>(L), N), false);
  const Tensor output = result.output;
  result.output = !batched              ? output.squeeze(1)
                  : options.batch_first ? output.transpose(0, 1)
                                        : output;
  if (!batched) {
    for (Tensor& state : result.hidden) state = state.squeeze(0);
    for (Tensor& state : result.cell) state = state.squeeze(0);
  }
  return result;
}

template <class Derived, int kGates>
typename RecurrentModule<Derived, kGates>::Run RecurrentModule<Derived, kGates>::run(
    const PackedSequence& x, const Tensor& hidden, const Tensor& cell) {
  TS_CHECK_SHAPE(x.data.defined() && x.data.dim() == 2 && x.data.size(1) == input_size,
                 this->type_name(), "needs packed sequences of [length, ", input_size,
                 "]; their data are ", x.data);
  TS_CHECK(!x.batch_sizes.empty(), this->type_name(), "needs at least one step; got none");
  const int64_t N = x.batch_sizes[0];
  const auto initial = [&](const Tensor& given, int64_t size) {
    return reordered(initial_state(given, N, size, x.data), x.sorted_indices);
  };
  const Tensor first_hidden = initial(hidden, state_size());
  const Tensor first_cell = kGates == 4 ? initial(cell, hidden_size) : Tensor();
  return run_layers(x.data, first_hidden, first_cell, x.batch_sizes, true);
}

template <class Derived, int kGates>
typename RecurrentModule<Derived, kGates>::Run RecurrentModule<Derived, kGates>::run_layers(
    Tensor input, const Tensor& first_hidden, const Tensor& first_cell,
    const std::vector<int64_t>& sizes, bool packed) {
  Run result;
  for (int64_t layer = 0; layer < options.num_layers; ++layer) {
    TensorList outputs;  // of each direction, as the input lies
    for (int64_t direction = 0; direction < num_directions(); ++direction) {
      const int64_t index = layer * num_directions() + direction;
      const Direction& w = directions_[static_cast<size_t>(index)];
      const RecurrentSteps steps{packed ? sizes : std::vector<int64_t>(), direction == 1};
      const Tensor hidden = first_hidden.select(0, index);
      RecurrentLayer done;
      if constexpr (kGates == 4) {
        done = lstm_layer(input, *w.weight_ih, *w.weight_hh, *w.bias_ih, *w.bias_hh, hidden,
                          first_cell.select(0, index), steps,
                          w.weight_hr != nullptr ? *w.weight_hr : Tensor());
        result.cell.push_back(done.cell);
      } else if constexpr (kGates == 3) {
        done = gru_layer(input, *w.weight_ih, *w.weight_hh, *w.bias_ih, *w.bias_hh, hidden, steps);
      } else {
        done = rnn_layer(input, *w.weight_ih, *w.weight_hh, *w.bias_ih, *w.bias_hh, hidden,
                         options.nonlinearity == RecurrentOptions::Nonlinearity::kRelu, steps);
      }
      result.hidden.push_back(done.hidden);
      outputs.push_back(done.output);
    }
    input = outputs.size() == 1 ? outputs[0] : cat(outputs, -1);
    if (layer + 1 < options.num_layers)
      input = dropout(input, options.dropout, this->is_training());
  }
  result.output = input;
  return result;
}

template class RecurrentModule<LSTM, 4>;
template class RecurrentModule<GRU, 3>;
template class RecurrentModule<RNN, 1>;

}  // namespace detail

LstmResult LSTM::forward(const Tensor& x, const LstmState& state) {
  TS_CHECK(state.hidden.defined() == state.cell.defined(), "LSTM",
           "a state has both hidden and cell; got only one");
  const Run result = run(x, state.hidden, state.cell);
  return {result.output, {stack(result.hidden, 0), stack(result.cell, 0)}};
}

GruResult GRU::forward(const Tensor& x, const Tensor& hidden) {
  const Run result = run(x, hidden, Tensor());
  return {result.output, stack(result.hidden, 0)};
}

RnnResult RNN::forward(const Tensor& x, const Tensor& hidden) {
  const Run result = run(x, hidden, Tensor());
  return {result.output, stack(result.hidden, 0)};
}

namespace {

// The same sequences with other data.
PackedSequence with_data(const PackedSequence& packed, const Tensor& data) {
  return {data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices};
}
Tensor as_given(const TensorList& states, const PackedSequence& packed) {
  return detail::reordered(stack(states, 0), packed.unsorted_indices);
}

}  // namespace

PackedLstmResult LSTM::forward(const PackedSequence& x, const LstmState& state) {
  TS_CHECK(state.hidden.defined() == state.cell.defined(), "LSTM",
           "a state has both hidden and cell; got only one");
  const Run result = run(x, state.hidden, state.cell);
  return {with_data(x, result.output), {as_given(result.hidden, x), as_given(result.cell, x)}};
}
PackedGruResult GRU::forward(const PackedSequence& x, const Tensor& hidden) {
  const Run result = run(x, hidden, Tensor());
  return {with_data(x, result.output), as_given(result.hidden, x)};
}
PackedRnnResult RNN::forward(const PackedSequence& x, const Tensor& hidden) {
  const Run result = run(x, hidden, Tensor());
  return {with_data(x, result.output), as_given(result.hidden, x)};
}

// ---- Cells -------------------------------------------------------------------------------------

namespace {

void check_cell_input(std::string_view name, const Tensor& x, int64_t input_size) {
  TS_CHECK_SHAPE((x.dim() == 1 || x.dim() == 2) && x.size(-1) == input_size, name, "needs [batch, ",
                 input_size, "] or [", input_size, "]; got ", x);
}

Tensor zero_state(const Tensor& x, int64_t hidden_size) {
  return zeros_for(x, x.dim() == 1 ? Shape{hidden_size} : Shape{x.size(0), hidden_size});
}

}  // namespace

LSTMCell::LSTMCell(int64_t input_size, int64_t hidden_size, const CellOptions& options)
    : input_size(input_size),
      hidden_size(hidden_size),
      options(options),
      weight_ih(parameter("weight_ih", Shape{4 * hidden_size, input_size})),
      weight_hh(parameter("weight_hh", Shape{4 * hidden_size, hidden_size})),
      bias_ih(options.bias ? parameter("bias_ih", Shape{4 * hidden_size})
                           : parameter("bias_ih", Tensor())),
      bias_hh(options.bias ? parameter("bias_hh", Shape{4 * hidden_size})
                           : parameter("bias_hh", Tensor())) {
  if (ParameterDefaultsGuard::current().initialise) reset_parameters();
}
void LSTMCell::reset_parameters() {
  for (const auto& [name, parameter] : named_parameters()) {
    fill_uniform(parameter, hidden_size, initial_stream(name));
  }
}
LstmState LSTMCell::forward(const Tensor& x, const LstmState& state) {
  check_cell_input("LSTMCell", x, input_size);
  const Tensor h = state.hidden.defined() ? state.hidden : zero_state(x, hidden_size);
  const Tensor c = state.cell.defined() ? state.cell : zero_state(x, hidden_size);
  const LstmStates next = lstm_cell(x, h, c, weight_ih, weight_hh, bias_ih, bias_hh);
  return {next.hidden, next.cell};
}

GRUCell::GRUCell(int64_t input_size, int64_t hidden_size, const CellOptions& options)
    : input_size(input_size),
      hidden_size(hidden_size),
      options(options),
      weight_ih(parameter("weight_ih", Shape{3 * hidden_size, input_size})),
      weight_hh(parameter("weight_hh", Shape{3 * hidden_size, hidden_size})),
      bias_ih(options.bias ? parameter("bias_ih", Shape{3 * hidden_size})
                           : parameter("bias_ih", Tensor())),
      bias_hh(options.bias ? parameter("bias_hh", Shape{3 * hidden_size})
                           : parameter("bias_hh", Tensor())) {
  if (ParameterDefaultsGuard::current().initialise) reset_parameters();
}
void GRUCell::reset_parameters() {
  for (const auto& [name, parameter] : named_parameters()) {
    fill_uniform(parameter, hidden_size, initial_stream(name));
  }
}
Tensor GRUCell::forward(const Tensor& x, const Tensor& hidden) {
  check_cell_input("GRUCell", x, input_size);
  const Tensor h = hidden.defined() ? hidden : zero_state(x, hidden_size);
  return gru_cell(x, h, weight_ih, weight_hh, bias_ih, bias_hh);
}

}  // namespace tessera::nn
