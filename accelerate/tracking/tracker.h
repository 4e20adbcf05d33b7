// Trackers record the numbers of a run as JSON lines, CSV or for TensorBoard; the interface is for
// your own.
//
//     Trackers trackers({.folder = "runs/a", .with = {"jsonl", "tensorboard"}});
//     trackers.start("gpt-small", {{"lr", 3e-4}, {"model", {{"layers", 6}, {"width", 384}}}});
//     trackers.log({{"loss", loss}, {"lr", optimizer.lr()}}, step);
//     trackers.finish();
//
// Making trackers opens no file and communicates nothing; start() does. A tracker that records on
// the main process only (as all in this file do) is silent on the others, so that every rank can
// make the same calls.
//
// An unknown name, a missing folder and a file that cannot be written are errors at start(), so
// that no run goes unrecorded.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include <tessera/core/tensor/tensor.h>

namespace tessera {

class TrackedValue;
// Names and values, in the order given.
using TrackedValues = std::vector<std::pair<std::string, TrackedValue>>;

// A number, a text, or a group of named values, which becomes "group/name".
class TrackedValue {
 public:
  TrackedValue(bool value) : value_(value) {}
  template <class T>
  requires(std::is_integral_v<T> && !std::is_same_v<T, bool>) TrackedValue(T value)
      : value_(static_cast<int64_t>(value)) {}
  TrackedValue(double value) : value_(value) {}
  TrackedValue(float value) : value_(static_cast<double>(value)) {}
  TrackedValue(const char* value) : value_(std::string(value)) {}
  TrackedValue(std::string value) : value_(std::move(value)) {}
  // A tensor of one element, on any device; read at once. ShapeError otherwise.
  TrackedValue(const Tensor& value);
  TrackedValue(TrackedValues group);
  TrackedValue(std::initializer_list<std::pair<std::string, TrackedValue>> group);

  using Plain = std::variant<bool, int64_t, double, std::string>;
  bool is_group() const { return group_ != nullptr; }
  const TrackedValues& group() const { return *group_; }
  const Plain& plain() const { return value_; }

 private:
  Plain value_;
  std::shared_ptr<const TrackedValues> group_;
};

// The values without groups: {"model", {{"layers", 6}}} becomes {"model/layers", 6}.
std::vector<std::pair<std::string, TrackedValue::Plain>> flatten(const TrackedValues& values);
// "6", "0.0003", "true", the text itself; NaN and infinities as "nan", "inf", "-inf".
std::string to_text(const TrackedValue::Plain& value);

struct TrackedTable {
  std::vector<std::string> columns;
  std::vector<std::vector<std::string>> rows;
};

// What a tracker learns of its run at the start.
struct TrackerRun {
  std::string project;
  std::string folder;  // empty where none was given
  int rank = 0, world_size = 1;
};

class Tracker {
 public:
  virtual ~Tracker() = default;
  // False: it is started and called on every rank.
  virtual bool main_process_only() const { return true; }
  virtual bool needs_folder() const { return true; }

  // Opens what it needs. It is called first, and finish() last, once.
  virtual void start(const TrackerRun& run) = 0;
  virtual void store_configuration(const TrackedValues& configuration) = 0;
  virtual void log(const TrackedValues& values, int64_t step) = 0;
  // False: this tracker cannot record such values.
  // Images: u8, (N, H, W, C) with 1, 3 or 4 channels, or floating in [0, 1].
  virtual bool log_images(const std::string& name, const Tensor& images, int64_t step);
  virtual bool log_table(const std::string& name, const TrackedTable& table, int64_t step);
  // All that was logged is on the disk when it returns.
  virtual void flush() {}
  virtual void finish() {}
};

// One object for each log() in FOLDER/metrics.jsonl: {"step": 3, "time": seconds since 1970,
// "loss": 2.5}; the configuration in FOLDER/configuration.json. NaN and infinities, which JSON
// lacks, are the texts "nan", "inf", "-inf". A file that is there is continued.
std::unique_ptr<Tracker> make_jsonl_tracker();
// FOLDER/metrics.csv: a column for each name, a row for each log(); a name that comes later adds a
// column and rewrites the file once. A file that is there is continued.
std::unique_ptr<Tracker> make_csv_tracker();
// FOLDER/events.out.tfevents.*: scalars, texts, images, tables and hyper-parameters that
// TensorBoard shows. Events reach the disk at the latest with the first log() 10 s later, and at
// flush() and finish().
std::unique_ptr<Tracker> make_tensorboard_tracker();

struct TrackersOptions {
  std::string folder = {};
  std::vector<std::string> with = {};  // names; "all" stands for every registered one
  int rank = 0, world_size = 1;
};

class Trackers {
 public:
  explicit Trackers(TrackersOptions options = {});
  ~Trackers();  // finishes and ignores errors: call finish() to see them

  // Registers a name for `with`. Returns true if it replaces a tracker of that name.
  bool add(std::string name, std::function<std::unique_ptr<Tracker>()> make);
  std::vector<std::string> known() const;

  // ConfigError: a name in `with` that is not known (with those that are), or a tracker that needs
  // a folder without one; IoError from opening files.
  void start(const std::string& project, const TrackedValues& configuration = {});
  bool started() const { return started_; }
  void log(const TrackedValues& values, int64_t step);
  // UnsupportedError if no tracker of the run can record it.
  void log_images(const std::string& name, const Tensor& images, int64_t step);
  void log_table(const std::string& name, const TrackedTable& table, int64_t step);
  // The tracker of that name; one that ignores everything on ranks where it was not started.
  // ConfigError where the run does not use it.
  Tracker& get(std::string_view name);
  void flush();
  void finish();

 private:
  struct Started {
    std::string name;
    std::unique_ptr<Tracker> tracker;
  };
  void require_started(const char* call) const;

  TrackersOptions options_;
  std::map<std::string, std::function<std::unique_ptr<Tracker>()>, std::less<>> makers_;
  std::vector<Started> trackers_;
  bool started_ = false;
};

}  // namespace tessera
