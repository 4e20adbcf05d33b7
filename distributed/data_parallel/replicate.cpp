#include <tessera/distributed/data_parallel/replicate.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include <tessera/autograd/checkpoint.h>
#include <tessera/core/error.h>
#include <tessera/core/tensor/element_guard.h>
#include <tessera/distributed/backward/broadcast.h>
#include <tessera/distributed/backward/known_parameters.h>
#include <tessera/distributed/backward/mutant.h>
#include <tessera/distributed/data_parallel/join_state.h>
#include <tessera/distributed/transport/collectives.h>

namespace tessera::distributed {
namespace {

using Json = nlohmann::json;

// ---- Verification across ranks -----------------------------------------------------------------

Json describe_tensors(const NamedTensors& tensors) {
  Json list = Json::array();
  for (const auto& [name, tensor] : tensors) {
    list.push_back({{"name", name},
                    {"tensor", tessera::detail::concatenate(tensor.dtype(), tensor.shape())},
                    {"requires_grad", tensor.requires_grad()}});
  }
  return list;
}

Json describe_options(const ReplicateOptions& options) {
  return {{"axis", options.axis},
          {"first_bucket_bytes", options.first_bucket_bytes},
          {"bucket_bytes", options.bucket_bytes},
          {"rebuild_buckets", options.rebuild_buckets},
          {"average", static_cast<int>(options.average)},
          {"gradient_dtype", options.gradient_dtype ? name_of(*options.gradient_dtype) : "own"},
          {"init_sync", options.init_sync},
          {"broadcast_buffers", options.broadcast_buffers},
          {"buffer_hook", static_cast<bool>(options.buffer_hook)}};
}

std::string describe_tensor(const Json& entry) {
  return "'" + entry.at("name").get<std::string>() + "' " + entry.at("tensor").get<std::string>() +
         (entry.at("requires_grad").get<bool>() ? ", which requires grad" : "");
}

// How `other` differs from rank 0's list; empty where it does not.
std::string difference(const Json& first, const Json& other, const char* what) {
  const auto total = [&](const Json& list) {
    return std::to_string(list.size()) + " " + what + "s";
  };
  for (size_t i = 0; i < std::min(first.size(), other.size()); ++i) {
    if (first[i] == other[i]) continue;
    return "its " + std::string(what) + " " + std::to_string(i) + " is " +
           describe_tensor(other[i]) + " (rank 0: " + describe_tensor(first[i]) + ")";
  }
  if (first.size() == other.size()) return "";
  const Json& longer = first.size() > other.size() ? first : other;
  return "it has " + total(other) + ", rank 0 has " + total(first) +
         "; the first without partner is " +
         describe_tensor(longer[std::min(first.size(), other.size())]);
}

std::string option_difference(const Json& first, const Json& other) {
  for (const auto& [key, value] : first.items()) {
    if (other.at(key) != value) {
      return "its option " + key + " is " + other.at(key).dump() + " (rank 0: " + value.dump() +
             ")";
    }
  }
  return "";
}

// Every rank sees what all hold and comes to the same verdict.
void check_equal_on_all_ranks(const NamedTensors& parameters, const NamedTensors& buffers,
                              const ReplicateOptions& options, Group& ranks) {
  if (ranks.size() > 1 && !ranks.backend().moves_data()) return;  // a simulation: nobody to ask
  const std::vector<Json> all =
      all_gather_objects(ranks,
                         Json{{"parameters", describe_tensors(parameters)},
                              {"buffers", describe_tensors(buffers)},
                              {"options", describe_options(options)}},
                         {.channel = Channel::kControl, .tag = "replicate"});
  for (size_t rank = 1; rank < all.size(); ++rank) {
    std::string text = difference(all[0].at("parameters"), all[rank].at("parameters"), "parameter");
    if (text.empty()) text = difference(all[0].at("buffers"), all[rank].at("buffers"), "buffer");
    if (text.empty()) text = option_difference(all[0].at("options"), all[rank].at("options"));
    TS_CHECK_AS(DistributedError, text.empty(), "replicate",
                "all ranks must hold the same model with the same options; rank ", rank,
                " differs: ", text, "; make the models alike before they are replicated");
  }
}

// Of the models that are replicated now.
struct ReplicatedParameters {
  std::vector<std::weak_ptr<const NamedTensors>> lists;
};

// ---- What takes part ---------------------------------------------------------------------------

bool is_within(const std::string& name, const std::string& scope) {
  return name == scope || (name.starts_with(scope) && name[scope.size()] == '.');
}

NamedTensors without(NamedTensors tensors, const std::vector<std::string>& ignored,
                     std::set<std::string>& found) {
  std::erase_if(tensors, [&](const NamedTensor& named) {
    for (const std::string& scope : ignored) {
      if (is_within(named.name, scope)) return found.insert(scope), true;
    }
    return !named.tensor.defined();
  });
  return tensors;
}

}  // namespace

// ---- Replica -----------------------------------------------------------------------------------

struct Replica::State : std::enable_shared_from_this<Replica::State> {
  nn::ModuleBase* model = nullptr;
  Group* ranks = nullptr;
  ReplicateOptions options;
  NamedTensors parameters, buffers;
  std::optional<KnownParameters> known;
  std::shared_ptr<BucketSchedule> schedule;
  std::function<BeforeBackward()> forward_observer;
  std::vector<HookHandle> handles;
  bool has_hook = false;
  std::weak_ptr<JoinState> join;

  ~State() {
    for (HookHandle& handle : handles) handle.remove();
  }
  void install();
  void before_forward();
  void synchronise_buffers();
  void synchronise_all(int root);
};

void Replica::State::install() {
  schedule->install();
  handles.push_back(
      model->register_forward_pre_hook([self = weak_from_this()](nn::ModuleBase&, nn::TensorRefs) {
        if (const auto state = self.lock()) state->before_forward();
      }));
  // The first gradient of an output begins the backward: also of a rank whose loss reaches no
  // parameter.
  handles.push_back(model->register_forward_hook(
      [self = weak_from_this()](nn::ModuleBase&, nn::TensorRefs, nn::TensorRefs outputs) {
        if (!grad_enabled()) return;
        const auto state = self.lock();
        if (!state) return;
        const BeforeBackward observed =
            state->forward_observer ? state->forward_observer() : BeforeBackward();
        for (Tensor* output : outputs) {
          if (!output->requires_grad() || output->is_leaf()) continue;
          register_hook(*output, [self, observed](const Tensor&) {
            if (const auto state = self.lock()) {
              if (observed) observed();
              state->schedule->pass().before_backward();
            }
            return Tensor();
          });
        }
      }));
}

void Replica::State::before_forward() {
  if (!grad_enabled() || !model->is_training() || is_recomputing()) return;
  known->check();
  const PhaseScope phase("forward");
  schedule->before_forward();
  if (const auto joined = join.lock(); joined && joined->open()) joined->before_forward();
  if (schedule->pass().plan.sync_gradients) synchronise_buffers();
}

void Replica::State::synchronise_buffers() {
  if (!options.broadcast_buffers || buffers.empty()) return;
  if (TS_MUTANT(kSkipBuffers)) return;
  if (options.buffer_hook) {
    options.buffer_hook(buffers, *ranks);
  } else {
    broadcast_tensors(buffers, *ranks, 0, "buffers");
  }
}

void Replica::State::synchronise_all(int root) {
  broadcast_tensors(parameters, *ranks, root, "parameters");
  broadcast_tensors(buffers, *ranks, root, "buffers");
}

Replica::Replica(std::shared_ptr<State> state)
    : DataParallelModel({state->schedule, &state->schedule->pass()}), state_(std::move(state)) {}
Replica::Replica(Replica&&) noexcept = default;
Replica& Replica::operator=(Replica&&) noexcept = default;
Replica::~Replica() = default;

const BucketSchedule& Replica::schedule() const { return *state_->schedule; }

void Replica::set_forward_observer(std::function<BeforeBackward()> observer) {
  state_->forward_observer = std::move(observer);
}

void Replica::set_communication_hook(std::shared_ptr<CommunicationHook> hook) {
  TS_CHECK(hook != nullptr, "set_communication_hook", "needs a hook; got none");
  TS_CHECK(!state_->has_hook, "set_communication_hook", "there is one already, ",
           state_->schedule->hook().name(), "; set it once");
  TS_CHECK(pass().reductions() == 0, "set_communication_hook",
           "gradients were reduced before; set it before the first backward");
  const std::vector<Json> names = all_gather_objects(*state_->ranks, Json(hook->name()),
                                                     {.channel = Channel::kControl, .tag = "hook"});
  for (size_t rank = 1; rank < names.size(); ++rank) {
    TS_CHECK_AS(DistributedError, names[rank] == names[0], "set_communication_hook",
                "all ranks must have one hook; rank ", rank, " has '",
                names[rank].get<std::string>(), "', rank 0 '", names[0].get<std::string>(), "'");
  }
  state_->has_hook = true;
  state_->schedule->set_hook(std::move(hook));
}

Join Replica::join(const JoinOptions& options) {
  const auto previous = state_->join.lock();
  TS_CHECK(!previous || !previous->open(), "join", "a scope is open; finish it first");
  const std::weak_ptr<State> self = state_;
  auto join = std::make_shared<JoinState>(
      std::shared_ptr<BackwardPass>(state_->schedule, &pass()), options,
      [self] {
        if (const auto state = self.lock()) state->synchronise_buffers();
      },
      [self](int root) {
        if (const auto state = self.lock()) state->synchronise_all(root);
      });
  state_->join = join;
  return Join(std::move(join));
}

ShardReport Replica::report() const {
  ShardReport report = make_report(*state_->schedule);
  if (state_->options.broadcast_buffers && !state_->options.buffer_hook) {
    report.buffers_per_forward = broadcast_traffic(state_->buffers, *state_->ranks);
  }
  return report;
}

Replica replicate(nn::ModuleBase& model, Mesh& mesh, const ReplicateOptions& options) {
  TS_CHECK_AS(ConfigError, !options.gradient_dtype || options.gradient_as_bucket_view, "replicate",
              "gradient_dtype needs gradients that lie in their buckets; set "
              "gradient_as_bucket_view");
  auto state = std::make_shared<Replica::State>();
  state->model = &model;
  state->options = options;
  state->ranks = &mesh.group(options.axis);
  ParameterPlaces places;
  for (const auto& [name, place] : model.parameter_places()) places.insert(place);
  state->known.emplace(std::vector{&model}, places, true, "replicate");
  std::set<std::string> found;
  state->parameters = without(model.named_parameters(), options.ignored, found);
  state->buffers = without(model.named_buffers(), options.ignored, found);
  for (const NamedTensors* tensors : {&state->parameters, &state->buffers}) {
    for (const auto& [name, tensor] : *tensors) check_whole(tensor, "replicate");
  }
  for (const std::string& name : options.ignored) {
    TS_CHECK_AS(ConfigError, found.contains(name), "replicate", "the ignored '", name,
                "' is no parameter, buffer or module of the model with any; correct the name");
  }
  check_equal_on_all_ranks(state->parameters, state->buffers, options, *state->ranks);
  if (options.init_sync && !TS_MUTANT(kSkipInitSync)) {
    state->synchronise_all(0);
  }
  state->schedule = std::make_shared<BucketSchedule>(
      state->parameters, *state->ranks,
      BucketScheduleOptions{.first_bucket_bytes = options.first_bucket_bytes,
                            .bucket_bytes = options.bucket_bytes,
                            .gradient_as_bucket_view = options.gradient_as_bucket_view,
                            .rebuild_buckets = options.rebuild_buckets,
                            .gradient_dtype = options.gradient_dtype,
                            .average = options.average});
  state->install();
  auto& known = Context::current().slot<ReplicatedParameters>().lists;
  std::erase_if(known, [](const auto& list) { return list.expired(); });
  known.push_back(std::shared_ptr<const NamedTensors>(state, &state->parameters));
  return Replica(std::move(state));
}

bool is_replicated(const Tensor& parameter) {
  for (const auto& known : Context::current().slot<ReplicatedParameters>().lists) {
    const auto list = known.lock();
    if (list && std::ranges::any_of(
                    *list, [&](const NamedTensor& named) { return named.tensor.is(parameter); })) {
      return true;
    }
  }
  return false;
}

}  // namespace tessera::distributed
