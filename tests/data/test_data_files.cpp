// Readers of text, CSV, JSON Lines, IDX and token files: real files, damaged ones, hostile ones.
#include <gtest/gtest.h>
#include <unistd.h>
#include <zlib.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include <tessera/core/error.h>
#include <tessera/core/io/atomic_file.h>
#include <tessera/core/io/mapped_file.h>
#include <tessera/data/csv.h>
#include <tessera/data/idx.h>
#include <tessera/data/jsonl.h>
#include <tessera/data/text/text.h>
#include <tessera/data/text/token_file.h>

#include "message_of.h"

namespace tessera::data::test_data_files {
namespace {

namespace fs = std::filesystem;

const char* data_folder() { return std::getenv("TESSERA_DATA_DIR"); }

#define REQUIRE_DATA()                                                   \
  if (data_folder() == nullptr) {                                        \
    GTEST_SKIP() << "TESSERA_DATA_DIR is not set: no real data to read"; \
  }

std::string data_path(const std::string& name) { return std::string(data_folder()) + "/" + name; }

#define EXPECT_CONTAINS(text, part) \
  EXPECT_NE((text).find(part), std::string::npos) << "in: " << (text)

class TemporaryFolder : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "tessera-data-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { fs::remove_all(folder_); }
  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  fs::path folder_;
};
using TokenFiles = TemporaryFolder;
using Text = TemporaryFolder;

// ---- Text ---------------------------------------------------------------------------------------

TEST_F(Text, InvalidUtf8IsNamedByLineColumnAndOffset) {
  write_file_atomically(path("a.txt"),
                        "first\nse\xC3\xA9"
                        "con\xFF"
                        "d\n");
  const std::string message = message_of<FormatError>([&] { read_text(path("a.txt")); });
  EXPECT_CONTAINS(message, "a.txt' line 2 column 7 (byte offset 13) has byte 255");
}

TEST_F(Text, EveryFormOfInvalidUtf8IsFoundAndReplacedAsPythonDoes) {
  const struct {
    const char *text, *replaced;
    size_t position;
  } cases[] = {
      {"ab\x80", "ab\xEF\xBF\xBD", 2},                              // continuation alone
      {"\xC0\xAF", "\xEF\xBF\xBD\xEF\xBF\xBD", 0},                  // overlong
      {"\xE0\x80\x80", "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD", 0},  // overlong
      {"\xED\xA0\x80", "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD", 0},  // surrogate
      {"\xF4\x90\x80\x80", "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD", 0},  // > 10FFFF
      {"\xF0\x9F\x8C", "\xEF\xBF\xBD", 0},                                          // cut off
      {"\xE2\x82z", "\xEF\xBF\xBDz", 0},
      {"12345678\xFF", "12345678\xEF\xBF\xBD", 8},
  };
  for (const auto& c : cases) {
    EXPECT_EQ(find_invalid_utf8(c.text), c.position) << c.text;
    EXPECT_EQ(replace_invalid_utf8(c.text), c.replaced);
  }
  const std::string valid =
      "a\xC2\x80\xDF\xBF\xE0\xA0\x80\xED\x9F\xBF\xEF\xBF\xBF\xF0\x90\x80\x80"
      "\xF4\x8F\xBF\xBF";
  EXPECT_FALSE(find_invalid_utf8(valid).has_value());
}

TEST_F(Text, CodePointsSurviveARoundTrip) {
  for (char32_t c = 0; c <= 0x10FFFF; c += (c < 0x3000 ? 1 : 97)) {
    if (c >= 0xD800 && c <= 0xDFFF) continue;
    std::string text;
    append_utf8(c, text);
    const CodePoint read = decode_utf8(text, 0);
    ASSERT_EQ(read.value, c);
    ASSERT_EQ(read.length, text.size());
  }
}

TEST_F(Text, LinesEndInLfOrCrlf) {
  using Lines = std::vector<std::string_view>;
  EXPECT_EQ(split_lines("a\nb\r\n\nc"), (Lines{"a", "b", "", "c"}));
  EXPECT_EQ(split_lines("a\n"), (Lines{"a"}));
  EXPECT_EQ(split_lines("a\r"), (Lines{"a\r"}));
  EXPECT_TRUE(split_lines("").empty());
  EXPECT_EQ(strip_byte_order_mark("\xEF\xBB\xBFx"), "x");
}

// ---- CSV ----------------------------------------------------------------------------------------

TEST(Csv, ReadsTheRealFiles) {
  REQUIRE_DATA();
  const CsvTable train = read_csv(data_path("intent/banking77-train.csv"));
  EXPECT_EQ(train.columns(), (std::vector<std::string>{"text", "category"}));
  EXPECT_EQ(train.num_rows(), 10003);
  EXPECT_EQ(train.cell(0, "text"), "I am still waiting on my card?");
  EXPECT_EQ(train.cell(10002, "category"), "country_support");
  EXPECT_EQ(read_csv(data_path("intent/banking77-test.csv")).num_rows(), 3080);

  const CsvTable qnli = read_csv(data_path("pairs/qnli-dev.tsv"), kTsv);
  ASSERT_EQ(qnli.num_rows(), 5463);
  int64_t entailment = 0;
  for (int64_t row = 0; row < qnli.num_rows(); ++row) {
    EXPECT_EQ(qnli.integer(row, "index"), row);
    entailment += qnli.cell(row, "label") == "entailment";
  }
  EXPECT_EQ(entailment, 2702);

  const CsvTable mrpc = read_csv(data_path("pairs/mrpc-sample-train.csv"));
  EXPECT_EQ(mrpc.num_rows(), 6);
}

TEST(Csv, QuotesLineEndsAndDoubledMarksStandAsRfc4180Says) {
  const CsvTable table = parse_csv(
      "\xEF\xBB\xBFid,text\r\n1,\"a \"\"quoted\"\", word\"\r\n2,\"two\r\nlines\"\n\n3,\"\"\n4,",
      "t");
  ASSERT_EQ(table.num_rows(), 4);
  EXPECT_EQ(table.cell(0, "text"), "a \"quoted\", word");
  EXPECT_EQ(table.cell(1, "text"), "two\r\nlines");
  EXPECT_EQ(table.cell(2, "text"), "");
  EXPECT_EQ(table.cell(3, "text"), "");
  EXPECT_EQ(table.line_of(1), 3);
  EXPECT_EQ(table.line_of(2), 6);
  EXPECT_EQ(table.integer(3, "id"), 4);
}

TEST(Csv, LinesEndWithLfCrlfOrCrAlone) {
  for (const std::string end : {"\n", "\r\n", "\r"}) {
    for (const bool quoting : {true, false}) {
      const std::string text = "a,b" + end + "1,2" + end + "3,4";
      for (const std::string& last : {std::string(), end}) {
        const CsvTable table = parse_csv(text + last, "t", {.quoting = quoting});
        ASSERT_EQ(table.num_rows(), 2);
        EXPECT_EQ(table.cell(0, "b"), "2");
        EXPECT_EQ(table.cell(1, "a"), "3");
        EXPECT_EQ(table.line_of(1), 3);
      }
    }
  }
  EXPECT_EQ(parse_csv("a\r\"1\r2\"\r", "t").cell(0, "a"), "1\r2");
}

TEST(Csv, ATableOfOneColumnKeepsEmptyLines) {
  const CsvTable table = parse_csv("text\na\n\nb\n", "t");
  ASSERT_EQ(table.num_rows(), 3);
  EXPECT_EQ(table.cell(1, "text"), "");
}

TEST(Csv, WithoutHeaderColumnsAreNumbered) {
  const CsvTable table = parse_csv("1.5;2\n3;x\n", "t", {.separator = ';', .header = false});
  EXPECT_EQ(table.columns(), (std::vector<std::string>{"0", "1"}));
  EXPECT_EQ(table.number(0, "0"), 1.5);
  EXPECT_CONTAINS(message_of<FormatError>([&] { table.number(1, "1"); }), "'t' line 2 column '1'");
  EXPECT_EQ(parse_csv("", "t", {.header = false}).num_rows(), 0);
  EXPECT_EQ(parse_csv("a,b\n", "t").num_rows(), 0);
}

TEST(Csv, TsvTakesQuotationMarksAsTheyAre) {
  const CsvTable table = parse_csv("a\tb\n\"x\ty\"\n", "t", kTsv);
  EXPECT_EQ(table.cell(0, "a"), "\"x");
  EXPECT_EQ(table.cell(0, "b"), "y\"");
}

TEST(Csv, TheLastCellIsThereAndTheOneBesideIsNot) {
  const CsvTable table = parse_csv("a,b,c\n1,2,3\n4,5,6\n", "t");
  EXPECT_EQ(table.cell(1, 2), "6");
  EXPECT_EQ(table.cell(0, 2), "3");
  EXPECT_THROW(table.cell(0, 3), IndexError) << "not the first of the next row";
  EXPECT_THROW(table.cell(1, 3), IndexError);
  EXPECT_THROW(table.cell(2, 0), IndexError);
  EXPECT_THROW(table.cell(-1, 3), IndexError);
  EXPECT_THROW(table.cell(1, -1), IndexError) << "not the last of the row before";
  EXPECT_EQ(table.line_of(1), 3);
  EXPECT_THROW(table.line_of(2), IndexError);
  EXPECT_THROW(table.line_of(-1), IndexError);
}

TEST(Csv, DamageIsAFormatErrorWithFileLineAndRemedy) {
  const struct {
    std::string text;
    std::vector<std::string> parts;
  } cases[] = {
      {"", {"'t.csv' is empty", "header = false"}},
      {"\n\n", {"'t.csv' is empty"}},
      {"a,b\n1,2\n3\n", {"'t.csv' line 3 has 1", "','"}},
      {"a,b\n1,2,3\n", {"'t.csv' line 2 has 3"}},
      {"a,b\n1,\"open\n2,3\n", {"line 2 (byte offset 6)", "close it"}},
      {"a,b\n1,\"x\"y\n", {"line 2 (byte offset 9)"}},
      {"a,b\n1,x\"y\"\n", {"line 2 (byte offset 7)"}},
      {"a,a\n", {"'a' twice"}},
      {"a,b\n1,\xFF\n", {"line 2 column 3"}},
  };
  for (const auto& c : cases) {
    const std::string message = message_of<FormatError>([&] { parse_csv(c.text, "t.csv"); });
    for (const std::string& part : c.parts) EXPECT_CONTAINS(message, part);
  }
  EXPECT_THROW(parse_csv("a\n", "t", {.separator = '"'}), ValueError);
  EXPECT_THROW(parse_csv("a\n", "t", {.separator = '\n'}), ValueError);
  EXPECT_THROW(read_csv("/none.csv"), IoError);
  const CsvTable table = parse_csv("a,b\n1,2\n", "t.csv");
  EXPECT_THROW(table.cell(1, 0), IndexError);
  EXPECT_THROW(table.cell(0, -1), IndexError);
  EXPECT_THROW(table.cell(0, "c"), ValueError);
  EXPECT_CONTAINS(message_of<FormatError>([] { parse_csv("a\n1x\n", "t").integer(0, "a"); }),
                  "it is '1x'");
  EXPECT_THROW(parse_csv("a\n99999999999999999999\n", "t").integer(0, "a"), FormatError);
}

// ---- JSON Lines ---------------------------------------------------------------------------------

TEST(Jsonl, ReadsTheRealFiles) {
  REQUIRE_DATA();
  int64_t records = 0, neutral = 0;
  JsonlReader reader(data_path("pairs/snli-dev-part.jsonl"));
  while (std::optional<JsonRecord> record = reader.next()) {
    ++records;
    neutral += record->text("gold_label") == "neutral";
    EXPECT_FALSE(record->text("sentence1").empty());
    EXPECT_FALSE(record->texts("annotator_labels").empty());
  }
  EXPECT_EQ(records, 1289);
  EXPECT_EQ(neutral, 421);
  EXPECT_EQ(read_jsonl(data_path("pairs/snli-test-part.jsonl")).size(), 1277u);
}

TEST(Jsonl, FieldsHaveTypes) {
  JsonlReader reader(
      "{\"s\":\"x\",\"i\":-3,\"f\":0.5,\"b\":true,\"n\":null,\"a\":[1,2],\"t\":[\"u\"]}\r\n"
      "  \n{\"i\": 18446744073709551615}",
      "f.jsonl");
  const std::optional<JsonRecord> first = reader.next();
  ASSERT_TRUE(first.has_value());
  EXPECT_EQ(first->text("s"), "x");
  EXPECT_EQ(first->integer("i"), -3);
  EXPECT_EQ(first->number("i"), -3.0);
  EXPECT_EQ(first->number("f"), 0.5);
  EXPECT_TRUE(first->boolean("b"));
  EXPECT_EQ(first->integers("a"), (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(first->texts("t"), (std::vector<std::string>{"u"}));
  EXPECT_TRUE(first->has("s"));
  EXPECT_FALSE(first->has("n"));
  EXPECT_FALSE(first->has("none"));
  EXPECT_EQ(first->fields().size(), 7u);
  EXPECT_CONTAINS(message_of<FormatError>([&] { first->integer("f"); }),
                  "'f.jsonl' line 1 field 'f'");
  EXPECT_CONTAINS(message_of<FormatError>([&] { first->text("none"); }), "it is absent");
  EXPECT_CONTAINS(message_of<FormatError>([&] { first->text("i"); }), "it is number");
  EXPECT_CONTAINS(message_of<FormatError>([&] { first->integers("t"); }), "holds string");
  EXPECT_CONTAINS(message_of<FormatError>([&] { first->texts("a"); }), "holds number");
  EXPECT_THROW(first->boolean("s"), FormatError);
  EXPECT_THROW(first->number("s"), FormatError);
  const std::optional<JsonRecord> second = reader.next();
  ASSERT_TRUE(second.has_value());
  EXPECT_EQ(second->line(), 3);
  EXPECT_THROW(second->integer("i"), FormatError);
  EXPECT_FALSE(reader.next().has_value());
  EXPECT_FALSE(reader.next().has_value());
}

TEST(Jsonl, DamageIsAFormatErrorWithFileAndLine) {
  for (const std::string line : {"{\"a\":", "{\"a\" 1}", "[1]", "7", "nul", "{\"a\":\"\xFF\"}",
                                 "{\"a\":1e999}", "{} {}", "}"}) {
    const std::string text = "{}\n" + line + "\n";
    const std::string message = message_of<FormatError>([&] {
      JsonlReader reader(text, "f.jsonl");
      while (reader.next()) {
      }
    });
    EXPECT_CONTAINS(message, "'f.jsonl' line 2 (byte offset ");
    EXPECT_FALSE(find_invalid_utf8(message).has_value());
  }
  EXPECT_THROW(JsonlReader("/none.jsonl"), IoError);
}

// Python's json makes infinity of the number, and of half a pair a text that cannot be encoded.
TEST(Jsonl, WhatUtf8AndDoublesDoNotHaveIsRefusedAtItsPlace) {
  const struct {
    std::string text, place, reason;
  } cases[] = {
      {"{}\n{\"1e400\": [0, 1e400]}\n", "line 2 (byte offset 17)", "'1e400'"},
      {"{\"a\": -1e400}", "line 1 (byte offset 6)", "'-1e400'"},
      {"\xEF\xBB\xBF{\"a\": 1e400}", "line 1 (byte offset 9)", "'1e400'"},
      {"{}\n{\"a\": \"x\\ud800\"}\n", "line 2 (byte offset 17)", "surrogate"},
      {"{\"a\": \"\\udc00\\ud800\"}", "line 1 (byte offset 12)", "surrogate"},
      {"{\"a\": NaN}", "line 1 (byte offset 6)", "invalid literal"},
  };
  for (const auto& c : cases) {
    const std::string message = message_of<FormatError>([&] {
      JsonlReader reader(c.text, "f.jsonl");
      while (reader.next()) {
      }
    });
    EXPECT_CONTAINS(message, "'f.jsonl' " + c.place + ": ");
    EXPECT_CONTAINS(message, c.reason);
  }
  const auto pair = JsonlReader("{\"a\": \"\\ud83d\\ude00\"}", "f").next();
  EXPECT_EQ(pair->text("a"), "\xF0\x9F\x98\x80");
}

TEST(Jsonl, IntegersEndWhereSixtyFourBitsDo) {
  const struct {
    const char* text;
    std::optional<int64_t> value;
  } cases[] = {
      {"9223372036854775806", INT64_MAX - 1}, {"9223372036854775807", INT64_MAX},
      {"9223372036854775808", std::nullopt},  {"-9223372036854775807", INT64_MIN + 1},
      {"-9223372036854775808", INT64_MIN},    {"-9223372036854775809", std::nullopt},
      {"18446744073709551615", std::nullopt}, {"18446744073709551616", std::nullopt},
  };
  for (const auto& c : cases) {
    const std::string number(c.text), text = "{\"i\":" + number + ",\"a\":[" + number + "]}";
    const std::optional<JsonRecord> record = JsonlReader(text, "f").next();
    ASSERT_TRUE(record.has_value());
    if (c.value) {
      EXPECT_EQ(record->integer("i"), *c.value);
      EXPECT_EQ(record->integers("a"), std::vector<int64_t>{*c.value});
    } else {
      EXPECT_CONTAINS(message_of<FormatError>([&] { record->integer("i"); }),
                      "it is another number");
      EXPECT_CONTAINS(message_of<FormatError>([&] { record->integers("a"); }),
                      "holds another number");
    }
  }
}

TEST(Jsonl, ALineEndsBeforeItsEndHoweverTheTextDoes) {
  const auto lines_of = [](const std::string& text) {
    std::vector<int64_t> lines;
    JsonlReader reader(text, "f");
    while (const std::optional<JsonRecord> record = reader.next()) lines.push_back(record->line());
    return lines;
  };
  using Lines = std::vector<int64_t>;
  for (const std::string end : {"", "\n", "\r\n", "\n\n", "\r\n\r\n", "\n ", "\n\t\n"}) {
    EXPECT_EQ(lines_of("{\"a\":1}\n{\"b\":2}" + end), (Lines{1, 2}));
    EXPECT_EQ(lines_of("\n{}" + end), Lines{2});
    EXPECT_EQ(lines_of("\xEF\xBB\xBF{}" + end), Lines{1});
    EXPECT_EQ(lines_of("\xEF\xBB\xBF" + end), Lines());
    EXPECT_EQ(lines_of(end), Lines());
  }
  EXPECT_EQ(lines_of("{}\r"), Lines{1});
  // Of a mistake the first, a middle and the last byte of a line, and the one behind it.
  const struct {
    std::string line;
    int offset;
  } mistakes[] = {{"x", 3}, {"{,}", 4}, {"{}x", 5}, {"{", 4}};
  for (const auto& mistake : mistakes) {
    for (const std::string end : {"", "\n"}) {
      const std::string message =
          message_of<FormatError>([&] { lines_of("{}\n" + mistake.line + end); });
      EXPECT_CONTAINS(message, "line 2 (byte offset " + std::to_string(mistake.offset) + ")");
    }
  }
}

TEST(Jsonl, DeepNestingDoesNotOverflowTheStack) {
  const std::string deep = "{\"a\":" + std::string(1 << 20, '[') + std::string(1 << 20, ']') + "}";
  JsonlReader good(deep, "f");
  EXPECT_TRUE(good.next().has_value());
  const std::string open = "{\"a\":" + std::string(1 << 20, '[');
  JsonlReader bad(open, "f");
  EXPECT_THROW(bad.next(), FormatError);
}

// ---- IDX ----------------------------------------------------------------------------------------

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

std::string idx_bytes(int type, const std::vector<uint32_t>& sizes, const std::string& elements) {
  std::string out = {0, 0, static_cast<char>(type), static_cast<char>(sizes.size())};
  for (const uint32_t size : sizes) {
    for (int shift = 24; shift >= 0; shift -= 8) out += static_cast<char>(size >> shift);
  }
  return out + elements;
}

std::string gzip(const std::string& text) {
  z_stream stream = {};
  EXPECT_EQ(deflateInit2(&stream, 9, Z_DEFLATED, 16 + MAX_WBITS, 9, Z_DEFAULT_STRATEGY), Z_OK);
  std::string out(deflateBound(&stream, text.size()) + 64, 0);
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  EXPECT_EQ(deflate(&stream, Z_FINISH), Z_STREAM_END);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}

TEST(Idx, ReadsMnist) {
  REQUIRE_DATA();
  const Tensor images = read_idx(data_path("mnist/t10k-images-idx3-ubyte.gz"));
  EXPECT_EQ(images.shape(), (Shape{10000, 28, 28}));
  EXPECT_EQ(images.dtype(), kU8);
  double sum = 0;
  for (int64_t i = 0; i < images.numel(); ++i) sum += images.data_as<uint8_t>()[i];
  EXPECT_NEAR(sum / static_cast<double>(images.numel()) / 255, 0.1325, 5e-5);
  const Tensor labels = read_idx(data_path("mnist/t10k-labels-idx1-ubyte.gz"));
  std::vector<int> counts(10);
  for (const int64_t label : labels.to_vector<int64_t>()) ++counts.at(static_cast<size_t>(label));
  EXPECT_EQ(counts, (std::vector<int>{980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009}));
}

TEST(Idx, EveryElementTypePlainAndCompressed) {
  const struct {
    int type;
    std::string elements;
    DType dtype;
    std::vector<double> values;
  } cases[] = {
      {0x08, {1, static_cast<char>(0xFF)}, kU8, {1, 255}},
      {0x09, {1, static_cast<char>(0xFF)}, kI32, {1, -1}},
      {0x0B, {1, 2, static_cast<char>(0xFF), static_cast<char>(0xFE)}, kI32, {258, -2}},
      {0x0C,
       {0, 0, 1, 0, static_cast<char>(0xFF), static_cast<char>(0xFF), static_cast<char>(0xFF),
        static_cast<char>(0xFF)},
       kI32,
       {256, -1}},
      {0x0D,
       {0x3F, static_cast<char>(0x80), 0, 0, static_cast<char>(0xC0), 0, 0, 0},
       kF32,
       {1, -2}},
      {0x0E,
       {0x3F, static_cast<char>(0xF0), 0, 0, 0, 0, 0, 0, static_cast<char>(0xC0), 0, 0, 0, 0, 0, 0,
        0},
       kF64,
       {1, -2}},
  };
  for (const auto& c : cases) {
    const std::string plain = idx_bytes(c.type, {2, 1}, c.elements);
    const std::string members = gzip(plain.substr(0, 5)) + gzip("") + gzip(plain.substr(5));
    for (const std::string& bytes : {plain, gzip(plain), members}) {
      const Tensor tensor = parse_idx(bytes_of(bytes), "t.idx");
      EXPECT_EQ(tensor.dtype(), c.dtype);
      EXPECT_EQ(tensor.shape(), (Shape{2, 1}));
      EXPECT_EQ(tensor.to_vector<double>(), c.values);
    }
  }
  EXPECT_EQ(parse_idx(bytes_of(idx_bytes(8, {0, 5}, "")), "t").shape(), (Shape{0, 5}));
}

TEST(Idx, HasAsManyBytesAsItsSizesSayAndNotOneMoreOrFewer) {
  const std::pair<int, int> types[] = {{0x08, 1}, {0x09, 1}, {0x0B, 2},
                                       {0x0C, 4}, {0x0D, 4}, {0x0E, 8}};
  for (const auto& [type, width] : types) {
    for (const uint32_t size : {0, 1, 3}) {
      const auto file = [&](int more) {
        return idx_bytes(
            type, {size},
            std::string(static_cast<size_t>(static_cast<int>(size) * width + more), 'x'));
      };
      EXPECT_EQ(parse_idx(bytes_of(file(0)), "t").shape(), Shape{size});
      EXPECT_EQ(parse_idx(bytes_of(gzip(file(0))), "t").shape(), Shape{size});
      const auto error = [](const std::string& bytes) {
        return message_of<FormatError>([&] { parse_idx(bytes_of(bytes), "t"); });
      };
      const std::string end = "at byte " + std::to_string(file(0).size());
      EXPECT_CONTAINS(error(file(1)), end);
      EXPECT_CONTAINS(error(gzip(file(1))), end);
      if (size == 0) continue;
      EXPECT_CONTAINS(error(file(-1)), "more than the file can hold");
      EXPECT_CONTAINS(error(gzip(file(-1))), "ends inside its elements");
    }
  }
  for (const std::string start : {"\x1F", "\x1F\x8B"}) {
    EXPECT_THROW(parse_idx(bytes_of(start), "t"), FormatError);
  }
}

TEST(Idx, HasOneToSixteenDimensions) {
  const auto file = [](size_t dims) { return idx_bytes(8, std::vector<uint32_t>(dims, 1), "x"); };
  EXPECT_THROW(parse_idx(bytes_of(file(0)), "t"), FormatError);
  EXPECT_EQ(parse_idx(bytes_of(file(1)), "t").shape(), Shape{1});
  EXPECT_EQ(parse_idx(bytes_of(file(15)), "t").dim(), 15);
  EXPECT_EQ(parse_idx(bytes_of(file(16)), "t").dim(), 16);
  EXPECT_THROW(parse_idx(bytes_of(file(17)), "t"), FormatError);
  // A header ends with its last size.
  EXPECT_CONTAINS(
      message_of<FormatError>([&] { parse_idx(bytes_of(file(16)).first(4 + 63), "t"); }),
      "ends inside its header");
  EXPECT_CONTAINS(
      message_of<FormatError>([&] { parse_idx(bytes_of(file(16)).first(4 + 64), "t"); }),
      "more than the file can hold");
}

TEST(Idx, BesideASizeOfZeroTheOthersMayBeTwoToTheSixtieth) {
  const uint32_t half = uint32_t{1} << 30;
  for (const uint32_t last : {half - 1, half}) {
    EXPECT_EQ(parse_idx(bytes_of(idx_bytes(8, {0, half, last}, "")), "t").shape(),
              (Shape{0, half, last}));
  }
  for (const std::vector<uint32_t>& sizes :
       {std::vector<uint32_t>{0, half, half + 1}, std::vector<uint32_t>{0, half, half, 2}}) {
    EXPECT_CONTAINS(
        message_of<FormatError>([&] { parse_idx(bytes_of(idx_bytes(8, sizes, "")), "t"); }),
        "more than can be addressed");
  }
}

TEST(Idx, TheDensestCompressionIsBelievedAndADenserOneIsNot) {
  const uint32_t size = uint32_t{1} << 24;
  const std::string dense = gzip(idx_bytes(8, {size}, std::string(size, '\0')));
  EXPECT_GT(size / dense.size(), 1020U) << "of at most 1032";
  EXPECT_EQ(parse_idx(bytes_of(dense), "t").numel(), size);
  // A header alone: what 64 bytes could unfold to, and what they could not.
  const auto promise = [](uint32_t elements) {
    const std::string bytes = gzip(idx_bytes(8, {elements}, ""));
    EXPECT_LE(bytes.size(), 64U);
    return message_of<FormatError>([&] { parse_idx(bytes_of(bytes), "t"); });
  };
  EXPECT_CONTAINS(promise(1032), "ends inside its elements");
  EXPECT_CONTAINS(promise(65 * 1032 + 1), "more than the file can hold");
}

TEST(Idx, DamageIsAFormatErrorWithFileAndPlace) {
  const std::string good = idx_bytes(8, {2, 3}, "abcdef");
  const uint32_t huge = 0xFFFFFFFF;
  const struct {
    std::string bytes, part;
  } cases[] = {
      {"", "ends inside its header"},
      {good.substr(0, 3), "ends inside its header"},
      {good.substr(0, 7), "ends inside its header"},
      {good.substr(0, good.size() - 1), "more than the file can hold"},
      {good + "x", "at byte 18"},
      {std::string("PK") + good, "two zero bytes"},
      {idx_bytes(7, {2}, "ab"), "element type"},
      {idx_bytes(8, {}, ""), "number of dimensions"},
      {idx_bytes(8, std::vector<uint32_t>(17, 1), "a"), "number of dimensions"},
      {idx_bytes(8, {huge, huge, huge, huge}, ""), "more than the file can hold"},
      {idx_bytes(8, {huge, 1}, "abc"), "more than the file can hold"},
      // Found by fuzzing: a size of 0 hid the overflow of the others.
      {idx_bytes(8, {0, huge, huge, huge}, ""), "more than can be addressed"},
      {gzip(idx_bytes(8, {0, huge, huge, huge}, "")), "more than can be addressed"},
      {idx_bytes(8, {65536, 65536, 65536, 65536}, "abc"), "more than the file can hold"},
      {idx_bytes(0x0E, {2}, "12345678"), "more than the file can hold"},
      {gzip(good) + "x", "after the end of the gzip stream"},
      {gzip(good) + gzip("x"), "after its last element"},
      {gzip(good) + gzip("").substr(0, 12), "before the end mark"},
      {gzip(good + "x"), "after its last element"},
      {gzip(good.substr(0, good.size() - 1)), "ends inside its elements"},
      {gzip(idx_bytes(8, {huge, huge}, "abc")), "more than the file can hold"},
      {std::string("\x1F\x8B nonsense"), "gzip"},
      {gzip(good).substr(0, 20), "t.idx"},
      {gzip(good).substr(0, gzip(good).size() - 4), "t.idx"},
  };
  for (const auto& c : cases) {
    const std::string message =
        message_of<FormatError>([&] { parse_idx(bytes_of(c.bytes), "t.idx"); });
    EXPECT_CONTAINS(message, c.part);
    EXPECT_CONTAINS(message, "t.idx");
  }
  std::string broken = gzip(std::string(idx_bytes(8, {1000}, std::string(1000, 'q'))));
  broken[broken.size() - 6] ^= 1;  // the stream's checksum
  EXPECT_THROW(parse_idx(bytes_of(broken), "t.idx"), FormatError);
  EXPECT_THROW(read_idx("/none.idx"), IoError);
}

// ---- Token files --------------------------------------------------------------------------------

TEST_F(TokenFiles, AFileThatIsShortenedMeanwhileIsAnErrorAndOneThatIsReplacedIsNot) {
  const auto write = [&](const std::string& name, int count) {
    TokenFileWriter writer(path(name), 256);
    writer.append(std::vector<TokenId>(static_cast<size_t>(count), 7));
    writer.commit();
  };
  write("shortened.tokens", 10000);
  const TokenArray tokens = TokenArray::open(path("shortened.tokens"));
  write("shortened.tokens", 10);  // another file of that name
  int64_t id = 0;
  tokens.copy(9999, 1, &id);
  EXPECT_EQ(id, 7);
  const TokenArray both[] = {TokenArray::open(path("shortened.tokens")),
                             TokenArray::open_raw(path("shortened.tokens")).slice(1, 5)};
  fs::resize_file(path("shortened.tokens"), 20);
  for (const TokenArray& one : both) {
    const std::string message = message_of<FormatError>([&] { one.copy(0, 1, &id); });
    EXPECT_TRUE(mentions(message, "had 84 bytes when it was opened and has 20 now")) << message;
  }
}

TEST_F(TokenFiles, WhatIsWrittenIsRead) {
  for (const int64_t vocab_size :
       {int64_t{256}, int64_t{50257}, int64_t{65536}, int64_t{65537}, int64_t{0}}) {
    std::vector<TokenId> ids;
    std::mt19937 random(5);
    for (int i = 0; i < 1000; ++i) {
      ids.push_back(static_cast<TokenId>(random() % (vocab_size ? vocab_size : 1 << 30)));
    }
    TokenFileWriter writer(path("a.tokens"), vocab_size);
    writer.append(std::span(ids).first(300));
    writer.append({});
    writer.append(std::span(ids).subspan(300));
    EXPECT_EQ(writer.size(), 1000);
    writer.commit();
    EXPECT_EQ(fs::file_size(path("a.tokens")),
              64 + 1000 * (vocab_size > 0 && vocab_size <= 65536 ? 2u : 4u));

    const TokenArray tokens = TokenArray::open(path("a.tokens"));
    ASSERT_EQ(tokens.size(), 1000);
    EXPECT_EQ(tokens.vocab_size(), vocab_size);
    for (int64_t i = 0; i < 1000; ++i) ASSERT_EQ(tokens[i], ids[static_cast<size_t>(i)]);
    int64_t window[10];
    tokens.slice(500, 700).copy(190, 10, window);
    for (int64_t i = 0; i < 10; ++i) EXPECT_EQ(window[i], ids[static_cast<size_t>(690 + i)]);
    EXPECT_THROW(tokens.copy(991, 10, window), IndexError);
    EXPECT_THROW(tokens.copy(-1, 1, window), IndexError);
    EXPECT_THROW(tokens.copy(INT64_MAX, INT64_MAX, window), IndexError);
    EXPECT_THROW(tokens.slice(5, 4), IndexError);
    EXPECT_THROW(tokens.slice(0, 1001), IndexError);
  }
}

TEST_F(TokenFiles, TheLastIdIsThereAndTheOneBehindIsNot) {
  const TokenArray tokens = TokenArray::from_ids(std::vector<TokenId>{5, 6, 7}, 8);
  int64_t window[4] = {};
  tokens.copy(0, 3, window);
  EXPECT_EQ(window[2], 7);
  tokens.copy(3, 0, window);
  EXPECT_EQ(tokens.slice(1, 3).size(), 2);
  EXPECT_EQ(tokens.slice(3, 3).size(), 0);
  EXPECT_THROW(tokens.copy(0, 4, window), IndexError);
  EXPECT_THROW(tokens.copy(1, 3, window), IndexError);
  EXPECT_THROW(tokens.copy(4, 0, window), IndexError);
  EXPECT_THROW(tokens.slice(0, 4), IndexError);
  EXPECT_THROW(tokens.slice(4, 4), IndexError);
  EXPECT_THROW(tokens.slice(2, 1), IndexError);
  EXPECT_THROW(TokenArray::from_ids(std::vector<TokenId>{8}, 8), ValueError);
}

TEST_F(TokenFiles, AnEmptyOneIsValid) {
  write_token_file(path("a.tokens"), {}, 256);
  EXPECT_EQ(TokenArray::open(path("a.tokens")).size(), 0);
  EXPECT_EQ(TokenArray::from_ids({}).size(), 0);
  EXPECT_EQ(TokenArray().slice(0, 0).size(), 0);
}

TEST_F(TokenFiles, RawFilesOfBareIdsAreRead) {
  write_file_atomically(path("train.bin"), std::string("\x01\x00\xFF\xFF", 4));
  const TokenArray tokens = TokenArray::open_raw(path("train.bin"));
  ASSERT_EQ(tokens.size(), 2);
  EXPECT_EQ(tokens[0], 1);
  EXPECT_EQ(tokens[1], 65535);
  write_file_atomically(path("odd.bin"), "abc");
  EXPECT_CONTAINS(message_of<FormatError>([&] { TokenArray::open_raw(path("odd.bin")); }),
                  "multiple of 2");
  EXPECT_THROW(TokenArray::open_raw(path("odd.bin"), 3), ValueError);
}

TEST_F(TokenFiles, IdsOutsideTheVocabularyAreNotWritten) {
  TokenFileWriter writer(path("a.tokens"), 10);
  EXPECT_THROW(writer.append(std::vector<TokenId>{3, 10}), ValueError);
  EXPECT_THROW(writer.append(std::vector<TokenId>{-1}), ValueError);
  EXPECT_THROW(TokenFileWriter(path("b.tokens"), -1), ValueError);
  EXPECT_THROW(TokenArray::from_ids(std::vector<TokenId>{-1}), ValueError);
  EXPECT_FALSE(fs::exists(path("a.tokens")));
}

TEST_F(TokenFiles, AnyChangedByteAndAnyCutIsAFormatError) {
  const std::vector<TokenId> ids = {1, 2, 3, 4, 5};
  write_token_file(path("a.tokens"), ids, 256);
  const MappedFile file(path("a.tokens"));
  const std::string good(file.text());
  for (size_t i = 0; i < good.size(); ++i) {
    std::string bad = good;
    bad[i] = static_cast<char>(bad[i] ^ 0x41);
    EXPECT_THROW(TokenArray::parse(bytes_of(bad), "a.tokens", true), FormatError) << i;
  }
  for (size_t length = 0; length < good.size(); ++length) {
    EXPECT_THROW(TokenArray::parse(bytes_of(good.substr(0, length)), "a.tokens", true),
                 FormatError);
  }
  EXPECT_THROW(TokenArray::parse(bytes_of(good + "x"), "a.tokens", true), FormatError);
  const std::string message = message_of<FormatError>(
      [&] { TokenArray::parse(bytes_of("TSTOKENS" + std::string(64, 9)), "b", true); });
  EXPECT_CONTAINS(message, "version (byte 8)");
  EXPECT_THROW(TokenArray::open(path("none")), IoError);
}

}  // namespace
}  // namespace tessera::data::test_data_files
