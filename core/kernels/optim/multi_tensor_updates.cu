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

// Spans of a row: parameter, gradient, three states, model copy.
//
// One thread of each block works out the constants of the step, as step number and factors may be
// known to the device alone: the bits are the CPU's where its pow() is, and a GPU's may differ in
// the last place of f64.
template <class C, class Rule>
__global__ void __launch_bounds__(kBlock)
    update_kernel(const Row* rows, int count, const typename Rule::Options options,
                  const StepSource source) {
  using Step = typename Rule::template Step<C>;
  constexpr int kStates = rules::kNumStates<Rule>;
  TS_SHARED(Step, constants, 1);
  TS_SHARED(int, runs, 1);
  if (threadIdx.x == 0) {
    double scalars[kNumStepScalars];
    runs[0] = read_scalars(source, scalars);
    constants[0] = Rule::template step<C>(options, scalars);
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
      if (has[s]) load_group_of<C>(row.spans[2 + s], i, count, states[s]);
    }
    load_span(row.spans[0], i, count, param);  // last: a conversion waits for what it converts
    load_span(row.spans[1], i, count, grad);
    TS_UNROLL
    for (int j = 0; j < kSpanGroup; ++j) {
      param[j] = rules::update<Rule>(step, has, param[j], grad[j], states[0][j], states[1][j],
                                     states[2][j]);
    }
    TS_UNROLL
    for (int s = 0; s < kStates; ++s) {
      if (has[s]) store_group_of<C>(row.spans[2 + s], i, count, states[s]);
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

  template <class C, class Rule>
  void launch(const char* where, const Device& device, const typename Rule::Options& options,
              const StepSource& source) {
    if (table.chunks == 0) return;
    const Row* const rows = table.upload(device);
    gpu::launch({.name = where,
                 .grid = static_cast<unsigned>(table.chunks),
                 .block = kBlock,
                 .traffic = traffic<Rule>(source)},
                update_kernel<C, Rule>, rows, static_cast<int>(table.rows.size()), options, source);
  }
};

template <class Rule>
void multi_tensor_update_cuda(std::span<const UpdateTensors> tensors,
                              const typename Rule::Options& options, const StepScalars& told) {
  Update narrow, wide;
  for (const UpdateTensors& t : tensors) {
    (t.param.dtype() == kF64 ? wide : narrow).add(t.param, t.grad, t.model_copy, t.states);
  }
  const Device& device = tensors[0].param.device();
  const StepSource source = source_of(Rule::kName, told, device);
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
#undef TS_REGISTER
  cuda_kernel<multi_tensor_lerp> = multi_tensor_lerp_cuda;
}

}  // namespace tessera::kernels
