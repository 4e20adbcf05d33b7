#include <tessera/distributed/fully_shard/unit_schedule.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <ranges>
#include <string_view>
#include <unordered_map>
#include <utility>

#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/fp8/weight.h>
#include <tessera/autograd/op_observer.h>
#include <tessera/core/error.h>
#include <tessera/distributed/backward/mutant.h>
#include <tessera/distributed/backward/pass_agreement.h>
#include <tessera/distributed/fully_shard/fp8_part.h>
#include <tessera/distributed/transport/collectives.h>

namespace tessera::distributed {
namespace {

ParameterPlaces places_of(const std::vector<std::shared_ptr<ShardUnit>>& units) {
  ParameterPlaces places;
  for (const auto& unit : units) {
    places.insert(unit->left_out.begin(), unit->left_out.end());
    for (const auto& part : unit->parts) {
      for (const ShardedParam& param : part->params()) {
        places.insert(param.places.begin(), param.places.end());
      }
    }
  }
  return places;
}

// The dtype in which weights are read as casts here.
std::optional<DType> cast_in_scope() {
  const AutocastMode& autocast = Context::current().slot<AutocastMode>();
  return autocast.enabled ? std::optional(autocast.dtype) : std::nullopt;
}

}  // namespace

// Sees the ops of calls of units, until the ranks have agreed.
class UnitSchedule::Reads final : public OpObserver {
 public:
  enum Way : uint8_t { kNone, kAsBF16, kAsF16 };
  struct Read {
    uint8_t itself = 0, cast = kNone, fp8 = 0;
  };
  explicit Reads(const std::vector<Place>& places) : reads(places.size()) {
    for (size_t i = 0; i < places.size(); ++i) {
      known_[places[i].part->params()[places[i].index].whole.impl()] = i;
    }
  }
  // A backward inside of a forward ends it while the call is under way.
  ~Reads() override { end(); }
  Reads(const Reads&) = delete;
  Reads& operator=(const Reads&) = delete;
  void saw(const Op& op, std::span<const Tensor> inputs, std::span<const Tensor> results) override {
    for (size_t i = 0; i < inputs.size(); ++i) {
      const auto found = known_.find(inputs[i].impl());
      if (!inputs[i].defined() || found == known_.end()) continue;
      Read& read = reads[found->second];
      if (&op == &detail::kAutocastWeight) {
        read.cast = results[0].dtype() == kBF16 ? kAsBF16 : kAsF16;
      } else if ((op.reads_copies & index_bit(i)) != 0) {
        read.fp8 = 1;
      } else {
        read.itself = 1;
      }
    }
    if (outer_ != nullptr) outer_->saw(op, inputs, results);
  }
  void begin(ShardUnit& unit) {
    OpObserver*& current = Context::current().slot<OpObserverSlot>().observer;
    unit_ = &unit;
    outer_ = std::exchange(current, this);
  }
  void end() {
    if (std::exchange(unit_, nullptr) == nullptr) return;
    Context::current().slot<OpObserverSlot>().observer = std::exchange(outer_, nullptr);
  }
  bool is_open() const { return unit_ != nullptr; }
  bool began_in(const ShardUnit& unit) const { return unit_ == &unit; }

  std::vector<Read> reads;  // of the places

 private:
  std::unordered_map<const TensorImpl*, size_t> known_;
  const ShardUnit* unit_ = nullptr;  // in whose call it began
  OpObserver* outer_ = nullptr;
};

NamedTensors UnitSchedule::wholes_of(const std::vector<std::shared_ptr<ShardUnit>>& units) {
  root_ = units.front();
  for (const auto& unit : units) {
    units_.push_back(unit);
    for (const auto& part : unit->parts) parts_.push_back(part.get());
  }
  return trained_wholes();
}

NamedTensors UnitSchedule::trained_wholes() {
  NamedTensors wholes;
  places_.clear();
  for (const auto& weak : units_) {
    const auto unit = weak.lock();
    for (const auto& part : unit->parts) {
      for (size_t i = 0; i < part->params().size(); ++i) {
        const ShardedParam& param = part->params()[i];
        if (!param.trains()) continue;
        wholes.push_back({param.name, param.whole});
        places_.push_back({unit.get(), part.get(), i});
      }
    }
  }
  return wholes;
}

UnitSchedule::UnitSchedule(const std::vector<std::shared_ptr<ShardUnit>>& units, Group& ranks,
                           const Options& options)
    : options_(options),
      known_(units.front()->modules, places_of(units), false, "sharding"),
      mesh_(units.front()->ranks.mesh->lifetime()),
      pass_(wholes_of(units), ranks, options.average, *this),
      changes_(all_shards()) {
  for (const ParamGroup* part : parts_) may_cast_ = may_cast_ || part->may_cast();
  set_shards();
}

NamedTensors UnitSchedule::all_shards() const {
  NamedTensors shards;
  for (const ParamGroup* part : parts_) {
    for (const ShardedParam& param : part->params()) shards.push_back({param.name, param.shard});
  }
  return shards;
}

void UnitSchedule::set_shards() {
  for (size_t i = 0; i < places_.size(); ++i) {
    pass_.params()[i].shard = places_[i].part->params()[places_[i].index].shard;
  }
}

UnitSchedule::~UnitSchedule() = default;

// ---- Calls -------------------------------------------------------------------------------------

// The model is called, by whatever unit.
void UnitSchedule::before_model() {
  TS_CHECK_AS(UnsupportedError, !root_.expired(), "sharding",
              "the model that holds this unit is gone, and with it the order of its calls; keep it "
              "as long as its modules");
  TS_CHECK_AS(UnsupportedError, !mesh_.expired(), "sharding",
              "the mesh whose ranks hold the model's parameters is gone; keep it as long as the "
              "model");
  known_.check();
  raise_failed_transfer();
  // see [Note: backwards that threw]
  const bool threw = pass_.in_backward() || open_backward_;
  if (threw && (pass_.in_backward() || tells_failures())) pass_.fail_backward();
  if (std::exchange(out_of_step_, false)) resume();
  if (open_backward_) {
    for (ParamGroup* part : parts_) part->abandon();
    end();
  }
  if (threw) {  // as on the ranks whose backward came to its end: the unit of this call, too
    for (ParamGroup* part : parts_) part->release();
  }
  follow_requires_grad();
  last_call_ = nullptr;
  called_before_ = std::move(called_);
  called_.clear();
  if (before_root && grad_enabled()) before_root();
}

void UnitSchedule::follow_requires_grad() {
  bool changed = false;
  for (ParamGroup* part : parts_) changed = part->follow_requires_grad() || changed;
  if (changed) {
    pass_.set_parameters(trained_wholes());
    set_shards();
    reads_ = nullptr;
    agreed_cast_.reset();
  }
  for (const auto& [name, tensor] : root_.lock()->left_whole) {
    TS_CHECK_AS(
        ConfigError, !tensor.requires_grad(), "zero", "'", name,
        "' was frozen when the model was sharded, so that no rank holds a part of it, and "
        "requires grad now; let it require grad before prepare() or fully_shard(), and freeze it "
        "afterwards");
  }
  if (changes_.look()) name_changes();
}

void UnitSchedule::name_changes() {
  for (ParamGroup* part : parts_) part->set_changes(changes_.text());
}

// Where a part of its call runs again: of a unit that is done nothing is read but what is frozen,
// as the gradients of all else are awaited.
bool UnitSchedule::needs_gather(const ShardUnit& unit) {
  return !unit.backward_done || std::ranges::any_of(unit.parts, [](const auto& part) {
    return std::ranges::any_of(part->params(), std::not_fn(&ShardedParam::trains));
  });
}

void UnitSchedule::enter(ShardUnit& unit, bool again) {
  const bool recomputes = current_backward() != 0;
  const PhaseScope phase(recomputes ? "backward" : "forward");
  const FirstStepTimeout timeout(pass_.reductions());
  const std::optional<DType> cast = cast_in_scope();
  ++unit.calls;
  if (recomputes) {
    // Its backward has gathered it as its forward did. The scope of autocast says nothing here: a
    // call that runs again is entered before its scope comes back.
    if (!unit.is_gathered() && (!again || needs_gather(unit))) unit.gather(cast);
    unit.show_wholes();
    return;
  }
  for (ShardUnit* outer : open_calls_) {
    if (outer == &unit || std::ranges::find(unit.outer, outer) != unit.outer.end()) continue;
    unit.outer.push_back(outer);
  }
  open_calls_.push_back(&unit);
  if (open_calls_.size() == 1) before_model();
  const bool as_before = std::exchange(unit.cast, cast) == cast;
  if (!again || needs_gather(unit)) unit.gather(cast);
  unit.show_wholes();
  if (may_cast_ && cast && cast != agreed_cast_) observe_reads(unit);
  if (std::ranges::find(called_, &unit) != called_.end()) return;
  called_.push_back(&unit);
  if (!unit.forward_prefetch.empty()) {
    for (const auto& weak : unit.forward_prefetch) {
      if (const auto next = weak.lock()) next->start_gather(next->cast);
    }
    return;
  }
  // The next one, if calls come in the order of the last forward.
  const size_t place = called_.size();
  if (place < called_before_.size() && called_before_[place - 1] == &unit) {
    ShardUnit& next = *called_before_[TS_MUTANT(kPrefetchWrong) ? place - 1 : place];
    next.start_gather(as_before ? next.cast : cast);
  }
}

void UnitSchedule::observe_reads(ShardUnit& unit) {
  if (reads_ == nullptr) reads_ = std::make_unique<Reads>(places_);
  observed_in_ = unit.cast;
  if (!reads_->is_open()) reads_->begin(unit);
}

// For each place: whether it was read itself, as which cast, in fp8.
size_t UnitSchedule::flags_of_reads() const { return may_cast_ ? 3 * places_.size() : 0; }

// Those that any rank has read as casts, or in fp8, and none otherwise, travel so.
void UnitSchedule::agree_on_casts(std::span<const uint8_t> flags) {
  const size_t count = places_.size();
  const std::span<const uint8_t> itself = flags.first(count);
  const std::span<const uint8_t> cast = flags.subspan(count, count);
  const std::span<const uint8_t> fp8 = flags.subspan(2 * count, count);
  const uint8_t way = count == 0 ? 0 : std::ranges::max(cast);
  if (way != Reads::kNone) {
    agreed_cast_ = way == Reads::kAsBF16 ? kBF16 : kF16;
  } else if (count > 0 && std::ranges::max(fp8) != 0) {
    agreed_cast_ = observed_in_;
  } else {
    return;
  }
  const auto maxima = std::make_shared<Fp8Maxima>(pass_.ranks());
  const auto root = root_.lock();
  const Fp8Places layers = root != nullptr ? fp8_places_in(root->modules) : Fp8Places{};
  for (size_t i = 0; i < count; ++i) {
    const auto& [unit, part, index] = places_[i];
    part->finish_gather();  // of the forms that were
    const bool casts = way != Reads::kNone && cast[i] == way;
    const bool alone = casts && itself[i] == 0 && fp8[i] == 0 && part->may_cast();
    part->set_cast(index, alone ? agreed_cast_ : std::nullopt);
    std::optional<WeightKey> key;
    if (fp8[i] != 0 && itself[i] == 0 && cast[i] == 0 && part->may_travel_in_fp8()) {
      key = fp8_key_of(layers, part->params()[index].places);
    }
    part->set_fp8(index, std::move(key), maxima);
  }
  reads_ = nullptr;
}

void UnitSchedule::after_forward(ShardUnit& unit, nn::TensorRefs inputs, nn::TensorRefs outputs) {
  for (const auto& part : unit.parts) part->check_unwritten();
  if (const auto dtype = unit.precision.output_dtype) {
    for (Tensor* output : outputs) {
      if (is_floating(output->dtype()) && output->dtype() != *dtype) *output = output->to(*dtype);
    }
  }
  if (!grad_enabled() || current_backward() != 0) return;
  const std::function<void()> observed =
      unit.is_root && observer ? observer() : std::function<void()>();
  const auto call = std::make_shared<UnitCall>(
      UnitCall{.unit = &unit, .previous = last_call_, .cast = unit.cast});
  bool used = false;
  for (Tensor* output : outputs) {
    if (!output->requires_grad() || output->is_leaf()) continue;
    used = true;
    register_hook(*output, [weak = root_, call, observed](const Tensor&) {
      if (const auto root = weak.lock()) root->schedule->before_backward_of(call, observed);
      return Tensor();
    });
  }
  for (const Tensor* input : inputs) call->has_inputs |= input->requires_grad();
  if (used) last_call_ = call;
}

void UnitSchedule::leave(ShardUnit& unit, bool last, bool failed) noexcept {
  const bool recomputes = current_backward() != 0;
  if (--unit.calls == 0) {
    unit.show_shards();
    if (reads_ != nullptr && reads_->began_in(unit)) reads_->end();
  }
  if (recomputes) return;
  if (unit.calls == 0 && ((last && unit.reshards_after_forward()) || failed)) {
    unit.release(!failed && grad_enabled());
  }
  open_calls_.pop_back();
  if (!open_calls_.empty()) return;
  // What was asked for ahead and not used.
  for (const auto& weak : units_) {
    const auto other = weak.lock();
    if (other && (failed || (other->is_gathering() && other->reshards_after_forward()))) {
      other->release();
    }
  }
  if (failed) last_call_ = nullptr;
  settle();
}

// see [Note: who may write] in host_transfers.h. What failed is told by the next call or backward.
void UnitSchedule::settle() noexcept {
  try {
    for (ParamGroup* part : parts_) part->settle();
  } catch (...) {
    if (!failed_transfer_) failed_transfer_ = std::current_exception();
  }
}

void UnitSchedule::raise_failed_transfer() {
  if (failed_transfer_) std::rethrow_exception(std::exchange(failed_transfer_, nullptr));
}

// ---- One backward ------------------------------------------------------------------------------

void UnitSchedule::before_backward_of(const std::shared_ptr<UnitCall>& call,
                                      const std::function<void()>& observed) {
  if (observed) observed();
  pass_.before_backward();
  const PhaseScope phase("backward");
  const FirstStepTimeout timeout(pass_.reductions());
  ShardUnit& unit = *call->unit;
  gather_ahead();  // where backward has left a unit without its gradients
  unit.gather(call->cast);
  // A call with several outputs has one backward.
  const uint64_t pass = current_backward();
  if (pass == 0 || std::exchange(call->pass, pass) == pass) return;
  current_call_ = call;
  if (call->has_inputs) ++unit.awaited_calls;
  if (!unit.backward_prefetch.empty()) {
    for (const auto& weak : unit.backward_prefetch) {
      if (const auto next = weak.lock(); next && !next->backward_done) {
        next->start_gather(next->cast);
      }
    }
    return;
  }
  if (!call->previous) return;
  if (call->previous->unit->backward_done) return;
  ahead_ = call->previous;
  ahead_of_ = &unit;
  if (unit.awaited_numel <= unit.gather_ahead_at) gather_ahead();
}

// see [Note: three units]
void UnitSchedule::gather_ahead() {
  const auto call = std::exchange(ahead_, nullptr);
  if (call == nullptr) return;
  ShardUnit& next = *(TS_MUTANT(kPrefetchWrong) ? called_.back() : call->unit);
  next.start_gather(call->cast);
}

void UnitSchedule::prepare() {
  if (std::exchange(open_backward_, true)) {
    for (ParamGroup* part : parts_) part->abandon();
  }
  TS_CHECK_AS(ConfigError, pass_.plan.sync_gradients || options_.local_sums, "backward",
              "ranks hold their part of the gradients alone, so that none can add up without being "
              "reduced; leave out no_sync(), or take a mode that keeps whole gradients (ddp, "
              "zero1, fsdp)");
  used_.assign(pass_.params().size(), false);
  current_call_ = nullptr;
  ahead_ = nullptr;
  next_launch_ = 0;
  last_launched_ = nullptr;
  agreements_.clear();
  for (ParamGroup* part : parts_) part->begin_backward();
  launch_order_.clear();
  const auto append = [this](const ShardUnit& unit) {
    if (std::ranges::find(launch_order_, &unit, &Launch::unit) != launch_order_.end()) return;
    for (const auto& part : unit.parts) launch_order_.push_back({&unit, part.get()});
  };
  // see [Note: order of reductions]
  for (const ShardUnit* unit : called_ | std::views::reverse) append(*unit);
  for (const auto& weak : units_ | std::views::reverse) {
    if (const auto unit = weak.lock()) append(*unit);
  }
  for (const auto& weak : units_) {
    if (const auto unit = weak.lock()) {
      unit->awaited = unit->awaited_inside = unit->awaited_calls = 0;
      unit->awaited_numel = unit->gather_ahead_at = 0;
      unit->backward_done = false;
    }
  }
  for (size_t i = 0; i < places_.size(); ++i) {
    const Tensor& whole = pass_.params()[i].tensor;
    if (!backward_reaches(whole)) continue;
    ShardUnit& unit = *places_[i].unit;
    ++unit.awaited;
    for (ShardUnit* outer : unit.outer) ++outer->awaited_inside;
    unit.awaited_numel += whole.numel();
    unit.gather_ahead_at = std::max(unit.gather_ahead_at, whole.numel());  // the largest
  }
  for (const auto& weak : units_) {
    if (const auto unit = weak.lock()) {
      const int64_t most = unit->awaited_numel * 3 / 4;
      unit->gather_ahead_at = unit->gather_ahead_at > most ? unit->awaited_numel : most;
    }
  }
}

void UnitSchedule::arrived(size_t param) {
  ShardUnit& unit = *places_[param].unit;
  if (unit.awaited > 0) {
    --unit.awaited;
    for (ShardUnit* outer : unit.outer) --outer->awaited_inside;
    unit.awaited_numel -= pass_.params()[param].tensor.numel();
  }
  if (&unit == ahead_of_ && ahead_ != nullptr && unit.awaited_numel <= unit.gather_ahead_at) {
    const PhaseScope phase("backward");
    if (last_launched_ != nullptr) last_launched_->wait_reduce(sums_replicas());
    gather_ahead();
  }
  end_backward_of(unit);
  for (ShardUnit* outer : unit.outer) end_backward_of(*outer);
}

void UnitSchedule::input_arrived(ShardUnit& unit) {
  if (unit.awaited_calls > 0) --unit.awaited_calls;
  if (current_backward() == 0) return;
  end_backward_of(unit);
  if (pass_.reduces()) launch_ready();
}

// see [Note: end of a unit's backward]
void UnitSchedule::end_backward_of(ShardUnit& unit) {
  const bool open = (unit.awaited > 0 || unit.awaited_inside > 0 || unit.awaited_calls > 0) &&
                    !TS_MUTANT(kFreeEarly);
  if (open || unit.backward_done || unit.calls > 0) return;
  for (const auto& part : unit.parts) part->check_unwritten();
  unit.backward_done = true;
  if (pass_.plan.reshard_after_backward) unit.release();
}

void UnitSchedule::ready(size_t param, bool) {
  const Place& place = places_[param];
  const ShardedParam& own = place.part->params()[place.index];
  used_[param] = !pass_.is_shadow() && (own.whole.grad().defined() || own.shard.grad().defined());
  place.part->arrive();
}

void UnitSchedule::launch_ready() {
  if (TS_MUTANT(kLaunchOutOfOrder)) {
    for (ParamGroup* part : parts_) {
      if (part->is_complete() && !part->is_reducing()) launch(*part);
    }
    return;
  }
  // see [Note: three units]: its gradients are packed when its weights are gone.
  const auto can_go = [](const Launch& launch) {
    return launch.part->is_complete() &&
           (launch.part->keeps_wholes() || launch.unit->awaited_calls == 0);
  };
  while (next_launch_ < launch_order_.size() && can_go(launch_order_[next_launch_])) {
    launch(*launch_order_[next_launch_++].part);
  }
}

void UnitSchedule::launch(ParamGroup& part) {
  part.set_reducing();
  if (!part.trains()) {
    if (!changes_.text().empty()) agreements_.push_back(part.start_agreement());
    return;
  }
  const PhaseScope phase("backward");
  const FirstStepTimeout timeout(pass_.reductions());
  // One is under way at a time: its input is freed before the next one is packed.
  if (last_launched_ != nullptr) last_launched_->wait_reduce(sums_replicas());
  last_launched_ = &part;
  pass_.note_launch(static_cast<int>(next_launch_));
  part.start_reduce(pass_.is_shadow(), sums_replicas());
}

bool UnitSchedule::tells_failures() const {
  const bool gathers = std::ranges::any_of(parts_, std::not_fn(&ParamGroup::keeps_wholes));
  return (gathers || !compute_groups().empty()) &&
         std::ranges::all_of(groups(), [](const auto& group) {
           return group->size() == 1 || group->compares_calls();
         });
}

namespace {

void add_once(std::vector<std::shared_ptr<Group>>& groups, Group* group) {
  const auto same = [&](const auto& known) { return known.get() == group; };
  if (group == nullptr || std::ranges::any_of(groups, same)) return;
  groups.push_back(group->shared_from_this());
}

}  // namespace

// Of ranks that calculate the model's layers together.
std::vector<std::shared_ptr<Group>> UnitSchedule::compute_groups() const {
  std::vector<std::shared_ptr<Group>> groups;
  for (const ParamGroup* part : parts_) {
    for (const ShardedParam& param : part->params()) {
      if (!param.across) continue;
      for (const MeshAxis& axis : param.across->mesh->axes()) {
        if (axis.size > 1) add_once(groups, &param.across->mesh->group(axis.name));
      }
    }
  }
  return groups;
}

// Those that backwards call, each once.
std::vector<std::shared_ptr<Group>> UnitSchedule::groups() const {
  std::vector<std::shared_ptr<Group>> groups{pass_.ranks().shared_from_this()};
  for (const ParamGroup* part : parts_) {
    add_once(groups, part->ranks().shards);
    add_once(groups, part->ranks().replicas);
  }
  for (const auto& group : compute_groups()) add_once(groups, group.get());
  return groups;
}

// see [Note: backwards that threw]
void UnitSchedule::resume() const {
  const auto all = groups();
  if (compute_groups().empty()) return resume_calls(pass_.ranks(), all);
  for (const auto& group : all) resume_calls(*group, {&group, 1});
}

namespace {

constexpr std::string_view kHasFailed = " has failed in its backward: ";

// Of a rank that has failed, or that was told so in a call: the first one's words are passed on.
std::string cause_of(const std::string& what) {
  const size_t told = what.rfind(kHasFailed);
  const size_t begin = told == std::string::npos ? told : what.rfind("rank ", told);
  if (begin == std::string::npos) {
    return "rank " + std::to_string(rank_context().rank) + std::string(kHasFailed) + what;
  }
  return what.substr(begin, what.find("; every rank must call", told) - begin);
}

}  // namespace

// see [Note: backwards that threw]
void UnitSchedule::fail(const std::string& what) {
  for (Work& work : std::exchange(agreements_, {})) work.forget();
  for (ParamGroup* part : parts_) part->let_go();
  const std::string reason = cause_of(what);
  for (const auto& group : groups()) {
    for (const Channel channel :
         {Channel::kModule, Channel::kGradient, Channel::kParameter, Channel::kControl}) {
      group->tell(channel, reason);
    }
  }
  out_of_step_ = true;
  last_call_ = ahead_ = nullptr;
  end();
}

// Of a rank whose backward has failed: the gathers that the others go on to.
void UnitSchedule::gather_rest() {
  auto call = current_call_ ? current_call_ : last_call_;
  for (; call; call = call->previous) {
    ShardUnit& unit = *call->unit;
    if (unit.backward_done) continue;
    unit.gather(call->cast);
    unit.backward_done = true;
    unit.release();
  }
}

void UnitSchedule::finish() {
  if (pass_.failed()) gather_rest();
  for (const auto& weak : units_) {
    if (const auto unit = weak.lock()) unit->awaited_calls = 0;
  }
  launch_ready();
  const PhaseScope phase("backward");
  const FirstStepTimeout timeout(pass_.reductions());
  const auto waiting_since = std::chrono::steady_clock::now();
  std::optional<PassAgreement> agreement;
  if (pass_.ranks().size() > 1) {
    const size_t count = used_.size();
    agreement.emplace(pass_.ranks(), static_cast<int64_t>(count + flags_of_reads()));
    const std::span<uint8_t> flags = agreement->flags();
    std::ranges::copy(used_, flags.begin());
    for (size_t i = 0; reads_ != nullptr && i < count; ++i) {
      flags[count + i] = reads_->reads[i].itself;
      flags[2 * count + i] = reads_->reads[i].cast;
      flags[3 * count + i] = reads_->reads[i].fp8;
    }
    agreement->issue(pass_.failed(), pass_.failure(), "used_map" + changes_.text());
  }
  for (const Work& work : std::exchange(agreements_, {})) work.wait();
  if (last_launched_ != nullptr) last_launched_->wait_reduce(sums_replicas());
  const bool whole_sum = pass_.divides();
  const double divisor = whole_sum ? pass_.sum_divisor() : 1;
  // In the order in which they end.
  for (const Launch& launch : launch_order_) launch.part->finish_sum(divisor);
  raise_failed_transfer();
  if (agreement) {
    agreement->wait();
    const std::span<const uint8_t> flags = agreement->flags();
    std::ranges::copy(flags.first(used_.size()), used_.begin());
    if (may_cast_) agree_on_casts(flags.subspan(used_.size()));
  }
  if (!changes_.text().empty()) {
    changes_.agree();
    name_changes();
  }
  const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - waiting_since;
  pass_.note_waited(waited.count());
  for (size_t i = 0; i < places_.size(); ++i) {
    if (used_[i] != 0) places_[i].part->hand_out(places_[i].index);
    if (whole_sum) pass_.params()[i].set_reduced();
    pass_.params()[i].undivided = !whole_sum;
  }
}

void UnitSchedule::end() {
  open_backward_ = false;
  for (ParamGroup* part : parts_) part->end_backward();
  for (const auto& weak : units_) {
    const auto unit = weak.lock();
    if (!unit) continue;
    unit->awaited = unit->awaited_inside = unit->awaited_calls = 0;
    if (unit->calls == 0 && pass_.plan.reshard_after_backward) unit->release();
  }
  current_call_ = nullptr;
  settle();
}

}  // namespace tessera::distributed
