// Everything that a training is, saved into one folder and brought back.
//
//     StateIo io({.project_dir = "runs/1", .automatic_naming = true, .total_limit = 3});
//     io.register_for_checkpointing(my_early_stopping);
//     io.save_state(state);                    // runs/1/checkpoints/checkpoint_0
//     LoadedState loaded = io.load_state(state);  // the newest that is whole
//
// Folders have the box format of distributed/checkpoint: they appear whole or not at all, every
// byte of them is checked, and any number of ranks loads them. What is saved: models, optimizers
// (with fp32 masters), schedules, the loss scaler, the loaders' cursors, the random numbers of
// every rank's Context, counters, registered objects, and what hooks add.
//
// [Note: parts] DTensors are saved as they lie, each rank writing boxes that it holds, and loaded
// as those lie that are there, each rank reading boxes that it needs: any placements on any number
// of ranks, and whole tensors, into any others. Nothing is gathered. What axes replicate is written
// once, dealt among the ranks that hold it. The mesh of a DTensor has all ranks of the group.
//
// [Note: another number of ranks] Tensors that all ranks share load anywhere. A loader's cursor
// counts samples over all ranks, so its epoch goes on where it was. Random numbers of a Context are
// a rank's own: where all ranks had the same they are everybody's again, where they differed a
// load with another number of ranks is a ConfigError that says so, unless .random = kKeep.
//
// [Note: rotation] Old folders go after the new one is committed, never before, lowest number
// first, and only those that automatic naming made: checkpoint_N in PROJECT/checkpoints, whatever
// else lies there, and of those only what this run saved, or the run that it has loaded: a run that
// begins anew in a folder with checkpoints numbers on behind them and lets them stay. A folder that
// goes is renamed first: a crash leaves no half of it.
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

// An object that gives its state as a StateDict and takes it back.
template <class T>
concept HasState = requires(T& object, const T& view, const StateDict& state) {
  { view.state_dict() } -> std::convertible_to<StateDict>;
  object.load_state_dict(state);
};

// Any such object, by reference; it must outlive this.
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

// What is saved and loaded; order is identity. All ranks give the same.
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
  int64_t keep_every = 0;   // besides, those whose number is a multiple; 0: none
  int64_t keep_best = 0;    // besides, so many with the best metric
  bool larger_is_better =
      false;  // of the metric: an accuracy; else the least is best, as of a loss
  // Models are saved whole, each in the files of save_model() in a folder of the checkpoint
  // ("model", "model_1"), gathered tensor by tensor to rank 0, at the call where a save is
  // asynchronous, too; all else as ever. Loading sees to it by itself.
  bool whole_models = false;
  // save_state() returns when the state is copied; a thread writes. At most one is under way: the
  // next one waits for it.
  bool asynchronous = false;
  // Told on the main rank of what must not go by unseen: a damaged folder that was passed over, a
  // folder that could not be removed. Default: a line to stderr. An asynchronous save calls it
  // from its thread.
  std::function<void(const std::string&)> warn = {};
  // Called on every rank at each stage of a save (distributed/checkpoint/commit.h); for tests.
  std::function<void(distributed::SaveStage)> at_stage = {};
};

struct SaveStateOptions {
  std::optional<double> metric = {};  // for keep_best
};

// Where the tensors that an object gets from load_state lie. Models, optimizers and all others copy
// them to where their own are.
enum class MapLocation : uint8_t {
  kCpu,
  kOnDevice,  // the device of the model's first parameter
};
// "cpu", "on_device"; ConfigError for anything else.
MapLocation parse_map_location(std::string_view text);

enum class RandomNumbers : uint8_t {
  kRestore,
  kKeep,  // what the Context has now
};

struct LoadStateOptions {
  MapLocation map_location = MapLocation::kCpu;
  RandomNumbers random = RandomNumbers::kRestore;
  // Objects that the program or the checkpoint alone has are a ConfigError before anything changes.
  // Else those that both have are loaded, in their order, and `warn` and the result name the rest.
  bool strict = false;
};

// A folder that load_state passed over.
struct SkippedCheckpoint {
  std::string folder;
  std::string reason;
};
struct LoadedState {
  std::string folder;
  int64_t iteration = 0;  // of the next automatic name
  int saved_by_ranks = 1;
  std::vector<SkippedCheckpoint> skipped = {};  // newer ones that are damaged
  // As names in the folder begin, "loader.1": what the program has and the checkpoint has not, which
  // stays as it is, and the other way round.
  std::vector<std::string> missing = {}, unused = {};
};

// The weights that a hook sees before they are written.
struct ModelWeights {
  nn::ModuleBase* model = nullptr;
  StateDict weights;
};
// Before anything is written. Files that the hook puts into `folder` (of one rank each) become part
// of the checkpoint. A model that it takes off the list is its own affair.
using SaveStateHook =
    std::function<void(std::vector<ModelWeights>& models, const std::string& folder)>;
// Before anything is loaded. A model that it takes off the list it has loaded itself.
using LoadStateHook =
    std::function<void(std::vector<nn::ModuleBase*>& models, const std::string& folder)>;

namespace detail {

// A null pointer says nothing of an object.
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

  // More objects that are saved, in order. Objects, or pointers of any kind to them; ValueError
  // that lists the positions of null pointers.
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
  // returns (asynchronous: when wait() does) the checkpoint is committed for every rank.
  //
  // An explicit folder that holds a checkpoint is replaced in one step; one that holds anything
  // else is refused. The automatic name is iteration(), or the next behind all that the folder has.
  // ConfigError without a folder and without automatic naming. What any rank cannot write every rank
  // throws, with the rank and the cause; nothing then stands under the name that did not before.
  std::string save_state(const TrainingState& state, const std::string& folder = {},
                         const SaveStateOptions& options = {});

  // Loads `folder`, or the newest checkpoint of automatic naming: of this run, where it has saved or
  // loaded; else of the run that saved last, and `warn` says where the folder has others'.
  // Collective: all ranks load the same. Damaged folders: with automatic naming the one before is taken, and `warn` and the result
  // say so; an explicit one is a FormatError. The whole folder is checked before anything is
  // changed, every rank reading its part. What goes into a DTensor comes to its object as one that
  // lies alike: models and optimizers know which, of registered objects their state_dict() of now
  // says it. ConfigError where there is none, and see LoadStateOptions::strict and
  // [Note: another number of ranks]. What an object says against its state is thrown on; objects
  // before it are then loaded already.
  LoadedState load_state(const TrainingState& state, const std::string& folder = {},
                         const LoadStateOptions& options = {});

  // Of automatic naming the checkpoint with the best metric (SaveStateOptions::metric), of the run
  // whose newest load_state() would take; the newest of equals, nothing where none has a metric.
  // Collective.
  std::optional<std::string> best_checkpoint();

  // Until the save under way is committed; throws what went wrong with it.
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

// What SIGTERM or SIGUSR1 asked any rank for: the same answer on every rank, for one small
// collective. A kCheckpoint is thereby served; kCheckpointAndStop stays.
RunRequest should_checkpoint(distributed::Group& group = distributed::world());

}  // namespace tessera::accelerate
