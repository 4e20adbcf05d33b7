#include <tessera/autograd/recurrent.h>

#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/differentiable.h>
#include <tessera/autograd/engine.h>
#include <tessera/autograd/ops.h>
#include <tessera/autograd/ops/composed_gradients.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/recurrent/recurrent.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera {
namespace {

enum class Recurrence { kLstm, kGru, kTanh, kRelu };

struct RecurrentOperands {
  Tensor x, weight_ih, weight_hh, bias_ih, bias_hh, hidden, cell, weight_hr;
};

// ---- The composed form --------------------------------------------------------------------------

// A step from the sums of its gates [N, 4 H].
LstmStates composed_lstm_step(const Tensor& gates, const Tensor& cell) {
  const TensorList parts = gates.chunk(4, -1);
  const Tensor next = sigmoid(parts[1]) * cell + sigmoid(parts[0]) * tanh(parts[2]);
  return {sigmoid(parts[3]) * tanh(next), next};
}
Tensor composed_gru_step(const Tensor& from_input, const Tensor& from_hidden,
                         const Tensor& hidden) {
  const TensorList x = from_input.chunk(3, -1), h = from_hidden.chunk(3, -1);
  const Tensor reset = sigmoid(x[0] + h[0]);
  const Tensor update = sigmoid(x[1] + h[1]);
  const Tensor fresh = tanh(x[2] + reset * h[2]);
  return fresh + update * (hidden - fresh);
}

// Packed rows [rows, ...] as [steps, N, ...]; behind a sequence's end stands some row.
Tensor padded_steps(const Tensor& rows, const std::vector<int64_t>& batch_sizes) {
  const int64_t L = static_cast<int64_t>(batch_sizes.size()), N = batch_sizes[0];
  std::vector<int64_t> places;
  int64_t next = 0;
  for (const int64_t size : batch_sizes) {
    for (int64_t n = 0; n < N; ++n) places.push_back(n < size ? next++ : 0);
  }
  const Tensor index = tensor(std::span<const int64_t>(places), {L * N}).to(rows.device());
  return reshape(index_select(rows, 0, index), {L, N, rows.size(1)});
}

// Sequences that end are put aside; of a reverse direction, those that begin join.
RecurrentLayer composed_layer(Recurrence kind, const RecurrentOperands& o,
                              const RecurrentSteps& steps) {
  // LSTM and RNN sum both biases at once; GRU keeps the recurrent one with its product.
  const bool is_gru = kind == Recurrence::kGru, is_lstm = kind == Recurrence::kLstm;
  const Tensor bias = !is_gru && o.bias_ih.defined() ? o.bias_ih + o.bias_hh : o.bias_ih;
  const Tensor sums = linear(o.x, o.weight_ih, bias);
  const bool packed = !steps.batch_sizes.empty();
  const int64_t N = o.hidden.size(0);
  const TensorList of_steps = (packed ? padded_steps(sums, steps.batch_sizes) : sums).unbind(0);
  const size_t L = of_steps.size();
  const auto size_of_step = [&](size_t t) { return packed ? steps.batch_sizes[t] : N; };
  Tensor h = o.hidden, c = o.cell;
  TensorList outputs(L), ended_h, ended_c;  // the shortest sequences first
  int64_t active = N;
  const auto resize = [&](Tensor& state, const Tensor& first, TensorList& ended, int64_t size) {
    if (size < active) {
      ended.push_back(state.narrow(0, size, active - size));
      state = state.narrow(0, 0, size);
    } else {
      state = cat(TensorList{state, first.narrow(0, active, size - active)}, 0);
    }
  };
  if (steps.reverse && size_of_step(L - 1) < active) {
    active = size_of_step(L - 1);
    h = h.narrow(0, 0, active);
    if (is_lstm) c = c.narrow(0, 0, active);
  }
  for (size_t i = 0; i < L; ++i) {
    const size_t t = steps.reverse ? L - 1 - i : i;
    if (size_of_step(t) != active) {
      resize(h, o.hidden, ended_h, size_of_step(t));
      if (is_lstm) resize(c, o.cell, ended_c, size_of_step(t));
      active = size_of_step(t);
    }
    const Tensor step = active == N ? of_steps[t] : of_steps[t].narrow(0, 0, active);
    if (is_lstm) {
      auto [hidden, cell] = composed_lstm_step(step + linear(h, o.weight_hh), c);
      h = o.weight_hr.defined() ? linear(hidden, o.weight_hr) : std::move(hidden);
      c = std::move(cell);
    } else if (is_gru) {
      h = composed_gru_step(step, linear(h, o.weight_hh, o.bias_hh), h);
    } else {
      const Tensor sum = step + linear(h, o.weight_hh);
      h = kind == Recurrence::kTanh ? tanh(sum) : relu(sum);
    }
    outputs[t] = h;
  }
  const auto whole = [](const Tensor& last, const TensorList& ended) {
    if (ended.empty()) return last;
    TensorList parts = {last};
    parts.insert(parts.end(), ended.rbegin(), ended.rend());
    return cat(parts, 0);
  };
  return {packed ? cat(outputs, 0) : stack(outputs, 0), whole(h, ended_h),
          is_lstm ? whole(c, ended_c) : Tensor()};
}

// ---- Checks -------------------------------------------------------------------------------------

void check_recurrent(std::string_view op, const RecurrentOperands& o, int64_t gates, bool has_cell,
                     const RecurrentSteps& steps) {
  const auto check_given = [op](const char* name, const Tensor& x) {
    TS_CHECK(x.defined(), op, name, " is undefined; give it a value first");
  };
  check_given("x", o.x);
  check_given("weight_ih", o.weight_ih);
  check_given("weight_hh", o.weight_hh);
  check_given("hidden", o.hidden);
  const bool packed = !steps.batch_sizes.empty();
  TS_CHECK_SHAPE(o.x.dim() == (packed ? 2 : 3), op, "expects x of [steps, sequences, in], or of ",
                 "[rows, in] with batch_sizes; got ", o.x);
  TS_CHECK_SHAPE(packed || o.x.size(0) > 0, op, "needs at least one step; got ", o.x);
  const int64_t N = packed ? steps.batch_sizes[0] : o.x.size(1), H = o.weight_ih.size(0) / gates;
  int64_t rows = 0, before = N;
  for (const int64_t size : steps.batch_sizes) {
    TS_CHECK_SHAPE(size >= 1 && size <= before, op, "batch_sizes must descend and be positive; ",
                   "got ", size, " after ", before);
    rows += size, before = size;
  }
  TS_CHECK_SHAPE(!packed || rows == o.x.size(0), op, "batch_sizes add up to ", rows, " rows; x is ",
                 o.x);
  TS_CHECK_SHAPE(o.weight_ih.dim() == 2 && H > 0 && o.weight_ih.size(0) == gates * H &&
                     o.weight_ih.size(1) == o.x.size(-1),
                 op, "expects a weight_ih of [", gates, " H, ", o.x.size(-1), "]; got ",
                 o.weight_ih, " for x ", o.x);
  const int64_t state = o.weight_hr.defined() ? o.weight_hr.size(0) : H;
  TS_CHECK_SHAPE(o.weight_hh.shape() == (Shape{gates * H, state}), op, "expects a weight_hh of [",
                 gates * H, ", ", state, "]; got ", o.weight_hh);
  TS_CHECK_SHAPE(!o.weight_hr.defined() || o.weight_hr.shape() == (Shape{state, H}), op,
                 "expects a weight_hr of [proj, ", H, "]; got ", o.weight_hr);
  TS_CHECK(o.bias_ih.defined() == o.bias_hh.defined(), op, "takes both biases or none; got one");
  for (const Tensor* bias : {&o.bias_ih, &o.bias_hh}) {
    TS_CHECK_SHAPE(!bias->defined() || bias->shape() == (Shape{gates * H}), op,
                   "expects biases of [", gates * H, "]; got ", *bias);
  }
  TS_CHECK_SHAPE(o.hidden.shape() == (Shape{N, state}), op, "expects a hidden state of [", N, ", ",
                 state, "]; got ", o.hidden);
  if (!has_cell) return;
  check_given("cell", o.cell);
  TS_CHECK_SHAPE(o.cell.shape() == (Shape{N, H}), op, "expects a cell of [", N, ", ", H, "]; got ",
                 o.cell);
}

void check_one_dtype(const Op& op, Inputs in) {
  for (const Tensor& x : in) {
    TS_CHECK_DTYPE(!x.defined() ||
                       (x.dtype() == in[0].dtype() && is_floating(x.dtype()) && !is_fp8(x.dtype())),
                   op, "expects operands of one floating dtype; got ", in[0], " and ", x);
  }
}

// As an op with Autocast::kLow reads them: what runs composed then gives what the op gives.
RecurrentOperands as_read(const RecurrentOperands& o) {
  const auto read = [](const Tensor& x) { return x.defined() ? detail::autocast_product(x) : x; };
  RecurrentOperands result = o;  // linear() reads weights and biases so by itself
  result.x = read(o.x), result.hidden = read(o.hidden), result.cell = read(o.cell);
  return result;
}

// ---- As one op ----------------------------------------------------------------------------------

kernels::RecurrentLayerInputs kernel_inputs(kernels::RecurrentCell kind,
                                            const RecurrentSteps& steps, int64_t N,
                                            const TensorList& in) {
  const int64_t columns = in[0].size(-1), rows = numel_of(in[0].shape().slice(0, in[0].dim() - 1));
  kernels::RecurrentLayerInputs inputs{.kind = kind,
                                       .batch_sizes = steps.batch_sizes,
                                       .reverse = steps.reverse,
                                       .x = raw::view(kernels::contiguous(in[0]), {rows, columns}),
                                       .weight_ih = in[1],
                                       .weight_hh = in[2],
                                       .bias_ih = in[3],
                                       .bias_hh = in[4],
                                       .hidden = in[5],
                                       .cell = in.size() > 6 ? in[6] : Tensor()};
  if (inputs.batch_sizes.empty()) {
    inputs.batch_sizes.assign(static_cast<size_t>(in[0].size(0)), N);
  }
  return inputs;
}

// Operations of one product of all steps with the weights of `in`.
double recurrent_flops(int64_t rows, const Tensor& weight) {
  return 2.0 * static_cast<double>(rows) * static_cast<double>(weight.numel());
}

RecurrentLayer fused_layer(const Op& op, kernels::RecurrentCell kind, const RecurrentOperands& o,
                           const RecurrentSteps& steps) {
  const bool is_lstm = kind == kernels::RecurrentCell::kLstm;
  TensorList operands = {o.x, o.weight_ih, o.weight_hh, o.bias_ih, o.bias_hh, o.hidden};
  if (is_lstm) operands.push_back(o.cell);
  const int64_t N = o.hidden.size(0);
  const TensorList results = differentiable(
      op, operands,
      [=, &op](Inputs in, Extras& extras) -> TensorList {
        check_one_dtype(op, in);
        const TensorList list(in.begin(), in.end());
        const kernels::RecurrentLayerResult r =
            kernels::recurrent_layer(kernel_inputs(kind, steps, N, list), extras.wanted());
        count_flops(recurrent_flops(r.output.size(0), in[1]) +
                    recurrent_flops(r.output.size(0), in[2]));
        if (extras.wanted()) {
          extras.save(r.gates);
          extras.save(r.kept);
        }
        Shape shape = in[0].shape();
        shape[shape.size() - 1] = r.output.size(1);
        TensorList made = {raw::view(r.output, shape), r.hidden};
        if (is_lstm) made.push_back(r.cell);
        return made;
      },
      [=](Grads dy, const Saved& s) -> TensorList {
        const int count = is_lstm ? 7 : 6;
        TensorList in;
        for (int i = 0; i < count; ++i) in.push_back(s.input(i));
        if (grad_enabled()) {
          // One gradient for all results, side by side.
          TensorList gradients;
          for (int i = 0; i < dy.size(); ++i) {
            const Shape& shape = s.output_shape(i);
            gradients.push_back(reshape(dy.defined(i) ? dy[i]
                                                      : zeros(shape, {.dtype = s.output_dtype(i),
                                                                      .device = in[0].device()}),
                                        {-1}));
          }
          return composed_gradients(in, cat(gradients, 0), [&](const TensorList& list) {
            const RecurrentLayer r = composed_layer(is_lstm ? Recurrence::kLstm : Recurrence::kGru,
                                                    {list[0],
                                                     list[1],
                                                     list[2],
                                                     list[3],
                                                     list[4],
                                                     list[5],
                                                     is_lstm ? list[6] : Tensor(),
                                                     {}},
                                                    steps);
            TensorList parts = {reshape(r.output, {-1}), reshape(r.hidden, {-1})};
            if (is_lstm) parts.push_back(reshape(r.cell, {-1}));
            return cat(parts, 0);
          });
        }
        const kernels::RecurrentLayerInputs inputs = kernel_inputs(kind, steps, N, in);
        const Tensor output = s.output(0);
        kernels::RecurrentLayerSaved saved{
            .output = raw::view(output, {inputs.x.size(0), output.size(-1)}),
            .gates = s.extra(0),
            .kept = s.extra(1)};
        if (dy.defined(0)) {
          saved.grad_output = raw::view(kernels::contiguous(dy[0]), saved.output.shape());
        }
        if (dy.defined(1)) saved.grad_hidden = dy[1];
        if (is_lstm && dy.defined(2)) saved.grad_cell = dy[2];
        const kernels::RecurrentLayerWanted wanted{.x = s.needs(0),
                                                   .weight_ih = s.needs(1),
                                                   .weight_hh = s.needs(2),
                                                   .bias_ih = in[3].defined() && s.needs(3),
                                                   .bias_hh = in[4].defined() && s.needs(4)};
        const kernels::RecurrentLayerGradients g =
            kernels::recurrent_layer_backward(inputs, saved, wanted);
        const int64_t rows = inputs.x.size(0);
        count_flops((wanted.x + wanted.weight_ih) * recurrent_flops(rows, in[1]) +
                    (1 + wanted.weight_hh) * recurrent_flops(rows, in[2]));
        TensorList gradients = {g.x.defined() ? raw::view(g.x, s.input_shape(0)) : Tensor(),
                                g.weight_ih,
                                g.weight_hh,
                                g.bias_ih,
                                g.bias_hh,
                                g.hidden};
        if (is_lstm) gradients.push_back(g.cell);
        return gradients;
      });
  return {results[0], results[1], is_lstm ? results[2] : Tensor()};
}

}  // namespace

const Op kLstmLayer{.name = "lstm_layer",
                    .marks = MarkRule::kAlongDims,
                    .autocast = Autocast::kLow,
                    .reads = {inputs(0, 1, 2, 3, 4, 5, 6)},
                    .reads_outputs = outputs(0),
                    .composed = "linear, and for each step linear, sigmoid, tanh"};

RecurrentLayer lstm_layer(const Tensor& x, const Tensor& weight_ih, const Tensor& weight_hh,
                          const Tensor& bias_ih, const Tensor& bias_hh, const Tensor& hidden,
                          const Tensor& cell, const RecurrentSteps& steps,
                          const Tensor& weight_hr) {
  const RecurrentOperands o{x, weight_ih, weight_hh, bias_ih, bias_hh, hidden, cell, weight_hr};
  check_recurrent(kLstmLayer.name, o, 4, true, steps);
  if (weight_hr.defined() || x.device().is_cuda()) {
    return composed_layer(Recurrence::kLstm, as_read(o), steps);
  }
  return fused_layer(kLstmLayer, kernels::RecurrentCell::kLstm, o, steps);
}

const Op kGruLayer{.name = "gru_layer",
                   .marks = MarkRule::kAlongDims,
                   .autocast = Autocast::kLow,
                   .reads = {inputs(0, 1, 2, 3, 4, 5)},
                   .reads_outputs = outputs(0),
                   .composed = "linear, and for each step linear, sigmoid, tanh"};

RecurrentLayer gru_layer(const Tensor& x, const Tensor& weight_ih, const Tensor& weight_hh,
                         const Tensor& bias_ih, const Tensor& bias_hh, const Tensor& hidden,
                         const RecurrentSteps& steps) {
  const RecurrentOperands o{x, weight_ih, weight_hh, bias_ih, bias_hh, hidden, {}, {}};
  check_recurrent(kGruLayer.name, o, 3, false, steps);
  if (x.device().is_cuda()) return composed_layer(Recurrence::kGru, as_read(o), steps);
  return fused_layer(kGruLayer, kernels::RecurrentCell::kGru, o, steps);
}

RecurrentLayer rnn_layer(const Tensor& x, const Tensor& weight_ih, const Tensor& weight_hh,
                         const Tensor& bias_ih, const Tensor& bias_hh, const Tensor& hidden,
                         bool relu, const RecurrentSteps& steps) {
  const RecurrentOperands o{x, weight_ih, weight_hh, bias_ih, bias_hh, hidden, {}, {}};
  check_recurrent("rnn_layer", o, 1, false, steps);
  return composed_layer(relu ? Recurrence::kRelu : Recurrence::kTanh, as_read(o), steps);
}

LstmStates lstm_cell(const Tensor& x, const Tensor& hidden, const Tensor& cell,
                     const Tensor& weight_ih, const Tensor& weight_hh, const Tensor& bias_ih,
                     const Tensor& bias_hh) {
  return composed_lstm_step(linear(x, weight_ih, bias_ih) + linear(hidden, weight_hh, bias_hh),
                            cell);
}

Tensor gru_cell(const Tensor& x, const Tensor& hidden, const Tensor& weight_ih,
                const Tensor& weight_hh, const Tensor& bias_ih, const Tensor& bias_hh) {
  return composed_gru_step(linear(x, weight_ih, bias_ih), linear(hidden, weight_hh, bias_hh),
                           hidden);
}

}  // namespace tessera
