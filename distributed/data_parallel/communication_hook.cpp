#include <tessera/distributed/data_parallel/communication_hook.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/random.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera::distributed {
namespace {

CollectiveOptions on_gradient_channel(const GradientBucket& bucket) {
  return {.channel = Channel::kGradient, .tag = bucket.tag()};
}

Tensor communication_buffer(int64_t numel, DType dtype, const Device& device) {
  const MemoryCategoryGuard category(MemoryCategory::kCommunication);
  return raw::empty({numel}, dtype, device);
}

}  // namespace

// ---- AllReduceHook -----------------------------------------------------------------------------

void AllReduceHook::start(const GradientBucket& bucket, double divisor) {
  // The mean of the ranks is taken inside the collective, which saves a pass over the bucket.
  const bool mean = divisor == bucket.ranks().size();
  Work work = bucket.ranks().all_reduce(bucket.gradients(), mean ? ReduceOp::kMean : ReduceOp::kSum,
                                        on_gradient_channel(bucket));
  pending_[bucket.index()] = {std::move(work), mean ? 1 : divisor};
}

bool AllReduceHook::advance(const GradientBucket& bucket) {
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

void CastHook::start(const GradientBucket& bucket, double divisor) {
  const NoGradGuard no_grad;
  const Tensor& gradients = bucket.gradients();
  if (divisor != 1) mul_(gradients, Scalar(1 / divisor));
  Tensor payload = communication_buffer(gradients.numel(), wire_, gradients.device());
  copy_(payload, gradients);
  Work work = bucket.ranks().all_reduce(payload, ReduceOp::kSum, on_gradient_channel(bucket));
  pending_[bucket.index()] = {std::move(work), std::move(payload)};
}

bool CastHook::advance(const GradientBucket& bucket) {
  const NoGradGuard no_grad;
  const auto pending = pending_.extract(bucket.index());
  pending.mapped().work.wait();
  copy_(bucket.gradients(), pending.mapped().payload);
  return true;
}

Traffic CastHook::traffic(const GradientBucket& bucket) const {
  return {1, bucket.gradients().numel() * size_of(wire_)};
}

// ---- PowerSgdHook ------------------------------------------------------------------------------

namespace {

// Makes the columns of x [rows, columns] (f32, contiguous) orthonormal: modified Gram-Schmidt,
// twice over each column, in double. A column without a direction of its own becomes that of
// spare(), of x's shape, or 0 where it has none either. False where a value is not finite: x is NaN
// then, so that its product shows it.
template <class Spare>
bool orthonormalise(const Tensor& x, const Spare& spare) {
  if (!x.device().is_cpu()) {  // a few columns, which the host works through in double
    const Tensor host = x.to(kCpu);
    const bool finite = orthonormalise(host, spare);
    copy_(x, host);
    return finite;
  }
  const int64_t rows = x.size(0), columns = x.size(1);
  float* values = x.data_as<float>();
  if (!std::all_of(values, values + rows * columns, [](float v) { return std::isfinite(v); })) {
    std::fill_n(values, rows * columns, std::numeric_limits<float>::quiet_NaN());
    return false;
  }
  std::vector<std::vector<double>> basis;
  // Whether the column has a direction; then it is the next of the basis.
  const auto append = [&](const float* from, int64_t j) {
    std::vector<double> column(static_cast<size_t>(rows));
    double before = 0;
    for (int64_t i = 0; i < rows; ++i) {
      const double value = from[i * columns + j];
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
    if (!(after > before * 1e-12)) return false;
    const double scale = 1 / std::sqrt(after);
    for (double& value : column) value *= scale;
    basis.push_back(std::move(column));
    return true;
  };
  Tensor others;
  for (int64_t j = 0; j < columns; ++j) {
    bool appended = append(values, j);
    if (!appended) {
      if (!others.defined()) others = spare();
      appended = others.defined() && append(others.data_as<float>(), j);
    }
    for (int64_t i = 0; i < rows; ++i) {
      values[i * columns + j] =
          appended ? static_cast<float>(basis.back()[static_cast<size_t>(i)]) : 0;
    }
  }
  return true;
}
bool orthonormalise(const Tensor& x) {
  return orthonormalise(x, [] { return Tensor(); });
}

// A part of a flat buffer as a matrix.
Tensor matrix_in(const Tensor& flat, int64_t offset, int64_t rows, int64_t columns) {
  return raw::as_strided(flat, {rows, columns}, {columns, 1}, flat.offset() + offset);
}

// Calls f(slot, part) for each gradient: the parts lie in a flat tensor one behind the other,
// without what is between the gradients in the bucket.
template <class F>
void for_parts_in(const Tensor& flat, const GradientBucket& bucket, const F& f) {
  int64_t offset = flat.offset();
  for (size_t slot = 0; slot < bucket.size(); ++slot) {
    const Tensor& gradient = bucket.gradient(slot);
    f(slot, raw::as_strided(flat, gradient.shape(), gradient.strides(), offset));
    offset += gradient.numel();
  }
}

// Of what fills a batched bucket up, behind its gradients.
Tensor padding_in(const Tensor& flat, const GradientBucket& bucket) {
  return raw::narrow(flat, 0, bucket.numel(), flat.numel() - bucket.numel());
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
  TS_CHECK_DTYPE(options.wire == kF32 || options.wire == kF16 || options.wire == kBF16,
                 "PowerSgdHook", "sends f32, f16 or bf16; got ", options.wire);
  if (options.wire == kF32) {
    plain_ = std::make_unique<AllReduceHook>();
  } else {
    plain_ = std::make_unique<CastHook>(options.wire);
  }
}

std::string PowerSgdHook::name() const {
  return tessera::detail::concatenate(
      options_.batched ? "batched " : "", "power_sgd of rank ", options_.rank, " from step ",
      options_.start_step, ", min compression ", options_.min_compression, ", seed ", options_.seed,
      options_.warm_start ? "" : ", cold starts", ", in ", options_.wire);
}

// Nothing where the parameter travels plainly.
std::optional<PowerSgdHook::Matrix> PowerSgdHook::matrix(const GradientBucket& bucket,
                                                         size_t slot) const {
  const Tensor& gradient = bucket.gradient(slot);
  if (gradient.dim() < 2 || gradient.numel() == 0 || !gradient.is_contiguous()) return {};
  const int64_t rows = gradient.size(0), columns = gradient.numel() / rows;
  const int64_t rank = std::min({options_.rank, rows, columns});
  const auto compressed = static_cast<double>((rows + columns) * rank);
  if (compressed * options_.min_compression >= static_cast<double>(rows * columns)) return {};
  return Matrix{slot, rows, columns, rank};
}

std::vector<PowerSgdHook::Matrix> PowerSgdHook::matrices(const GradientBucket& bucket) const {
  const int64_t numel = bucket.numel();
  if (options_.batched) {
    auto side = static_cast<int64_t>(std::sqrt(static_cast<double>(numel)));
    while (side * side < numel) ++side;
    if (side == 0) return {};
    return {Matrix{0, side, side, std::min(options_.rank, side)}};
  }
  std::vector<Matrix> result;
  for (size_t slot = 0; slot < bucket.size(); ++slot) {
    if (const auto part = matrix(bucket, slot)) result.push_back(*part);
  }
  return result;
}

int64_t PowerSgdHook::uncompressed(const GradientBucket& bucket) const {
  if (options_.batched) return 0;
  int64_t result = bucket.numel();
  for (const Matrix& part : matrices(bucket)) result -= part.rows * part.columns;
  return result;
}

bool PowerSgdHook::warming_up(const GradientBucket& bucket) const {
  const auto state = states_.find(bucket.param(0).name);
  return (state == states_.end() ? 0 : state->second.steps) < options_.start_step;
}

Traffic PowerSgdHook::traffic(const GradientBucket& bucket) const {
  if (warming_up(bucket)) return plain_->traffic(bucket);
  const int64_t rest = uncompressed(bucket);
  int64_t factors = 0;
  for (const Matrix& part : matrices(bucket)) factors += (part.rows + part.columns) * part.rank;
  return {(rest > 0 ? 1 : 0) + (factors > 0 ? 2 : 0), (rest + factors) * size_of(options_.wire)};
}

// With orthonormal columns, so that 16 bits hold what it is multiplied with. On the CPU.
Tensor PowerSgdHook::random_factor(const std::string& name, const Matrix& part,
                                   int64_t step) const {
  const RandomStream stream{options_.seed, hash_of(name) + static_cast<uint64_t>(step)};
  const Tensor factor = randn({part.columns, part.rank}, {kF32}, stream);
  orthonormalise(factor);
  return factor;
}

PowerSgdHook::Sent PowerSgdHook::send(const GradientBucket& bucket, const Tensor& values) const {
  Sent sent{{}, values, values};
  if (options_.wire != kF32) {
    sent.payload = communication_buffer(values.numel(), options_.wire, values.device());
    copy_(sent.payload, values);
  }
  sent.work = bucket.ranks().all_reduce(sent.payload, ReduceOp::kSum, on_gradient_channel(bucket));
  return sent;
}

// To the gradients, or where there is a square to what it has of them.
void PowerSgdHook::add_errors(const GradientBucket& bucket, const Tensor& square) {
  if (!options_.error_feedback) return;
  const auto add_error = [&](size_t slot, const Tensor& part) {
    const Tensor& error = states_[bucket.param(slot).name].error;
    if (error.defined()) add_(part, error);
  };
  if (square.defined()) return for_parts_in(square, bucket, add_error);
  for (size_t slot = 0; slot < bucket.size(); ++slot) add_error(slot, bucket.gradient(slot));
}

void PowerSgdHook::start(const GradientBucket& bucket, double divisor) {
  const NoGradGuard no_grad;
  TS_CHECK_DTYPE(bucket.dtype() == kF32, "PowerSgdHook", "compresses f32 gradients; ", bucket.tag(),
                 " holds ", bucket.dtype());
  Pending& pending = pending_[bucket.index()] = Pending();
  pending.divisor = divisor;
  if (warming_up(bucket)) {
    plain_->start(bucket, divisor);
    return;
  }
  const std::vector<Matrix> parts = matrices(bucket);
  const Device& device = bucket.gradients().device();
  int64_t first = 0, second = 0;
  for (const Matrix& part : parts) {
    first += part.rows * part.rank;
    second += part.columns * part.rank;
  }
  pending.first = communication_buffer(first, kF32, device);
  pending.second = communication_buffer(second, kF32, device);
  if (options_.batched && !parts.empty()) {
    pending.square = communication_buffer(parts[0].rows * parts[0].columns, kF32, device);
    for_parts_in(pending.square, bucket,
                 [&](size_t slot, const Tensor& part) { copy_(part, bucket.gradient(slot)); });
    const Tensor padding = padding_in(pending.square, bucket);
    const Tensor& error = states_[bucket.param(0).name].padding;
    if (options_.error_feedback && error.defined() && error.numel() == padding.numel()) {
      copy_(padding, error);
    } else {
      zero_(padding);
    }
  }
  add_errors(bucket, pending.square);
  const double share = 1.0 / bucket.ranks().size();
  int64_t offset = 0;
  for (const Matrix& part : parts) {
    const std::string& name = bucket.param(part.slot).name;
    State& state = states_[name];
    const bool fits = state.q.defined() && state.q.shape() == Shape{part.columns, part.rank};
    if (!fits || !options_.warm_start) {
      state.q = random_factor(name, part, state.steps).to(device);
    }
    const Tensor& flat = options_.batched ? pending.square : bucket.gradient(part.slot);
    copy_(matrix_in(pending.first, offset, part.rows, part.rank),
          mul(matmul(raw::view(flat, {part.rows, part.columns}), state.q), Scalar(share)));
    offset += part.rows * part.rank;
  }
  pending.stage = Stage::kRest;
  if (const int64_t numel = uncompressed(bucket); numel > 0) {
    const Tensor rest = communication_buffer(numel, kF32, device);
    int64_t at = 0;
    for (size_t slot = 0; slot < bucket.size(); ++slot) {
      if (matrix(bucket, slot)) continue;
      const Tensor& gradient = bucket.gradient(slot);
      copy_(raw::view(raw::narrow(rest, 0, at, gradient.numel()), gradient.shape()),
            mul(gradient, Scalar(1 / divisor)));
      at += gradient.numel();
    }
    pending.rest = send(bucket, rest);
  }
  if (!parts.empty()) {
    pending.factor = send(bucket, pending.first);
    pending.stage = Stage::kFirstFactor;
  }
}

bool PowerSgdHook::advance(const GradientBucket& bucket) {
  const NoGradGuard no_grad;
  Pending& pending = pending_.at(bucket.index());
  const auto receive = [](const Sent& sent) {
    sent.work.wait();
    if (sent.payload.dtype() != kF32) copy_(sent.values, sent.payload);
  };
  // Calls f(part, its P, its Q) for all that is compressed.
  const auto for_each_matrix = [&](auto&& f) {
    int64_t first = 0, second = 0;
    for (const Matrix& part : matrices(bucket)) {
      f(part, matrix_in(pending.first, first, part.rows, part.rank),
        matrix_in(pending.second, second, part.columns, part.rank));
      first += part.rows * part.rank;
      second += part.columns * part.rank;
    }
  };
  if (pending.stage == Stage::kFirstFactor) {
    receive(pending.factor);
    const Scalar share(1.0 / bucket.ranks().size());
    for_each_matrix([&](const Matrix& part, const Tensor& p, const Tensor& q) {
      orthonormalise(p);
      const Tensor& flat = options_.batched ? pending.square : bucket.gradient(part.slot);
      const Tensor m = raw::view(flat, {part.rows, part.columns});
      copy_(q, mul(matmul(raw::transpose(m, 0, 1), p), share));
    });
    pending.factor = send(bucket, pending.second);
    pending.stage = Stage::kSecondFactor;
    return false;
  }
  if (pending.stage == Stage::kPlain && !plain_->advance(bucket)) return false;
  if (pending.rest.work.valid()) {
    receive(pending.rest);
    int64_t at = 0;
    for (size_t slot = 0; slot < bucket.size(); ++slot) {
      if (matrix(bucket, slot)) continue;
      const Tensor& gradient = bucket.gradient(slot);
      copy_(gradient,
            raw::view(raw::narrow(pending.rest.values, 0, at, gradient.numel()), gradient.shape()));
      at += gradient.numel();
    }
  }
  if (pending.stage == Stage::kSecondFactor) {
    receive(pending.factor);
    for_each_matrix([&](const Matrix& part, const Tensor& p, const Tensor& q) {
      finish(bucket, part, pending, p, q);
    });
  }
  for (size_t slot = 0; slot < bucket.size(); ++slot) ++states_[bucket.param(slot).name].steps;
  pending_.erase(bucket.index());
  return true;
}

// From the ranks' P and mean Q: the gradient, this rank's error, and what the next reduction
// begins with.
void PowerSgdHook::finish(const GradientBucket& bucket, const Matrix& part, const Pending& pending,
                          const Tensor& p, const Tensor& q) {
  const std::string& name = bucket.param(part.slot).name;
  State& state = states_[name];
  const Tensor mean = matmul(p, raw::transpose(q, 0, 1));
  const Tensor next = clone(q);
  // A column that died (the gradient's rank was lower) would stay dead.
  const bool finite =
      orthonormalise(next, [&] { return random_factor(name, part, state.steps + 1); });
  const Tensor flat_mean = raw::view(mean, {mean.numel()});
  if (finite) {
    state.q = next;
    // What this rank asked for and its share of the result does not bring.
    if (options_.batched) {
      const Tensor error = sub(pending.square, flat_mean);
      for_parts_in(error, bucket, [&](size_t slot, const Tensor& part) {
        State& own = states_[bucket.param(slot).name];
        if (options_.error_feedback) own.error = part;
        if (slot > 0) own.q = own.padding = Tensor();  // of a bucket that it was the first of
      });
      if (options_.error_feedback) state.padding = padding_in(error, bucket);
    } else if (options_.error_feedback) {
      const Tensor& gradient = bucket.gradient(part.slot);
      state.error = sub(gradient, raw::view(mean, gradient.shape()));
    }
  }
  const double scale = bucket.ranks().size() / pending.divisor;
  if (scale != 1) mul_(mean, Scalar(scale));
  if (options_.batched) {
    for_parts_in(flat_mean, bucket, [&](size_t slot, const Tensor& of_gradient) {
      copy_(bucket.gradient(slot), of_gradient);
    });
  } else {
    const Tensor& gradient = bucket.gradient(part.slot);
    copy_(gradient, raw::view(mean, gradient.shape()));
  }
}

StateDict PowerSgdHook::state_dict() const {
  StateDict result;
  for (const auto& [name, state] : states_) {
    if (state.error.defined()) result.set(name + ".error", state.error);
    if (state.q.defined()) result.set(name + ".q", state.q);
    if (state.padding.defined()) result.set(name + ".padding", state.padding);
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
    } else if (field == "padding") {
      states[key].padding = clone(tensor);
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
