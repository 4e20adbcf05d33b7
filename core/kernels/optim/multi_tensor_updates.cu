// The optimizers beside Adam, and averaging: one launch over all tensors of a call for each compute
// type.
#include <array>
#include <cmath>

#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/elementwise/elementwise_loops.h>
#include <tessera/core/kernels/optim/multi_tensor.h>
#include <tessera/core/kernels/optim/update_rules.h>
#include <tessera/core/kernels/optim/multi_tensor.cuh>

namespace tessera::kernels {
namespace {

using namespace multi_tensor;

constexpr int kBlock = 256;

// ---- Rules over up to three states --------------------------------------------------------------

template <class C>
struct States {  // of one element
  C* of[3];
  bool has[3];
};

template <class C>
struct Sgd {
  SgdStep<C> step;
  TS_DEVICE C operator()(C param, C grad, const States<C>& states) const {
    return sgd_rule(step, param, grad, *states.of[0]);
  }
};
template <class C>
struct Lion {
  LionStep<C> step;
  TS_DEVICE C operator()(C param, C grad, const States<C>& states) const {
    return lion_rule(step, param, grad, *states.of[0]);
  }
};
template <class C>
struct Adagrad {
  AdagradStep<C> step;
  TS_DEVICE C operator()(C param, C grad, const States<C>& states) const {
    return adagrad_rule(step, param, grad, *states.of[0]);
  }
};
template <class C>
struct Rmsprop {
  RmspropStep<C> step;
  TS_DEVICE C operator()(C param, C grad, const States<C>& states) const {
    return rmsprop_rule(step, states.has[1], states.has[2], param, grad, *states.of[0],
                        *states.of[1], *states.of[2]);
  }
};
template <class C>
struct Lerp {
  C weight;
  TS_DEVICE C operator()(C start, C end, const States<C>&) const {
    return lerp_rule(weight, start, end);
  }
};

// ---- The rule of a step, from the options and what the step is told -----------------------------

TS_DEVICE double signed_scale(const double* scalars, bool maximize) {
  return maximize ? -scalars[kGradientScale] : scalars[kGradientScale];
}

struct MakeSgd {
  SgdOptions options;
  bool first;         // all that is known on the host: the buffers hold nothing
  bool counts_skips;  // the device knows better: steps so far may have been left out
  template <class C>
  TS_DEVICE Sgd<C> make(const double* scalars) const {
    return {{static_cast<C>(signed_scale(scalars, options.maximize)),
             static_cast<C>(options.weight_decay), static_cast<C>(options.momentum),
             static_cast<C>(1 - options.dampening), static_cast<C>(scalars[kLearningRate]),
             options.momentum != 0, options.nesterov,
             first || (counts_skips && scalars[kStep] == 1)}};
  }
};

struct MakeLion {
  LionOptions options;
  template <class C>
  TS_DEVICE Lion<C> make(const double* scalars) const {
    const double lr = scalars[kLearningRate];
    return {{static_cast<C>(signed_scale(scalars, options.maximize)),
             static_cast<C>(1 - lr * options.weight_decay), static_cast<C>(options.beta1),
             static_cast<C>(1 - options.beta1), static_cast<C>(options.beta2),
             static_cast<C>(1 - options.beta2), static_cast<C>(lr)}};
  }
};

struct MakeAdagrad {
  AdagradOptions options;
  template <class C>
  TS_DEVICE Adagrad<C> make(const double* scalars) const {
    const double lr = scalars[kLearningRate] / (1 + (scalars[kStep] - 1) * options.lr_decay);
    return {{static_cast<C>(signed_scale(scalars, options.maximize)),
             static_cast<C>(options.weight_decay), static_cast<C>(options.eps),
             static_cast<C>(lr)}};
  }
};

struct MakeRmsprop {
  RmspropOptions options;
  template <class C>
  TS_DEVICE Rmsprop<C> make(const double* scalars) const {
    return {{static_cast<C>(signed_scale(scalars, options.maximize)),
             static_cast<C>(options.weight_decay), static_cast<C>(options.alpha),
             static_cast<C>(1 - options.alpha), static_cast<C>(options.eps),
             static_cast<C>(options.momentum), static_cast<C>(scalars[kLearningRate])}};
  }
};

struct MakeLerp {
  double weight;
  template <class C>
  TS_DEVICE Lerp<C> make(const double*) const {
    return {static_cast<C>(weight)};
  }
};

// Spans of a row: parameter, gradient, three states, shadow.
template <class C, class Maker>
__global__ void __launch_bounds__(kBlock)
    update_kernel(const Row* rows, int count, const Maker maker, const StepSource source) {
  // In shared memory, as registers are short: one thread works the constants out.
  using Rule = decltype(maker.template make<C>(nullptr));
  TS_SHARED(Rule, rules, 1);
  TS_SHARED(int, runs, 1);
  if (threadIdx.x == 0) {
    double scalars[kNumStepScalars];
    runs[0] = read_scalars(source, scalars);
    rules[0] = maker.template make<C>(scalars);
  }
  __syncthreads();
  if (runs[0] == 0) return;
  const Rule& rule = rules[0];
  const Place place = find_chunk(rows, count);
  const Row row = rows[place.row];  // a copy: nothing tells that stores leave the table alone
  const bool has[3] = {row.spans[2].data != nullptr, row.spans[3].data != nullptr,
                       row.spans[4].data != nullptr};
  for_groups<kSpanGroup>(place, [&](int64_t i, int count) {
    C param[kSpanGroup], grad[kSpanGroup], states[3][kSpanGroup];
    TS_UNROLL
    for (int s = 0; s < 3; ++s) {
      if (has[s]) load_group_of<C>(row.spans[2 + s], i, count, states[s]);
    }
    load_span(row.spans[0], i, count, param);  // last: a conversion waits for what it converts
    load_span(row.spans[1], i, count, grad);
    TS_UNROLL
    for (int j = 0; j < kSpanGroup; ++j) {
      States<C> of_element;
      TS_UNROLL
      for (int s = 0; s < 3; ++s) {
        of_element.of[s] = &states[s][j];
        of_element.has[s] = has[s];
      }
      param[j] = rule(param[j], grad[j], of_element);
    }
    TS_UNROLL
    for (int s = 0; s < 3; ++s) {
      if (has[s]) store_group_of<C>(row.spans[2 + s], i, count, states[s]);
    }
    store_span(row.spans[0], i, count, param);
    store_shadow(row.spans[5], i, count, param);
  });
}

// ---- Launches -----------------------------------------------------------------------------------

using StateTensors = std::array<Tensor, 3>;  // undefined: absent

// The rows of one launch, and the gradients that had to be converted.
struct Update {
  Table table;
  TensorList kept;

  void add(const char* where, const Tensor& param, const Tensor& grad, const Tensor& shadow,
           const StateTensors& states) {
    check_floating(param, where, "param");
    check_floating(grad, where, "grad");
    TS_CHECK_SHAPE(is_dense(param.shape(), param.strides()), where, "param must be dense; got ",
                   param, " with strides ", param.strides());
    const DType compute = param.dtype() == kF64 ? kF64 : kF32;
    const auto check = [&](const Tensor& x, const char* role) {
      TS_CHECK_DEVICE(x.device() == param.device(), where, role, " must be on ", param.device(),
                      "; got ", x);
      TS_CHECK_SHAPE(x.shape() == param.shape(), where, role, " must have the shape of param, ",
                     param, "; got ", x);
    };
    const auto check_layout = [&](const Tensor& x, const char* role) {
      check(x, role);
      TS_CHECK_SHAPE(x.strides() == param.strides() || (x.is_contiguous() && param.is_contiguous()),
                     where, role, " must have the strides of param, ", param.strides(), "; got ",
                     x.strides());
    };
    check(grad, "grad");
    if (shadow.defined()) {
      check_layout(shadow, "shadow");
      check_floating(shadow, where, "shadow");
    }
    for (const Tensor& state : states) {
      if (!state.defined()) continue;
      check_layout(state, "states");
      TS_CHECK_DTYPE(state.dtype() == compute, where, "states of a ", param.dtype(), " param are ",
                     compute, "; got ", state);
    }
    const bool direct =
        detail::is_direct(compute == kF64 ? Lane::kDouble : Lane::kFloat, grad.dtype());
    kept.push_back(in_order_of(grad, param, direct ? grad.dtype() : compute));
    table.add({span_of(param), span_of(kept.back()), span_of(states[0]), span_of(states[1]),
               span_of(states[2]), span_of(shadow)},
              param.numel());
  }

  template <class C, class Maker>
  void launch(const char* where, const Device& device, const Maker& maker,
              const StepSource& source) {
    if (table.chunks == 0) return;
    const Row* const rows = table.upload(device);
    gpu::launch({.name = where, .grid = static_cast<unsigned>(table.chunks), .block = kBlock},
                update_kernel<C, Maker>, rows, static_cast<int>(table.rows.size()), maker, source);
  }
};

// states_of(entry) lists the states.
template <class Entry, class StatesOf, class Maker>
void run_optimizer(const char* where, std::span<const Entry* const> entries,
                   const StepScalars& told, const StatesOf& states_of, const Maker& maker) {
  if (entries.empty()) return;
  Update narrow, wide;
  for (const Entry* t : entries) {
    (t->param.dtype() == kF64 ? wide : narrow)
        .add(where, t->param, t->grad, t->shadow, states_of(*t));
  }
  if (told.on_device == nullptr && told.values[kSkipStep] != 0) return;
  const Device& device = entries[0]->param.device();
  const StepSource source = source_of(where, told, device);
  narrow.launch<float>(where, device, maker, source);
  wide.launch<double>(where, device, maker, source);
  for (const Entry* t : entries) {
    t->param.bump_version();
    if (t->shadow.defined()) t->shadow.bump_version();
    for (const Tensor& state : states_of(*t)) {
      if (state.defined()) state.bump_version();
    }
  }
}

template <class Entry, class Keep>
std::vector<const Entry*> those(std::span<const Entry> tensors, const Keep& keep) {
  std::vector<const Entry*> result;
  for (const Entry& t : tensors) {
    if (keep(t)) result.push_back(&t);
  }
  return result;
}
template <class Entry>
std::vector<const Entry*> all_of(std::span<const Entry> tensors) {
  return those(tensors, [](const Entry&) { return true; });
}

void multi_tensor_sgd_cuda(std::span<const SgdTensors> tensors, const SgdOptions& options,
                           const StepScalars& told) {
  constexpr const char* kName = "multi_tensor_sgd";
  for (const SgdTensors& t : tensors) {
    TS_CHECK(options.momentum == 0 || t.momentum_buffer.defined(), kName, "momentum ",
             options.momentum, " needs a momentum_buffer for every param");
  }
  for (const bool first : {true, false}) {
    const auto entries = those(tensors, [&](const SgdTensors& t) { return t.first == first; });
    run_optimizer<SgdTensors>(
        kName, entries, told,
        [](const SgdTensors& t) -> StateTensors { return {t.momentum_buffer}; },
        MakeSgd{options, first, told.skipped.defined()});
  }
}

void multi_tensor_lion_cuda(std::span<const LionTensors> tensors, const LionOptions& options,
                            const StepScalars& told) {
  for (const LionTensors& t : tensors) {
    TS_CHECK(t.exp_avg.defined(), "multi_tensor_lion", "exp_avg must be defined");
  }
  run_optimizer<LionTensors>(
      "multi_tensor_lion", all_of(tensors), told,
      [](const LionTensors& t) -> StateTensors { return {t.exp_avg}; }, MakeLion{options});
}

void multi_tensor_adagrad_cuda(std::span<const AdagradTensors> tensors,
                               const AdagradOptions& options, const StepScalars& told) {
  for (const AdagradTensors& t : tensors) {
    TS_CHECK(t.state_sum.defined(), "multi_tensor_adagrad", "state_sum must be defined");
  }
  run_optimizer<AdagradTensors>(
      "multi_tensor_adagrad", all_of(tensors), told,
      [](const AdagradTensors& t) -> StateTensors { return {t.state_sum}; }, MakeAdagrad{options});
}

void multi_tensor_rmsprop_cuda(std::span<const RmspropTensors> tensors,
                               const RmspropOptions& options, const StepScalars& told) {
  constexpr const char* kName = "multi_tensor_rmsprop";
  for (const RmspropTensors& t : tensors) {
    TS_CHECK(t.square_avg.defined(), kName, "square_avg must be defined");
    TS_CHECK((options.momentum != 0) == t.momentum_buffer.defined(), kName,
             "a momentum_buffer is given exactly where momentum is not 0; momentum is ",
             options.momentum);
  }
  run_optimizer<RmspropTensors>(
      kName, all_of(tensors), told,
      [](const RmspropTensors& t) -> StateTensors {
        return {t.square_avg, t.grad_avg, t.momentum_buffer};
      },
      MakeRmsprop{options});
}

void multi_tensor_lerp_cuda(std::span<const Tensor> averages, std::span<const Tensor> tensors,
                            double weight) {
  constexpr const char* kName = "multi_tensor_lerp";
  TS_CHECK(averages.size() == tensors.size(), kName,
           "the lists differ in length: ", averages.size(), " and ", tensors.size());
  Update narrow, wide;
  for (size_t i = 0; i < averages.size(); ++i) {
    (averages[i].dtype() == kF64 ? wide : narrow).add(kName, averages[i], tensors[i], {}, {});
  }
  const Device& device = averages[0].device();
  narrow.launch<float>(kName, device, MakeLerp{weight}, StepSource{});
  wide.launch<double>(kName, device, MakeLerp{weight}, StepSource{});
  for (const Tensor& average : averages) average.bump_version();
}

}  // namespace

void register_multi_tensor_updates() {
  cuda_kernel<multi_tensor_sgd> = multi_tensor_sgd_cuda;
  cuda_kernel<multi_tensor_lion> = multi_tensor_lion_cuda;
  cuda_kernel<multi_tensor_adagrad> = multi_tensor_adagrad_cuda;
  cuda_kernel<multi_tensor_rmsprop> = multi_tensor_rmsprop_cuda;
  cuda_kernel<multi_tensor_lerp> = multi_tensor_lerp_cuda;
}

}  // namespace tessera::kernels
