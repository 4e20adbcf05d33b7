#include <tessera/accelerate/tracking/memory_tracker.h>

#include <unistd.h>
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <fstream>
#include <mutex>

#include <nlohmann/json.hpp>

#include <tessera/core/error.h>
#include <tessera/core/io/atomic_file.h>
#include <tessera/core/plain_text.h>
#include <tessera/core/thread.h>

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

// The kernel's high-water mark of resident bytes, of the process's whole life; 0 if unknown.
int64_t resident_high_water() {
  PlainText<std::ifstream> status("/proc/self/status");
  std::string line;
  while (std::getline(status, line)) {
    long long kib = 0;
    if (std::sscanf(line.c_str(), "VmHWM: %lld kB", &kib) == 1) return kib * 1024;
  }
  return 0;
}

double mib(int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

nlohmann::ordered_json to_json_value(const MemoryReport::Category& category) {
  return {{"begin", category.begin}, {"end", category.end}, {"peak", category.peak}};
}

}  // namespace

int64_t resident_bytes() {
  PlainText<std::ifstream> statm("/proc/self/statm");
  int64_t pages = 0, resident = 0;
  if (!(statm >> pages >> resident)) return 0;
  return resident * ::sysconf(_SC_PAGESIZE);
}

struct MemoryTracker::State {
  std::shared_ptr<MemoryStats> stats = memory_stats();
  MemoryStats::Peaks before;
  Clock::time_point begin = Clock::now();
  int64_t high_water = resident_high_water();
  MemoryReport report;
  bool stopped = false;

  std::mutex mutex;
  std::condition_variable wake;
  bool stop_sampling = false;
  Thread sampler;

  double seconds() const { return std::chrono::duration<double>(Clock::now() - begin).count(); }
  MemorySample sample() const { return {seconds(), stats->current(), resident_bytes()}; }

  void run(int64_t max_samples) {
    std::unique_lock lock(mutex);
    auto next = Clock::now();
    while (!stop_sampling) {
      report.samples.push_back(sample());
      if (static_cast<int64_t>(report.samples.size()) > max_samples) {
        size_t kept = 0;
        for (size_t i = 0; i < report.samples.size(); i += 2) {
          report.samples[kept++] = report.samples[i];
        }
        report.samples.resize(kept);
        report.period *= 2;
      }
      // A sampler that was held up does not catch up with a burst.
      next = std::max(next + std::chrono::duration_cast<Clock::duration>(
                                 std::chrono::duration<double>(report.period)),
                      Clock::now());
      wake.wait_until(lock, next, [&] { return stop_sampling; });
    }
  }
};

MemoryTracker::MemoryTracker(const MemoryTrackerOptions& options) {
  TS_CHECK(options.period == 0 || (options.period >= 1e-4 && options.period <= 86400),
           "MemoryTracker", "the period is 0 (no samples) or 0.0001 to 86400 seconds; got ",
           options.period, ".");
  TS_CHECK(options.max_samples >= 2, "MemoryTracker", "keeps at least 2 samples; max_samples is ",
           options.max_samples, ".");
  state_ = std::make_unique<State>();
  MemoryReport& report = state_->report;
  for (int c = 0; c < kNumMemoryCategories; ++c) {
    report.categories[static_cast<size_t>(c)].begin =
        state_->stats->current(static_cast<MemoryCategory>(c));
  }
  report.tensors.begin = state_->stats->current();
  report.resident.begin = resident_bytes();
  report.period = options.period;
  state_->before = state_->stats->begin_peaks();
  if (options.period > 0) {
    state_->sampler =
        Thread([state = state_.get(), most = options.max_samples] { state->run(most); });
  }
}

MemoryTracker::~MemoryTracker() {
  stop();
  // After fork() the sampler's wait, which no thread ends, would hold the condition's destructor.
  if (!state_->sampler.is_of_this_process()) static_cast<void>(state_.release());
}

const MemoryReport& MemoryTracker::stop() {
  State& state = *state_;
  MemoryReport& report = state.report;
  if (state.stopped) return report;
  state.stopped = true;
  if (state.sampler.joinable() && state.sampler.is_of_this_process()) {
    {
      const std::lock_guard lock(state.mutex);
      state.stop_sampling = true;
    }
    state.wake.notify_all();
    state.sampler.join();
    report.samples.push_back(state.sample());
  }
  const MemoryStats::Peaks peaks = state.stats->end_peaks(state.before);
  for (size_t c = 0; c < kNumMemoryCategories; ++c) {
    report.categories[c].end = state.stats->current(static_cast<MemoryCategory>(c));
    report.categories[c].peak = peaks.categories[c];
  }
  report.tensors.end = state.stats->current();
  report.tensors.peak = peaks.total;
  report.seconds = state.seconds();
  report.resident.end = resident_bytes();
  const int64_t high_water = resident_high_water();
  report.resident_peak_exact = high_water > state.high_water;
  if (report.resident_peak_exact) {
    report.resident.peak = high_water;
  } else {
    report.resident.peak = std::max(report.resident.begin, report.resident.end);
    for (const auto& sample : report.samples) {
      report.resident.peak = std::max(report.resident.peak, sample.resident);
    }
  }
  return report;
}

std::string MemoryReport::table() const {
  char line[160];
  plain_snprintf(line, sizeof line, "%-16s %12s %12s %12s %12s\n", "MiB", "begin", "end", "peak",
                 "peak-begin");
  std::string text = line;
  const auto add = [&](const char* name, const Category& category) {
    plain_snprintf(line, sizeof line, "%-16s %12.2f %12.2f %12.2f %12.2f\n", name,
                   mib(category.begin), mib(category.end), mib(category.peak),
                   mib(category.peak - category.begin));
    text += line;
  };
  for (size_t c = 0; c < kNumMemoryCategories; ++c) {
    if (categories[c].begin || categories[c].peak) {
      add(name_of(static_cast<MemoryCategory>(c)), categories[c]);
    }
  }
  add("all tensors", tensors);
  add(resident_peak_exact ? "resident set" : "resident set*", resident);
  if (!resident_peak_exact) {
    text += samples.empty() ? "* peak of begin and end: no samples were taken\n"
                            : "* peak of the samples\n";
  }
  return text;
}

std::string MemoryReport::to_json() const {
  nlohmann::ordered_json json{{"unit", "bytes"}, {"seconds", seconds}};
  for (size_t c = 0; c < kNumMemoryCategories; ++c) {
    json["categories"][name_of(static_cast<MemoryCategory>(c))] = to_json_value(categories[c]);
  }
  json["tensors"] = to_json_value(tensors);
  json["resident"] = to_json_value(resident);
  json["resident"]["peak_exact"] = resident_peak_exact;
  json["period"] = period;
  auto& series = json["samples"] = nlohmann::ordered_json::array();
  for (const auto& sample : samples) {
    series.push_back({sample.seconds, sample.tensors, sample.resident});
  }
  return json.dump(1) + "\n";
}

std::string MemoryReport::to_svg() const {
  constexpr double kWidth = 800, kHeight = 320, kLeft = 70, kRight = 20, kTop = 30, kBottom = 40;
  int64_t top = std::max(tensors.peak, resident.peak);
  for (const auto& sample : samples) top = std::max({top, sample.tensors, sample.resident});
  const double highest = std::max(mib(top), 1e-3) * 1.05;
  const double length = std::max(seconds, 1e-9);
  const auto x = [&](double at) { return kLeft + at / length * (kWidth - kLeft - kRight); };
  const auto y = [&](int64_t bytes) {
    return kHeight - kBottom - mib(bytes) / highest * (kHeight - kTop - kBottom);
  };
  char text[300];
  plain_snprintf(text, sizeof text,
                 "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" height=\"%.0f\" "
                 "font-family=\"sans-serif\" font-size=\"12\">\n"
                 "<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n",
                 kWidth, kHeight);
  std::string svg = text;
  for (int i = 0; i <= 4; ++i) {
    const auto bytes = static_cast<int64_t>(highest * i / 4 * (1 << 20));
    plain_snprintf(text, sizeof text,
                   "<line x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" y2=\"%.1f\" stroke=\"#ddd\"/>"
                   "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"end\">%.4g</text>\n"
                   "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">%.3g</text>\n",
                   kLeft, kWidth - kRight, y(bytes), y(bytes), kLeft - 6, y(bytes) + 4, mib(bytes),
                   x(length * i / 4), kHeight - kBottom + 18, length * i / 4);
    svg += text;
  }
  const auto line = [&](const char* name, const char* colour, double label,
                        int64_t MemorySample::*field) {
    svg += "<polyline fill=\"none\" stroke=\"" + std::string(colour) + "\" points=\"";
    for (const auto& sample : samples) {
      plain_snprintf(text, sizeof text, "%.1f,%.1f ", x(sample.seconds), y(sample.*field));
      svg += text;
    }
    plain_snprintf(text, sizeof text, "\"/><text x=\"%.0f\" y=\"18\" fill=\"%s\">%s</text>\n",
                   label, colour, name);
    svg += text;
  };
  line("tensors, MiB", "#1f77b4", kLeft, &MemorySample::tensors);
  line("resident set, MiB", "#ff7f0e", kLeft + 120, &MemorySample::resident);
  plain_snprintf(text, sizeof text,
                 "<line x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" y2=\"%.1f\" stroke=\"#1f77b4\" "
                 "stroke-dasharray=\"4\"/><text x=\"%.0f\" y=\"18\">dashed: peak of tensors; "
                 "seconds from left to right</text>\n</svg>\n",
                 kLeft, kWidth - kRight, y(tensors.peak), y(tensors.peak), kLeft + 280);
  return svg + text;
}

void MemoryReport::save_json(const std::string& path) const {
  write_file_atomically(path, to_json());
}
void MemoryReport::save_svg(const std::string& path) const {
  write_file_atomically(path, to_svg());
}

}  // namespace tessera
