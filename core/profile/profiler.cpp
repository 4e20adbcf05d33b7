#include <tessera/core/profile/profiler.h>

#include <algorithm>

#include <tessera/core/memory/allocator.h>
#include <tessera/core/plain_text.h>

namespace tessera {
namespace {

double seconds_between(std::chrono::steady_clock::time_point from,
                       std::chrono::steady_clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

void append_json_string(std::string& out, std::string_view text) {
  out += '"';
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) >= 0x20) out += c;
  }
  out += '"';
}

}  // namespace

Profiler::Profiler(bool keep_events) : keep_events_(keep_events), start_(Clock::now()) {}

void Profiler::enter(std::string_view name) {
  open_.push_back({name, Clock::now(), memory_stats()->current(), 0});
}

void Profiler::leave() {
  const Clock::time_point now = Clock::now();
  const Open range = open_.back();
  open_.pop_back();
  const double seconds = seconds_between(range.begin, now);
  auto found = entries_.find(range.name);
  if (found == entries_.end()) found = entries_.emplace(std::string(range.name), Entry{}).first;
  Entry& entry = found->second;
  ++entry.calls;
  entry.total_seconds += seconds;
  entry.self_seconds += seconds - range.inner_seconds;
  const int64_t bytes = memory_stats()->current();
  entry.allocated_bytes += bytes - range.bytes;
  if (!open_.empty()) open_.back().inner_seconds += seconds;
  if (keep_events_) {
    events_.push_back({std::string(range.name), seconds_between(start_, range.begin),
                       seconds_between(start_, now), static_cast<int>(open_.size()), bytes});
  }
}

std::string Profiler::table(int rows) const {
  std::vector<std::pair<std::string, Entry>> sorted(entries_.begin(), entries_.end());
  std::sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) {
    return a.second.self_seconds > b.second.self_seconds;
  });
  double all = 0;
  for (const auto& [name, entry] : sorted) all += entry.self_seconds;
  char line[200];
  plain_snprintf(line, sizeof line, "%-36s %8s %11s %11s %7s %12s\n", "range", "calls", "self ms",
                 "total ms", "share", "bytes kept");
  std::string text = line;
  if (static_cast<size_t>(rows) < sorted.size()) sorted.resize(static_cast<size_t>(rows));
  for (const auto& [name, entry] : sorted) {
    plain_snprintf(line, sizeof line, "%-36.36s %8lld %11.3f %11.3f %6.1f%% %12lld\n", name.c_str(),
                   static_cast<long long>(entry.calls), entry.self_seconds * 1e3,
                   entry.total_seconds * 1e3, all > 0 ? 100 * entry.self_seconds / all : 0,
                   static_cast<long long>(entry.allocated_bytes));
    text += line;
  }
  return text;
}

std::string Profiler::chrome_trace(int process) const {
  std::string text = "{\"traceEvents\":[";
  char numbers[160];
  for (size_t i = 0; i < events_.size(); ++i) {
    text += i ? ",\n{\"name\":" : "\n{\"name\":";
    append_json_string(text, events_[i].name);
    plain_snprintf(numbers, sizeof numbers,
                   ",\"ph\":\"X\",\"pid\":%d,\"tid\":0,\"ts\":%.3f,\"dur\":%.3f}", process,
                   events_[i].begin * 1e6, (events_[i].end - events_[i].begin) * 1e6);
    text += numbers;
  }
  return text + "\n]}\n";
}

}  // namespace tessera
