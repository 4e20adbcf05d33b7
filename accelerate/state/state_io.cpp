#include <tessera/accelerate/state/state_io.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include <tessera/accelerate/state/model_io.h>
#include <tessera/accelerate/state/saved_state.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/random.h>
#include <tessera/data/dataloader.h>
#include <tessera/distributed/checkpoint/commit.h>
#include <tessera/distributed/checkpoint/parts.h>
#include <tessera/distributed/checkpoint/reader.h>
#include <tessera/distributed/transport/collectives.h>
#include <tessera/nn/module.h>
#include <tessera/optim/optimizer.h>

namespace tessera::accelerate {
namespace {

namespace fs = std::filesystem;
using distributed::CheckpointReader;
using distributed::SaveItem;

constexpr std::string_view kKind = "training-state";

std::string numbered(std::string_view kind, size_t index) {
  return std::string(kind) + "." + std::to_string(index) + ".";
}

std::string without_dot(const std::string& prefix) { return prefix.substr(0, prefix.size() - 1); }

// ---- From objects to tensors and back ----------------------------------------------------------

// What this rank gives of a state's tensors; those that are one tensor under several names once.
void add_state(std::vector<SaveItem>& items, std::map<std::string, std::string>& metadata,
               const std::string& prefix, const StateDict& state, distributed::Group& group) {
  TiedNames tied;
  for (const auto& [name, tensor] : state) {
    const std::string full = prefix + name;
    TS_CHECK(tensor.defined(), "save_state", "'", full,
             "' is undefined; leave it out of state_dict");
    if (const std::string* first = tied.first_name(full, tensor)) {
      metadata[std::string(kTiedPrefix) + full] = *first;
      continue;
    }
    for (SaveItem& item : distributed::items_of(full, tensor, group)) {
      items.push_back(std::move(item));
    }
  }
}

std::string random_name(int rank) { return "random." + std::to_string(rank); }

// Unsigned numbers as the bits of signed ones.
Tensor random_tensor() {
  const tessera::RandomState& random = random_state();
  const Tensor state = raw::empty({2}, kI64);
  state.data_as<int64_t>()[0] = static_cast<int64_t>(random.seed);
  state.data_as<int64_t>()[1] = static_cast<int64_t>(random.next_stream);
  return state;
}
tessera::RandomState random_of(const Tensor& state) {
  TS_CHECK_AS(FormatError, state.dtype() == kI64 && state.shape() == Shape{2}, "load_state",
              "the random numbers of a rank are i64[2]; the checkpoint has ", state,
              "; load an older checkpoint.");
  const int64_t* const numbers = state.data_as<int64_t>();
  return {.seed = static_cast<uint64_t>(numbers[0]),
          .next_stream = static_cast<uint64_t>(numbers[1])};
}

// The numbers of objects of each kind, as metadata says them.
std::map<std::string, int64_t> counts_of(const TrainingState& state, size_t registered) {
  const auto number = [](size_t size) { return static_cast<int64_t>(size); };
  return {{"models", number(state.models.size())},
          {"optimizers", number(state.optimizers.size())},
          {"schedules", number(state.schedules.size())},
          {"loaders", number(state.loaders.size())},
          {"objects", number(registered)},
          {"scaler", state.scaler.has_value()},
          {"counters", state.counters.has_value()}};
}

template <class Function>
void with_name(const std::string& name, Function&& function) {
  try {
    function();
  } catch (Error& error) {
    error.add_context(name);
    throw;
  }
}

}  // namespace

MapLocation parse_map_location(std::string_view text) {
  if (text == "cpu") return MapLocation::kCpu;
  if (text == "on_device") return MapLocation::kOnDevice;
  TS_THROW(ConfigError, "map_location", "must be cpu or on_device; got ", shown(text),
           "; give one of them.");
}

RunRequest should_checkpoint(distributed::Group& group) {
  RunRequest request = requested();
  if (group.size() > 1) {
    const Tensor highest = scalar_tensor(static_cast<int64_t>(request), kI64);
    distributed::all_reduce(highest, distributed::ReduceOp::kMax, group, {.tag = "checkpoint"});
    request = static_cast<RunRequest>(highest.item<int64_t>());
  }
  if (request != RunRequest::kNone) clear_request();
  return request;
}

// ---- StateIo -----------------------------------------------------------------------------------

struct StateIo::State {
  State(StateIoOptions given, distributed::Group& ranks)
      : options(std::move(given)), group(ranks), saver(ranks) {}

  StateIoOptions options;
  distributed::Group& group;
  int64_t iteration = 0;
  std::vector<Stateful> registered;
  std::map<int64_t, SaveStateHook> save_hooks;
  std::map<int64_t, LoadStateHook> load_hooks;
  int64_t next_hook = 0;
  // Rank 0's; the thread that saves uses it.
  NumberedCheckpoints checkpoints{{.project_dir = options.project_dir,
                                   .total_limit = options.total_limit,
                                   .keep_every = options.keep_every,
                                   .keep_best = options.keep_best,
                                   .larger_is_better = options.larger_is_better}};
  std::shared_ptr<State*> self = std::make_shared<State*>(this);  // for handles of hooks
  distributed::CheckpointSaver saver;  // last: its thread uses the others

  bool is_main() const { return group.rank() == 0; }

  void warn(const std::string& message) const {
    if (!is_main()) return;
    if (options.warn) return options.warn(message);
    std::fprintf(stderr, "%s\n", message.c_str());
  }

  int64_t of_first_rank(int64_t number) {
    if (group.size() == 1) return number;
    return distributed::broadcast_object(nlohmann::json(number), 0, group).get<int64_t>();
  }

  template <class Hook>
  HookHandle add_hook(std::map<int64_t, Hook> State::*hooks, Hook hook) {
    const int64_t id = next_hook++;
    (this->*hooks).emplace(id, std::move(hook));
    return HookHandle([self = std::weak_ptr<State*>(self), hooks, id] {
      if (const auto state = self.lock()) ((*state)->*hooks).erase(id);
    });
  }

  // ---- Saving

  std::vector<SaveItem> collect(const TrainingState& state, const std::string& folder,
                                std::map<std::string, std::string>& metadata) {
    std::vector<ModelWeights> models;
    for (nn::ModuleBase* model : state.models) models.push_back({model, model->state_dict()});
    const auto hooks = save_hooks;  // one may remove itself
    for (const auto& [id, hook] : hooks) hook(models, folder);

    std::vector<SaveItem> items;
    for (const ModelWeights& one : models) {
      const auto found = std::ranges::find(state.models, one.model);
      TS_CHECK(found != state.models.end(), "save_state",
               "a hook has added a model that was not there; hooks may take models off the list");
      const auto number = static_cast<size_t>(found - state.models.begin());
      const std::string prefix = numbered("model", number);
      if (options.whole_models) {
        const std::string name = number == 0 ? "model" : "model_" + std::to_string(number);
        save_state_dict(one.weights, (fs::path(folder) / name).string(), {}, group);
        metadata[whole_model_key(prefix)] = name;
        continue;
      }
      add_state(items, metadata, prefix, one.weights, group);
    }
    const auto add_all = [&](std::string_view kind, const auto& objects, const auto& state_of) {
      for (size_t i = 0; i < objects.size(); ++i) {
        with_name(numbered(kind, i), [&] {
          add_state(items, metadata, numbered(kind, i), state_of(objects[i]), group);
        });
      }
    };
    const auto pointed = [](const auto* object) { return object->state_dict(); };
    const auto itself = [](const Stateful& object) { return object.state_dict(); };
    add_all("optimizer", state.optimizers, pointed);
    add_all("schedule", state.schedules, itself);
    add_all("loader", state.loaders, pointed);
    add_all("object", registered, itself);
    add_all("fp8", state.fp8, itself);
    if (state.scaler) add_state(items, metadata, "scaler.", state.scaler->state_dict(), group);
    if (state.counters)
      add_state(items, metadata, "counters.", state.counters->state_dict(), group);
    items.push_back(SaveItem::part(random_name(group.rank()), random_tensor(), {2}, {0}));
    return items;
  }

  // ---- Loading

  // What every rank finds: the reader, or the reason why the folder cannot be loaded. Without a
  // place for the reason it is thrown.
  std::optional<CheckpointReader> open(const std::string& folder, std::string* reason) {
    std::exception_ptr own;
    std::optional<CheckpointReader> reader;
    try {
      reader.emplace(folder);
      reader->verify(group.rank(), group.size());
    } catch (...) {
      own = std::current_exception();
    }
    try {
      distributed::throw_together(own, "load_state", group);
    } catch (const DistributedError&) {
      throw;
    } catch (const Error& error) {
      if (reason == nullptr) throw;
      *reason = error.what();
      return std::nullopt;
    }
    reader->assume_verified();
    return reader;
  }

  // What the program and the checkpoint do not both have, by the beginning of its names.
  void compare(const TrainingState& state, const SavedState& saved, bool strict,
               LoadedState& result) const {
    for (const auto& [name, count] : counts_of(state, registered.size())) {
      const int64_t there = saved.number(name);
      TS_CHECK_AS(ConfigError, !strict || there == count, "load_state", "'",
                  saved.reader().folder(), "' holds ", there, " ", name, ", this program has ",
                  count, "; prepare and register the same objects as the program that saved it.");
      const bool one = name == "scaler" || name == "counters";
      for (int64_t i = std::min(there, count); i < std::max(there, count); ++i) {
        (there < count ? result.missing : result.unused)
            .push_back(one ? name
                           : without_dot(numbered(name.substr(0, name.size() - 1),
                                                  static_cast<size_t>(i))));
      }
    }
    for (size_t i = 0; i < state.fp8.size(); ++i) {
      const std::string prefix = numbered("fp8", i);
      if (!saved.has_section(prefix)) result.missing.push_back(without_dot(prefix));
    }
  }

  void restore_random(const SavedState& saved, RandomNumbers random) {
    if (random == RandomNumbers::kKeep) return;
    CheckpointReader& reader = saved.reader();
    const int before = reader.ranks(), now = group.size();
    const auto of_rank = [&](int rank) { return random_of(reader.view(random_name(rank))); };
    if (before == now) {
      random_state() = of_rank(group.rank());
      return;
    }
    const tessera::RandomState first = of_rank(0);
    for (int rank = 1; rank < before; ++rank) {
      const tessera::RandomState other = of_rank(rank);
      TS_CHECK_AS(ConfigError, other.seed == first.seed && other.next_stream == first.next_stream,
                  "load_state", "'", reader.folder(), "' was saved by ", before,
                  " ranks whose random numbers differed (rank 0 was at stream ", first.next_stream,
                  " of seed ", first.seed, ", rank ", rank, " at stream ", other.next_stream,
                  " of seed ", other.seed, "), and ", now,
                  " ranks load it: which rank goes on with which is not defined; load with ",
                  before, " ranks, or with .random = RandomNumbers::kKeep.");
    }
    random_state() = first;
  }

  void apply(const TrainingState& state, CheckpointReader& reader, const LoadStateOptions& options_,
             LoadedState& result) {
    Device device = kCpu;
    if (options_.map_location == MapLocation::kOnDevice) {
      for (const nn::ModuleBase* model : state.models) {
        const TensorList parameters = model->parameters();
        if (parameters.empty()) continue;
        device = parameters[0].device();
        break;
      }
    }
    const SavedState saved(reader, device);
    const auto kind = reader.metadata().find("kind");
    TS_CHECK_AS(FormatError, kind != reader.metadata().end() && kind->second == kKind, "load_state",
                "'", reader.folder(),
                "' is no checkpoint of a training state; give a folder that save_state has made.");
    compare(state, saved, options_.strict, result);
    const auto is_there = [&](const std::string& prefix) {
      return std::ranges::find(result.missing, without_dot(prefix)) == result.missing.end();
    };
    result.saved_by_ranks = reader.ranks();
    result.iteration = saved.number("iteration");

    std::vector<nn::ModuleBase*> models = state.models;
    const auto hooks = load_hooks;  // one may remove itself
    for (const auto& [id, hook] : hooks) hook(models, reader.folder());
    for (size_t i = 0; i < state.models.size(); ++i) {
      if (std::ranges::find(models, state.models[i]) == models.end()) continue;
      if (!is_there(numbered("model", i))) continue;
      with_name(numbered("model", i), [&] {
        nn::ModuleBase& model = *state.models[i];
        model.load_state_dict(model_of(saved, numbered("model", i), in_state(model.state_dict())));
      });
    }
    const auto load_all = [&](std::string_view name, const auto& objects, const auto& load) {
      for (size_t i = 0; i < objects.size(); ++i) {
        const std::string prefix = numbered(name, i);
        if (is_there(prefix)) with_name(prefix, [&] { load(objects[i], prefix); });
      }
    };
    const auto pointed = [&](auto* object, const std::string& prefix) {
      object->load_state_dict(saved.section(prefix));
    };
    const auto itself = [&](const Stateful& object, const std::string& prefix) {
      object.load_state_dict(saved.section(prefix));
    };
    // A state that was not stepped has no moments yet: the parameter says how they lie.
    const auto optimizer = [&](optim::Optimizer* object, const std::string& prefix) {
      object->load_state_dict(saved.section(
          prefix, [object](std::string_view name) { return object->state_like(name); }));
    };
    const auto any_object = [&](const Stateful& object, const std::string& prefix) {
      object.load_state_dict(saved.section(prefix, in_state(object.state_dict())));
    };
    // The scaler before the optimizers that it guards, schedules after those whose rates they set.
    if (state.scaler && is_there("scaler.")) {
      state.scaler->load_state_dict(saved.section("scaler."));
    }
    load_all("fp8", state.fp8, itself);
    load_all("optimizer", state.optimizers, optimizer);
    load_all("schedule", state.schedules, itself);
    load_all("loader", state.loaders, pointed);
    load_all("object", registered, any_object);
    if (state.counters && is_there("counters.")) {
      state.counters->load_state_dict(saved.section("counters."));
    }
    restore_random(saved, options_.random);
  }
};

StateIo::StateIo(StateIoOptions options, distributed::Group& group)
    : state_(std::make_unique<State>(std::move(options), group)) {
  const StateIoOptions& given = state_->options;
  TS_CHECK_AS(ConfigError, given.total_limit >= 0 && given.keep_every >= 0 && given.keep_best >= 0,
              "StateIo", "total_limit, keep_every and keep_best must not be negative; got ",
              given.total_limit, ", ", given.keep_every, " and ", given.keep_best,
              "; 0 stands for none.");
}

StateIo::~StateIo() {
  state_->self.reset();
  if (std::uncaught_exceptions() > 0) return;  // a save under way is given up
  try {
    state_->saver.wait();
  } catch (const std::exception& error) {
    state_->warn(error.what());
  }
}

void StateIo::add_registered(std::vector<std::optional<Stateful>> objects) {
  std::string positions;
  for (size_t i = 0; i < objects.size(); ++i) {
    if (!objects[i]) positions += (positions.empty() ? "" : ", ") + std::to_string(i);
  }
  TS_CHECK(positions.empty(), "register_for_checkpointing",
           "takes objects with state_dict and load_state_dict; the pointers at positions ",
           positions, " (counted from 0) are null; give objects that are there.");
  for (auto& object : objects) state_->registered.push_back(std::move(*object));
}

HookHandle StateIo::register_save_state_pre_hook(SaveStateHook hook) {
  return state_->add_hook(&State::save_hooks, std::move(hook));
}
HookHandle StateIo::register_load_state_pre_hook(LoadStateHook hook) {
  return state_->add_hook(&State::load_hooks, std::move(hook));
}

std::string StateIo::save_state(const TrainingState& state, const std::string& folder,
                                const SaveStateOptions& options) {
  State& own = *state_;
  own.saver.wait();
  const bool automatic = folder.empty();
  TS_CHECK_AS(ConfigError, !automatic || own.options.automatic_naming, "save_state",
              "needs a folder, or automatic naming; got neither; give one, or set ",
              "StateIoOptions::automatic_naming.");
  // Rank 0 says which is free.
  int64_t number =
      automatic && own.is_main() ? own.checkpoints.next_number(own.iteration) : own.iteration;
  if (automatic) number = own.of_first_rank(number);
  const std::string target = automatic ? numbered_folder(own.options.project_dir, number) : folder;

  distributed::SaveOptions save;
  std::map<std::string, std::string>& metadata = save.metadata;
  metadata["kind"] = kKind;
  metadata["run"] = own.checkpoints.run();
  metadata["iteration"] = std::to_string(automatic ? number + 1 : number);
  if (options.metric) metadata["metric"] = nlohmann::json(*options.metric).dump();
  for (const auto& [name, count] : counts_of(state, own.registered.size())) {
    metadata[name] = std::to_string(count);
  }
  save.replace = !automatic;
  save.asynchronous = own.options.asynchronous;
  save.at_stage = own.options.at_stage;
  if (automatic) {
    save.after_commit = [&own, number, metric = options.metric] {
      own.checkpoints.note(number, metric);
      own.checkpoints.rotate(number, [&own](const std::string& text) { own.warn(text); });
    };
    if (own.is_main()) {
      distributed::remove_leftovers(
          checkpoints_folder(own.options.project_dir),
          [](const std::string& name) { return checkpoint_number(name).has_value(); });
    }
  }
  own.saver.save(
      target,
      [&](const std::string& temporary, std::map<std::string, std::string>& all) {
        return own.collect(state, temporary, all);
      },
      save);
  if (automatic) own.iteration = number + 1;
  return target;
}

LoadedState StateIo::load_state(const TrainingState& state, const std::string& folder,
                                const LoadStateOptions& options) {
  State& own = *state_;
  own.saver.wait();
  const distributed::PhaseScope phase("load");
  const bool automatic = folder.empty();
  TS_CHECK_AS(ConfigError, !automatic || own.options.automatic_naming, "load_state",
              "needs a folder, or automatic naming; got neither; give one, or set ",
              "StateIoOptions::automatic_naming.");
  // Rank 0 says what there is: file systems may show other ranks a folder later.
  std::vector<std::string> candidates;
  int64_t newest = -1, of_other_runs = 0;
  if (automatic) {
    nlohmann::json found = {{"list", nlohmann::json::array()}, {"newest", -1}, {"others", 0}};
    if (own.is_main()) {
      const NumberedCheckpoints::Candidates seen = own.checkpoints.candidates();
      for (const NumberedCheckpoint& one : seen.list) found["list"].push_back(one.number);
      found["newest"] = seen.newest;
      found["others"] = seen.of_other_runs;
    }
    if (own.group.size() > 1) found = distributed::broadcast_object(found, 0, own.group);
    for (const auto& number : found["list"]) {
      candidates.push_back(numbered_folder(own.options.project_dir, number.get<int64_t>()));
    }
    newest = found["newest"].get<int64_t>();
    of_other_runs = found["others"].get<int64_t>();
    TS_CHECK_AS(ConfigError, !candidates.empty(), "load_state", "there is no checkpoint ",
                of_other_runs > 0 ? "of this run in '" : "in '",
                checkpoints_folder(own.options.project_dir),
                of_other_runs > 0 ? "', and others have " + std::to_string(of_other_runs) : "'",
                "; save one first, or give the folder to load.");
  } else {
    candidates.push_back(folder);
  }

  LoadedState result;
  std::optional<CheckpointReader> reader;
  for (const std::string& candidate : candidates) {
    std::string reason;
    reader = own.open(candidate, automatic ? &reason : nullptr);
    if (reader) {
      result.folder = candidate;
      break;
    }
    own.warn("load_state: '" + candidate + "' is passed over: " + reason);
    result.skipped.push_back({candidate, reason});
  }
  if (!reader) {
    std::string reasons;
    for (const auto& [name, reason] : result.skipped) reasons += "\n  " + reason;
    TS_THROW(FormatError, "load_state", "none of the ", candidates.size(), " checkpoints in '",
             checkpoints_folder(own.options.project_dir), "' can be loaded",
             of_other_runs > 0 ? " (" + std::to_string(of_other_runs) +
                                     " more are of other runs: give the folder)"
                               : "",
             ":", reasons);
  }
  std::exception_ptr error;
  try {
    own.apply(state, *reader, options, result);
  } catch (...) {
    error = std::current_exception();
  }
  distributed::throw_together(error, "load_state", own.group);
  const auto list_of = [](const std::vector<std::string>& names) {
    std::string list;
    for (const std::string& name : names) list += (list.empty() ? "" : ", ") + name;
    return list;
  };
  if (!result.missing.empty()) {
    own.warn("load_state: '" + result.folder + "' has no " + list_of(result.missing) +
             " of this program; they stay as they are");
  }
  if (!result.unused.empty()) {
    own.warn("load_state: this program has no " + list_of(result.unused) + " of '" + result.folder +
             "'; they are not loaded");
  }
  if (of_other_runs > 0 && !own.checkpoints.has_run()) {
    own.warn("load_state: '" + checkpoints_folder(own.options.project_dir) + "' has " +
             std::to_string(of_other_runs) + " checkpoints of other runs; loaded is '" +
             result.folder + "', the newest of " + "its run; give the folder to load another");
  }
  const auto run = reader->metadata().find("run");
  own.checkpoints.take_run(run != reader->metadata().end() ? run->second : "");
  // A damaged folder that was passed over keeps its number.
  result.iteration = std::max(result.iteration, automatic ? newest + 1 : 0);
  own.iteration = result.iteration;
  return result;
}

std::optional<std::string> StateIo::best_checkpoint() {
  State& own = *state_;
  own.saver.wait();
  int64_t number = -1;
  if (own.is_main()) {
    if (const auto best = own.checkpoints.best()) number = best->number;
  }
  number = own.of_first_rank(number);
  if (number < 0) return std::nullopt;
  return numbered_folder(own.options.project_dir, number);
}

void StateIo::wait() { state_->saver.wait(); }
bool StateIo::is_saving() const { return state_->saver.is_saving(); }
int64_t StateIo::iteration() const { return state_->iteration; }
void StateIo::set_iteration(int64_t iteration) {
  TS_CHECK(iteration >= 0, "StateIo", "an iteration is not negative; got ", iteration);
  state_->iteration = iteration;
}
const StateIoOptions& StateIo::options() const { return state_->options; }

}  // namespace tessera::accelerate
