#include <tessera/distributed/transport/process_group.h>

#include <condition_variable>
#include <cstdlib>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>

#include <unistd.h>

#include <tessera/core/context.h>
#include <tessera/core/environment.h>
#include <tessera/core/gpu/transfers.h>
#include <tessera/core/parallel.h>
#include <tessera/core/thread.h>
#include <tessera/distributed/rendezvous/job.h>
#include <tessera/distributed/transport/collectives.h>
#include <tessera/distributed/transport/watchdog.h>

namespace tessera::distributed {

struct ProcessGroup::State {
  LaunchInfo info;
  std::shared_ptr<Job> job;  // null: alone, or left
  bool own_job = false;      // tessera::run has joined it otherwise, and leaves it
  int callback = -1;
  std::optional<CommTrace::Scope> calls;  // to be compared at the end
  RankContext* context = nullptr;
  int exceptions = std::uncaught_exceptions();
};

namespace {

constexpr Milliseconds kWaitWarning{30000};  // where no launcher gives one, which has the same

// Under bare mpirun rank 0 hosts the store and tells the others where.
std::shared_ptr<Job> job_over(Group& group, const LaunchInfo& info) {
  std::shared_ptr<Job> job;
  nlohmann::json address;
  if (info.rank == 0) {
    job = Job::host(info);
    address = {job->address().host, job->address().port, job->address().token};
  }
  address = broadcast_object(address, 0, group, {.channel = Channel::kControl, .tag = "store"});
  if (info.rank != 0) {
    job = Job::join(info, {address.at(0).get<std::string>(), address.at(1).get<int>(),
                           address.at(2).get<std::string>()});
  }
  return job;
}

// Nodes in the order of their first rank, where the launcher does not say: ranks tell their hosts.
void find_nodes(LaunchInfo& info, Group& group) {
  char name[256] = "";
  ::gethostname(name, sizeof name - 1);
  std::map<std::string, int> nodes;
  info.node_groups.clear();
  const CollectiveOptions options{.channel = Channel::kControl, .tag = "hosts"};
  for (const nlohmann::json& host : all_gather_objects(group, name, options)) {
    const int node =
        nodes.emplace(host.get<std::string>(), static_cast<int>(nodes.size())).first->second;
    info.node_groups += (info.node_groups.empty() ? "" : ",") + std::to_string(node);
  }
  info.nodes = static_cast<int>(nodes.size());
  info.node = nodes.at(name);
}

// The start of MPI waits for every rank, and nothing ends that wait. So it happens on a thread that
// is left behind where a rank fails meanwhile.
class BackendStart {
 public:
  explicit BackendStart(const BackendOptions& options) : state_(std::make_shared<State>()) {
    Thread([state = state_, options] {
      std::unique_ptr<Backend> backend;
      std::exception_ptr error;
      try {
        backend = make_mpi_backend(options);
      } catch (...) {
        error = std::current_exception();
      }
      const std::lock_guard lock(state->mutex);
      state->backend = std::move(backend);
      state->error = error;
      state->ended = true;
      state->changed.notify_all();
    }).detach();
  }

  std::unique_ptr<Backend> wait(const Job* job) {
    std::unique_lock lock(state_->mutex);
    while (!state_->changed.wait_for(lock, Milliseconds(10), [&] { return state_->ended; })) {
      if (job != nullptr) job->check("ProcessGroup");
    }
    if (state_->error) std::rethrow_exception(state_->error);
    return std::move(state_->backend);
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool ended = false;
    std::unique_ptr<Backend> backend;
    std::exception_ptr error;
  };
  std::shared_ptr<State> state_;
};

// Who the others wait for at the start, as the launcher's store knows it.
std::string late_at_start(Store& store, int world_size) {
  std::string late;
  for (int rank = 0; rank < world_size; ++rank) {
    const std::vector<std::string> key = {"job/starting/" + std::to_string(rank)};
    if (!store.check(key)) late += (late.empty() ? "rank " : ", rank ") + std::to_string(rank);
  }
  return late.empty() ? "every rank is inside the start of MPI, which one does not come out of"
                      : late + " did not come to ProcessGroup";
}

std::unique_ptr<Backend> start_backend(const BackendOptions& options, Job* job,
                                       const LaunchInfo& info) {
  if (job != nullptr) job->store()->set("job/starting/" + std::to_string(info.rank), "");
  try {
    return BackendStart(options).wait(job);
  } catch (DistributedError& error) {
    if (job == nullptr || job->failure() != nullptr) throw;
    TS_THROW(DistributedError, "ProcessGroup", late_at_start(*job->store(), info.world_size), " (",
             error.what(), ")");
  }
}

}  // namespace

ProcessGroup::ProcessGroup(const ProcessGroupOptions& options) : state_(std::make_unique<State>()) {
  State& state = *state_;
  state.info = detect();
  const LaunchInfo& info = state.info;
  RankContext& context = rank_context();
  TS_CHECK_AS(ConfigError, context.world_size == 1, "ProcessGroup", "this Context is already rank ",
              context.rank, " of ", context.world_size);
  state.context = &context;
  if (options.device.is_cuda()) gpu::use_device(options.device.index);
  if (options.set_threads) set_num_threads(info.threads);
  if (info.world_size == 1) return;
  TS_CHECK_AS(ConfigError, info.launcher != Launcher::kTorchrun, "ProcessGroup",
              "torchrun has no process manager that MPI could use, and the nccl backend needs a "
              "GPU; start with `tessera launch -n ",
              info.world_size, " PROGRAM`");

  state.job = current_job();
  if (!state.job && info.under_tessera) {
    state.job = Job::join(info);
    state.own_job = true;
  }
  if (options.init_timeout_seconds > 0) {
    context.timeouts.init = options.init_timeout_seconds;
  } else if (info.init_timeout) {
    context.timeouts.init = static_cast<double>(info.init_timeout->count()) / 1000;
  }
  BackendOptions backend_options = options.backend;
  backend_options.timeout_seconds = context.timeouts.init;
  std::shared_ptr<Backend> backend = start_backend(backend_options, state.job.get(), info);
  TS_CHECK_AS(ConfigError, backend->rank() == info.rank && backend->size() == info.world_size,
              "ProcessGroup", "MPI says rank ", backend->rank(), " of ", backend->size(),
              ", the environment rank ", info.rank, " of ", info.world_size,
              "; start the program with one launcher");

  context.rank = info.rank;
  context.world_size = info.world_size;
  context.local_rank = info.local_rank;
  context.local_world_size = info.local_world_size;
  const auto set_timeout = [](double& timeout, double given, std::optional<Milliseconds> launched) {
    if (given > 0) {
      timeout = given;
    } else if (launched) {
      timeout = static_cast<double>(launched->count()) / 1000;
    }
  };
  Timeouts& timeouts = context.timeouts;
  set_timeout(timeouts.collective, options.collective_timeout_seconds, info.collective_timeout);
  set_timeout(timeouts.first_step, options.first_step_timeout_seconds, info.first_step_timeout);
  set_timeout(timeouts.save, options.save_timeout_seconds, info.save_timeout);
  if (const char* directory = std::getenv("TESSERA_DUMP_DIR")) context.dump_directory = directory;
  std::vector<int> ranks;
  for (int r = 0; r < info.world_size; ++r) ranks.push_back(r);
  context.world = std::make_shared<Group>("world", backend, ranks);

  if (!state.job) {
    const TimeoutScope scope(context.timeouts.init);
    state.job = job_over(*context.world, info);
    state.own_job = true;
    set_current_job(state.job);
  }
  context.store = state.job->store();
  if (options.device.is_cuda()) {
    auto of_gpus = make_nccl_backend(context.store, info.rank, info.world_size, options.device,
                                     backend_options);
    context.world = std::make_shared<Group>(
        "world", make_paired_backend(backend, std::move(of_gpus), backend_options),
        std::move(ranks));
  }
  if (info.nodes == 0) find_nodes(state.info, *context.world);
  if (options.compare_traces || environment_flag("TESSERA_COMPARE_TRACES")) {
    state.calls.emplace(*context.trace);
  }
  const Watchdog::WaitWarning wait_warning{
      .after = info.wait_warning.value_or(kWaitWarning),
      .ranks_to_print = info.under_tessera ? 0 : info.world_size};
  context.watchdog =
      std::make_shared<Watchdog>(context.store, info.rank, context.trace, wait_warning);
  state.callback = state.job->on_failure([&context](const RankFailure& failure) {
    context.fail(std::make_exception_ptr(DistributedError(failure.describe())));
  });
}

void ProcessGroup::shutdown() {
  if (!state_->job) return;
  if (state_->calls) check_equal_traces(*state_->calls, *state_->context->world);
  state_->calls.reset();
  state_->context->world->shutdown();
  leave();
}

void ProcessGroup::leave() {
  State& state = *state_;
  RankContext& context = *state.context;
  state.job->remove_callback(state.callback);
  context.watchdog.reset();
  if (state.own_job) {
    state.job->leave();
    set_current_job(nullptr);
  }
  state.job.reset();
  context.store.reset();
  context.world = std::make_shared<Group>("world", nullptr, std::vector<int>{0});
  context.rank = context.local_rank = 0;
  context.world_size = context.local_world_size = 1;
}

ProcessGroup::~ProcessGroup() {
  State& state = *state_;
  if (!state.job) return;
  if (std::uncaught_exceptions() > state.exceptions) {
    // What passes cannot be read here; tessera::run, which catches it, publishes its text.
    const std::string message = "an exception ended the rank";
    if (state.own_job) state.job->publish(FailureKind::kError, message);
    state.context->world->abort(message);
    leave();
    return;
  }
  try {
    shutdown();
  } catch (const std::exception& error) {
    state.job->publish(FailureKind::kTimeout, error.what());
    leave();
  }
}

const LaunchInfo& ProcessGroup::info() const { return state_->info; }

}  // namespace tessera::distributed
