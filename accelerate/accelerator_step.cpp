// The order of a step: micro-batches, their backwards, and who may step at the end of a window.
// What a micro-batch counts for, clipping and the loss scale are units of their own in step/.
#include <algorithm>
#include <cstdio>
#include <sstream>
#include <unordered_set>

#include <tessera/accelerate/accelerator_state.h>
#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/autograd.h>
#include <tessera/core/context.h>
#include <tessera/core/cuda/graph.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/plain_text.h>
#include <tessera/core/random.h>
#include <tessera/data/dataloader.h>
#include <tessera/distributed/transport/caller.h>

namespace tessera {
namespace {

using optim::StepDecision;

// Random numbers of a micro-batch: room for this many streams, behind those that a program takes
// by itself.
constexpr int kStreamBits = 24;

}  // namespace

// ---- Windows -----------------------------------------------------------------------------------

void Accelerator::State::refuse_in_capture(std::string_view where) const {
  TS_CHECK_AS(
      UnsupportedError, capturing != nullptr || gpu::Capture::current() == nullptr, where,
      "cannot be captured: windows, weights, reductions and random numbers of micro-batches "
      "are decided on the host, and a graph repeats what the device did; capture it by "
      "Accelerator::graphed_step(), or a model and an optimizer that are not prepared");
}

void Accelerator::State::refuse_in_graphed_step(bool given, std::string_view where,
                                                std::string_view what) const {
  TS_CHECK_AS(UnsupportedError, !given || capturing == nullptr, where, "cannot be captured: ", what,
              " is the host's affair, and a replay would repeat that of the capture; leave it out "
              "of the graphed step, or the setting cuda_graphs false");
}

// A function of the global micro-batch: of N ranks with m each, rank r's k-th is number k * N + r.
// Ranks that calculate one together draw the same numbers.
void Accelerator::State::begin_random_numbers() {
  const auto micro = static_cast<uint64_t>(counters.micro_batches + dims->random_coordinate() + 1);
  random = {.seed = counters.seed, .next_stream = (micro << kStreamBits) & ~(uint64_t{1} << 63)};
}

struct MicroBatch::Scope {
  std::weak_ptr<Accelerator::State> state;
  uint64_t id;
};

MicroBatch::MicroBatch(std::unique_ptr<Scope> scope, bool sync_gradients)
    : scope_(std::move(scope)), sync_gradients_(sync_gradients) {}
MicroBatch::~MicroBatch() {
  if (const auto state = scope_->state.lock()) {
    std::erase_if(state->open, [&](const auto& micro) { return micro.id == scope_->id; });
  }
}

MicroBatch Accelerator::open(std::span<nn::ModuleBase* const> models,
                             const AccumulateOptions& options) {
  State& state = *state_;
  state.refuse_in_capture("accumulate");
  state.refuse_in_graphed_step(options.ends_window, "accumulate", "an early end of the window");
  state.forget_dead();
  state.end_left_windows();
  State::OpenMicro micro{.id = state.next_id++, .records = {}};
  for (const nn::ModuleBase* model : models) {
    micro.records.push_back(state.at(*model, "accumulate"));
    micro.records.back()->check_undivided("accumulate");
  }
  state.clear_awaited(micro.records);
  if (state.capturing != nullptr) {
    ++state.capturing->micro_batches;
    state.capturing->opened = micro.records;
  }
  const bool ends = options.ends_window || (state.sync_with_dataloader && end_of_dataloader());
  state.begin_random_numbers();
  state.counters.micro_batches += state.data_ranks;
  bool sync = true;
  for (const auto& record : micro.records) {
    record->window.begin_micro(record->steps.value_or(state.steps), ends);
    if (ends && !options.ends_window && record->window.is_short()) note_short_window(*record);
    record->reading = {active_loader(), state.loader_plan->loops_left(active_loader())};
    sync = sync && record->window.is_boundary();
    record->plan_forward(
        record->reduces_in(record->window.is_boundary(), state.settings.sync_each_batch));
  }
  state.sync_gradients = sync;
  auto scope = std::make_unique<MicroBatch::Scope>(state_, micro.id);
  state.open.push_back(std::move(micro));
  return MicroBatch(std::move(scope), sync);
}

void Accelerator::State::end_left_windows() {
  for (const auto& record : models) {
    const ModelRecord::Reading& from = record->reading;
    if (record->window.is_boundary() || from.loader == nullptr) continue;
    if (loader_plan->loops_left(from.loader) == from.loops_left) continue;
    record->leave_window();
    for (const auto& optimizer : optimizers) {
      if (std::ranges::find(models_of(*optimizer), record) == optimizer->models.end()) continue;
      Clipping::drop(*optimizer);
      loss_scaling.forget(*optimizer->optimizer);
    }
  }
}

void Accelerator::State::settle_gradients(OptimizerRecord& record) {
  for (const auto& model : models_of(record)) model->owes_step = false;
  loose_gradients = false;
}

// A program that cuts a batch into micro-batches has several in the loader's last one, and nobody
// knows which of them is the last.
void Accelerator::note_short_window(ModelRecord& record) {
  const data::LoaderCursor in_hand = active_loader()->cursor();
  if (std::exchange(record.short_at, in_hand) != in_hand || state_->has_told_of_cuts) return;
  state_->has_told_of_cuts = true;
  if (!is_main_process() || state_->settings.log_level.value > LogLevel::kWarning) return;
  const std::string told =
      "accumulate: several micro-batches of " + record.type_name +
      " come from the loader's last batch, and each of them ends its window, so that the "
      "optimizer steps more often than gradient_accumulation_steps says; where batches are cut "
      "in the program set sync_with_dataloader false, and say {.ends_window = true} in the last "
      "micro-batch\n";
  std::fputs(told.c_str(), stderr);
}

void Accelerator::set_gradient_accumulation_steps(int64_t steps) {
  TS_CHECK(steps >= 1, "set_gradient_accumulation_steps", "must be at least 1; got ", steps);
  state_->settle_steps(steps, true);
  state_->steps = steps;
}
void Accelerator::set_gradient_accumulation_steps(nn::ModuleBase& model, int64_t steps) {
  TS_CHECK(steps >= 1, "set_gradient_accumulation_steps", "must be at least 1; got ", steps);
  const auto& record = state_->at(model, "set_gradient_accumulation_steps");
  state_->settle_steps(steps, false);
  record->steps = steps;
}
int64_t Accelerator::gradient_accumulation_steps() const { return state_->steps; }
bool Accelerator::sync_gradients() const { return state_->sync_gradients; }

double Accelerator::State::weigh(std::optional<double> given) {
  return weights.weigh(given, loader_plan->active(), *dims, joined, counters.nominal);
}

void Accelerator::State::check_one_batch(double weight) const {
  if (!dims->mesh().has("tp") || capturing != nullptr) return;
  const data::LoaderBase* const loader = loader_plan->active();
  const data::LoaderCursor read = loader == nullptr ? data::LoaderCursor{-1, -1} : loader->cursor();
  // All that reduce and gather together compare, or ranks that read alike would wait for others that
  // throw. Those of one micro-batch lie side by side, as tp is the innermost axis.
  distributed::Group& ranks = dims->mesh().group("stage");
  const int64_t together = dims->mesh().size("tp");
  const Tensor own =
      tensor({static_cast<double>(read.epoch), static_cast<double>(read.position), weight}, kF64);
  const Tensor all = raw::empty({ranks.size(), 3}, kF64);
  ranks.all_gather(all, own, {.channel = distributed::Channel::kControl, .tag = "one_batch"})
      .wait();
  const auto* const numbers = all.data_as<double>();
  const auto told = [&](int64_t rank) {
    PlainText<std::ostringstream> out;
    out << "tp rank " << rank % together << " has position " << numbers[3 * rank + 1]
        << " of epoch " << numbers[3 * rank] << " with weight " << numbers[3 * rank + 2];
    return out.str();
  };
  for (int64_t rank = 0; rank < ranks.size(); ++rank) {
    const int64_t first = rank / together * together;
    TS_CHECK(std::equal(numbers + 3 * first, numbers + 3 * first + 3, numbers + 3 * rank),
             "backward", "ranks that calculate one micro-batch together have read different ones: ",
             told(first), ", ", told(rank), " (ranks ", first, " and ", rank, " of '", ranks.name(),
             "')", "; let all ranks take the same steps through a prepared loader (-1: none)");
  }
}

distributed::StepPlan Accelerator::State::plan_backward(const ModelRecord& record,
                                                        const StepWindow* window, bool more,
                                                        double weight) const {
  return weights.plan_backward(record, window, more, weight, loader_plan->active());
}

// ---- Backward ----------------------------------------------------------------------------------

// One call of backward().
class Accelerator::State::BackwardCall {
 public:
  BackwardCall(State& state, const Tensor& loss, const BackwardOptions& options);
  void run();

 private:
  // A model whose gradients may be reduced, and how often they were before.
  struct Expected {
    ModelRecord* record;
    int64_t reductions;
    bool is_reduced() const {
      const distributed::BackwardPass& pass = record->parallel->pass();
      return pass.reductions() > reductions && !pass.holds_unreduced();
    }
  };
  void begin(const std::shared_ptr<ModelRecord>& record);
  void propagate() const;
  void reduce_pending() const;
  void fail(const std::string& what, bool others_know) const;
  void close_windows() const;
  void add_kept() const;

  State& state_;
  const Tensor& loss_;
  const BackwardOptions& options_;
  const bool in_window_;
  std::vector<std::shared_ptr<ModelRecord>> own_;  // of the micro-batch
  double weight_ = 1;
  bool undivided_ = false;
  double seed_ = 1;  // of the loss, its scale for f16 aside
  std::vector<Expected> reducing_;
  std::unordered_set<TensorImpl*> resumed_;  // parameters whose mean is a sum again
};

Accelerator::State::BackwardCall::BackwardCall(State& state, const Tensor& loss,
                                               const BackwardOptions& options)
    : state_(state), loss_(loss), options_(options), in_window_(!state.open.empty()) {
  TS_CHECK(in_window_ || !options.more, "backward",
           "more says that another backward of the micro-batch follows, and none is open; call it "
           "where accumulate() has opened one");
  weight_ = state.weigh(options.weight);
  state.check_one_batch(weight_);
  if (in_window_) own_ = state.open.back().records;
  for (OptimizerRecord* record : state.awaiting(in_window_ ? own_ : state.models)) {
    record->clearing = OptimizerRecord::Clearing::kNone;
  }
  WindowWeights::add(own_, weight_, options.weight.has_value());
  undivided_ = state.weights.is_undivided(own_);
  seed_ = state.weights.seed_of(loss, weight_, own_, undivided_, state.steps);
}

void Accelerator::State::BackwardCall::run() {
  for (const auto& record : state_.models) begin(record);
  propagate();
  reduce_pending();
  for (const auto& record : in_window_ ? own_ : state_.models) record->consumed = false;
  close_windows();
  add_kept();
  for (const auto& record : state_.models) record->kept.note_versions();
  if (in_window_) return;
  state_.counters.micro_batches += state_.data_ranks;
  state_.begin_random_numbers();
}

// What the model does with the gradients that come, and with those that are there.
void Accelerator::State::BackwardCall::begin(const std::shared_ptr<ModelRecord>& record) {
  const bool is_own = std::ranges::find(own_, record) != own_.end();
  const StepWindow& window = record->window;
  bool at_once = undivided_;
  if (record->parallel) {
    const distributed::StepPlan plan =
        state_.plan_backward(*record, is_own ? &window : nullptr, options_.more, weight_);
    at_once = plan.sync_gradients && (!is_own || (window.is_whole() && !options_.more));
    record->parallel->set_plan(plan);
    reducing_.push_back({record.get(), record->parallel->pass().reductions()});
  }
  record->kept.forget_cleared();
  const bool continues =
      record->reduces() ? record->parallel->pass().holds_unreduced() : !is_own || window.pending();
  if (is_own && window.reduced()) {
    // A mean over ranks stays as it is where the loss is another model's: nothing reduces it again.
    if (!record->reduces() || record->is_reached_by(loss_))
      state_.weights.resume(*record, resumed_);
  } else if (!continues) {
    state_.weights.begin_sum(*record, loss_, at_once);
  } else if (is_own && record->reduces()) {
    record->parallel->pass().resume_undivided();
  }
}

void Accelerator::State::BackwardCall::propagate() const {
  LossScaling& scaling = state_.loss_scaling;
  const bool on_device = scaling.is_on_device();
  const double scale = on_device ? seed_ : seed_ * scaling.scale();
  // A 16-bit loss is scaled behind a cast: 65536 is more than f16 holds.
  const bool narrow = loss_.dtype() == kF16 || loss_.dtype() == kBF16;
  const Tensor total = on_device              ? scaling.scaler()->scale(loss_)
                       : narrow && scale != 1 ? loss_.to(kF32)
                                              : loss_;
  const Tensor seed =
      scale == 1 ? Tensor() : raw::full(total.shape(), scale, total.dtype(), total.device());
  try {
    tessera::backward(
        total, seed,
        {.retain_graph = options_.retain_graph, .create_graph = options_.create_graph});
  } catch (const DistributedError& error) {
    fail(error.what(), true);
    throw;
  } catch (const std::exception& error) {
    fail(error.what(), false);
    throw;
  } catch (...) {
    fail("an exception", false);
    throw;
  }
}

// Of models whose window ends here, and that this loss does not lead to: backwards before it have
// added to them, of another loss or in other micro-batches.
void Accelerator::State::BackwardCall::reduce_pending() const {
  if (options_.more) return;
  for (const auto& record : own_) {
    if (!record->reduces() || !record->window.is_boundary()) continue;
    distributed::BackwardPass& pass = record->parallel->pass();
    if (pass.holds_unreduced() && pass.plan.sync_gradients && pass.plan.is_last) {
      pass.reduce_alone();
    }
  }
}

// The other ranks wait for what this one would have reduced or gathered. Of a failed collective
// they know, but where they wait in others.
void Accelerator::State::BackwardCall::fail(const std::string& what, bool others_know) const {
  for (const Expected& expected : reducing_) {
    distributed::BackwardPass& pass = expected.record->parallel->pass();
    if (pass.reductions() > expected.reductions) continue;
    if (others_know && !pass.tells_failures()) continue;
    if (pass.in_backward() || expected.record->is_reached_by(loss_)) pass.fail_backward(what);
  }
}

void Accelerator::State::BackwardCall::close_windows() const {
  std::vector<std::shared_ptr<ModelRecord>> closed;
  for (const auto& record : own_) {
    if (record->reduces()) {
      const auto expected = std::ranges::find(reducing_, record.get(), &Expected::record);
      if (expected->is_reduced()) {
        record->window.set_reduced();
      } else if (record->parallel->pass().holds_unreduced()) {
        record->window.set_pending();  // what goes on in the next micro-batch is no mean yet
      }
    } else if (record->window.is_boundary() && !options_.more) {
      closed.push_back(record);
      record->window.set_reduced();
    } else {
      record->window.set_pending();
    }
    record->owes_step = record->window.reduced();
  }
  if (!in_window_) state_.loose_gradients = true;
  state_.weights.divide(closed, undivided_);
}

// To the means that this backward has reduced.
void Accelerator::State::BackwardCall::add_kept() const {
  for (const Expected& expected : reducing_) {
    ModelRecord& record = *expected.record;
    if (record.kept.empty() || !expected.is_reduced()) continue;
    record.kept.add();
    record.parallel->pass().accept_written();
  }
}

void Accelerator::backward(const Tensor& loss, const BackwardOptions& options,
                           const SourceLocation& where) {
  const distributed::CallerScope caller(where);
  State& state = *state_;
  state.refuse_in_capture("backward");
  state.refuse_in_graphed_step(options.weight.has_value(), "backward", "a weight that is given");
  TS_CHECK_SHAPE(loss.defined() && loss.numel() == 1, "backward",
                 "the loss must have one element; got ", loss, "; take its mean");
  state.forget_dead();
  state.end_left_windows();
  for (const auto& record : state.models) {
    record->check_undivided("backward");
    record->check_left_alone();
  }
  state.update_scale();
  state.loss_scaling.forget_norms();
  state.check_micro_batch();
  State::BackwardCall(state, loss, options).run();
}

AcceleratorScope Accelerator::no_sync(nn::ModuleBase& model) {
  const auto record = state_->at(model, "no_sync");
  record->check_undivided("no_sync");
  ++record->no_sync;
  record->plan_forward(record->window.is_boundary());
  return AcceleratorScope([record] {
    --record->no_sync;
    record->plan_forward(record->window.is_boundary());
  });
}

AcceleratorScope Accelerator::without_reduction(nn::ModuleBase& model) {
  const auto record = state_->at(model, "without_reduction");
  record->check_undivided("without_reduction");
  TS_CHECK(!record->local, "without_reduction", "a scope of this model is open already");
  record->local = true;
  record->plan_forward(false);
  return AcceleratorScope([record] {
    record->local = false;
    record->plan_forward(record->window.is_boundary());
  });
}

AcceleratorScope Accelerator::trigger_sync_in_backward(nn::ModuleBase& model) {
  const auto record = state_->at(model, "trigger_sync_in_backward");
  ++record->triggered;
  return AcceleratorScope([record] { --record->triggered; });
}

// ---- Gates -------------------------------------------------------------------------------------

StepDecision Accelerator::State::may_step(OptimizerRecord& record) {
  refuse_in_capture("a step of a prepared optimizer");
  end_left_windows();
  clear_awaited(models_of(record));
  record.was_skipped();  // before skip_reason() is another
  const bool clipped = std::exchange(record.clipped, false);
  record.clip.reset();  // the step takes the factor, whatever it then does
  // And with it what unscales them.
  const auto leave_out = [&](const char* reason) {
    loss_scaling.forget(*record.optimizer);
    return StepDecision::skip(reason);
  };
  if (!at_boundary(record)) return leave_out("gradients are being accumulated");
  record.attempted = true;
  settle_gradients(record);
  const auto was_left = [](const auto& model) { return model->window.left(); };
  if (std::ranges::any_of(models_of(record), was_left)) {
    return leave_out("the loop over the loader was left before the window's last micro-batch");
  }
  begin_masters(record);
  bool has_weight = models_of(record).empty();
  for (const auto& model : models_of(record)) {
    TS_CHECK_AS(AutogradError, !model->window.pending() || model->no_sync > 0, "step",
                "the gradients of ", model->model->type_name(),
                " were not reduced: no backward came to it in the last micro-batch of its window; "
                "call backward() in every micro-batch that accumulate() opens");
    // A window without any backward has no gradients to judge.
    has_weight = has_weight || !model->window.reduced() || model->has_weight();
  }
  if (!has_weight) return leave_out("no micro-batch of the window has any weight");
  for (const auto& model : models_of(record)) {
    // All backwards of the window have noted their maxima; of several optimizers the first is here.
    if (!model->consumed && model->policy.fp8()) model->policy.fp8()->update();
    model->consumed = true;
  }
  clipping.before_step(record, clipped);
  std::string overflow = loss_scaling.before_step(*record.optimizer);
  return overflow.empty() ? StepDecision{} : StepDecision::skip(std::move(overflow));
}

// Most loops of PyTorch call zero_grad() in front of the backward, and what it is to clear there is the
// window before.
bool Accelerator::State::may_clear(OptimizerRecord& record) {
  end_left_windows();
  const auto& own = models_of(record);
  if (!at_boundary(record)) {
    const auto is_untouched = [](const auto& model) { return model->window.is_untouched(); };
    if (own.empty() || !std::ranges::all_of(own, is_untouched)) return false;
  } else if (record.clearing != OptimizerRecord::Clearing::kNow) {
    const auto awaits_last = [](const auto& model) { return model->window.awaits_last(); };
    if (std::ranges::any_of(own, awaits_last)) {
      record.clearing = OptimizerRecord::Clearing::kWaits;
      return false;
    }
  }
  record.clearing = OptimizerRecord::Clearing::kNone;
  settle_gradients(record);
  Clipping::drop(record);  // of gradients that go
  loss_scaling.forget(*record.optimizer);
  return true;
}

std::vector<OptimizerRecord*> Accelerator::State::awaiting(
    const std::vector<std::shared_ptr<ModelRecord>>& of) {
  std::vector<OptimizerRecord*> found;
  for (const auto& record : optimizers) {
    const auto is_of = [&](const auto& model) { return std::ranges::find(of, model) != of.end(); };
    if (record->clearing == OptimizerRecord::Clearing::kWaits &&
        std::ranges::any_of(models_of(*record), is_of)) {
      found.push_back(record.get());
    }
  }
  return found;
}

void Accelerator::State::clear_awaited(const std::vector<std::shared_ptr<ModelRecord>>& of) {
  for (OptimizerRecord* record : awaiting(of)) {
    record->clearing = OptimizerRecord::Clearing::kNow;
    record->optimizer->zero_grad();
  }
}

StepDecision Accelerator::State::may_step_schedule_of(const optim::Optimizer& optimizer) {
  OptimizerRecord* record = find(optimizer);
  if (!(record != nullptr ? at_boundary(*record) : sync_gradients)) {
    return StepDecision::skip("gradients are being accumulated");
  }
  if (record != nullptr && record->was_skipped()) {
    return StepDecision::skip("its optimizer left its step out: " +
                              record->optimizer->skip_reason());
  }
  const bool each_rank =
      settings.schedule_unit.value == ScheduleUnit::kHuggingFace && !settings.split_batches;
  return {.run = true, .reason = {}, .count = each_rank ? data_ranks : 1};
}

// After the steps of all optimizers, before the next loss is scaled.
void Accelerator::State::update_scale() {
  clipping.apply();
  loss_scaling.update();
}

// ---- Clipping and scaling ----------------------------------------------------------------------

Tensor Accelerator::clip_grad_norm(const TensorList& parameters, double max_norm,
                                   double norm_type) {
  state_->forget_dead();
  return state_->clipping.clip_norm(parameters, max_norm, norm_type);
}

void Accelerator::clip_grad_value(const TensorList& parameters, double limit) {
  state_->clipping.clip_value(parameters, limit);
}

double Accelerator::loss_scale() const { return state_->loss_scaling.scale(); }

AcceleratorScope Accelerator::autocast(bool enabled) const {
  const Precision precision = state_->settings.mixed_precision;
  if (precision == Precision::kNo) return AcceleratorScope({});
  const DType low = precision == Precision::kFP16 ? kF16 : kBF16;
  return AcceleratorScope(
      [guard = std::make_shared<AutocastGuard>(low, enabled)]() mutable { guard.reset(); });
}

bool Accelerator::optimizer_step_was_skipped() const {
  state_->loss_scaling.check_steps_are_known();
  state_->forget_dead();
  return std::ranges::any_of(state_->optimizers,
                             [](const auto& record) { return record->was_skipped(); });
}
bool Accelerator::optimizer_step_was_skipped(const optim::Optimizer& optimizer) const {
  state_->loss_scaling.check_steps_are_known();
  OptimizerRecord* record = state_->find(optimizer);
  TS_CHECK(record != nullptr, "optimizer_step_was_skipped", "the optimizer was not prepared");
  return record->was_skipped();
}

void Accelerator::join_uneven_inputs(nn::ModuleBase& model, const std::function<void()>& body,
                                     const JoinUnevenOptions& options,
                                     const SourceLocation& where) {
  const auto record = state_->at(model, "join_uneven_inputs");
  record->check_undivided("join_uneven_inputs");
  if (!record->parallel) return body();
  const ScopedValue<bool> joined(state_->joined, true);
  const ScopedValue<bool> by_count(state_->sync_with_dataloader, false);
  const accelerate::EvenBatchesScope uneven(*state_->loader_plan, options.even_batches);
  distributed::Join join =
      record->parallel->join({.throw_on_early_end = options.throw_on_early_end});
  body();
  const distributed::CallerScope caller(where);
  join.finish();
}

}  // namespace tessera
