// The optimizers' updates, and averaging: one launch over all tensors of a call for each compute
// type.
#include <array>

#include <tessera/core/kernels/common/compute.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/elementwise/elementwise_loops.h>
#include <tessera/core/kernels/optim/multi_tensor.h>
#include <tessera/core/kernels/optim/update_rules.h>
#include <tessera/core/kernels/optim/multi_tensor.cuh>

namespace tessera::kernels {
namespace {

using namespace multi_tensor;

constexpr int kBlock = 256;

// The states that a row has: those that every element of the rule has, and some of the others.
template <class Rule>
struct HasStatesOfRow {
  const Row& row;
  TS_DEVICE bool operator[](int i) const {
    return (rules::optional_states<Rule>() >> i & 1) == 0 || row.spans[2 + i].data != nullptr;
  }
};

// States in bf16, to and from the compute type; see state_rounding.h. Only of f32.
template <bool kRounds>
TS_DEVICE void load_state(const Span& span, int64_t i, int count, float (&values)[kSpanGroup]) {
  if constexpr (kRounds) {
    load_group_of<bf16>(span, i, count, values);
  } else {
    load_group_of<float>(span, i, count, values);
  }
}
template <bool kRounds>
TS_DEVICE void load_state(const Span& span, int64_t i, int count, double (&values)[kSpanGroup]) {
  load_group_of<double>(span, i, count, values);
}
template <bool kRounds>
TS_DEVICE void store_state(const Span& span, int state, const uint32_t* noise, int64_t i, int count,
                           float (&values)[kSpanGroup]) {
  if constexpr (kRounds) {
    TS_UNROLL
    for (int j = 0; j < kSpanGroup; ++j) {
      values[j] = static_cast<float>(round_by_noise(values[j], noise[j], state));
    }
    store_group_of<bf16>(span, i, count, values);  // exact
  } else {
    store_group_of<float>(span, i, count, values);
  }
}
template <bool kRounds>
TS_DEVICE void store_state(const Span& span, int, const uint32_t*, int64_t i, int count,
                           double (&values)[kSpanGroup]) {
  store_group_of<double>(span, i, count, values);
}

// Spans of a row: parameter, gradient, three states, model copy. `roundings`: one for each row,
// where states are rounded.
//
// One thread of each block works out the constants of the step, as step number and factors may be
// known to the device alone: the bits are the CPU's where its pow() is, and a GPU's may differ in
// the last place of f64.
template <class C, class Rule, bool kRounds>
__global__ void __launch_bounds__(kBlock)
    update_kernel(const Row* rows, int count, const typename Rule::Options options,
                  const StepSource source, const StateRounding* roundings) {
  using Step = typename Rule::template Step<C>;
  constexpr int kStates = rules::kNumStates<Rule>;
  TS_SHARED(Step, constants, 1);
  TS_SHARED(int, runs, 1);
  TS_SHARED(double, number, 1);  // of the step
  if (threadIdx.x == 0) {
    double scalars[kNumStepScalars];
    runs[0] = read_scalars(source, scalars);
    constants[0] = Rule::template step<C>(options, scalars);
    number[0] = scalars[kStep];
  }
  __syncthreads();
  if (runs[0] == 0) return;
  const Step& step = constants[0];
  const Place place = find_chunk(rows, count);
  const Row row = rows[place.row];  // a copy: nothing tells that stores leave the table alone
  const HasStatesOfRow<Rule> has{row};
  for_groups<kSpanGroup>(place, [&](int64_t i, int count) {
    C param[kSpanGroup], grad[kSpanGroup], states[3][kSpanGroup];
    TS_UNROLL
    for (int s = 0; s < kStates; ++s) {
      if (has[s]) load_state<kRounds>(row.spans[2 + s], i, count, states[s]);
    }
    load_span(row.spans[0], i, count, param);  // last: a conversion waits for what it converts
    load_span(row.spans[1], i, count, grad);
    TS_UNROLL
    for (int j = 0; j < kSpanGroup; ++j) {
      param[j] = rules::update<Rule>(step, has, param[j], grad[j], states[0][j], states[1][j],
                                     states[2][j]);
    }
    uint32_t noise[kSpanGroup] = {};
    if constexpr (kRounds) {
      const StateRounding& rounding = roundings[place.row];
      draw_noise(rounding.index, rounding.stream(number[0]), i, noise);
    }
    TS_UNROLL
    for (int s = 0; s < kStates; ++s) {
      if (has[s]) store_state<kRounds>(row.spans[2 + s], s, noise, i, count, states[s]);
    }
    store_span(row.spans[0], i, count, param);
    store_model_copy(row.spans[5], i, count, param);
  });
}

// ---- Launches -----------------------------------------------------------------------------------

// The rows of one launch, and the gradients that had to be converted.
struct Update {
  Table table;
  TensorList kept;
  std::vector<StateRounding> roundings = {};  // of the table's rows, where states are rounded

  void add(const Tensor& param, const Tensor& grad, const Tensor& model_copy,
           const std::array<Tensor, kMaxRuleStates>& states) {
    const DType compute = compute_dtype(param.dtype());
    const bool direct =
        detail::is_direct(compute == kF64 ? Lane::kDouble : Lane::kFloat, grad.dtype());
    kept.push_back(in_order_of(grad, param, direct ? grad.dtype() : compute));
    table.add({span_of(param), span_of(kept.back()), span_of(states[0]), span_of(states[1]),
               span_of(states[2]), span_of(model_copy)},
              param.numel());
  }

  // Of a step that is not left out, with the table.
  template <class Rule>
  gpu::Traffic traffic(const StepSource& source) const {
    gpu::Traffic traffic{table.bytes.numel(), 0};
    traffic.reads += static_cast<int64_t>(roundings.size() * sizeof(StateRounding));
    if (source.on_device != nullptr) traffic.reads += kNumStepScalars * 8;
    for (const double* number : {source.gradient_factor, source.found, source.skipped}) {
      if (number != nullptr) traffic.reads += 8;
    }
    for (const Row& row : table.rows) {
      const auto bytes = [&](int span) {
        const Span& of = row.spans[span];
        return of.data == nullptr ? 0 : row.numel * size_of(of.dtype);
      };
      int64_t states = 0;
      for (int s = 0; s < rules::kNumStates<Rule>; ++s) states += bytes(2 + s);
      traffic.reads += bytes(0) + bytes(1) + states;
      traffic.writes += bytes(0) + bytes(5) + states;
    }
    return traffic;
  }

  template <class C, class Rule, bool kRounds = false>
  void launch(const char* where, const Device& device, const typename Rule::Options& options,
              const StepSource& source) {
    if (table.chunks == 0) return;
    const Row* const rows = table.upload(device);
    Tensor rounded;
    if (kRounds) rounded = upload_rows(roundings, device);
    const auto* const of_rows =
        kRounds ? static_cast<const StateRounding*>(rounded.data()) : nullptr;
    gpu::launch({.name = where,
                 .grid = static_cast<unsigned>(table.chunks),
                 .block = kBlock,
                 .traffic = traffic<Rule>(source)},
                update_kernel<C, Rule, kRounds>, rows, static_cast<int>(table.rows.size()), options,
                source, of_rows);
  }
};

template <class Rule>
void multi_tensor_update_cuda(std::span<const UpdateTensors> tensors,
                              const typename Rule::Options& options, const StepScalars& told) {
  Update narrow, wide, rounded;
  for (const UpdateTensors& t : tensors) {
    if (rules::rounds_states<Rule>() && t.states[0].dtype() == kBF16) {
      rounded.add(t.param, t.grad, t.model_copy, t.states);
      if (t.param.numel() > 0) rounded.roundings.push_back(t.rounding);
    } else {
      (t.param.dtype() == kF64 ? wide : narrow).add(t.param, t.grad, t.model_copy, t.states);
    }
  }
  const Device& device = tensors[0].param.device();
  const StepSource source = source_of(Rule::kName, told, device);
  if constexpr (rules::rounds_states<Rule>()) {
    rounded.launch<float, Rule, true>(Rule::kName, device, options, source);
  }
  narrow.launch<float, Rule>(Rule::kName, device, options, source);
  wide.launch<double, Rule>(Rule::kName, device, options, source);
}

void multi_tensor_lerp_cuda(std::span<const Tensor> averages, std::span<const Tensor> tensors,
                            double weight) {
  constexpr const char* kName = "multi_tensor_lerp";
  Update narrow, wide;
  for (size_t i = 0; i < averages.size(); ++i) {
    (averages[i].dtype() == kF64 ? wide : narrow).add(averages[i], tensors[i], {}, {});
  }
  const Device& device = averages[0].device();
  narrow.launch<float, rules::Lerp>(kName, device, {weight}, StepSource{});
  wide.launch<double, rules::Lerp>(kName, device, {weight}, StepSource{});
}

}  // namespace

void register_multi_tensor_updates() {
#define TS_REGISTER(name) \
  cuda_kernel<multi_tensor_update<rules::name>> = multi_tensor_update_cuda<rules::name>;
  TS_UPDATE_RULES(TS_REGISTER)
  TS_UPDATE_PARTS(TS_REGISTER)
#undef TS_REGISTER
  cuda_kernel<multi_tensor_lerp> = multi_tensor_lerp_cuda;
}

}  // namespace tessera::kernels
