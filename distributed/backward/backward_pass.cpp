#include <tessera/distributed/backward/backward_pass.h>

#include <algorithm>
#include <utility>

#include <nlohmann/json.hpp>

#include <tessera/autograd/leaf_hooks.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/optim/multi_tensor.h>
#include <tessera/core/memory/meta_memory.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/distributed/backward/mutant.h>
#include <tessera/distributed/transport/collectives.h>

namespace tessera::distributed {
namespace {

std::string list_of(const std::vector<std::string>& names) {
  constexpr size_t kShown = 10;
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kShown); ++i) {
    text += (i == 0 ? "'" : ", '") + names[i] + "'";
  }
  if (names.size() > kShown) text += " and " + std::to_string(names.size() - kShown) + " more";
  return text;
}

}  // namespace

BackwardPass::BackwardPass(const NamedTensors& parameters, Group& ranks, GradientAverage average,
                           GradientSchedule& schedule)
    : ranks_(&ranks), average_(average), schedule_(&schedule) {
  set_parameters(parameters);
}

void BackwardPass::set_parameters(const NamedTensors& parameters) {
  const std::vector<ManagedParam> before = std::exchange(params_, {});
  for (const auto& [name, tensor] : parameters) {
    const auto known = std::ranges::find_if(
        before, [&](const ManagedParam& param) { return param.tensor.is(tensor); });
    known != before.end() ? params_.push_back(*known) : append(name, tensor);
  }
  for (HookHandle& handle : clearing_handles_) handle.remove();
  clearing_handles_.clear();
  for (HookHandle& handle : handles_) handle.remove();
  handles_.clear();
  hook_leaves(0);
}

void BackwardPass::append(const std::string& name, const Tensor& tensor) {
  TS_CHECK_DEVICE(!tensor.is_meta() || MetaMemoryGuard::holds(), "BackwardPass", "'", name, "' is ",
                  tensor, "; give the model memory before it is distributed");
  params_.push_back({.name = name, .tensor = tensor});
}

void BackwardPass::add_parameters(const NamedTensors& parameters) {
  const size_t first = params_.size();
  for (const auto& [name, tensor] : parameters) append(name, tensor);
  hook_leaves(first);
}

void BackwardPass::watch(const NamedTensors& parameters) {
  for (const auto& [name, tensor] : parameters) {
    watch_handles_.push_back(
        register_post_accumulate_hook(tensor, [this, owner = owner_](const Tensor&) {
          const auto alive = owner.lock();
          const uint64_t pass = current_backward();
          if (alive && pass != 0 && pass != pass_) begin(Begin::kAtGradient);
        }));
  }
}

BackwardPass::~BackwardPass() {
  for (HookHandle& handle : handles_) handle.remove();
  for (HookHandle& handle : watch_handles_) handle.remove();
  for (HookHandle& handle : clearing_handles_) handle.remove();
}

void BackwardPass::install(std::weak_ptr<void> owner) {
  owner_ = std::move(owner);
  hook_leaves(0);
}

void BackwardPass::hook_leaves(size_t first) {
  if (owner_.expired()) return;
  for (size_t i = first; i < params_.size(); ++i) {
    handles_.push_back(
        register_post_accumulate_hook(params_[i].tensor, [this, owner = owner_, i](const Tensor&) {
          if (const auto alive = owner.lock()) gradient_arrived(i);
        }));
  }
}

// see [Note: clearing]
void BackwardPass::hook_clearing() {
  if (!clearing_handles_.empty() || owner_.expired()) return;
  for (const ManagedParam& param : params_) {
    if (!param.shard.defined()) continue;
    clearing_handles_.push_back(
        register_zero_grad_hook(param.shard, [whole = param.tensor] { whole.set_grad(Tensor()); }));
  }
}

// ---- Begin and end -----------------------------------------------------------------------------

double BackwardPass::seconds() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began_).count();
}

void BackwardPass::before_backward() {
  if (const uint64_t pass = current_backward(); pass != 0 && pass != pass_) begin(Begin::kAtOutput);
}

void BackwardPass::gradient_arrived(size_t param) {
  const uint64_t pass = current_backward();
  if (pass == 0) return;
  if (pass != pass_) begin(Begin::kAtGradient);
  ++record_.gradients;
  record_.last_gradient = seconds();
  schedule_->arrived(param);
  if (!synchronises_) return;
  TS_CHECK_AS(AutogradError, !params_[param].ready, "backward", "the gradient of '",
              params_[param].name,
              "' came after it was given to its bucket: a backward ran inside this backward; "
              "recompute activations with checkpoint(), whose graph is known from the start");
  make_ready(param, true);
  schedule_->launch_ready();
}

void BackwardPass::begin(Begin how) {
  const bool shadow = how == Begin::kShadow, alone = how == Begin::kAlone;
  if (!shadow) {
    if (!schedule_->continues_sums()) go_on(how == Begin::kAtGradient);
    if (!sums_go_on()) check_cleared();
  }
  if (!shadow && !alone) {
    pass_ = current_backward();
    queue_backward_callback([this, owner = owner_, number = pass_] {
      if (const auto alive = owner.lock(); alive && pass_ == number) end();
    });
  }
  schedule_->prepare();
  shadow_ = shadow;
  synchronises_ = plan.sync_gradients || shadow || TS_MUTANT(kReduceAlways);
  began_ = std::chrono::steady_clock::now();
  record_ = {};
  record_.backwards_before = backwards_in_window_;
  in_pass_ = true;
  if (!synchronises_) return;
  if (sums_go_on()) continue_sums();
  if (average_ == GradientAverage::kWeight && divides() && !std::exchange(weight_begun_, false)) {
    begin_weight();
  }
  for (ManagedParam& param : params_) param.ready = false;
  schedule_->begin();
  for (size_t i = 0; i < params_.size(); ++i) {
    if (shadow || alone || !backward_reaches(params_[i].tensor)) make_ready(i, false);
  }
  schedule_->launch_ready();
}

void BackwardPass::make_ready(size_t param, bool arrived) {
  schedule_->ready(param, arrived);
  params_[param].ready = true;
}

// Leaves that backward reached and that no gradient came to, too.
void BackwardPass::reduce_rest() {
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!params_[i].ready) make_ready(i, false);
  }
  schedule_->finish();
}

void BackwardPass::end() {
  in_pass_ = false;
  if (synchronises_) {
    reduce_rest();
    ++reductions_;
  }
  if (!synchronises_) hook_clearing();
  const bool whole_sum = synchronises_ && divides();
  backwards_in_window_ = whole_sum ? 0 : backwards_in_window_ + 1;
  schedule_->end();
  if (whole_sum) run_hooks_of_parts();
}

bool BackwardPass::has_hooks_of_parts() const {
  return std::ranges::any_of(params_, [](const ManagedParam& param) {
    return param.shard.defined() && has_leaf_hooks(param.shard);
  });
}

// Last, so that the other ranks wait for nothing where one throws.
void BackwardPass::run_hooks_of_parts() {
  const UsedParameters used = schedule_->used();
  for (size_t i = 0; i < params_.size(); ++i) {
    ManagedParam& param = params_[i];
    if (!param.shard.defined() || used.any[i] == 0) continue;
    if (run_leaf_hooks(param.shard)) param.set_reduced();
  }
}

void BackwardPass::shadow_backward() {
  begin(Begin::kShadow);
  end();
  shadow_ = false;
}

void BackwardPass::reduce_alone() {
  begin(Begin::kAlone);
  end();
}

void BackwardPass::drop_sums() {
  for (ManagedParam& param : params_) {
    param.reduced = param.undivided = false;
    for (const Tensor& holder : {param.tensor, param.shard}) {
      if (holder.defined()) holder.set_grad(Tensor());
    }
  }
  backwards_in_window_ = 0;
}

void BackwardPass::fail_backward(const std::string& what) {
  failure_ = what;
  if (schedule_->tells_failures()) {
    in_pass_ = shadow_ = weight_begun_ = false;
    std::exchange(weight_work_, {}).forget();
    schedule_->fail(what);
    backwards_in_window_ = 0;
    return;
  }
  const bool begun = std::exchange(in_pass_, false);
  if (begun ? !synchronises_ : !plan.sync_gradients) return;
  try {
    if (!begun) begin(Begin::kShadow);
    shadow_ = failed_ = true;
    reduce_rest();
  } catch (...) {  // what this rank has told the others, or no room for that either
  }
  schedule_->end();
  in_pass_ = shadow_ = failed_ = false;
  backwards_in_window_ = 0;
}

// ---- Repeated by a graph -----------------------------------------------------------------------

BackwardPass::HostState BackwardPass::host_state() const {
  HostState state{.reductions = reductions_,
                  .backwards_in_window = backwards_in_window_,
                  .window_weight = window_weight_,
                  .divisor = divisor_,
                  .parameters = {},
                  .used = schedule_->used()};
  for (const ManagedParam& param : params_) {
    state.parameters.push_back(
        {param.reduced, param.undivided, param.gradient, param.parameter_version});
  }
  return state;
}

void BackwardPass::set_host_state(const HostState& state) {
  reductions_ = state.reductions;
  backwards_in_window_ = state.backwards_in_window;
  window_weight_ = state.window_weight;
  divisor_ = state.divisor;
  for (size_t i = 0; i < params_.size(); ++i) {
    const HostState::OfParameter& was = state.parameters.at(i);
    params_[i].reduced = was.reduced;
    params_[i].undivided = was.undivided;
    params_[i].gradient = was.gradient;
    params_[i].parameter_version = was.parameter_version;
  }
}

bool BackwardPass::agree_on_weight() {
  if (average_ != GradientAverage::kWeight || !plan.sync_gradients || !divides()) return false;
  begin_weight();
  divisor();
  return weight_begun_ = true;
}

void BackwardPass::repeat(const HostState& captured, int64_t reductions) {
  const int64_t before = reductions_;
  weight_begun_ = false;
  if (reductions > 0) schedule_->repeat(captured.used);
  set_host_state(captured);
  reductions_ = before + reductions;
  for (ManagedParam& param : params_) {
    if (param.reduced) param.set_reduced();
  }
}

void BackwardPass::abandon_backward() {
  if (std::exchange(in_pass_, false)) schedule_->end();
}

void BackwardPass::note_launch(int bucket) {
  record_.launches.push_back({bucket, record_.gradients, seconds()});
}

// ---- What the sum is divided by ----------------------------------------------------------------

// Travels while the first gradients are computed.
void BackwardPass::begin_weight() {
  const PhaseScope phase("backward");
  const FirstStepTimeout timeout(reductions_);
  weight_ = raw::zeros({kWindowWeightBytes / size_of(kF64)}, kF64);
  if (!shadow_) {
    double* const sums = weight_.data_as<double>();
    sums[0] = plan.weight;
    // 20 bits, so that the sum of squares is exact for 8192 ranks.
    const int64_t place = (plan.epoch * 1'000'003 + plan.position) & 0xFFFFF;
    if (plan.position >= 0) {
      sums[1] = 1;
      sums[2] = static_cast<double>(place);
      sums[3] = static_cast<double>(place * place);
    }
  }
  const std::string tag = "window_weight" + schedule_->changes();
  weight_work_ =
      ranks_->all_reduce(weight_, ReduceOp::kSum, {.channel = Channel::kControl, .tag = tag});
}

// Equal numbers have no variance. What is found here, all ranks find.
void BackwardPass::check_batches() {
  const double* const sums = weight_.data_as<double>();
  if (sums[1] * sums[3] == sums[2] * sums[2]) return;
  std::string places;
  using Json = nlohmann::json;
  const Json own = shadow_ || plan.position < 0 ? Json() : Json({plan.epoch, plan.position});
  for (const Json& place : all_gather_objects(*ranks_, own, {.channel = Channel::kControl})) {
    places += (places.empty() ? "" : ", ") +
              (place.is_null() ? "none" : place[0].dump() + ":" + place[1].dump());
  }
  TS_THROW(DistributedError, "backward",
           "the ranks train on different batches of their loader, by rank (epoch:position after "
           "the batch) ",
           places,
           "; a rank has left one out or taken one more: let every rank open its window and call "
           "backward for every batch, with weight 0 where one is not to count");
}

double BackwardPass::divisor() {
  const int ranks = contributors() + (TS_MUTANT(kWrongDivide) ? 1 : 0);
  switch (average_) {
    case GradientAverage::kRanks:
      return ranks;
    case GradientAverage::kWindow:
      return static_cast<double>(ranks) * static_cast<double>(plan.micro_index + 1);
    case GradientAverage::kWeight:
      // A group of one rank has no work to wait for.
      if (weight_work_.valid()) {
        std::exchange(weight_work_, {}).wait();
        check_batches();
      }
      window_weight_ = weight_.data_as<double>()[0];
      // Nothing weighs anything: the sum is zeros.
      return window_weight_ == 0 ? 1 : window_weight_;
    case GradientAverage::kNone:
      break;
  }
  return 1;
}

// ---- What is there already ---------------------------------------------------------------------

void BackwardPass::resume_sum() {
  const NoGradGuard no_grad;
  for (ManagedParam& param : params_) {
    // A gradient that was stepped with or replaced is no part of the sum any more.
    const bool resumes = param.holds_reduced();
    param.reduced = false;
    if (!resumes) continue;
    const Tensor grad = raw::alias(param.updated().grad());
    if (ranks_->rank() != 0 && !schedule_->continues_sums()) {
      zero_(grad);
    } else if (divisor_ != 1) {
      mul_(grad, Scalar(divisor_));
    }
  }
}

void BackwardPass::resume_undivided() {
  if (schedule_->continues_sums()) return;
  const NoGradGuard no_grad;
  for (ManagedParam& param : params_) {
    if (!std::exchange(param.undivided, false)) continue;
    param.reduced = false;
    const Tensor grad = param.updated().grad();
    if (grad.defined() && ranks_->rank() != 0) zero_(raw::alias(grad));
  }
}

// see [Note: sums of a step]
void BackwardPass::go_on(bool gradients_came) {
  const auto open = std::ranges::find_if(params_, &ManagedParam::undivided);
  if (open == params_.end()) return;
  if (!gradients_came) return resume_undivided();
  for (ManagedParam& param : params_) param.undivided = param.reduced = false;
  TS_THROW(
      AutogradError, "backward", "it added to the gradient of '", open->name,
      "', a sum over the ranks that goes on, before it came to an output of the model; call "
      "zero_grad(), and resume_undivided() before a backward of a loss that does not come from "
      "the model's outputs");
}

// What is there and was not cleared stays as it is, in addition to what comes: it is multiplied by
// what the sum will be divided by.
void BackwardPass::continue_sums() {
  const double before = divisor_ != 1 ? divisor_ : divisor();
  for (ManagedParam& param : params_) {
    const Tensor grad = param.updated().grad();
    if (!grad.defined()) {
      param.undivided = false;
    } else if (!std::exchange(param.undivided, true) && before != 1) {
      const NoGradGuard no_grad;
      mul_(raw::alias(grad), Scalar(before));
    }
    param.reduced = false;
  }
}

void BackwardPass::keep_gradients() {
  TensorList gradients;
  for (ManagedParam& param : params_) {
    param.reduced = false;
    if (Tensor gradient = param.updated().grad(); gradient.defined()) {
      gradients.push_back(std::move(gradient));
    }
  }
  if (gradients.empty()) return;
  const PhaseScope phase("backward");
  if (average_ == GradientAverage::kWeight) {
    begin_weight();
    weight_begun_ = true;
  }
  // Where ranks hold parts, what lies there is no contribution of each.
  const double share = divisor() / (schedule_->continues_sums() ? 1 : contributors());
  if (share != 1) kernels::multi_tensor_scale(gradients, &share);
}

void BackwardPass::accept_written() {
  for (ManagedParam& param : params_) {
    const Tensor gradient = param.updated().grad();
    if (param.reduced && gradient.defined()) param.gradient.note(gradient);
  }
}

void BackwardPass::check_cleared() {
  std::vector<std::string> stale;
  for (const ManagedParam& param : params_) {
    if (param.holds_reduced()) stale.push_back(param.name);
  }
  TS_CHECK_AS(AutogradError, stale.empty(), "backward",
              "it would add to gradients that were reduced before and were not used since: ",
              list_of(stale),
              "; call optimizer.step() and zero_grad() between two backwards that synchronise, or "
              "put all but the last one under no_sync()");
}

}  // namespace tessera::distributed
