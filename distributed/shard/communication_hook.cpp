#include <tessera/distributed/shard/communication_hook.h>

#include <algorithm>
#include <cmath>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/error.h>
#include <tessera/core/factory.h>
#include <tessera/core/random.h>
#include <tessera/core/raw_views.h>

namespace tessera::distributed {
namespace {

CollectiveOptions on_gradient_channel(const ParamGroup& bucket) {
  return {.channel = Channel::kGradient, .tag = bucket.tag()};
}

Tensor communication_buffer(int64_t numel, DType dtype, const Device& device) {
  const MemoryCategoryGuard category(MemoryCategory::kCommunication);
  return raw::empty({numel}, dtype, device);
}

}  // namespace

// ---- AllReduceHook -----------------------------------------------------------------------------

void AllReduceHook::start(const ParamGroup& bucket, double divisor) {
  // The mean of the ranks is taken inside the collective, which saves a pass over the bucket.
  const bool mean = divisor == bucket.ranks().size();
  Work work = bucket.ranks().all_reduce(bucket.gradients(), mean ? ReduceOp::kMean : ReduceOp::kSum,
                                        on_gradient_channel(bucket));
  pending_[bucket.index()] = {std::move(work), mean ? 1 : divisor};
}

bool AllReduceHook::advance(const ParamGroup& bucket) {
  const NoGradGuard no_grad;
  const auto pending = pending_.extract(bucket.index());
  pending.mapped().work.wait();
  const double divisor = pending.mapped().divisor;
  if (divisor != 1) mul_(bucket.gradients(), Scalar(1 / divisor));
  return true;
}

// ---- CastHook ----------------------------------------------------------------------------------

CastHook::CastHook(DType wire) : wire_(wire) {
  TS_CHECK_DTYPE(wire == kF16 || wire == kBF16, "CastHook", "gradients travel as f16 or bf16; got ",
                 wire);
}

std::string CastHook::name() const { return tessera::detail::concatenate("cast to ", wire_); }

void CastHook::start(const ParamGroup& bucket, double divisor) {
  const NoGradGuard no_grad;
  const Tensor& gradients = bucket.gradients();
  if (divisor != 1) mul_(gradients, Scalar(1 / divisor));
  Tensor payload = communication_buffer(gradients.numel(), wire_, gradients.device());
  copy_(payload, gradients);
  Work work = bucket.ranks().all_reduce(payload, ReduceOp::kSum, on_gradient_channel(bucket));
  pending_[bucket.index()] = {std::move(work), std::move(payload)};
}

bool CastHook::advance(const ParamGroup& bucket) {
  const NoGradGuard no_grad;
  const auto pending = pending_.extract(bucket.index());
  pending.mapped().work.wait();
  copy_(bucket.gradients(), pending.mapped().payload);
  return true;
}

Traffic CastHook::traffic(const ParamGroup& bucket) const {
  return {1, bucket.gradients().numel() * size_of(wire_)};
}

// ---- PowerSgdHook ------------------------------------------------------------------------------

namespace {

// Makes the columns of x [rows, columns] (f32, contiguous) orthonormal: modified Gram-Schmidt,
// twice over each column, in double. A column without a direction of its own becomes 0.
void orthonormalise(const Tensor& x) {
  if (!x.device().is_cpu()) {  // a few columns, which the host works through in double
    const Tensor host = x.to(kCpu);
    orthonormalise(host);
    copy_(x, host);
    return;
  }
  const int64_t rows = x.size(0), columns = x.size(1);
  float* values = x.data_as<float>();
  std::vector<std::vector<double>> basis;
  for (int64_t j = 0; j < columns; ++j) {
    std::vector<double> column(static_cast<size_t>(rows));
    double before = 0;
    for (int64_t i = 0; i < rows; ++i) {
      const double value = values[i * columns + j];
      column[static_cast<size_t>(i)] = value;
      before += value * value;
    }
    for (int pass = 0; pass < 2; ++pass) {
      for (const auto& other : basis) {
        double dot = 0;
        for (size_t i = 0; i < column.size(); ++i) dot += column[i] * other[i];
        for (size_t i = 0; i < column.size(); ++i) column[i] -= dot * other[i];
      }
    }
    double after = 0;
    for (const double value : column) after += value * value;
    // What is left of a column that the others span is rounding of f32 products.
    const bool dependent = !(after > before * 1e-12);
    const double scale = dependent ? 0 : 1 / std::sqrt(after);
    for (double& value : column) value *= scale;
    for (int64_t i = 0; i < rows; ++i) {
      values[i * columns + j] = static_cast<float>(column[static_cast<size_t>(i)]);
    }
    if (!dependent) basis.push_back(std::move(column));
  }
}

// A part of a flat buffer as a matrix.
Tensor matrix_in(const Tensor& flat, int64_t offset, int64_t rows, int64_t columns) {
  return raw::as_strided(flat, {rows, columns}, {columns, 1}, flat.offset() + offset);
}

uint64_t hash_of(std::string_view text) {  // FNV-1a
  uint64_t hash = 0xCBF29CE484222325;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3;
  return hash;
}

}  // namespace

PowerSgdHook::PowerSgdHook(const PowerSgdOptions& options) : options_(options) {
  TS_CHECK(options.rank >= 1, "PowerSgdHook", "the rank must be at least 1; got ", options.rank);
  TS_CHECK(options.start_step >= 0 && options.min_compression >= 0, "PowerSgdHook",
           "start_step and min_compression must not be negative; got ", options.start_step, " and ",
           options.min_compression);
}

std::string PowerSgdHook::name() const {
  return tessera::detail::concatenate("power_sgd of rank ", options_.rank, " from step ",
                                      options_.start_step, ", min compression ",
                                      options_.min_compression, ", seed ", options_.seed);
}

PowerSgdHook::Extent PowerSgdHook::extent(const Tensor& gradient) const {
  if (gradient.dim() < 2 || gradient.numel() == 0 || !gradient.is_contiguous()) return {};
  const int64_t rows = gradient.size(0), columns = gradient.numel() / rows;
  const int64_t rank = std::min({options_.rank, rows, columns});
  const auto compressed = static_cast<double>((rows + columns) * rank);
  if (compressed * options_.min_compression >= static_cast<double>(rows * columns)) return {};
  return {rows, columns, rank};
}

bool PowerSgdHook::warming_up(const ParamGroup& bucket) const {
  const auto state = states_.find(bucket.param(0).name);
  return (state == states_.end() ? 0 : state->second.steps) < options_.start_step;
}

Traffic PowerSgdHook::traffic(const ParamGroup& bucket) const {
  if (warming_up(bucket)) return {1, bucket.bytes()};
  int64_t rest = 0, factors = 0;
  for (size_t slot = 0; slot < bucket.size(); ++slot) {
    const Extent part = extent(bucket.gradient(slot));
    if (part.rank == 0) rest += bucket.gradient(slot).numel();
    factors += (part.rows + part.columns) * part.rank;
  }
  const int64_t element = size_of(kF32);
  return {(rest > 0 ? 1 : 0) + (factors > 0 ? 2 : 0), (rest + factors) * element};
}

void PowerSgdHook::start(const ParamGroup& bucket, double divisor) {
  const NoGradGuard no_grad;
  TS_CHECK_DTYPE(bucket.dtype() == kF32, "PowerSgdHook", "compresses f32 gradients; ", bucket.tag(),
                 " holds ", bucket.dtype());
  Pending pending;
  pending.divisor = divisor;
  const CollectiveOptions options = on_gradient_channel(bucket);
  if (warming_up(bucket)) {
    pending.rest_work = bucket.ranks().all_reduce(bucket.gradients(), ReduceOp::kSum, options);
    pending_[bucket.index()] = std::move(pending);
    return;
  }
  int64_t rest = 0, first = 0, second = 0;
  for (size_t slot = 0; slot < bucket.size(); ++slot) {
    const Extent part = extent(bucket.gradient(slot));
    if (part.rank == 0) rest += bucket.gradient(slot).numel();
    first += part.rows * part.rank;
    second += part.columns * part.rank;
  }
  const Device& device = bucket.gradients().device();
  pending.rest = communication_buffer(rest, kF32, device);
  pending.first = communication_buffer(first, kF32, device);
  pending.second = communication_buffer(second, kF32, device);
  int64_t rest_offset = 0, first_offset = 0;
  for (size_t slot = 0; slot < bucket.size(); ++slot) {
    const Tensor& gradient = bucket.gradient(slot);
    const Extent part = extent(gradient);
    if (part.rank == 0) {
      copy_(
          raw::view(raw::narrow(pending.rest, 0, rest_offset, gradient.numel()), gradient.shape()),
          gradient);
      rest_offset += gradient.numel();
      continue;
    }
    const std::string& name = bucket.param(slot).name;
    State& state = states_[name];
    if (options_.error_feedback && state.error.defined()) add_(gradient, state.error);
    if (!state.q.defined() || !options_.warm_start) {
      state.q =
          randn({part.columns, part.rank}, {kF32, device},
                RandomStream{options_.seed, hash_of(name) + static_cast<uint64_t>(state.steps)});
    }
    copy_(matrix_in(pending.first, first_offset, part.rows, part.rank),
          matmul(raw::view(gradient, {part.rows, part.columns}), state.q));
    first_offset += part.rows * part.rank;
  }
  if (rest > 0) {
    pending.rest_work = bucket.ranks().all_reduce(pending.rest, ReduceOp::kSum, options);
  }
  if (first > 0) {
    pending.factor_work = bucket.ranks().all_reduce(pending.first, ReduceOp::kSum, options);
    pending.stage = Stage::kFirstFactor;
  }
  pending_[bucket.index()] = std::move(pending);
}

bool PowerSgdHook::advance(const ParamGroup& bucket) {
  const NoGradGuard no_grad;
  Pending& pending = pending_.at(bucket.index());
  const Scalar scale(1 / pending.divisor);
  // Calls f(slot, extent, offset of its P, offset of its Q) for every compressed parameter.
  const auto for_each_matrix = [&](auto&& f) {
    int64_t first = 0, second = 0;
    for (size_t slot = 0; slot < bucket.size(); ++slot) {
      const Extent part = extent(bucket.gradient(slot));
      if (part.rank == 0) continue;
      f(slot, part, matrix_in(pending.first, first, part.rows, part.rank),
        matrix_in(pending.second, second, part.columns, part.rank));
      first += part.rows * part.rank;
      second += part.columns * part.rank;
    }
  };
  if (pending.stage == Stage::kFirstFactor) {
    pending.factor_work.wait();
    for_each_matrix([&](size_t slot, const Extent& part, const Tensor& p, const Tensor& q) {
      orthonormalise(p);
      const Tensor m = raw::view(bucket.gradient(slot), {part.rows, part.columns});
      copy_(q, matmul(raw::transpose(m, 0, 1), p));
    });
    pending.factor_work =
        bucket.ranks().all_reduce(pending.second, ReduceOp::kSum, on_gradient_channel(bucket));
    pending.stage = Stage::kSecondFactor;
    return false;
  }
  if (pending.rest_work.valid()) pending.rest_work.wait();
  if (pending.stage == Stage::kPlain && !pending.rest.defined()) {
    mul_(bucket.gradients(), scale);
  }
  if (pending.stage == Stage::kSecondFactor) {
    pending.factor_work.wait();
    const Scalar share(1.0 / bucket.ranks().size());
    for_each_matrix([&](size_t slot, const Extent& part, const Tensor& p, const Tensor& q) {
      const Tensor m = raw::view(bucket.gradient(slot), {part.rows, part.columns});
      State& state = states_[bucket.param(slot).name];
      const Tensor sum = matmul(p, raw::transpose(q, 0, 1));
      // What this rank asked for and its share of the result does not bring.
      if (options_.error_feedback) {
        state.error = raw::view(sub(m, mul(sum, share)), bucket.gradient(slot).shape());
      }
      state.q = clone(q);
      copy_(m, mul(sum, scale));
    });
  }
  if (pending.rest.defined()) {
    int64_t offset = 0;
    for (size_t slot = 0; slot < bucket.size(); ++slot) {
      const Tensor& gradient = bucket.gradient(slot);
      if (extent(gradient).rank != 0) continue;
      const Tensor part = raw::narrow(pending.rest, 0, offset, gradient.numel());
      copy_(gradient, mul(raw::view(part, gradient.shape()), scale));
      offset += gradient.numel();
    }
  }
  for (size_t slot = 0; slot < bucket.size(); ++slot) ++states_[bucket.param(slot).name].steps;
  pending_.erase(bucket.index());
  return true;
}

StateDict PowerSgdHook::state_dict() const {
  StateDict result;
  for (const auto& [name, state] : states_) {
    if (state.error.defined()) result.set(name + ".error", state.error);
    if (state.q.defined()) result.set(name + ".q", state.q);
    result.set(name + ".steps", scalar_tensor(state.steps, kI64));
  }
  return result;
}

void PowerSgdHook::load_state_dict(const StateDict& state) {
  std::map<std::string, State> states;
  for (const auto& [name, tensor] : state) {
    const size_t dot = name.rfind('.');
    const std::string key = name.substr(0, dot);
    const std::string field = dot == std::string::npos ? "" : name.substr(dot + 1);
    if (field == "error") {
      states[key].error = clone(tensor);
    } else if (field == "q") {
      states[key].q = clone(tensor);
    } else if (field == "steps") {
      states[key].steps = tensor.item<int64_t>();
    } else {
      TS_THROW(ValueError, "PowerSgdHook", "'", name,
               "' is no entry of its state; load what state_dict() of one gave");
    }
  }
  states_ = std::move(states);
}

}  // namespace tessera::distributed
