#include <tessera/accelerate/tracking/tracker.h>

#include <charconv>
#include <cmath>
#include <iterator>

#include <tessera/core/error.h>

namespace tessera {
namespace {

// The shortest decimal that reads back as the same double.
std::string shortest(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  char text[40];
  char* end = text;
  for (int digits = 6; digits <= 17; ++digits) {
    end = std::to_chars(text, std::end(text), value, std::chars_format::general, digits).ptr;
    double read = 0;
    std::from_chars(text, end, read);
    if (read == value) break;
  }
  return std::string(text, end);
}

void flatten_into(const TrackedValues& values, const std::string& prefix,
                  std::vector<std::pair<std::string, TrackedValue::Plain>>& out) {
  for (const auto& [name, value] : values) {
    if (value.is_group()) {
      flatten_into(value.group(), prefix + name + "/", out);
    } else {
      out.emplace_back(prefix + name, value.plain());
    }
  }
}

std::string join(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

// Stands where the run has a tracker that does not run on this rank.
class SilentTracker : public Tracker {
 public:
  void start(const TrackerRun&) override {}
  void store_configuration(const TrackedValues&) override {}
  void log(const TrackedValues&, int64_t) override {}
  bool log_images(const std::string&, const Tensor&, int64_t) override { return true; }
  bool log_table(const std::string&, const TrackedTable&, int64_t) override { return true; }
};

}  // namespace

TrackedValue::TrackedValue(const Tensor& value) {
  TS_CHECK_SHAPE(value.defined() && value.numel() == 1, "TrackedValue",
                 "a tensor of one element can be logged; got ",
                 value.defined() ? value.describe() : "an undefined one",
                 "; reduce it, or log a histogram of your own.");
  if (value.dtype() == kBool) {
    value_ = value.item<double>() != 0;
  } else if (is_floating(value.dtype())) {
    value_ = value.item<double>();
  } else {
    value_ = value.item<int64_t>();
  }
}

TrackedValue::TrackedValue(TrackedValues group)
    : group_(std::make_shared<const TrackedValues>(std::move(group))) {}
TrackedValue::TrackedValue(std::initializer_list<std::pair<std::string, TrackedValue>> group)
    : TrackedValue(TrackedValues(group)) {}

std::vector<std::pair<std::string, TrackedValue::Plain>> flatten(const TrackedValues& values) {
  std::vector<std::pair<std::string, TrackedValue::Plain>> out;
  flatten_into(values, "", out);
  return out;
}

std::string to_text(const TrackedValue::Plain& value) {
  if (const auto* text = std::get_if<std::string>(&value)) return *text;
  if (const auto* number = std::get_if<double>(&value)) return shortest(*number);
  if (const auto* number = std::get_if<int64_t>(&value)) return std::to_string(*number);
  return std::get<bool>(value) ? "true" : "false";
}

bool Tracker::log_images(const std::string&, const Tensor&, int64_t) { return false; }
bool Tracker::log_table(const std::string&, const TrackedTable&, int64_t) { return false; }

Trackers::Trackers(TrackersOptions options) : options_(std::move(options)) {
  add("jsonl", make_jsonl_tracker);
  add("csv", make_csv_tracker);
  add("tensorboard", make_tensorboard_tracker);
}

Trackers::~Trackers() {
  try {
    finish();
  } catch (...) {  // destructors never throw
  }
}

bool Trackers::add(std::string name, std::function<std::unique_ptr<Tracker>()> make) {
  TS_CHECK(!started_, "Trackers::add", "the run has started; add trackers before start().");
  TS_CHECK(!name.empty() && name != "all", "Trackers::add", "a tracker needs a name other than \"",
           name, "\".");
  return !makers_.insert_or_assign(std::move(name), std::move(make)).second;
}

std::vector<std::string> Trackers::known() const {
  std::vector<std::string> names;
  for (const auto& [name, make] : makers_) names.push_back(name);
  return names;
}

void Trackers::start(const std::string& project, const TrackedValues& configuration) {
  TS_CHECK(!started_, "Trackers::start", "the run has started; finish() it first.");
  std::vector<std::string> names;
  for (const auto& name : options_.with) {
    for (const auto& one : name == "all" ? known() : std::vector<std::string>{name}) {
      TS_CHECK_AS(ConfigError, makers_.contains(one), "Trackers::start", "there is no tracker \"",
                  one, "\"; there are ", join(known()), ", and those that add() was given.");
      if (std::find(names.begin(), names.end(), one) == names.end()) names.push_back(one);
    }
  }
  const TrackerRun run{project, options_.folder, options_.rank, options_.world_size};
  std::vector<Started> started;
  for (const auto& name : names) {
    std::unique_ptr<Tracker> tracker = makers_.find(name)->second();
    TS_CHECK(tracker != nullptr, "Trackers::start", "the maker of \"", name, "\" made nothing.");
    if (tracker->main_process_only() && options_.rank != 0) {
      started.push_back({name, std::make_unique<SilentTracker>()});
      continue;
    }
    TS_CHECK_AS(ConfigError, !tracker->needs_folder() || !options_.folder.empty(),
                "Trackers::start", "\"", name,
                "\" writes files and no folder is given; set the folder (project_dir or "
                "logging_dir of the Accelerator).");
    tracker->start(run);
    if (!configuration.empty()) tracker->store_configuration(configuration);
    started.push_back({name, std::move(tracker)});
  }
  trackers_ = std::move(started);
  started_ = true;
}

void Trackers::require_started(const char* call) const {
  TS_CHECK(started_, call, "the run has not started; call start() (init_trackers()) first.");
}

void Trackers::log(const TrackedValues& values, int64_t step) {
  require_started("Trackers::log");
  for (auto& one : trackers_) one.tracker->log(values, step);
}

void Trackers::log_images(const std::string& name, const Tensor& images, int64_t step) {
  require_started("Trackers::log_images");
  bool kept = false;
  for (auto& one : trackers_) kept |= one.tracker->log_images(name, images, step);
  TS_CHECK_AS(UnsupportedError, kept || trackers_.empty(), "Trackers::log_images",
              "no tracker of this run keeps images; \"tensorboard\" does.");
}

void Trackers::log_table(const std::string& name, const TrackedTable& table, int64_t step) {
  require_started("Trackers::log_table");
  for (const auto& row : table.rows) {
    TS_CHECK_SHAPE(row.size() == table.columns.size(), "Trackers::log_table", "\"", name,
                   "\" has rows of ", row.size(), " cells under ", table.columns.size(),
                   " columns; give every row one cell a column.");
  }
  bool kept = false;
  for (auto& one : trackers_) kept |= one.tracker->log_table(name, table, step);
  TS_CHECK_AS(UnsupportedError, kept || trackers_.empty(), "Trackers::log_table",
              "no tracker of this run keeps tables; \"jsonl\" and \"tensorboard\" do.");
}

Tracker& Trackers::get(std::string_view name) {
  require_started("Trackers::get");
  std::vector<std::string> names;
  for (auto& one : trackers_) {
    if (one.name == name) return *one.tracker;
    names.push_back(one.name);
  }
  TS_THROW(ConfigError, "Trackers::get", "the run does not use a tracker \"", name, "\"; it uses ",
           names.empty() ? "none" : join(names), ".");
}

void Trackers::flush() {
  for (auto& one : trackers_) one.tracker->flush();
}

void Trackers::finish() {
  if (!started_) return;
  started_ = false;
  const std::vector<Started> trackers = std::move(trackers_);
  trackers_.clear();
  for (const auto& one : trackers) one.tracker->finish();
}

}  // namespace tessera
