#include <tessera/distributed/shard/bucket_schedule.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include <nlohmann/json.hpp>

#include <tessera/autograd/ops.h>
#include <tessera/core/error.h>
#include <tessera/core/factory.h>
#include <tessera/core/kernels/optim/multi_tensor.h>
#include <tessera/distributed/transport/collectives.h>

namespace tessera::distributed {
namespace {

int64_t now_in_nanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

std::string list_of(const std::vector<std::string>& names) {
  constexpr size_t kShown = 10;
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kShown); ++i) {
    text += (i == 0 ? "'" : ", '") + names[i] + "'";
  }
  if (names.size() > kShown) text += " and " + std::to_string(names.size() - kShown) + " more";
  return text;
}

// Ranks come to their first reduction at very different times: data is opened, caches are filled.
class FirstStepTimeout {
 public:
  explicit FirstStepTimeout(int64_t reductions) {
    if (reductions == 0) scope_.emplace(&Timeouts::first_step);
  }

 private:
  std::optional<TimeoutScope> scope_;
};

std::optional<uint64_t> fingerprint_of(Group& ranks) {
  return ranks.size() > 1 ? ranks.backend().fingerprint() : std::nullopt;
}

// Whether `.grad` is what the last reduction left there, and no step was made with it.
bool holds_reduced(const ManagedParam& param) {
  if (!param.reduced) return false;
  const Tensor grad = param.tensor.grad();
  return grad.defined() && grad.version() == param.gradient_version &&
         param.tensor.version() == param.parameter_version;
}

}  // namespace

BucketSchedule::BucketSchedule(const NamedTensors& parameters, Group& ranks,
                               const EngineOptions& options)
    : ranks_(&ranks), options_(options), hook_(std::make_shared<AllReduceHook>()) {
  for (const auto& [name, tensor] : parameters) {
    if (!tensor.requires_grad()) continue;
    TS_CHECK_DEVICE(!tensor.is_meta(), "BucketSchedule", "'", name, "' is ", tensor,
                    "; give the model memory before it is distributed");
    params_.push_back({.name = name, .tensor = tensor});
  }
  std::vector<size_t> order(params_.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = order.size() - 1 - i;
  make_groups(order);
  learning_order_ = options.rebuild_buckets;
}

BucketSchedule::~BucketSchedule() {
  for (HookHandle& handle : handles_) handle.remove();
  for (const auto& group : groups_) group->remove_homes();
}

void BucketSchedule::install() {
  for (size_t i = 0; i < params_.size(); ++i) {
    handles_.push_back(register_post_accumulate_hook(params_[i].tensor,
                                                     [self = weak_from_this(), i](const Tensor&) {
                                                       if (const auto engine = self.lock())
                                                         engine->gradient_arrived(i);
                                                     }));
  }
}

// ---- Buckets -----------------------------------------------------------------------------------

void BucketSchedule::make_groups(const std::vector<size_t>& order) {
  std::vector<BucketItem> items;
  for (const size_t i : order) {
    const Tensor& tensor = params_[i].tensor;
    const DType dtype = GradientBucket::gradient_dtype_of(tensor, options_.gradient_dtype);
    items.push_back({tensor.numel() * size_of(dtype), tensor.dtype(), tensor.device()});
  }
  const int64_t caps[] = {options_.first_bucket_bytes, options_.bucket_bytes};
  const bool any_gradient = std::ranges::any_of(
      params_, [](const ManagedParam& param) { return param.tensor.grad().defined(); });
  std::vector<std::unique_ptr<GradientBucket>> old = std::move(groups_);
  groups_.clear();
  const std::vector<Place> old_places = std::move(places_);
  places_.assign(params_.size(), {});
  for (const auto& group : old) group->remove_homes();
  // Between zero_grad and the next backward nobody looks at the old buffers: they go before the new
  // ones come.
  if (!any_gradient) old.clear();
  for (std::vector<size_t>& bucket : assign_buckets(items, caps)) {
    for (size_t& member : bucket) member = order[member];
    auto group = std::make_unique<GradientBucket>(
        static_cast<int>(groups_.size()), std::move(bucket), params_, options_.mode, *ranks_,
        options_.gradient_as_bucket_view, options_.gradient_dtype);
    for (size_t slot = 0; slot < group->size(); ++slot) {
      const size_t member = group->members()[slot];
      places_[member] = {group.get(), slot};
      if (!old.empty()) {
        const Place& from = old_places[member];
        const bool untouched = holds_reduced(params_[member]);
        group->adopt(slot, from.group->gradient(from.slot));
        // It lies elsewhere and is still what was reduced.
        if (untouched) params_[member].gradient_version = params_[member].tensor.grad().version();
      }
    }
    group->install_homes();
    groups_.push_back(std::move(group));
  }
}

void BucketSchedule::rebuild_if_due() {
  if (next_order_.empty()) return;
  const std::vector<size_t> order = std::move(next_order_);
  next_order_.clear();
  make_groups(order);
  ++rebuilds_;
}

// Rank 0's order is everybody's.
void BucketSchedule::agree_on_order() {
  const PhaseScope phase("backward");
  const FirstStepTimeout timeout(0);
  learning_order_ = false;
  std::vector<size_t> order = std::move(arrival_order_);
  arrival_order_.clear();
  std::vector<bool> known(params_.size());
  for (const size_t i : order) known[i] = true;
  for (size_t i = params_.size(); i-- > 0;) {
    if (!known[i]) order.push_back(i);
  }
  const Tensor shared = raw::empty({static_cast<int64_t>(order.size())}, kI64);
  std::ranges::copy(order, shared.data_as<int64_t>());
  ranks_->broadcast(shared, 0, {.channel = Channel::kControl, .tag = "bucket_order"}).wait();
  const int64_t* values = shared.data_as<int64_t>();
  if (rank_context().mutation == Mutation::kOwnBucketOrder) [[unlikely]] {
    next_order_ = std::move(order);
    return;
  }
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<size_t>(values[i]);
  next_order_ = std::move(order);
}

// ---- One backward ------------------------------------------------------------------------------

double BucketSchedule::seconds() const {
  return static_cast<double>(now_in_nanoseconds() - began_) * 1e-9;
}

void BucketSchedule::before_forward() { rebuild_if_due(); }

void BucketSchedule::before_backward() {
  if (const uint64_t pass = current_backward(); pass != 0 && pass != pass_) begin_pass(false);
}

void BucketSchedule::gradient_arrived(size_t param) {
  const uint64_t pass = current_backward();
  if (pass == 0) return;
  if (pass != pass_) begin_pass(false);
  ++record_.gradients;
  record_.last_gradient = seconds();
  if (learning_order_ && synchronises_) arrival_order_.push_back(param);
  if (!synchronises_) return;
  TS_CHECK_AS(AutogradError, !params_[param].ready, "replicate", "the gradient of '",
              params_[param].name,
              "' came after it was given to its bucket: a backward ran inside this backward; "
              "recompute activations with checkpoint(), whose graph is known from the start");
  mark_ready(param);
  launch_complete();
}

void BucketSchedule::begin_pass(bool shadow) {
  if (!shadow) {
    check_cleared();
    pass_ = current_backward();
    queue_backward_callback([self = weak_from_this(), pass = pass_] {
      if (const auto engine = self.lock(); engine && engine->pass_ == pass) engine->end_pass();
    });
  }
  rebuild_if_due();
  shadow_ = shadow;
  synchronises_ = plan.sync_gradients || shadow;
  if (rank_context().mutation == Mutation::kReduceAlways) [[unlikely]]
    synchronises_ = true;
  began_ = now_in_nanoseconds();
  record_ = {};
  record_.backwards_before = backwards_in_window_;
  next_launch_ = 0;
  arrival_order_.clear();  // of a pass that failed
  in_pass_ = true;
  if (!synchronises_) return;
  if (options_.average == GradientAverage::kWeight && !std::exchange(weight_begun_, false)) {
    begin_weight();
  }
  for (ManagedParam& param : params_) param.ready = false;
  for (const auto& group : groups_) group->begin_backward();
  for (size_t i = 0; i < params_.size(); ++i) {
    if (shadow || !backward_reaches(params_[i].tensor)) mark_ready(i);
  }
  launch_complete();
}

void BucketSchedule::mark_ready(size_t param) {
  const Place& place = places_[param];
  if (shadow_) {
    place.group->collect_zeros(place.slot);
  } else {
    place.group->collect(place.slot);
  }
}

// see [Note: launch order]
void BucketSchedule::launch_complete() {
  if (rank_context().mutation == Mutation::kLaunchOutOfOrder) [[unlikely]] {
    for (const auto& group : groups_) {
      if (group->complete() && !group->launched()) launch(*group);
    }
    return;
  }
  while (next_launch_ < groups_.size() && groups_[next_launch_]->complete()) {
    launch(*groups_[next_launch_++]);
  }
}

void BucketSchedule::launch(GradientBucket& group) {
  const PhaseScope phase("backward");
  const FirstStepTimeout timeout(reductions_);
  record_.launches.push_back({group.index(), record_.gradients, seconds()});
  group.set_launched();
  hook_->start(group, divisor_ = divisor());
}

// Travels while the first gradients are computed.
void BucketSchedule::begin_weight() {
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
  weight_work_ = ranks_->all_reduce(weight_, ReduceOp::kSum,
                                    {.channel = Channel::kControl, .tag = "window_weight"});
}

// Equal numbers have no variance. What is found here, all ranks find.
void BucketSchedule::check_batches() {
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

double BucketSchedule::divisor() {
  int ranks = contributors();
  if (rank_context().mutation == Mutation::kWrongDivide) [[unlikely]]
    ++ranks;
  switch (options_.average) {
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

void BucketSchedule::resume_sum() {
  const NoGradGuard no_grad;
  for (ManagedParam& param : params_) {
    // A gradient that was stepped with or replaced is no part of the sum any more.
    const bool resumes = holds_reduced(param);
    param.reduced = false;
    if (!resumes) continue;
    const Tensor grad = param.tensor.grad();
    if (ranks_->rank() != 0) {
      zero_(grad);
    } else if (divisor_ != 1) {
      mul_(grad, Scalar(divisor_));
    }
  }
}

void BucketSchedule::keep_gradients() {
  TensorList gradients;
  for (ManagedParam& param : params_) {
    param.reduced = false;
    if (Tensor gradient = param.tensor.grad(); gradient.defined()) {
      gradients.push_back(std::move(gradient));
    }
  }
  if (gradients.empty()) return;
  const PhaseScope phase("backward");
  if (options_.average == GradientAverage::kWeight) {
    begin_weight();
    weight_begun_ = true;
  }
  const double share = divisor() / contributors();
  if (share != 1) kernels::multi_tensor_scale(gradients, &share);
}

void BucketSchedule::accept_written() {
  for (ManagedParam& param : params_) {
    const Tensor gradient = param.tensor.grad();
    if (param.reduced && gradient.defined()) param.gradient_version = gradient.version();
  }
}

void BucketSchedule::end_pass() {
  in_pass_ = false;
  if (!synchronises_) {
    ++backwards_in_window_;
    return;
  }
  // Leaves that backward reached and that no gradient came to.
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!params_[i].ready) mark_ready(i);
  }
  launch_complete();
  finish_reduction();
  backwards_in_window_ = 0;
  ++reductions_;
  if (learning_order_) agree_on_order();
}

void BucketSchedule::shadow_backward() {
  begin_pass(true);
  end_pass();
  shadow_ = false;
}

void BucketSchedule::fail_backward() {
  const bool begun = std::exchange(in_pass_, false);
  if (begun ? !synchronises_ : !plan.sync_gradients) return;
  try {
    if (!begun) begin_pass(true);
    shadow_ = failed_ = true;
    for (size_t i = 0; i < params_.size(); ++i) {
      if (!params_[i].ready) mark_ready(i);
    }
    launch_complete();
    finish_reduction();
  } catch (...) {  // what this rank has told the others, or no room for that either
  }
  in_pass_ = shadow_ = failed_ = false;
  backwards_in_window_ = 0;
}

int64_t BucketSchedule::used_map_bytes() const {
  const size_t fingerprint = fingerprint_of(*ranks_) ? 2 * sizeof(uint64_t) : 0;
  return static_cast<int64_t>(params_.size() + 1 + fingerprint);
}

void BucketSchedule::finish_reduction() {
  const PhaseScope phase("backward");
  const FirstStepTimeout timeout(reductions_);
  const int64_t waiting_since = now_in_nanoseconds();
  const auto count = static_cast<int64_t>(params_.size());
  const Tensor used = raw::zeros({used_map_bytes()}, kU8);
  uint8_t* flags = used.data_as<uint8_t>();
  for (int64_t i = 0; i < count; ++i) {
    flags[i] = !shadow_ && params_[static_cast<size_t>(i)].tensor.grad().defined();
  }
  uint8_t& failure = flags[count];  // see [Note: failed backward]
  if (failed_) failure = static_cast<uint8_t>(std::min(ranks_->rank() + 1, 255));
  // see [Note: fingerprint]
  const uint64_t calls = fingerprint_of(*ranks_).value_or(0), fingerprint[] = {calls, ~calls};
  const auto fingerprint_bytes = static_cast<size_t>(used.numel() - count - 1);
  std::memcpy(flags + count + 1, fingerprint, fingerprint_bytes);
  const Work used_work =
      ranks_->all_reduce(used, ReduceOp::kMax, {.channel = Channel::kControl, .tag = "used_map"});
  std::vector<GradientBucket*> open;
  for (const auto& group : groups_) open.push_back(group.get());
  while (!open.empty()) {
    std::erase_if(open, [&](GradientBucket* group) { return hook_->advance(*group); });
  }
  used_work.wait();
  TS_CHECK_AS(DistributedError, std::memcmp(flags + count + 1, fingerprint, fingerprint_bytes) == 0,
              "replicate",
              "all ranks must call the same collectives of GPUs in the same order; on '",
              ranks_->name(),
              "' they have not up to the end of this backward; compare calls before "
              "data moves (BackendOptions::compare_calls) to see which");
  TS_CHECK_AS(DistributedError, failure == 0, "backward", "rank ", failure - 1, " of '",
              ranks_->name(),
              "' has thrown in its backward, and the gradients of all are "
              "incomplete; see what it says");
  record_.waited = static_cast<double>(now_in_nanoseconds() - waiting_since) * 1e-9;
  if (shadow_) return;
  for (int64_t i = 0; i < count; ++i) {
    if (flags[i] == 0) continue;
    if (rank_context().mutation == Mutation::kOwnUsedMap &&
        !params_[static_cast<size_t>(i)].tensor.grad().defined()) [[unlikely]] {
      continue;
    }
    const Place& place = places_[static_cast<size_t>(i)];
    place.group->hand_out(place.slot);
  }
  for (ManagedParam& param : params_) {
    const Tensor grad = param.tensor.grad();
    param.reduced = grad.defined();
    if (!param.reduced) continue;
    param.gradient_version = grad.version();
    param.parameter_version = param.tensor.version();
  }
}

void BucketSchedule::check_cleared() {
  std::vector<std::string> stale;
  for (const ManagedParam& param : params_) {
    if (holds_reduced(param)) stale.push_back(param.name);
  }
  TS_CHECK_AS(AutogradError, stale.empty(), "replicate",
              "backward would add to gradients that were reduced before and were not used since: ",
              list_of(stale),
              "; call optimizer.step() and zero_grad() between two backwards that synchronise, or "
              "put all but the last one under no_sync()");
}

}  // namespace tessera::distributed
