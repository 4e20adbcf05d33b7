#include <tessera/distributed/transport/watchdog.h>

#include <algorithm>
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

// The texts that the ranks answer to a question; nothing where one does not in time.
std::vector<std::optional<std::string>> answers(Store& store, std::span<const int> ranks,
                                                Milliseconds timeout) {
  std::vector<std::optional<std::string>> texts(ranks.size());
  const std::string number = std::to_string(store.add("watchdog/questions", 1));
  store.set(std::string(kQuestions) + number, "");
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  for (size_t i = 0; i < ranks.size(); ++i) {
    const auto left =
        std::chrono::duration_cast<Milliseconds>(deadline - std::chrono::steady_clock::now());
    try {
      texts[i] = store.wait(std::string(kAnswers) + number + "/" + std::to_string(ranks[i]),
                            std::max(left, Milliseconds(1)));
    } catch (const StoreTimeout&) {
    }
  }
  return texts;
}

}  // namespace

std::vector<std::optional<std::string>> ask_all_positions(Store& store, std::span<const int> ranks,
                                                          Milliseconds timeout) {
  auto texts = answers(store, ranks, timeout);
  for (auto& text : texts) {
    if (!text) continue;
    std::string line;
    const auto lanes = nlohmann::json::parse(*text, nullptr, false);
    if (!lanes.is_object()) {
      text.reset();
      continue;
    }
    for (const auto& [name, position] : lanes.items()) {
      if (!position.is_array() || position.size() != 2 || !position[1].is_string()) continue;
      const std::string shown = name.starts_with("world ") ? name.substr(6) : name;
      line += (line.empty() ? "" : "; ") + shown + " " + position[1].get<std::string>();
    }
    text = line.empty() ? "has called nothing yet" : line;
  }
  return texts;
}

Watchdog::Watchdog(std::shared_ptr<Store> store, int rank, std::shared_ptr<CommTrace> trace,
                   Milliseconds wait_warning)
    : store_(std::move(store)), rank_(rank), trace_(std::move(trace)), wait_warning_(wait_warning) {
  thread_ = std::thread([this] { answer(); });
}

Watchdog::~Watchdog() {
  stopping_ = true;
  thread_.join();
}

// Of the calls that wait the oldest one, once.
void Watchdog::tell_wait() {
  const int64_t next = trace_->next();
  const std::vector<CommRecord> calls = trace_->records(unfinished_);
  const auto oldest = std::ranges::find(calls, CommRecord::State::kQueued, &CommRecord::state);
  // Calls that came in between make it too small, which costs a look at them again.
  unfinished_ = std::max(unfinished_, next - (calls.end() - oldest));
  if (oldest == calls.end() || oldest->queued <= told_) return;
  const CommRecord& call = *oldest;
  const double waited = trace_->seconds() - call.queued;
  if (waited < std::chrono::duration<double>(wait_warning_).count()) return;
  told_ = call.queued;
  const std::string phase = call.phase.empty() ? "" : ", in the phase " + call.phase;
  store_->set("job/waiting/" + std::to_string(rank_), describe_seconds(waited) + " in " +
                                                          call.describe() + " of '" + call.group +
                                                          "' (" + call.place() + phase + ")");
}

void Watchdog::answer() {
  int64_t revision = 0;
  while (!stopping_) {
    try {
      if (wait_warning_.count() > 0) tell_wait();
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
    const auto texts = answers(*store_, ranks, timeout);
    for (size_t i = 0; i < ranks.size(); ++i) {
      if (!texts[i]) continue;
      const auto answer = nlohmann::json::parse(*texts[i]);
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
