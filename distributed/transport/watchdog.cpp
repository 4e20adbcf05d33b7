#include <tessera/distributed/transport/watchdog.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <numeric>

#include <tessera/core/thread.h>

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

std::vector<std::string> describe_positions(Store& store, std::span<const int> ranks,
                                            Milliseconds timeout) {
  std::vector<std::string> lines;
  const auto texts = answers(store, ranks, timeout);
  for (size_t i = 0; i < ranks.size(); ++i) {
    std::string line;
    const auto lanes = nlohmann::json::parse(texts[i].value_or(""), nullptr, false);
    for (const auto& [name, position] : lanes.items()) {
      if (!position.is_array() || position.size() != 2 || !position[1].is_string()) continue;
      const std::string shown = name.starts_with("world ") ? name.substr(6) : name;
      line += (line.empty() ? "" : "; ") + shown + " " + position[1].get<std::string>();
    }
    if (line.empty()) {
      line = lanes.is_object() ? "has called nothing yet"
                               : "does not answer: stopped, or not in its ProcessGroup";
    }
    lines.push_back("rank " + std::to_string(ranks[i]) + ": " + line);
  }
  return lines;
}

Watchdog::Watchdog(std::shared_ptr<Store> store, int rank, std::shared_ptr<CommTrace> trace,
                   const WaitWarning& wait_warning)
    : store_(std::move(store)), rank_(rank), trace_(std::move(trace)), wait_warning_(wait_warning) {
  thread_ = Thread([this] { answer(); });
}

Watchdog::~Watchdog() {
  stopping_ = true;
  thread_.join();
  if (printer_.joinable()) printer_.join();
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
  if (waited < std::chrono::duration<double>(wait_warning_.after).count()) return;
  told_ = call.queued;
  const std::string text = describe_seconds(waited) + " in " + call.describe() + " of '" +
                           call.group + "' (" + call.place() +
                           (call.phase.empty() ? "" : ", in the phase " + call.phase) + ")";
  if (wait_warning_.ranks_to_print > 0) {
    print_wait(text);
  } else {
    store_->set("job/waiting/" + std::to_string(rank_), text);
  }
}

// As the launcher does: once for the many ranks that wait for the same one.
void Watchdog::print_wait(const std::string& text) {
  constexpr std::string_view kPrinted = "watchdog/printed";  // when, by the clock of who did
  const std::optional<std::string> last = store_->get(kPrinted);
  const int64_t now =
      std::chrono::duration_cast<Milliseconds>(std::chrono::system_clock::now().time_since_epoch())
          .count();
  if (last && now < std::stoll(*last) + wait_warning_.after.count()) return;
  if (!store_->compare_set(kPrinted, last, std::to_string(now))) return;
  if (printer_.joinable()) printer_.join();
  printer_ = Thread([store = store_, rank = rank_, ranks = wait_warning_.ranks_to_print, text] {
    std::vector<int> all(static_cast<size_t>(ranks));
    std::iota(all.begin(), all.end(), 0);
    std::string warning = "tessera: warning: rank " + std::to_string(rank) +
                          " waits for other ranks for " + text +
                          "; the job goes on until the collective's timeout\n";
    try {
      for (const std::string& line : describe_positions(*store, all, Milliseconds(1000))) {
        warning += "tessera:   " + line + "\n";
      }
    } catch (const std::exception&) {  // the store is gone, see answer()
    }
    std::fputs(warning.c_str(), stderr);
  });
}

void Watchdog::answer() {
  int64_t revision = 0;
  while (!stopping_) {
    try {
      if (wait_warning_.after.count() > 0) tell_wait();
      const StoreChanges changes = store_->watch(kQuestions, revision, kPoll);
      revision = changes.revision;
      for (const StoreEntry& question : changes.entries) {
        nlohmann::json positions = nlohmann::json::object();
        for (const CommRecord& record : trace_->records()) {
          if (is_message(record.operation)) continue;
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
