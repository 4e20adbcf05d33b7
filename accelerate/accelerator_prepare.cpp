// What prepare() does with models, optimizers, loaders and schedules.
#include <algorithm>
#include <ranges>
#include <utility>

#include <tessera/accelerate/accelerator_state.h>
#include <tessera/accelerate/parallelize.h>
#include <tessera/accelerate/settings/deepspeed_config.h>
#include <tessera/autograd/autograd.h>
#include <tessera/core/error.h>
#include <tessera/core/random.h>
#include <tessera/core/tensor/element_guard.h>
#include <tessera/core/tensor/placement.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/data/dataloader.h>

namespace tessera {
namespace {

using distributed::DataParallelModel;
using optim::StepDecision;

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

// Of whole states whose parameters are parts now each rank keeps its own.
void cut_states(optim::Optimizer& optimizer) {
  const StateDict state = optimizer.state_dict();
  const bool any = std::ranges::any_of(state, [&](const NamedTensor& entry) {
    const Tensor parameter = optimizer.state_like(entry.name);
    return parameter.defined() && tensor_placement(parameter) != nullptr &&
           tensor_placement(entry.tensor) == nullptr;
  });
  if (any) optimizer.load_state_dict(state);
}

}  // namespace

// ---- Objects that died -------------------------------------------------------------------------

void Accelerator::State::forget_dead() {
  const auto forget = [this](auto& records, const auto& life_of, const auto& describe) {
    return std::erase_if(records, [&](const auto& record) {
      if (!life_of(record).ended()) return false;
      gone.push_back(describe(record));
      return true;
    });
  };
  const auto held = [](const auto& record) -> const Life& { return record->life; };
  const auto own = [](const auto& record) -> const Life& { return record.life; };
  generation +=
      forget(models, held, [](const auto& record) { return "a model " + record->type_name; });
  forget(optimizers, held, [](const auto& record) {
    return "an optimizer of " + std::to_string(record->parameters.size()) + " parameters";
  });
  forget(schedules, own, [](const auto&) { return "a schedule"; });
  forget(plateau_schedules, own, [](const auto&) { return "a plateau schedule"; });
}

void Accelerator::State::check_complete(std::string_view where) {
  forget_dead();
  std::string list;
  for (const std::string& object : gone) list += (list.empty() ? "" : ", ") + object;
  TS_CHECK(gone.empty(), where,
           "prepared objects are gone (they died, or another Accelerator prepared "
           "them), and a checkpoint would be without "
           "them: ",
           list,
           "; save and load while they live, or let go of all that was prepared by "
           "free_memory() and prepare those that are left");
}

// ---- Preparation -------------------------------------------------------------------------------

void Accelerator::State::prepare_model(nn::ModuleBase& model) {
  NamedTensors parameters = model.named_parameters();
  if (const auto known = find(model)) {
    // Frozen as a whole the ranks have left it alone.
    const bool begins_to_train =
        known->parallel == nullptr &&
        std::ranges::any_of(known->left_alone,
                            [](const NamedTensor& named) { return named.tensor.requires_grad(); });
    if (same_tensors(known->parameters, parameters) && !begins_to_train) return;
    known->let_go();  // optimizers may hold the record for a while
    std::erase(models, known);
  }
  for (const auto& [name, tensor] : parameters) {
    TS_CHECK_AS(ConfigError, !settings.cpu || tensor.device().is_cpu() || tensor.is_meta(),
                "prepare", "the setting cpu (", settings.cpu.origin.describe(),
                ") asks for the CPU; '", name, "' of ", model.type_name(), " is ", tensor,
                "; leave it there, or cpu unset");
  }
  const auto is_elsewhere = [&](const NamedTensor& named) {
    return named.tensor.device() != device && !named.tensor.is_meta();
  };
  if (device.is_cuda() && (std::ranges::any_of(parameters, is_elsewhere) ||
                           std::ranges::any_of(model.named_buffers(), is_elsewhere))) {
    model.to(device);
  }
  for (const auto& [name, tensor] : parameters) {
    TS_CHECK_AS(ConfigError, element_guard(tensor) == nullptr, "prepare", "'", name, "' of ",
                model.type_name(), " is ", tensor,
                ": an earlier prepare(), fully_shard() or zero() has cut it, and a rank's part is "
                "all that it keeps; make the model anew, and load into it what was saved");
  }
  auto record = std::make_shared<ModelRecord>();
  record->model = &model;
  record->type_name = model.type_name();
  record->parameters = std::move(parameters);
  record->handles.push_back(model.register_call_scope(
      [weak = weak_from_this(), own = std::weak_ptr(record),
       life = record->life.token()](nn::ModuleBase&) -> std::shared_ptr<void> {
        const auto state = weak.lock();
        const auto held = own.lock();
        if (!state || !held) return nullptr;
        if (grad_enabled()) {
          state->refuse_in_capture("a recorded call of a prepared model");
          held->check_left_alone();
        }
        // The scope's state lives with it.
        auto scope = std::make_shared<ForwardScope>(state->random, state->forward_depth);
        return {scope.get(), [state, scope](void*) mutable { scope.reset(); }};
      }));
  accelerate::ModelMaterialisation missing(model, settings, dims->state_ranks(), device);
  accelerate::parallelize(
      *record, model, settings, *dims,
      {.device = device, .missing = &missing, .steps_alone = [own = std::weak_ptr(record)] {
         const auto record = own.lock();
         return record && record->local;
       }});
  if (record->parallel) {
    for (const Tensor& whole : record->parallel->wholes()) {
      record->wholes.push_back({.name = {}, .tensor = whole});
    }
    // What ran forward under no_sync() is not reduced.
    record->parallel->set_forward_observer(
        [weak = std::weak_ptr(record)]() -> DataParallelModel::BeforeBackward {
          const auto own = weak.lock();
          if (!own || own->no_sync == 0) return {};
          return [weak] {
            const auto record = weak.lock();
            if (record && record->parallel && record->triggered == 0) {
              record->parallel->pass().plan.sync_gradients = false;
            }
          };
        });
  }
  if (dims->loss_ranks().size() > 1 && settings.pp_size == 1) {
    for (const NamedTensor& named : record->parameters) {
      const bool ignored =
          accelerate::cuts_parameters(settings) && tensor_placement(named.tensor) == nullptr;
      if (!record->parallel || ignored) record->left_alone.push_back(named);
    }
  }
  for (const auto& [name, value] : std::exchange(record->masters, {})) {
    const Tensor& parameter =
        std::ranges::find(record->parameters, name, &NamedTensor::name)->tensor;
    record->originals[parameter.impl()] = {value, parameter.version(), parameter.data()};
  }
  missing.give([&](const Tensor& parameter, const Tensor& value) {
    if (!parameter.requires_grad() || parameter.dtype() == value.dtype()) return;
    record->originals[parameter.impl()] = {value, parameter.version(), parameter.data()};
  });
  if (settings.pp_size > 1) deal_over_stages(*record);
  models.push_back(std::move(record));
  ++generation;
}

void Accelerator::State::prepare_optimizer(optim::Optimizer& optimizer) {
  NamedTensors parameters = optimizer.parameters();
  if (const OptimizerRecord* known = find(optimizer)) {
    if (same_tensors(known->parameters, parameters)) return;
    std::erase_if(optimizers, [&](const auto& record) { return record.get() == known; });
  } else if (settings.deepspeed) {
    check_configured(&optimizer, settings.deepspeed->optimizer.has_value(), "optimizer",
                     "optimizer");
  }
  auto record = std::make_shared<OptimizerRecord>();
  record->optimizer = &optimizer;
  record->parameters = std::move(parameters);
  const std::weak_ptr<State> weak = weak_from_this();
  const std::weak_ptr<OptimizerRecord> own = record;
  optimizer.set_step_gate(
      [weak, own, life = record->life.token()] {
        const auto state = weak.lock();
        const auto record = own.lock();
        return state && record ? state->may_step(*record) : StepDecision{};
      },
      {.answers_for_replays = true});
  optimizer.set_zero_grad_gate([weak, own] {
    const auto state = weak.lock();
    const auto record = own.lock();
    return !state || !record || state->may_clear(*record);
  });
  optimizers.push_back(std::move(record));
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

void Accelerator::State::prepare_loader(const accelerate::LoaderRequest& request) {
  const std::optional<int64_t> seed = settings.data_seed.value;
  if (seed && !loader_plan->is_prepared(*request.loader)) {
    auto* const indexed = dynamic_cast<data::IndexedLoader*>(request.loader);
    if (indexed != nullptr) indexed->set_shuffle_seed(static_cast<uint64_t>(*seed));
  }
  request.prepare(*loader_plan);
  if (device.is_cuda() && request.loader->options().device != device) {
    request.loader->set_device(device);
  }
}

template <class T>
void Accelerator::State::prepare_schedule(std::vector<ScheduleRecord<T>>& known, T& schedule) {
  if (std::ranges::find(known, &schedule, &ScheduleRecord<T>::schedule) != known.end()) return;
  if (settings.deepspeed) {
    check_configured(&schedule, settings.deepspeed->scheduler.has_value(), "scheduler", "schedule");
  }
  ScheduleRecord<T> record{.schedule = &schedule};
  schedule.set_step_gate([weak = weak_from_this(), own = &schedule, life = record.life.token()] {
    const auto state = weak.lock();
    if (state) state->refuse_in_graphed_step(true, "a schedule's step", "a learning rate");
    return state && state->settings.step_schedule_with_optimizer
               ? state->may_step_schedule_of(own->optimizer())
               : StepDecision{};
  });
  known.push_back(std::move(record));
}

// In one order, whatever that of the arguments: what comes later looks at what came before.
void Accelerator::run(const accelerate::Preparation& preparation) {
  state_->device = device();
  state_->forget_dead();
  for (nn::ModuleBase* model : preparation.models) state_->prepare_model(*model);
  for (optim::Optimizer* optimizer : preparation.optimizers) state_->prepare_optimizer(*optimizer);
  for (const auto& record : state_->optimizers) cut_states(*record->optimizer);
  for (const accelerate::LoaderRequest& loader : preparation.loaders)
    state_->prepare_loader(loader);
  for (optim::Schedule* schedule : preparation.schedules) {
    state_->prepare_schedule(state_->schedules, *schedule);
  }
  for (optim::PlateauSchedule* schedule : preparation.plateau_schedules) {
    state_->prepare_schedule(state_->plateau_schedules, *schedule);
  }
}

}  // namespace tessera
