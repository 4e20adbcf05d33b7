// Saves the whole state of a training into one folder and loads it.
//
//     StateIo io({.project_dir = "runs/1", .automatic_naming = true, .total_limit = 3});
//     io.register_for_checkpointing(my_early_stopping);
//     io.save_state(state);                    // runs/1/checkpoints/checkpoint_0
//     LoadedState loaded = io.load_state(state);  // the newest that is whole
//
// Folders have the box format of distributed/checkpoint: they appear whole or not at all, every
// byte of them is checked, and any number of ranks can load them. They hold models, optimizers
// (with fp32 masters), schedules, the loss scaler, the loaders' cursors, the random numbers of
// every rank's Context, counters, registered objects, and the additions of hooks.
//
// [Note: parts] DTensors are saved in their own placement, each rank writing boxes that it holds,
// and loaded into the program's placement, each rank reading boxes that it needs: any placements on
// any number of ranks, and whole tensors, into any others. Nothing is gathered. Replicated boxes
// are written once, distributed over the ranks that hold them. The mesh of a DTensor has all ranks
// of the group.
//
// [Note: another number of ranks] Tensors that all ranks share load anywhere. A loader's cursor
// counts samples over all ranks, so its epoch continues at the same place. Random numbers of a
// Context belong to a rank: if all ranks had the same, all get them back; if they differed, a load
// on another number of ranks is a ConfigError that says so, unless .random = kKeep.
//
// [Note: rotation] Old folders are removed after the new one is committed, never before, lowest
// number first, and only those that automatic naming made, checkpoint_N in PROJECT/checkpoints, and
// of those only what this run saved, or the run that it has loaded: a run that begins anew in a
// folder with checkpoints continues their numbers and keeps them. A folder is renamed before it is
// removed, so a crash leaves no partial checkpoint.
#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <tessera/accelerate/process/run.h>
#include <tessera/accelerate/state/numbered_checkpoints.h>  // list_checkpoints()
#include <tessera/autograd/autograd.h>
#include <tessera/core/state/state_dict.h>
#include <tessera/distributed/transport/group.h>

namespace tessera {
namespace nn {
class ModuleBase;
}
namespace optim {
class Optimizer;
}
namespace data {
class LoaderBase;
}
}  // namespace tessera

namespace tessera::distributed {
enum class SaveStage : uint8_t;
}

namespace tessera::accelerate {

// An object that returns its state as a StateDict and loads it.
template <class T>
concept HasState = requires(T& object, const T& view, const StateDict& state) {
  { view.state_dict() } -> std::convertible_to<StateDict>;
  object.load_state_dict(state);
};

// Refers to any such object, which must outlive this.
class Stateful {
 public:
  template <HasState T>
  Stateful(T& object)
      : save_([&object]() -> StateDict { return object.state_dict(); }),
        load_([&object](const StateDict& state) { object.load_state_dict(state); }) {}
  Stateful(std::function<StateDict()> save, std::function<void(const StateDict&)> load)
      : save_(std::move(save)), load_(std::move(load)) {}
  StateDict state_dict() const { return save_(); }
  void load_state_dict(const StateDict& state) const { load_(state); }

 private:
  std::function<StateDict()> save_;
  std::function<void(const StateDict&)> load_;
};

// What is saved and loaded; objects are matched by order. All ranks pass the same.
struct TrainingState {
  std::vector<nn::ModuleBase*> models = {};
  std::vector<optim::Optimizer*> optimizers = {};
  std::vector<Stateful> schedules = {};
  std::vector<data::LoaderBase*> loaders = {};
  std::optional<Stateful> scaler = {};
  std::vector<Stateful> fp8 = {};         // scales of models in fp8
  std::optional<Stateful> counters = {};  // the caller's, equal on all ranks
};

struct StateIoOptions {
  std::string project_dir = ".";
  // save_state() and load_state() without a folder use PROJECT/checkpoints/checkpoint_N.
  bool automatic_naming = false;
  int64_t total_limit = 0;  // newest folders that stay; 0: all
  int64_t keep_every = 0;   // also those whose number is a multiple; 0: none
  int64_t keep_best = 0;    // also this many with the best metric
  bool larger_is_better =
      false;  // of the metric: an accuracy; else the least is best, as of a loss
  // Models are saved whole, each in the files of save_model() in a folder of the checkpoint
  // ("model", "model_1"), gathered tensor by tensor to rank 0, during the call also for an
  // asynchronous save; everything else is saved as usual. Loading recognizes it.
  bool whole_models = false;
  // save_state() returns when the state is copied; a thread writes. At most one save is under way:
  // the next one waits for it.
  bool asynchronous = false;
  // Called on the main rank with problems that must not go unnoticed: a damaged folder that was
  // skipped, a folder that could not be removed. Default: a line to stderr. An asynchronous save
  // calls it from its thread.
  std::function<void(const std::string&)> warn = {};
  // Called on every rank at each stage of a save (distributed/checkpoint/commit.h); for tests.
  std::function<void(distributed::SaveStage)> at_stage = {};
};

struct SaveStateOptions {
  std::optional<double> metric = {};  // for keep_best
};

// The device of the tensors that an object gets from load_state. Models, optimizers and all others
// copy them to the device of their own.
enum class MapLocation : uint8_t {
  kCpu,
  kOnDevice,  // the device of the model's first parameter
};
// "cpu", "on_device"; ConfigError for anything else.
MapLocation parse_map_location(std::string_view text);

enum class RandomNumbers : uint8_t {
  kRestore,
  kKeep,  // the Context's current ones
};

struct LoadStateOptions {
  MapLocation map_location = MapLocation::kCpu;
  RandomNumbers random = RandomNumbers::kRestore;
  // Objects that only the program or only the checkpoint has are a ConfigError before anything
  // changes. Not strict: those that both have are loaded, in their order, and `warn` and the result
  // name the rest.
  bool strict = false;
};

// A folder that load_state skipped.
struct SkippedCheckpoint {
  std::string folder;
  std::string reason;
};
struct LoadedState {
  std::string folder;
  int64_t iteration = 0;  // of the next automatic name
  int saved_by_ranks = 1;
  std::vector<SkippedCheckpoint> skipped = {};  // newer ones that are damaged
  // Prefixes of names in the folder, "loader.1": objects that only the program has, which do not
  // change, and objects that only the checkpoint has.
  std::vector<std::string> missing = {}, unused = {};
};

// The weights that a hook sees before they are written.
struct ModelWeights {
  nn::ModuleBase* model = nullptr;
  StateDict weights;
};
// Called before anything is written. Files that the hook puts into `folder` (each by one rank)
// become part of the checkpoint. A model that it removes from the list is not saved.
using SaveStateHook =
    std::function<void(std::vector<ModelWeights>& models, const std::string& folder)>;
// Called before anything is loaded. A model that it removes from the list is not loaded.
using LoadStateHook =
    std::function<void(std::vector<nn::ModuleBase*>& models, const std::string& folder)>;

namespace detail {

// A null pointer does not identify an object.
template <class T>
constexpr bool is_registrable() {
  using Plain = std::remove_cvref_t<T>;
  if constexpr (HasState<Plain>) {
    return true;
  } else if constexpr (requires(Plain & pointer) { *pointer; }) {
    return HasState<std::remove_cvref_t<decltype(*std::declval<Plain&>())>>;
  } else {
    return false;
  }
}

// Names the position of a type that cannot be registered in the compiler's message.
template <size_t Position, class T>
constexpr void check_registrable() {
  static_assert(is_registrable<T>(),
                "register_for_checkpointing: the object at this Position (counted from 0) needs "
                "`StateDict state_dict() const` and `load_state_dict(const StateDict&)`");
}

}  // namespace detail

template <class... T>
inline constexpr bool kRegistrable = (detail::is_registrable<T>() && ...);

class StateIo {
 public:
  // ConfigError for negative limits. The group must outlive it.
  explicit StateIo(StateIoOptions options = {}, distributed::Group& group = distributed::world());
  // Waits for a save that is under way; its error goes to `warn`.
  ~StateIo();
  StateIo(const StateIo&) = delete;
  StateIo& operator=(const StateIo&) = delete;

  // Adds objects to save, in order. Objects, or pointers of any kind to them; ValueError lists the
  // positions of null pointers.
  template <class... T>
  void register_for_checkpointing(T&&... objects) {
    check_types<T...>(std::index_sequence_for<T...>());
    std::vector<std::optional<Stateful>> list;
    (list.push_back(reference_to(objects)), ...);
    add_registered(std::move(list));
  }
  HookHandle register_save_state_pre_hook(SaveStateHook hook);
  HookHandle register_load_state_pre_hook(LoadStateHook hook);

  // Saves into `folder`, or by automatic naming, and returns the folder's path. Collective; when it
  // returns (asynchronous: when wait() does) the checkpoint is committed for every rank. An
  // explicit folder that holds a checkpoint is replaced in one step; one that holds anything else
  // is refused. The automatic name is iteration(), or the next number after all in the folder.
  // ConfigError without a folder and without automatic naming. If one rank cannot write, every rank
  // throws, with the rank and the cause, and the folder of that name has not changed.
  std::string save_state(const TrainingState& state, const std::string& folder = {},
                         const SaveStateOptions& options = {});

  // Loads `folder`, or the newest checkpoint of automatic naming: of this run, if it has saved or
  // loaded; else of the run that saved last, and `warn` says so if the folder has several runs.
  // Collective: all ranks load the same. With automatic naming a damaged folder is skipped for the
  // one before, which `warn` and the result report; an explicit one is a FormatError. The whole
  // folder is checked before anything is changed, every rank reading its part. Values for a DTensor
  // reach its object as a DTensor of the same placement; models and optimizers know theirs, for
  // registered objects their current state_dict() decides. ConfigError if there is none, and see
  // LoadStateOptions::strict and [Note: another number of ranks]. An object's error about its state
  // is rethrown; objects before it are then loaded already.
  LoadedState load_state(const TrainingState& state, const std::string& folder = {},
                         const LoadStateOptions& options = {});

  // The checkpoint of automatic naming with the best metric (SaveStateOptions::metric), of the run
  // whose newest load_state() would take; the newest of equals, nothing if none has a metric.
  // Collective.
  std::optional<std::string> best_checkpoint();

  // Waits until the current save is committed; throws its error.
  void wait();
  bool is_saving() const;

  // The number of the next automatic name. load_state() sets it.
  int64_t iteration() const;
  void set_iteration(int64_t iteration);
  const StateIoOptions& options() const;

 private:
  template <class... T, size_t... Position>
  static constexpr void check_types(std::index_sequence<Position...>) {
    (detail::check_registrable<Position, T>(), ...);
  }
  template <class T>
  static std::optional<Stateful> reference_to(T& object) {
    if constexpr (HasState<T>) {
      return Stateful(object);
    } else {
      if (!object) return std::nullopt;
      return Stateful(*object);
    }
  }
  void add_registered(std::vector<std::optional<Stateful>> objects);

  struct State;
  std::unique_ptr<State> state_;
};

// The request of SIGTERM or SIGUSR1 to any rank, the same answer on every rank, for one small
// collective. It clears a kCheckpoint; kCheckpointAndStop stays.
RunRequest should_checkpoint(distributed::Group& group = distributed::world());

}  // namespace tessera::accelerate
