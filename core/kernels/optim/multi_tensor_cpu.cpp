#include <tessera/core/kernels/optim/multi_tensor.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include <tessera/core/dispatch.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/common/compute.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/common/strided.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/optim/multi_tensor_blocks.h>
#include <tessera/core/kernels/optim/multi_tensor_loss_scale.h>
#include <tessera/core/kernels/optim/multi_tensor_square_sum.h>
#include <tessera/core/kernels/random/random_fill.h>
#include <tessera/core/memory/meta_memory.h>
#include <tessera/core/parallel.h>

namespace tessera::kernels {
namespace {

constexpr int64_t kTensorStage =
    1024;  // elements that are converted at a time: five of them fit in L1

struct Chunk {
  int32_t tensor;
  int64_t begin;
  int64_t end;
};

std::vector<Chunk> cut_into_chunks(size_t count, auto&& numel_of_tensor) {
  std::vector<Chunk> chunks;
  for (size_t t = 0; t < count; ++t) {
    const int64_t numel = numel_of_tensor(t);
    for (int64_t begin = 0; begin < numel; begin += kMultiTensorChunk) {
      chunks.push_back(
          {static_cast<int32_t>(t), begin, std::min(numel, begin + kMultiTensorChunk)});
    }
  }
  return chunks;
}

void check_floating(const Tensor& x, const char* where, const char* role) {
  TS_CHECK_DTYPE(is_floating(x.dtype()) && !is_fp8(x.dtype()), where, role,
                 " must be f64, f32, bf16 or f16; got ", x);
}
void check_device(const Tensor& x, const Device& device, const char* where, const char* role) {
  TS_CHECK_DEVICE(x.device() == device, where, role, " must be on ", device,
                  ", as the first tensor; got ", x, "; call it for each device");
}
void check_dense(const Tensor& x, const char* where, const char* role) {
  TS_CHECK_SHAPE(is_dense(x.shape(), x.strides()), where, role, " must be dense; got ", x,
                 " with strides ", x.strides(), "; make it contiguous first");
}

// Whether neighbours in the memory of one are neighbours in that of the other.
bool same_layout(const Tensor& a, const Tensor& b) {
  return a.strides() == b.strides() || (a.is_contiguous() && b.is_contiguous());
}

using StateTensors = std::array<Tensor, kMaxRuleStates>;  // undefined: absent

// One entry of a call whose first tensor is on `device`.
void check_update(const char* where, const Device& device, const Tensor& param, const Tensor& grad,
                  const Tensor& model_copy, const StateTensors& states, bool may_round) {
  check_floating(param, where, "param");
  check_floating(grad, where, "grad");
  check_device(param, device, where, "param");
  check_dense(param, where, "param");
  const auto check = [&](const Tensor& x, const char* role) {
    TS_CHECK_SHAPE(x.shape() == param.shape(), where, role, " must have the shape of param, ",
                   param, "; got ", x);
    check_device(x, device, where, role);
  };
  const auto check_layout = [&](const Tensor& x, const char* role) {
    check(x, role);
    TS_CHECK_SHAPE(same_layout(x, param), where, role, " must have the strides of param, ",
                   param.strides(), "; got ", x.strides());
  };
  check(grad, "grad");
  if (model_copy.defined()) {
    check_layout(model_copy, "model_copy");
    check_floating(model_copy, where, "model_copy");
  }
  const DType state_dtype = compute_dtype(param.dtype());
  may_round = may_round && state_dtype == kF32;
  for (const Tensor& state : states) {
    if (!state.defined()) continue;
    check_layout(state, "state");
    TS_CHECK_DTYPE(state.dtype() == state_dtype || (may_round && state.dtype() == kBF16), where,
                   "states of a ", param.dtype(), " param are ", state_dtype,
                   may_round ? " or bf16" : "", "; got ", state);
  }
}

void check_in_place(const char* where, std::span<const Tensor> tensors) {
  for (const Tensor& x : tensors) {
    check_floating(x, where, "a tensor");
    check_device(x, tensors[0].device(), where, "a tensor");
    check_dense(x, where, "a tensor");
  }
}

void check_summed(const char* where, std::span<const Tensor> tensors, double p) {
  TS_CHECK(p > 0, where, "p must be positive or infinity; got ", p);
  for (const Tensor& x : tensors) {
    check_floating(x, where, "a tensor");
    check_device(x, tensors[0].device(), where, "a tensor");
    TS_CHECK_DEVICE(!x.is_meta(), where, "reads elements, and ", x, " has none");
  }
}

// Elements in the order of `like`'s memory, for a tensor of another layout.
Tensor in_layout_of(const Tensor& x, const Shape& strides) {
  const Tensor result = raw::empty_strided(x.shape(), strides, x.dtype(), x.device());
  copy_into(result, x);
  return result;
}

// Blocks to the compute type and back.
template <class C>
void convert_in(DType dtype, const void* x, int64_t n, C* buffer) {
  load_function(dtype, lane_of(dtype_of<C>))(x, 1, buffer, n);
}
template <class C>
void convert_out(DType dtype, void* x, int64_t n, const C* buffer) {
  store_function(lane_of(dtype_of<C>), dtype)(buffer, x, 1, n);
}

// One tensor of an update as the loops see it.
struct ListElement {
  void* data = nullptr;
  DType dtype = kF32;
};

// The operands of one parameter.
struct Entry {
  int64_t numel = 0;
  bool is_double = false;
  ListElement param, grad, model_copy;
  std::array<ListElement, kMaxRuleStates> states = {};
  Tensor grad_copy;                         // where the gradient had another layout
  const StateRounding* rounding = nullptr;  // of states in bf16
};

Entry make_entry(const Tensor& param, const Tensor& grad, const Tensor& model_copy,
                 const StateTensors& states) {
  const auto operand = [](const Tensor& x) {
    return x.defined() ? ListElement{x.data(), x.dtype()} : ListElement{};
  };
  Entry entry;
  entry.numel = param.numel();
  entry.is_double = param.dtype() == kF64;
  entry.param = operand(param);
  if (same_layout(grad, param)) {
    entry.grad = operand(grad);
  } else {
    entry.grad_copy = in_layout_of(grad, param.strides());
    entry.grad = operand(entry.grad_copy);
  }
  entry.model_copy = operand(model_copy);
  for (size_t i = 0; i < states.size(); ++i) entry.states[i] = operand(states[i]);
  return entry;
}

template <class C>
C* at(const ListElement& operand, int64_t i) {
  return operand.data == nullptr ? nullptr : static_cast<C*>(operand.data) + i;
}
void* bytes_at(const ListElement& operand, int64_t i) {
  return static_cast<char*>(operand.data) + i * size_of(operand.dtype);
}

// Where values that are not of the compute type are converted.
enum class Convert { kInL1, kInRegisters };

// Runs block(update block, states) over elements [begin, end), staging what is neither of the
// compute type nor of dtypes that the loops convert themselves.
template <class C, class Block>
void update_range(const Entry& entry, Convert convert, int64_t begin, int64_t end, Block&& block) {
  const auto states = [&](int64_t i) {
    return std::array<C*, kMaxRuleStates>{at<C>(entry.states[0], i), at<C>(entry.states[1], i),
                                          at<C>(entry.states[2], i)};
  };
  const bool has_model_copy = entry.model_copy.data != nullptr;
  const bool direct_param = entry.param.dtype == dtype_of<C>;
  const bool direct_grad = entry.grad.dtype == dtype_of<C>;
  if ((direct_param && direct_grad && !has_model_copy) ||
      (convert == Convert::kInRegisters &&
       updates_directly(entry.param.dtype, entry.grad.dtype,
                        has_model_copy ? std::optional(entry.model_copy.dtype) : std::nullopt))) {
    block(UpdateBlock{end - begin, bytes_at(entry.param, begin), bytes_at(entry.grad, begin),
                      has_model_copy ? bytes_at(entry.model_copy, begin) : nullptr,
                      entry.param.dtype, entry.grad.dtype},
          states(begin));
    return;
  }
  C params[kTensorStage], grads[kTensorStage];
  for (int64_t i = begin; i < end; i += kTensorStage) {
    const int64_t n = std::min(kTensorStage, end - i);
    C* param = params;
    if (direct_param) {
      param = at<C>(entry.param, i);
    } else {
      convert_in(entry.param.dtype, bytes_at(entry.param, i), n, params);
    }
    const C* grad = grads;
    if (direct_grad) {
      grad = at<C>(entry.grad, i);
    } else {
      convert_in(entry.grad.dtype, bytes_at(entry.grad, i), n, grads);
    }
    block(UpdateBlock{n, param, grad, nullptr, dtype_of<C>, dtype_of<C>}, states(i));
    if (!direct_param) {
      convert_out(entry.param.dtype, bytes_at(entry.param, i), n, static_cast<const C*>(params));
    }
    if (has_model_copy) {
      convert_out(entry.model_copy.dtype, bytes_at(entry.model_copy, i), n,
                  static_cast<const C*>(param));
    }
  }
}

// The noise of n elements from the i-th on, beginning at the pointer that is returned; `memory` has
// room for 8 more.
const uint32_t* noise_of(const StateRounding& rounding, double step, int64_t i, int64_t n,
                         uint32_t* memory) {
  const RandomStream stream = rounding.stream(step);
  if (!rounding.index.is_run()) {
    for (int64_t j = 0; j < n; j += 4) {
      uint32_t four[4] = {};
      draw_noise(rounding.index, stream, i + j, four);
      std::memcpy(memory + j, four, sizeof four);
    }
    return memory;
  }
  const int64_t first = rounding.index.first + i;
  TS_SIMD_CALL(philox_range, memory, stream, static_cast<uint64_t>(first / 4),
               (first + n + 3) / 4 - first / 4);
  return memory + first % 4;
}

// The same of states in bf16.
template <class Block>
void update_rounded_range(const Entry& entry, double step, int64_t begin, int64_t end,
                          Block&& block) {
  float params[kTensorStage], grads[kTensorStage], wide[kMaxRuleStates][kTensorStage];
  uint32_t memory[kTensorStage + 8];
  for (int64_t i = begin; i < end; i += kTensorStage) {
    const int64_t n = std::min(kTensorStage, end - i);
    convert_in(entry.param.dtype, bytes_at(entry.param, i), n, static_cast<float*>(params));
    convert_in(entry.grad.dtype, bytes_at(entry.grad, i), n, static_cast<float*>(grads));
    std::array<float*, kMaxRuleStates> states = {};
    for (size_t s = 0; s < states.size(); ++s) {
      if (entry.states[s].data == nullptr) continue;
      states[s] = wide[s];
      convert_in(kBF16, bytes_at(entry.states[s], i), n, states[s]);
    }
    block(UpdateBlock{n, params, grads, nullptr, kF32, kF32}, states);
    for (const ListElement* written : {&entry.param, &entry.model_copy}) {
      if (written->data == nullptr) continue;
      convert_out(written->dtype, bytes_at(*written, i), n, static_cast<const float*>(params));
    }
    const uint32_t* const noise =
        noise_of(*entry.rounding, step, i, n, static_cast<uint32_t*>(memory));
    for (size_t s = 0; s < states.size(); ++s) {
      if (states[s] == nullptr) continue;
      TS_SIMD_CALL(round_state_block, n, static_cast<const float*>(states[s]), noise,
                   static_cast<int>(s), at<bf16>(entry.states[s], i));
    }
  }
}

// Calls update.operator()<C>(entry index, update block, states) for all blocks of all entries.
template <class Update>
void run_update(const std::vector<Entry>& entries, Convert convert, double step, Update&& update) {
  const std::vector<Chunk> chunks =
      cut_into_chunks(entries.size(), [&](size_t t) { return entries[t].numel; });
  parallel_for(static_cast<int64_t>(chunks.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      const Chunk& chunk = chunks[static_cast<size_t>(c)];
      const Entry& entry = entries[static_cast<size_t>(chunk.tensor)];
      if (entry.rounding != nullptr) {
        update_rounded_range(entry, step, chunk.begin, chunk.end,
                             [&](const UpdateBlock& block, auto states) {
                               update.template operator()<float>(chunk.tensor, block, states);
                             });
        continue;
      }
      const auto run = [&]<class C>() {
        update_range<C>(entry, convert, chunk.begin, chunk.end,
                        [&](const UpdateBlock& block, auto states) {
                          update.template operator()<C>(chunk.tensor, block, states);
                        });
      };
      entry.is_double ? run.template operator()<double>() : run.template operator()<float>();
    }
  });
}

// The numbers of a step whose tensors are on the CPU.
std::array<double, kNumStepScalars> on_host(const StepScalars& step_scalars) {
  std::array<double, kNumStepScalars> scalars;
  std::copy(step_scalars.values, step_scalars.values + kNumStepScalars, scalars.begin());
  if (step_scalars.gradient_factor.defined())
    scalars[kGradientScale] *= step_scalars.gradient_factor.item();
  if (step_scalars.found.defined() && step_scalars.found.item() != 0) scalars[kSkipStep] = 1;
  if (step_scalars.skipped.defined()) scalars[kStep] -= step_scalars.skipped.item();
  return scalars;
}

bool has_rounded_states(const StateTensors& states) {
  return std::ranges::any_of(
      states, [](const Tensor& state) { return state.defined() && state.dtype() == kBF16; });
}

template <class Rule>
void check_states(const StateTensors& states, const typename Rule::Options& options) {
  for (int i = 0; i < rules::kNumStates<Rule>; ++i) {
    const auto state = static_cast<size_t>(i);
    TS_CHECK(states[state].defined() || !rules::uses_state<Rule>(options, i), Rule::kName,
             "the state ", Rule::kStates[state], " must be defined for every param");
  }
  if (!has_rounded_states(states)) return;
  for (const Tensor& state : states) {
    TS_CHECK_DTYPE(!state.defined() || state.dtype() == kBF16, Rule::kName,
                   "all states of a param have one dtype; got bf16 and ", state);
  }
}

// The chunks that a list of in-place calls works on.
void run_in_place(std::span<const Tensor> tensors, auto&& block) {
  const std::vector<Chunk> chunks = cut_into_chunks(
      tensors.size(), [&](size_t t) { return tensors[t].is_meta() ? 0 : tensors[t].numel(); });
  parallel_for(static_cast<int64_t>(chunks.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      const Chunk& chunk = chunks[static_cast<size_t>(c)];
      const Tensor& x = tensors[static_cast<size_t>(chunk.tensor)];
      block(chunk, ListElement{x.data(), x.dtype()});
    }
  });
  for (const Tensor& x : tensors) x.bump_version();
}

// block.operator()(n, C* x) over a chunk, converted where x is narrow.
void for_each_block(const Chunk& chunk, const ListElement& x, auto&& block) {
  const int64_t n = chunk.end - chunk.begin;
  if (x.dtype == kF64) return block(n, at<double>(x, chunk.begin));
  if (x.dtype == kF32) return block(n, at<float>(x, chunk.begin));
  float buffer[kTensorStage];
  for (int64_t i = chunk.begin; i < chunk.end; i += kTensorStage) {
    const int64_t count = std::min(kTensorStage, chunk.end - i);
    convert_in(x.dtype, bytes_at(x, i), count, static_cast<float*>(buffer));
    block(count, static_cast<float*>(buffer));
    convert_out(x.dtype, bytes_at(x, i), count, static_cast<const float*>(buffer));
  }
}

// partials[0, n) combined in a binary tree over their index.
template <class Join>
double tree(std::span<double> partials, Join&& join) {
  if (partials.empty()) return 0;
  for (size_t width = 1; width < partials.size(); width *= 2) {
    for (size_t i = 0; i + width < partials.size(); i += 2 * width) {
      partials[i] = join(partials[i], partials[i + width]);
    }
  }
  return partials[0];
}
double tree_of_norm(std::span<double> partials, double p) {
  if (std::isinf(p)) {
    return tree(partials, [](double a, double b) { return b > a || std::isnan(b) ? b : a; });
  }
  return tree(partials, [](double a, double b) { return a + b; });
}

}  // namespace

template <class Rule>
void multi_tensor_update(std::span<const UpdateTensors> tensors,
                         const typename Rule::Options& options, const StepScalars& step_scalars) {
  if (tensors.empty()) return;
  const Device& device = tensors[0].param.device();
  for (const UpdateTensors& t : tensors) {
    check_states<Rule>(t.states, options);
    check_update(Rule::kName, device, t.param, t.grad, t.model_copy, t.states,
                 rules::rounds_states<Rule>());
  }
  if (device.is_meta()) {
    if (!MetaMemoryGuard::holds()) return;  // else they are written, as far as anybody can tell
  } else if (device.is_cuda()) {
    if (step_scalars.on_device == nullptr && step_scalars.values[kSkipStep] != 0) return;
    on_cuda<kernels::multi_tensor_update<Rule>>(Rule::kName, device, tensors, options,
                                                step_scalars);
  } else {
    const auto scalars = on_host(step_scalars);
    if (scalars[kSkipStep] != 0) return;
    std::vector<Entry> entries;
    entries.reserve(tensors.size());
    for (const UpdateTensors& t : tensors) {
      entries.push_back(make_entry(t.param, t.grad, t.model_copy, t.states));
      if (has_rounded_states(t.states)) entries.back().rounding = &t.rounding;
    }
    const auto single = Rule::template step<float>(options, scalars.data());
    const auto wide = Rule::template step<double>(options, scalars.data());
    run_update(entries, rules::in_registers<Rule>() ? Convert::kInRegisters : Convert::kInL1,
               scalars[kStep],
               [&]<class C>(int, const UpdateBlock& block, std::array<C*, kMaxRuleStates> s) {
                 if constexpr (std::is_same_v<C, float>) {
                   TS_SIMD_CALL(update_block, Rule{}, single, block, s[0], s[1], s[2]);
                 } else {
                   TS_SIMD_CALL(update_block, Rule{}, wide, block, s[0], s[1], s[2]);
                 }
               });
  }
  for (const UpdateTensors& t : tensors) {
    t.param.bump_version();
    if (t.model_copy.defined()) t.model_copy.bump_version();
    for (const Tensor& state : t.states) {
      if (state.defined()) state.bump_version();
    }
  }
}
#define TS_INSTANTIATE(name)                                                     \
  template void multi_tensor_update<rules::name>(std::span<const UpdateTensors>, \
                                                 const rules::name::Options&, const StepScalars&);
TS_UPDATE_RULES(TS_INSTANTIATE)
TS_UPDATE_PARTS(TS_INSTANTIATE)
#undef TS_INSTANTIATE

std::vector<double> multi_tensor_power_sums(std::span<const Tensor> tensors, double p) {
  constexpr const char* kWhere = "multi_tensor_power_sums";
  check_summed(kWhere, tensors, p);
  if (p == 2) return multi_tensor_square_sums(tensors);
  if (!tensors.empty() && tensors[0].device().is_cuda()) {
    return on_cuda<kernels::multi_tensor_power_sums>(kWhere, tensors[0].device(), tensors, p);
  }
  std::vector<Tensor> copies(tensors.begin(), tensors.end());
  for (Tensor& x : copies) {
    if (!x.is_contiguous()) {
      x = contiguous(x);
    }
  }
  const std::vector<Chunk> chunks =
      cut_into_chunks(copies.size(), [&](size_t t) { return copies[t].numel(); });
  std::vector<double> partials(chunks.size());
  parallel_for(static_cast<int64_t>(chunks.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      const Chunk& chunk = chunks[static_cast<size_t>(c)];
      const Tensor& x = copies[static_cast<size_t>(chunk.tensor)];
      const ListElement operand{x.data(), x.dtype()};
      partials[static_cast<size_t>(c)] = TS_SIMD_CALL(
          power_sum_block, x.dtype(), bytes_at(operand, chunk.begin), chunk.end - chunk.begin, p);
    }
  });
  std::vector<double> sums(copies.size());
  size_t first = 0;
  for (size_t t = 0; t < copies.size(); ++t) {
    const size_t count =
        static_cast<size_t>((copies[t].numel() + kMultiTensorChunk - 1) / kMultiTensorChunk);
    sums[t] = tree_of_norm(std::span(partials).subspan(first, count), p);
    first += count;
  }
  return sums;
}

double multi_tensor_norm(std::span<const Tensor> tensors, double p) {
  check_summed("multi_tensor_norm", tensors, p);
  if (p == 2) {
    const Device device = tensors.empty() ? kCpu : tensors[0].device();
    return std::sqrt(square_sum_value(multi_tensor_square_sum(tensors, device)));
  }
  std::vector<double> sums = multi_tensor_power_sums(tensors, p);
  const double total = tree_of_norm(sums, p);
  return std::isinf(p) || p == 1 ? total : std::pow(total, 1 / p);
}

Tensor multi_tensor_clip_factor(std::span<const Tensor> tensors, double p, double scale,
                                double max_norm, const Tensor& factor) {
  constexpr const char* kWhere = "multi_tensor_clip_factor";
  TS_CHECK(!tensors.empty(), kWhere, "expects at least one tensor");
  check_summed(kWhere, tensors, p);
  if (p == 2) {
    const Tensor sum = multi_tensor_square_sum(tensors, tensors[0].device());
    return square_sum_clip_factor(sum, scale, max_norm, factor);
  }
  if (tensors[0].device().is_cuda()) {
    return on_cuda<kernels::multi_tensor_clip_factor>(kWhere, tensors[0].device(), tensors, p,
                                                      scale, max_norm, factor);
  }
  const double given = factor.defined() ? factor.item() : 1;
  const double norm = multi_tensor_norm(tensors, p) * (scale * given);
  const double clip = max_norm / (norm + 1e-6);
  return tensor({norm, given * (clip >= 1 ? 1 : clip), std::isfinite(norm) ? 0.0 : 1.0}, kF64);
}

Tensor multi_tensor_found_nonfinite(std::span<const Tensor> tensors) {
  constexpr const char* kWhere = "multi_tensor_found_nonfinite";
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  TS_CHECK(!tensors.empty(), kWhere, "expects at least one tensor");
  if (tensors[0].device().is_cuda()) {
    check_summed(kWhere, tensors, kInfinity);
    return on_cuda<kernels::multi_tensor_found_nonfinite>(kWhere, tensors[0].device(), tensors);
  }
  const double largest = multi_tensor_norm(tensors, kInfinity);
  return tensor({std::isfinite(largest) ? 0.0 : 1.0}, kF64);
}

void update_loss_scale(const Tensor& state, const LossScaleOptions& options) {
  TS_CHECK_DTYPE(state.dtype() == kF64 && state.numel() == kNumLossScaleState, "update_loss_scale",
                 "expects f64[", int{kNumLossScaleState}, "]; got ", state);
  if (state.device().is_cuda()) {
    on_cuda<kernels::update_loss_scale>("update_loss_scale", state.device(), state, options);
  } else {
    next_loss_scale(state.data_as<double>(), options);
  }
  state.bump_version();
}

void multi_tensor_scale(std::span<const Tensor> tensors, const double* factor) {
  check_in_place("multi_tensor_scale", tensors);
  if (!tensors.empty() && tensors[0].device().is_cuda()) {
    return on_cuda<kernels::multi_tensor_scale>("multi_tensor_scale", tensors[0].device(), tensors,
                                                factor);
  }
  run_in_place(tensors, [&](const Chunk& chunk, const ListElement& x) {
    for_each_block(chunk, x, [&]<class C>(int64_t n, C* block) {
      TS_SIMD_CALL(scale_block, n, block, static_cast<C>(*factor));
    });
  });
}

void multi_tensor_clamp(std::span<const Tensor> tensors, double limit) {
  check_in_place("multi_tensor_clamp", tensors);
  if (!tensors.empty() && tensors[0].device().is_cuda()) {
    return on_cuda<kernels::multi_tensor_clamp>("multi_tensor_clamp", tensors[0].device(), tensors,
                                                limit);
  }
  run_in_place(tensors, [&](const Chunk& chunk, const ListElement& x) {
    for_each_block(chunk, x, [&]<class C>(int64_t n, C* block) {
      TS_SIMD_CALL(clamp_block, n, block, static_cast<C>(limit));
    });
  });
}

void multi_tensor_zero(std::span<const Tensor> tensors) {
  check_in_place("multi_tensor_zero", tensors);
  if (!tensors.empty() && tensors[0].device().is_cuda()) {
    return on_cuda<kernels::multi_tensor_zero>("multi_tensor_zero", tensors[0].device(), tensors);
  }
  run_in_place(tensors, [&](const Chunk& chunk, const ListElement& x) {
    std::memset(bytes_at(x, chunk.begin), 0,
                static_cast<size_t>((chunk.end - chunk.begin) * size_of(x.dtype)));
  });
}

void multi_tensor_lerp(std::span<const Tensor> averages, std::span<const Tensor> tensors,
                       double weight) {
  constexpr const char* kWhere = "multi_tensor_lerp";
  TS_CHECK(averages.size() == tensors.size(), kWhere,
           "the lists differ in length: ", averages.size(), " and ", tensors.size());
  if (averages.empty()) return;
  const Device& device = averages[0].device();
  for (size_t i = 0; i < averages.size(); ++i) {
    check_update(kWhere, device, averages[i], tensors[i], {}, {}, false);
  }
  if (device.is_cuda()) {
    on_cuda<kernels::multi_tensor_lerp>(kWhere, device, averages, tensors, weight);
  } else if (device.is_cpu()) {
    std::vector<Entry> entries;
    entries.reserve(averages.size());
    for (size_t i = 0; i < averages.size(); ++i) {
      entries.push_back(make_entry(averages[i], tensors[i], {}, {}));
    }
    run_update(entries, Convert::kInRegisters, 0,
               [&]<class C>(int, const UpdateBlock& block, auto) {
                 C* const none = nullptr;
                 const rules::Lerp::Step<C> step{static_cast<C>(weight)};
                 TS_SIMD_CALL(update_block, rules::Lerp{}, step, block, none, none, none);
               });
  }
  for (const Tensor& average : averages) average.bump_version();
}

}  // namespace tessera::kernels
