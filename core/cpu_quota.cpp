#include <tessera/core/cpu_quota.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string_view>
#include <vector>

#include <tessera/core/plain_text.h>

namespace tessera {
namespace {

bool holds(std::string_view list, std::string_view word) {
  for (size_t begin = 0; begin <= list.size();) {
    const size_t end = std::min(list.find(',', begin), list.size());
    if (list.substr(begin, end - begin) == word) return true;
    begin = end + 1;
  }
  return false;
}

struct Mount {
  std::string group;  // that stands at `place`
  std::string place;
  bool second = false;  // version 2
};

// Of groups that limit time: "36 35 0:32 GROUP PLACE rw - cgroup2 cgroup2 rw", and of version 1
// "... - cgroup cgroup rw,cpu,cpuacct".
std::vector<Mount> mounts(const std::string& root) {
  std::vector<Mount> all;
  PlainText<std::ifstream> file(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    PlainText<std::istringstream> words(line);
    std::string id, parent, device, word, type, source, options;
    Mount mount;
    words >> id >> parent >> device >> mount.group >> mount.place;
    while (words >> word && word != "-") {
    }
    words >> type >> source >> options;
    mount.second = type == "cgroup2";
    if (mount.second || (type == "cgroup" && holds(options, "cpu"))) all.push_back(mount);
  }
  return all;
}

std::optional<double> read_quota(const std::string& folder, bool second) {
  double quota = 0, period = 0;
  if (second) {
    PlainText<std::ifstream> file(folder + "/cpu.max");  // "max 100000" is none
    if (!(file >> quota >> period)) return {};
  } else {
    PlainText<std::ifstream> quota_file(folder + "/cpu.cfs_quota_us");  // -1 is none
    PlainText<std::ifstream> period_file(folder + "/cpu.cfs_period_us");
    if (!(quota_file >> quota) || !(period_file >> period)) return {};
  }
  if (quota <= 0 || period <= 0) return {};
  return quota / period;
}

}  // namespace

std::optional<double> cpu_quota(const std::string& root) {
  std::optional<double> least;
  PlainText<std::ifstream> file(root + "/proc/self/cgroup");
  const std::vector<Mount> places = mounts(root);
  for (std::string line; std::getline(file, line);) {  // "0::/a/b", "4:cpu,cpuacct:/a/b"
    const size_t first = line.find(':'), next = line.find(':', first + 1);
    if (first == std::string::npos || next == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, next - first - 1);
    const std::string path = line.substr(next + 1);
    for (const Mount& mount : places) {
      if (mount.second ? !controllers.empty() : !holds(controllers, "cpu")) continue;
      // A container may see the path of its host, under which it finds nothing: its own group is
      // what is mounted.
      std::string below = path;
      const std::string& own = mount.group;
      if (own != "/" && (below + "/").starts_with(own + "/")) below.erase(0, own.size());
      while (true) {
        const auto quota = read_quota(root + mount.place + below, mount.second);
        if (quota) least = std::min(least.value_or(*quota), *quota);
        if (below.empty() || below == "/") break;
        below.resize(below.rfind('/') == std::string::npos ? 0 : below.rfind('/'));
      }
    }
  }
  return least;
}

}  // namespace tessera
