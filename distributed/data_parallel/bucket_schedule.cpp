#include <tessera/distributed/data_parallel/bucket_schedule.h>

#include <algorithm>
#include <chrono>
#include <ranges>
#include <unordered_set>
#include <utility>

#include <tessera/core/factory/factory.h>
#include <tessera/core/gpu/backend.h>
#include <tessera/distributed/backward/mutant.h>
#include <tessera/distributed/backward/pass_agreement.h>

namespace tessera::distributed {
namespace {

NamedTensors trained_of(NamedTensors parameters) {
  std::erase_if(parameters, [](const NamedTensor& one) { return !one.tensor.requires_grad(); });
  return parameters;
}

}  // namespace

BucketSchedule::BucketSchedule(const NamedTensors& parameters, Group& ranks,
                               const BucketScheduleOptions& options)
    : options_(options),
      parameters_(parameters),
      changes_(parameters),
      pass_(trained_of(parameters), ranks, options.average, *this),
      hook_(std::make_shared<AllReduceHook>()),
      learning_order_(options.rebuild_buckets) {
  std::vector<size_t> order(pass_.params().size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = order.size() - 1 - i;
  make_buckets(order);
}

BucketSchedule::~BucketSchedule() {
  for (const auto& bucket : buckets_) bucket->remove_homes();
}

void BucketSchedule::install() {
  pass_.install(weak_from_this());
  NamedTensors frozen = parameters_;
  std::erase_if(frozen, [](const NamedTensor& one) { return one.tensor.requires_grad(); });
  pass_.watch(frozen);
}

// ---- Buckets -----------------------------------------------------------------------------------

void BucketSchedule::make_buckets(const std::vector<size_t>& order) {
  std::vector<ManagedParam>& params = pass_.params();
  std::vector<BucketItem> items;
  for (const size_t i : order) {
    const Tensor& tensor = params[i].tensor;
    const DType dtype = GradientBucket::gradient_dtype_of(tensor, options_.gradient_dtype);
    items.push_back({tensor.numel() * size_of(dtype), tensor.dtype(), tensor.device()});
  }
  const int64_t caps[] = {options_.first_bucket_bytes, options_.bucket_bytes};
  const bool any_gradient = std::ranges::any_of(
      params, [](const ManagedParam& param) { return param.tensor.grad().defined(); });
  std::vector<std::unique_ptr<GradientBucket>> old = std::move(buckets_);
  buckets_.clear();
  const std::vector<Place> old_places = std::move(places_);
  places_.assign(params.size(), {});
  for (const auto& bucket : old) {
    bucket->remove_homes();
    // A step on a stream of its own (a graphed one) may still write it when it goes.
    const Tensor& gradients = bucket->gradients();
    if (gradients.device().is_cuda()) gpu::record_use(gradients.device().index, gradients.data());
  }
  // Between zero_grad and the next backward nobody looks at the old buffers: they go before the new
  // ones come.
  if (!any_gradient) old.clear();
  for (std::vector<size_t>& members : assign_buckets(items, caps)) {
    for (size_t& member : members) member = order[member];
    auto bucket = std::make_unique<GradientBucket>(
        static_cast<int>(buckets_.size()), std::move(members), params, pass_.ranks(),
        options_.gradient_as_bucket_view, options_.gradient_dtype);
    for (size_t slot = 0; slot < bucket->size(); ++slot) {
      const size_t member = bucket->members()[slot];
      places_[member] = {bucket.get(), slot};
      if (!old.empty() && member < old_places.size()) {
        const Place& from = old_places[member];
        const bool untouched = params[member].holds_reduced();
        bucket->adopt(slot, from.bucket->gradient(from.slot));
        // It lies elsewhere and is still what was reduced.
        if (untouched) params[member].gradient.note(params[member].tensor.grad());
      }
    }
    bucket->install_homes();
    buckets_.push_back(std::move(bucket));
  }
}

void BucketSchedule::rebuild_if_due() {
  if (next_order_.empty()) return;
  const std::vector<size_t> order = std::move(next_order_);
  next_order_.clear();
  make_buckets(order);
  ++rebuilds_;
}

// see [Note: more parameters]. Their order is learned anew.
void BucketSchedule::follow_requires_grad() {
  if (!changes_.look()) return;
  std::unordered_set<const TensorImpl*> known;
  for (const ManagedParam& param : pass_.params()) known.insert(param.tensor.impl());
  NamedTensors more = trained_of(parameters_);
  std::erase_if(more, [&](const NamedTensor& one) { return known.contains(one.tensor.impl()); });
  if (more.empty()) return;
  std::vector<size_t> order;
  for (const auto& bucket : buckets_) {
    order.insert(order.end(), bucket->members().begin(), bucket->members().end());
  }
  for (size_t i = more.size(); i-- > 0;) order.push_back(known.size() + i);
  pass_.add_parameters(more);
  make_buckets(order);
  arrival_order_.clear();
  learning_order_ = options_.rebuild_buckets;
}

// Rank 0's order is everybody's.
void BucketSchedule::agree_on_order() {
  const PhaseScope phase("backward");
  const FirstStepTimeout timeout(0);
  learning_order_ = false;
  std::vector<size_t> order = std::move(arrival_order_);
  arrival_order_.clear();
  std::vector<bool> known(pass_.params().size());
  for (const size_t i : order) known[i] = true;
  for (size_t i = known.size(); i-- > 0;) {
    if (!known[i]) order.push_back(i);
  }
  const Tensor shared = raw::empty({static_cast<int64_t>(order.size())}, kI64);
  std::ranges::copy(order, shared.data_as<int64_t>());
  pass_.ranks().broadcast(shared, 0, {.channel = Channel::kControl, .tag = "bucket_order"}).wait();
  const int64_t* values = shared.data_as<int64_t>();
  if (!TS_MUTANT(kOwnBucketOrder)) {
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<size_t>(values[i]);
  }
  next_order_ = std::move(order);
}

// ---- One backward ------------------------------------------------------------------------------

void BucketSchedule::before_forward() {
  if (pass_.in_backward()) return;
  rebuild_if_due();
  follow_requires_grad();
}

void BucketSchedule::prepare() {
  rebuild_if_due();
  follow_requires_grad();
  next_launch_ = 0;
  arrival_order_.clear();  // of a backward that failed
}

void BucketSchedule::begin() {
  for (const auto& bucket : buckets_) bucket->begin_backward(changes_.text());
}

void BucketSchedule::ready(size_t param, bool arrived) {
  if (arrived && learning_order_) arrival_order_.push_back(param);
  const Place& place = places_[param];
  if (pass_.is_shadow()) {
    place.bucket->collect_zeros(place.slot);
  } else {
    place.bucket->collect(place.slot);
  }
}

// see [Note: launch order]
void BucketSchedule::launch_ready() {
  if (TS_MUTANT(kLaunchOutOfOrder)) {
    for (const auto& bucket : buckets_) {
      if (bucket->complete() && !bucket->launched()) launch(*bucket);
    }
    return;
  }
  while (next_launch_ < buckets_.size() && buckets_[next_launch_]->complete()) {
    launch(*buckets_[next_launch_++]);
  }
}

void BucketSchedule::launch(GradientBucket& bucket) {
  const PhaseScope phase("backward");
  const FirstStepTimeout timeout(pass_.reductions());
  bucket.set_launched();
  pass_.note_launch(bucket.index());
  hook_->start(bucket, pass_.divides() ? pass_.sum_divisor() : 1);
}

int64_t BucketSchedule::used_map_bytes() const {
  return PassAgreement::bytes(pass_.ranks(), static_cast<int64_t>(pass_.params().size()));
}

void BucketSchedule::finish() {
  launch_ready();
  {
    const PhaseScope phase("backward");
    const FirstStepTimeout timeout(pass_.reductions());
    const auto waiting_since = std::chrono::steady_clock::now();
    std::vector<ManagedParam>& params = pass_.params();
    // see [Note: used map]
    PassAgreement agreement(pass_.ranks(), static_cast<int64_t>(params.size()));
    const std::span<uint8_t> used = agreement.flags();
    for (size_t i = 0; i < params.size(); ++i) {
      used[i] = !pass_.is_shadow() && params[i].tensor.grad().defined();
    }
    used_.own.assign(used.begin(), used.end());
    agreement.issue(pass_.failed(), pass_.failure(), "used_map" + changes_.text());
    std::vector<GradientBucket*> open;
    for (const auto& bucket : buckets_) open.push_back(bucket.get());
    while (!open.empty()) {
      std::erase_if(open, [&](GradientBucket* bucket) { return hook_->advance(*bucket); });
    }
    agreement.wait();
    changes_.agree();
    used_.any.assign(used.begin(), used.end());
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - waiting_since;
    pass_.note_waited(waited.count());
    if (!pass_.is_shadow()) {
      for (size_t i = 0; i < params.size(); ++i) {
        const bool own = params[i].tensor.grad().defined();
        if (used[i] == 0 || (TS_MUTANT(kOwnUsedMap) && !own)) continue;
        places_[i].bucket->hand_out(places_[i].slot);
      }
      const bool divided = pass_.divides();
      for (ManagedParam& param : params) {
        param.set_reduced();
        param.undivided = !divided && param.reduced;
      }
    }
  }
  if (learning_order_) agree_on_order();
}

// Hooks may count steps and keep what they did not send.
bool BucketSchedule::can_be_repeated() const {
  return dynamic_cast<const AllReduceHook*>(hook_.get()) != nullptr && next_order_.empty() &&
         !learning_order_;
}

void BucketSchedule::repeat(const UsedParameters& captured) {
  const PhaseScope phase("backward");
  PassAgreement agreement(pass_.ranks(), static_cast<int64_t>(captured.own.size()));
  std::ranges::copy(captured.own, agreement.flags().begin());
  agreement.issue(false, {}, "used_map");
  agreement.wait();
  TS_CHECK_AS(DistributedError, std::ranges::equal(agreement.flags(), captured.any), "graphed_step",
              "other parameters than in the captured step have gradients on some rank of '",
              pass_.ranks().name(), "'; leave the setting cuda_graphs false for a model whose ",
              "branches differ from step to step");
}

}  // namespace tessera::distributed
