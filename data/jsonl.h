// JSON Lines: one JSON object a line.
//
//     JsonlReader reader("snli-dev.jsonl");
//     while (std::optional<JsonRecord> record = reader.next()) use(record->text("sentence1"));
//
// Lines end with LF or CRLF, the last may lack its end; lines of white space only are skipped.
// What Python's json reads and JSON or UTF-8 does not have is refused: NaN, Infinity, numbers beyond
// the range of a double (1e400, there infinity), half a surrogate pair ("\ud800" alone).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/core/io/mapped_file.h>

namespace tessera::data {

// One object. Accessors throw FormatError naming file, line and field if the field is absent or of
// another kind.
class JsonRecord {
 public:
  ~JsonRecord();
  JsonRecord(JsonRecord&&) noexcept;
  JsonRecord& operator=(JsonRecord&&) noexcept;

  bool has(std::string_view field) const;  // present and not null
  std::string text(std::string_view field) const;
  int64_t integer(std::string_view field) const;  // a JSON integer that fits 64 bits
  double number(std::string_view field) const;    // an integer or a fraction
  bool boolean(std::string_view field) const;
  std::vector<std::string> texts(std::string_view field) const;  // an array of strings
  std::vector<int64_t> integers(std::string_view field) const;   // an array of integers
  std::vector<std::string> fields() const;                       // names, sorted
  int64_t line() const;                                          // from 1

 private:
  friend class JsonlReader;
  struct State;
  explicit JsonRecord(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

// Reads one line at a time; memory is that of one record.
class JsonlReader {
 public:
  explicit JsonlReader(const std::string& path);
  // From memory: `text` must outlive the reader; `file` names it in errors.
  JsonlReader(std::string_view text, std::string_view file);

  // The next record, nothing at the end. FormatError naming file, line and byte offset for a line
  // that is not a JSON object.
  std::optional<JsonRecord> next();

 private:
  MappedFile mapped_;
  std::string_view text_;
  std::shared_ptr<const std::string> file_;
  size_t position_ = 0;
  int64_t line_ = 0;
};

std::vector<JsonRecord> read_jsonl(const std::string& path);

}  // namespace tessera::data
