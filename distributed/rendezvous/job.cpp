#include <tessera/distributed/rendezvous/job.h>

#include <exception>
#include <random>

#include <unistd.h>

#include <nlohmann/json.hpp>

#include <tessera/core/context.h>
#include <tessera/core/thread.h>
#include <tessera/distributed/rendezvous/json_number.h>

namespace tessera::distributed {
namespace {

using Json = nlohmann::json;

constexpr Milliseconds kConnectTime{60000};
constexpr std::string_view kFailures = "job/failure/";

struct KindName {
  FailureKind kind;
  const char* name;
};
constexpr KindName kKindNames[] = {
    {FailureKind::kSignal, "signal"},   {FailureKind::kError, "error"},
    {FailureKind::kExit, "exit"},       {FailureKind::kLost, "lost"},
    {FailureKind::kTimeout, "timeout"}, {FailureKind::kConsequence, "consequence"},
};

std::string host_name() {
  char name[256] = "";
  ::gethostname(name, sizeof name - 1);
  return name;
}

std::string random_token() {
  std::random_device source;
  std::string token;
  for (int i = 0; i < 4; ++i) {
    char text[9];
    std::snprintf(text, sizeof text, "%08x", static_cast<unsigned>(source()));
    token += text;
  }
  return token;
}

std::string key_of(std::string_view part, int rank) {
  return "job/" + std::string(part) + "/" + std::to_string(rank);
}

struct CurrentJob {
  std::shared_ptr<Job> job;
};

}  // namespace

std::string RankFailure::describe() const {
  std::string text = rank < 0 ? "the launcher" : "rank " + std::to_string(rank);
  if (!host.empty()) text += " on " + host;
  return text + (message.empty() ? " failed" : " " + message);
}

std::string RankFailure::to_text() const {
  std::string name;
  for (const KindName& entry : kKindNames) {
    if (entry.kind == kind) name = entry.name;
  }
  const Json json = {
      {"rank", rank}, {"kind", name}, {"code", code}, {"message", message}, {"host", host}};
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

RankFailure RankFailure::from_text(std::string_view text) {
  RankFailure failure;
  try {
    const Json json = Json::parse(text);
    failure.rank = json_number(json.at("rank"), -1, kMostRanks);
    failure.code = json_number(json.at("code"), 0, 255);
    failure.message = json.at("message").get<std::string>();
    failure.host = json.at("host").get<std::string>();
    const auto name = json.at("kind").get<std::string>();
    for (const KindName& entry : kKindNames) {
      if (name == entry.name) {
        failure.kind = entry.kind;
        return failure;
      }
    }
  } catch (const Json::exception&) {
  }
  TS_THROW(DistributedError, "job", "a report of a failure cannot be read: \"", text,
           "\"; ranks and launcher have to be of one version");
}

Job::Job(const LaunchInfo& info) : info_(info), exceptions_(std::uncaught_exceptions()) {}

std::shared_ptr<Job> Job::join(const LaunchInfo& info) {
  TS_CHECK_AS(ConfigError, info.store.has_value(), "job",
              "this process was not started by tessera launch (TESSERA_STORE is unset); let rank 0 "
              "host the store");
  return join(info, *info.store);
}

std::shared_ptr<Job> Job::join(const LaunchInfo& info, const StoreAddress& address) {
  std::shared_ptr<Job> job(new Job(info));
  job->connect(address);
  return job;
}

std::shared_ptr<Job> Job::host(const LaunchInfo& info) {
  std::shared_ptr<Job> job(new Job(info));
  const bool one_node = info.world_size == info.local_world_size;
  StoreAddress address{one_node ? "127.0.0.1" : "0.0.0.0", 0, random_token()};
  job->server_ = std::make_unique<TcpStoreServer>(address);
  address.port = job->server_->port();
  if (!one_node) address.host = host_name();
  job->address_ = address;
  StoreAddress local = address;
  local.host = "127.0.0.1";
  job->connect(local);
  job->address_ = address;
  return job;
}

void Job::connect(const StoreAddress& address) {
  address_ = address;
  client_ = TcpStore::connect(address, kConnectTime);
  store_ = client_;
  watcher_ = TcpStore::connect(address, kConnectTime);
  if (!info_.under_tessera) {
    RankFailure lost;
    lost.rank = info_.rank;
    lost.kind = FailureKind::kLost;
    lost.host = host_name();
    lost.message = "ended without leaving the job (killed, exited or lost)";
    client_->leave_will(key_of("failure", info_.rank), lost.to_text());
  }
  client_->set(key_of("joined", info_.rank), host_name());
  thread_ = Thread([this] { watch(); });
}

void Job::watch() {
  int64_t revision = 0;
  while (!leaving_) {
    try {
      const StoreChanges changes = watcher_->watch(kFailures, revision, std::chrono::hours(1));
      revision = changes.revision;
      for (const StoreEntry& entry : changes.entries) {
        const RankFailure failure = RankFailure::from_text(entry.value);
        if (failure.rank != info_.rank) learn(failure);
      }
    } catch (const std::exception& error) {
      if (leaving_) return;
      RankFailure lost;
      lost.kind = FailureKind::kLost;
      lost.message = std::string("is gone (") + error.what() + ")";
      if (!info_.under_tessera) {
        lost.rank = 0;
        lost.message = "is gone, and with it the store (" + std::string(error.what()) + ")";
      }
      learn(lost);
      return;
    }
  }
}

void Job::learn(const RankFailure& failure) {
  const std::lock_guard lock(mutex_);
  if (heard_) return;
  heard_ = std::make_unique<RankFailure>(failure);
  failure_.store(heard_.get(), std::memory_order_release);
  for (const auto& [number, callback] : callbacks_) callback(failure);
}

void Job::check(std::string_view where) const {
  if (const RankFailure* heard = failure()) [[unlikely]] {
    TS_THROW(DistributedError, where, "rank ", info_.rank, " cannot go on: ", heard->describe(),
             "; the job has to be started again");
  }
}

int Job::on_failure(std::function<void(const RankFailure&)> callback) {
  const std::lock_guard lock(mutex_);
  if (heard_) callback(*heard_);
  callbacks_.emplace_back(next_callback_, std::move(callback));
  return next_callback_++;
}

void Job::remove_callback(int number) {
  const std::lock_guard lock(mutex_);
  std::erase_if(callbacks_, [&](const auto& entry) { return entry.first == number; });
}

void Job::publish(FailureKind kind, std::string_view message) noexcept {
  if (published_.exchange(true)) return;
  try {
    RankFailure own;
    own.rank = info_.rank;
    own.kind = failure() != nullptr ? FailureKind::kConsequence : kind;
    own.host = host_name();
    own.message = "failed: " + std::string(message);
    client_->withdraw_will();
    // The launcher may know a surer cause already.
    client_->compare_set(key_of("failure", info_.rank), std::nullopt, own.to_text());
  } catch (const std::exception&) {
    // The store is gone: there is nobody left to tell.
  }
}

// Left, or failed.
bool Job::everyone_has_ended() const {
  for (int rank = 0; rank < info_.world_size; ++rank) {
    if (!server_->store()->get(key_of("left", rank)) &&
        !server_->store()->get(key_of("failure", rank))) {
      return false;
    }
  }
  return true;
}

void Job::leave(Milliseconds timeout) noexcept {
  if (leaving_.exchange(true)) return;
  try {
    client_->withdraw_will();
    client_->set(key_of("left", info_.rank), "");
    if (server_) {
      // The others' last calls need the store.
      const auto deadline = std::chrono::steady_clock::now() + timeout;
      int64_t revision = 0;
      while (!everyone_has_ended() && std::chrono::steady_clock::now() < deadline) {
        const auto left =
            std::chrono::ceil<Milliseconds>(deadline - std::chrono::steady_clock::now());
        revision = server_->store()->watch("job/", revision, left).revision;
      }
    }
  } catch (const std::exception&) {
    // The host is gone before us: the end of the job has the same effect.
  }
  watcher_->interrupt();
  thread_.join();
}

Job::~Job() {
  if (std::uncaught_exceptions() > exceptions_) {
    publish(FailureKind::kError, "an exception left the scope of the job");
  }
  if (thread_.joinable()) leave(Milliseconds(2000));
}

std::shared_ptr<Job> current_job() { return Context::current().slot<CurrentJob>().job; }

void set_current_job(std::shared_ptr<Job> job) {
  Context::current().slot<CurrentJob>().job = std::move(job);
}

}  // namespace tessera::distributed
