#include <tessera/accelerate/accelerator.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <sstream>
#include <unordered_map>
#include <unordered_set>

#include <tessera/accelerate/rank_device.h>
#include <tessera/accelerate/step_window.h>
#include <tessera/autograd/autograd.h>
#include <tessera/core/context.h>
#include <tessera/core/error.h>
#include <tessera/core/factory.h>
#include <tessera/core/kernels/multi_tensor.h>
#include <tessera/core/random.h>
#include <tessera/core/state_dict.h>
#include <tessera/data/dataloader.h>
#include <tessera/distributed/collectives.h>
#include <tessera/distributed/mesh.h>
#include <tessera/distributed/shard/replicate.h>
#include <tessera/nn/module.h>
#include <tessera/optim/clip.h>
#include <tessera/optim/optimizer.h>
#include <tessera/optim/schedule.h>
#include <tessera/precision/autocast.h>
#include <tessera/precision/grad_scaler.h>

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

}  // namespace

namespace {

accelerate::Settings settings_of(const AcceleratorOptions& options) {
  accelerate::CodeSettings code;
  code.set("mixed_precision", options.mixed_precision)
      .set("precision_policy", options.precision_policy)
      .set("gradient_accumulation_steps", options.gradient_accumulation_steps)
      .set("sync_with_dataloader", options.sync_with_dataloader)
      .set("sync_each_batch", options.sync_each_batch)
      .set("step_schedule_with_optimizer", options.step_schedule_with_optimizer)
      .set("schedule_unit", options.schedule_unit)
      .set("split_batches", options.split_batches)
      .set("even_batches", options.even_batches)
      .set("dispatch_batches", options.dispatch_batches)
      .set("seed", options.seed)
      .set("data_seed", options.data_seed)
      .set("cpu", options.cpu)
      .set("device", options.device)
      .set("debug", options.debug)
      .set("log_level", options.log_level)
      .set("project_dir", options.project_dir)
      .set("logging_dir", options.logging_dir)
      .set("log_with", options.log_with)
      .set("automatic_checkpoint_naming", options.automatic_checkpoint_naming)
      .set("total_limit", options.total_limit)
      .set("keep_every", options.keep_every)
      .set("keep_best", options.keep_best)
      .set("asynchronous_checkpoints", options.asynchronous_checkpoints)
      .set("ddp_bucket_cap_mb", options.ddp_bucket_cap_mb)
      .set("ddp_first_bucket_mb", options.ddp_first_bucket_mb)
      .set("ddp_broadcast_buffers", options.ddp_broadcast_buffers)
      .set("ddp_gradient_as_bucket_view", options.ddp_gradient_as_bucket_view)
      .set("ddp_init_sync", options.ddp_init_sync)
      .set("ddp_comm_hook", options.ddp_comm_hook)
      .set("ddp_power_sgd_rank", options.ddp_power_sgd_rank)
      .set("ddp_power_sgd_start_step", options.ddp_power_sgd_start_step)
      .set("scaler_init_scale", options.scaler_init_scale)
      .set("scaler_growth_factor", options.scaler_growth_factor)
      .set("scaler_backoff_factor", options.scaler_backoff_factor)
      .set("scaler_growth_interval", options.scaler_growth_interval)
      .set("scaler_enabled", options.scaler_enabled);
  accelerate::ResolveOptions sources;
  sources.code = std::move(code);
  sources.file = options.config_file;
  return accelerate::resolve(sources);
}

std::shared_ptr<distributed::CommunicationHook> hook_of(const accelerate::Settings& settings) {
  switch (settings.ddp_comm_hook.value) {
    case accelerate::CommHook::kFP16:
      return std::make_shared<distributed::CastHook>(kF16);
    case accelerate::CommHook::kBF16:
      return std::make_shared<distributed::CastHook>(kBF16);
    case accelerate::CommHook::kPowerSgd:
      return std::make_shared<distributed::PowerSgdHook>(distributed::PowerSgdOptions{
          .rank = settings.ddp_power_sgd_rank, .start_step = settings.ddp_power_sgd_start_step});
    case accelerate::CommHook::kNone:
      break;
  }
  return nullptr;
}

precision::Policy policy_of(const accelerate::Settings& settings) {
  if (settings.mixed_precision.value == Precision::kNo) return precision::Policy::f32();
  const DType low = settings.mixed_precision.value == Precision::kBF16 ? kBF16 : kF16;
  switch (settings.precision_policy.value) {
    case PrecisionPolicy::kBoundary:
      return precision::Policy::boundary(low);
    case PrecisionPolicy::kPure:
      return precision::Policy::pure(low);
    case PrecisionPolicy::kAutocast:
      break;
  }
  return precision::Policy::autocast(low);
}

distributed::ReplicateOptions replicate_options(const accelerate::Settings& settings) {
  const auto bytes = [](double megabytes) { return static_cast<int64_t>(megabytes * 1048576); };
  distributed::ReplicateOptions options;
  options.first_bucket_bytes = bytes(settings.ddp_first_bucket_mb);
  options.bucket_bytes = bytes(settings.ddp_bucket_cap_mb);
  options.gradient_as_bucket_view = settings.ddp_gradient_as_bucket_view;
  options.average = distributed::GradientAverage::kWeight;
  options.init_sync = settings.ddp_init_sync;
  options.broadcast_buffers = settings.ddp_broadcast_buffers;
  const precision::Policy policy = policy_of(settings);
  if (policy.needs_masters()) options.gradient_dtype = policy.reduce;
  return options;
}

}  // namespace

// What the Accelerator knows of a model.
struct ModelRecord {
  nn::ModuleBase* model = nullptr;
  NamedTensors parameters;  // held: a model that was made at the address of a dead one is another
  std::vector<HookHandle> handles;
  precision::AppliedPolicy policy;
  // Of parameters that were narrowed: until their optimizer's first step.
  struct Original {
    Tensor value;  // f32
    // Of the parameter that holds it rounded, as long as nobody has written another.
    uint32_t version;
    const void* data;
  };
  std::unordered_map<TensorImpl*, Original> originals;
  std::optional<distributed::Replica> replica;
  StepWindow window;
  std::optional<int64_t> steps;
  int no_sync = 0;         // scopes that are open
  bool triggered = false;  // the next backward reduces whatever no_sync says
  bool local = false;      // windows are closed on this rank alone (local SGD)
  bool explicit_weights = false;
  bool consumed = true;  // an optimizer has stepped since the last backward
  double divisor = 1;    // that this rank's gradients were divided by without communication

  ~ModelRecord() {
    for (HookHandle& handle : handles) handle.remove();
  }
  // What a forward must know: buffers are synchronised where gradients will be.
  void plan_forward(bool sync) {
    if (!replica) return;
    distributed::StepPlan plan = replica->plan();
    plan.sync_gradients = sync && no_sync == 0 && !local;
    replica->set_plan(plan);
  }
  bool has_weight() const {
    return replica && !local ? replica->engine().window_weight() != 0 : window.weight() != 0;
  }
};

struct OptimizerRecord {
  optim::Optimizer* optimizer = nullptr;
  NamedTensors parameters;
  std::vector<std::shared_ptr<ModelRecord>> models;  // that hold its parameters
  uint64_t generation = 0;                           // of the models when they were looked up
  bool attempted = false;  // step() came to a boundary, and nobody has looked how it ended
  bool skipped = false;

  bool was_skipped() {
    if (std::exchange(attempted, false)) skipped = !optimizer->skip_reason().empty();
    return skipped;
  }
};

struct Accelerator::State : std::enable_shared_from_this<State> {
  accelerate::Settings settings;
  std::unique_ptr<Trackers> trackers;           // made when first asked for
  std::optional<precision::GradScaler> scaler;  // fp16
  int64_t steps = 1;
  bool sync_with_dataloader = true;
  int data_rank = 0, data_ranks = 1;  // along the axis that batches are dealt over
  Device device;                      // of models and batches; known when something is prepared

  std::vector<std::shared_ptr<ModelRecord>> models;
  std::vector<std::shared_ptr<OptimizerRecord>> optimizers;
  std::vector<optim::Schedule*> schedules;
  std::vector<optim::PlateauSchedule*> plateau_schedules;
  std::vector<data::LoaderBase*> loaders;
  std::unique_ptr<accelerate::LoaderPlan> loader_plan;
  std::unique_ptr<accelerate::StateIo> io;    // made at the first use
  distributed::Group* dealt_ranks = nullptr;  // that batches are dealt among
  uint64_t generation = 1;                    // of models

  // The micro-batches that are open, the innermost last.
  struct OpenMicro {
    uint64_t id;
    std::vector<std::shared_ptr<ModelRecord>> records;
  };
  std::vector<OpenMicro> open;
  uint64_t next_id = 0;
  bool sync_gradients = true;
  bool joined = false;
  Counters counters;

  RandomState random;
  int forward_depth = 0;

  std::shared_ptr<ModelRecord> find(const nn::ModuleBase& model) const {
    for (const auto& record : models) {
      if (record->model == &model) return record;
    }
    return nullptr;
  }
  std::shared_ptr<ModelRecord> at(const nn::ModuleBase& model, std::string_view where) const {
    auto record = find(model);
    TS_CHECK(record != nullptr, where, "the model ", model.type_name(),
             " was not prepared; call prepare(model) first");
    return record;
  }
  OptimizerRecord* find(const optim::Optimizer& optimizer) const {
    for (const auto& record : optimizers) {
      if (record->optimizer == &optimizer) return record.get();
    }
    return nullptr;
  }

  void prepare_model(nn::ModuleBase& model);
  void prepare_optimizer(optim::Optimizer& optimizer);
  void prepare_loader(const LoaderRequest& request);
  void prepare_schedule(optim::Schedule& schedule);
  void keep_originals(ModelRecord& record);
  void begin_masters(OptimizerRecord& record);

  // ---- Loss scaling
  void make_scaler();
  void update_scale();

  // ---- Windows
  void begin_random_numbers();
  double weigh(std::optional<double> weight);
  double agree_on_nominal(double weight);
  void divide(std::span<const std::shared_ptr<ModelRecord>> records);
  void resume(ModelRecord& record);
  const std::vector<std::shared_ptr<ModelRecord>>& models_of(OptimizerRecord& record);
  StepDecision may_step(OptimizerRecord& record);
  StepDecision may_step(const optim::Schedule& schedule);
  bool at_boundary(OptimizerRecord& record);
  bool clips(const TensorList& parameters) const;
};

namespace {

// Around every call of a prepared model.
class ForwardScope {
 public:
  ForwardScope(RandomState& random, int& depth) : random_(random), depth_(depth) {
    if (depth_++ == 0) std::swap(random_, random_state());
  }
  ~ForwardScope() {
    if (--depth_ == 0) std::swap(random_, random_state());
  }
  ForwardScope(const ForwardScope&) = delete;
  ForwardScope& operator=(const ForwardScope&) = delete;

 private:
  RandomState& random_;
  int& depth_;
};

bool same_tensors(const NamedTensors& a, const NamedTensors& b) {
  return std::ranges::equal(a, b, [](const NamedTensor& x, const NamedTensor& y) {
    return x.name == y.name && x.tensor.is(y.tensor);
  });
}

}  // namespace

// ---- Preparation -------------------------------------------------------------------------------

void Accelerator::State::prepare_model(nn::ModuleBase& model) {
  NamedTensors parameters = model.named_parameters();
  if (const auto known = find(model)) {
    if (same_tensors(known->parameters, parameters)) return;
    known->policy.remove();
    std::erase(models, known);
  }
  for (const auto& [name, tensor] : parameters) {
    TS_CHECK_AS(ConfigError, !settings.cpu || tensor.device().is_cpu(), "prepare",
                "the setting cpu (", settings.cpu.origin.describe(), ") asks for the CPU; '", name,
                "' of ", model.type_name(), " is ", tensor, "; leave it there, or cpu unset");
  }
  const auto is_elsewhere = [&](const NamedTensor& named) {
    return named.tensor.device() != device;
  };
  if (device.is_cuda() && (std::ranges::any_of(parameters, is_elsewhere) ||
                           std::ranges::any_of(model.named_buffers(), is_elsewhere))) {
    model.to(device);
  }
  auto record = std::make_shared<ModelRecord>();
  record->model = &model;
  record->parameters = std::move(parameters);
  record->handles.push_back(model.register_call_scope(
      [weak = weak_from_this()](nn::ModuleBase&) -> std::shared_ptr<void> {
        const auto state = weak.lock();
        if (!state) return nullptr;
        // The scope's state lives with it.
        auto scope = std::make_shared<ForwardScope>(state->random, state->forward_depth);
        return {scope.get(), [state, scope](void*) mutable { scope.reset(); }};
      }));
  const bool trains = std::ranges::any_of(
      record->parameters, [](const NamedTensor& named) { return named.tensor.requires_grad(); });
  const precision::Policy policy = policy_of(settings);
  if (policy != precision::Policy::f32()) record->policy = precision::apply(model, policy);
  // One rank too keeps the f32 gradients of 16-bit parameters in the engine's buckets.
  if ((data_ranks > 1 || policy.needs_masters()) && trains) {
    // Before replicate()'s own hook on the outputs, which begins the reduction: what ran forward
    // under no_sync() is not reduced.
    record->handles.push_back(model.register_forward_hook(
        [weak = std::weak_ptr(record)](nn::ModuleBase&, nn::TensorRefs, nn::TensorRefs outputs) {
          const auto own = weak.lock();
          if (!own || own->no_sync == 0 || !grad_enabled()) return;
          for (Tensor* output : outputs) {
            if (!output->requires_grad() || output->is_leaf()) continue;
            register_hook(*output, [weak](const Tensor&) {
              if (const auto record = weak.lock();
                  record && record->replica && !record->triggered) {
                distributed::StepPlan plan = record->replica->plan();
                plan.sync_gradients = false;
                record->replica->set_plan(plan);
              }
              return Tensor();
            });
          }
        }));
    record->replica.emplace(
        distributed::replicate(model, distributed::mesh(), replicate_options(settings)));
    if (auto hook = hook_of(settings)) record->replica->set_communication_hook(std::move(hook));
  }
  keep_originals(*record);
  models.push_back(std::move(record));
  ++generation;
}

void Accelerator::State::prepare_optimizer(optim::Optimizer& optimizer) {
  NamedTensors parameters = optimizer.parameters();
  if (const OptimizerRecord* known = find(optimizer)) {
    if (same_tensors(known->parameters, parameters)) return;
    std::erase_if(optimizers, [&](const auto& record) { return record.get() == known; });
  }
  auto record = std::make_shared<OptimizerRecord>();
  record->optimizer = &optimizer;
  record->parameters = std::move(parameters);
  const std::weak_ptr<State> weak = weak_from_this();
  const std::weak_ptr<OptimizerRecord> own = record;
  optimizer.set_step_gate([weak, own] {
    const auto state = weak.lock();
    const auto record = own.lock();
    return state && record ? state->may_step(*record) : StepDecision{};
  });
  optimizer.set_zero_grad_gate([weak, own] {
    const auto state = weak.lock();
    const auto record = own.lock();
    return !state || !record || state->at_boundary(*record);
  });
  optimizers.push_back(std::move(record));
}

// Rank 0's become everybody's, as the parameters did.
void Accelerator::State::keep_originals(ModelRecord& record) {
  NamedTensors values = record.policy.take_originals();
  std::erase_if(values, [&](const NamedTensor& value) {
    const auto at = std::ranges::find(record.parameters, value.name, &NamedTensor::name);
    return !at->tensor.requires_grad();
  });
  if (data_ranks > 1 && settings.ddp_init_sync && !values.empty()) {
    distributed::CoalescedScope calls(*dealt_ranks, {.tag = "masters"});
    for (const auto& [name, value] : values) calls.broadcast(value, 0);
    calls.finish().wait();
  }
  for (const auto& [name, value] : values) {
    const Tensor& parameter =
        std::ranges::find(record.parameters, name, &NamedTensor::name)->tensor;
    record.originals[parameter.impl()] = {value, parameter.version(), parameter.data()};
  }
}

// The masters of 16-bit parameters begin unrounded. Not before they are needed: weights that were
// loaded since prepare() are their own beginning.
void Accelerator::State::begin_masters(OptimizerRecord& record) {
  NamedTensors masters;
  for (const auto& model : models_of(record)) {
    if (model->originals.empty()) continue;
    for (const auto& [name, tensor] : record.parameters) {
      const auto original = model->originals.extract(tensor.impl());
      if (!original) continue;
      const auto& [value, version, data] = original.mapped();
      if (version == tensor.version() && data == tensor.data()) masters.push_back({name, value});
    }
  }
  if (!masters.empty()) record.optimizer->begin_masters(masters);
}

void Accelerator::State::prepare_loader(const LoaderRequest& request) {
  const std::optional<int64_t> seed = settings.data_seed.value;
  if (seed && !loader_plan->is_prepared(*request.loader)) {
    auto* const indexed = dynamic_cast<data::IndexedLoader*>(request.loader);
    if (indexed != nullptr) indexed->set_shuffle_seed(static_cast<uint64_t>(*seed));
  }
  request.prepare(*loader_plan);
  if (device.is_cuda() && request.loader->options().device != device) {
    request.loader->set_device(device);
  }
  if (std::ranges::find(loaders, request.loader) == loaders.end()) {
    loaders.push_back(request.loader);
  }
}

void Accelerator::State::prepare_schedule(optim::Schedule& schedule) {
  if (std::ranges::find(schedules, &schedule) == schedules.end()) schedules.push_back(&schedule);
  if (!settings.step_schedule_with_optimizer) return;
  schedule.set_step_gate([weak = weak_from_this(), own = &schedule] {
    const auto state = weak.lock();
    return state ? state->may_step(*own) : StepDecision{};
  });
}

// In one order, whatever that of the arguments: what comes later looks at what came before.
void Accelerator::run(const Preparation& preparation) {
  state_->device = device();
  for (nn::ModuleBase* model : preparation.models) state_->prepare_model(*model);
  for (optim::Optimizer* optimizer : preparation.optimizers) state_->prepare_optimizer(*optimizer);
  for (const LoaderRequest& loader : preparation.loaders) state_->prepare_loader(loader);
  for (optim::Schedule* schedule : preparation.schedules) state_->prepare_schedule(*schedule);
  for (optim::PlateauSchedule* schedule : preparation.plateau_schedules) {
    auto& known = state_->plateau_schedules;
    if (std::ranges::find(known, schedule) == known.end()) known.push_back(schedule);
  }
}

namespace {

Device device_of(const accelerate::Settings& settings, const accelerate::RankPlace& place) {
  if (settings.cpu) return kCpu;
  return accelerate::rank_device(settings.device.value,
                                 "the setting device (" + settings.device.origin.describe() + ")",
                                 place);
}

}  // namespace

Accelerator::Accelerator(const AcceleratorOptions& options)
    : Accelerator(settings_of(options), std::make_shared<State>()) {}

Accelerator::Accelerator(accelerate::Settings resolved, std::shared_ptr<State> fresh)
    : ProcessControl(
          [&](const accelerate::RankPlace& place) { return device_of(resolved, place); }),
      state_(std::move(fresh)) {
  State& state = *state_;
  state.settings = std::move(resolved);
  const accelerate::Settings& settings = state.settings;
  state.steps = settings.gradient_accumulation_steps;
  state.sync_with_dataloader = settings.sync_with_dataloader;
  state.dealt_ranks = num_processes() > 1 ? &distributed::mesh().group("dp") : &world();
  state.data_rank = state.dealt_ranks->rank();
  state.data_ranks = state.dealt_ranks->size();
  if (settings.mixed_precision.value == Precision::kFP16) state.make_scaler();
  state.loader_plan = std::make_unique<accelerate::LoaderPlan>(
      *state.dealt_ranks,
      accelerate::LoaderPlanOptions{.split_batches = settings.split_batches,
                                    .dispatch_batches = settings.dispatch_batches.value,
                                    .even_batches = settings.even_batches});
  if (const std::optional<int64_t> seed = settings.seed.value) {
    manual_seed(static_cast<uint64_t>(*seed));
  }
  state.counters.seed = random_state().seed;
  state.begin_random_numbers();
}

Accelerator::~Accelerator() = default;

Trackers& Accelerator::trackers() {
  State& state = *state_;
  if (state.trackers == nullptr) {
    const accelerate::Settings& settings = state.settings;
    state.trackers = std::make_unique<Trackers>(
        TrackersOptions{.folder = settings.logging_dir.value.empty() ? settings.project_dir.value
                                                                     : settings.logging_dir.value,
                        .with = settings.log_with.value,
                        .rank = process_index(),
                        .world_size = num_processes()});
  }
  return *state.trackers;
}

void Accelerator::end_training() {
  if (state_->trackers != nullptr) state_->trackers->finish();
  wait_for_everyone();
}

void Accelerator::free_memory() {
  State& state = *state_;
  state.loader_plan->release_all();
  for (const auto& record : state.optimizers) {
    record->optimizer->set_step_gate({});
    record->optimizer->set_zero_grad_gate({});
  }
  for (optim::Schedule* schedule : state.schedules) schedule->set_step_gate({});
  state.models.clear();
  state.optimizers.clear();
  state.schedules.clear();
  state.plateau_schedules.clear();
  state.loaders.clear();
  state.open.clear();
  state.sync_gradients = true;
  state.counters = {.seed = state.counters.seed};
  ++state.generation;
  state.begin_random_numbers();
}

// ---- Windows -----------------------------------------------------------------------------------

// A function of the global micro-batch: of N ranks with m each, rank r's k-th is number k * N + r.
void Accelerator::State::begin_random_numbers() {
  const auto micro = static_cast<uint64_t>(counters.micro_batches * data_ranks + data_rank + 1);
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
  State::OpenMicro micro{.id = state.next_id++, .records = {}};
  for (const nn::ModuleBase* model : models)
    micro.records.push_back(state.at(*model, "accumulate"));
  const bool ends = options.ends_window || (state.sync_with_dataloader && end_of_dataloader());
  state.begin_random_numbers();
  ++state.counters.micro_batches;
  bool sync = true;
  for (const auto& record : micro.records) {
    record->window.begin_micro(record->steps.value_or(state.steps), ends);
    sync = sync && record->window.is_boundary();
    record->plan_forward(record->window.is_boundary() || state.settings.sync_each_batch);
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
void Accelerator::State::divide(std::span<const std::shared_ptr<ModelRecord>> records) {
  std::unordered_set<TensorImpl*> seen;
  for (const auto& record : records) {
    record->divisor = record->window.weight() == 0 ? 1 : record->window.weight();
    if (record->divisor == 1) continue;
    const double factor = 1 / record->divisor;
    kernels::multi_tensor_scale(gradients_of(record->parameters, seen), &factor);
  }
}

// A mean that a further backward adds to becomes a sum again.
void Accelerator::State::resume(ModelRecord& record) {
  if (record.replica && !record.local) return record.replica->resume_sum();
  if (record.divisor == 1) return;
  std::unordered_set<TensorImpl*> seen;
  kernels::multi_tensor_scale(gradients_of(record.parameters, seen), &record.divisor);
}

void Accelerator::backward(const Tensor& loss, const BackwardOptions& options) {
  State& state = *state_;
  TS_CHECK_SHAPE(loss.defined() && loss.numel() == 1, "backward",
                 "the loss must have one element; got ", loss, "; take its mean");
  state.update_scale();
  const bool in_window = !state.open.empty();
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
    if (window.reduced()) state.resume(*record);
  }
  struct Expected {
    ModelRecord* record;
    int64_t reductions;
  };
  std::vector<Expected> reducing;
  for (const auto& record : state.models) {
    if (!record->replica) continue;
    const bool is_own = std::ranges::find(own, record) != own.end();
    const StepWindow& window = record->window;
    bool sync = record->no_sync == 0 && !record->local;
    if (is_own) sync = sync && (window.is_boundary() || state.settings.sync_each_batch);
    sync = sync || record->triggered;
    record->replica->set_plan({.micro_index = is_own ? window.index() : 0,
                               .is_last = !is_own || window.is_boundary(),
                               .sync_gradients = sync,
                               .weight = is_own ? window.weight() : weight});
    reducing.push_back({record.get(), record->replica->engine().reductions()});
  }

  // Outside of a window and without a reduction there is nothing to weigh against.
  double scale = in_window || !reducing.empty() ? weight : 1;
  if (state.scaler) scale *= state.scaler->loss_scale();
  // A 16-bit loss is scaled behind a cast: 65536 is more than f16 holds.
  const bool narrow = loss.dtype() == kF16 || loss.dtype() == kBF16;
  const Tensor total = narrow && scale != 1 ? loss.to(kF32) : loss;
  const Tensor seed =
      scale == 1 ? Tensor() : raw::full(total.shape(), scale, total.dtype(), total.device());
  tessera::backward(total, seed,
                    {.retain_graph = options.retain_graph, .create_graph = options.create_graph});

  for (const Expected& expected : reducing) expected.record->triggered = false;
  for (const auto& record : in_window ? own : state.models) record->consumed = false;
  std::vector<std::shared_ptr<ModelRecord>> closed;
  for (const auto& record : own) {
    const auto expected = std::ranges::find(reducing, record.get(), &Expected::record);
    if (expected != reducing.end() && !record->local) {
      const bool reduced = record->replica->engine().reductions() > expected->reductions;
      reduced ? record->window.set_reduced() : record->window.set_pending();
    } else if ((record->window.is_boundary() || state.settings.sync_each_batch)) {
      closed.push_back(record);
      record->window.set_reduced();
    } else {
      record->window.set_pending();
    }
  }
  state.divide(closed);
  if (!in_window) {
    ++state.counters.micro_batches;
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

void Accelerator::trigger_sync_in_backward(nn::ModuleBase& model) {
  state_->at(model, "trigger_sync_in_backward")->triggered = true;
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
  record.was_skipped();  // before skip_reason() is another
  if (!at_boundary(record)) return StepDecision::skip("gradients are being accumulated");
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
  if (!has_weight) return StepDecision::skip("no micro-batch of the window has any weight");
  for (const auto& model : models_of(record)) model->consumed = true;
  if (!scaler) return {};
  std::string overflow = scaler->before_step(*record.optimizer);
  return overflow.empty() ? StepDecision{} : StepDecision::skip(std::move(overflow));
}

StepDecision Accelerator::State::may_step(const optim::Schedule& schedule) {
  OptimizerRecord* record = find(schedule.optimizer());
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

Tensor Accelerator::clip_grad_norm(const TensorList& parameters, double max_norm,
                                   double norm_type) {
  if (!state_->clips(parameters)) return {};
  return optim::clip_grad_norm(parameters, max_norm,
                               {.norm_type = norm_type, .gradient_scale = 1 / loss_scale()});
}

void Accelerator::clip_grad_value(const TensorList& parameters, double limit) {
  if (state_->clips(parameters)) optim::clip_grad_value(parameters, limit, 1 / loss_scale());
}

// ---- Loss scaling ------------------------------------------------------------------------------

void Accelerator::State::make_scaler() {
  scaler.emplace(precision::GradScalerOptions{.init_scale = settings.scaler_init_scale,
                                              .growth_factor = settings.scaler_growth_factor,
                                              .backoff_factor = settings.scaler_backoff_factor,
                                              .growth_interval = settings.scaler_growth_interval,
                                              .enabled = settings.scaler_enabled});
  // Reduced gradients are equal on all ranks; where a model's are not, the ranks agree.
  scaler->set_agreement([this](const Tensor& found) {
    if (!std::ranges::any_of(models, [](const auto& record) { return record->local; })) return;
    dealt_ranks
        ->all_reduce(found, distributed::ReduceOp::kMax,
                     {.channel = Channel::kControl, .tag = "found_inf"})
        .wait();
  });
}

// After the steps of all optimizers, before the next loss is scaled. Gradients that wait for their
// step follow the scale.
void Accelerator::State::update_scale() {
  if (!scaler || !scaler->update_is_due()) return;
  const double before = scaler->loss_scale();
  scaler->update();
  const double ratio = scaler->loss_scale() / before;
  if (ratio == 1) return;
  std::unordered_set<TensorImpl*> seen;
  for (const auto& record : models) {
    if (record->consumed) continue;
    kernels::multi_tensor_scale(gradients_of(record->parameters, seen), &ratio);
  }
}

double Accelerator::loss_scale() const { return state_->scaler ? state_->scaler->loss_scale() : 1; }
precision::GradScaler* Accelerator::scaler() { return state_->scaler ? &*state_->scaler : nullptr; }

bool Accelerator::optimizer_step_was_skipped() const {
  return std::ranges::any_of(state_->optimizers,
                             [](const auto& record) { return record->was_skipped(); });
}
bool Accelerator::optimizer_step_was_skipped(const optim::Optimizer& optimizer) const {
  OptimizerRecord* record = state_->find(optimizer);
  TS_CHECK(record != nullptr, "optimizer_step_was_skipped", "the optimizer was not prepared");
  return record->was_skipped();
}

void Accelerator::join_uneven_inputs(nn::ModuleBase& model, const std::function<void()>& body,
                                     const JoinUnevenOptions& options) {
  const auto record = state_->at(model, "join_uneven_inputs");
  if (!record->replica) return body();
  const ScopedValue<bool> joined(state_->joined, true);
  const ScopedValue<bool> by_count(state_->sync_with_dataloader, false);
  const accelerate::EvenBatchesScope uneven(*state_->loader_plan, options.even_batches);
  distributed::Join join =
      record->replica->join({.throw_on_early_end = options.throw_on_early_end});
  body();
  join.finish();
}

// ---- Random numbers ----------------------------------------------------------------------------

void Accelerator::set_seed(uint64_t seed, bool device_specific) {
  if (device_specific) {
    // Not seed + rank, by which runs with neighbouring seeds would share numbers.
    const auto mixed = philox4x32(seed, static_cast<uint64_t>(process_index()), 0);
    seed = (uint64_t{mixed[0]} << 32) | mixed[1];
  }
  manual_seed(seed);
  state_->counters.seed = seed;
  state_->begin_random_numbers();
}

void Accelerator::synchronize_rng_states() {
  RandomState& random = random_state();
  const Tensor shared = raw::empty({3}, kI64);
  int64_t* values = shared.data_as<int64_t>();
  values[0] = static_cast<int64_t>(random.seed);
  values[1] = static_cast<int64_t>(random.next_stream);
  values[2] = static_cast<int64_t>(state_->counters.seed);
  world().broadcast(shared, 0, {.channel = Channel::kControl, .tag = "rng"}).wait();
  random = {.seed = static_cast<uint64_t>(values[0]),
            .next_stream = static_cast<uint64_t>(values[1])};
  state_->counters.seed = static_cast<uint64_t>(values[2]);
  state_->begin_random_numbers();
}

// ---- Devices -----------------------------------------------------------------------------------

Device Accelerator::device() const {
  return device_of(state_->settings,
                   {process_index(), local_process_index(), num_local_processes()});
}

// ---- Looking -----------------------------------------------------------------------------------

data::LoaderBase* Accelerator::active_loader() const { return state_->loader_plan->active(); }
bool Accelerator::end_of_dataloader() const { return state_->loader_plan->end_of_loader(); }
accelerate::LoaderPlan& Accelerator::loader_plan() { return *state_->loader_plan; }
distributed::Group& Accelerator::data_ranks() const { return *state_->dealt_ranks; }

const accelerate::Settings& Accelerator::settings() const { return state_->settings; }
std::vector<nn::ModuleBase*> Accelerator::models() const {
  std::vector<nn::ModuleBase*> list;
  for (const auto& record : state_->models) list.push_back(record->model);
  return list;
}
std::vector<optim::Optimizer*> Accelerator::optimizers() const {
  std::vector<optim::Optimizer*> list;
  for (const auto& record : state_->optimizers) list.push_back(record->optimizer);
  return list;
}
std::vector<optim::Schedule*> Accelerator::schedules() const { return state_->schedules; }
std::vector<optim::PlateauSchedule*> Accelerator::plateau_schedules() const {
  return state_->plateau_schedules;
}
std::vector<data::LoaderBase*> Accelerator::loaders() const {
  std::vector<data::LoaderBase*> alive;
  std::ranges::copy_if(state_->loaders, std::back_inserter(alive), [&](const auto* loader) {
    return state_->loader_plan->is_prepared(*loader);
  });
  return alive;
}

Accelerator::Counters Accelerator::counters() const {
  for (const auto& record : state_->models) {
    TS_CHECK(record->window.is_boundary(), "counters", "a window of ", record->model->type_name(),
             " is open, and its gradients are no state; save after an optimizer step");
  }
  return state_->counters;
}
void Accelerator::set_counters(const Counters& counters) {
  state_->counters = counters;
  state_->begin_random_numbers();
}

// ---- State -------------------------------------------------------------------------------------

namespace {

StateDict to_state(const Accelerator::Counters& counters) {
  StateDict state;
  state.set("micro_batches", scalar_tensor(counters.micro_batches, kI64));
  state.set("nominal_samples", scalar_tensor(counters.nominal_samples, kF64));
  state.set("nominal_weight", scalar_tensor(counters.nominal_weight, kF64));
  state.set("seed", scalar_tensor(static_cast<int64_t>(counters.seed), kI64));
  return state;
}

Accelerator::Counters counters_from(const StateDict& state) {
  return {.micro_batches = state.at("micro_batches").item<int64_t>(),
          .nominal_samples = state.at("nominal_samples").item<double>(),
          .nominal_weight = state.at("nominal_weight").item<double>(),
          .seed = static_cast<uint64_t>(state.at("seed").item<int64_t>())};
}

}  // namespace

accelerate::StateIo& Accelerator::state_io() {
  std::unique_ptr<accelerate::StateIo>& io = state_->io;
  if (!io) {
    const accelerate::Settings& settings = state_->settings;
    accelerate::StateIoOptions options;
    options.project_dir = settings.project_dir.value;
    options.automatic_naming = settings.automatic_checkpoint_naming;
    options.total_limit = settings.total_limit;
    options.keep_every = settings.keep_every;
    options.keep_best = settings.keep_best;
    options.asynchronous = settings.asynchronous_checkpoints;
    io = std::make_unique<accelerate::StateIo>(std::move(options), world());
  }
  return *io;
}

accelerate::TrainingState Accelerator::training_state() {
  for (const auto& record : state_->optimizers) state_->begin_masters(*record);
  accelerate::TrainingState training;
  training.models = models();
  training.optimizers = optimizers();
  for (optim::Schedule* schedule : state_->schedules) training.schedules.emplace_back(*schedule);
  for (optim::PlateauSchedule* schedule : state_->plateau_schedules) {
    training.schedules.emplace_back(*schedule);
  }
  training.loaders = loaders();
  if (state_->scaler) training.scaler.emplace(*state_->scaler);
  training.counters.emplace([this] { return to_state(counters()); },
                            [this](const StateDict& state) { set_counters(counters_from(state)); });
  return training;
}

std::string Accelerator::save_state(const std::string& folder,
                                    const accelerate::SaveStateOptions& options) {
  counters();  // refuses an open window before anything is written
  state_->update_scale();
  return state_io().save_state(training_state(), folder, options);
}

accelerate::LoadedState Accelerator::load_state(const std::string& folder,
                                                const accelerate::LoadStateOptions& options) {
  return state_io().load_state(training_state(), folder, options);
}

std::string Accelerator::describe() const {
  const State& state = *state_;
  std::ostringstream out;
  out << "rank " << process_index() << " of " << num_processes() << ", local "
      << local_process_index() << " of " << num_local_processes() << ", batches among "
      << state.data_ranks << "\nsettings\n";
  std::istringstream settings(accelerate::describe(state.settings, true));
  for (std::string line; std::getline(settings, line);) out << "  " << line << '\n';
  for (const auto& record : state.models) {
    out << "model " << record->model->type_name() << ": " << record->model->num_parameters()
        << " elements in " << record->parameters.size() << " parameters, windows of "
        << record->steps.value_or(state.steps) << " micro-batches\n";
    out << "  precision: "
        << precision::describe(
               precision::policy_of(*record->model).value_or(precision::Policy::f32()))
        << '\n';
    if (record->replica) out << "  " << record->replica->report().describe();
  }
  for (const auto& record : state.optimizers) {
    out << "optimizer of " << record->parameters.size() << " parameters: steps with";
    for (const auto& model : state_->models_of(*record)) out << ' ' << model->model->type_name();
    out << '\n';
  }
  for (const data::LoaderBase* loader : loaders()) {
    out << "loader: " << state.loader_plan->describe(*loader) << '\n';
  }
  for (const optim::Schedule* schedule : state.schedules) {
    const bool by_ranks = state.settings.schedule_unit.value == ScheduleUnit::kHuggingFace &&
                          !state.settings.split_batches;
    out << "schedule: at step " << schedule->current_step() << ", ";
    if (!state.settings.step_schedule_with_optimizer) {
      out << "stepped by the program\n";
    } else {
      out << (by_ranks ? state.data_ranks : 1) << " for each optimizer update\n";
    }
  }
  return out.str();
}

}  // namespace tessera
