#include <tessera/nn/recurrent.h>

#include <cmath>

#include <tessera/autograd/ops.h>
#include <tessera/nn/describe.h>
#include <tessera/nn/init.h>

namespace tessera::nn {
namespace {

// One LSTM step from the gates' sums [N, 4 H].
LstmState lstm_step(const Tensor& gates, const Tensor& cell) {
  const TensorList parts = gates.chunk(4, -1);
  const Tensor next = sigmoid(parts[1]) * cell + sigmoid(parts[0]) * tanh(parts[2]);
  return {sigmoid(parts[3]) * tanh(next), next};
}

// One GRU step. The new gate multiplies the recurrent part, bias included, by the reset gate: both
// parts of the gates' sums, [N, 3 H] each, stay apart.
Tensor gru_step(const Tensor& from_input, const Tensor& from_hidden, const Tensor& hidden) {
  const TensorList x = from_input.chunk(3, -1), h = from_hidden.chunk(3, -1);
  const Tensor reset = sigmoid(x[0] + h[0]);
  const Tensor update = sigmoid(x[1] + h[1]);
  const Tensor fresh = tanh(x[2] + reset * h[2]);
  return fresh + update * (hidden - fresh);
}

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
  // LSTM and RNN sum both biases at once; GRU keeps the recurrent one with its product.
  constexpr bool kOneSum = kGates != 3;
  Run result;
  for (int64_t layer = 0; layer < options.num_layers; ++layer) {
    TensorList outputs;  // of each direction, as the input lies
    for (int64_t direction = 0; direction < num_directions(); ++direction) {
      const int64_t index = layer * num_directions() + direction;
      const Direction& weights = directions_[static_cast<size_t>(index)];
      const Tensor bias =
          kOneSum && options.bias ? *weights.bias_ih + *weights.bias_hh : *weights.bias_ih;
      const Tensor sums = linear(input, *weights.weight_ih, bias);
      const TensorList steps = (packed ? steps_of(sums, sizes) : sums).unbind(0);
      TensorList hs(steps.size());
      run_direction(weights, steps, sizes, direction == 1, first_hidden.select(0, index),
                    kGates == 4 ? first_cell.select(0, index) : Tensor(), hs, result);
      outputs.push_back(packed ? cat(hs, 0) : stack(hs, 0));
    }
    input = outputs.size() == 1 ? outputs[0] : cat(outputs, -1);
    if (layer + 1 < options.num_layers)
      input = dropout(input, options.dropout, this->is_training());
  }
  result.output = input;
  return result;
}

// h, c: the first states of all sequences. Those that end are put aside; of a reverse direction,
// those that begin join.
template <class Derived, int kGates>
void RecurrentModule<Derived, kGates>::run_direction(const Direction& weights,
                                                     const TensorList& steps,
                                                     const std::vector<int64_t>& sizes,
                                                     bool reverse, Tensor h, Tensor c,
                                                     TensorList& outputs, Run& result) const {
  const size_t L = steps.size();
  const int64_t N = sizes[0];
  const Tensor first_h = h, first_c = c;
  TensorList ended_h, ended_c;  // the shortest sequences first
  int64_t active = N;
  const auto resize = [&](Tensor& state, const Tensor& first, TensorList& ended, int64_t size) {
    if (size < active) {
      ended.push_back(state.narrow(0, size, active - size));
      state = state.narrow(0, 0, size);
    } else {
      state = cat(TensorList{state, first.narrow(0, active, size - active)}, 0);
    }
  };
  if (reverse && sizes.back() < N) {
    active = sizes.back();
    h = first_h.narrow(0, 0, active);
    if constexpr (kGates == 4) c = first_c.narrow(0, 0, active);
  }
  for (size_t i = 0; i < L; ++i) {
    const size_t t = reverse ? L - 1 - i : i;
    if (sizes[t] != active) {
      resize(h, first_h, ended_h, sizes[t]);
      if constexpr (kGates == 4) resize(c, first_c, ended_c, sizes[t]);
      active = sizes[t];
    }
    const Tensor step = active == N ? steps[t] : steps[t].narrow(0, 0, active);
    if constexpr (kGates == 4) {
      LstmState next = lstm_step(step + linear(h, *weights.weight_hh), c);
      h = weights.weight_hr != nullptr ? linear(next.hidden, *weights.weight_hr)
                                       : std::move(next.hidden);
      c = std::move(next.cell);
    } else if constexpr (kGates == 3) {
      h = gru_step(step, linear(h, *weights.weight_hh, *weights.bias_hh), h);
    } else {
      const Tensor sum = step + linear(h, *weights.weight_hh);
      h = options.nonlinearity == RecurrentOptions::Nonlinearity::kTanh ? tanh(sum) : relu(sum);
    }
    outputs[t] = h;
  }
  const auto whole = [](const Tensor& last, const TensorList& ended) {
    if (ended.empty()) return last;
    TensorList parts = {last};
    parts.insert(parts.end(), ended.rbegin(), ended.rend());
    return cat(parts, 0);
  };
  result.hidden.push_back(whole(h, ended_h));
  if constexpr (kGates == 4) result.cell.push_back(whole(c, ended_c));
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
  return lstm_step(linear(x, weight_ih, bias_ih) + linear(h, weight_hh, bias_hh), c);
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
  return gru_step(linear(x, weight_ih, bias_ih), linear(h, weight_hh, bias_hh), h);
}

}  // namespace tessera::nn
