#include <tessera/distributed/transport/watchdog.h>

#include <map>
#include <nlohmann/json.hpp>

namespace tessera::distributed {
namespace {

// Keys: ask/N is the N-th question, at/N/RANK its answers.
constexpr std::string_view kQuestions = "watchdog/ask/";
constexpr std::string_view kAnswers = "watchdog/at/";
constexpr Milliseconds kPoll{200};

std::string lane(const std::string& group, Channel channel) {
  return group + " " + std::string(name_of(channel));
}

}  // namespace

Watchdog::Watchdog(std::shared_ptr<Store> store, int rank, std::shared_ptr<CommTrace> trace)
    : store_(std::move(store)), rank_(rank), trace_(std::move(trace)) {
  thread_ = std::thread([this] { answer(); });
}

Watchdog::~Watchdog() {
  stopping_ = true;
  thread_.join();
}

void Watchdog::answer() {
  int64_t revision = 0;
  while (!stopping_) {
    try {
      const StoreChanges changes = store_->watch(kQuestions, revision, kPoll);
      revision = changes.revision;
      for (const StoreEntry& question : changes.entries) {
        nlohmann::json positions = nlohmann::json::object();
        for (const CommRecord& record : trace_->records()) {
          if (record.operation == Operation::kSend || record.operation == Operation::kRecv)
            continue;
          positions[lane(record.group, record.channel)] = {record.sequence, record.describe()};
        }
        const std::string number = question.key.substr(kQuestions.size());
        store_->set(std::string(kAnswers) + number + "/" + std::to_string(rank_), positions.dump());
      }
    } catch (const std::exception&) {
      return;  // the store is gone: whoever hosted it is, and its loss is reported elsewhere
    }
  }
}

std::vector<std::optional<Position>> Watchdog::ask(const std::string& group, Channel channel,
                                                   std::span<const int> ranks,
                                                   Milliseconds timeout) noexcept {
  std::vector<std::optional<Position>> positions(ranks.size());
  try {
    const std::string number = std::to_string(store_->add("watchdog/questions", 1));
    store_->set(std::string(kQuestions) + number, "");
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    for (size_t i = 0; i < ranks.size(); ++i) {
      const auto left =
          std::chrono::duration_cast<Milliseconds>(deadline - std::chrono::steady_clock::now());
      std::string text;
      try {
        text = store_->wait(std::string(kAnswers) + number + "/" + std::to_string(ranks[i]),
                            std::max(left, Milliseconds(1)));
      } catch (const StoreTimeout&) {
        continue;
      }
      const auto answer = nlohmann::json::parse(text);
      const auto known = answer.find(lane(group, channel));
      positions[i] = known == answer.end()
                         ? Position{}
                         : Position{known->at(0).get<int64_t>(), known->at(1).get<std::string>()};
    }
  } catch (const std::exception&) {
  }
  return positions;
}

}  // namespace tessera::distributed
