// Time and memory by named ranges, recorded while a Profiler is active in the context.
//
//     Profiler profiler;
//     { ProfilerScope scope(profiler); train_step(); }
//     std::cout << profiler.table();
//
// Every op opens a range by its name (forward and backward). Inactive, a range costs one load and
// one branch. Ranges nest; a range's own time excludes ranges inside it.
//
// Timelines of other tools (core/profile/nvtx.h) get these ranges too, and TimelineRanges: calls of
// modules, optimizer steps, collectives, batches of loaders.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/core/context.h>

namespace tessera {

class RangeListener {
 public:
  virtual ~RangeListener() = default;
  virtual void enter(std::string_view name) = 0;
  virtual void leave() = 0;
  // The thread's position, as a number of the listener's own: autograd keeps it with each op and
  // passes it with the range of the op's backward. 0: none.
  virtual uint32_t place() const { return 0; }
  virtual void enter_backward(std::string_view name, uint32_t place) {
    (void)place;
    enter(name);
  }
};

class Profiler : public RangeListener {
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

  void enter(std::string_view name) override;  // ProfilerRange calls them
  void leave() override;

 private:
  using Clock = std::chrono::steady_clock;
  struct Open {
    std::string_view name;
    Clock::time_point begin;
    int64_t bytes;
    double inner_seconds;
  };
  bool keep_events_;
  Clock::time_point start_;
  std::vector<Open> open_;
  std::map<std::string, Entry, std::less<>> entries_;
  std::vector<Event> events_;
};

namespace detail {
struct ProfilerSlot {
  ProfilerSlot();                     // the environment may ask for a timeline
  RangeListener* active = nullptr;    // gets the ranges of ops
  RangeListener* timeline = nullptr;  // gets all ranges, as part of `active` or alone
};
}  // namespace detail

// Two listeners as one. Places are those of the first one that has any.
class BothListeners : public RangeListener {
 public:
  BothListeners(RangeListener* first, RangeListener* second) : first_(first), second_(second) {}
  void enter(std::string_view name) override { first_->enter(name), second_->enter(name); }
  void leave() override { second_->leave(), first_->leave(); }
  uint32_t place() const override {
    const uint32_t place = first_->place();
    return place != 0 ? place : second_->place();
  }
  void enter_backward(std::string_view name, uint32_t place) override {
    first_->enter_backward(name, place), second_->enter_backward(name, place);
  }

 private:
  RangeListener *first_, *second_;
};

// Makes a profiler the context's active one for a scope.
class ProfilerScope {
 public:
  explicit ProfilerScope(Profiler& profiler)
      : ProfilerScope(profiler, Context::current().slot<detail::ProfilerSlot>()) {}

 private:
  ProfilerScope(Profiler& profiler, detail::ProfilerSlot& slot)
      : both_(&profiler, slot.timeline),
        scoped_(slot.active,
                slot.timeline == nullptr ? static_cast<RangeListener*>(&profiler) : &both_) {}

  BothListeners both_;
  ScopedValue<RangeListener*> scoped_;
};

// Marks the ranges of the context on a timeline, for a scope, beside a profiler that is active.
class TimelineScope {
 public:
  explicit TimelineScope(RangeListener& timeline)
      : TimelineScope(timeline, Context::current().slot<detail::ProfilerSlot>()) {}

 private:
  TimelineScope(RangeListener& timeline, detail::ProfilerSlot& slot)
      : both_(slot.active, &timeline),
        active_(slot.active, slot.timeline != nullptr ? slot.active
                             : slot.active == nullptr ? &timeline
                                                      : &both_),
        timeline_(slot.timeline, &timeline) {}

  BothListeners both_;
  ScopedValue<RangeListener*> active_, timeline_;
};

// A named range. `name` must live as long as the range.
class ProfilerRange {
 public:
  explicit ProfilerRange(std::string_view name)
      : ProfilerRange(name, Context::current().slot<detail::ProfilerSlot>().active) {}
  // For the backward of an op that was called at `place`.
  ProfilerRange(std::string_view name, uint32_t place)
      : listener_(Context::current().slot<detail::ProfilerSlot>().active) {
    if (listener_ != nullptr) [[unlikely]]
      listener_->enter_backward(name, place);
  }
  ~ProfilerRange() {
    if (listener_ != nullptr) [[unlikely]]
      listener_->leave();
  }
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;

 protected:
  ProfilerRange(std::string_view name, RangeListener* listener) : listener_(listener) {
    if (listener_ != nullptr) [[unlikely]]
      listener_->enter(name);
  }

 private:
  RangeListener* listener_;
};

// A range that stands for more than an op: on timelines, not in a Profiler's table.
class TimelineRange : public ProfilerRange {
 public:
  explicit TimelineRange(std::string_view name)
      : ProfilerRange(name, Context::current().slot<detail::ProfilerSlot>().timeline) {}
};

}  // namespace tessera
