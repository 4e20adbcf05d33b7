// The trackers that write plain text: JSON lines and CSV.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>

#include <nlohmann/json.hpp>

#include <tessera/accelerate/tracking/append_file.h>
#include <tessera/accelerate/tracking/tracker.h>
#include <tessera/core/error.h>
#include <tessera/core/io/atomic_file.h>
#include <tessera/core/plain_text.h>

namespace tessera {
namespace {

using Json = nlohmann::ordered_json;

std::string dump(const Json& json, int indent = -1) {
  return json.dump(indent, ' ', false, Json::error_handler_t::replace);
}

Json to_json(const TrackedValue::Plain& value) {
  if (const auto* number = std::get_if<double>(&value)) {
    return std::isfinite(*number) ? Json(*number) : Json(to_text(value));
  }
  if (const auto* number = std::get_if<int64_t>(&value)) return *number;
  if (const auto* flag = std::get_if<bool>(&value)) return *flag;
  return std::get<std::string>(value);
}

Json to_json(const TrackedValues& values) {
  Json json = Json::object();
  for (const auto& [name, value] : values) {
    json[name] = value.is_group() ? to_json(value.group()) : to_json(value.plain());
  }
  return json;
}

class JsonlTracker : public Tracker {
 public:
  void start(const TrackerRun& run) override {
    folder_ = run.folder;
    project_ = run.project;
    file_.emplace(folder_ + "/metrics.jsonl");
  }
  void store_configuration(const TrackedValues& configuration) override {
    write_file_atomically(
        folder_ + "/configuration.json",
        dump(Json{{"project", project_}, {"configuration", to_json(configuration)}}, 2) + "\n");
  }
  void log(const TrackedValues& values, int64_t step) override {
    Json line{{"step", step}, {"time", unix_seconds()}};
    for (const auto& [name, value] : flatten(values)) line[name] = to_json(value);
    file_->write(dump(line) + "\n");
  }
  bool log_table(const std::string& name, const TrackedTable& table, int64_t step) override {
    file_->write(dump(Json{{"step", step},
                           {"time", unix_seconds()},
                           {name, {{"columns", table.columns}, {"rows", table.rows}}}}) +
                 "\n");
    return true;
  }
  void flush() override { file_->sync(); }
  void finish() override { file_->sync(); }

 private:
  std::string folder_, project_;
  std::optional<AppendFile> file_;
};

// RFC 4180.
std::string csv_cell(const std::string& text) {
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string cell = "\"";
  for (const char c : text) {
    if (c == '"') cell += '"';
    cell += c;
  }
  return cell + '"';
}

std::string csv_line(const std::vector<std::string>& cells) {
  std::string line;
  for (size_t i = 0; i < cells.size(); ++i) line += (i ? "," : "") + csv_cell(cells[i]);
  return line + "\n";
}

// Cells of the first record in `text`.
std::vector<std::string> first_record(const std::string& text) {
  std::vector<std::string> cells(1);
  bool quoted = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted) {
      if (c != '"') {
        cells.back() += c;
      } else if (i + 1 < text.size() && text[i + 1] == '"') {
        cells.back() += text[++i];
      } else {
        quoted = false;
      }
    } else if (c == '"') {
      quoted = true;
    } else if (c == ',') {
      cells.emplace_back();
    } else if (c == '\n') {
      break;
    } else if (c != '\r') {
      cells.back() += c;
    }
  }
  return cells;
}

class CsvTracker : public Tracker {
 public:
  void start(const TrackerRun& run) override {
    path_ = run.folder + "/metrics.csv";
    columns_ = {"step", "time"};
    const std::string header = read(true);
    if (!header.empty()) {
      columns_ = first_record(header);
      TS_CHECK_AS(FormatError,
                  columns_.size() >= 2 && columns_[0] == "step" && columns_[1] == "time", path_,
                  "is there and does not begin with the columns step,time; move it away or "
                  "choose another folder.");
    }
    file_.emplace(path_);
    if (header.empty()) file_->write(csv_line(columns_));
  }
  void store_configuration(const TrackedValues& configuration) override {
    std::string text = csv_line({"name", "value"});
    for (const auto& [name, value] : flatten(configuration)) {
      text += csv_line({name, to_text(value)});
    }
    write_file_atomically(
        std::filesystem::path(path_).parent_path().string() + "/configuration.csv", text);
  }
  void log(const TrackedValues& values, int64_t step) override {
    std::vector<std::string> cells(columns_.size());
    char seconds[32];
    plain_snprintf(seconds, sizeof seconds, "%.3f", unix_seconds());
    cells[0] = std::to_string(step);
    cells[1] = seconds;
    const size_t before = columns_.size();
    for (const auto& [name, value] : flatten(values)) {
      const auto found = std::find(columns_.begin() + 2, columns_.end(), name);
      const auto column = static_cast<size_t>(found - columns_.begin());
      if (found == columns_.end()) {
        columns_.push_back(name);
        cells.emplace_back();
      }
      cells[column] = to_text(value);
    }
    if (columns_.size() != before) add_columns(columns_.size() - before);
    file_->write(csv_line(cells));
  }
  void flush() override { file_->sync(); }
  void finish() override { file_->sync(); }

 private:
  std::string read(bool first_line) const {
    PlainText<std::ifstream> in(path_, std::ios::binary);
    std::string text;
    if (first_line) {
      std::getline(in, text);
    } else {
      PlainText<std::ostringstream> all;
      all << in.rdbuf();
      text = all.str();
    }
    return text;
  }

  // Rows written before have empty cells in the new columns.
  void add_columns(size_t count) {
    const std::string text = read(false);
    std::string wider = csv_line(columns_);
    const std::string empty_cells(count, ',');
    bool quoted = false, header = true;
    for (const char c : text) {
      if (c == '"') quoted = !quoted;
      if (c == '\n' && !quoted) {
        if (!header) wider += empty_cells + "\n";
        header = false;
      } else if (!header) {
        wider += c;
      }
    }
    file_.reset();
    write_file_atomically(path_, wider);
    file_.emplace(path_);
  }

  std::string path_;
  std::vector<std::string> columns_;
  std::optional<AppendFile> file_;
};

}  // namespace

std::unique_ptr<Tracker> make_jsonl_tracker() { return std::make_unique<JsonlTracker>(); }
std::unique_ptr<Tracker> make_csv_tracker() { return std::make_unique<CsvTracker>(); }

}  // namespace tessera
