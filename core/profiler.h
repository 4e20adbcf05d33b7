// Where time and memory go: named ranges, counted while a Profiler is active in the context.
//
//     Profiler profiler;
//     { ProfilerScope scope(profiler); train_step(); }
//     std::cout << profiler.table();
//
// Every op opens a range by its name (forward and backward), modules may add theirs. Inactive, a
// range costs one load and one branch. Ranges nest; a range's own time excludes ranges inside it.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/core/context.h>

namespace tessera {

class Profiler {
 public:
  struct Entry {
    int64_t calls = 0;
    double total_seconds = 0;
    double self_seconds = 0;
    int64_t allocated_bytes = 0;  // growth of the context's memory over the range, summed
  };
  struct Event {  // one range, for timelines; seconds since the profiler was made
    std::string name;
    double begin = 0, end = 0;
    int depth = 0;
    int64_t bytes = 0;  // in use by the context's tensors at its end
  };

  explicit Profiler(bool keep_events = false);
  const std::map<std::string, Entry, std::less<>>& entries() const { return entries_; }
  const std::vector<Event>& events() const { return events_; }
  bool in_range() const { return !open_.empty(); }
  std::string table(int rows = 30) const;           // sorted by own time
  std::string chrome_trace(int process = 0) const;  // JSON that Perfetto and chrome://tracing read

 private:
  friend class ProfilerRange;
  using Clock = std::chrono::steady_clock;
  struct Open {
    std::string_view name;
    Clock::time_point begin;
    int64_t bytes;
    double inner_seconds;
  };
  void enter(std::string_view name);
  void leave();

  bool keep_events_;
  Clock::time_point start_;
  std::vector<Open> open_;
  std::map<std::string, Entry, std::less<>> entries_;
  std::vector<Event> events_;
};

namespace detail {
struct ProfilerSlot {
  Profiler* active = nullptr;
};
}  // namespace detail

// Makes a profiler the context's active one for a scope.
class ProfilerScope {
 public:
  explicit ProfilerScope(Profiler& profiler)
      : scoped_(Context::current().slot<detail::ProfilerSlot>().active, &profiler) {}

 private:
  ScopedValue<Profiler*> scoped_;
};

// A named range. `name` must live as long as the range.
class ProfilerRange {
 public:
  explicit ProfilerRange(std::string_view name)
      : profiler_(Context::current().slot<detail::ProfilerSlot>().active) {
    if (profiler_ != nullptr) [[unlikely]]
      profiler_->enter(name);
  }
  ~ProfilerRange() {
    if (profiler_ != nullptr) [[unlikely]]
      profiler_->leave();
  }
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;

 private:
  Profiler* profiler_;
};

}  // namespace tessera
