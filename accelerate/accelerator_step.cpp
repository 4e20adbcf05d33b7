// Micro-batches, the windows they make up, and who may step at their end.
#include <algorithm>
#include <cmath>
#include <limits>
#include <unordered_set>

#include <tessera/accelerate/accelerator_state.h>
#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/graph.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/context.h>
#include <tessera/core/cuda/graph.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/optim/multi_tensor.h>
#include <tessera/core/random.h>
#include <tessera/core/tensor/placement_slot.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/data/dataloader.h>
#include <tessera/distributed/transport/caller.h>
#include <tessera/distributed/transport/collectives.h>
#include <tessera/optim/clip.h>

namespace tessera {
namespace {

using distributed::Channel;
using optim::StepDecision;

// Random numbers of a micro-batch: room for this many streams, behind those that a program takes
// by itself.
constexpr int kStreamBits = 24;

double* value_of(const Tensor& tensor) { return tensor.data_as<double>(); }

TensorList gradients_of(const NamedTensors& parameters, std::unordered_set<TensorImpl*>& seen) {
  TensorList gradients;
  for (const auto& [name, tensor] : parameters) {
    if (!seen.insert(tensor.impl()).second) continue;
    if (Tensor gradient = tensor.grad(); gradient.defined()) {
      gradients.push_back(std::move(gradient));
    }
  }
  return gradients;
}

// Of a model's or an optimizer's parameters: the same answer on every rank.
bool holds_parts(const auto& record) {
  return std::ranges::any_of(record->parameters, [](const NamedTensor& named) {
    return placement_slot(named.tensor) != nullptr;
  });
}

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
void Accelerator::State::begin_random_numbers() {
  const auto micro = static_cast<uint64_t>(counters.micro_batches + data_rank + 1);
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
  State::OpenMicro micro{.id = state.next_id++, .records = {}};
  for (const nn::ModuleBase* model : models)
    micro.records.push_back(state.at(*model, "accumulate"));
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
    sync = sync && record->window.is_boundary();
    record->plan_forward(
        record->reduces_in(record->window.is_boundary(), state.settings.sync_each_batch));
  }
  state.sync_gradients = sync;
  auto scope = std::make_unique<MicroBatch::Scope>(state_, micro.id);
  state.open.push_back(std::move(micro));
  return MicroBatch(std::move(scope), sync);
}

void Accelerator::set_gradient_accumulation_steps(int64_t steps) {
  TS_CHECK(steps >= 1, "set_gradient_accumulation_steps", "must be at least 1; got ", steps);
  state_->steps = steps;
}
void Accelerator::set_gradient_accumulation_steps(nn::ModuleBase& model, int64_t steps) {
  TS_CHECK(steps >= 1, "set_gradient_accumulation_steps", "must be at least 1; got ", steps);
  state_->at(model, "set_gradient_accumulation_steps")->steps = steps;
}
int64_t Accelerator::gradient_accumulation_steps() const { return state_->steps; }
bool Accelerator::sync_gradients() const { return state_->sync_gradients; }

// The weight of this micro-batch in units of the nominal one.
double Accelerator::State::weigh(std::optional<double> weight) {
  if (divides_as_huggingface()) {
    TS_CHECK(!weight, "backward", "loss_weighting=huggingface (",
             settings.loss_weighting.origin.describe(),
             ") gives every micro-batch the same weight; got ", *weight,
             "; leave the weight out, or take loss_weighting=samples");
    return 1;
  }
  if (weight) {
    TS_CHECK(*weight >= 0 && std::isfinite(*weight), "backward",
             "a weight counts samples or tokens and is not negative; got ", *weight);
    if (counters.nominal_weight == 0) counters.nominal_weight = agree_on_nominal(*weight);
    return *weight / counters.nominal_weight;
  }
  const data::LoaderBase* loader = loader_plan->active();
  if (loader == nullptr) return 1;
  if (counters.nominal_samples == 0) {
    counters.nominal_samples = static_cast<double>(loader->options().batch_size) /
                               (settings.split_batches ? data_ranks : 1);
  }
  return static_cast<double>(loader->batch_samples()) / counters.nominal_samples;
}

// Rank 0's first weight: all ranks must divide by the same. Ranks that have no more batches could
// not be asked.
double Accelerator::State::agree_on_nominal(double weight) {
  if (data_ranks > 1 && !joined) {
    const Tensor nominal = raw::empty({1}, kF64);
    *value_of(nominal) = weight;
    dealt_ranks->broadcast(nominal, 0, {.channel = Channel::kControl, .tag = "nominal_weight"})
        .wait();
    weight = *value_of(nominal);
  } else if (joined) {
    weight = 1;
  }
  return weight > 0 ? weight : 1;
}

// What the reduction does where there is one: the sum becomes the mean.
void Accelerator::State::divide(std::span<const std::shared_ptr<ModelRecord>> records,
                                bool undivided) {
  std::unordered_set<TensorImpl*> seen;
  for (const auto& record : records) {
    const double weight = record->window.weight();
    record->divisor = undivided || divides_as_huggingface() || weight == 0 ? 1 : weight;
    if (record->divisor != 1) {
      const double factor = 1 / record->divisor;
      kernels::multi_tensor_scale(gradients_of(record->parameters, seen), &factor);
    }
    record->kept.add();
  }
}

// A mean that a further backward adds to becomes a sum again.
void Accelerator::State::resume(ModelRecord& record) {
  if (!record.kept.empty()) {
    record.kept.subtract();
    if (record.reduces()) record.parallel->pass().accept_written();
  }
  if (record.reduces()) {
    distributed::BackwardPass& pass = record.parallel->pass();
    return divides_as_huggingface() ? pass.keep_gradients() : pass.resume_sum();
  }
  if (record.divisor == 1) return;
  std::unordered_set<TensorImpl*> seen;
  kernels::multi_tensor_scale(gradients_of(record.parameters, seen), &record.divisor);
}

// ---- Gradients that are there before a window --------------------------------------------------

void KeptGradients::take(const NamedTensors& parameters) {
  const NoGradGuard no_grad;
  entries_.clear();
  for (const auto& [name, parameter] : parameters) {
    const Tensor gradient = parameter.grad();
    if (!gradient.defined()) continue;
    const Tensor elements = raw::alias(gradient);  // also where it is a part
    entries_.push_back({parameter, elements.clone(), 0});
    zero_(elements);
  }
  note_versions();
}

void KeptGradients::apply(double factor) {
  const NoGradGuard no_grad;
  forget_cleared();
  for (const Entry& entry : entries_) {
    add_(raw::alias(entry.parameter.grad()), entry.value, factor);
  }
  note_versions();
}
void KeptGradients::add() { apply(1); }
void KeptGradients::subtract() { apply(-1); }

void KeptGradients::scale(double factor) {
  const NoGradGuard no_grad;
  for (const Entry& entry : entries_) mul_(entry.value, Scalar(factor));
  note_versions();
}

void KeptGradients::note_versions() {
  for (Entry& entry : entries_) {
    if (const Tensor gradient = entry.parameter.grad(); gradient.defined()) {
      entry.version = gradient.version();
    }
  }
}

void KeptGradients::forget_cleared() {
  std::erase_if(entries_, [](const Entry& entry) {
    const Tensor gradient = entry.parameter.grad();
    if (!gradient.defined()) return true;
    return gradient.version() != entry.version &&
           kernels::multi_tensor_norm({&gradient, 1}, std::numeric_limits<double>::infinity()) == 0;
  });
}

// Before the first backward of a sum: what lies in `.grad` stays, in addition to it. `at_once`:
// this backward is all of it.
void Accelerator::State::begin_sum(ModelRecord& record, const Tensor& loss, bool at_once) {
  record.kept.clear();
  if (divides_as_huggingface()) {  // a mean over the ranks: adding to it is right as it is
    if (record.reduces()) record.parallel->pass().keep_gradients();
    return;
  }
  const auto has_gradient = [](const NamedTensor& named) { return named.tensor.grad().defined(); };
  if (std::ranges::none_of(record.parameters, has_gradient)) return;
  if (!record.is_reached_by(loss)) return;
  if (!at_once) {
    record.kept.take(record.parameters);
  } else if (record.reduces()) {
    record.parallel->pass().keep_gradients();
  }
}

// What the loss is multiplied by, its scale for f16 aside. `undivided`: nothing will divide by the
// weight.
double Accelerator::State::seed_of(const Tensor& loss, double weight,
                                   std::span<const std::shared_ptr<ModelRecord>> own,
                                   bool undivided) const {
  if (divides_as_huggingface()) {
    const std::optional<int64_t> of_model = own.empty() ? std::nullopt : own.front()->steps;
    return 1 / static_cast<double>(of_model.value_or(steps));
  }
  if (undivided) return weight == 0 ? 0 : 1;
  if (weight == 1) return 1;
  const auto leads = [&](const auto& record) { return record->is_reached_by(loss); };
  const auto leads_where_shared = [&](const auto& record) {
    return record->reduces() && leads(record);
  };
  return std::ranges::any_of(own, leads) || std::ranges::any_of(models, leads_where_shared) ? weight
                                                                                            : 1;
}

// `window`: of the model's own micro-batch; null where a loss of others comes to it.
distributed::StepPlan Accelerator::State::plan_backward(const ModelRecord& record,
                                                        const StepWindow* window, bool more,
                                                        double weight) const {
  bool sync = record.no_sync == 0 && !record.local;
  const bool last = window == nullptr || (window->is_boundary() && !more);
  if (window != nullptr) sync = sync && record.reduces_in(last, settings.sync_each_batch);
  // Accelerate divides in every micro-batch that is reduced.
  const bool divides_each = divides_as_huggingface() && !record.parallel->reduces_every_backward();
  const data::LoaderBase* const loader = loader_plan->active();
  const data::LoaderCursor batch =
      loader == nullptr ? data::LoaderCursor{-1, -1} : loader->cursor();
  return {.micro_index = window != nullptr ? window->index() : 0,
          .is_last = last || divides_each,
          .sync_gradients = sync || record.triggered > 0,
          .weight = window != nullptr ? window->weight() : weight,
          .epoch = batch.epoch,
          .position = batch.position,
          .all_reduce = last};
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
  for (const auto& record : state.models) record->check_left_alone();
  state.update_scale();
  state.finite_gradients.clear();
  state.check_micro_batch();
  const bool in_window = !state.open.empty();
  const bool more = options.more;
  TS_CHECK(in_window || !more, "backward",
           "more says that another backward of the micro-batch follows, and none is open; call it "
           "where accumulate() has opened one");
  const double weight = state.weigh(options.weight);
  const std::vector<std::shared_ptr<ModelRecord>> own =
      in_window ? state.open.back().records : std::vector<std::shared_ptr<ModelRecord>>();
  for (const auto& record : own) {
    StepWindow& window = record->window;
    TS_CHECK(window.weight() == 0 || record->explicit_weights == options.weight.has_value(),
             "backward", "the window's micro-batches are weighed by ",
             record->explicit_weights ? "weights that were given" : "their samples",
             " so far, this one by the other; give all of a window a weight, or none");
    record->explicit_weights = options.weight.has_value();
    TS_CHECK(window.add_weight(weight), "backward",
             "a micro-batch has one weight; its first backward had ", window.micro_weight(),
             " of the nominal one, this one has ", weight, "; give all of its losses the same");
  }
  // Outside of a window and without a reduction there is nothing to weigh against, and where no
  // rank shares anything, a window of one micro-batch has its mean already.
  const bool undivided =
      std::ranges::none_of(state.models, [](const auto& record) { return record->reduces(); }) &&
      std::ranges::all_of(own, [](const auto& record) { return record->window.is_whole(); });
  const double seed_value = state.seed_of(loss, weight, own, undivided);

  struct Expected {
    ModelRecord* record;
    int64_t reductions;
  };
  std::vector<Expected> reducing;
  for (const auto& record : state.models) {
    const bool is_own = std::ranges::find(own, record) != own.end();
    const StepWindow& window = record->window;
    bool at_once = undivided;
    if (record->parallel) {
      const distributed::StepPlan plan =
          state.plan_backward(*record, is_own ? &window : nullptr, more, weight);
      at_once = plan.sync_gradients && (!is_own || (window.is_whole() && !more));
      record->parallel->set_plan(plan);
      reducing.push_back({record.get(), record->parallel->pass().reductions()});
    }
    record->kept.forget_cleared();
    const bool continues = record->reduces() ? record->parallel->pass().holds_unreduced()
                                             : !is_own || window.pending();
    if (is_own && window.reduced()) {
      state.resume(*record);
    } else if (!continues) {
      state.begin_sum(*record, loss, at_once);
    } else if (is_own && record->reduces()) {
      record->parallel->pass().resume_undivided();
    }
  }

  const bool on_device = state.scales_on_device();
  const double scale = on_device ? seed_value : seed_value * loss_scale();
  // A 16-bit loss is scaled behind a cast: 65536 is more than f16 holds.
  const bool narrow = loss.dtype() == kF16 || loss.dtype() == kBF16;
  const Tensor total = on_device              ? state.scaler->scale(loss)
                       : narrow && scale != 1 ? loss.to(kF32)
                                              : loss;
  const Tensor seed =
      scale == 1 ? Tensor() : raw::full(total.shape(), scale, total.dtype(), total.device());
  // The other ranks wait for what this one would have reduced or gathered. Of a failed collective
  // they know, but where they wait in others.
  const auto fail = [&](const std::string& what, bool others_know) {
    for (const Expected& expected : reducing) {
      distributed::BackwardPass& pass = expected.record->parallel->pass();
      if (pass.reductions() > expected.reductions) continue;
      if (others_know && !pass.tells_failures()) continue;
      if (pass.in_backward() || expected.record->is_reached_by(loss)) pass.fail_backward(what);
    }
  };
  try {
    tessera::backward(total, seed,
                      {.retain_graph = options.retain_graph, .create_graph = options.create_graph});
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

  for (const auto& record : in_window ? own : state.models) record->consumed = false;
  std::vector<std::shared_ptr<ModelRecord>> closed;
  for (const auto& record : own) {
    if (record->reduces()) {
      const auto expected = std::ranges::find(reducing, record.get(), &Expected::record);
      // What goes on in the next micro-batch is no mean yet.
      const distributed::BackwardPass& pass = record->parallel->pass();
      const bool reduced = pass.reductions() > expected->reductions && !pass.holds_unreduced();
      reduced ? record->window.set_reduced() : record->window.set_pending();
    } else if (record->window.is_boundary() && !more) {
      closed.push_back(record);
      record->window.set_reduced();
    } else {
      record->window.set_pending();
    }
  }
  state.divide(closed, undivided);
  for (const Expected& expected : reducing) {
    ModelRecord& record = *expected.record;
    const distributed::BackwardPass& pass = record.parallel->pass();
    if (record.kept.empty() || pass.reductions() == expected.reductions || pass.holds_unreduced()) {
      continue;
    }
    record.kept.add();
    record.parallel->pass().accept_written();
  }
  for (const auto& record : state.models) record->kept.note_versions();
  if (!in_window) {
    state.counters.micro_batches += state.data_ranks;
    state.begin_random_numbers();
  }
}

AcceleratorScope Accelerator::no_sync(nn::ModuleBase& model) {
  const auto record = state_->at(model, "no_sync");
  ++record->no_sync;
  record->plan_forward(record->window.is_boundary());
  return AcceleratorScope([record] {
    --record->no_sync;
    record->plan_forward(record->window.is_boundary());
  });
}

AcceleratorScope Accelerator::without_reduction(nn::ModuleBase& model) {
  const auto record = state_->at(model, "without_reduction");
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

const std::vector<std::shared_ptr<ModelRecord>>& Accelerator::State::models_of(
    OptimizerRecord& record) {
  if (record.generation == generation) return record.models;
  record.generation = generation;
  record.models.clear();
  std::unordered_set<TensorImpl*> tensors;
  for (const auto& [name, tensor] : record.parameters) tensors.insert(tensor.impl());
  for (const auto& model : models) {
    if (std::ranges::any_of(model->parameters, [&](const NamedTensor& named) {
          return tensors.contains(named.tensor.impl());
        })) {
      record.models.push_back(model);
    }
  }
  return record.models;
}

bool Accelerator::State::at_boundary(OptimizerRecord& record) {
  const auto& models = models_of(record);
  if (models.empty()) return sync_gradients;
  return std::ranges::all_of(models, [](const auto& model) { return model->window.is_boundary(); });
}

StepDecision Accelerator::State::may_step(OptimizerRecord& record) {
  refuse_in_capture("a step of a prepared optimizer");
  record.was_skipped();  // before skip_reason() is another
  const bool clipped = std::exchange(record.clipped, false);
  record.clip.reset();  // the step takes the factor, whatever it then does
  // And with it what unscales them.
  const auto leave_out = [&](const char* reason) {
    if (scaler) scaler->forget(*record.optimizer);
    return StepDecision::skip(reason);
  };
  if (!at_boundary(record)) return leave_out("gradients are being accumulated");
  record.attempted = true;
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
  if (settings.gradient_clipping > 0 && !clipped) {
    clip_by_setting(record);
    record.clip.reset();
  }
  if (!scaler) return {};
  const Tensor norm = take_finite_norm(*record.optimizer);
  if (norm.defined()) {
    if (!scaler->is_unscaled(*record.optimizer)) scaler->unscale(*record.optimizer);
    scaler->note_norm(*record.optimizer, norm);
  }
  std::string overflow = scaler->before_step(*record.optimizer);
  return overflow.empty() ? StepDecision{} : StepDecision::skip(std::move(overflow));
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

// Whether the parameters' models are all at the boundary.
bool Accelerator::State::clips(const TensorList& parameters) const {
  std::unordered_set<TensorImpl*> tensors;
  for (const Tensor& tensor : parameters) tensors.insert(tensor.impl());
  bool known = false;
  for (const auto& record : models) {
    for (const auto& [name, tensor] : record->parameters) {
      if (!tensors.contains(tensor.impl())) continue;
      if (!record->window.is_boundary()) return false;
      known = true;
      break;
    }
  }
  return known || sync_gradients;
}

// The prepared optimizer that has exactly these gradients: what scales its next step scales nothing
// else.
OptimizerRecord* Accelerator::State::owner_of(const TensorList& parameters) {
  std::unordered_set<const TensorImpl*> given;
  for (const Tensor& parameter : parameters) {
    if (parameter.grad().defined()) given.insert(parameter.impl());
  }
  if (given.empty()) return nullptr;
  for (const auto& record : optimizers) {
    size_t own = 0;
    const bool all = std::ranges::all_of(record->parameters, [&](const NamedTensor& named) {
      if (!named.tensor.grad().defined()) return true;
      ++own;
      return given.contains(named.tensor.impl());
    });
    if (all && own == given.size()) return record.get();
  }
  return nullptr;
}

Tensor Accelerator::State::fold_clip(OptimizerRecord& owner, const TensorList& parameters,
                                     double max_norm, double norm_type) {
  optim::Optimizer& optimizer = *owner.optimizer;
  if (scaler && !scaler->is_unscaled(optimizer)) scaler->unscale(optimizer);
  if (!owner.clip) {
    owner.clip = {optimizer.next_step().data_as<double>()[0], optimizer.next_step_factor()};
  }
  const Tensor norm = optim::clip_grad_norm(parameters, max_norm,
                                            {.norm_type = norm_type, .fold_into = &optimizer});
  return norm;
}

// As a program that clips all parameters of the optimizer before its step. Where it has none with a
// gradient there is nothing to clip; ranks that hold parts all have the same ones.
void Accelerator::State::clip_by_setting(OptimizerRecord& record) {
  TensorList parameters;
  bool any = false;
  for (const auto& [name, tensor] : record.parameters) {
    any = any || tensor.grad().defined();
    parameters.push_back(tensor);
  }
  if (!any) return;
  note_norm(parameters, fold_clip(record, parameters, settings.gradient_clipping, 2));
}

void Accelerator::State::drop_clip(OptimizerRecord& record) {
  record.clipped = false;
  if (!record.clip) return;
  record.optimizer->next_step().data_as<double>()[0] = record.clip->before;
  record.optimizer->scale_next_step(record.clip->before_on_device);
  record.clip.reset();
}

// No step came: what is added to the gradients now is added to clipped ones.
void Accelerator::State::apply_clip(OptimizerRecord& record) {
  if (!record.clip) return;
  const NoGradGuard no_grad;
  optim::Optimizer& optimizer = *record.optimizer;
  std::unordered_set<TensorImpl*> seen;
  const TensorList gradients = gradients_of(record.parameters, seen);
  const double factor = optimizer.next_step().data_as<double>()[0] / record.clip->before;
  if (factor != 1) kernels::multi_tensor_scale(gradients, &factor);
  if (Tensor on_device = optimizer.next_step_factor(); on_device.defined()) {
    if (const Tensor& before = record.clip->before_on_device; before.defined()) {
      on_device = on_device / before;
    }
    for (const Tensor& gradient : gradients) {
      mul_(raw::alias(gradient), on_device.to(gradient.dtype()));  // of a part its elements
    }
  }
  drop_clip(record);
}

Tensor Accelerator::clip_grad_norm(const TensorList& parameters, double max_norm,
                                   double norm_type) {
  State& state = *state_;
  state.forget_dead();
  ModelRecord* const holder = parameters.empty() ? nullptr : state.holder_of(parameters.front());
  if (!state.clips(parameters)) {
    if (holder != nullptr) {
      const auto last = holder->norms.find(parameters.front().impl());
      if (last != holder->norms.end()) return last->second;
    }
    return scalar_tensor(std::numeric_limits<double>::quiet_NaN(), kF64);
  }
  Tensor norm;
  if (OptimizerRecord* owner = state.owner_of(parameters)) {
    const double limit = state.settings.gradient_clipping;
    if (limit > 0 && norm_type == 2) {
      max_norm = std::min(max_norm, limit);
      owner->clipped = true;
    }
    norm = state.fold_clip(*owner, parameters, max_norm, norm_type);
  } else {
    for (const auto& record : state.optimizers) state.apply_clip(*record);
    norm = optim::clip_grad_norm(parameters, max_norm,
                                 {.norm_type = norm_type, .gradient_scale = 1 / loss_scale()});
  }
  state.note_norm(parameters, norm);
  if (holder == nullptr) return norm;
  Tensor& last = holder->norms[parameters.front().impl()];
  if (!state.in_graphed_step) return last = norm;
  const NoGradGuard no_grad;
  if (!last.defined() || last.device() != norm.device()) return last = norm.clone();
  copy_(last, norm);
  return last;
}

void Accelerator::clip_grad_value(const TensorList& parameters, double limit) {
  if (!state_->clips(parameters)) return;
  for (const auto& record : state_->optimizers) state_->apply_clip(*record);
  optim::clip_grad_value(parameters, limit, 1 / loss_scale());
}

// ---- Loss scaling ------------------------------------------------------------------------------

void Accelerator::State::make_scaler() {
  scaler.emplace(
      precision::GradScalerOptions{.init_scale = settings.scaler_init_scale,
                                   .growth_factor = settings.scaler_growth_factor,
                                   .backoff_factor = settings.scaler_backoff_factor,
                                   .growth_interval = settings.scaler_growth_interval,
                                   .enabled = settings.scaler_enabled,
                                   .min_scale = settings.scaler_min_scale,
                                   .hysteresis = settings.scaler_hysteresis,
                                   .consecutive_hysteresis = settings.scaler_consecutive_hysteresis,
                                   .on_device = settings.scaler_on_device});
  // Where the finding stays on a GPU no host could agree: a rank that steps alone has a scale of
  // its own.
  if (settings.scaler_on_device) return;
  // Reduced gradients are equal on all ranks; where they are not, or a rank has a part of them, the
  // ranks agree.
  scaler->set_agreement([this](const Tensor& found) {
    const bool differ =
        std::ranges::any_of(
            models, [](const auto& record) { return record->local || holds_parts(record); }) ||
        std::ranges::any_of(optimizers, [](const auto& record) { return holds_parts(record); });
    if (!differ) return;
    dealt_ranks
        ->all_reduce(found, distributed::ReduceOp::kMax,
                     {.channel = Channel::kControl, .tag = "found_inf"})
        .wait();
  });
}

// After the steps of all optimizers, before the next loss is scaled. Gradients that wait for their
// step follow the scale.
void Accelerator::State::update_scale() {
  for (const auto& record : optimizers) apply_clip(*record);
  if (!scaler || !scaler->update_is_due()) return;
  const bool any_waits =
      std::ranges::any_of(models, [](const auto& record) { return !record->consumed; });
  if (!any_waits) return scaler->update();
  const double before = scaler->loss_scale();
  scaler->update();
  const double ratio = scaler->loss_scale() / before;
  if (ratio == 1) return;
  std::unordered_set<TensorImpl*> seen;
  for (const auto& record : models) {
    if (record->consumed) continue;
    kernels::multi_tensor_scale(gradients_of(record->parameters, seen), &ratio);
    record->kept.scale(ratio);
  }
}

// A finite norm tells that every gradient in it is finite. One that is not may have overflowed on
// its way: then the step looks for itself.
void Accelerator::State::note_norm(const TensorList& parameters, const Tensor& norm) {
  if (!scaler || !scaler->enabled()) return;
  if (!scales_on_device() && !std::isfinite(norm.item())) return;
  for (const Tensor& parameter : parameters) {
    const Tensor gradient = parameter.grad();
    if (!gradient.defined()) continue;
    finite_gradients.insert_or_assign(gradient.impl(),
                                      FiniteGradient{gradient, gradient.version(), norm});
  }
}

// A norm by which every gradient of the optimizer is known to be finite; undefined where none is.
Tensor Accelerator::State::take_finite_norm(const optim::Optimizer& optimizer) {
  Tensor norm;
  bool all = true;
  for (size_t group = 0; group < optimizer.num_groups(); ++group) {
    for (const auto& [name, parameter] : optimizer.parameters(group)) {
      const Tensor gradient = parameter.grad();
      if (!gradient.defined()) continue;
      const auto found = finite_gradients.find(gradient.impl());
      if (found == finite_gradients.end() || found->second.version != gradient.version()) {
        all = false;
        continue;
      }
      norm = found->second.norm;
      finite_gradients.erase(found);
    }
  }
  return all ? norm : Tensor();
}

double Accelerator::loss_scale() const { return state_->scaler ? state_->scaler->loss_scale() : 1; }

AcceleratorScope Accelerator::autocast(bool enabled) const {
  const Precision precision = state_->settings.mixed_precision;
  if (precision == Precision::kNo) return AcceleratorScope({});
  const DType low = precision == Precision::kFP16 ? kF16 : kBF16;
  return AcceleratorScope(
      [guard = std::make_shared<AutocastGuard>(low, enabled)]() mutable { guard.reset(); });
}

void Accelerator::State::check_steps_are_known() const {
  TS_CHECK_AS(UnsupportedError, !scales_on_device(), "optimizer_step_was_skipped",
              "whether a step was left out stays on the GPU with scaler_on_device (",
              settings.scaler_on_device.origin.describe(), "); leave it false to know");
}

bool Accelerator::optimizer_step_was_skipped() const {
  state_->check_steps_are_known();
  state_->forget_dead();
  return std::ranges::any_of(state_->optimizers,
                             [](const auto& record) { return record->was_skipped(); });
}
bool Accelerator::optimizer_step_was_skipped(const optim::Optimizer& optimizer) const {
  state_->check_steps_are_known();
  OptimizerRecord* record = state_->find(optimizer);
  TS_CHECK(record != nullptr, "optimizer_step_was_skipped", "the optimizer was not prepared");
  return record->was_skipped();
}

void Accelerator::join_uneven_inputs(nn::ModuleBase& model, const std::function<void()>& body,
                                     const JoinUnevenOptions& options,
                                     const SourceLocation& where) {
  const auto record = state_->at(model, "join_uneven_inputs");
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
