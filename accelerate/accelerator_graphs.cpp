#include <tessera/accelerate/graphed_step.h>

#include <algorithm>
#include <map>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

#include <tessera/accelerate/accelerator_state.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/node.h>
#include <tessera/core/context.h>
#include <tessera/core/cuda/graph.h>
#include <tessera/core/error.h>
#include <tessera/core/gpu/backend.h>
#include <tessera/core/random.h>
#include <tessera/distributed/transport/captured_calls.h>
#include <tessera/optim/step_graph.h>

namespace tessera::accelerate {
namespace {

using optim::StepGraph;

constexpr const char* kGraphedStep = "graphed_step";

// All that the host decides a micro-batch by, but addresses.
using Key = std::vector<double>;

bool same_state(const RandomState& a, const RandomState& b) {
  return a.seed == b.seed && a.next_stream == b.next_stream;
}

}  // namespace

struct GraphedStep::Impl {
  using State = Accelerator::State;

  // What the host has of the models and optimizers, to go back to where a capture is refused.
  struct Moment {
    struct OfModel {
      std::shared_ptr<ModelRecord> record;
      StepWindow window;
      bool consumed, explicit_weights;
      double divisor;
      KeptGradients kept;
      std::optional<distributed::BackwardPass::HostState> pass;
      TensorList gradients;  // of its parameters
    };
    struct OfOptimizer {
      std::shared_ptr<OptimizerRecord> record;
      bool clipped, attempted, skipped;
      double factor, skip;  // of next_step()
      Tensor factor_on_device;
    };
    std::vector<OfModel> models;
    std::vector<OfOptimizer> optimizers;
    State::Counters counters;
    RandomState random;
    bool sync_gradients = true;
  };

  // A place of the window whose work is a graph.
  struct Place {
    Place(const Device& device, const std::shared_ptr<gpu::StreamHandle>& stream,
          StepGraph::Function work)
        : step(device, stream, std::move(work)) {}
    TensorList gradients;  // that it found, of all parameters; kept, as it reads and writes them
    std::vector<std::shared_ptr<ModelRecord>> opened;
    Moment after;
    std::vector<int64_t> reductions;  // by model
    distributed::CapturedCalls calls;
    StepGraph step;  // goes first
  };

  std::weak_ptr<State> weak_state;
  Function function;
  GraphedStepOptions options;
  std::shared_ptr<gpu::StreamHandle> stream;  // undefined: no graphs
  std::map<Key, int64_t> calls;               // as they are
  std::map<Key, std::unique_ptr<Place>> places;
  int64_t replays = 0, calls_as_they_are = 0;

  // ---- What the host knows

  static double weight_of(State& state) { return state.weigh(std::nullopt); }
  static bool ends(State& state) {
    return state.sync_with_dataloader && state.loader_plan->end_of_loader();
  }
  static StepWindow next_window(State& state, const ModelRecord& record) {
    StepWindow next = record.window;
    next.begin_micro(record.steps.value_or(state.steps), ends(state));
    return next;
  }

  static Key key_of(State& state, const TensorList& inputs) {
    Key key;
    const auto add = [&](auto... values) { (key.push_back(static_cast<double>(values)), ...); };
    for (const Tensor& x : inputs) {
      add(x.dtype(), x.shape().size());
      for (const int64_t size : x.shape()) add(size);
    }
    add(weight_of(state), state.loss_scaling.update_is_due());
    for (const auto& record : state.models) {
      const StepWindow next = next_window(state, *record);
      add(next.is_boundary(), next.index() == 0, next.pending(), next.reduced());
      // What the sum is divided by, and who it is that divides.
      if (next.is_boundary()) add(next.index(), next.weight());
      if (next.reduced()) add(record->divisor);
      if (record->parallel) add(record->parallel->pass().active_ranks, state.joined);
      add(record->consumed, record->no_sync > 0, record->triggered > 0, record->local,
          record->kept.empty(), record->model->is_training());
      if (record->parallel) {
        const distributed::BackwardPass& pass = record->parallel->pass();
        add(pass.holds_unreduced(), pass.params().size());  // which have buckets
      }
      // 32 flags in a number.
      uint32_t flags = 0;
      for (size_t i = 0; i < record->parameters.size(); ++i) {
        if (i % 32 == 0 && i > 0) add(std::exchange(flags, 0));
        flags = flags << 1 | (record->parameters[i].tensor.requires_grad() ? 1u : 0u);
      }
      add(flags);
    }
    return key;
  }

  static TensorList gradients_of(const State& state) {
    TensorList gradients;
    for (const auto& record : state.models) {
      for (const auto& [name, parameter] : record->parameters) {
        gradients.push_back(parameter.grad());
      }
    }
    return gradients;
  }
  static bool same(const TensorList& a, const TensorList& b) {
    return std::ranges::equal(a, b, [](const Tensor& x, const Tensor& y) {
      return x.defined() == y.defined() && (!x.defined() || x.is(y));
    });
  }
  // Whether gradients will be there again at a later call: those that a graph has left, or that
  // have a place of their own.
  bool gradients_stay(const State& state) const {
    std::unordered_set<const TensorImpl*> known;
    for (const auto& [key, place] : places) {
      for (const Moment::OfModel& model : place->after.models) {
        for (const Tensor& gradient : model.gradients) {
          if (gradient.defined()) known.insert(gradient.impl());
        }
      }
    }
    for (const auto& record : state.models) {
      for (const auto& [name, parameter] : record->parameters) {
        const Tensor gradient = parameter.grad();
        if (!gradient.defined() || known.contains(gradient.impl())) continue;
        if (autograd_slot(parameter)->main_grad.is(gradient)) continue;
        return false;
      }
    }
    return true;
  }

  static Moment moment_of(const State& state) {
    Moment moment{.models = {},
                  .optimizers = {},
                  .counters = state.counters,
                  .random = state.random,
                  .sync_gradients = state.sync_gradients};
    for (const auto& record : state.models) {
      Moment::OfModel model{.record = record,
                            .window = record->window,
                            .consumed = record->consumed,
                            .explicit_weights = record->explicit_weights,
                            .divisor = record->divisor,
                            .kept = record->kept,
                            .pass = {},
                            .gradients = {}};
      if (record->parallel) model.pass = record->parallel->pass().host_state();
      for (const auto& [name, parameter] : record->parameters) {
        model.gradients.push_back(parameter.grad());
      }
      moment.models.push_back(std::move(model));
    }
    for (const auto& record : state.optimizers) {
      const double* const next_step = record->optimizer->next_step().data_as<double>();
      moment.optimizers.push_back({record, record->clipped, record->attempted, record->skipped,
                                   next_step[0], next_step[1],
                                   record->optimizer->next_step_factor()});
    }
    return moment;
  }

  static void give_gradients(const Moment::OfModel& model) {
    const NamedTensors& parameters = model.record->parameters;
    for (size_t i = 0; i < parameters.size(); ++i)
      parameters[i].tensor.set_grad(model.gradients[i]);
  }

  static void go_back(State& state, const Moment& moment) {
    for (const Moment::OfModel& model : moment.models) {
      ModelRecord& record = *model.record;
      give_gradients(model);
      record.window = model.window;
      record.consumed = model.consumed;
      record.explicit_weights = model.explicit_weights;
      record.divisor = model.divisor;
      record.kept = model.kept;
      if (model.pass && record.parallel) {
        record.parallel->pass().abandon_backward();
        record.parallel->pass().set_host_state(*model.pass);
      }
    }
    for (const Moment::OfOptimizer& optimizer : moment.optimizers) {
      OptimizerRecord& record = *optimizer.record;
      record.clipped = optimizer.clipped;
      record.attempted = optimizer.attempted;
      record.skipped = optimizer.skipped;
      record.clip.reset();
      double* const next_step = record.optimizer->next_step().data_as<double>();
      next_step[0] = optimizer.factor;
      next_step[1] = optimizer.skip;
      record.optimizer->scale_next_step(optimizer.factor_on_device);
    }
    state.counters = moment.counters;
    state.random = moment.random;
    state.sync_gradients = moment.sync_gradients;
    state.loss_scaling.forget_norms();
  }

  // ---- Calls

  // The scale of the next loss, here and not at its backward: one place of the window has it all.
  static void end_step(State& state) {
    if (state.loss_scaling.is_on_device() && state.loss_scaling.update_is_due()) {
      state.update_scale();
    }
  }

  TensorList call_as_it_is(State& state, const TensorList& inputs) {
    ++calls_as_they_are;
    StepGraph step(state.device, stream, [&](const TensorList& given) {
      const ScopedValue<bool> graphed(state.clipping.in_graphed_step, true);
      TensorList results = function(given);
      end_step(state);
      return results;
    });
    return step(inputs, StepGraph::Way::kAsItIs);
  }

  void check_captured(const State& state, const State::CaptureNotes& notes) const {
    const auto check = [](bool holds, const auto&... reason) {
      TS_CHECK_AS(UnsupportedError, holds, kGraphedStep, reason...,
                  "; put it right, or leave the setting cuda_graphs false");
    };
    check(notes.micro_batches == 1, "the function opens ", notes.micro_batches,
          " micro-batches, and a graph is of one: call accumulate() once in it");
    for (const auto& record : state.optimizers) {
      check(!record->clip, "the function clips the gradients of ", record->parameters.size(),
            " parameters and does not step with them: both belong in it");
    }
    for (const auto& record : state.models) {
      check(record->kept.empty(), "gradients of ", record->type_name,
            " from before the window are kept aside: let zero_grad() take them away");
      check(!record->parallel || record->parallel->pass().can_be_repeated(), "the gradients of ",
            record->type_name, " lie in parts or with the host, or a hook sends them");
    }
    check(!state.loss_scaling.update_is_due(),
          "the loss scale waits for the step of another optimizer");
  }

  TensorList captured_work(State& state, State::CaptureNotes& notes, const TensorList& given) {
    const RandomState begin = std::exchange(random_state(), notes.programs);
    const ScopedValue<State::CaptureNotes*> scope(state.capturing, &notes);
    const ScopedValue<bool> graphed(state.clipping.in_graphed_step, true);
    const distributed::CapturedCalls::Scope calls(notes.calls);
    TensorList results = function(given);
    end_step(state);
    TS_CHECK_AS(UnsupportedError, same_state(random_state(), notes.programs), kGraphedStep,
                "the function draws random numbers outside of its prepared models, which each "
                "replay would repeat; draw them before, and give them as inputs");
    check_captured(state, notes);
    random_state() = {.seed = begin.seed, .next_stream = state.random.next_stream};
    return results;
  }

  // The program's random numbers are put aside: a graph knows one sequence, that of its models.
  class ModelsRandom {
   public:
    explicit ModelsRandom(const RandomState& of_models)
        : programs_(std::exchange(random_state(), of_models)) {}
    ~ModelsRandom() { random_state() = programs_; }
    ModelsRandom(const ModelsRandom&) = delete;
    ModelsRandom& operator=(const ModelsRandom&) = delete;
    const RandomState& programs() const { return programs_; }

   private:
    RandomState programs_;
  };

  TensorList capture(State& state, const Key& key, const TensorList& inputs) {
    const Moment before = moment_of(state);
    State::CaptureNotes notes;
    state.begin_random_numbers();
    const ModelsRandom random(state.random);
    notes.programs = random.programs();
    auto place = std::make_unique<Place>(state.device, stream,
                                         [this, &state, &notes](const TensorList& given) {
                                           return captured_work(state, notes, given);
                                         });
    place->gradients = gradients_of(state);
    TensorList results;
    try {
      results = place->step(inputs, StepGraph::Way::kGraph);
    } catch (...) {
      go_back(state, before);
      throw;
    }
    place->opened = std::move(notes.opened);
    place->calls = std::move(notes.calls);
    place->after = moment_of(state);
    for (const Moment::OfModel& model : place->after.models) {
      if (model.pass) {
        const auto was = std::ranges::find(before.models, model.record, &Moment::OfModel::record);
        place->reductions.push_back(model.pass->reductions - was->pass->reductions);
      } else {
        place->reductions.push_back(0);
      }
    }
    state.loss_scaling.forget_norms();
    note_versions(*place);
    places.emplace(key, std::move(place));
    return results;
  }

  // What the graph has written.
  static void note_versions(const Place& place) {
    for (const Moment::OfModel& model : place.after.models) {
      for (const Tensor& gradient : model.gradients) {
        if (gradient.defined()) gradient.bump_version();
      }
    }
  }

  // The ranks agree beside the graph on what its capture had them agree on: see
  // distributed/backward/backward_pass.h.
  TensorList replay(State& state, Place& place, const TensorList& inputs) {
    const double weight = weight_of(state);
    std::vector<StepWindow> windows;  // of the opened models, as this micro-batch makes them
    for (const auto& record : place.opened) {
      windows.push_back(next_window(state, *record));
      windows.back().add_weight(weight);
    }
    std::vector<distributed::BackwardPass*> reducing;
    bool weighs_the_same = true;
    for (size_t i = 0; i < place.after.models.size(); ++i) {
      const Moment::OfModel& model = place.after.models[i];
      if (!model.pass || place.reductions[i] == 0) continue;
      const auto own = std::ranges::find(place.opened, model.record);
      const StepWindow* const window =
          own == place.opened.end() ? nullptr
                                    : &windows[static_cast<size_t>(own - place.opened.begin())];
      model.record->parallel->set_plan(
          state.plan_backward(*model.record, window, /*more=*/false, weight));
      distributed::BackwardPass& pass = model.record->parallel->pass();
      weighs_the_same &=
          !pass.agree_on_weight() || pass.window_weight() == model.pass->window_weight;
      reducing.push_back(&pass);
    }
    if (!weighs_the_same) return call_as_it_is(state, inputs);
    const RandomState was = state.random;
    state.begin_random_numbers();
    TensorList results;
    try {
      const ModelsRandom random(state.random);
      results = place.step(inputs, StepGraph::Way::kGraph);
      state.random = random_state();
    } catch (const std::exception& error) {
      // The optimizer refuses what the graph cannot know; the other ranks wait.
      state.random = was;
      for (distributed::BackwardPass* const pass : reducing) pass->fail_backward(error.what());
      throw;
    }
    ++replays;
    for (size_t i = 0; i < windows.size(); ++i) place.opened[i]->window = windows[i];
    take_part(state, place);
    return results;
  }

  // What the function does on the host.
  static void take_part(State& state, const Place& place) {
    place.calls.repeat();
    for (const auto& record : place.opened) record->explicit_weights = false;
    state.counters.micro_batches += state.data_ranks;
    ++state.next_id;
    note_versions(place);
    for (size_t i = 0; i < place.after.models.size(); ++i) {
      const Moment::OfModel& model = place.after.models[i];
      ModelRecord& record = *model.record;
      give_gradients(model);
      record.consumed = model.consumed;
      record.divisor = model.divisor;
      if (model.window.pending()) record.window.set_pending();
      if (model.window.reduced()) record.window.set_reduced();
      if (model.pass) record.parallel->pass().repeat(*model.pass, place.reductions[i]);
    }
    for (const Moment::OfOptimizer& optimizer : place.after.optimizers) {
      optimizer.record->attempted = optimizer.attempted;
      optimizer.record->skipped = optimizer.skipped;
      optimizer.record->clipped = optimizer.clipped;
    }
    state.sync_gradients = place.after.sync_gradients;
  }

  TensorList call(const TensorList& inputs) {
    const auto state = weak_state.lock();
    TS_CHECK(state != nullptr, kGraphedStep,
             "the Accelerator that made the step is gone; it must outlive it");
    if (!stream) {
      ++calls_as_they_are;
      TensorList results;
      for (const Tensor& x : function(inputs)) {
        results.push_back(x.defined() ? x.detach() : Tensor());
      }
      end_step(*state);
      return results;
    }
    state->forget_dead();
    Key key = key_of(*state, inputs);
    if (const auto found = places.find(key); found != places.end()) {
      if (!same(gradients_of(*state), found->second->gradients)) {
        return call_as_it_is(*state, inputs);
      }
      return replay(*state, *found->second, inputs);
    }
    int64_t& made = calls[key];
    if (made < options.warmup || static_cast<int64_t>(places.size()) >= options.max_graphs) {
      ++made;
      return call_as_it_is(*state, inputs);
    }
    if (!gradients_stay(*state)) {
      const bool begins = std::ranges::any_of(state->models, [](const auto& record) {
        return record->window.is_boundary() &&
               std::ranges::any_of(record->parameters, [](const NamedTensor& named) {
                 return named.tensor.grad().defined();
               });
      });
      TS_CHECK_AS(UnsupportedError, !begins, kGraphedStep,
                  "gradients are there before the window begins, and a graph would add to these "
                  "for ever; call zero_grad(), which takes them away, in the function");
      return call_as_it_is(*state, inputs);  // the graph of the window's begin comes first
    }
    TensorList results = capture(*state, key, inputs);
    ++replays;
    return results;
  }
};

GraphedStep::GraphedStep(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
GraphedStep::GraphedStep(GraphedStep&&) noexcept = default;
GraphedStep& GraphedStep::operator=(GraphedStep&&) noexcept = default;
GraphedStep::~GraphedStep() = default;

TensorList GraphedStep::operator()(const TensorList& inputs) { return impl_->call(inputs); }

int64_t GraphedStep::num_graphs() const { return static_cast<int64_t>(impl_->places.size()); }
int64_t GraphedStep::replays() const { return impl_->replays; }
int64_t GraphedStep::calls_as_they_are() const { return impl_->calls_as_they_are; }
int64_t GraphedStep::pool_bytes() const {
  int64_t bytes = 0;
  for (const auto& [key, place] : impl_->places) bytes += place->step.pool_bytes();
  return bytes;
}
void GraphedStep::reset() {
  impl_->places.clear();
  impl_->calls.clear();
}

}  // namespace tessera::accelerate

namespace tessera {

accelerate::GraphedStep Accelerator::graphed_step(accelerate::GraphedStep::Function function,
                                                  const accelerate::GraphedStepOptions& options) {
  constexpr const char* kWhere = "graphed_step";
  TS_CHECK(function != nullptr, kWhere, "expects a function; got an empty one");
  TS_CHECK(options.warmup >= 2 && options.max_graphs >= 1, kWhere,
           "warmup must be at least 2, as states are made in the first step and buckets in the "
           "second, and max_graphs at least 1; got ",
           options.warmup, " and ", options.max_graphs);
  auto impl = std::make_unique<accelerate::GraphedStep::Impl>();
  impl->weak_state = state_;
  impl->function = std::move(function);
  impl->options = options;
  if (const Device where = device(); where.is_cuda() && state_->settings.cuda_graphs) {
    const auto& settings = state_->settings;
    TS_CHECK_AS(UnsupportedError, settings.sharding.value == accelerate::Sharding::kDdp, kWhere,
                "gathers of parts are not captured; leave sharding out (",
                settings.sharding.origin.describe(), "), or set cuda_graphs to false");
    state_->device = where;
    impl->stream = gpu::make_stream(where.index);
  }
  return accelerate::GraphedStep(std::move(impl));
}

}  // namespace tessera
