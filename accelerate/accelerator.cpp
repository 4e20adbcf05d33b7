#include <tessera/accelerate/accelerator.h>

#include <algorithm>
#include <sstream>

#include <tessera/accelerate/accelerator_state.h>
#include <tessera/accelerate/parallelize.h>
#include <tessera/accelerate/process/rank_device.h>
#include <tessera/accelerate/settings/config.h>
#include <tessera/accelerate/settings/deepspeed_config.h>
#include <tessera/core/context.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/gemm_options.h>
#include <tessera/core/kernels/attention/attention.h>
#include <tessera/core/plain_text.h>
#include <tessera/core/random.h>
#include <tessera/core/state/state_dict.h>
#include <tessera/data/dataloader.h>
#include <tessera/distributed/checkpoint/full_state.h>
#include <tessera/distributed/mesh/dtensor.h>
#include <tessera/distributed/tensor_parallel/parallelize.h>
#include <tessera/distributed/transport/caller.h>
#include <tessera/distributed/transport/collectives.h>
#include <tessera/precision/autocast.h>

namespace tessera {
namespace {

Device device_of(const accelerate::Settings& settings, const accelerate::RankPlace& place) {
  if (settings.cpu) return kCpu;
  return accelerate::rank_device(settings.device.value,
                                 "the setting device (" + settings.device.origin.describe() + ")",
                                 place);
}

}  // namespace

Accelerator::Accelerator(const AcceleratorOptions& options)
    : Accelerator(accelerate::resolve({.code = options}), std::make_shared<State>()) {}

Accelerator::Accelerator(accelerate::Settings resolved, std::shared_ptr<State> fresh)
    : ProcessControl(
          [&](const accelerate::RankPlace& place) { return device_of(resolved, place); }),
      state_(std::move(fresh)) {
  State& state = *state_;
  state.settings = std::move(resolved);
  detail::note_settings_are_read();
  const accelerate::Settings& settings = state.settings;
  // The launcher's has come to the ranks already.
  if (settings.collective_timeout.origin.source == accelerate::Source::kCode) {
    distributed::rank_context().timeouts.collective = settings.collective_timeout;
  }
  state.sync_with_dataloader = settings.sync_with_dataloader;
  state.dims = &accelerate::parallel_dims_of(settings);
  state.data_ranks = state.dims->batch_ranks().size();
  if (settings.deepspeed) state.settle_batch_sizes();
  state.steps = settings.gradient_accumulation_steps;
  if (settings.mixed_precision.value == Precision::kFP16)
    state.loss_scaling.begin(state.dims->found_inf_ranks());
  state.loader_plan = std::make_unique<accelerate::LoaderPlan>(
      state.dims->batch_ranks(),
      accelerate::LoaderPlanOptions{
          .split_batches = settings.split_batches,
          .dispatch_batches = settings.dispatch_batches.value,
          .even_batches = settings.even_batches,
          .readers = settings.pp_size > 1 ? &state.dims->state_ranks() : &state.dims->fp8_ranks()});
  // A slot of the Context, as random numbers are: where nobody says anything it stays as it is.
  if (settings.allow_tf32.origin.source != accelerate::Source::kDefault) {
    Context::current().slot<GemmOptions>().tf32 = settings.allow_tf32;
  }
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

void Accelerator::log(const TrackedValues& values, int64_t step) {
  std::vector<precision::Fp8Report> reports;
  state_->forget_dead();
  for (const auto& record : state_->models) {
    if (record->policy.fp8()) reports.push_back(record->policy.fp8()->report());
  }
  if (reports.empty()) return trackers().log(values, step);
  TrackedValues all = values;
  for (auto& value : state_->fp8_values.next(reports)) all.push_back(std::move(value));
  trackers().log(all, step);
}

void Accelerator::end_training(const SourceLocation& where) {
  if (state_->trackers != nullptr) state_->trackers->finish();
  wait_for_everyone(where);
}

void Accelerator::let_go() {
  State& state = *state_;
  state.forget_dead();
  state.loader_plan->release_all();
  for (const auto& record : state.optimizers) {
    record->optimizer->set_step_gate({});
    record->optimizer->set_zero_grad_gate({});
  }
  for (const auto& record : state.schedules) record.schedule->set_step_gate({});
  for (const auto& record : state.plateau_schedules) record.schedule->set_step_gate({});
  state.models.clear();
  state.optimizers.clear();
  state.schedules.clear();
  state.plateau_schedules.clear();
  state.gone.clear();
  state.loss_scaling.forget_norms();
  state.open.clear();
  state.sync_gradients = true;
  state.loose_gradients = false;
  state.counters = {.seed = state.counters.seed};
  ++state.generation;
  state.begin_random_numbers();
}

// ---- Random numbers ----------------------------------------------------------------------------

void Accelerator::set_seed(uint64_t seed, bool device_specific, bool deterministic) {
  if (deterministic) Context::current().slot<kernels::AttentionPolicy>().deterministic = true;
  if (device_specific) {
    // Not seed + rank, by which runs with neighbouring seeds would share numbers.
    // Ranks that calculate a micro-batch together draw the same numbers.
    const auto place = static_cast<uint64_t>(state_->dims->random_coordinate());
    const auto mixed = philox4x32(seed, place, 0);
    seed = (uint64_t{mixed[0]} << 32) | mixed[1];
  }
  manual_seed(seed);
  state_->counters.seed = seed;
  state_->begin_random_numbers();
}

void Accelerator::synchronize_rng_states(const SourceLocation& where) {
  RandomState& random = random_state();
  const Tensor shared = raw::empty({3}, kI64);
  int64_t* values = shared.data_as<int64_t>();
  values[0] = static_cast<int64_t>(random.seed);
  values[1] = static_cast<int64_t>(random.next_stream);
  values[2] = static_cast<int64_t>(state_->counters.seed);
  world()
      .broadcast(shared, 0,
                 {.channel = distributed::Channel::kControl, .tag = "rng", .where = where})
      .wait();
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

// ---- A DeepSpeed configuration -----------------------------------------------------------------

namespace {

const accelerate::DeepSpeedConfig& deepspeed_of(const accelerate::Settings& settings,
                                                std::string_view where, std::string_view made) {
  TS_CHECK_AS(ConfigError, settings.deepspeed != nullptr, where,
              "there is no DeepSpeed configuration that says which; name one by "
              "deepspeed_config_file, or make the ",
              made, " in the program");
  return *settings.deepspeed;
}

}  // namespace

std::unique_ptr<optim::Optimizer> Accelerator::optimizer_from_config(
    const nn::ModuleBase& model, const accelerate::ConfiguredOptimizerOptions& options) {
  NamedTensors trained;
  for (const NamedTensor& named : model.named_parameters()) {
    if (named.tensor.requires_grad()) trained.push_back(named);
  }
  return optimizer_from_config({{.parameters = std::move(trained)}}, options);
}

std::unique_ptr<optim::Optimizer> Accelerator::optimizer_from_config(
    const std::vector<accelerate::ConfiguredGroup>& groups,
    const accelerate::ConfiguredOptimizerOptions& options) {
  const auto& config = deepspeed_of(state_->settings, "optimizer_from_config", "optimizer");
  auto optimizer = accelerate::make_optimizer(config, groups, options);
  // prepare() takes the gate's place.
  Life& life = state_->configured[optimizer.get()];
  optimizer->set_zero_grad_gate([token = life.token()] { return true; });
  return optimizer;
}

std::unique_ptr<optim::Schedule> Accelerator::schedule_from_config(
    optim::Optimizer& optimizer, const accelerate::ConfiguredScheduleOptions& options) {
  const auto& config = deepspeed_of(state_->settings, "schedule_from_config", "schedule");
  auto schedule = accelerate::make_schedule(config, optimizer, options);
  Life& life = state_->configured[schedule.get()];
  schedule->set_step_gate([token = life.token()] { return optim::StepDecision(); });
  return schedule;
}

void Accelerator::State::settle_batch_sizes() {
  const accelerate::BatchSizes sizes =
      accelerate::batch_sizes(*settings.deepspeed, settings, data_ranks);
  if (settings.gradient_accumulation_steps != sizes.steps) {
    settings.gradient_accumulation_steps = {
        sizes.steps, {accelerate::Source::kFile, settings.deepspeed->name + ", train_batch_size"}};
  }
  micro_batch_size = sizes.micro.value_or(0);
  batch_arithmetic = sizes.arithmetic;
}

void Accelerator::State::settle_steps(int64_t other, bool of_all) {
  if (!settings.deepspeed) return;
  constexpr std::string_view kSetter = "set_gradient_accumulation_steps";
  const accelerate::DeepSpeedConfig& config = *settings.deepspeed;
  TS_CHECK_AS(ConfigError, config.accumulation_steps.value_or(other) == other, kSetter, config.name,
              ": gradient_accumulation_steps is ", config.accumulation_steps.value_or(0),
              ", and the program makes it ", other,
              "; leave one of them out, or write \"auto\" in the file");
  accelerate::Settings changed = settings;
  changed.gradient_accumulation_steps = {other, {accelerate::Source::kCode, ""}};
  const accelerate::BatchSizes sizes = accelerate::batch_sizes(config, changed, data_ranks);
  TS_CHECK_AS(ConfigError, of_all || sizes.micro.value_or(0) == micro_batch_size, kSetter,
              config.name, ": ", sizes.arithmetic, ", and other models have micro-batches of ",
              micro_batch_size, "; write \"auto\" for train_batch_size");
  micro_batch_size = sizes.micro.value_or(0);
  batch_arithmetic = sizes.arithmetic;
}

void Accelerator::State::check_configured(const void* object, bool has_section,
                                          std::string_view section, std::string_view made) {
  const auto found = configured.find(object);
  const bool is_made = found != configured.end() && !found->second.ended();
  if (found != configured.end()) configured.erase(found);
  TS_CHECK_AS(ConfigError, is_made || !has_section, "prepare", settings.deepspeed->name,
              " has a section \"", section, "\", and the program makes another ", made,
              "; take accelerator.", made, "_from_config(), or remove the section");
}

// Of the loader that is being read: what the file says of micro-batches.
void Accelerator::State::check_micro_batch() const {
  const data::LoaderBase* loader = loader_plan->active();
  if (micro_batch_size == 0 || loader == nullptr) return;
  const int64_t given = loader->options().batch_size;
  if (given == data::kNoBatching) return;  // of any sizes
  const int64_t own = settings.split_batches ? given / data_ranks : given;
  TS_CHECK_AS(ConfigError, own == micro_batch_size, "backward", settings.deepspeed->name, " says ",
              batch_arithmetic, ", and the loader has batches of ", own,
              " a rank; make its batch_size ", micro_batch_size * (own == given ? 1 : data_ranks),
              ", or write \"auto\" in the file");
}

// ---- Looking -----------------------------------------------------------------------------------

data::LoaderBase* Accelerator::active_loader() const { return state_->loader_plan->active(); }
bool Accelerator::end_of_dataloader() const { return state_->loader_plan->end_of_loader(); }
Tensor Accelerator::row_mask() const {
  const data::LoaderBase* loader = active_loader();
  TS_CHECK(loader != nullptr, "row_mask",
           "no prepared loader is being read; ask for it in the loop over one");
  const Tensor mask = raw::zeros({loader->batch_rows()}, kF32);
  std::fill_n(mask.data_as<float>(), loader->batch_samples(), 1.0F);
  return mask.to(device());
}
accelerate::LoaderPlan& Accelerator::loader_plan() { return *state_->loader_plan; }
distributed::Group& Accelerator::data_ranks() const { return state_->dims->batch_ranks(); }

const accelerate::Settings& Accelerator::settings() const { return state_->settings; }
std::vector<nn::ModuleBase*> Accelerator::models() const {
  state_->forget_dead();
  std::vector<nn::ModuleBase*> list;
  for (const auto& record : state_->models) list.push_back(record->model);
  return list;
}
std::vector<optim::Optimizer*> Accelerator::optimizers() const {
  state_->forget_dead();
  std::vector<optim::Optimizer*> list;
  for (const auto& record : state_->optimizers) list.push_back(record->optimizer);
  return list;
}
std::vector<optim::Schedule*> Accelerator::schedules() const {
  state_->forget_dead();
  std::vector<optim::Schedule*> list;
  for (const auto& record : state_->schedules) list.push_back(record.schedule);
  return list;
}
std::vector<optim::PlateauSchedule*> Accelerator::plateau_schedules() const {
  state_->forget_dead();
  std::vector<optim::PlateauSchedule*> list;
  for (const auto& record : state_->plateau_schedules) list.push_back(record.schedule);
  return list;
}
std::vector<data::LoaderBase*> Accelerator::loaders() const {
  return state_->loader_plan->loaders();
}

void Accelerator::State::check_between_windows(std::string_view where) {
  end_left_windows();
  clear_awaited(models);
  for (const auto& record : models) {
    TS_CHECK(record->window.is_boundary(), where, "a window of ", record->type_name,
             " is open, and its gradients are no state; save and load after an optimizer step");
  }
  const auto has_gradient = [](const NamedTensor& named) { return named.tensor.grad().defined(); };
  for (const auto& optimizer : optimizers) {
    for (const auto& record : models_of(*optimizer)) {
      const bool unstepped = record->owes_step || loose_gradients;
      TS_CHECK(!unstepped || std::ranges::none_of(record->parameters, has_gradient), where,
               "no step has come since the backward that gave ", record->type_name,
               " its gradients, and these are no state; ", where,
               " after optimizer.step(), or after optimizer.zero_grad() where they are not to "
               "count");
    }
  }
}

// ---- State -------------------------------------------------------------------------------------

StateDict Accelerator::State::Counters::state_dict() const {
  StateDict state;
  state.set("micro_batches", scalar_tensor(micro_batches, kI64));
  state.set("nominal_samples", scalar_tensor(nominal.samples, kF64));
  state.set("nominal_weight", scalar_tensor(nominal.weight, kF64));
  state.set("seed", scalar_tensor(static_cast<int64_t>(seed), kI64));
  return state;
}

void Accelerator::State::Counters::load_state_dict(const StateDict& state) {
  *this = {.micro_batches = state.at("micro_batches").item<int64_t>(),
           .nominal = {.samples = state.at("nominal_samples").item<double>(),
                       .weight = state.at("nominal_weight").item<double>()},
           .seed = static_cast<uint64_t>(state.at("seed").item<int64_t>())};
}

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
    options.larger_is_better = settings.larger_is_better;
    options.asynchronous = settings.asynchronous_checkpoints;
    options.whole_models = settings.fsdp_state_dict_type.value == accelerate::StateDictType::kFull;
    io = std::make_unique<accelerate::StateIo>(std::move(options), world());
  }
  return *io;
}

accelerate::TrainingState Accelerator::State::training_state() {
  for (const auto& record : optimizers) begin_masters(*record);
  accelerate::TrainingState training;
  for (const auto& record : models) training.models.push_back(record->model);
  for (const auto& record : optimizers) training.optimizers.push_back(record->optimizer);
  for (const auto& record : schedules) training.schedules.emplace_back(*record.schedule);
  for (const auto& record : plateau_schedules) training.schedules.emplace_back(*record.schedule);
  training.loaders = loader_plan->loaders();
  if (precision::GradScaler* scaler = loss_scaling.scaler()) training.scaler.emplace(*scaler);
  for (const auto& record : models) {
    const auto& fp8 = record->policy.fp8();
    if (fp8 && fp8->is_delayed()) training.fp8.emplace_back(*fp8);
  }
  training.counters.emplace([this] { return counters.state_dict(); },
                            [this](const StateDict& state) {
                              counters.load_state_dict(state);
                              begin_random_numbers();
                            });
  return training;
}

StateDict Accelerator::get_state_dict(const nn::ModuleBase& model) const {
  StateDict state = model.state_dict();
  const bool parts = std::ranges::any_of(
      state, [](const NamedTensor& named) { return distributed::is_dtensor(named.tensor); });
  return parts ? distributed::full_state_dict(state, state_->dims->state_ranks()) : state;
}

accelerate::FullValues Accelerator::full_values(nn::ModuleBase& model) {
  state_->forget_dead();
  const auto record = state_->at(model, "full_values");
  accelerate::FullValuesOptions options;
  for (const auto& optimizer : state_->optimizers) {
    const auto& models = state_->models_of(*optimizer);
    if (std::ranges::find(models, record) == models.end()) continue;
    state_->begin_masters(*optimizer);
    options.optimizers.push_back(optimizer->optimizer);
  }
  // The scale follows each step, and gradients are of the one before.
  options.gradient_scale = [state = state_] { return state->loss_scaling.scale(); };
  options.sum_so_far = [record = std::weak_ptr(record)]() -> std::string {
    const auto alive = record.lock();
    if (!alive) return "the model was prepared again";
    const bool open =
        alive->reduces() ? alive->parallel->pass().holds_unreduced() : alive->window.pending();
    return open ? "its window is open, and it is a sum that goes on; ask where "
                  "accelerator.sync_gradients() is true, after backward() and before step()"
                : "";
  };
  options.written = [record = std::weak_ptr(record)] {
    const auto alive = record.lock();
    if (alive && alive->parallel) alive->parallel->pass().accept_written();
  };
  return accelerate::FullValues(model, std::move(options));
}

SavedModel Accelerator::save_model(const nn::ModuleBase& model, const std::string& folder,
                                   const SaveModelOptions& options,
                                   const SourceLocation& where) const {
  const distributed::CallerScope caller(where);
  return accelerate::save_model(model, folder, options, world());
}

void Accelerator::save_lora(nn::ModuleBase& model, const std::string& folder,
                            const SourceLocation& where) const {
  const distributed::CallerScope caller(where);
  accelerate::save_lora(model, folder, world());
}

SavedModel Accelerator::save_merged_lora(nn::ModuleBase& model, const std::string& folder,
                                         const SaveModelOptions& options,
                                         const SourceLocation& where) const {
  const distributed::CallerScope caller(where);
  return accelerate::save_merged_lora(model, folder, options, world());
}

nn::LoadReport Accelerator::load_model(nn::ModuleBase& model, const std::string& path,
                                       accelerate::LoadModelOptions options,
                                       const SourceLocation& where) const {
  const distributed::CallerScope caller(where);
  options.first_rank_reads |= settings().fsdp_cpu_ram_efficient_loading.value;
  return accelerate::load_model(model, path, options, world());
}

std::string Accelerator::save_state(const std::string& folder,
                                    const accelerate::SaveStateOptions& options,
                                    const SourceLocation& where) {
  const distributed::CallerScope caller(where);
  state_->check_complete("save_state");
  state_->check_between_windows("save_state");
  state_->update_scale();
  return state_io().save_state(state_->training_state(), folder, options);
}

accelerate::LoadedState Accelerator::load_state(const std::string& folder,
                                                const accelerate::LoadStateOptions& options,
                                                const SourceLocation& where) {
  const distributed::CallerScope caller(where);
  state_->check_complete("load_state");
  state_->check_between_windows("load_state");
  return state_io().load_state(state_->training_state(), folder, options);
}

std::string Accelerator::distributed_type() const {
  return num_processes() == 1 ? "no"
                              : accelerate::text(*accelerate::find_setting("sharding"), settings());
}

std::string Accelerator::describe() const {
  State& state = *state_;
  state.forget_dead();
  PlainText<std::ostringstream> out;
  out << "rank " << process_index() << " of " << num_processes() << ", local "
      << local_process_index() << " of " << num_local_processes() << ", batches among "
      << state.data_ranks;
  if (state.dims->mesh().has("tp")) out << ", " << state.dims->mesh().describe();
  out << "\nsettings\n";
  PlainText<std::istringstream> settings(accelerate::describe(state.settings, true));
  for (std::string line; std::getline(settings, line);) out << "  " << line << '\n';
  if (state.settings.deepspeed) {
    const accelerate::DeepSpeedConfig& config = *state.settings.deepspeed;
    out << config.name << '\n'
        << accelerate::Import{.settings = {}, .lines = config.lines}.report();
    if (!state.batch_arithmetic.empty()) out << "  " << state.batch_arithmetic << '\n';
  }
  for (const auto& record : state.models) {
    out << "model " << record->model->type_name() << ": " << record->model->num_parameters()
        << " elements in " << record->parameters.size() << " parameters, windows of "
        << record->steps.value_or(state.steps) << " micro-batches\n";
    out << "  precision: "
        << precision::describe(
               precision::policy_of(*record->model).value_or(precision::Policy::f32()))
        << '\n';
    if (record->policy.fp8()) {
      PlainText<std::istringstream> layers(record->policy.fp8()->report().table());
      for (std::string line; std::getline(layers, line);) out << "  " << line << '\n';
    }
    PlainText<std::istringstream> layers(distributed::describe_layers(*record->model));
    for (std::string line; std::getline(layers, line);) out << "  " << line << '\n';
    if (record->parallel) out << "  " << record->parallel->describe();
    if (record->stages) {
      PlainText<std::istringstream> stages(record->stages->describe());
      for (std::string line; std::getline(stages, line);) out << "  " << line << '\n';
    }
  }
  for (const auto& record : state.optimizers) {
    out << "optimizer of " << record->parameters.size() << " parameters: steps with";
    for (const auto& model : state_->models_of(*record)) out << ' ' << model->model->type_name();
    out << '\n';
  }
  for (const data::LoaderBase* loader : loaders()) {
    out << "loader: " << state.loader_plan->describe(*loader) << '\n';
  }
  for (const optim::Schedule* schedule : schedules()) {
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
