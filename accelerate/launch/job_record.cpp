#include <algorithm>

#include <tessera/accelerate/launch/launcher.h>

namespace tessera::launch {

using distributed::FailureKind;
using distributed::RankFailure;

namespace {
constexpr Milliseconds kReportTime{500};
}

JobRecord::JobRecord(int world_size) : ranks_(static_cast<size_t>(world_size)) {}

void JobRecord::joined(int rank, Milliseconds now) {
  ranks_.at(static_cast<size_t>(rank)).joined = true;
  anyone_joined_ = true;
  // A rank that ended well without the others was no part of their job, until now.
  for (size_t other = 0; other < ranks_.size(); ++other) {
    if (ranks_[other].exit) check_early_end(static_cast<int>(other), now);
  }
}

void JobRecord::left(int rank) { ranks_.at(static_cast<size_t>(rank)).left = true; }

void JobRecord::add(const RankFailure& failure, Milliseconds now) {
  Rank& rank = ranks_.at(static_cast<size_t>(failure.rank));
  if (rank.failed) return;
  rank.failed = true;
  failures_.push_back({failure, now});
}

void JobRecord::failed(const RankFailure& failure, Milliseconds now) { add(failure, now); }

void JobRecord::exited(int rank, const ExitReport& report, Milliseconds now) {
  Rank& state = ranks_.at(static_cast<size_t>(rank));
  state.exit = report;
  if (report.status.success()) {
    check_early_end(rank, now);
    return;
  }
  RankFailure failure;
  failure.rank = rank;
  failure.host = report.host;
  failure.code = report.status.shell_code();
  failure.kind = report.status.signal != 0 ? FailureKind::kSignal : FailureKind::kExit;
  failure.message = report.status.describe();
  if (killing_ && report.status.signal != 0) failure.kind = FailureKind::kConsequence;
  for (Entry& entry : failures_) {
    if (entry.failure.rank != rank) continue;
    // Its own words say more, the process's code is the truth; unless it hung and was killed.
    if (!(killing_ && report.status.signal != 0)) entry.failure.code = failure.code;
    return;
  }
  add(failure, now);
}

// A rank that exits with 0 in the middle of a job leaves the others without it.
void JobRecord::check_early_end(int rank, Milliseconds now) {
  const Rank& state = ranks_.at(static_cast<size_t>(rank));
  if (!state.exit->status.success() || state.left || !anyone_joined_) return;
  RankFailure failure;
  failure.rank = rank;
  failure.host = state.exit->host;
  failure.kind = FailureKind::kExit;
  failure.code = 1;
  failure.message = "exited with code 0 before the end of the job";
  add(failure, now);
}

bool JobRecord::all_exited() const {
  return std::all_of(ranks_.begin(), ranks_.end(),
                     [](const Rank& rank) { return rank.exit.has_value(); });
}

std::vector<int> JobRecord::running() const {
  std::vector<int> result;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    if (!ranks_[rank].exit) result.push_back(static_cast<int>(rank));
  }
  return result;
}

std::optional<RankFailure> JobRecord::first_cause() const {
  const auto order = [](const Entry& entry) {
    const bool consequence = entry.failure.kind == FailureKind::kConsequence;
    const Milliseconds when =
        entry.failure.kind == FailureKind::kSignal ? entry.when - kReportTime : entry.when;
    return std::pair(consequence, when);
  };
  const auto first =
      std::min_element(failures_.begin(), failures_.end(),
                       [&](const Entry& a, const Entry& b) { return order(a) < order(b); });
  if (first == failures_.end()) return std::nullopt;
  return first->failure;
}

std::optional<Milliseconds> JobRecord::failed_since() const {
  if (failures_.empty()) return std::nullopt;
  return failures_.front().when;
}

std::vector<RankFailure> JobRecord::take_news() {
  std::vector<RankFailure> news;
  for (; told_ < failures_.size(); ++told_) news.push_back(failures_[told_].failure);
  return news;
}

int JobRecord::exit_code() const {
  const auto cause = first_cause();
  if (!cause) return 0;
  return cause->code == 0 ? 1 : cause->code;
}

}  // namespace tessera::launch
