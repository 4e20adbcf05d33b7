#include <tessera/accelerate/state/numbered_checkpoints.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>
#include <set>

#include <tessera/core/error.h>
#include <tessera/distributed/checkpoint/commit.h>
#include <tessera/distributed/checkpoint/reader.h>

namespace tessera::accelerate {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kNamePrefix = "checkpoint_";

}  // namespace

std::string checkpoints_folder(const std::string& project_dir) {
  return (fs::path(project_dir) / "checkpoints").string();
}
std::string numbered_folder(const std::string& project_dir, int64_t number) {
  return (fs::path(checkpoints_folder(project_dir)) /
          (std::string(kNamePrefix) + std::to_string(number)))
      .string();
}

std::optional<int64_t> checkpoint_number(std::string_view name) {
  if (!name.starts_with(kNamePrefix)) return std::nullopt;
  name.remove_prefix(kNamePrefix.size());
  if (name.empty() || name.size() > 18 || (name.size() > 1 && name[0] == '0')) return std::nullopt;
  int64_t number = 0;
  for (const char c : name) {
    if (c < '0' || c > '9') return std::nullopt;
    number = number * 10 + (c - '0');
  }
  return number;
}

std::vector<NumberedCheckpoint> list_checkpoints(const std::string& project_dir) {
  std::vector<NumberedCheckpoint> found;
  std::error_code error;
  const std::string folder = checkpoints_folder(project_dir);
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    const auto number = checkpoint_number(entry->path().filename().string());
    std::error_code status;
    if (number && entry->is_directory(status)) found.push_back({*number, entry->path().string()});
  }
  std::ranges::sort(found, {}, &NumberedCheckpoint::number);
  return found;
}

const std::string& NumberedCheckpoints::run() {
  if (!run_) {
    // Not of random_state(), which is the training's.
    std::random_device random;
    run_ = std::to_string(random()) + "-" + std::to_string(random());
  }
  return *run_;
}

int64_t NumberedCheckpoints::next_number(int64_t least) const {
  const auto all = list_checkpoints(options_.project_dir);
  int64_t number = all.empty() ? least : std::max(least, all.back().number + 1);
  std::error_code error;
  const auto is_taken = [&] {  // by a file
    return fs::exists(fs::symlink_status(numbered_folder(options_.project_dir, number), error));
  };
  while (is_taken()) ++number;
  return number;
}

void NumberedCheckpoints::note(int64_t number, std::optional<double> metric) {
  known_[number] = {.run = run(), .metric = metric};
}

std::optional<NumberedCheckpoints::Known> NumberedCheckpoints::known(
    const NumberedCheckpoint& checkpoint) {
  const auto found = known_.find(checkpoint.number);
  if (found != known_.end()) return found->second;
  try {
    const distributed::CheckpointReader reader(checkpoint.folder);
    Known read;
    const auto& metadata = reader.metadata();
    if (const auto run = metadata.find("run"); run != metadata.end()) read.run = run->second;
    if (const auto text = metadata.find("metric"); text != metadata.end()) {
      const nlohmann::json value = nlohmann::json::parse(text->second, nullptr, false);
      if (value.is_number()) read.metric = value.get<double>();
    }
    return known_[checkpoint.number] = read;
  } catch (const Error&) {
    return std::nullopt;
  }
}

std::vector<NumberedCheckpoint> NumberedCheckpoints::own() {
  std::vector<NumberedCheckpoint> list = list_checkpoints(options_.project_dir);
  std::erase_if(list, [&](const NumberedCheckpoint& one) {
    const auto read = known(one);
    return !read || read->run != run();
  });
  return list;
}

NumberedCheckpoints::Candidates NumberedCheckpoints::candidates() {
  Candidates found{.list = list_checkpoints(options_.project_dir)};
  if (found.list.empty()) return found;
  found.newest = found.list.back().number;
  std::ranges::reverse(found.list);
  std::optional<std::string> wanted = run_;
  found.of_other_runs = std::erase_if(found.list, [&](const NumberedCheckpoint& one) {
    const auto read = known(one);
    if (!read) return false;
    if (!wanted) wanted = read->run;
    return read->run != *wanted;
  });
  return found;
}

std::vector<std::pair<double, NumberedCheckpoint>> NumberedCheckpoints::by_metric(
    const std::vector<NumberedCheckpoint>& checkpoints) {
  std::vector<std::pair<double, NumberedCheckpoint>> best;
  for (const NumberedCheckpoint& one : checkpoints) {
    const auto read = known(one);
    // A loss that is no number is neither the least nor the largest.
    if (!read || !read->metric || std::isnan(*read->metric)) continue;
    best.emplace_back(options_.larger_is_better ? -*read->metric : *read->metric, one);
  }
  std::ranges::stable_sort(best, {}, [](const auto& pair) { return pair.first; });
  return best;
}

std::optional<NumberedCheckpoint> NumberedCheckpoints::best() {
  const auto sorted = by_metric(candidates().list);
  if (sorted.empty()) return std::nullopt;
  return sorted.front().second;
}

void NumberedCheckpoints::rotate(int64_t newest,
                                 const std::function<void(const std::string&)>& warn) {
  if (options_.total_limit == 0) return;
  const std::vector<NumberedCheckpoint> all = own();
  std::set<int64_t> stay = {newest};
  for (size_t i = 0; i < all.size(); ++i) {
    const int64_t number = all[i].number;
    if (static_cast<int64_t>(all.size() - i) <= options_.total_limit) stay.insert(number);
    if (options_.keep_every > 0 && number % options_.keep_every == 0) stay.insert(number);
  }
  if (options_.keep_best > 0) {
    auto best = by_metric(all);
    best.resize(std::min(best.size(), static_cast<size_t>(options_.keep_best)));
    for (const auto& [metric, one] : best) stay.insert(one.number);
  }
  for (const NumberedCheckpoint& one : all) {
    if (stay.contains(one.number)) continue;
    try {
      distributed::remove_checkpoint(one.folder);
      known_.erase(one.number);
    } catch (const Error& error) {  // the new checkpoint stands; the old one is only in the way
      warn(error.what());
    }
  }
}

}  // namespace tessera::accelerate
