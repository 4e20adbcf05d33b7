#include <tessera/accelerate/tracking/profile.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <map>

#include <nlohmann/json.hpp>

#include <tessera/core/error.h>
#include <tessera/core/io/atomic_file.h>
#include <tessera/core/plain_text.h>
#include <tessera/distributed/transport/rank_context.h>

namespace tessera {

ProfilePhase phase_of(const ProfileSchedule& schedule, int64_t step) {
  if (step < schedule.skip_first) return ProfilePhase::kNone;
  step -= schedule.skip_first;
  const int64_t cycle = schedule.wait + schedule.warmup + schedule.active;
  if (schedule.repeat > 0 && step / cycle >= schedule.repeat) return ProfilePhase::kNone;
  const int64_t at = step % cycle;
  if (at < schedule.wait) return ProfilePhase::kNone;
  if (at < schedule.wait + schedule.warmup) return ProfilePhase::kWarmup;
  return at + 1 == cycle ? ProfilePhase::kRecordAndSave : ProfilePhase::kRecord;
}

std::string Profile::table(int rows) const {
  std::string text = profiler->table(rows);
  if (collectives.empty()) return text;
  struct Sum {
    int64_t calls = 0, bytes = 0;
    double seconds = 0, waited = 0;
  };
  std::map<std::string, Sum> sums;
  for (const auto& record : collectives) {
    Sum& sum = sums[std::string(distributed::name_of(record.operation)) + " (" +
                    std::string(distributed::name_of(record.channel)) + ")"];
    ++sum.calls;
    sum.bytes += record.bytes;
    if (record.done >= record.queued) sum.seconds += record.done - record.queued;
    if (record.wait_end >= record.wait_begin) sum.waited += record.wait_end - record.wait_begin;
  }
  char line[200];
  plain_snprintf(line, sizeof line, "%-36s %8s %11s %11s %15s\n", "collective", "calls",
                 "under way ms", "waited ms", "bytes");
  text += line;
  for (const auto& [name, sum] : sums) {
    plain_snprintf(line, sizeof line, "%-36.36s %8lld %11.3f %11.3f %15lld\n", name.c_str(),
                   static_cast<long long>(sum.calls), sum.seconds * 1e3, sum.waited * 1e3,
                   static_cast<long long>(sum.bytes));
    text += line;
  }
  return text;
}

std::string Profile::chrome_trace() const {
  std::string text = profiler->chrome_trace(rank);
  text.resize(text.rfind("\n]}"));
  bool first = text.back() == '[';
  const auto add = [&](const nlohmann::ordered_json& event) {
    text += first ? "\n" : ",\n";
    first = false;
    text += event.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  };
  add({{"name", "process_name"},
       {"ph", "M"},
       {"pid", rank},
       {"args", {{"name", "rank " + std::to_string(rank)}}}});
  add({{"name", "thread_name"},
       {"ph", "M"},
       {"pid", rank},
       {"tid", 0},
       {"args", {{"name", "ops"}}}});
  for (const auto& event : profiler->events()) {
    add({{"name", "tensors"},
         {"ph", "C"},
         {"pid", rank},
         {"ts", event.end * 1e6},
         {"args", {{"bytes", event.bytes}}}});
  }
  // Asynchronous events: several may be under way at a time.
  int64_t id = 0;
  for (const auto& record : collectives) {
    if (record.done < record.queued) continue;  // not at its end yet
    nlohmann::ordered_json event{
        {"name", record.describe()},
        {"cat", record.group + "/" + std::string(distributed::name_of(record.channel))},
        {"ph", "b"},
        {"id", id++},
        {"pid", rank},
        {"tid", 0},
        {"ts", record.queued * 1e6},
        {"args", {{"bytes", record.bytes}, {"phase", record.phase}}}};
    add(event);
    event["ph"] = "e";
    event["ts"] = record.done * 1e6;
    event.erase("args");
    add(event);
  }
  return text + "\n]}\n";
}

void Profile::save(const std::string& path) const { write_file_atomically(path, chrome_trace()); }

ProfileSession::ProfileSession(ProfileOptions options) : options_(std::move(options)) {
  if (const auto& schedule = options_.schedule) {
    TS_CHECK(schedule->wait >= 0 && schedule->warmup >= 0 && schedule->active >= 1 &&
                 schedule->repeat >= 0 && schedule->skip_first >= 0,
             "ProfileSession", "a schedule has counts of at least 0 and an active step; got wait ",
             schedule->wait, ", warmup ", schedule->warmup, ", active ", schedule->active,
             ", repeat ", schedule->repeat, ", skip_first ", schedule->skip_first, ".");
  }
  if (!options_.folder.empty()) {
    std::error_code error;
    std::filesystem::create_directories(options_.folder, error);
    TS_CHECK_AS(IoError, !error, options_.folder,
                "cannot make the folder of traces: ", error.message(), "; choose another.");
  }
  enter(options_.schedule ? phase_of(*options_.schedule, 0) : ProfilePhase::kRecord);
}

ProfileSession::~ProfileSession() = default;

void ProfileSession::start_recording() {
  profiler_ = std::make_unique<Profiler>(true);
  scope_ = std::make_unique<ProfilerScope>(*profiler_);
  if (const auto trace = distributed::rank_context().trace) {
    collectives_ = std::make_unique<distributed::CommTrace::Scope>(*trace);
    collectives_origin_ = trace->seconds();
  }
  first_step_ = step_;
}

void ProfileSession::enter(ProfilePhase phase) {
  const auto records = [](ProfilePhase p) {
    return p == ProfilePhase::kRecord || p == ProfilePhase::kRecordAndSave;
  };
  if (phase == ProfilePhase::kNone) {
    scope_.reset();
    collectives_.reset();
    profiler_.reset();
  } else if (profiler_ == nullptr || (records(phase) && !records(phase_))) {
    scope_.reset();  // what warm-up recorded goes
    collectives_.reset();
    start_recording();
  }
  phase_ = phase;
  if (profiler_ != nullptr) step_range_ = std::make_unique<ProfilerRange>("step");
}

void ProfileSession::step() {
  if (finished_) return;
  step_range_.reset();
  TS_CHECK(profiler_ == nullptr || !profiler_->in_range(), "ProfileSession::step",
           "a ProfilerRange is open; close it before the step ends.");
  if (phase_ == ProfilePhase::kRecordAndSave) save(step_);
  ++step_;
  enter(options_.schedule ? phase_of(*options_.schedule, step_) : ProfilePhase::kRecord);
}

void ProfileSession::finish() {
  if (finished_) return;
  finished_ = true;
  step_range_.reset();
  TS_CHECK(profiler_ == nullptr || !profiler_->in_range(), "ProfileSession::finish",
           "a ProfilerRange is open; close it before.");
  const bool recorded = phase_ == ProfilePhase::kRecord || phase_ == ProfilePhase::kRecordAndSave;
  if (recorded && (step_ > first_step_ || !options_.schedule)) {
    save(std::max(first_step_, step_ - 1));
  }
  enter(ProfilePhase::kNone);
}

void ProfileSession::save(int64_t last_step) {
  Profile profile;
  profile.first_step = first_step_;
  profile.last_step = last_step;
  profile.rank = distributed::rank_context().rank;
  if (collectives_ != nullptr) {
    profile.collectives = collectives_->records();
    for (auto& record : profile.collectives) {
      for (double* time : {&record.queued, &record.done, &record.wait_begin, &record.wait_end}) {
        if (*time >= 0) *time -= collectives_origin_;
      }
    }
  }
  scope_.reset();
  collectives_.reset();
  profile.profiler = std::move(profiler_);
  ++cycles_;
  if (!options_.folder.empty()) {
    profile.save(options_.folder + "/rank" + std::to_string(profile.rank) + "-steps" +
                 std::to_string(first_step_) + "-" + std::to_string(last_step) + ".json");
  }
  if (options_.on_trace_ready) options_.on_trace_ready(profile);
}

}  // namespace tessera
