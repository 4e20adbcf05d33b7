#include <tessera/distributed/process_group.h>

#include <cstdlib>
#include <nlohmann/json.hpp>

#include <tessera/core/context.h>
#include <tessera/core/parallel.h>
#include <tessera/distributed/collectives.h>
#include <tessera/distributed/job.h>
#include <tessera/distributed/watchdog.h>

namespace tessera::distributed {

struct ProcessGroup::State {
  LaunchInfo info;
  std::shared_ptr<Job> job;
  int callback = -1;
  RankContext* context = nullptr;
  int exceptions = std::uncaught_exceptions();
};

namespace {

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

}  // namespace

ProcessGroup::ProcessGroup(const ProcessGroupOptions& options) : state_(std::make_unique<State>()) {
  State& state = *state_;
  state.info = detect();
  const LaunchInfo& info = state.info;
  RankContext& context = rank_context();
  TS_CHECK_AS(ConfigError, context.world_size == 1, "ProcessGroup", "this Context is already rank ",
              context.rank, " of ", context.world_size);
  state.context = &context;
  if (options.set_threads) set_num_threads(info.threads);
  if (info.world_size == 1) return;
  TS_CHECK_AS(ConfigError, info.launcher != Launcher::kTorchrun, "ProcessGroup",
              "torchrun has no process manager that MPI could use, and the nccl backend needs a "
              "GPU; start with `tessera launch -n ",
              info.world_size, " PROGRAM`");

  if (info.under_tessera) state.job = Job::join(info);
  BackendOptions backend_options = options.backend;
  backend_options.timeout_seconds = options.init_timeout_seconds;
  std::shared_ptr<Backend> backend = make_mpi_backend(backend_options);
  TS_CHECK_AS(ConfigError, backend->rank() == info.rank && backend->size() == info.world_size,
              "ProcessGroup", "MPI says rank ", backend->rank(), " of ", backend->size(),
              ", the environment rank ", info.rank, " of ", info.world_size,
              "; start the program with one launcher");

  context.rank = info.rank;
  context.world_size = info.world_size;
  context.local_rank = info.local_rank;
  context.local_world_size = info.local_world_size;
  context.timeouts.init = options.init_timeout_seconds;
  if (options.collective_timeout_seconds > 0) {
    context.timeouts.collective = options.collective_timeout_seconds;
  } else if (info.collective_timeout) {
    context.timeouts.collective = static_cast<double>(info.collective_timeout->count()) / 1000;
  }
  if (const char* directory = std::getenv("TESSERA_DUMP_DIR")) context.dump_directory = directory;
  std::vector<int> ranks;
  for (int r = 0; r < info.world_size; ++r) ranks.push_back(r);
  context.world = std::make_shared<Group>("world", std::move(backend), std::move(ranks));

  if (!state.job) {
    const TimeoutScope scope(context.timeouts.init);
    state.job = job_over(*context.world, info);
  }
  set_current_job(state.job);
  context.store = state.job->store();
  context.watchdog = std::make_shared<Watchdog>(context.store, info.rank, context.trace);
  state.callback = state.job->on_failure([&context](const RankFailure& failure) {
    context.fail(std::make_exception_ptr(DistributedError(failure.describe())));
  });
}

ProcessGroup::~ProcessGroup() {
  State& state = *state_;
  if (state.info.world_size == 1 || !state.job) return;
  RankContext& context = *state.context;
  const bool passing = std::uncaught_exceptions() > state.exceptions;
  try {
    if (passing) {
      std::string message = "an exception ended the rank";
      // What passes cannot be read here; who catches it may have said more before.
      state.job->publish(FailureKind::kError, message);
      context.world->abort(message);
    } else {
      context.world->shutdown();
    }
  } catch (const std::exception&) {
    // A peer failed meanwhile: that has been reported by its own process.
  }
  state.job->remove_callback(state.callback);
  context.watchdog.reset();
  state.job->leave();
  set_current_job(nullptr);
  context.store.reset();
  context.world = std::make_shared<Group>("world", nullptr, std::vector<int>{0});
  context.rank = context.local_rank = 0;
  context.world_size = context.local_world_size = 1;
}

const LaunchInfo& ProcessGroup::info() const { return state_->info; }

}  // namespace tessera::distributed
