#include <tessera/accelerate/launch/siblings.h>

#include <algorithm>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>
#include <string>

#include <unistd.h>

#include <tessera/core/plain_text.h>

namespace tessera::launch {
namespace {

using distributed::Clock;

std::string text_of(const std::filesystem::path& path) {
  PlainText<std::ifstream> file(path);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

std::filesystem::path process_folder(pid_t pid) { return "/proc/" + std::to_string(pid); }

// Children of a process that run, of all its threads.
std::vector<pid_t> running_children(pid_t parent) {
  std::vector<pid_t> result;
  std::error_code gone;
  for (const auto& thread :
       std::filesystem::directory_iterator(process_folder(parent) / "task", gone)) {
    PlainText<std::istringstream> children(text_of(thread.path() / "children"));
    for (pid_t pid = 0; children >> pid;) {
      const std::string stat = text_of(process_folder(pid) / "stat");
      const size_t state = stat.rfind(") ");
      if (state != stat.npos && state + 2 < stat.size() && stat[state + 2] != 'Z') {
        result.push_back(pid);
      }
    }
  }
  return result;
}

// The rank that a process was started for. Before its exec it has its parent's environment.
std::optional<int> rank_of(pid_t pid) {
  Environment environment;
  PlainText<std::istringstream> entries(text_of(process_folder(pid) / "environ"));
  for (std::string entry; std::getline(entries, entry, '\0');) {
    const size_t end = entry.find('=');
    if (end != entry.npos) environment[entry.substr(0, end)] = entry.substr(end + 1);
  }
  try {
    const distributed::LaunchInfo info = distributed::detect(environment, {});
    if (info.world_size > 1) return info.rank;
  } catch (const std::exception&) {  // another program's
  }
  return std::nullopt;
}

}  // namespace

Siblings::Siblings(const distributed::LaunchInfo& info)
    : looks_(info.local_world_size > 1 && info.local_rank < 2), size_(info.local_world_size) {}

std::vector<int> Siblings::lost() {
  if (!looks_) return {};
  const std::vector<pid_t> running = running_children(::getppid());
  if (static_cast<int>(running.size()) >= size_) complete_ = Clock::now();
  std::vector<int> gone;
  for (auto at = ranks_.begin(); at != ranks_.end();) {
    if (std::ranges::find(running, at->first) != running.end()) {
      ++at;
      continue;
    }
    gone.push_back(at->second);
    at = ranks_.erase(at);
  }
  for (const pid_t pid : running) {
    if (ranks_.contains(pid)) continue;
    if (const auto rank = rank_of(pid)) ranks_[pid] = *rank;
  }
  return gone;
}

bool Siblings::lacks() const { return looks_ && Clock::now() >= complete_ + kForkTime; }

}  // namespace tessera::launch
