#include <tessera/data/jsonl.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include <tessera/core/error.h>
#include <tessera/data/text/json_error.h>
#include <tessera/data/text/text.h>

namespace tessera::data {

using nlohmann::json;

namespace {

// Finds what of a line was refused: an exception about a number beyond the range of a double,
// unlike one about a wrong byte, does not say where it stands.
struct RefusedPlace : json::json_sax_t {
  size_t begin = 0;
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(size_t) override { return true; }
  bool key(string_t&) override { return true; }
  bool end_object() override { return true; }
  bool start_array(size_t) override { return true; }
  bool end_array() override { return true; }
  bool parse_error(size_t position, const std::string& refused, const json::exception&) override {
    begin = position > refused.size() ? position - refused.size() : 0;
    return false;
  }
};

// The byte of the line that `error` is about.
size_t place_of(const json::exception& error, std::string_view line) {
  if (const auto* parse = dynamic_cast<const json::parse_error*>(&error)) {
    return parse->byte > 0 ? parse->byte - 1 : 0;
  }
  RefusedPlace reader;
  json::sax_parse(line.begin(), line.end(), &reader);
  return reader.begin;
}

}  // namespace

struct JsonRecord::State {
  json object;
  int64_t line;
  std::shared_ptr<const std::string> file;

  [[noreturn]] void fail(std::string_view field, std::string_view need,
                         std::string_view got) const {
    TS_THROW(FormatError, "JsonRecord", "'", *file, "' line ", line, " field '", field,
             "' must be ", need, "; it is ", got, "; correct the file or the field's name.");
  }

  const json& field(std::string_view name, std::string_view need) const {
    const auto found = object.find(std::string(name));
    if (found == object.end()) fail(name, need, "absent");
    return *found;
  }

  static bool is_int64(const json& value) {
    return value.is_number_integer() &&
           (!value.is_number_unsigned() || value.get<uint64_t>() <= uint64_t{INT64_MAX});
  }
};

JsonRecord::JsonRecord(std::unique_ptr<State> state) : state_(std::move(state)) {}
JsonRecord::~JsonRecord() = default;
JsonRecord::JsonRecord(JsonRecord&&) noexcept = default;
JsonRecord& JsonRecord::operator=(JsonRecord&&) noexcept = default;

bool JsonRecord::has(std::string_view field) const {
  const auto found = state_->object.find(std::string(field));
  return found != state_->object.end() && !found->is_null();
}

std::string JsonRecord::text(std::string_view field) const {
  const json& value = state_->field(field, "a string");
  if (!value.is_string()) state_->fail(field, "a string", value.type_name());
  return value.get<std::string>();
}

int64_t JsonRecord::integer(std::string_view field) const {
  constexpr std::string_view kNeed = "an integer of 64 bits";
  const json& value = state_->field(field, kNeed);
  if (!State::is_int64(value)) {
    state_->fail(field, kNeed, value.is_number() ? "another number" : value.type_name());
  }
  return value.get<int64_t>();
}

double JsonRecord::number(std::string_view field) const {
  const json& value = state_->field(field, "a number");
  if (!value.is_number()) state_->fail(field, "a number", value.type_name());
  return value.get<double>();
}

bool JsonRecord::boolean(std::string_view field) const {
  const json& value = state_->field(field, "true or false");
  if (!value.is_boolean()) state_->fail(field, "true or false", value.type_name());
  return value.get<bool>();
}

std::vector<std::string> JsonRecord::texts(std::string_view field) const {
  constexpr std::string_view kNeed = "an array of strings";
  const json& value = state_->field(field, kNeed);
  if (!value.is_array()) state_->fail(field, kNeed, value.type_name());
  std::vector<std::string> out;
  for (const json& item : value) {
    if (!item.is_string()) {
      state_->fail(field, kNeed, std::string("an array that holds ") + item.type_name());
    }
    out.push_back(item.get<std::string>());
  }
  return out;
}

std::vector<int64_t> JsonRecord::integers(std::string_view field) const {
  constexpr std::string_view kNeed = "an array of integers of 64 bits";
  const json& value = state_->field(field, kNeed);
  if (!value.is_array()) state_->fail(field, kNeed, value.type_name());
  std::vector<int64_t> out;
  for (const json& item : value) {
    if (!State::is_int64(item)) {
      state_->fail(field, kNeed,
                   std::string("an array that holds ") +
                       (item.is_number() ? "another number" : item.type_name()));
    }
    out.push_back(item.get<int64_t>());
  }
  return out;
}

std::vector<std::string> JsonRecord::fields() const {
  std::vector<std::string> names;
  for (const auto& item : state_->object.items()) names.push_back(item.key());
  return names;
}

int64_t JsonRecord::line() const { return state_->line; }

JsonlReader::JsonlReader(const std::string& path)
    : mapped_(path, FileAccess::kSequential),
      text_(mapped_.text()),
      file_(std::make_shared<const std::string>(path)) {}

JsonlReader::JsonlReader(std::string_view text, std::string_view file)
    : text_(text), file_(std::make_shared<const std::string>(file)) {}

std::optional<JsonRecord> JsonlReader::next() {
  while (position_ < text_.size()) {
    const size_t start = position_;
    const size_t end = std::min(text_.find('\n', start), text_.size());
    std::string_view line = text_.substr(start, end - start);
    position_ = std::min(end + 1, text_.size());
    ++line_;
    if (line_ == 1) line = strip_byte_order_mark(line);
    if (line.find_first_not_of(" \t\r") == line.npos) continue;
    auto state = std::make_unique<JsonRecord::State>();
    state->line = line_;
    state->file = file_;
    try {
      state->object = json::parse(line.begin(), line.end());
    } catch (const json::exception& error) {  // also numbers out of range
      const size_t place = static_cast<size_t>(line.data() - text_.data()) + place_of(error, line);
      TS_THROW(FormatError, "read_jsonl", "every line must be a JSON object; '", *file_, "' line ",
               line_, " (byte offset ", place, "): ", json_reason(error), "; correct the line.");
    }
    TS_CHECK_AS(FormatError, state->object.is_object(), "read_jsonl",
                "every line must be a JSON object; '", *file_, "' line ", line_, " (byte offset ",
                start, ") is ", state->object.type_name(), "; correct the line.");
    return JsonRecord(std::move(state));
  }
  return std::nullopt;
}

std::vector<JsonRecord> read_jsonl(const std::string& path) {
  std::vector<JsonRecord> records;
  JsonlReader reader(path);
  while (std::optional<JsonRecord> record = reader.next()) records.push_back(std::move(*record));
  return records;
}

}  // namespace tessera::data
