// The memory of a part of a program, by category and over time.
//
//     MemoryTracker tracker({.period = 0.01});
//     train();
//     const MemoryReport report = tracker.stop();
//     std::cout << report.table();
//     report.save_json("memory.json"); report.save_svg("memory.svg");
//
// High-water marks come from the allocator, which counts every block, so no peak between two
// samples is missed. The resident memory of the process, which also includes other memory than
// tensors, is read from the operating system as a cross-check. The kernel keeps one mark for the
// process's whole lifetime: if it rose while the tracker ran it is the peak, otherwise the largest
// sample is used (and the table says so). Samples need a thread, which reads a few counters each
// period.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <tessera/core/memory/allocator.h>

namespace tessera {

struct MemorySample {
  double seconds = 0;    // since the tracker began
  int64_t tensors = 0;   // bytes that the allocator has handed out, all categories
  int64_t resident = 0;  // of the process; 0 where the system does not tell
};

struct MemoryReport {
  struct Category {
    int64_t begin = 0, end = 0, peak = 0;  // bytes
  };
  std::array<Category, kNumMemoryCategories> categories;
  Category tensors;   // of all categories together; their peaks need not fall together
  Category resident;  // of the process
  bool resident_peak_exact = false;  // the kernel's mark; else the largest sample
  double seconds = 0;
  double period = 0;  // of the samples, seconds; 0: none were taken
  std::vector<MemorySample> samples;

  std::string table() const;  // MiB by category: begin, end, peak, growth of the peak
  std::string to_json() const;
  std::string to_svg() const;  // tensors and resident memory over time
  // IoError; the file appears whole or not at all.
  void save_json(const std::string& path) const;
  void save_svg(const std::string& path) const;
};

struct MemoryTrackerOptions {
  double period = 0;  // seconds between samples, at least 0.0001; 0: only marks
  // Limit of samples kept; when it is reached, every second one is dropped and the period doubles,
  // so that a week's run fits and is shown whole.
  int64_t max_samples = 10000;
};

// Tracks the context it was made in. Trackers may nest: each has its own marks.
class MemoryTracker {
 public:
  // ValueError for a period or number of samples out of range.
  explicit MemoryTracker(const MemoryTrackerOptions& options = {});
  ~MemoryTracker();
  MemoryTracker(const MemoryTracker&) = delete;
  MemoryTracker& operator=(const MemoryTracker&) = delete;

  // Stops tracking; further calls return the same report.
  const MemoryReport& stop();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Resident bytes of this process now; 0 where the system does not tell.
int64_t resident_bytes();

}  // namespace tessera
