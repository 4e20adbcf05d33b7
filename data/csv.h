// Tables of text: CSV (RFC 4180) and TSV.
//
//     CsvTable table = read_csv("banking77-train.csv");
//     for (int64_t row = 0; row < table.num_rows(); ++row) use(table.cell(row, "text"));
//
// CSV: fields are separated by `separator`; a field in quotation marks may hold separators, line
// ends and doubled quotation marks. Records end with LF or CRLF; the last may lack its end. Empty
// lines are skipped, except in tables of one column, where they are empty fields. A leading byte
// order mark is skipped. Text must be UTF-8.
//
// The whole table is held in memory: the characters of all fields plus 8 bytes a field.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::data {

struct CsvOptions {
  char separator = ',';
  // false: quotation marks are ordinary characters, as in the TSV files of GLUE.
  bool quoting = true;
  // The first record names the columns. false: columns are named "0", "1", ...
  bool header = true;
};

inline constexpr CsvOptions kTsv{.separator = '\t', .quoting = false, .header = true};

class CsvTable {
 public:
  int64_t num_rows() const { return static_cast<int64_t>(lines_.size()); }
  int64_t num_columns() const { return static_cast<int64_t>(columns_.size()); }
  const std::vector<std::string>& columns() const { return columns_; }

  // ValueError naming the columns that there are.
  int64_t column_index(std::string_view name) const;

  // Views live as long as the table. IndexError outside the table.
  std::string_view cell(int64_t row, int64_t column) const;
  std::string_view cell(int64_t row, std::string_view column) const {
    return cell(row, column_index(column));
  }

  // The cell as a number; FormatError naming file, line and column if it is not one.
  int64_t integer(int64_t row, std::string_view column) const;
  double number(int64_t row, std::string_view column) const;

  // The line of the file on which the row starts, from 1.
  int64_t line_of(int64_t row) const;
  const std::string& file() const { return file_; }

 private:
  friend CsvTable parse_csv(std::string_view, std::string_view, const CsvOptions&);

  std::string file_;
  std::vector<std::string> columns_;
  std::string text_;            // all fields, one after the other
  std::vector<uint64_t> ends_;  // where each field ends in text_
  std::vector<int64_t> lines_;  // one a row
};

// IoError; FormatError naming file, line and remedy: not UTF-8, a record with another number of
// fields than the first, an unclosed quotation mark, characters beside a quoted field, a quotation
// mark inside a field that is not quoted, two columns of one name, no header. ValueError for
// separators that cannot separate (quotation mark, CR, LF).
CsvTable read_csv(const std::string& path, const CsvOptions& options = {});

// The same from memory; `file` names the text in errors.
CsvTable parse_csv(std::string_view text, std::string_view file, const CsvOptions& options = {});

}  // namespace tessera::data
