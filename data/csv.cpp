#include <tessera/data/csv.h>

#include <algorithm>
#include <charconv>
#include <set>
#include <system_error>

#include <tessera/core/error.h>
#include <tessera/core/io/mapped_file.h>
#include <tessera/data/text/text.h>

namespace tessera::data {
namespace {

// Walks the records of a text; fields are appended to the caller's buffers.
class Parser {
 public:
  Parser(std::string_view text, std::string_view file, const CsvOptions& options)
      : text_(text), file_(file), options_(options) {}

  bool at_end() const { return position_ == text_.size(); }
  int64_t line() const { return line_; }

  // A line end right here (an empty line). Consumed if so.
  bool skip_empty_line() { return take_line_end(); }

  // Reads one record; returns its number of fields.
  int64_t record(std::string& text, std::vector<uint64_t>& ends) {
    int64_t fields = 0;
    for (;;) {
      if (options_.quoting && !at_end() && text_[position_] == '"') {
        quoted_field(text);
      } else {
        plain_field(text);
      }
      ends.push_back(text.size());
      ++fields;
      if (at_end() || take_line_end()) return fields;
      ++position_;  // the separator: a field ends nowhere else
    }
  }

 private:
  // LF, CRLF, or a CR alone.
  bool at_line_end() const { return text_[position_] == '\n' || text_[position_] == '\r'; }
  bool take_line_end() {
    if (!at_line_end()) return false;
    position_ += text_.substr(position_).starts_with("\r\n") ? 2 : 1;
    ++line_;
    return true;
  }

  void plain_field(std::string& out) {
    const size_t start = position_;
    while (!at_end() && text_[position_] != options_.separator && !at_line_end()) {
      TS_CHECK_AS(FormatError, !options_.quoting || text_[position_] != '"', "read_csv",
                  "a quotation mark may stand only around a whole field; '", file_, "' line ",
                  line_, " (byte offset ", position_,
                  ") has one inside; quote the field and double the mark, or read with quoting = "
                  "false.");
      ++position_;
    }
    out.append(text_.substr(start, position_ - start));
  }

  void quoted_field(std::string& out) {
    const int64_t first_line = line_;
    const size_t first = position_++;
    for (;;) {
      const size_t mark = text_.find('"', position_);
      TS_CHECK_AS(FormatError, mark != text_.npos, "read_csv", "a quotation mark must be closed; '",
                  file_, "' line ", first_line, " (byte offset ", first,
                  ") opens one that is not; close it, or read with quoting = false.");
      const std::string_view part = text_.substr(position_, mark - position_);
      line_ += std::count(part.begin(), part.end(), '\n');
      out.append(part);
      position_ = mark + 1;
      if (at_end() || text_[position_] != '"') break;
      out += '"';
      ++position_;
    }
    TS_CHECK_AS(FormatError, at_end() || text_[position_] == options_.separator || at_line_end(),
                "read_csv", "a closing quotation mark ends its field; '", file_, "' line ", line_,
                " (byte offset ", position_,
                ") has a character after it; double the mark, or read with quoting = false.");
  }

  std::string_view text_, file_;
  CsvOptions options_;
  size_t position_ = 0;
  int64_t line_ = 1;
};

std::string quote(char separator) {
  return separator == '\t' ? "tab" : std::string("'") + separator + "'";
}

}  // namespace

CsvTable parse_csv(std::string_view text, std::string_view file, const CsvOptions& options) {
  const char separator = options.separator;
  TS_CHECK(separator != '"' && separator != '\r' && separator != '\n' &&
               static_cast<unsigned char>(separator) < 0x80,
           "read_csv",
           "the separator must be an ASCII character other than a quotation mark or a "
           "line end; got byte ",
           static_cast<int>(static_cast<unsigned char>(separator)), "; use ',', ';' or '\\t'.");
  check_utf8(text, "read_csv", file);
  text = strip_byte_order_mark(text);

  CsvTable table;
  table.file_ = file;
  Parser parser(text, file, options);
  if (options.header) {
    while (!parser.at_end() && parser.skip_empty_line()) {
    }
    TS_CHECK_AS(FormatError, !parser.at_end(), "read_csv", "the first record names the columns; '",
                file, "' is empty; read with header = false or add a header.");
    std::string names;
    std::vector<uint64_t> ends;
    parser.record(names, ends);
    uint64_t start = 0;
    for (const uint64_t end : ends) {
      table.columns_.push_back(names.substr(start, end - start));
      start = end;
    }
    std::set<std::string_view> distinct;
    for (const std::string& name : table.columns_) {
      TS_CHECK_AS(FormatError, distinct.insert(name).second, "read_csv",
                  "column names must differ; the header of '", file, "' has '", name,
                  "' twice; rename one.");
    }
  }
  bool know_columns = options.header;
  while (!parser.at_end()) {
    const int64_t line = parser.line();
    const bool one_column = know_columns && table.columns_.size() == 1;
    if (!one_column && parser.skip_empty_line()) continue;
    const int64_t fields = parser.record(table.text_, table.ends_);
    if (!know_columns) {
      for (int64_t i = 0; i < fields; ++i) table.columns_.push_back(std::to_string(i));
      know_columns = true;
    }
    TS_CHECK_AS(FormatError, fields == table.num_columns(), "read_csv",
                "every record must have the first one's ", table.num_columns(), " fields; '", file,
                "' line ", line, " has ", fields, "; check the separator (now ", quote(separator),
                ")", options.quoting ? " and quote fields that contain it." : ".");
    table.lines_.push_back(line);
  }
  return table;
}

CsvTable read_csv(const std::string& path, const CsvOptions& options) {
  const MappedFile file(path, FileAccess::kSequential);
  return parse_csv(file.text(), path, options);
}

int64_t CsvTable::column_index(std::string_view name) const {
  const auto found = std::find(columns_.begin(), columns_.end(), name);
  if (found == columns_.end()) {
    std::string names;
    for (const std::string& column : columns_)
      names += (names.empty() ? "'" : ", '") + column + "'";
    TS_THROW(ValueError, "CsvTable", "'", file_, "' has no column '", name, "'; its columns are ",
             names, ".");
  }
  return found - columns_.begin();
}

std::string_view CsvTable::cell(int64_t row, int64_t column) const {
  TS_CHECK_INDEX(row >= 0 && row < num_rows() && column >= 0 && column < num_columns(), "CsvTable",
                 "cell (", row, ", ", column, ") is outside the table of '", file_, "', which has ",
                 num_rows(), " rows and ", num_columns(), " columns.");
  const size_t field = static_cast<size_t>(row * num_columns() + column);
  const uint64_t start = field == 0 ? 0 : ends_[field - 1];
  return std::string_view(text_).substr(start, ends_[field] - start);
}

int64_t CsvTable::line_of(int64_t row) const {
  TS_CHECK_INDEX(row >= 0 && row < num_rows(), "CsvTable", "row ", row, " is outside the ",
                 num_rows(), " rows of '", file_, "'.");
  return lines_[static_cast<size_t>(row)];
}

namespace {

template <class Number>
Number parse_number(const CsvTable& table, int64_t row, std::string_view column,
                    std::string_view kind) {
  const std::string_view text = table.cell(row, column);
  Number value{};
  const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
  TS_CHECK_AS(FormatError, result.ec == std::errc{} && result.ptr == text.data() + text.size(),
              "CsvTable", "'", table.file(), "' line ", table.line_of(row), " column '", column,
              "' must be ", kind, "; it is '", text.substr(0, 40), "'; correct the file.");
  return value;
}

}  // namespace

int64_t CsvTable::integer(int64_t row, std::string_view column) const {
  return parse_number<int64_t>(*this, row, column, "an integer of 64 bits");
}
double CsvTable::number(int64_t row, std::string_view column) const {
  return parse_number<double>(*this, row, column, "a number");
}

}  // namespace tessera::data
