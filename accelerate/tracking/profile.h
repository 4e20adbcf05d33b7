// Profiles of some steps of a long training: when to record, and a trace for each rank that
// Perfetto (ui.perfetto.dev) and chrome://tracing show.
//
//     ProfileSession session({.schedule = {{.wait = 1, .warmup = 1, .active = 3, .repeat = 2}},
//                             .folder = "profiles"});
//     for (auto& batch : loader) { train_step(batch); session.step(); }
//     session.finish();                       // profiles/rank0-steps2-4.json, rank0-steps7-9.json
//
// A trace shows ops and ranges (forward and backward), collectives from issue to end on separate
// tracks, which shows overlap, and the bytes that tensors hold. Steps that are not recorded cost
// nothing; recorded ones about 0.2 us a range.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/core/profile/profiler.h>
#include <tessera/distributed/transport/trace.h>

namespace tessera {

// Steps 0 to skip_first - 1 are skipped; then cycles of wait + warmup + active steps follow,
// `repeat` of them, or without end if repeat is 0. Warm-up steps are recorded and discarded. Names
// and meaning are torch.profiler.schedule's.
struct ProfileSchedule {
  int64_t wait = 0, warmup = 0, active = 1, repeat = 0, skip_first = 0;
};

enum class ProfilePhase { kNone, kWarmup, kRecord, kRecordAndSave };
ProfilePhase phase_of(const ProfileSchedule& schedule, int64_t step);

// One cycle's result.
struct Profile {
  int64_t first_step = 0, last_step = 0;
  int rank = 0;
  std::unique_ptr<Profiler> profiler;
  // Collectives that ran in the cycle, with times in seconds since the profiler was made.
  std::vector<distributed::CommRecord> collectives;

  std::string table(int rows = 30) const;  // ranges by own time, then collectives by time
  std::string chrome_trace() const;
  void save(const std::string& path) const;  // IoError; whole or not at all
};

struct ProfileOptions {
  std::optional<ProfileSchedule> schedule = {};  // nothing: all from here to finish()
  std::string folder = {};                       // where traces go; empty: nowhere
  std::function<void(const Profile&)> on_trace_ready = {};
};

// Profiles the context, and the rank, that it is made in.
class ProfileSession {
 public:
  // ValueError for a schedule with negative counts or without an active step.
  explicit ProfileSession(ProfileOptions options);
  ~ProfileSession();  // stops recording; what was not finished is thrown away
  ProfileSession(const ProfileSession&) = delete;
  ProfileSession& operator=(const ProfileSession&) = delete;

  // The end of a training step. ValueError inside of an open ProfilerRange: a step ends outside.
  void step();
  // Ends the cycle under way, if it has recorded a step, or part of one without a schedule.
  void finish();

  ProfilePhase phase() const { return phase_; }
  int64_t steps() const { return step_; }
  int64_t cycles() const { return cycles_; }  // that are complete

 private:
  void enter(ProfilePhase phase);
  void start_recording();
  void save(int64_t last_step);

  ProfileOptions options_;
  ProfilePhase phase_ = ProfilePhase::kNone;
  int64_t step_ = 0, first_step_ = 0, cycles_ = 0;
  bool finished_ = false;
  std::unique_ptr<Profiler> profiler_;
  std::unique_ptr<ProfilerScope> scope_;
  std::unique_ptr<ProfilerRange> step_range_;
  std::unique_ptr<distributed::CommTrace::Scope> collectives_;
  double collectives_origin_ = 0;  // on the trace's clock
};

}  // namespace tessera
